"""FlashAttention-3's functions: ``from flashgen.compat.flash_attn_interface import flash_attn_func``.

They differ from flash-attn 2.8's in order, in what they return, and in having no dropout and no ALiBi. ``num_splits``,
``pack_gqa`` and ``sm_margin`` say how that library is to compute, not what: they are taken, and mean nothing here.
"""

from __future__ import annotations

from typing import Any

from flashgen.compat.arguments import attention, sequences_of, unpack
from flashgen.compat.descales import input_scales
from flashgen.compat.kvcache_interface import flash_attn_with_kvcache as flash_attn_with_kvcache
from flashgen.compat.latent import Masking, attend_dense, attend_packed
from flashgen.compat.splits import flash_attn_combine as flash_attn_combine
from flashgen.compat.splits import get_scheduler_metadata as get_scheduler_metadata
from flashgen.errors import ArgumentError
from flashgen.torch.options import check_flags


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q ``(B, Sq, H, D)`` over k ``(B, Sk, Hk, D)`` and v ``(B, Sk, Hk, Dv)``: ``out``, or ``(out, lse)``.

    With ``attention_chunk`` a query attends to its own chunk of so many positions. q, k and v may be
    ``torch.float8_e4m3fn``, and ``out`` is then ``torch.bfloat16``. Their elements are multiplied by ``q_descale``,
    ``k_descale`` and ``v_descale``, float32 ``(B, Hk)``. With ``qv`` ``(B, Sq, H, Dv)`` values are part of the keys,
    as in ``flash_attn_with_kvcache``, and there are no gradients.
    """
    check_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    if qv is not None:
        masking, descales = Masking(causal, window_size, softcap, attention_chunk), (q_descale, k_descale, v_descale)
        out, lse = attend_dense(q, k, v, qv, softmax_scale, masking, descales)
        return (out, lse) if return_attn_probs else out
    out, lse = attention(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        attention_chunk=attention_chunk,
        scales=input_scales(q, q_descale, k_descale, v_descale),
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` for sequences of different lengths: q ``(total_q, H, D)``, k and v ``(total_k, Hk, D)``.

    Those of sequence i are rows ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]``, of which only the first ``seqused[i]``
    take part, if that is given: int32, and on q's device. The log-sum-exp is ``(H, total_q)``. Scales of float8 are
    ``(sequences, Hk)``. ``qv`` is ``(total_q, H, Dv)``, and goes with ``seqused_k`` but not with ``seqused_q``.
    """
    check_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    if qv is not None:
        masking, descales = Masking(causal, window_size, softcap, attention_chunk), (q_descale, k_descale, v_descale)
        where = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_q, seqused_k
        out, lse = attend_packed(q, k, v, qv, *where, softmax_scale, masking, descales)
        return (out, lse) if return_attn_probs else out
    out, lse = attention(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        attention_chunk=attention_chunk,
        sequences=sequences_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k),
        scales=input_scales(q, q_descale, k_descale, v_descale),
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` with all in one ``(B, S, 3, H, D)``, or ``(B, S, H + 2 Hk, D)`` with ``num_heads_q``."""
    q, k, v = unpack("qkv", qkv, 3) if num_heads_q is None else _split_heads(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def _split_heads(qkv: Any, heads: int) -> Any:
    if qkv.dim() != 4 or qkv.shape[2] <= heads or (qkv.shape[2] - heads) % 2:
        raise ArgumentError(
            f"qkv has shape {tuple(qkv.shape)}; with num_heads_q={heads} it must be (batch, length, {heads} + 2 * "
            "heads_kv, head_dim)"
        )
    heads_kv = (qkv.shape[2] - heads) // 2
    return qkv.split([heads, heads_kv, heads_kv], 2)
