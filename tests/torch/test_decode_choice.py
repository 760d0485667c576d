"""Calls with few queries and many keys run by the decode kernel, with and without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa2 = pytest.importorskip("flashgen.compat.flash_attn")
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface")

from tests.torch.caches import Caches, causal, ints  # noqa: E402

KEYS = 300


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The roles of the kernels that run."""
    from flashgen.launch.call.prepared import Call

    roles: list[str] = []
    run = Call.run

    def noted(self: Call, *arguments: Any) -> Any:
        roles.extend(step.kernel.plan.role for step in self.steps)
        return run(self, *arguments)

    monkeypatch.setattr(Call, "run", noted)
    with fg.torch.emulate_cpu():
        yield roles


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[fg.KVCache]:
    """What kernels are told of their caches."""
    from flashgen.launch.call.call_options import SideArguments

    seen: list[fg.KVCache] = []
    of = SideArguments.of

    def noted(self: Any, dropout: Any, sequences: Any, cache: Any = None, stored: Any = None, **more: Any) -> Any:
        seen.append(cache)
        return of(self, dropout, sequences, cache, stored, **more)

    monkeypatch.setattr(SideArguments, "of", noted)
    return seen


def halves(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def tensors(len_q: int = 1, len_kv: int = KEYS) -> Any:
    return halves(2, len_q, 4, 16), halves(2, len_kv, 2, 16, seed=1), halves(2, len_kv, 2, 16, seed=2)


CALLS = {
    "attention": lambda q, k, v: fg.attention(q, k, v, mask=fg.causal(), return_lse=True),
    "heads first": lambda q, k, v: heads_first(q, k, v),
    "compiled": lambda q, k, v: torch.compile(CALLS["attention"], fullgraph=True, backend="aot_eager")(q, k, v),
    "flash-attn": lambda q, k, v: fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2],
    "FlashAttention-3": lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
}


def heads_first(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = fg.attention(q, k, v, mask=fg.causal(), return_lse=True, layout="bhsd")
    return out.transpose(1, 2), lse


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_few_queries_and_many_keys_are_for_the_decode_kernel(launched: list[str], reference: Any, call: Any) -> None:
    q, k, v = tensors(3)
    exact, exact_lse = reference(q, k, v, causal(3, KEYS))
    for _ in range(2):  # found out, and replayed
        out, lse = call(q, k, v)
        assert torch.allclose(out.double(), exact, atol=5e-3)
        assert torch.allclose(lse.double(), exact_lse, atol=5e-3)
    assert launched == ["decode"] * 2


def test_captured_tensors_and_limits_from_the_first_key_mean_the_same(launched: list[str]) -> None:
    q, k, v = tensors(3)
    slopes, allowed = torch.rand(4), torch.rand(2, 1, 1, KEYS) < 0.5
    mask = fg.causal(align="top-left")
    for options in ({"score": fg.alibi(slopes)}, {"mask": allowed}, {"mask": mask}, {"mask": fg.window(20, 0)}):
        found = fg.attention(q, k, v, **options)
        # So many queries are for the other kernel; its first rows are those of a mask from the first key.
        many = torch.cat([q, q.new_zeros(2, 20, 4, 16)], 1) if options.get("mask") is mask else q.repeat(1, 8, 1, 1)
        rows = slice(0, 3) if options.get("mask") is mask else slice(-3, None)
        expected = fg.attention(many, k, v, **options)[:, rows]
        assert torch.allclose(found.float(), expected.float(), atol=3e-3)
    assert [role for role in launched if role != "survey"] == ["decode", "forward"] * 4


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_attention(launched: list[str], reference: Any, compiled: bool) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, mask=fg.causal())

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    inputs = [x.requires_grad_() for x in tensors(3)]
    exact = reference(*inputs, causal(3, KEYS))[0]
    for _ in range(2):
        out = call(*inputs)
        assert torch.allclose(out.double(), exact, atol=5e-3)
        found = torch.autograd.grad(out.float().square().sum(), inputs)
        expected = torch.autograd.grad(exact.square().sum(), inputs, retain_graph=True)
        assert all(torch.allclose(a.double(), b.double(), atol=2e-2) for a, b in zip(found, expected, strict=True))
    assert [role for role in launched if role in ("decode", "forward")] == ["decode"] * 2


@pytest.mark.parametrize("why", ["single precision", "dropout", "many queries", "few keys"])
def test_other_calls_keep_their_kernel(launched: list[str], why: str) -> None:
    q, k, v = tensors(24 if why == "many queries" else 1, 40 if why == "few keys" else KEYS)
    if why == "single precision":
        q, k, v = q.float(), k.float(), v.float()
    fg.attention(q, k, v, dropout_p=0.1 if why == "dropout" else 0.0)
    assert "decode" not in launched


@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_takes_a_cache(launched: list[str], reference: Any, page_size: int | None, compiled: bool) -> None:
    at = Caches(page_size)
    places = {"batch_idx": at.rows} if page_size is None else {"block_table": at.table}

    def attend(q: Any, k: Any, v: Any, seqlens: Any) -> Any:
        return fg.attention(q, k, v, mask=fg.causal(), cache=fg.KVCache(seqlens, **places), return_lse=True)

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    exact, exact_lse = at.expected(at.k[:, :0], reference, at.q, causal)
    for _ in range(2):
        out, lse = call(at.q, at.k_cache, at.v_cache, at.seqlens)
        assert torch.allclose(out.double(), exact, atol=5e-3)
        assert torch.allclose(lse.double(), exact_lse, atol=5e-3)
    assert launched == ["decode"] * 2
    packed = fg.KVCache(at.seqlens, **places, cu_seqlens_q=ints(0, 3, 6), max_seqlen_q=3)
    again = fg.attention(at.q.flatten(0, 1), at.k_cache, at.v_cache, mask=fg.causal(), cache=packed)
    assert torch.allclose(again.float(), out.flatten(0, 1).float(), atol=2e-3)
    heads = (x.transpose(1, 2) for x in (at.q, at.k_cache, at.v_cache))
    cache = fg.KVCache(at.seqlens, **places)
    assert torch.equal(fg.attention(*heads, mask=fg.causal(), cache=cache, layout="bhsd").transpose(1, 2), out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": 3}, "cache=3 is not a KVCache"),
        ({"dropout_p": 0.5}, r"dropout_p=0\.5 does not go with cache"),
        ({"sequences": 1}, "sequences does not go with cache"),
        ({"q": torch.zeros(3, 4, 16).half()}, r"q has shape \(3, 4, 16\); it must have 4 dimensions"),
        ({"k": [1]}, r"k is a list; pass a torch\.Tensor"),
    ],
)
def test_what_does_not_go_with_a_cache_is_refused(launched: list[str], options: Any, words: str) -> None:
    at = Caches()
    given = {"q": at.q, "k": at.k_cache, "v": at.v_cache, "cache": fg.KVCache(at.seqlens, at.rows), **options}
    with pytest.raises(fg.ArgumentError, match=words):
        fg.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize("compiled", [False, True])
def test_callers_may_ask_for_results_that_do_not_depend_on_the_batch(
    launched: list[str], caches: list[fg.KVCache], compiled: bool
) -> None:
    at = Caches()
    fixed = fg.KVCache(at.seqlens, at.rows, batch_invariant=True)
    packed = {"cu_seqlens_q": ints(0, 3, 6), "max_seqlen_q": 3, "rotary_cos": at.cos, "rotary_sin": at.sin}
    new = {"k": at.k, "v": at.v}
    rest = {"cache_seqlens": at.seqlens, **at.places, "causal": True}
    steps: list[Any] = [
        lambda q: fg.attention(q, at.k_cache, at.v_cache, cache=fixed),
        lambda q: fa2.flash_attn_with_kvcache(q, at.k_cache, at.v_cache, **new, **rest, batch_invariant=True),
        lambda q: fa3.flash_attn_with_kvcache(q, at.k_cache, at.v_cache, **new, **rest, batch_invariant=True),
        lambda q: fa3.flash_attn_with_kvcache(
            q.flatten(0, 1), at.k_cache, at.v_cache, **new, **rest, **packed, batch_invariant=True
        ),
    ]
    for step in steps:
        caches.clear()
        (torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step)(at.q)
        assert [cache.batch_invariant for cache in caches if cache is not None] == [True]
    with pytest.raises(fg.ArgumentError, match=r"num_splits=2 depends on the batch"):
        fa2.flash_attn_with_kvcache(at.q, at.k_cache, at.v_cache, **rest, num_splits=2, batch_invariant=True)


def test_metadata_of_a_scheduler_has_the_kernels_ready(emulated: list[Any]) -> None:
    """A CUDA graph may then capture the call at once."""
    at = Caches(5)
    sizes = {"batch_size": 2, "max_seqlen_q": 3, "max_seqlen_k": 40, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 16}
    rules: dict[str, Any] = {"causal": True, "window_size": (6, 0)}
    for _ in range(2):
        metadata = fa3.get_scheduler_metadata(
            **sizes, cache_seqlens=at.seqlens, qkv_dtype=torch.float16, page_size=5, **rules
        )
        assert len(emulated) == 1
    options = {"cache_seqlens": at.seqlens, "page_table": at.table, **rules}
    out = fa3.flash_attn_with_kvcache(at.q, at.k_cache, at.v_cache, **options, scheduler_metadata=metadata)
    assert len(emulated) == 1
    assert torch.equal(out, fa3.flash_attn_with_kvcache(at.q, at.k_cache, at.v_cache, **options))
    # That of FlashAttention-3 knows no cap.
    capped = {"softcap": 15.0, **rules}
    fa3.get_scheduler_metadata(**sizes, cache_seqlens=at.seqlens, qkv_dtype=torch.float16, page_size=5, **capped)
    assert len(emulated) == 2
    fa3.flash_attn_with_kvcache(at.q, at.k_cache, at.v_cache, **options, softcap=15.0)
    assert len(emulated) == 2
    # Engines copy it into a buffer of their own.
    buffer = torch.zeros(9, dtype=torch.int32)
    buffer[: metadata.shape[0]] = metadata
