"""flash-attn's functions: ``from flashgen.compat.flash_attn import flash_attn_func``.

Same arguments, same order. What flashgen does not do is refused by name, never ignored.
"""

from __future__ import annotations

from typing import Any

from flashgen.errors import ArgumentError
from flashgen.torch.entry import attend
from flashgen.torch.kernels import Limits


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
    ``i + Sk - Sq + right``, -1 meaning no limit. ``deterministic=False`` still follows
    torch's global switch. With
    ``return_attn_probs`` the result is ``(out, softmax_lse, None)``: there are no dropout probabilities.
    """
    _refuse(dropout_p, softcap, alibi_slopes)
    limits = _limits(causal, window_size)
    out, lse = attend(q, k, v, limits, softmax_scale, True if deterministic else None)
    return (out, lse, None) if return_attn_probs else out


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
    k, v = _unpack("kv", kv, 2)
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
    q, k, v = _unpack("qkv", qkv, 3)
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


def _unpack(name: str, packed: Any, count: int) -> Any:
    if packed.dim() != 5 or packed.shape[2] != count:
        raise ArgumentError(
            f"{name} has shape {tuple(packed.shape)}; it must be (batch, length, {count}, heads, head_dim)"
        )
    # unbind, not indexing: its gradient is one stack instead of padded sums.
    return packed.unbind(2)


def _refuse(dropout_p: float, softcap: float, alibi_slopes: Any) -> None:
    if dropout_p != 0.0:
        raise ArgumentError(f"dropout_p={dropout_p!r} is not supported; pass 0.0")
    if softcap != 0.0:
        raise ArgumentError(f"softcap={softcap!r} is not supported; pass 0.0")
    if alibi_slopes is not None:
        raise ArgumentError("alibi_slopes is not supported; pass None")


def _limits(causal: bool, window_size: tuple[int, int]) -> Limits:
    """The mask's limits; a causal mask has no keys to the right, whatever the window says."""
    left, right = window_size
    for value in (left, right):
        if not isinstance(value, int) or value < -1:
            raise ArgumentError(f"window_size={window_size!r} must be two whole numbers >= 0, or -1 for no limit")
    open_right = None if right == -1 else right
    return (None if left == -1 else left, 0 if causal else open_right, None, None)
