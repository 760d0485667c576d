"""Attention of queries to a cache, with any mask and score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.spec import KVCache, Sequences
from flashgen.torch.eight_bits import is_eight_bit
from flashgen.torch.operators.kvcache import attend_to_cache
from flashgen.torch.options import check_dense, check_flags, number_of
from flashgen.torch.program import Program
from flashgen.torch.replay import replayed
from flashgen.torch.scales import NO_SCALES, Scales, out_dtype_of


def check_cached(cache: object, dropout_p: float, sequences: Sequences | None) -> None:
    """ArgumentError for arguments that do not go with a cache."""
    if not isinstance(cache, KVCache):
        raise ArgumentError(f"cache={show(cache)} is not a KVCache; pass flashgen.KVCache(seqlens)")
    if dropout_p != 0.0:
        raise ArgumentError(f"dropout_p={show(dropout_p)} does not go with cache; leave it out")
    if sequences is not None:
        raise ArgumentError("sequences does not go with cache; pack queries by cache=KVCache(cu_seqlens_q=...)")


def check_qv(cache: KVCache | None) -> None:
    """ArgumentError for a second query without a cache."""
    if cache is None:
        raise ArgumentError("qv is for a cache, whose values are part of the keys; pass cache=flashgen.KVCache(), too")


def check_page_scales(page_scales: object, cache: KVCache | None) -> None:
    """ArgumentError for a flag that is none, or that has no cache to go with."""
    check_flags(page_scales=page_scales)
    if page_scales and cache is None:
        raise ArgumentError(f"page_scales={show(page_scales)} is for a cache in pages; pass cache, too")


def attend_cached(
    q: Any,
    k: Any,
    v: Any,
    cache: KVCache,
    program: Program,
    captured: Sequence[Any],
    scale: float | None,
    scales: Scales = NO_SCALES,
    qv: Any = None,
) -> tuple[Any, Any]:
    """``(out, lse)``: a call like one before is replayed. ``scales`` take the place of the cache's."""
    if scales.out_dtype is not None or scales.q is not None or is_eight_bit(q):
        scales = _of_eight_bits(q, scales)
    places = cache.seqlens, cache.batch_idx, cache.leftpad, cache.block_table, cache.cu_seqlens_q, cache.cu_seqlens_k
    counts = cache.appended, cache.num_splits, cache.max_seqlen_q, cache.batch_invariant, scales.of_pages
    number, q_scale = (None, scales.q) if isinstance(scales.q, torch.Tensor) else (scales.q, None)
    given = q, k, v, *captured, *places, scales.k, scales.v, qv, q_scale
    key = given, ("cache", program.rule, scale, len(captured), *counts, number, scales.out_dtype)
    found = replayed(key)
    if found is not None:
        return found[0], found[1]
    _check(q, k, v, cache, qv)
    if number is not None and not torch.compiler.is_compiling():
        number_of("q_scale", number)
    return attend_to_cache(q, k, v, cache, program, captured, scale=scale, scales=scales, qv=qv, key=key)


def _of_eight_bits(q: Any, scales: Scales) -> Scales:
    """The scales of a call, with the dtype of what 8-bit queries get."""
    if not is_eight_bit(q):
        kind = getattr(q, "dtype", type(q).__qualname__)
        given = "q_scale" if scales.out_dtype is None else f"out_dtype={scales.out_dtype}"
        raise ArgumentError(f"{given} is for q of torch.float8_e4m3fn, and q is {kind}; leave it out")
    return scales._replace(out_dtype=out_dtype_of(scales.out_dtype))


def _check(q: Any, k: Any, v: Any, cache: KVCache, qv: Any) -> None:
    check_dense(q=q, k=k, v=v)
    rank = 4 if cache.cu_seqlens_q is None else 3
    ranks = [("q", q, rank), ("k", k, 4), ("v", v, 4)]
    if qv is not None:
        check_dense(qv=qv)
        ranks.append(("qv", qv, rank))
    for name, x, wanted in ranks:
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(x).__qualname__}; pass a torch.Tensor")
        if x.dim() != wanted:
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}; it must have {wanted} dimensions with this cache")
