// The order in which persistent blocks draw tiles.
#pragma once
#include "flashgen/primitives_sm90.cuh"

namespace flashgen {

// A tile's turn among those of its head, and the head, counted over all sequences.
struct SectionTile {
  i32 turn;
  i32 head;
};

// Tile `number` of `tiles`. Sections of `section_heads` heads follow one another; within a section the turn
// varies slowest. A partial section comes first: at the end its few long tiles would leave most blocks
// without work.
template <i32 section_heads>
FLASHGEN_DEVICE SectionTile section_tile(i32 number, i32 tiles, i32 tiles_of_head) {
  if constexpr (section_heads == 1) return {number % tiles_of_head, number / tiles_of_head};
  const i32 partial = tiles / tiles_of_head % section_heads, rest = number - partial * tiles_of_head;
  if (rest < 0) return {number / partial, number % partial};
  const i32 section = rest / (section_heads * tiles_of_head);
  const i32 in_section = rest - section * (section_heads * tiles_of_head);
  return {in_section / section_heads, partial + section * section_heads + in_section % section_heads};
}

// Two counters, of tiles drawn and of blocks that have drawn their last one. The last block resets both.
FLASHGEN_DEVICE void leave_counters(u32* counters) {
  if (atomic_add_release(counters + 1, 1u) + 1 == static_cast<u32>(grid_dim_x())) {
    store_release(counters, 0u);
    store_release(counters + 1, 0u);
  }
}

}  // namespace flashgen
