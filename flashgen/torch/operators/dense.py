"""``torch.ops.flashgen.forward`` and ``.backward``: the kernels as dispatcher operators.

The mask travels as four optional numbers: ``left`` and ``right`` are those of the window that aligns the
last query with the last key, ``left_from_start`` and ``right_from_start`` of the one that aligns the first
with the first. So ``right=0`` is a causal mask.
Every output is contiguous, whatever the strides of the inputs; the shape functions say the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.torch.function import incoming, rows_contiguous
from flashgen.torch.kernels import forward_kernel, kernel_for
from flashgen.torch.randomness import dropout_of

_OPTIONS = (
    "float? scale=None, int? left=None, int? right=None, "
    "int? left_from_start=None, int? right_from_start=None, bool deterministic=False, "
    "float dropout_p=0.0, Tensor? rng_state=None"
)
library = torch.library.Library("flashgen", "DEF")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
library.define(
    f"backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}, Tensor? dlse=None) "
    "-> (Tensor, Tensor, Tensor)"
)

_Limit = int | None


def _forward(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    left: _Limit = None,
    right: _Limit = None,
    left_from_start: _Limit = None,
    right_from_start: _Limit = None,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    rng_state: Any = None,
) -> tuple[Any, Any]:
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    limits = (left, right, left_from_start, right_from_start)
    dropout = dropout_of(dropout_p, rng_state)
    kernel = forward_kernel(q, v, limits, deterministic=deterministic, drops=dropout is not None)
    return kernel(q, k, v, scale=scale, dropout=dropout)


def _backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    scale: float | None = None,
    left: _Limit = None,
    right: _Limit = None,
    left_from_start: _Limit = None,
    right_from_start: _Limit = None,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    rng_state: Any = None,
    dlse: Any = None,
) -> tuple[Any, Any, Any]:
    q, k, v, out, lse = (*(rows_contiguous(x) for x in (q, k, v, out)), lse.contiguous())
    do, dlse = incoming(out, do, dlse)
    limits = (left, right, left_from_start, right_from_start)
    dropout = dropout_of(dropout_p, rng_state)
    kernel = kernel_for(q, v, limits, gradients=True, deterministic=deterministic, drops=dropout is not None)
    return kernel.backward(do, q, k, v, out, lse, scale=scale, dlse=dlse, dropout=dropout)


# CPU tensors reach the same functions, whose errors say what to do.
for _device in ("CUDA", "CPU"):
    library.impl("forward", _forward, _device)
    library.impl("backward", _backward, _device)


def _forward_shapes(q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any]:
    batch, len_q, heads, _dim = q.shape
    return (
        q.new_empty((batch, len_q, heads, v.shape[-1])),
        q.new_empty((batch, heads, len_q), dtype=torch.float32),
    )


def _backward_shapes(do: Any, q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any, Any]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


torch.library.register_fake("flashgen::forward", _forward_shapes, lib=library)
torch.library.register_fake("flashgen::backward", _backward_shapes, lib=library)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    q, k, v, *ctx.options = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse)


def _differentiate(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    gradients = torch.ops.flashgen.backward(do, q, k, v, out, lse, *ctx.options, dlse=dlse)
    return *gradients, *(None for _ in ctx.options)


torch.library.register_autograd("flashgen::forward", _differentiate, setup_context=_keep, lib=library)


_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCPU
)


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """The tensors in the autocast dtype, where autocast would change them."""
    device = q.device.type
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        eligible = x.device.type == device and x.is_floating_point() and x.dtype not in (torch.float64, dtype)
        return x.to(dtype) if eligible else x

    return cast(q), cast(k), cast(v)


def register_autocast(name: str) -> None:
    """Has an operator that starts with q, k and v cast them under autocast."""

    def cast_first(q: Any, k: Any, v: Any, *options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return getattr(torch.ops.flashgen, name)(*autocast(q, k, v), *options)

    for key in ("AutocastCUDA", "AutocastCPU"):
        library.impl(name, cast_first, key)


register_autocast("forward")


@register_flop_formula(torch.ops.flashgen.forward)
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two products over every pair; masks are not taken off, as torch's own formulas do not."""
    batch, len_q, heads, dim = q
    return int(2 * batch * heads * len_q * k[1] * (dim + v[-1]))


@register_flop_formula(torch.ops.flashgen.backward)
def _backward_flops(do: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Five products: the scores again, dP and dV over head_dim_v, dQ and dK over head_dim."""
    batch, len_q, heads, dim = q
    return int(2 * batch * heads * len_q * k[1] * (3 * dim + 2 * v[-1]))
