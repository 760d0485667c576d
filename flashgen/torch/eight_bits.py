"""Attention of 8-bit queries to 8-bit keys and values, which have scales. There are no gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.launch.call.batched_launch import run
from flashgen.spec import Sequences
from flashgen.torch.kernels import EIGHT_BIT_INPUTS
from flashgen.torch.operators.eight_bits import call_eight_bit_operator, find_call
from flashgen.torch.options import Options, check_dense, number_of
from flashgen.torch.packed import arrays_of, longest_of
from flashgen.torch.program import Program, check_tensors
from flashgen.torch.replay import CallKey, remember, replayed
from flashgen.torch.scales import NO_INPUT_SCALES, InputScales, out_dtype_of
from flashgen.torch.tensors import PLAIN_TYPES, needs_dispatcher, over_batch, rows_contiguous, wants_gradients

#: The arguments of ``attention`` that make ``InputScales``.
EIGHT_BIT_ARGUMENTS = ("q_scale", "k_scale", "v_scale", "scale_block", "out_dtype")


def is_eight_bit(q: Any) -> bool:
    """Whether queries are of 8 bits."""
    return getattr(q, "dtype", None) is EIGHT_BIT_INPUTS


def check_eight_bits(q: Any, arguments: Mapping[str, Any], cache: Any = None) -> None:
    """ArgumentError for arguments that 8-bit queries alone have, or for what does not go with such queries."""
    if not is_eight_bit(q):
        given = next(name for name, x in arguments.items() if x is not None)
        kind = str(q.dtype) if isinstance(q, torch.Tensor) else f"a {type(q).__qualname__}"
        raise ArgumentError(f"{given} is for q, k and v of torch.float8_e4m3fn, and q is {kind}; leave it out")
    if cache is not None:
        for name in EIGHT_BIT_ARGUMENTS[1:4]:
            if arguments[name] is not None:
                remedy = "each page may have a scale, with page_scales=True"
                if name != "scale_block":
                    remedy = f"pass cache=flashgen.KVCache({name}=...)"
                raise ArgumentError(f"{name}={show(arguments[name])} does not go with cache; {remedy}")


def attend_eight_bits(
    q: Any,
    k: Any,
    v: Any,
    program: Program,
    captured: Sequence[Any],
    options: Options,
    scales: InputScales = NO_INPUT_SCALES,
) -> tuple[Any, Any]:
    """``(out, lse)``: a call like one before is replayed; where something must see an operator, it does."""
    sequences = options.sequences
    out_dtype = out_dtype_of(scales.out_dtype)
    numbers = tuple(None if x is None or isinstance(x, torch.Tensor) else x for x in scales[:3])
    tensors = tuple(x if isinstance(x, torch.Tensor) else None for x in scales[:3])
    constants = program.rule, options.scale, longest_of(sequences), len(captured), scales.block, out_dtype, *numbers
    key: CallKey = (q, k, v, *captured, *arrays_of(sequences), *tensors), ("eight bits", *constants)
    found = replayed(key)
    if found is not None:
        return found[0], found[1]
    check_dense(q=q, k=k, v=v)
    _check_options(options, (q, k, v, *captured, *tensors))
    if sequences is None:
        k, v = over_batch(q, k), over_batch(q, v)
    arguments = program, tuple(captured), options.scale, sequences, scales._replace(out_dtype=out_dtype)
    if torch.compiler.is_compiling():
        return call_eight_bit_operator(q, k, v, *arguments)
    for name, number in zip(EIGHT_BIT_ARGUMENTS[:3], numbers, strict=True):
        if number is not None:
            number_of(name, number)
    is_watched = needs_dispatcher(q, k, v)
    check_tensors(program.names, captured, q.device)
    if is_watched or any([type(x) not in PLAIN_TYPES for x in captured]):  # noqa: C419 (quicker)
        return call_eight_bit_operator(q, k, v, *arguments)
    return _call_kernel(q, k, v, program, captured, options.scale, sequences, scales, key)


def _call_kernel(
    q: Any,
    k: Any,
    v: Any,
    program: Program,
    captured: Sequence[Any],
    scale: float | None,
    sequences: Sequences | None,
    scales: InputScales,
    key: CallKey,
) -> tuple[Any, Any]:
    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    found = find_call(q, k, v, program, captured, scale, sequences, scales)
    if sequences is None or not found[0].on_host:
        remember(key, [(found, ())])
    out, lse, *_ = run(found, q)
    return out, lse


def _check_options(options: Options, tensors: Sequence[Any]) -> None:
    """ArgumentError for what does not go with 8-bit queries."""
    if options.dropout_p != 0.0:
        raise ArgumentError(f"dropout_p={show(options.dropout_p)} does not go with 8-bit q, k and v; leave it out")
    if wants_gradients(*tensors):
        raise ArgumentError("attention of 8-bit q, k and v has no gradients; call it under torch.no_grad()")
