"""When rows under a low softcap take logits for shares of it, ``flashgen/cap_rows.cuh``: which they then all are."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from flashgen.emulator.kernel import Buffer, EmulatedKernel

Array = np.ndarray[Any, Any]

LANES, WARPS = 32, 4
SOURCE = """
#include "flashgen/reference_max_softmax.cuh"
#include "flashgen/cap_rows.cuh"
using namespace flashgen;
struct Params {
  const float* highest; const float* sinks; i32* takes_shares; i32 tiles;
};
FLASHGEN_KERNEL(128, 1) rows(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Cap cap = Cap::of(50.0f, 0.02f);
  const float limit = CapPolynomial::of(cap).limit;
  const i32 warp = thread_idx() / 32;
  ReferenceMaxSoftmax<bfloat16_t, 64, Regrowth::bounded, true> softmax;
  softmax.reset();
  for (i32 row = 0; row < 2; ++row)
    if (p.sinks[warp] < 0.0f) softmax.rows.reference_max[row] = p.sinks[warp];
  FineCapRows cap_rows = {};
  for (i32 tile = 0; tile < p.tiles; ++tile) {
    const float largest = p.highest[tile * 128 + thread_idx()] * limit;
    const float highest[2] = {largest, largest};
    const bool may_change = cap_rows.are_new() || cap_rows.may_change(softmax, cap, largest, largest);
    if (!cap_rows.takes_shares() && warp_any(may_change)) cap_rows.follow(softmax, cap, highest, largest, 3);
    if (thread_idx() % 32 == 0) p.takes_shares[tile * 4 + warp] = cap_rows.takes_shares() ? 1 : 0;
  }
}
"""


def tile(rest: float, of_some: float | None = None, places: int = 4) -> Array:
    """The highest product of each lane of a warp, in multiples of the polynomial's end; some are found in the last
    rows, at so many of the four places that lanes have there."""
    made = np.full(LANES, rest, np.float32)
    if of_some is not None:
        made[28 : 28 + places] = of_some
    return made


SMALL = tile(0.3)
#: A reference maximum that is no sink's.
NONE = 0.0


def shares(*tiles: Array, beside: Array = SMALL, sinks: tuple[float, ...] = (NONE,) * WARPS) -> list[list[bool]]:
    """Whether rows take shares behind each of their tiles: those of a warp that has these, and of three that have
    others in the first. Rows begin with the reference maxima of sinks, if there are some."""
    highest = np.full((len(tiles), WARPS, LANES), 0.3, np.float32)
    highest[:, 1] = tiles
    highest[0, [0, 2, 3]] = beside
    found = np.zeros((len(tiles), WARPS), np.int32)
    references = np.array(sinks, np.float32)
    buffers = [
        Buffer("highest", highest.ctypes.data, highest.nbytes),
        Buffer("sinks", references.ctypes.data, references.nbytes),
        Buffer("takes_shares", found.ctypes.data, found.nbytes, True),
    ]
    params = struct.pack("QQQi4x", *(array.ctypes.data for array in (highest, references, found)), len(tiles))
    EmulatedKernel("rows", SOURCE).launch(1, params, buffers, threads=WARPS * LANES)
    taken: list[list[bool]] = found.astype(bool).tolist()
    return taken


ALL, NO = [True] * WARPS, [False] * WARPS
ONE = [False, True, False, False]


def test_rows_far_from_the_polynomial_s_end_never_do() -> None:
    assert shares(*[SMALL] * 3) == [NO] * 3


@pytest.mark.parametrize(("first", "do"), [(tile(0.3, 0.8, 1), True), (tile(0.7), False)])
def test_in_a_first_tile_all_of_a_warpgroup_do_where_a_product_of_one_is_near_it(first: Array, do: bool) -> None:
    assert shares(first, SMALL) == [ALL if do else NO] * 2
    assert shares(SMALL, first) == [NO] * 2
    # It is any of them.
    assert shares(SMALL, SMALL, beside=first) == [ALL if do else NO] * 2


def test_in_later_tiles_each_warp_does_once_two_products_are_beyond_it() -> None:
    beyond = tile(0.3, 1.1, 1)
    assert shares(SMALL, beyond, SMALL, beyond) == [NO, NO, NO, ONE]
    assert shares(SMALL, tile(0.3, 1.1)) == [NO, ONE]


def test_rows_that_begin_with_a_sink_do_as_others() -> None:
    assert shares(tile(0.3, 0.8), sinks=(-10.0,) * WARPS) == [ALL]
    assert shares(tile(0.7), sinks=(-10.0,) * WARPS) == [NO]


def test_rows_too_far_below_the_cap_for_exponentials_to_be_finite_do_not_follow_others() -> None:
    far, near = tile(-5.0), tile(0.3, 0.8)
    assert shares(far, SMALL, beside=near, sinks=(NONE, -300.0, NONE, NONE)) == [[not of_one for of_one in ONE]] * 2
    assert shares(far, SMALL, beside=near) == [ALL] * 2
