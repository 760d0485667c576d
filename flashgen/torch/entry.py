"""``attention``: what people call, and the choice between the two doors."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.spec import Mask, causal, full, window
from flashgen.torch import ops
from flashgen.torch.function import AttentionFunction, rows_contiguous
from flashgen.torch.kernels import NO_LIMITS, Limits, kernel_for, limits_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack

for _maker in (causal, full, window):
    # What torch.compiler.assume_constant_result sets, without loading the compiler: a mask that a compiled
    # function makes is made while it is traced.
    _maker._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Any:
    """Softmax attention with autograd: ``softmax(scale * q k^T, masked) v``.

    q is ``(B, Sq, H, D)``, k ``(B, Sk, Hk, D)``, v ``(B, Sk, Hk, Dv)``. ``mask`` is ``flashgen.causal()``,
    ``flashgen.window(...)`` or None for all keys; ``scale`` defaults to 1/sqrt(D). ``deterministic=None``
    follows torch.use_deterministic_algorithms. With ``return_lse`` the result is ``(out, lse)``. The output
    is contiguous. Inputs whose last stride is not 1 are copied. Autocast casts the inputs to its dtype.
    """
    if mask is None:
        limits = NO_LIMITS
    elif isinstance(mask, Mask):
        limits = limits_of(mask)
    else:
        raise ArgumentError(f"mask={mask!r} is not a mask; use flashgen.causal(), flashgen.window(left, right) or None")
    out, lse = attend(q, k, v, limits, scale, deterministic)
    return (out, lse) if return_lse else out


def attend(q: Any, k: Any, v: Any, limits: Limits, scale: float | None, deterministic: bool | None) -> tuple[Any, Any]:
    """``(out, lse)`` through the short door where nobody watches, else through the dispatcher."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if torch.compiler.is_compiling() or _is_watched(q, k, v):
        result: tuple[Any, Any] = torch.ops.flashgen.forward(q, k, v, scale, *limits, deterministic)
        return result
    if torch.is_autocast_enabled("cuda"):
        q, k, v = ops.autocast(q, k, v)
    try:
        if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
            q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    except IndexError:
        shapes = ", ".join(f"{name} has shape {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ArgumentError(f"{shapes}; each must have 4 dimensions: (batch, length, heads, dim)") from None
    gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    kernel = kernel_for(q, v, limits, gradients=gradients, deterministic=deterministic)
    if gradients:
        out, lse = AttentionFunction.apply(q, k, v, scale, kernel)  # type: ignore[no-untyped-call]
        return out, lse
    return kernel(q, k, v, scale=scale)


def _is_watched(q: Any, k: Any, v: Any) -> bool:
    """Whether a subclass, a dispatch mode or a function transform must see the call as an operator."""
    if type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN:
        return _dispatch_modes() > 0 or _transforms() is not None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(x).__qualname__}; pass a torch.Tensor")
    return True
