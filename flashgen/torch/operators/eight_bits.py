"""``torch.ops.flashgen.eight_bit_forward``: attention of 8-bit queries, keys and values. It has no gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import dtype_name
from flashgen.launch.call.batched_launch import Found, run
from flashgen.launch.call.scales import GivenScales
from flashgen.spec import KVCache, Sequences
from flashgen.torch.kernels import cached_kernel, eight_bit_kernel, eight_bits_suit_decode
from flashgen.torch.operators.attention import pairs_of
from flashgen.torch.operators.library import arguments_by_name, forward_shapes, implement, library
from flashgen.torch.packed import ARRAYS, arrays_of, sequences_of
from flashgen.torch.program import Program, check_tensors, program_named
from flashgen.torch.scales import InputScales, out_dtype_of
from flashgen.torch.tensors import rows_contiguous
from flashgen.torch.tracing import compiled

_NAME = "eight_bit_forward"
_SCALES = ("q_scale", "k_scale", "v_scale")
library.define(
    f"{_NAME}(Tensor q, Tensor k, Tensor v, {', '.join(f'Tensor? {name}' for name in _SCALES)}, Tensor[] captured, "
    "str program, ScalarType out_dtype, float? scale=None, int? scale_block=None, "
    f"{', '.join(f'Tensor? {name}=None' for name in ARRAYS)}, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0) "
    "-> (Tensor, Tensor)"
)


def call_eight_bit_operator(
    q: Any,
    k: Any,
    v: Any,
    program: Program,
    captured: Sequence[Any],
    scale: float | None,
    sequences: Sequences | None,
    scales: InputScales,
) -> tuple[Any, Any]:
    """``(out, lse)`` through the dispatcher."""
    places: tuple[Any, ...] = ()
    if sequences is not None:
        places = *arrays_of(sequences), sequences.max_seqlen_q, sequences.max_seqlen_k
    result: tuple[Any, Any] = torch.ops.flashgen.eight_bit_forward(
        *(q, k, v, *(scale_tensor(x, q) for x in scales[:3]), list(captured), compiled.text_of(program)),
        *(scales.out_dtype, scale, scales.block, *places),
    )
    return result


def find_call(
    q: Any,
    k: Any,
    v: Any,
    program: Program,
    captured: Sequence[Any],
    scale: float | None,
    sequences: Sequences | None,
    scales: InputScales,
) -> Found:
    """The call of a kernel, ready to run."""
    of_inputs, block, out_dtype = scales[:3], scales.block, out_dtype_of(scales.out_dtype)
    packed, named = sequences is not None, dict(zip(program.names, captured, strict=True))
    if not eight_bits_suit_decode(q, k, block, packed=packed):
        kernel = eight_bit_kernel(q, v, program, block, dtype_name(str(out_dtype)), packed=packed)
        return kernel.executor.find_forward(q, k, v, scale, None, named, None, sequences, scales=of_inputs)
    GivenScales.of(of_inputs)
    dims = q.shape[-1], v.shape[-1]
    kernel = cached_kernel(*dims, q.dtype, program, "contiguous", q.get_device(), out_dtype=out_dtype)
    cache = KVCache(k_scale=scale_tensor(scales.k, q), v_scale=scale_tensor(scales.v, q))
    of_queries = scales.q, None, None
    try:
        return kernel.executor.find_forward(q, k, v, scale, None, named, cache=cache, scales=of_queries)
    except ArgumentError as error:
        # The caller passed k_scale, and no cache.
        raise ArgumentError(str(error).replace("cache.", "")) from error


def scale_tensor(scale: Any, q: Any) -> Any:
    """A scale as operators take it."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return torch.full((), scale, dtype=torch.float32, device=q.device)


def _forward(*given: Any, **named: Any) -> tuple[Any, Any]:
    call = arguments_by_name(_NAME, given, named)
    q, k, v = (rows_contiguous(call[name]) for name in "qkv")
    program, sequences = program_named(call["program"]), None
    if call[ARRAYS[0]] is not None:
        sequences = sequences_of([call[name] for name in ARRAYS], (call["max_seqlen_q"], call["max_seqlen_k"]))
    if program.names:
        check_tensors(program.names, tuple(call["captured"]), q.device)
    scales = InputScales(*[call[name] for name in (*_SCALES, "scale_block", "out_dtype")])
    out, lse, *_ = run(find_call(q, k, v, program, call["captured"], call["scale"], sequences, scales), q)
    return out, lse


def _shapes(*given: Any, **named: Any) -> tuple[Any, Any]:
    call = arguments_by_name(_NAME, given, named)
    out, lse = forward_shapes(call["q"], call["v"])
    return out.new_empty(out.shape, dtype=call["out_dtype"]), lse


def _flops(*given: Any, out_val: Any = None, **named: Any) -> int:
    """Two products over every pair."""
    every = arguments_by_name(_NAME, given, named)
    call = {name: x for name, x in every.items() if name not in ARRAYS or x is not None}
    q, v = call["q"], call["v"]
    return int(2 * q.shape[-2] * pairs_of(call) * (q.shape[-1] + v.shape[-1]))


implement(_NAME, _forward)
torch.library.register_fake(f"flashgen::{_NAME}", _shapes, lib=library)
register_flop_formula(getattr(torch.ops.flashgen, _NAME), get_raw=True)(_flops)
