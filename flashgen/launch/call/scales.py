"""The scales of 8-bit queries, keys and values: what they must be, and the parameters that locate them."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from flashgen.common.checks import as_float
from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.packing import Value
from flashgen.plan.model.params import INPUT_SCALES, V_FACTOR
from flashgen.spec import AttentionSpec

#: Of q, k and v: an array, a number, or None for 1.
Scales: TypeAlias = tuple[Any, Any, Any]
NO_SCALES: Scales = (None, None, None)
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127


@dataclass(frozen=True, slots=True)
class GivenScales:
    """The scales of a call: arrays by the names of their parameters, and the products of those that are numbers."""

    names: tuple[str, ...] = ()
    arrays: tuple[Any, ...] = ()
    #: What logits are multiplied by, and what O is.
    factors: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def of(cls, scales: Scales) -> GivenScales:
        """ArgumentError for numbers that are no scales."""
        named = list(zip(INPUT_SCALES, scales, strict=True))
        values = {name: _number(name, x) for name, x in named if isinstance(x, numbers.Real)}
        arrays = {name: x for name, x in named if x is not None and name not in values}
        q, k, v = (values.get(name, 1.0) for name in INPUT_SCALES)
        if not _SMALLEST <= q * k <= _LARGEST:
            raise ArgumentError(
                f"q_scale={show(q)} times k_scale={show(k)} must be a number above 0 that a float32 can hold"
            )
        return cls(tuple(arrays), tuple(arrays.values()), (q * k, v))

    @classmethod
    def of_queries(cls, scales: Scales) -> GivenScales:
        """Those of a call with a cache, which has the other ones."""
        for name, x in zip(INPUT_SCALES[1:], scales[1:], strict=True):
            if x is not None:
                raise ArgumentError(f"{name} is a scale of the cache; pass cache=flashgen.KVCache({name}=...)")
        return cls.of(scales)

    @property
    def values(self) -> tuple[tuple[str, float], ...]:
        """Parameters by name."""
        return ((V_FACTOR, self.factors[1]),)


def check_input_scales(
    spec: AttentionSpec, arrays: Sequence[ArrayInfo], sequences: int, q: ArrayInfo, k: ArrayInfo
) -> None:
    """ArgumentError for scales that kernels cannot read; q and k of packed sequences are a batch of one."""
    by_name = dict(zip(INPUT_SCALES, (q, k, k), strict=True))
    pairs = [(a, by_name[a.name]) for a in arrays if a.name in by_name]
    problems = [line for a, of in pairs for line in _problems(spec, a, sequences, of)]
    if problems:
        raise ArgumentError("\n".join(problems))


def input_scale_values(spec: AttentionSpec, arrays: Sequence[ArrayInfo]) -> dict[str | None, Value]:
    """The strides between the scales of sequences and of heads. Those that share a scale are 0 apart."""
    if not spec.multiplies_eight_bits:
        return {}
    values: dict[str | None, Value] = {f"{name}_{axis}": 0 for name in INPUT_SCALES for axis in ("batch", "head")}
    for a in arrays:
        if a.name not in INPUT_SCALES:
            continue
        axes = range(len(a.shape) - (1 if spec.scale_block else 0))
        for axis, stride in zip(("head", "batch"), [_apart(a, i) for i in reversed(axes)], strict=False):
            values[f"{a.name}_{axis}"] = stride
    return values


def _number(name: str, value: Any) -> float:
    number = None if isinstance(value, bool) else as_float(value)
    if number is None or not _SMALLEST <= number <= _LARGEST:
        raise ArgumentError(f"{name}={show(value)} must be an array or a finite number above 0 that float32 can hold")
    return number


def _apart(a: ArrayInfo, axis: int) -> int:
    return a.strides[axis] if a.shape[axis] > 1 else 0


def _problems(spec: AttentionSpec, a: ArrayInfo, sequences: int, of: ArrayInfo) -> Iterator[str]:
    """What is wrong with the scales of an array."""
    batch = sequences if spec.varlen else of.shape[0]
    shapes = _shapes(spec, batch, of.shape[1], of.shape[2])
    if a.device != of.device:
        yield f"{a.name} is on {a.where}, and {of.name} on {of.where}; move it there"
    if a.dtype != "fp32" or a.shape not in shapes:
        allowed = " or ".join(map(str, dict.fromkeys(shapes)))
        rows = f" for blocks of {spec.scale_block} rows" if spec.scale_block else ""
        yield f"{a.name} is {a.dtype} of shape {a.shape}; pass float32 of shape {allowed}{rows}"
    elif spec.scale_block and a.shape[-1] > 1 and a.strides[-1] != 1:
        yield f"{a.name} has strides {a.strides}; the last one must be 1: pass a contiguous copy"
    elif a.pointer % 4:
        yield f"{a.name} starts at an address that is no multiple of its element size; pass a copy of it"


def _shapes(spec: AttentionSpec, batch: int, rows: int, heads: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that scales may have; ``rows`` are those of a sequence, or of all packed sequences."""
    block = spec.scale_block
    if block is None:
        return (), (1,), (heads,), (batch, heads)
    if spec.varlen:
        # Each sequence begins a block; first_tile_of in sequence.cuh numbers them.
        return ((heads, rows // block + batch),)
    return ((batch, heads, -(-rows // block)),)
