"""Caches in float8 with the other arguments of calls: ``fg.attention``, fixed splits and prepared kernels."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa2 = pytest.importorskip("flashgen.compat.flash_attn")
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface")

from tests.torch.caches import causal, ints  # noqa: E402
from tests.torch.test_decode_choice import caches, launched, tensors  # noqa: E402, F401
from tests.torch.test_kvcache_float8 import Float8Caches  # noqa: E402


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("page_size", [None, 5])
def test_attention_takes_a_float8_cache(emulated: Any, reference: Any, page_size: int | None, compiled: bool) -> None:
    at = Float8Caches(page_size)
    places = {"batch_idx": at.rows} if page_size is None else {"block_table": at.table}

    def attend(q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any) -> Any:
        cache = fg.KVCache(at.seqlens, **places, k_scale=k_scale, v_scale=v_scale)
        return fg.attention(q, k, v, mask=fg.causal(), cache=cache, return_lse=True)

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    for factor in (1.0, 1.0, 0.5):  # found out, replayed, and with other scales
        at.k_descale, at.v_descale = at.k_descale * factor, at.v_descale * factor
        out, lse = call(at.q, at.k_cache, at.v_cache, at.k_descale, at.v_descale)
        exact, exact_lse = at.attended(reference, at.seqlens.tolist(), causal)
        assert torch.allclose(out.double(), exact, atol=5e-3)
        assert torch.allclose(lse.double(), exact_lse, atol=5e-3)


def test_attention_takes_a_scale_for_each_page(emulated: Any) -> None:
    at, table = Float8Caches(5), torch.rand(30, 2) + 0.1
    where = {"seqlens": at.seqlens, "block_table": at.table}
    cache = fg.KVCache(**where, k_scale=table, v_scale=table.flip(0))
    k, v = (
        (held.float() * scale[:, None, :, None]).half()
        for held, scale in ((at.k_cache, table), (at.v_cache, table.flip(0)))
    )
    for _ in range(2):
        out = fg.attention(at.q, at.k_cache, at.v_cache, mask=fg.causal(), cache=cache, page_scales=True)
        wide = fg.attention(at.q, k, v, mask=fg.causal(), cache=fg.KVCache(**where))
        assert torch.allclose(out.float(), wide.float(), atol=1e-2)
    # The shape alone does not say that scales are those of pages.
    with pytest.raises(fg.ArgumentError, match=r"cache\.k_scale is fp32 of shape \(30, 2\)"):
        fg.attention(at.q, at.k_cache, at.v_cache, mask=fg.causal(), cache=cache)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_scales": 1}, "page_scales=1 is not a bool"),
        ({"page_scales": True}, "page_scales=True is for a cache in pages"),
        ({"cache": fg.KVCache(k_scale=torch.ones(1))}, r"cache\.k_scale is for kernels built with cache_dtype"),
    ],
)
def test_scales_without_a_float8_cache_are_refused(emulated: Any, options: Any, words: str) -> None:
    with pytest.raises(fg.ArgumentError, match=words):
        fg.attention(*tensors(), **options)


@pytest.mark.parametrize("gradients", [False, True])
def test_keys_without_a_cache_have_the_dtype_of_queries(emulated: Any, gradients: bool) -> None:
    """With few queries and many keys, too: the decode kernel would read float8."""
    q, k, v = tensors()
    given = q.requires_grad_(gradients), *(x.to(torch.float8_e4m3fn) for x in (k, v))
    with pytest.raises(fg.ArgumentError, match="k is e4m3, but this kernel was built for fp16"):
        fg.attention(*given)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("page_scales", [False, True])
def test_fixed_splits_and_scales_reach_the_kernel_together(
    launched: list[str],  # noqa: F811
    caches: list[fg.KVCache],  # noqa: F811
    page_scales: bool,
    compiled: bool,
) -> None:
    at = Float8Caches(5)
    scales = {name: torch.ones(30) if page_scales else x for name, x in at.scales.items()}
    of_call = {"cache_seqlens": at.seqlens, "causal": True, "batch_invariant": True, "page_scales": page_scales}
    packed = {"cu_seqlens_q": ints(0, 3, 6), "max_seqlen_q": 3, "rotary_cos": at.cos, "rotary_sin": at.sin}
    both = at.k_cache, at.v_cache
    new, flat = (at.k, at.v), (at.k.flatten(0, 1), at.v.flatten(0, 1))
    where = {"batch_invariant": True, "k_scale": scales["k_descale"], "v_scale": scales["v_descale"]}
    fixed = fg.KVCache(at.seqlens, block_table=at.table, **where)
    steps: list[Any] = [
        lambda q: fg.attention(q, *both, cache=fixed, page_scales=page_scales),
        lambda q: fa2.flash_attn_with_kvcache(q, *both, *new, **of_call, **scales, block_table=at.table),
        lambda q: fa3.flash_attn_with_kvcache(q, *both, *new, **of_call, **scales, page_table=at.table),
        lambda q: fa3.flash_attn_with_kvcache(
            q.flatten(0, 1),
            *both,
            *flat,
            **of_call,
            **scales,
            **packed,
            page_table=at.table,
            cu_seqlens_k_new=ints(0, 3, 6),
        ),
    ]
    for step in steps:
        caches.clear()
        (torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step)(at.q)
        (attended,) = [cache for cache in caches if cache is not None]
        assert attended.batch_invariant is True
        assert torch.equal(attended.k_scale, scales["k_descale"])
        assert torch.equal(attended.v_scale, scales["v_descale"])


def test_kernels_for_float8_caches_are_prepared(emulated: list[Any]) -> None:
    at = Float8Caches(5)
    sizes = {"batch_size": 2, "max_seqlen_q": 3, "max_seqlen_k": 40, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 16}
    where = {"cache_seqlens": at.seqlens, "qkv_dtype": torch.float16, "page_size": 5, "causal": True}
    fa3.get_scheduler_metadata(**sizes, **where)
    fa3.get_scheduler_metadata(**sizes, **where, cache_dtype=torch.float8_e4m3fn)
    fa3.get_scheduler_metadata(**sizes, **where, cache_dtype=torch.float8_e4m3fn, page_scales=True)
    built = [(spec.cache_dtype, spec.page_scales) for spec in emulated]
    assert built == [(None, False), ("e4m3", False), ("e4m3", True)]
    options = {"cache_seqlens": at.seqlens, "page_table": at.table, "causal": True}
    fa3.flash_attn_with_kvcache(at.q, at.k_cache, at.v_cache, **options, **at.scales)
    assert len(emulated) == 3
