"""The scales of an 8-bit cache and of 8-bit queries: what their arrays must be, and the parameters that locate them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.packing import Value
from flashgen.plan.cache import Q_SCALE, SCALES, first_scale_axis
from flashgen.spec import AttentionSpec

Values: TypeAlias = dict[str | None, Value]


def check_scales(
    spec: AttentionSpec, arrays: Sequence[ArrayInfo], batch: int, k: ArrayInfo, q: ArrayInfo | None = None
) -> None:
    """Raises ArgumentError for scales of ``batch`` sequences, or of the cache's pages, that kernels cannot read."""
    problems = [line for a in arrays if a.name in SCALES for line in _problems(spec, a, batch, k)]
    problems += [line for a in arrays if a.name == Q_SCALE and q for line in _query_problems(a, batch, q, k)]
    if problems:
        raise ArgumentError("\n".join(problems))


def query_scale_values(spec: AttentionSpec, arrays: Sequence[ArrayInfo], q: ArrayInfo, k: ArrayInfo) -> Values:
    """The strides between the scales of sequences, of heads of keys, and of the query heads that share such a head."""
    if not spec.element.is_eight_bit:
        return {}
    values: Values = {f"{Q_SCALE}_{axis}": 0 for axis in ("batch", "group", "head")}
    for a in arrays:
        if a.name != Q_SCALE or not a.shape:
            continue
        stride, group = _apart(a, -1), 1
        if a.shape[-1] == q.shape[2] and k.shape[2]:
            # Query heads that share a head of keys have scales of their own.
            group = q.shape[2] // k.shape[2]
        values |= {f"{Q_SCALE}_group": stride * group, f"{Q_SCALE}_head": stride if group > 1 else 0}
        values[f"{Q_SCALE}_batch"] = _apart(a, 0) if len(a.shape) == 2 else 0
    return values


def scale_values(spec: AttentionSpec, arrays: Sequence[ArrayInfo]) -> Values:
    """The strides between the scales of sequences, or of pages, and of heads. Those that share a scale are 0 apart."""
    if not spec.cache_dtype:
        return {}
    first = first_scale_axis(spec)
    values: Values = {f"{name}_{axis}": 0 for name in SCALES for axis in (first, "head")}
    for a in arrays:
        if a.name not in SCALES:
            continue
        if len(a.shape) == 2:
            values |= {f"{a.name}_{first}": _apart(a, 0), f"{a.name}_head": _apart(a, 1)}
        elif len(a.shape) == 1:
            values[f"{a.name}_{'page' if spec.page_scales else 'head'}"] = _apart(a, 0)
    return values


def _apart(a: ArrayInfo, axis: int) -> int:
    return a.strides[axis] if a.shape[axis] > 1 else 0


def _problems(spec: AttentionSpec, a: ArrayInfo, batch: int, k: ArrayInfo) -> Iterator[str]:
    label, heads = f"cache.{a.name}", k.shape[2]
    if a.device != k.device:
        yield f"{label} is on {a.where}, and the cache on {k.where}; move it there"
    shapes: tuple[tuple[int, ...], ...]
    shapes = ((k.shape[0],), (k.shape[0], heads)) if spec.page_scales else ((), (1,), (heads,), (batch, heads))
    yield from _array_problems(label, a, shapes)


def _query_problems(a: ArrayInfo, batch: int, q: ArrayInfo, k: ArrayInfo) -> Iterator[str]:
    heads, heads_kv = q.shape[2], k.shape[2]
    if a.device != q.device:
        yield f"{a.name} is on {a.where}, and q on {q.where}; move it there"
    yield from _array_problems(a.name, a, ((), (1,), (heads_kv,), (heads,), (batch, heads_kv), (batch, heads)))


def _array_problems(label: str, a: ArrayInfo, shapes: tuple[tuple[int, ...], ...]) -> Iterator[str]:
    if a.dtype != "fp32" or a.shape not in shapes:
        allowed = ", ".join(map(str, dict.fromkeys(shapes)))
        yield f"{label} is {a.dtype} of shape {a.shape}; pass float32 of one of the shapes {allowed}"
    elif a.pointer % 4:
        yield f"{label} starts at an address that is no multiple of its element size; pass a copy of it"
