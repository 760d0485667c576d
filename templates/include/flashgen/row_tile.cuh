// Which tiles of queries a block works on, one after another, when blocks stay and take the next tile.
#pragma once
#include "flashgen/element.cuh"
#include "flashgen/primitives_sm90.cuh"

namespace flashgen {

// A tile of queries of one head of one sequence; the one after the last does not exist.
struct alignas(16) RowTile {
  i32 first_q;
  i32 head;
  i32 sequence;
  i32 exists;
};

// Tile `number` in the order in which tiles are given out. Sections of `section_heads` heads, whose keys and
// values stay in the cache, come one after another; within a section the tile of queries changes slowest, and
// if `longest_first` from the last to the first, as a causal mask makes the last ones the longest.
template <i32 tile_q, i32 section_heads, bool longest_first, class Params>
FLASHGEN_DEVICE RowTile row_tile(const Params& p, i32 number) {
  if (number >= p.tiles) return {};
  const i32 section_tiles = section_heads * p.q_tiles;
  const i32 section = number / section_tiles, rest = number - section * section_tiles;
  const i32 heads_left = p.tiles / p.q_tiles - section * section_heads;
  const i32 heads = smaller(section_heads, heads_left);
  const i32 turn = rest / heads;
  const i32 head = section * section_heads + rest - turn * heads;
  const i32 tile = longest_first ? p.q_tiles - 1 - turn : turn;
  const i32 sequence = head / p.heads_q;
  return {tile * tile_q, head - sequence * p.heads_q, sequence, 1};
}

// The number of a further tile. The first ones are the blocks' own numbers.
template <class Params>
FLASHGEN_DEVICE i32 draw_tile(const Params& p) {
  return grid_dim_x() + static_cast<i32>(atomic_add(p.counter, 1u));
}

// To be called once by each block, after its last draw: the last block leaves the counters at 0 for the next
// launch.
template <class Params>
FLASHGEN_DEVICE void leave_counters(const Params& p) {
  if (atomic_add_release(p.counter + 1, 1u) + 1 == static_cast<u32>(grid_dim_x())) {
    store_release(p.counter, 0u);
    store_release(p.counter + 1, 0u);
  }
}

}  // namespace flashgen
