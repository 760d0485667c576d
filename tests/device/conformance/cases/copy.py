"""Ampere's copies into shared memory, and additions to global memory."""

from __future__ import annotations

import numpy as np

from conformance.case import Array, Case
from conformance.inputs import integers, noise, nonzero_bytes, unwritten

_GROUPS, _THREADS = 4, 64


def _cp_async(size: int, pending: int, *, missing: bool = False) -> Case:
    valid = integers((_GROUPS, _THREADS), 0, size, seed=size).astype(np.int32)
    valid[0] = size  # one group of whole copies
    valid[1, : size + 1] = np.arange(size + 1)  # one that has every count
    no_source = (valid == 0).astype(np.int32) * missing
    return Case(
        "cp_async",
        f"{size}-bytes-pending-{pending}" + ("-no-source" if missing else ""),
        f"{{{size}, {pending}}}",
        inputs={"x": nonzero_bytes(_GROUPS * _THREADS * size), "valid": valid, "missing": no_source},
        outputs={"out": unwritten((_GROUPS, _THREADS, size), np.uint8)},
        threads=_THREADS,
        smem_bytes=_GROUPS * _THREADS * size,
    )


def _reduce(label: str, variant: str) -> Case:
    count = 3 * 4 * 64
    return Case(
        "reduce",
        label,
        f"Variant::{variant}",
        inputs={
            "x": integers((count, 4), -1000, 1000, seed=20).astype(np.float32),
            "elements": 4 * integers(count, 0, 24, seed=21).astype(np.int32),
        },
        outputs={"out": integers(100, -50, 50, seed=22).astype(np.float32)},
        grid=(3, 1, 1),
        threads=64,
    )


def _reduce_words(label: str, addends: Array) -> Case:
    """Integers add up to the same in any order, so these are exact whatever their size."""
    return Case(
        "reduce_words",
        label,
        "Variant::kAdd",
        inputs={"x": addends, "elements": integers(addends.size, 0, 99, seed=23).astype(np.int32)},
        outputs={"out": noise(100, seed=24)},
        grid=(3, 1, 1),
        threads=64,
    )


_ADDENDS = 3 * 4 * 64

CASES = (
    *(_cp_async(size, pending) for size in (4, 8, 16) for pending in (0, 1, 3)),
    *(_cp_async(size, 0, missing=True) for size in (4, 8, 16)),
    _reduce("one", "kOne"),
    _reduce("four", "kFour"),
    # Sums that carry from the lower half into the upper one, and ones that wrap around.
    _reduce_words("lower-halves", noise(_ADDENDS, seed=25) >> np.uint64(32)),
    _reduce_words("whole-words", noise(_ADDENDS, seed=26)),
    _reduce_words("signed", integers(_ADDENDS, -(2**24), 2**24, seed=27).astype(np.uint64)),
)
