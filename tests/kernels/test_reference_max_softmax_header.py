"""How often a warp recomputes a tile, ``flashgen/reference_max_softmax.cuh``: never where the first logits say that
rows may grow, because maxima are checked then."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import pytest

from flashgen.emulator.kernel import Buffer, EmulatedKernel

Array = np.ndarray[Any, Any]

LANES, ROWS, COLUMNS = 32, 16, 64
SOURCE = """
#include "flashgen/reference_max_softmax.cuh"
using namespace flashgen;
struct Params { const float* logits; i32* checked; i32* again; float* sums; i32 tiles; };
FLASHGEN_KERNEL(32, 1) rows(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Thread thread = {thread_idx(), 0};
  ReferenceMaxSoftmax<ELEMENT, 64, Regrowth::recomputes_scores, false> softmax;
  softmax.reset();
  ScaledProducts logits{1.0f};
  for (i32 tile = 0; tile < p.tiles; ++tile) {
    const bool is_due = !softmax.is_settled();
    bool checks = is_due, again = false;
    Strip<64> scores;
    Rounded<64> probabilities;
    for (;;) {
      for (i32 i = 0; i < 32; ++i) {
        const i32 row = thread.row() + 8 * (i / 2 % 2), column = 8 * (i / 4) + thread.column() + i % 2;
        scores[i] = p.logits[(tile * 16 + row) * 64 + column];
      }
      if (checks) softmax.update_reference_max(scores, logits);
      softmax.exponentiate(scores, probabilities, logits);
      if (!warp_any(softmax.has_grown()) || softmax.watches()) break;
      checks = again = true;
    }
    softmax.add(0);
    if (thread.lane != 0) continue;
    p.checked[tile] = is_due ? 1 : 0;
    p.again[tile] = again ? 1 : 0;
  }
  RowStatistics all = softmax.rows;
  all.finish();
  for (i32 h = 0; h < 2; ++h)
    if (thread.column() == 0) p.sums[thread.row() + 8 * h] = all.log_sum_exp(h, logits);
}
"""


class Taken(NamedTuple):
    """Of each tile, whether it was checked at beforehand, and whether it was taken in once more."""

    checked: list[bool]
    again: list[bool]


def taken(dtype: str, *highest: float) -> Taken:
    """Tiles of a warp whose first row has these highest logits, in powers of two, and others that are zero or as low;
    other rows have logits of zero."""
    logits = np.zeros((len(highest), ROWS, COLUMNS), np.float32)
    logits[:, 0] = np.minimum(highest, 0)[:, None]
    logits[:, 0, 5] = highest
    checked, again = np.zeros((2, len(highest)), np.int32)
    sums = np.zeros(ROWS, np.float32)
    buffers = [Buffer("logits", logits.ctypes.data, logits.nbytes)]
    results = (checked, again, sums)
    buffers += [
        Buffer(name, x.ctypes.data, x.nbytes, True)
        for name, x in zip(("checked", "again", "sums"), results, strict=True)
    ]
    params = struct.pack("QQQQi4x", *(x.ctypes.data for x in (logits, *results)), len(highest))
    source = SOURCE.replace("ELEMENT", {"bf16": "bfloat16_t", "fp16": "half_t"}[dtype])
    EmulatedKernel("rows", source).launch(1, params, buffers, threads=LANES)
    # However it was taken, nothing is lost.
    expected = np.log(2) * np.logaddexp2.reduce(logits.astype(np.float64), axis=(0, 2))
    np.testing.assert_allclose(sums, expected, rtol=1e-6, atol=1e-6)
    return Taken(checked.astype(bool).tolist(), again.astype(bool).tolist())


def test_rows_whose_reference_max_serves_are_checked_once() -> None:
    for dtype in ("bf16", "fp16"):
        assert taken(dtype, 3.0, 4.0, 2.0) == ([True, False, False], [False] * 3)


@pytest.mark.parametrize(("dtype", "first", "later"), [("bf16", 100.0, 300.0), ("fp16", 20.0, 60.0)])
def test_a_row_that_grows_too_far_has_its_tile_recomputed_and_the_next_ones_checked(
    dtype: str, first: float, later: float
) -> None:
    found = taken(dtype, first, later, 0.0)
    assert found == ([True, False, True], [False, True, False])


@pytest.mark.parametrize(("dtype", "first", "later"), [("bf16", 130.0, 400.0), ("fp16", 30.0, 80.0)])
def test_where_first_logits_are_far_above_zero_none_is_taken_once_more(dtype: str, first: float, later: float) -> None:
    assert taken(dtype, first, first, later, later, 1.5 * later).again == [False] * 5
    # It is not so if they are as far below.
    assert not any(taken(dtype, -first, -first).checked[1:])


@pytest.mark.parametrize(("dtype", "first"), [("bf16", 130.0), ("fp16", 30.0)])
def test_checks_end_after_many_tiles_with_nothing_to_find(dtype: str, first: float) -> None:
    checked = taken(dtype, *[first] * 20).checked
    assert all(checked[:15])
    assert not any(checked[15:])
