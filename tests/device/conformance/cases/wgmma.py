"""Matrix products of a warpgroup, and the division of registers among warpgroups.

Operands lie in shared memory as a kernel would lay them out, so that strides and steps along K are the natural ones;
their values are arbitrary, and every byte that a descriptor reaches matters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from conformance.case import Array, Case
from conformance.inputs import integers, unwritten, words

_STEPS = 4
_THREADS = 128
#: One product sums 32 bytes of K.
_STEP_BYTES = 32
_TYPES: dict[str, Any] = {
    "kHalf": np.float16,
    "kBfloat16": ml_dtypes.bfloat16,
    "kE4m3": ml_dtypes.float8_e4m3fn,
    "kE5m2": ml_dtypes.float8_e5m2,
}
#: The descriptor's number of a swizzle by its width in bytes; 16 is none.
_SWIZZLES = {16: 0, 32: 3, 64: 2, 128: 1}


class _Layout(NamedTuple):
    """How an operand lies in shared memory."""

    leading_bytes: int
    stride_bytes: int
    offsets: list[int]
    total_bytes: int


def _k_major(lines: int, width: int) -> _Layout:
    """Lines along K, as wide as the swizzle; the next part of K begins behind all lines."""
    part = lines * width
    if width == 16:
        return _Layout(part, 128, [2 * part * step for step in range(_STEPS)], 2 * part * _STEPS)
    per_part = width // _STEP_BYTES
    offsets = [step // per_part * part + step % per_part * _STEP_BYTES for step in range(_STEPS)]
    return _Layout(0, 8 * width, offsets, -(-_STEPS // per_part) * part)


def _mn_major(elements: int, width: int) -> _Layout:
    """Lines along M or N, of 16-bit elements; K goes from line to line."""
    groups = 2 * _STEPS  # of 8 lines each
    block = 8 * width
    total = groups * 2 * 8 * elements
    offsets = [2 * block * step for step in range(_STEPS)]
    return (
        _Layout(block, groups * block, offsets, total)
        if width == 16
        else _Layout(groups * block, block, offsets, total)
    )


def _fill(layout: _Layout, element: Any, limit: int, seed: int) -> Array:
    count = layout.total_bytes // np.dtype(element).itemsize
    return integers(count, -limit, limit, seed).astype(element).view(np.uint32)


def _wgmma(
    kind: str = "kBfloat16",
    n: int = 32,
    left: str = "kShared",
    right: str = "k",
    width: int = 128,
    start: str = "kKeep",
) -> Case:
    element = _TYPES[kind]
    a = _mn_major(64, width) if left == "kSharedMn" else _k_major(64, width)
    b = _mn_major(n, width) if right == "mn" else _k_major(n, width)
    # Small results make a short record.
    limit = 2 if n < 96 else 1
    where = {"kShared": "k", "kSharedMn": "mn", "kRegisters": "registers"}[left]
    registers = integers((_STEPS, _THREADS, 16 // np.dtype(element).itemsize), -limit, limit, seed=42).astype(element)
    return Case(
        "wgmma",
        f"{kind[1:].lower()}-n{n}-{where}-{right}-swizzle{width if width > 16 else 0}-{start[1:].lower()}",
        f"{{Type::{kind}, {n}, Left::{left}, Major::{right}, Start::{start}}}",
        inputs={
            "swizzle": _SWIZZLES[width],
            "a_leading": a.leading_bytes,
            "a_stride": a.stride_bytes,
            "b_leading": b.leading_bytes,
            "b_stride": b.stride_bytes,
            "a_words": a.total_bytes // 4,
            "b_words": b.total_bytes // 4,
            "a": _fill(a, element, limit, 40),
            "b": _fill(b, element, limit, 41),
            "a_offsets": np.array(a.offsets, np.int32),
            "b_offsets": np.array(b.offsets, np.int32),
            "registers": registers.view(np.uint32),
        },
        outputs={"d": unwritten((_THREADS, n // 2), np.float32)},
        threads=_THREADS,
        smem_bytes=a.total_bytes + b.total_bytes,
    )


_WIDTHS = tuple(_SWIZZLES)
_SIXTEEN, _EIGHT = ("kHalf", "kBfloat16"), ("kE4m3", "kE5m2")

_SETMAXNREG = Case(
    "setmaxnreg",
    "give-and-take",
    "Variant::kGiveAndTake",
    inputs={"x": words(384 * 4, seed=43)},
    outputs={"out": unwritten((384, 4))},
    threads=384,
)

CASES = tuple(
    {
        case.name: case
        for case in (
            *(_wgmma(n=n) for n in (8, 16, 64, 96, 128, 192, 256)),
            *(_wgmma(n=n, left="kRegisters", start="kFirst") for n in (8, 64, 128, 256)),
            # Every way to lie in shared memory.
            *(
                _wgmma(left=left, right=right, width=width, n=max(32, width // 2) if right == "mn" else 32)
                for left in ("kShared", "kSharedMn", "kRegisters")
                for right in ("k", "mn")
                for width in _WIDTHS
            ),
            # Right operands wider than a swizzled line.
            *(_wgmma("kHalf", 128, right="mn", width=width) for width in _WIDTHS),
            *(_wgmma("kHalf", left=left, width=width) for left in ("kShared", "kRegisters") for width in _WIDTHS),
            *(
                _wgmma(kind, left=left, width=width)
                for kind in _EIGHT
                for left in ("kShared", "kRegisters")
                for width in _WIDTHS
            ),
            *(_wgmma("kE4m3", n) for n in (8, 64, 128)),
            *(
                _wgmma(left=left, start=start)
                for left in ("kShared", "kRegisters")
                for start in ("kDrop", "kFirst", "kKeepPipelined")
            ),
            # Four products as one statement.
            *(
                _wgmma(kind, n, left, right, start=start)
                for kind, n in (("kHalf", 64), ("kBfloat16", 128), ("kBfloat16", 256))
                for left, right in (("kShared", "k"), ("kShared", "mn"), ("kRegisters", "k"), ("kRegisters", "mn"))
                for start in ("kKeepFour", "kFirstFour")
            ),
            *(
                _wgmma(kind, 64, left, start=start)
                for kind, left in (
                    ("kHalf", "kSharedMn"),
                    ("kE4m3", "kShared"),
                    ("kE4m3", "kRegisters"),
                    ("kE5m2", "kRegisters"),
                )
                for start in ("kKeepFour", "kFirstFour")
            ),
            _SETMAXNREG,
        )
    }.values()
)
