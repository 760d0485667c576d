"""What a call's arguments must be, checked before anything is launched; every complaint is a sentence."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from itertools import chain

from flashgen.common.checks import as_float
from flashgen.common.show import show
from flashgen.dtypes import DType
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import HOST, ArrayInfo, contiguous_strides
from flashgen.plan.model.plans import Problem
from flashgen.spec import AttentionSpec

_LENGTH_LIMIT = 2**31
_LAYOUTS = {
    "q": "(batch, len_q, heads_q, head_dim)",
    "k": "(batch, len_kv, heads_kv, head_dim)",
    "v": "(batch, len_kv, heads_kv, head_dim_v)",
    "qv": "(batch, len_q, heads_q, head_dim_v)",
    "k_cache": "(rows or pages, keys, heads_kv, head_dim)",
    "v_cache": "(rows or pages, keys, heads_kv, head_dim_v)",
    "out": "(batch, len_q, heads_q, head_dim_v)",
    "do": "(batch, len_q, heads_q, head_dim_v)",
}
_SMALLEST_SCALE = 2.0**-126
_LARGEST_SCALE = 2.0**127


def check_scale(scale: object) -> float:
    """The factor on scores: a positive number that float32 can hold."""
    if type(scale) is float and _SMALLEST_SCALE <= scale <= _LARGEST_SCALE:
        return scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise ArgumentError(f"scale={show(scale)} is not a number; pass a Python float, or None for 1/sqrt(head_dim)")
    value = as_float(scale)
    if value is None or not _SMALLEST_SCALE <= value <= _LARGEST_SCALE:
        raise ArgumentError(f"scale={show(scale)} must be a finite number above 0 that a float32 can hold")
    return value


def check_forward(
    spec: AttentionSpec,
    q: ArrayInfo,
    k: ArrayInfo,
    v: ArrayInfo,
    qv: ArrayInfo | None = None,
    *,
    on_host: bool,
    cached: bool = True,
) -> Problem:
    """The sizes of a forward call, or an ArgumentError that lists what is wrong.

    ``cached``: with a cache, k and v are it.
    """
    of_cache = spec.cache_element if cached else spec.element
    queries = (q,) if qv is None else (q, qv)
    _raise_if_any(chain(_common(spec, queries, on_host, q), _common(spec, (k, v), on_host, q, of_cache)))
    _raise_if_any(_shapes(spec, q, k, v))
    if qv is not None and qv.shape != (*q.shape[:3], spec.head_dim_v):
        raise ArgumentError(f"qv has shape {qv.shape}; with this q it must be {(*q.shape[:3], spec.head_dim_v)}")
    batch, len_q, heads_q, _ = q.shape
    return Problem(batch, heads_q, k.shape[2], len_q, k.shape[1])


def check_backward(
    spec: AttentionSpec,
    do: ArrayInfo,
    q: ArrayInfo,
    k: ArrayInfo,
    v: ArrayInfo,
    out: ArrayInfo,
    lse: ArrayInfo,
    dlse: ArrayInfo | None = None,
    *,
    on_host: bool,
) -> Problem:
    """The sizes of a backward call, or an ArgumentError that lists what is wrong."""
    if not spec.needs_backward:
        raise ArgumentError(
            "this kernel was built with direction='forward' and has no backward pass; "
            "build the spec with direction='both'"
        )
    _raise_if_any(_common(spec, (q, k, v, out, do), on_host, q))
    problem = check_forward(spec, q, k, v, on_host=on_host)
    _raise_if_any(_gradient_shapes(spec, problem, out, do))
    _raise_if_any(_row_shapes(problem, q, lse, "the float32 array that the forward call returned"))
    if dlse is not None:
        _raise_if_any(_row_shapes(problem, q, dlse, "float32, as lse is"))
    return problem


def check_writable(*arrays: ArrayInfo) -> None:
    """ArgumentError for arrays that a call writes to and their library does not let others write to."""
    _raise_if_any(
        f"{a.name} is read-only, and this call writes to it; pass an array that can be written (a NumPy memory map of "
        "mode 'r+', or a copy)"
        for a in arrays
        if not a.writable
    )


def _raise_if_any(problems: Iterator[str]) -> None:
    found = list(problems)
    if found:
        raise ArgumentError("\n".join(found))


def _common(
    spec: AttentionSpec, arrays: Sequence[ArrayInfo], on_host: bool, first: ArrayInfo, element: DType | None = None
) -> Iterator[str]:
    """Rank, dtype, device and innermost stride. All arguments are on the device of the ``first``."""
    element = element or spec.element
    for a in arrays:
        if len(a.shape) != 4:
            yield f"{a.name} has shape {a.shape}; it must have 4 dimensions: {_LAYOUTS[a.name]}"
        elif a.strides[3] != 1:
            yield (
                f"{a.name} has strides {a.strides}; the last one must be 1, so that the elements of a head "
                f"lie side by side: pass {a.name}.contiguous() or a view that keeps the last dimension last"
            )
        if a.dtype != element.name:
            yield f"{a.name} is {a.dtype}, but this kernel was built for {_wanted(spec, element)}; convert it"
        if on_host and a.device != HOST:
            yield f"{a.name} is on {a.where}, but the emulator runs on the CPU; pass NumPy arrays"
        elif not on_host and a.device == HOST:
            yield (
                f"{a.name} is on the CPU, but this kernel runs on a GPU; move it there, or build with target='emulator'"
            )
        elif a.device != first.device:
            yield f"{a.name} is on {a.where} and {first.name} on {first.where}; put all arguments on one device"
        elif a.pointer % element.bytes:
            yield f"{a.name} starts at an address that is no multiple of its element size; pass a copy of it"


def _wanted(spec: AttentionSpec, element: DType) -> str:
    return element.name if element is spec.element else f"an 8-bit cache of {element.name} ({element.aliases[-1]})"


def _shapes(spec: AttentionSpec, q: ArrayInfo, k: ArrayInfo, v: ArrayInfo) -> Iterator[str]:
    """How q, k and v fit the spec and each other."""
    for a, dim, name in (
        (q, spec.head_dim, "head_dim"),
        (k, spec.head_dim, "head_dim"),
        (v, spec.head_dim_v, "head_dim_v"),
    ):
        if a.shape[3] != dim:
            yield (
                f"{a.name} has shape {a.shape}, so its head dimension is {a.shape[3]}; "
                f"this kernel was built for {name}={dim}"
            )
    # A cache may have more rows than a call has sequences, or is one of pages.
    first = k if spec.cache else q
    for a in (k, v):
        if a.shape[0] != first.shape[0]:
            yield f"{a.name} has batch {a.shape[0]} and {first.name} has batch {first.shape[0]}; they must be equal"
    if v.shape[1] != k.shape[1]:
        yield f"v has {v.shape[1]} keys and k has {k.shape[1]}; they must be equal"
    if v.shape[2] != k.shape[2]:
        yield f"v has {v.shape[2]} heads and k has {k.shape[2]}; they must be equal"
    heads_q, heads_kv = q.shape[2], k.shape[2]
    if heads_kv == 0 < heads_q or (heads_kv and heads_q % heads_kv):
        yield (
            f"q has {heads_q} heads and k has {heads_kv}; "
            "the heads of q must be a multiple of the heads of k (grouped-query attention)"
        )
    for a in (q, k, v):
        for size in a.shape:
            if size >= _LENGTH_LIMIT:
                yield f"{a.name} has shape {a.shape}; every dimension must be below 2^31"


def _gradient_shapes(spec: AttentionSpec, problem: Problem, out: ArrayInfo, do: ArrayInfo) -> Iterator[str]:
    """How out and do fit the forward call they belong to."""
    expected = (problem.batch, problem.len_q, problem.heads_q, spec.head_dim_v)
    for a in (out, do):
        if a.shape != expected:
            yield f"{a.name} has shape {a.shape}; with these q and v it must be {expected}"


def _row_shapes(problem: Problem, q: ArrayInfo, row: ArrayInfo, what: str) -> Iterator[str]:
    """How lse, or its gradient, fits the forward call it belongs to."""
    expected = (problem.batch, problem.heads_q, problem.len_q)
    if row.shape != expected:
        yield f"{row.name} has shape {row.shape}; with this q it must be {expected}"
    elif row.dtype != "fp32":
        yield f"{row.name} is {row.dtype}; it must be {what}"
    elif row.device != q.device:
        yield f"{row.name} is on {row.where} and q on {q.where}; put all arguments on one device"
    elif not _is_contiguous(row) or row.pointer % 4:
        yield f"{row.name} has strides {row.strides}; it must be contiguous, as the forward call returns lse"


def _is_contiguous(a: ArrayInfo) -> bool:
    plain = contiguous_strides(a.shape)
    return 0 in a.shape or all(
        size == 1 or stride == want for size, stride, want in zip(a.shape, a.strides, plain, strict=True)
    )
