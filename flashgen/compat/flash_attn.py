"""flash-attn's functions: ``from flashgen.compat.flash_attn import flash_attn_func``.

Names, order, defaults and meaning of the arguments are those of flash-attn 2.8. What flashgen does not do is refused
by name, never ignored. Unlike there, head dims, dtypes and lengths are those of ``flashgen.attention``, and
``softmax_lse`` and ``alibi_slopes`` have gradients.
"""

from __future__ import annotations

from typing import Any

from flashgen.compat.arguments import attention, sequences_of, unpack
from flashgen.errors import ArgumentError


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q ``(B, Sq, H, D)`` over k and v ``(B, Sk, Hk, D)``; ``out``, shaped like q.

    ``window_size=(left, right)`` lets query i see the keys from ``i + Sk - Sq - left`` to
    ``i + Sk - Sq + right``, -1 meaning no limit. ``softcap`` is the limit of ``tanh``, 0 for none, and
    ``alibi_slopes``, ``(H,)`` or ``(B, H)``, a penalty on ``|i + Sk - Sq - j|``. ``deterministic=False`` still follows
    torch's global switch. With ``return_attn_probs`` the result is ``(out, softmax_lse, S_dmask)``; the last is
    empty, as there without dropout: probabilities are never in memory.
    """
    out, lse = attention(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
    )
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` with keys and values in one tensor ``(B, Sk, 2, Hk, D)``."""
    k, v = unpack("kv", kv, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` with queries, keys and values in one tensor ``(B, S, 3, H, D)``."""
    q, k, v = unpack("qkv", qkv, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """``flash_attn_func`` for sequences of different lengths: q ``(total_q, H, D)``, k and v ``(total_k, Hk, D)``.

    Those of sequence i are rows ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]``, int32 and on q's device; none is longer
    than ``max_seqlen``. ``softmax_lse`` is ``(H, total_q)``, and ``alibi_slopes`` ``(H,)`` or ``(sequences, H)``.
    """
    if block_table is not None:
        raise ArgumentError(
            "block_table is not supported; pass k and v as (total_k, heads_kv, head_dim), one sequence behind another, "
            "and None"
        )
    out, lse = attention(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        sequences=sequences_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` with keys and values in one tensor ``(total_k, 2, Hk, D)``."""
    k, v = unpack("kv", kv, 2, "total_k")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` with queries, keys and values in one tensor ``(total, 3, H, D)``."""
    q, k, v = unpack("qkv", qkv, 3, "total")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
