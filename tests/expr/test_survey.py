"""Tables of a survey against brute force: extremes, and searches, for elements in whatever order."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from flashgen.emulator.kernel import Buffer, EmulatedKernel

Array = np.ndarray[Any, Any]
STRETCH, WARPS = 4, 4
#: More stretches than are searched for in rows that are called short, and than a block has threads.
LONG, SHORT = 2102, 37
TYPES = {"i32": np.int32, "i64": np.int64, "short": np.int16}
KERNEL = """#include "flashgen/survey.cuh"
using namespace flashgen;
struct Params {{
  Captured<{element}, 2> tensor;
  i32* table;
  const i32* questions;
  i32* answers;
  i32 count;
}};
FLASHGEN_KERNEL({threads}, 1) survey_kernel(FLASHGEN_GRID_CONSTANT Params p) {{
  FLASHGEN_SHARED_MEMORY(base);
  const Thread thread = Thread::current();
  survey_for_search<{stretch}, {axis}, {warps}>(p.tensor, p.table, 0, 1, reinterpret_cast<i32*>(base), thread);
  block_sync();
  const Survey<{element}, 2, {axis}, {stretch}> survey = {{p.tensor, p.table}};
  for (i32 i = thread.index(); i < p.count; i += {threads}) {{
    const i32* const asked = p.questions + 4 * i;
    i32* const answer = p.answers + 4 * i;
    answer[0] = survey.first(asked[1], asked[0]);
    answer[1] = survey.last(asked[1], asked[0]);
    answer[2] = survey.between(asked[2], asked[3], asked[0]).smallest();
    answer[3] = survey.between(asked[2], asked[3], asked[0]).largest();
  }}
}}
"""


def rows(length: int) -> Array:
    """One row of each kind that a captured tensor may be."""
    random = np.random.default_rng(length)
    ordered = np.sort(random.integers(0, 40, length))
    nearly = ordered.copy()
    nearly[length // 3], nearly[length // 2] = 39, -1
    ties = np.arange(length) // (3 * STRETCH) * 2
    late = np.where(np.arange(length) < length - 1, 7, -7)
    mixed = random.integers(-30, 30, length)
    return np.stack([ordered, nearly, ties, ordered[::-1], ordered - 20, late, mixed, np.zeros(length, int)])


def questions_of(table: Array) -> Array:
    """Values that occur, and their neighbours, in each row; with ranges of indices, some of them empty."""
    random = np.random.default_rng(1)
    found = [(row, value) for row, x in enumerate(table) for value in {*x, *(x - 1), *(x + 1), -(2**31), 2**31 - 1}]
    ranges = np.sort(random.integers(-3, table.shape[1] + 3, (len(found), 2)), axis=1)
    ranges[::7] = ranges[::7, ::-1]
    return np.concatenate([np.array(found), ranges], axis=1).astype(np.int32)


def answers_of(tensor: Array, axis: int, element: str, questions: Array, **options: Any) -> Array:
    """The kernel's."""
    threads = 32 * WARPS
    text = KERNEL.format(element=element, stretch=STRETCH, axis=axis, warps=WARPS, threads=threads)
    stretches = -(-tensor.shape[axis] // STRETCH)
    table = np.zeros(4 * stretches * tensor.shape[1 - axis], np.int32)
    answers = np.zeros((len(questions), 4), np.int32)
    params = struct.pack("Q2q2i", tensor.ctypes.data, *(s // tensor.itemsize for s in tensor.strides), *tensor.shape)
    arrays = (table, questions, answers)
    params += struct.pack("3Qi4x", *(x.ctypes.data for x in arrays), len(questions))
    buffers = [Buffer(f"array{i}", x.ctypes.data, x.nbytes, i > 0 and i != 2) for i, x in enumerate((tensor, *arrays))]
    kernel = EmulatedKernel("survey_kernel", text, threads=threads, smem_bytes=8 * WARPS)
    kernel.launch(1, params, buffers, **options)
    return answers


def extreme(row: Array, low: int, high: int, *, largest: bool) -> int:
    """Over all stretches that the range touches."""
    if low > high:
        return -(2**31) if largest else 2**31 - 1
    begin, end = (min(max(i, 0), len(row) - 1) // STRETCH * STRETCH for i in (low, high))
    part = row[begin : end + STRETCH]
    return int(part.max() if largest else part.min())


@pytest.mark.parametrize(("element", "axis", "length"), [("i32", 1, LONG), ("i64", 0, LONG), ("short", 1, SHORT)])
@pytest.mark.parametrize("options", [{"race": True}, {"schedule": "random", "seed": 2}], ids=["race", "random"])
def test_a_survey_answers_as_brute_force_does(element: str, axis: int, length: int, options: dict[str, Any]) -> None:
    table = rows(length).astype(TYPES[element])
    tensor = np.ascontiguousarray(table if axis == 1 else table.T)
    questions = questions_of(table.astype(np.int64))
    for (row, value, low, high), found in zip(
        questions, answers_of(tensor, axis, element, questions, **options), strict=True
    ):
        x = table[row]
        reached, within = np.flatnonzero(x >= value), np.flatnonzero(x <= value)
        first, last = reached[0] if reached.size else length, within[-1] if within.size else -1
        if length > 512 * STRETCH:
            # To the stretch.
            first, last = first // STRETCH * STRETCH if first < length else first, (last // STRETCH + 1) * STRETCH - 1
            assert tuple(found[:2]) == (first, min(last, length - 1)), (row, value)
        else:
            assert tuple(found[:2]) == (0, length - 1)
        assert tuple(found[2:]) == tuple(extreme(x, low, high, largest=i) for i in (False, True)), (row, low, high)
