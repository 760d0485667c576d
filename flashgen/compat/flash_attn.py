"""flash-attn's functions: ``from flashgen.compat.flash_attn import flash_attn_func``.

Names, order, defaults and meaning of the arguments are those of flash-attn 2.8. What flashgen does not do is refused
by name, never ignored. Unlike there, head dims, dtypes and lengths are those of ``flashgen.attention``, and
``softmax_lse`` and ``alibi_slopes`` have gradients.
"""

from __future__ import annotations

from typing import Any

from flashgen.compat.arguments import attention, unpack
from flashgen.compat.kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache


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
