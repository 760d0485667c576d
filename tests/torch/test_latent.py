"""``qv=`` on torch tensors, with the emulator in the GPU's place: values are part of the keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
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


def test_kernels_for_qv_are_prepared(emulated: Any) -> None:
    """A CUDA graph may then capture the call at once, whether or not values have a width that asks for qv."""
    at = Latent()
    k, v, qv = at.k, at.v[..., :64], at.qv[..., :64]
    sizes = {"batch_size": 2, "max_seqlen_q": 3, "max_seqlen_k": 112, "num_heads_q": HEADS, "num_heads_kv": 1}
    dims: dict[str, Any] = {"headdim": DIM, "qkv_dtype": torch.float16, "headdim_v": 64, "has_qv": True}
    fa3.get_scheduler_metadata(**sizes, **dims, cache_seqlens=at.seqlens, page_size=PAGE, causal=True)
    assert [spec.qv for spec in emulated] == [True]
    fa3.flash_attn_with_kvcache(at.q, k, v, qv=qv, cache_seqlens=at.seqlens, page_table=at.table, causal=True)
    assert len(emulated) == 1


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


class Rows:
    """Latent vectors that lie behind one another, and an oracle for sequences of them."""

    def __init__(self, lengths: tuple[int, ...], queries: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=generator).half()

        self.lengths, self.queries = lengths, queries
        latents = normal(sum(lengths), 1, DIM_V + DIM)
        self.k, self.v = latents[..., DIM_V:], latents[..., :DIM_V]
        self.q, self.qv = normal(sum(queries), HEADS, DIM), normal(sum(queries), HEADS, DIM_V)
        self.starts_q, self.starts_k = ints(*accumulate(queries, initial=0)), ints(*accumulate(lengths, initial=0))

    def expected(self, used: tuple[int, ...], **rules: Any) -> tuple[Any, Any]:
        """O and L by the oracle, packed."""
        spec = fg.AttentionSpec(DIM, head_dim_v=DIM_V, dtype="fp16", qv=True, cache="contiguous", direction="forward")
        spec, found, key = replace(spec, **rules), [], 0
        for count, length, each in zip(self.queries, self.lengths, used, strict=True):
            query = sum(len(o[0]) for o, _ in found)
            q, qv = (x[None, query : query + count].numpy() for x in (self.q, self.qv))
            k, v = (x[None, key : key + each].numpy() for x in (self.k, self.v))
            found.append(fg.oracle.forward(spec, q, k, v, qv=qv))
            key += length
        outs, lses = zip(*found, strict=True)
        return torch.from_numpy(np.concatenate([o[0] for o in outs])), torch.from_numpy(
            np.concatenate([lse[0] for lse in lses], 1)
        )


RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"mask": fg.causal()}),
    "window and cap": ({"window_size": (9, 0), "softcap": 2.0}, {"mask": fg.window(9, 0), "score": fg.softcap(2.0)}),
    "chunks": ({"causal": True, "attention_chunk": 7}, {"mask": fg.causal() & fg.chunked(7)}),
}


@pytest.mark.parametrize("name", RULES)
def test_dense_and_packed_functions_take_qv(emulated: Any, name: str) -> None:
    options, rules = RULES[name]
    same, rows = Rows((30, 30), (5, 5)), Rows((40, 3, 21), (2, 3, 4))
    exact, exact_lse = same.expected((30, 30), **rules)
    dense = [x.unflatten(0, (2, -1)) for x in (same.q, same.k, same.v, same.qv)]
    for _ in range(2):  # found out, and replayed
        out, lse = fa3.flash_attn_func(*dense[:3], qv=dense[3], return_attn_probs=True, **options)
        assert close(out.flatten(0, 1), exact)
        assert close(lse.transpose(0, 1).flatten(1), exact_lse)
    where = rows.starts_q, rows.starts_k, 4, 40
    for used in (None, (33, 3, 16)):
        exact, exact_lse = rows.expected(used or rows.lengths, **rules)
        more = {"seqused_k": None if used is None else ints(*used), "return_attn_probs": True}
        out, lse = fa3.flash_attn_varlen_func(rows.q, rows.k, rows.v, *where, qv=rows.qv, **more, **options)
        assert close(out, exact)
        assert close(lse, exact_lse)
    assert torch.equal(
        fa3.flash_attn_varlen_func(rows.q, rows.k, rows.v, *where, qv=rows.qv, **options),
        fa3.flash_attn_varlen_func(rows.q, rows.k, rows.v, *where, qv=rows.qv, **options),
    )


def test_functions_with_qv_compile_in_one_graph(emulated: Any) -> None:
    rows = Rows((40, 3, 21), (2, 3, 4))

    def attend(q: Any, k: Any, v: Any, qv: Any) -> Any:
        return fa3.flash_attn_varlen_func(q, k, v, rows.starts_q, rows.starts_k, 4, 40, qv=qv, causal=True)

    given = rows.q, rows.k, rows.v, rows.qv
    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(*given), attend(*given))


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
        (
            lambda at: fa3.flash_attn_func(at.q, at.k[:3], at.v[:3], qv=at.qv),
            "k has batch 3 and q has batch 2; they must be equal",
        ),
        (
            lambda at: fa3.flash_attn_func(at.q, at.k[:2].float(), at.v[:2], qv=at.qv),
            r"k is torch\.float32 and q is torch\.float16; they must be equal",
        ),
        (
            lambda at: fa3.flash_attn_func(at.q, at.k[:2], at.v[:2], qv=at.qv, v_descale=torch.ones(2, 1)),
            "v_descale does not go with qv, whose kernels have 16-bit inputs; pass None",
        ),
        (
            lambda at: fa3.flash_attn_func(at.q, at.k[:2], at.v[:2], qv=at.qv.clone().requires_grad_()),
            r"attention with qv has no gradients; call it under torch\.no_grad\(\), or train with q and qv",
        ),
        (
            lambda at: fa3.flash_attn_varlen_func(
                at.q[0], at.k[0], at.v[0], ints(0, 3), ints(0, 16), 3, 16, ints(2), qv=at.qv[0]
            ),
            "seqused_q does not go with qv; pack the queries that take part",
        ),
        (
            lambda at: fa3.flash_attn_varlen_func(
                at.q[0], at.k[0], at.v[0], ints(0, 3), ints(0, 16, 16), 3, 16, qv=at.qv[0]
            ),
            r"cu_seqlens_k is torch\.int32 of shape \(3,\) and cu_seqlens_q torch\.int32 of shape \(2,\)",
        ),
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
