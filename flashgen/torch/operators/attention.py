"""``torch.ops.flashgen.forward``, ``.program_forward`` and ``.varlen_forward``, and their backward passes.

They compute the same and differ in their arguments:

- ``forward`` takes a mask of bands as four numbers: ``left`` and ``right`` are those of the window that aligns the last
  query with the last key, ``left_from_start`` and ``right_from_start`` of the one that aligns the first with the first.
  So ``right=0`` is a causal mask.
- ``program_forward`` takes any mask and score: the text of a ``Program``, and the captured tensors in the order of
  their names.
- ``varlen_forward`` also takes where packed sequences begin, as tensors that only kernels read, and the longest
  lengths, as numbers that torch.compile may leave open. q is ``(total_q, heads, head_dim)``, lse ``(heads, total_q)``.

``wanted`` says which captured tensors want a gradient; those come last, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import register_flop_formula

from flashgen.spec import Sequences
from flashgen.torch.gradients import backward_with_captured, incoming
from flashgen.torch.kernels import ALL_KEYS, decode_kernel_for, forward_kernel, kernel_for, suits_decode
from flashgen.torch.operators.library import arguments_by_name, forward_shapes, implement, library, register_autocast
from flashgen.torch.options import Options
from flashgen.torch.packed import ARRAYS, arrays_of, sequences_of
from flashgen.torch.program import Program, check_tensors, program_named
from flashgen.torch.randomness import drawn_state, dropout_of
from flashgen.torch.tensors import rows_contiguous
from flashgen.torch.tracing import compiled

_LIMITS = ("left", "right", "left_from_start", "right_from_start")
_LONGEST = ("max_seqlen_q", "max_seqlen_k")
_LAST = "bool deterministic=False, float dropout_p=0.0, Tensor? rng_state=None"
_PROGRAM = f"Tensor[] captured, str program, float? scale=None, {_LAST}"
_PLACES = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k"
)
#: The arguments after q, k and v by the operator's prefix.
_ARGUMENTS = {
    "": f"float? scale=None, {', '.join(f'int? {name}=None' for name in _LIMITS)}, {_LAST}",
    "program_": _PROGRAM,
    "varlen_": f"{_PLACES}, {_PROGRAM}",
}


def call_operator(
    q: Any, k: Any, v: Any, program: Program, captured: Sequence[Any], options: Options
) -> tuple[Any, Any]:
    """``(out, lse)`` through the dispatcher, where compilers, modes, subclasses and transforms see one operator."""
    scale, deterministic, dropout_p, sequences, rng_state = options
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    last = deterministic, dropout_p, drawn_state(dropout_p, q, rng_state)
    rule = program.rule
    result: tuple[Any, Any]
    if sequences is None and not isinstance(rule, str):
        result = torch.ops.flashgen.forward(q, k, v, scale, *rule, *last)
        return result
    text = compiled.text_of(program)
    if sequences is None:
        result = torch.ops.flashgen.program_forward(q, k, v, list(captured), text, scale, *last)
    else:
        places = *arrays_of(sequences), sequences.max_seqlen_q, sequences.max_seqlen_k
        result = torch.ops.flashgen.varlen_forward(q, k, v, *places, list(captured), text, scale, *last)
    return result


def _forward(operator: str, *given: Any, **named: Any) -> tuple[Any, Any]:
    call = arguments_by_name(operator, given, named)
    q, k, v = (rows_contiguous(call[name]) for name in "qkv")
    program, options = _program(call), _options(call)
    kind = _kind(options)
    if suits_decode(q, k, **kind):
        kernel, options = decode_kernel_for(q, v, program), {"scale": call["scale"], "cache": ALL_KEYS}
    else:
        kernel = forward_kernel(q, v, program, deterministic=call["deterministic"], **kind)
    if program.names:
        captured = call["captured"]
        check_tensors(program.names, tuple(captured), q.device)
        options["captured"] = dict(zip(program.names, captured, strict=True))
    out, lse = kernel(q, k, v, **options)
    return out, lse


def _backward(operator: str, *given: Any, **named: Any) -> tuple[Any, ...]:
    call = arguments_by_name(operator, given, named)
    q, k, v, out = (rows_contiguous(call[name]) for name in ("q", "k", "v", "out"))
    do, dlse = incoming(out, call["do"], call["dlse"])
    program, options, captured = _program(call), _options(call), call.get("captured", ())
    kernel = kernel_for(q, v, program, gradients=True, deterministic=call["deterministic"], **_kind(options))
    arrays, wanted = (do, q, k, v, out, call["lse"].contiguous()), call.get("wanted") or [False] * len(captured)
    options["dlse"] = dlse
    dq, dk, dv, more = backward_with_captured(kernel, arrays, program.names, captured, wanted, options)
    found = [gradient for gradient in more if gradient is not None]
    return (dq, dk, dv, found) if "captured" in call else (dq, dk, dv)


def _program(call: dict[str, Any]) -> Program:
    if "program" in call:
        return program_named(call["program"])
    left, right, left_from_start, right_from_start = (call[name] for name in _LIMITS)
    return Program((left, right, left_from_start, right_from_start))


def _options(call: dict[str, Any]) -> dict[str, Any]:
    """What both passes of a ``Kernel`` take besides arrays."""
    return {
        "scale": call["scale"],
        "dropout": dropout_of(call["dropout_p"], call["rng_state"]),
        "sequences": _sequences(call),
    }


def _sequences(call: dict[str, Any]) -> Sequences | None:
    if "cu_seqlens_q" not in call:
        return None
    longest_q, longest_k = (call[name] for name in _LONGEST)
    return sequences_of([call[name] for name in ARRAYS], (longest_q, longest_k))


def _kind(options: dict[str, Any]) -> dict[str, bool]:
    return {"drops": options["dropout"] is not None, "packed": options["sequences"] is not None}


def _forward_shapes(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    return forward_shapes(q, v)


def _backward_shapes(operator: str, *given: Any, **named: Any) -> tuple[Any, ...]:
    call = arguments_by_name(operator, given, named)
    gradients = tuple(call[name].new_empty(call[name].shape) for name in "qkv")
    if "captured" not in call:
        return gradients
    # No ``wanted`` means none of them.
    pairs = zip(call["captured"], call["wanted"], strict=False)
    return *gradients, [tensor.new_empty(tensor.shape) for tensor, want in pairs if want]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    leaves, ctx.structure = tree_flatten(inputs)
    ctx.others = [None if isinstance(x, torch.Tensor) else x for x in leaves]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *(x if isinstance(x, torch.Tensor) else None for x in leaves))


def _differentiate(operator: str, ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    leaves = [x if t is None else t for x, t in zip(ctx.others, tensors, strict=True)]
    q, k, v, *rest = tree_unflatten(leaves, ctx.structure)
    do = torch.zeros_like(out) if do is None else do
    backward = getattr(torch.ops.flashgen, operator)
    # torch leaves trailing arguments out that have their default, and counts what was passed.
    others: list[Any] = [None for _ in ctx.needs_input_grad[3:]]
    place = next((i for i, x in enumerate(rest) if isinstance(x, (list, tuple))), None)
    if place is None:
        return *backward(do, q, k, v, out, lse, *rest, dlse=dlse), *others
    needed = ctx.needs_input_grad[3 + place]
    wanted = [bool(need) for need in needed] if rest[place] else []
    *gradients, found = backward(do, q, k, v, out, lse, *rest, wanted=wanted, dlse=dlse)
    each = iter(found)
    others[place] = [next(each) if want else None for want in wanted]
    return *gradients, *others


def pairs_of(call: dict[str, Any]) -> int:
    """Pairs of a query and a key; masks are not subtracted, as torch's own formulas do not."""
    q, k = call["q"], call["k"]
    if "cu_seqlens_q" not in call:
        return int(q.shape[0] * q.shape[1] * k.shape[1])
    lengths = (_lengths(call[f"cu_seqlens_{x}"], call.get(f"seqused_{x}"), call[f"max_seqlen_{x}"]) for x in "qk")
    return sum(n * m for n, m in zip(*lengths, strict=True))


def _lengths(starts: Any, used: Any, longest: int) -> list[int]:
    """Rows of each sequence that take part; where nothing can be looked at, the most there may be."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(starts, FakeTensor) or starts.device.type == "meta":
        return [longest] * (starts.shape[0] - 1)
    rows = starts.diff()
    return [int(n) for n in (rows if used is None else rows.minimum(used)).tolist()]


def _forward_flops(operator: str, *given: Any, out_val: Any = None, **named: Any) -> int:
    """Two products over every pair."""
    call = arguments_by_name(operator, given, named)
    q, v = call["q"], call["v"]
    return int(2 * q.shape[-2] * pairs_of(call) * (q.shape[-1] + v.shape[-1]))


def _backward_flops(operator: str, *given: Any, out_val: Any = None, **named: Any) -> int:
    """Five products: the scores again, dP and dV over head_dim_v, dQ and dK over head_dim."""
    call = arguments_by_name(operator, given, named)
    q, v = call["q"], call["v"]
    return int(2 * q.shape[-2] * pairs_of(call) * (3 * q.shape[-1] + 2 * v.shape[-1]))


def _register(prefix: str, arguments: str) -> None:
    forward, backward = f"{prefix}forward", f"{prefix}backward"
    wanted, more = ("bool[] wanted=[], ", ", Tensor[]") if "captured" in arguments else ("", "")
    library.define(f"{forward}(Tensor q, Tensor k, Tensor v, {arguments}) -> (Tensor, Tensor)")
    library.define(
        f"{backward}(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {arguments}, "
        f"{wanted}Tensor? dlse=None) -> (Tensor, Tensor, Tensor{more})"
    )
    implement(forward, partial(_forward, forward))
    implement(backward, partial(_backward, backward))
    torch.library.register_fake(f"flashgen::{forward}", _forward_shapes, lib=library)
    torch.library.register_fake(f"flashgen::{backward}", partial(_backward_shapes, backward), lib=library)
    differentiate = partial(_differentiate, backward)
    torch.library.register_autograd(f"flashgen::{forward}", differentiate, setup_context=_keep, lib=library)
    register_autocast(forward)
    ops = torch.ops.flashgen
    register_flop_formula(getattr(ops, forward), get_raw=True)(partial(_forward_flops, forward))
    register_flop_formula(getattr(ops, backward), get_raw=True)(partial(_backward_flops, backward))


for _prefix, _arguments in _ARGUMENTS.items():
    _register(_prefix, _arguments)

#: For selective activation checkpointing: save the results of these operators rather than compute them again.
SAC_SAVE = tuple(getattr(torch.ops.flashgen, f"{prefix}forward").default for prefix in _ARGUMENTS)
