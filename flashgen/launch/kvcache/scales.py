"""The scales of an 8-bit cache: what their arrays must be, and the parameters that locate them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.packing import Value
from flashgen.plan.cache import SCALES
from flashgen.spec import AttentionSpec


def check_scales(spec: AttentionSpec, arrays: Sequence[ArrayInfo], batch: int, k: ArrayInfo) -> None:
    """Raises ArgumentError for scales of ``batch`` sequences, or of the cache's pages, that kernels cannot read."""
    problems = [line for a in arrays if a.name in SCALES for line in _problems(spec, a, batch, k)]
    if problems:
        raise ArgumentError("\n".join(problems))


def scale_values(spec: AttentionSpec, arrays: Sequence[ArrayInfo]) -> dict[str | None, Value]:
    """The strides between the scales of sequences, or of pages, and of heads. Those that share a scale are 0 apart."""
    if not spec.cache_dtype:
        return {}
    values: dict[str | None, Value] = {f"{name}_{axis}": 0 for name in SCALES for axis in ("row", "head")}
    for a in arrays:
        if a.name not in SCALES:
            continue
        if len(a.shape) == 2:
            values |= {f"{a.name}_row": _apart(a, 0), f"{a.name}_head": _apart(a, 1)}
        elif len(a.shape) == 1:
            values[f"{a.name}_{'row' if spec.page_scales else 'head'}"] = _apart(a, 0)
    return values


def _apart(a: ArrayInfo, axis: int) -> int:
    return a.strides[axis] if a.shape[axis] > 1 else 0


def _problems(spec: AttentionSpec, a: ArrayInfo, batch: int, k: ArrayInfo) -> Iterator[str]:
    label, heads = f"cache.{a.name}", k.shape[2]
    if a.device != k.device:
        yield f"{label} is on {a.where}, and the cache on {k.where}; move it there"
    shapes: tuple[tuple[int, ...], ...]
    shapes = ((k.shape[0],), (k.shape[0], heads)) if spec.page_scales else ((), (1,), (heads,), (batch, heads))
    if a.dtype != "fp32" or a.shape not in shapes:
        allowed = ", ".join(map(str, dict.fromkeys(shapes)))
        yield f"{label} is {a.dtype} of shape {a.shape}; pass float32 of one of the shapes {allowed}"
    elif a.pointer % 4:
        yield f"{label} starts at an address that is no multiple of its element size; pass a copy of it"
