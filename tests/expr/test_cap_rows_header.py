"""What a warp finds out of its rows under a softcap, ``flashgen/cap_rows.cuh``: when they take shares of the cap."""

from __future__ import annotations

import math
import struct
from typing import Any

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
STAGES = ["below", "had some", "began shares", "takes shares", "settled"]
SOURCE = """
#include "flashgen/anchored_softmax.cuh"
#include "flashgen/cap_rows.cuh"
using namespace flashgen;
struct Params { const float* highest; const float* before; i32* stage; float amplitude, slope; };
FLASHGEN_KERNEL(32, 1) rows(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Cap cap = Cap::of(p.amplitude, p.slope);
  const i32 lane = thread_idx();
  const float highest[2] = {p.highest[2 * lane], p.highest[2 * lane + 1]};
  AnchoredSoftmax<bfloat16_t, 64, Regrowth::foreseen, true> softmax;
  softmax.reset();
  softmax.factor[0] = softmax.factor[1] = 1.0f;
  for (i32 row = 0; row < 2; ++row) {
    const float before = p.before[2 * lane + row];
    if (before == -kInfinity) continue;
    softmax.rows.anchor[row] = before * kLog2E;
    softmax.rows.sum[row] = 0.25f;
  }
  CapRows cap_rows = {};
  cap_rows.follow<SharesOfCap>(softmax, cap, highest, maximum(highest[0], highest[1]), false);
  p.stage[lane] = cap_rows.stage;
}
"""


def stage_of(cap: float, highest: Array, before: Array | None = None) -> str:
    """What a warp takes for its first tile with products beyond, by the highest logits of each lane's two rows, and by
    those that rows had before, if any."""
    products = np.where(np.isneginf(highest), FORBIDDEN, np.arctanh(np.maximum(highest / cap, -0.999)) / SLOPE)
    before = np.full((LANES, ROWS), NOTHING) if before is None else before
    given = products.astype(np.float32), before.astype(np.float32)
    stage = np.zeros(LANES, np.int32)
    buffers = [Buffer(name, x.ctypes.data, x.nbytes) for name, x in zip(("highest", "before"), given, strict=True)]
    buffers.append(Buffer("stage", stage.ctypes.data, stage.nbytes, True))
    params = struct.pack("QQQff", *(x.ctypes.data for x in (*given, stage)), cap, SLOPE)
    EmulatedKernel("rows", SOURCE).launch(1, params, buffers, threads=32)
    assert (stage == stage[0]).all()
    return STAGES[stage[0]]


def logits(of_rows: float) -> Array:
    """The highest logit of every lane's two rows; those of one row are beyond the polynomial."""
    made = np.full((LANES, ROWS), of_rows)
    made[:4, 0] = 120.0
    return made


def takes_shares(stage: str) -> bool:
    return STAGES.index(stage) >= STAGES.index("began shares")


def test_a_row_has_the_keys_of_its_four_lanes() -> None:
    """Under a cap of 200 its logarithm has to be 2."""
    assert takes_shares(stage_of(200.0, logits(2.1)))
    # 1.8 and the logarithm of 4, of 2 and of 1.
    assert takes_shares(stage_of(200.0, logits(1.8)))
    two, one = logits(1.8), logits(1.8)
    two[np.arange(LANES) % 4 > 1, 1] = one[np.arange(LANES) % 4 > 0, 1] = -np.inf
    assert takes_shares(stage_of(200.0, two))
    assert stage_of(200.0, one) == "had some"
    assert stage_of(200.0, logits(0.5)) == "had some"


def test_one_row_that_is_small_holds_up_its_warp() -> None:
    small = logits(30.0)
    small[8:12, 1] = 0.5
    assert stage_of(200.0, small) == "had some"
    # Of low caps shares are exact for any.
    assert takes_shares(stage_of(100.0, np.where(small == 120, 60.0, small)))


@pytest.mark.parametrize("had", [0.5, 4.0])
def test_what_a_row_had_before_counts(had: float) -> None:
    """Four lanes with a sum of a quarter each, and a further key that is far below."""
    highest = logits(-50.0)
    assert takes_shares(stage_of(200.0, highest, np.full((LANES, ROWS), had))) == (had > 2)


def test_a_row_that_has_grown_far_is_no_larger_than_it_is() -> None:
    """Beyond a cap of 1,000 its logarithm has to be .265 of the cap: 1,696 of 6,400."""
    highest = np.full((LANES, ROWS), 1690.0)
    highest[0, 0] = 1710.0
    assert stage_of(6400.0, highest, np.full((LANES, ROWS), 1500.0)) == "had some"
    assert takes_shares(stage_of(6400.0, highest + 10.0, np.full((LANES, ROWS), 1500.0)))
