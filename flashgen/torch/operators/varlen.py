"""``torch.ops.flashgen.varlen_forward`` and ``.varlen_backward``: sequences that lie behind one another.

q is (total_q, heads, head_dim), lse (heads, total_q). Where sequences begin are tensors, which nobody waits for, and
what is longest are numbers that torch.compile may leave open. All else is as in ``program_forward``, whose text says
limits too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.torch.function import incoming, rows_contiguous
from flashgen.torch.kernels import forward_kernel, kernel_for
from flashgen.torch.operators.dense import library, register_autocast
from flashgen.torch.operators.gradients import backward_with_captured
from flashgen.torch.operators.packed import sequences_of
from flashgen.torch.randomness import dropout_of
from flashgen.torch.tracing.program import check_tensors, program_named

_OPTIONS = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, Tensor[] captured, str program, float? scale=None, bool deterministic=False, "
    "float dropout_p=0.0, Tensor? rng_state=None"
)
library.define(f"varlen_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
library.define(
    f"varlen_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}, "
    "bool[] wanted=[], Tensor? dlse=None) -> (Tensor, Tensor, Tensor, Tensor[])"
)

#: For selective activation checkpointing: save the results of these operators rather than compute them again.
SAC_SAVE = (
    torch.ops.flashgen.forward.default,
    torch.ops.flashgen.program_forward.default,
    torch.ops.flashgen.varlen_forward.default,
)
#: The arguments that say where sequences are: four tensors and two lengths, after q, k and v.
_STARTS, _PLACES = 4, 6


def _forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_q: Any,
    seqused_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
    starts = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    sequences = sequences_of(starts, (max_seqlen_q, max_seqlen_k))
    drops = dropout is not None
    kernel = forward_kernel(q, v, program, deterministic=deterministic, drops=drops, packed=True)
    given = dict(zip(names, captured, strict=True))
    return kernel(q, k, v, scale=scale, captured=given, dropout=dropout, sequences=sequences)


def _backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_q: Any,
    seqused_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
    drops = dropout is not None
    kernel = kernel_for(q, v, program, gradients=True, deterministic=deterministic, drops=drops, packed=True)
    names, wants = program_named(program).names, list(wanted) or [False] * len(captured)
    arrays = (do, q, k, v, out, lse.contiguous())
    options: dict[str, Any] = {"scale": scale, "dlse": dlse, "dropout": dropout}
    starts = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    options["sequences"] = sequences_of(starts, (max_seqlen_q, max_seqlen_k))
    dq, dk, dv, more = backward_with_captured(kernel, arrays, names, captured, wants, options)
    return dq, dk, dv, [gradient for gradient in more if gradient is not None]


# CPU tensors reach the same functions, whose errors say what to do.
for _device in ("CUDA", "CPU"):
    library.impl("varlen_forward", _forward, _device)
    library.impl("varlen_backward", _backward, _device)


def _forward_shapes(q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any]:
    total, heads, _dim = q.shape
    return q.new_empty((total, heads, v.shape[-1])), q.new_empty((heads, total), dtype=torch.float32)


def _backward_shapes(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_q: Any,
    seqused_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
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


torch.library.register_fake("flashgen::varlen_forward", _forward_shapes, lib=library)
torch.library.register_fake("flashgen::varlen_backward", _backward_shapes, lib=library)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    q, k, v, *places = inputs[: 3 + _PLACES]
    captured, *ctx.options = inputs[3 + _PLACES :]
    starts, ctx.longest = places[:_STARTS], places[_STARTS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *starts, *captured)


def _differentiate(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *rest = ctx.saved_tensors
    starts, captured = rest[:_STARTS], rest[_STARTS:]
    do = torch.zeros_like(out) if do is None else do
    wanted = [bool(need) for need in ctx.needs_input_grad[3 + _PLACES]] if captured else []
    *gradients, found = torch.ops.flashgen.varlen_backward(
        do, q, k, v, out, lse, *starts, *ctx.longest, captured, *ctx.options, wanted=wanted, dlse=dlse
    )
    each = iter(found)
    more = [next(each) if want else None for want in wanted]
    # torch leaves trailing arguments out that have their default, and counts what was passed.
    return *gradients, *(None for _ in range(_PLACES)), more, *(None for _ in ctx.needs_input_grad[4 + _PLACES :])


torch.library.register_autograd("flashgen::varlen_forward", _differentiate, setup_context=_keep, lib=library)


register_autocast("varlen_forward")


def _lengths(starts: Any, used: Any, longest: int) -> list[int]:
    """Rows of each sequence that take part; where nothing can be looked at, the most there may be."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(starts, FakeTensor) or starts.device.type == "meta":
        return [longest] * (starts.shape[0] - 1)
    rows = starts.diff()
    return [int(n) for n in (rows if used is None else rows.minimum(used)).tolist()]


def _pairs(starts_q: Any, starts_k: Any, used_q: Any, used_k: Any, longest_q: int, longest_k: int, *_: Any) -> int:
    """Pairs of a query and a key of the same sequence."""
    lengths = _lengths(starts_q, used_q, longest_q), _lengths(starts_k, used_k, longest_k)
    return sum(n * m for n, m in zip(*lengths, strict=True))


@register_flop_formula(torch.ops.flashgen.varlen_forward, get_raw=True)
def _forward_flops(q: Any, k: Any, v: Any, *options: Any, **_: Any) -> int:
    """Two products over every pair within a sequence, whatever the mask."""
    return int(2 * q.shape[1] * _pairs(*options) * (q.shape[2] + v.shape[-1]))


@register_flop_formula(torch.ops.flashgen.varlen_backward, get_raw=True)
def _backward_flops(do: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *options: Any, **_: Any) -> int:
    """Five products: the scores again, dP and dV over head_dim_v, dQ and dK over head_dim."""
    return int(2 * q.shape[1] * _pairs(*options) * (3 * q.shape[2] + 2 * v.shape[-1]))
