// The order in which persistent blocks draw tiles.
//
// Blocks draw numbers from a counter in global memory, so that none waits while another has tiles left.
// Consecutive numbers are tiles of a few heads, a section, whose operands then stay in the L2 cache.
#pragma once
#include "flashgen/primitives_sm90.cuh"

namespace flashgen {

// A tile's turn among those of its head, and the head, counted over all sequences. Turns vary slowest.
struct SectionTile {
  i32 turn;
  i32 head;
};

// Tile `number` of `tiles`.
template <i32 section_heads>
FLASHGEN_DEVICE SectionTile section_tile(i32 number, i32 tiles, i32 tiles_of_head) {
  // A partial section comes first: at the end its few long tiles would leave most blocks without work.
  const i32 partial = tiles / tiles_of_head % section_heads, rest = number - partial * tiles_of_head;
  i32 first_head = 0, section = partial;
  if (rest >= 0) {
    section = section_heads;
    first_head = partial + rest / (section * tiles_of_head) * section;
    number = rest % (section * tiles_of_head);
  }
  return {number / section, first_head + number % section};
}

// p.counter is two counters: of tiles drawn, and of blocks that have drawn their last one. The last block
// resets both for the next launch.
FLASHGEN_DEVICE void leave_counters(const auto& p) {
  if (atomic_add_release(p.counter + 1, 1u) + 1 == static_cast<u32>(grid_dim_x())) {
    store_release(p.counter, 0u);
    store_release(p.counter + 1, 0u);
  }
}

}  // namespace flashgen
