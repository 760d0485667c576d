"""FlashAttention-3's ``qv`` without a cache: to the kernels for latent vectors, k and v are a cache that is full."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashgen.compat.arguments import check_tensors, whole
from flashgen.compat.kvcache import with_kvcache
from flashgen.errors import ArgumentError
from flashgen.spec import KVCache
from flashgen.torch.replay import CallKey, replayed
from flashgen.torch.tensors import over_batch, rows_contiguous, wants_gradients


class Masking(NamedTuple):
    """How functions of FlashAttention-3 mask scores, and cap them."""

    causal: bool
    window_size: tuple[int, int]
    softcap: float
    attention_chunk: int


def attend_dense(
    q: Any, k: Any, v: Any, qv: Any, scale: float | None, masking: Masking, descales: tuple[Any, ...]
) -> tuple[Any, Any]:
    """``(out, lse)`` of ``flash_attn_func``."""
    key = (q, k, v, qv), ("qv", scale, *masking)
    found = replayed(key)
    if found is not None:
        return found[0], found[1]
    _check(q, k, v, qv, 4, descales)
    k, v = over_batch(q, k), over_batch(q, v)
    if k.shape[0] != q.shape[0]:
        raise ArgumentError(f"k has batch {k.shape[0]} and q has batch {q.shape[0]}; they must be equal")
    return _attend(q, k, v, qv, KVCache(), scale, masking, key)


def attend_packed(
    q: Any,
    k: Any,
    v: Any,
    qv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    seqused_q: Any,
    seqused_k: Any,
    scale: float | None,
    masking: Masking,
    descales: tuple[Any, ...],
) -> tuple[Any, Any]:
    """``(out, lse)`` of ``flash_attn_varlen_func``."""
    _check(q, k, v, qv, 3, descales)
    check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if seqused_q is not None:
        raise ArgumentError("seqused_q does not go with qv; pack the queries that take part")
    shapes = [f"{x.dtype} of shape {tuple(x.shape)}" for x in (cu_seqlens_k, cu_seqlens_q)]
    if shapes[0] != shapes[1] or cu_seqlens_k.dtype != torch.int32 or cu_seqlens_k.dim() != 1:
        raise ArgumentError(
            f"cu_seqlens_k is {shapes[0]} and cu_seqlens_q {shapes[1]}; pass int32 numbers, one more than sequences"
        )
    # One row of a cache holds all keys. Those of a sequence begin behind a left pad.
    begins, ends = cu_seqlens_k[:-1], cu_seqlens_k[1:]
    if seqused_k is not None:
        check_tensors(seqused_k=seqused_k)
        ends = (begins + seqused_k).int()
    of_queries = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": whole(max_seqlen_q)}
    cache = KVCache(ends, torch.zeros_like(begins), begins, **of_queries)
    return _attend(q, k[None], v[None], qv, cache, scale, masking)


def _attend(
    q: Any,
    k: Any,
    v: Any,
    qv: Any,
    cache: KVCache,
    scale: float | None,
    masking: Masking,
    key: CallKey | None = None,
) -> tuple[Any, Any]:
    tensors, rules = (q, rows_contiguous(k), rows_contiguous(v), None, None), masking._asdict()
    found: tuple[Any, Any] = with_kvcache(
        *tensors, rotary=None, cache=cache, scale=scale, return_lse=True, qv=qv, key=key, **rules
    )
    return found


def _check(q: Any, k: Any, v: Any, qv: Any, rank: int, descales: tuple[Any, ...]) -> None:
    """ArgumentError for tensors that kernels with ``qv`` do not take."""
    check_tensors(q=q, k=k, v=v, qv=qv)
    for name, scale in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if scale is not None:
            raise ArgumentError(f"{name} does not go with qv, whose kernels have 16-bit inputs; pass None")
    for name, x in (("k", k), ("v", v), ("qv", qv)):
        if x.dtype != q.dtype:
            raise ArgumentError(f"{name} is {x.dtype} and q is {q.dtype}; they must be equal")
    for name, x in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        if x.dim() != rank:
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}; it must have {rank} dimensions")
    if wants_gradients(q, k, v, qv):
        raise ArgumentError(
            "attention with qv has no gradients; call it under torch.no_grad(), or train with q and qv concatenated, "
            "and k and v likewise: flash_attn_func(torch.cat([q, qv], -1), torch.cat([k, v], -1), v)"
        )
