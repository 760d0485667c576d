// Walking over the tiles that a mask does not rule out.
//
// A mask says which pairs of a query and a key are allowed. Kernels use five functions of it:
//
//     Mask::has_holes                       whether a tile within the ranges below may hold no allowed pair
//     key_tiles(q_begin, q_end, tile)       the tiles of keys that some query of the range may attend to
//     query_tiles(k_begin, k_end, tile)     the tiles of queries that may attend to some key of the range
//     is_empty(q_begin, q_end, k_begin, k_end), is_full(...)   whether no pair, every pair is allowed
//     allows(q, k)                          whether one pair is allowed
#pragma once
#include "flashgen/band.cuh"

namespace flashgen {

// Iterates over the tiles of a range, without those for which `visited(tile)` is false. A walk starts before
// its first tile. The lanes of a warp test 32 tiles at once, some perhaps beyond the last. All lanes call,
// and get the same result.
template <bool has_holes>
struct Walk {
  i32 tile;
  i32 end;
  // Tiles after `tile` that are visited: bit l is tile `group` + l.
  i32 group;
  u32 others;

  FLASHGEN_DEVICE explicit Walk(Range tiles)
      : tile(tiles.begin - 1), end(tiles.end), group(tiles.begin - kWarpSize), others(0) {}

  FLASHGEN_DEVICE bool over() const { return tile >= end; }
  // How many tiles follow among those that were tested together.
  FLASHGEN_DEVICE i32 following() const {
    i32 count = 0;
    for (u32 left = others; left != 0; left &= left - 1) ++count;
    return count;
  }
  // The lane that tested the tile.
  FLASHGEN_DEVICE i32 lane() const { return (tile - group) % kWarpSize; }

  // Advances to the next tile. Returns how many tiles were skipped before it.
  template <class Visited>
  FLASHGEN_DEVICE i32 advance(Thread thread, const Visited& visited) {
    if constexpr (has_holes) {
      const i32 before = tile;
      while (others == 0 && group + kWarpSize < end) {
        group += kWarpSize;
        const i32 candidate = group + thread.lane;
        const bool is_visited = visited(candidate);
        others = warp_ballot(candidate < end && is_visited);
      }
      tile = others != 0 ? group + lowest_bit(others) : end;
      others &= others - 1;
      return tile - before - 1;
    } else {
      ++tile;
      return 0;
    }
  }
};

}  // namespace flashgen
