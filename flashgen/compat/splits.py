"""What FlashAttention-3 has beside attention: results of parts of the keys combined, and kernels prepared ahead."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.compat.arguments import cap_of, check_tensors, chunk_of, limits_of
from flashgen.errors import ArgumentError
from flashgen.spec.attention import CacheKind
from flashgen.torch.kernels import cached_kernel, can_build
from flashgen.torch.options import check_flags
from flashgen.torch.sdpa.forms import Form, program_for

#: Head dims, element type, form, kind of cache, device, the cache's element type, whether its pages have scales, and
#: whether values are part of the keys: of the kernels that are loaded.
_Kind = tuple[int, int, torch.dtype, Form, CacheKind, int, torch.dtype | None, bool, bool]
_prepared: set[_Kind] = set()


def flash_attn_combine(out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None) -> tuple[Any, Any]:
    """``(out, lse)`` of attention to all keys, from that to each of several parts of them, by torch's operators.

    out_partial is ``(parts, B, S, H, D)``, or packed ``(parts, total, H, D)``; lse_partial is the same without D, and
    lse without the parts too. Where lse_partial is minus infinity there were no keys, whatever out_partial says. out
    has ``out_dtype``, or that of out_partial. Both results have gradients.
    """
    check_tensors(out_partial=out_partial, lse_partial=lse_partial)
    shape = tuple(out_partial.shape[:-1])
    if out_partial.dim() not in (4, 5) or lse_partial.shape != shape:
        raise ArgumentError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}; they must "
            "be (parts, batch, length, heads, head_dim) or (parts, total length, heads, head_dim), and the same "
            "without head_dim"
        )
    empty = lse_partial == -torch.inf
    # Rows without any key: minus infinity less itself has no value, and no gradient either.
    nowhere = empty.all(0)
    parts = lse_partial.float().masked_fill(nowhere, 0.0)
    lse = parts.logsumexp(0)
    shares = (parts - lse).exp().masked_fill(empty, 0.0)[..., None]
    combined = (shares * out_partial.float().masked_fill(shares == 0.0, 0.0)).sum(0)
    lse = lse.masked_fill(nowhere, -torch.inf)
    combined = combined.to(out_partial.dtype if out_dtype is None else out_dtype)
    if out is None:
        return combined, lse
    if out.shape != combined.shape:
        raise ArgumentError(f"out has shape {tuple(out.shape)}; it must be {tuple(combined.shape)}")
    return out.copy_(combined), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Any,
    qkv_dtype: Any = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    cache_dtype: Any = None,
    page_scales: bool = False,
    softcap: float = 0.0,
    has_qv: bool = False,
) -> Any:
    """An int32 tensor without elements, to be passed as ``scheduler_metadata``.

    The kernels of such calls are built and loaded, so that a CUDA graph can capture a call right away. How keys are
    split needs no preparation: the kernel computes that from the lengths on the device.

    FlashAttention-3 lacks the last four arguments. A kernel has its cap built in: pass it as ``softcap``.
    ``has_softcap`` alone builds nothing, and then a call must come before the capture. Pass ``has_qv=True`` for calls
    with ``qv``. ``cache_dtype`` and ``page_scales`` are for caches in float8 with queries of ``qkv_dtype``. With a
    ``qkv_dtype`` of float8 the cache also has it.
    """
    check_tensors(cache_seqlens=cache_seqlens)
    check_flags(causal=causal, has_softcap=has_softcap, page_scales=page_scales, has_qv=has_qv)
    cap = cap_of(softcap)
    if cap is not None or not has_softcap:
        form = Form(*limits_of(causal, window_size), chunk_of(attention_chunk), None, (), cap)
        pages: CacheKind = "contiguous" if page_size is None else "paged"
        of_cache = pages, cache_seqlens.get_device(), cache_dtype, page_scales, has_qv
        _prepare((headdim, headdim_v or headdim, qkv_dtype, form, *of_cache))
    return cache_seqlens.new_empty(0, dtype=torch.int32)


def _prepare(kind: _Kind) -> None:
    """Builds and loads kernels, once."""
    dim, dim_v, dtype, form, pages, device, cache_dtype, page_scales, has_qv = kind
    if kind in _prepared or not can_build(device):
        return
    program, _ = program_for(form, ())
    of_cache = pages, device, cache_dtype
    kernel = cached_kernel(dim, dim_v, dtype, program, *of_cache, page_scales=page_scales, has_qv=has_qv)
    kernel.warmup(None if device < 0 else device)
    _prepared.add(kind)
