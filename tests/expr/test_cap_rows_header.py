"""What a warp finds out of its rows under a high softcap, ``flashgen/cap_rows.cuh``: when logits may be shares."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest

from flashgen.emulator.kernel import Buffer, EmulatedKernel

Array = np.ndarray[Any, Any]

LANES, ROWS = 32, 2
SLOPE = 0.0625
#: What stands for a forbidden product.
FORBIDDEN = -float(np.finfo(np.float32).max)
#: The logarithm of the sum of what a row had before, of nothing.
NOTHING = -math.inf
SOURCE = """
#include "flashgen/reference_max_softmax.cuh"
#include "flashgen/cap_rows.cuh"
using namespace flashgen;
struct Params {
  const float* highest; const float* before; i32* found; float* references; float amplitude, slope, sum;
};
FLASHGEN_KERNEL(32, 1) rows(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Cap cap = Cap::of(p.amplitude, p.slope);
  const auto capped = CappedProducts::of(cap);
  const i32 lane = thread_idx();
  const float highest[2] = {p.highest[2 * lane], p.highest[2 * lane + 1]};
  ReferenceMaxSoftmax<bfloat16_t, 64, Regrowth::REGROWTH, true> softmax;
  softmax.reset();
  const float of_rows[2] = {row_maximum(highest[0]), row_maximum(highest[1])};
  for (i32 row = 0; row < 2; ++row) {
    const float before = p.before[2 * lane + row];
    if (before == -kInfinity) continue;
    softmax.rows.reference_max[row] = before * kLog2E;
    softmax.rows.sum[row] = p.sum;
  }
  CapRows cap_rows = {};
  p.found[lane] = cap_rows.may_be_shares(softmax, capped.share, of_rows, highest) ? 1 : 0;
  p.found[lane] += cap_rows.are_large ? 2 : 0;
  CapRows::follow(softmax, capped.share, capped.logit(of_rows[0]), capped.logit(of_rows[1]));
  for (i32 row = 0; row < 2; ++row) p.references[2 * lane + row] = softmax.rows.reference_max[row];
}
"""


class Found(NamedTuple):
    """What is known of rows with a tile."""

    #: Whether its logits may be shares, and those of all tiles after it, too.
    may_be_shares: bool
    are_large: bool
    references: Array


def rows(
    highest: Array,
    before: Array | None = None,
    of_sum: float = 0.25,
    cap: float = 200.0,
    bounds_growth: bool = False,
) -> Found:
    """With a tile that has these highest logits for each lane's two rows. Sums that lanes had before are relative to
    `before`."""
    products = np.where(np.isneginf(highest), FORBIDDEN, np.arctanh(np.clip(highest / cap, -0.999, 0.999)) / SLOPE)
    before = np.full((LANES, ROWS), NOTHING) if before is None else before
    given = products.astype(np.float32), before.astype(np.float32)
    found, references = np.zeros(LANES, np.int32), np.zeros((LANES, ROWS), np.float32)
    buffers = [Buffer(name, x.ctypes.data, x.nbytes) for name, x in zip(("highest", "before"), given, strict=True)]
    results = (("found", found), ("references", references))
    buffers += [Buffer(name, x.ctypes.data, x.nbytes, True) for name, x in results]
    params = struct.pack("QQQQfff4x", *(x.ctypes.data for x in (*given, found, references)), cap, SLOPE, of_sum)
    source = SOURCE.replace("REGROWTH", "bounded" if bounds_growth else "never")
    EmulatedKernel("rows", source).launch(1, params, buffers, threads=32)
    assert (found == found[0]).all()
    assert np.array_equal(references.reshape(8, 4, ROWS), references.reshape(8, 4, ROWS)[:, :1].repeat(4, axis=1))
    return Found(*(bool(found[0] >> bit & 1) for bit in range(2)), references)


def logits(of_rows: float) -> Array:
    """The highest logit of every lane's two rows; those of one row are beyond the polynomial."""
    made = np.full((LANES, ROWS), of_rows)
    made[:4, 0] = 120.0
    return made


@pytest.mark.parametrize("bounds_growth", [False, True])
def test_a_row_has_the_keys_of_its_four_lanes(bounds_growth: bool) -> None:
    """Under a cap of 200 its logarithm has to be 2."""
    assert rows(logits(2.1), bounds_growth=bounds_growth).may_be_shares
    # 1.8 and the logarithm of 4, of 2 and of 1.
    assert rows(logits(1.8), bounds_growth=bounds_growth).may_be_shares
    two, one = logits(1.8), logits(1.8)
    two[np.arange(LANES) % 4 > 1, 1] = one[np.arange(LANES) % 4 > 0, 1] = -np.inf
    assert rows(two, bounds_growth=bounds_growth).may_be_shares
    assert not rows(one, bounds_growth=bounds_growth).may_be_shares
    assert not rows(logits(0.5), bounds_growth=bounds_growth).may_be_shares


def test_a_row_so_far_below_zero_that_it_stays_there_is_as_far_from_it() -> None:
    assert rows(logits(-22.0)).may_be_shares
    assert not rows(logits(-17.0)).may_be_shares


def test_one_row_that_is_small_holds_up_its_warp() -> None:
    small = logits(30.0)
    small[8:12, 1] = 0.5
    assert not rows(small).may_be_shares
    # Of low caps shares are exact for any.
    assert rows(np.where(small == 120, 60.0, small), cap=100.0).may_be_shares
    # A row without a key yet does not.
    small[8:12, 1] = -np.inf
    assert rows(small).may_be_shares


@pytest.mark.parametrize("bounds_growth", [False, True])
@pytest.mark.parametrize("had", [0.5, 4.0])
def test_what_a_row_had_before_counts(had: float, bounds_growth: bool) -> None:
    """Four lanes with a sum of a quarter each, and a further key that is far below."""
    highest, before = logits(-50.0), np.full((LANES, ROWS), had)
    assert rows(highest, before, bounds_growth=bounds_growth).may_be_shares == (had > 2)


def test_only_rows_that_are_above_zero_keep_taking_shares_without_being_asked() -> None:
    assert rows(logits(2.1)).are_large
    far_below = rows(logits(-22.0))
    assert far_below.may_be_shares
    assert not far_below.are_large


def test_beyond_a_cap_of_1000_it_is_what_the_polynomial_does_not_reach() -> None:
    """1,696 of 6,400."""
    highest, before = np.full((LANES, ROWS), 1690.0), np.full((LANES, ROWS), 1500.0)
    highest[0, 0] = 1710.0
    assert not rows(highest, before, cap=6400.0).may_be_shares
    assert rows(highest + 10.0, before, cap=6400.0).may_be_shares


def test_reference_maxima_are_maxima_or_ahead_by_what_rows_may_grow() -> None:
    """Up to where no logit is more than 59 powers of two above."""
    highest, top = logits(3.0), 200.0 / math.log(2)
    highest[4:8, 0] = -np.inf
    of_row = rows(highest).references[::4]
    np.testing.assert_allclose(of_row[2:, 0], 3.0 / math.log(2), rtol=1e-5)
    np.testing.assert_allclose(of_row[0], [120.0 / math.log(2), 3.0 / math.log(2)], rtol=1e-5)
    assert of_row[1, 0] < -1e38
    ahead = rows(highest, bounds_growth=True).references[::4]
    assert ahead[1, 0] < -1e38
    assert ahead[0, 0] == pytest.approx(top - 58.5, abs=0.51)
    # Nearer to zero they are no further ahead than rows below the polynomial's end grow.
    assert ahead[0, 1] == pytest.approx(0.265 * top - 58.5, abs=0.51)
    # Nor do they move for less.
    before = np.full((LANES, ROWS), 90.0)
    np.testing.assert_allclose(rows(highest, before, bounds_growth=True).references[4:], 90.0 / math.log(2), rtol=1e-6)
