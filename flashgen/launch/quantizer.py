"""Calls of the quantize kernel, which makes e4m3 of 16-bit queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flashgen.common.show import show
from flashgen.dtypes import ARGUMENTS
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo, Framework, alignment, canonical, contiguous_strides
from flashgen.launch.arrays.frameworks import UNREADABLE, common_framework, framework_of, unreadable
from flashgen.launch.call.arguments import check_forward
from flashgen.launch.call.batched_launch import Found, run
from flashgen.launch.call.call_options import Side, SideArguments, offsets_of
from flashgen.launch.call.packed import as_batch, longest, packed_values, without_batch
from flashgen.launch.call.packing import Value
from flashgen.launch.call.prepared import Call, Output, call_values, make_call, make_steps, remember, stretch_of
from flashgen.launch.target import Ready, Target
from flashgen.plan.model.params import INPUT_SCALES
from flashgen.plan.model.plans import Problem, Role
from flashgen.plan.quantize import ACCESS_BYTES, CODES, QUANTIZE, row_blocks
from flashgen.spec import AttentionSpec, Sequences, full

_NAMES = ("q", "k", "v")
#: ``load(device, stream) -> kernels by role``.
Load = Callable[[int, int | None], Mapping[Role, Ready]]


class Quantized(NamedTuple):
    """Queries, keys and values in e4m3, and what the codes of each block of rows are multiplied by."""

    q: Any
    k: Any
    v: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any


class Quantizer:
    """Calls of the quantize kernel of one spec; safe to use from many threads."""

    def __init__(self, spec: AttentionSpec, target: Target, load: Load) -> None:
        #: What the arguments are for.
        self._spec = replace(
            spec, dtype=spec.out_element.name, out_dtype=None, scale_block=None, mask=full(), score=None
        )
        self._block, self._target, self._load = spec.scale_block, target, load
        self._side = SideArguments(self._spec)
        self._calls: dict[Any, Call] = {}

    def __call__(self, q: Any, k: Any, v: Any, rotate: bool, sequences: Sequences | None, stream: Any) -> Quantized:
        """The codes and the scales."""
        return Quantized(*run(self.find(q, k, v, rotate, sequences, stream), q, stream))

    def find(self, q: Any, k: Any, v: Any, rotate: bool, sequences: Sequences | None, stream: Any) -> Found:
        """The prepared call for these arguments: a remembered one, if there was a call like it."""
        self._target.check()
        if type(rotate) is not bool:
            raise ArgumentError(f"rotate={show(rotate)} is not a bool; use True or False")
        side, beside, _ = self._side.of(None, sequences)
        arrays, names = (*beside, q, k, v), (*side.names, *_NAMES)
        framework = framework_of(q)
        try:
            signature, pointers = framework.signature(arrays, stream)
        except UNREADABLE as error:
            raise unreadable(names, arrays, framework, error) from error
        key = signature, side, rotate
        call = self._calls.get(key)
        if call is None:
            common_framework(names, arrays)
            infos = [canonical(info) for info in framework.describe(names, signature)]
            call = self._prepare(framework, infos, side, rotate, stream)
            remember(self._calls, key, call)
        return self._target, call, framework, arrays, pointers, ()

    def _prepare(self, framework: Framework, infos: Sequence[ArrayInfo], side: Side, rotate: bool, stream: Any) -> Call:
        beside, given = infos[: len(side.names)], list(infos[len(side.names) :])
        aligned = alignment(given, self._spec.element.bytes) >= ACCESS_BYTES
        if self._spec.varlen:
            given = as_batch(given)
        q, k, v = given
        rows = check_forward(self._spec, q, k, v, on_host=self._target.on_host)
        count = self._side.check(beside, q, k)
        problem = longest(rows, count, side.longest) if self._spec.varlen else rows
        outputs = tuple(self._outputs(rows, count, given))
        values = call_values(problem, (0, 0), 1.0, given, outputs)
        values |= {"rotates": int(rotate), "is_aligned": int(aligned), **_scale_strides(outputs)}
        if self._spec.varlen:
            values |= packed_values(full(), rows)
            outputs = without_batch(outputs)
        kernels = self._load(q.device, framework.stream(q.device, stream))
        names = (*side.names, *_NAMES, *(o.name for o in outputs))
        blocks = row_blocks(kernels[QUANTIZE].plan, problem, self._target.multiprocessors(q.device))
        grid = replace(problem, len_q=-(-problem.len_q // blocks), len_kv=-(-problem.len_kv // blocks))
        steps = make_steps(kernels, (QUANTIZE,), grid, values | {"blocks": blocks}, {}, names)
        if not self._target.on_host:
            return make_call(framework, q.device, steps, outputs)
        sizes = (*side.item_bytes, *(ARGUMENTS[info.dtype].bytes for info in given))
        stretches = [stretch_of(i, size, writable=False) for i, size in zip(infos, sizes, strict=True)]
        checked = offsets_of(side, beside, q, k, has_cache=False)
        return make_call(framework, q.device, steps, outputs, (), stretches, checked)

    def _outputs(self, rows: Problem, sequences: int, given: Sequence[ArrayInfo]) -> Iterator[Output]:
        """The codes, then the scales, which of packed sequences have a batch of one, too."""
        assert self._block is not None, "a spec with blocks"
        for name, info in zip(CODES, given, strict=True):
            yield Output(name, info.shape, "e4m3")
        for name, info in zip(INPUT_SCALES, given, strict=True):
            batch, length, heads, _ = info.shape
            blocks = length // self._block + sequences if self._spec.varlen else -(-length // self._block)
            yield Output(name, (batch, heads, blocks), "fp32")


def _scale_strides(outputs: Sequence[Output]) -> dict[str | None, Value]:
    values: dict[str | None, Value] = {}
    for output in outputs:
        if output.name in INPUT_SCALES:
            batch, head, _ = contiguous_strides(output.shape)
            values |= {f"{output.name}_batch": batch, f"{output.name}_head": head}
    return values
