"""What FlashAttention-3 has beside attention: results of parts of the keys combined, and calls planned ahead."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.compat.arguments import check_tensors
from flashgen.errors import ArgumentError


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
) -> None:
    """None, which is what ``scheduler_metadata`` may be: nothing about a call is planned on the GPU ahead of it."""
