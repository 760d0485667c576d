"""When rows under a low softcap take logits for shares of it, ``flashgen/cap_rows.cuh``: which they then all are."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from flashgen.emulator.kernel import Buffer, EmulatedKernel

Array = np.ndarray[Any, Any]

LANES = 32
SOURCE = """
#include "flashgen/anchored_softmax.cuh"
#include "flashgen/cap_rows.cuh"
using namespace flashgen;
struct Params {
  const float* highest; i32* takes_shares; i32 tiles;
};
FLASHGEN_KERNEL(32, 1) rows(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Cap cap = Cap::of(50.0f, 0.02f);
  const float limit = CapPolynomial::of(cap).limit;
  AnchoredSoftmax<bfloat16_t, 64, Regrowth::foreseen, true> softmax;
  softmax.reset();
  FineCapRows cap_rows = {};
  for (i32 tile = 0; tile < p.tiles; ++tile) {
    const float largest = p.highest[tile * 32 + thread_idx()] * limit;
    const float highest[2] = {largest, largest};
    if (!cap_rows.takes_shares() && warp_any(cap_rows.may_change(softmax, cap, largest, largest)))
      cap_rows.follow(softmax, cap, highest, largest);
    if (thread_idx() == 0) p.takes_shares[tile] = cap_rows.takes_shares() ? 1 : 0;
  }
}
"""


def tile(rest: float, of_some: float | None = None, places: int = 4) -> Array:
    """The highest product of each lane, in multiples of the polynomial's end; some are found in the last rows, at so
    many of the four places that lanes have there."""
    made = np.full(LANES, rest, np.float32)
    if of_some is not None:
        made[28 : 28 + places] = of_some
    return made


def shares(*tiles: Array) -> list[bool]:
    """Whether a warp's rows take shares behind each of their tiles."""
    highest = np.array(tiles, np.float32)
    found = np.zeros(len(tiles), np.int32)
    buffers = [
        Buffer("highest", highest.ctypes.data, highest.nbytes),
        Buffer("takes_shares", found.ctypes.data, found.nbytes, True),
    ]
    params = struct.pack("QQi4x", highest.ctypes.data, found.ctypes.data, found.size)
    EmulatedKernel("rows", SOURCE).launch(1, params, buffers, threads=32)
    taken: list[bool] = found.astype(bool).tolist()
    return taken


SMALL = tile(0.3)


def test_rows_far_from_the_polynomial_s_end_never_do() -> None:
    assert shares(*[SMALL] * 3) == [False] * 3


@pytest.mark.parametrize(("first", "do"), [(tile(0.3, 0.85), True), (tile(0.3, 0.85, 1), False), (tile(0.75), False)])
def test_in_a_first_tile_they_do_where_several_products_are_near_it(first: Array, do: bool) -> None:
    assert shares(first, SMALL) == [do] * 2
    assert shares(SMALL, first) == [False] * 2


def test_one_product_beyond_is_enough_in_a_first_tile_and_two_are_later() -> None:
    beyond = tile(0.3, 1.1, 1)
    assert shares(beyond, SMALL) == [True, True]
    assert shares(SMALL, beyond, SMALL, beyond) == [False, False, False, True]
    assert shares(SMALL, tile(0.3, 1.1)) == [False, True]
