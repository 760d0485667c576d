"""``qv=`` on torch tensors, with the emulator in the GPU's place: values are part of the keys."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface")

from tests.torch.caches import causal, ints  # noqa: E402

DIM, DIM_V, PAGE, HEADS = 32, 320, 16, 8
LENGTHS = (90, 33)


class Latent:
    """Two sequences in pages of latent vectors."""

    def __init__(self, tokens: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=generator).half()

        self.pages = normal(14, PAGE, 1, DIM_V + DIM)
        self.k, self.v = self.pages[..., DIM_V:], self.pages[..., :DIM_V]
        self.q, self.qv = normal(2, tokens, HEADS, DIM), normal(2, tokens, HEADS, DIM_V)
        self.table, self.seqlens = torch.randperm(14, generator=generator).view(2, 7).int(), ints(*LENGTHS)
        self.new = normal(2, tokens, 1, DIM_V + DIM)

    def expected(self, new: Any = None, scale: float = (DIM + DIM_V) ** -0.5) -> Any:
        """O and L in float64 of causal queries."""
        found = []
        for b, length in enumerate(LENGTHS):
            latent = self.pages[self.table[b].long()].flatten(0, 1)[:length, 0]
            latent = (latent if new is None else torch.cat([latent, new[b, :, 0]])).double()
            q = torch.cat([self.qv[b], self.q[b]], -1).double().transpose(0, 1)
            scores = q @ latent.T * scale
            scores = scores.masked_fill(~causal(q.shape[1], len(latent)), float("-inf"))
            found.append(((scores.softmax(-1) @ latent[:, :DIM_V]).transpose(0, 1), scores.logsumexp(-1)))
        return [torch.stack(parts) for parts in zip(*found, strict=True)]


def close(a: Any, b: Any) -> bool:
    return bool(torch.allclose(a.double(), b, atol=4e-3))


@pytest.mark.parametrize("scale", [None, 0.1])
def test_flash_attention_3s_function_takes_qv(emulated: Any, scale: float | None) -> None:
    at = Latent()
    call: dict[str, Any] = {"cache_seqlens": at.seqlens, "page_table": at.table, "causal": True}
    call |= {"softmax_scale": scale, "return_softmax_lse": True}
    exact, exact_lse = at.expected(scale=scale or (DIM + DIM_V) ** -0.5)
    # The second call is replayed.
    for _ in range(2):
        out, lse = fa3.flash_attn_with_kvcache(at.q, at.k, at.v, qv=at.qv, **call)
        assert close(out, exact)
        assert close(lse, exact_lse)
    assert [spec.qv for spec in emulated] == [True]
    # Other queries for the values of the same call.
    again = fa3.flash_attn_with_kvcache(at.q, at.k, at.v, qv=0.5 * at.qv, **call)
    assert not close(again[0], exact)


def test_new_latent_vectors_are_put_into_the_cache_and_attended_to(emulated: Any) -> None:
    at = Latent()
    exact, _ = at.expected(at.new)
    new = at.new[..., DIM_V:], at.new[..., :DIM_V]
    call: dict[str, Any] = {"cache_seqlens": at.seqlens, "page_table": at.table, "causal": True}
    assert close(fa3.flash_attn_with_kvcache(at.q, at.k, at.v, *new, qv=at.qv, **call), exact)
    rows = at.pages[at.table[1].long()].flatten(0, 1)
    assert torch.equal(rows[LENGTHS[1] : LENGTHS[1] + 3], at.new[1])


def test_packed_queries_bring_packed_qv(emulated: Any) -> None:
    at = Latent()
    exact, _ = at.expected()
    # The first sequence has two of its three tokens.
    more = {"cu_seqlens_q": ints(0, 2, 5), "max_seqlen_q": 3}
    q, qv = (x.flatten(0, 1)[1:] for x in (at.q, at.qv))
    out = fa3.flash_attn_with_kvcache(
        *(q, at.k, at.v), qv=qv, cache_seqlens=at.seqlens, page_table=at.table, causal=True, **more
    )
    assert close(out, exact.flatten(0, 1)[1:])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_attention_takes_qv_with_a_cache(emulated: Any, layout: str) -> None:
    at = Latent()
    cache = fg.KVCache(at.seqlens, block_table=at.table)
    swapped = [x.transpose(1, 2) if layout == "bhsd" else x for x in (at.q, at.k, at.v, at.qv)]
    q, k, v, qv = swapped
    out = fg.attention(q, k, v, qv=qv, mask=fg.causal(), cache=cache, layout=layout)
    assert close(out.transpose(1, 2) if layout == "bhsd" else out, at.expected()[0])


def test_a_compiled_call_has_the_bits_of_an_eager_one(emulated: Any) -> None:
    at = Latent()
    call: dict[str, Any] = {"cache_seqlens": at.seqlens, "page_table": at.table, "causal": True}
    compiled = torch.compile(fa3.flash_attn_with_kvcache, backend="eager", fullgraph=True)
    eager = fa3.flash_attn_with_kvcache(at.q, at.k, at.v, qv=at.qv, **call)
    assert torch.equal(compiled(at.q, at.k, at.v, qv=at.qv, **call), eager)


def test_flops_count_three_products(emulated: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    at = Latent()
    with FlopCounterMode(display=False) as counter:
        fa3.flash_attn_with_kvcache(at.q, at.k, at.v, qv=at.qv, cache_seqlens=at.seqlens, page_table=at.table)
    assert counter.get_total_flops() == 2 * 2 * 3 * HEADS * 7 * PAGE * (DIM + 2 * DIM_V)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda at: fa3.flash_attn_func(at.q, at.q, at.q, qv=at.qv), "qv is for caches; use flash_attn_with_kvcache"),
        (lambda at: fg.attention(at.q, at.k, at.v, qv=at.qv), "qv is for a cache, whose values are part of the keys"),
        (
            lambda at: fa3.flash_attn_with_kvcache(at.q, at.k, at.v, cache_seqlens=at.seqlens, page_table=at.table),
            "qv=None, but this kernel was built with qv=True; pass the queries for the values",
        ),
        (
            lambda at: fa3.flash_attn_with_kvcache(at.q, at.k, at.v, qv=at.qv[0], page_table=at.table),
            r"qv has shape \(3, 8, 320\); it must have 4 dimensions",
        ),
        (
            lambda at: fa3.flash_attn_with_kvcache(at.q.float(), at.k.float(), at.v.float(), qv=at.qv.float()),
            "dtype='fp32' and qv=True do not go together; use dtype='bf16' or 'fp16'",
        ),
    ],
)
def test_what_is_not_done_is_refused_by_name(emulated: Any, call: Any, words: str) -> None:
    with pytest.raises((fg.ArgumentError, fg.SpecError), match=words):
        call(Latent())
