"""``torch.ops.flashgen.fp8_forward``: 16-bit queries, keys and values to e4m3, and attention with these.

It is for inference, and has no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.errors import ArgumentError
from flashgen.launch.call.arguments import check_scale
from flashgen.launch.call.batched_launch import Part, run
from flashgen.launch.quantizer import Quantized
from flashgen.spec import Sequences
from flashgen.torch.kernels import quantizing_kernel_for
from flashgen.torch.operators.library import forward_shapes, implement, library, register_autocast
from flashgen.torch.packed import arrays_of, longest_of, sequences_of
from flashgen.torch.program import Program, check_tensors, program_named
from flashgen.torch.replay import CallKey, remember, replayed
from flashgen.torch.tensors import kernel_inputs, needs_dispatcher, over_batch, wants_gradients
from flashgen.torch.tracing.compiled import text_of

#: Where captured tensors are among the arguments of ``fp8_forward``.
_CAPTURED = 3
library.define(
    "fp8_forward(Tensor q, Tensor k, Tensor v, Tensor[] captured, str program, int block, float? scale=None, "
    "bool rotate=True, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0) -> (Tensor, Tensor)"
)


class QuantizedOptions(NamedTuple):
    """What a call brings beside its tensors."""

    block: int
    scale: float | None = None
    rotate: bool = True
    sequences: Sequences | None = None


def attend_quantized(
    q: Any, k: Any, v: Any, program: Program, captured: Sequence[Any], options: QuantizedOptions
) -> tuple[Any, Any]:
    """``(out, lse)``: a call like one before is replayed, its two launches as one."""
    block, scale, rotate, sequences = options
    longest = longest_of(sequences)
    key: CallKey = (
        (q, k, v, *captured, *arrays_of(sequences)),
        ("fp8", program.rule, block, scale, rotate, longest, len(captured)),
    )
    found = replayed(key)
    if found is not None:
        return found[0], found[1]
    if sequences is None:
        k, v = over_batch(q, k), over_batch(q, v)
    if torch.compiler.is_compiling() or needs_dispatcher(q, k, v) or wants_gradients(q, k, v, *captured):
        places = (*arrays_of(sequences), *longest) if longest is not None else ()
        given = q, k, v, list(captured), text_of(program), block, scale, rotate
        result: tuple[Any, Any] = torch.ops.flashgen.fp8_forward(*given, *places)
        return result
    parts = _attend(*kernel_inputs(q, k, v), program, captured, options)
    remember(key, parts)
    _, (out, lse) = parts[-1]
    return out, lse


def _attend(q: Any, k: Any, v: Any, program: Program, captured: Sequence[Any], options: QuantizedOptions) -> list[Part]:
    """What the operator does: its two calls, with their results."""
    block, scale, rotate, sequences = options
    kernel = quantizing_kernel_for(q, v, program, block, packed=sequences is not None)
    check_tensors(program.names, tuple(captured), q.device)
    scale = None if scale is None else check_scale(scale)
    executor, tensors = kernel.executor, dict(zip(program.names, captured, strict=True)) or None
    assert executor.quantize is not None, "a kernel with blocks of scales"
    quantizing = executor.quantize.find(q, k, v, rotate, sequences, None)
    codes = Quantized(*run(quantizing, q))
    attending = executor.find_forward(
        *codes[:3], scale, captured=tensors, sequences=sequences, scales=(codes.q_scale, codes.k_scale, codes.v_scale)
    )
    return [(quantizing, codes), (attending, run(attending, codes.q))]


def _forward(
    q: Any,
    k: Any,
    v: Any,
    captured: list[Any],
    program: str,
    block: int,
    scale: float | None = None,
    rotate: bool = True,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Any, Any]:
    longest = None if cu_seqlens_q is None else (max_seqlen_q, max_seqlen_k)
    sequences = sequences_of((cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), longest)
    options = QuantizedOptions(block, scale, rotate, sequences)
    _, (out, lse) = _attend(*kernel_inputs(q, k, v), program_named(program), captured, options)[-1]
    return out, lse


def _shapes(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    return forward_shapes(q, v)


implement("fp8_forward", _forward)
torch.library.register_fake("flashgen::fp8_forward", _shapes, lib=library)
register_autocast("fp8_forward")

library.define("fp8_gradient(Tensor do, Tensor q) -> Tensor")


def _no_gradient(do: Any, q: Any) -> Any:
    raise ArgumentError("fp8_attention has no gradients; train with flashgen.attention, or detach q, k and v")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _differentiate(ctx: Any, do: Any, _: Any) -> Any:
    # An operator, as for cache_forward: compilers ask for gradients that nobody needs.
    (q,) = ctx.saved_tensors
    dq = torch.ops.flashgen.fp8_gradient(do, q)
    needed = ctx.needs_input_grad
    captured = [None] * len(needed[_CAPTURED]) if needed[_CAPTURED] else []
    return dq, None, None, captured, *(None for _ in needed[_CAPTURED + 1 :])


library.impl("fp8_gradient", _no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("flashgen::fp8_gradient", lambda do, q: torch.empty_like(q), lib=library)
torch.library.register_autograd("flashgen::fp8_forward", _differentiate, setup_context=_keep, lib=library)


@register_flop_formula(torch.ops.flashgen.fp8_forward)
def _flops(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two products over every pair; of packed sequences, as if they were one."""
    return int(2 * math.prod(q[:-1]) * k[-3] * (q[-1] + v[-1]))
