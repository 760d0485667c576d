"""``torch.ops.flashgen.program_forward`` and ``.program_backward``: kernels with an expression for a mask or a score.

``program`` is the text of ``flashgen.torch.tracing.program``; ``captured`` holds the tensors that it names, in the
order of their names. ``wanted`` says which of them want a gradient; those come last, one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.torch.function import incoming, rows_contiguous
from flashgen.torch.kernels import forward_kernel, kernel_for
from flashgen.torch.operators.dense import library, register_autocast
from flashgen.torch.operators.gradients import backward_with_captured
from flashgen.torch.randomness import dropout_of
from flashgen.torch.tracing.program import check_tensors, program_named

_OPTIONS = (
    "Tensor[] captured, str program, float? scale=None, bool deterministic=False, "
    "float dropout_p=0.0, Tensor? rng_state=None"
)
library.define(f"program_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
library.define(
    f"program_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}, "
    "bool[] wanted=[], Tensor? dlse=None) -> (Tensor, Tensor, Tensor, Tensor[])"
)


def _forward(
    q: Any,
    k: Any,
    v: Any,
    captured: list[Any],
    program: str,
    scale: float | None = None,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    rng_state: Any = None,
) -> tuple[Any, Any]:
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    names = program_named(program).names
    check_tensors(names, tuple(captured), q.device)
    dropout = dropout_of(dropout_p, rng_state)
    kernel = forward_kernel(q, v, program, deterministic=deterministic, drops=dropout is not None)
    out, lse = kernel(q, k, v, scale=scale, captured=dict(zip(names, captured, strict=True)), dropout=dropout)
    return out, lse


def _backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    captured: list[Any],
    program: str,
    scale: float | None = None,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    rng_state: Any = None,
    wanted: tuple[bool, ...] | list[bool] = (),
    dlse: Any = None,
) -> tuple[Any, Any, Any, list[Any]]:
    q, k, v, out = (rows_contiguous(x) for x in (q, k, v, out))
    do, dlse = incoming(out, do, dlse)
    dropout = dropout_of(dropout_p, rng_state)
    kernel = kernel_for(q, v, program, gradients=True, deterministic=deterministic, drops=dropout is not None)
    names, wants = program_named(program).names, list(wanted) or [False] * len(captured)
    arrays = (do, q, k, v, out, lse.contiguous())
    options = {"scale": scale, "dlse": dlse, "dropout": dropout}
    dq, dk, dv, more = backward_with_captured(kernel, arrays, names, captured, wants, options)
    return dq, dk, dv, [gradient for gradient in more if gradient is not None]


# CPU tensors reach the same functions, whose errors say what to do.
for _device in ("CUDA", "CPU"):
    library.impl("program_forward", _forward, _device)
    library.impl("program_backward", _backward, _device)


def _forward_shapes(q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any]:
    batch, len_q, heads, _dim = q.shape
    return (
        q.new_empty((batch, len_q, heads, v.shape[-1])),
        q.new_empty((batch, heads, len_q), dtype=torch.float32),
    )


def _backward_shapes(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    captured: Any,
    program: str,
    scale: Any = None,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    rng_state: Any = None,
    wanted: Any = (),
    dlse: Any = None,
) -> tuple[Any, Any, Any, list[Any]]:
    more = [tensor.new_empty(tensor.shape) for tensor, want in zip(captured, wanted, strict=False) if want]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), more


torch.library.register_fake("flashgen::program_forward", _forward_shapes, lib=library)
torch.library.register_fake("flashgen::program_backward", _backward_shapes, lib=library)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    q, k, v, captured, *ctx.options = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *captured)


def _differentiate(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *captured = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    wanted = [bool(need) for need in ctx.needs_input_grad[3]] if captured else []
    *gradients, found = torch.ops.flashgen.program_backward(
        do, q, k, v, out, lse, captured, *ctx.options, wanted=wanted, dlse=dlse
    )
    rest = iter(found)
    more = [next(rest) if want else None for want in wanted]
    # torch leaves trailing arguments out that have their default, and counts what was passed.
    return *gradients, more, *(None for _ in ctx.needs_input_grad[4:])


torch.library.register_autograd("flashgen::program_forward", _differentiate, setup_context=_keep, lib=library)


register_autocast("program_forward")


@register_flop_formula(torch.ops.flashgen.program_forward)
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two products over every pair; masks are not taken off, as torch's own formulas do not."""
    batch, len_q, heads, dim = q
    return int(2 * batch * heads * len_q * k[1] * (dim + v[-1]))


@register_flop_formula(torch.ops.flashgen.program_backward)
def _backward_flops(do: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Five products: the scores again, dP and dV over head_dim_v, dQ and dK over head_dim."""
    batch, len_q, heads, dim = q
    return int(2 * batch * heads * len_q * k[1] * (3 * dim + 2 * v[-1]))
