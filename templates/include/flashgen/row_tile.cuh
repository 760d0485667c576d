// Which tiles of queries, or of keys, a persistent block works on, in order.
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

// A tile of keys of one head of keys and values of one sequence.
struct alignas(16) KeyTile {
  i32 first_key;
  i32 head;
  i32 sequence;
  // Neither for the one after the last; both but for tiles that no query attends to.
  bool exists;
  bool is_attended;
  // Which part of its steps this is, and how many parts there are.
  u8 part = 0;
  u8 parts = 1;

  // The steps of this part, if the whole tile has `steps`.
  FLASHGEN_DEVICE i32 steps_of(i32 steps) const { return steps * (part + 1) / parts - steps * part / parts; }
};

// Tile `number` in the order in which tiles are given out: which one of its head's, and the head, counted
// over all sequences. Sections of `section_heads` heads, whose tiles stay in the cache, come one after
// another; within a section the tile changes slowest. The first section has what does not make a whole one:
// at the end a few heads by themselves would leave most blocks without work while their long tiles last.
struct SectionPlace {
  i32 turn;
  i32 head;
};
template <i32 section_heads>
FLASHGEN_DEVICE SectionPlace place_in_sections(i32 number, i32 tiles, i32 tiles_of_head) {
  // One head after another: no partial section.
  if constexpr (section_heads == 1) return {number % tiles_of_head, number / tiles_of_head};
  const i32 odd_heads = tiles / tiles_of_head % section_heads;
  const i32 even = number - odd_heads * tiles_of_head;
  if (even < 0) return {number / odd_heads, number % odd_heads};
  const i32 section = even / (section_heads * tiles_of_head);
  const i32 rest = even - section * (section_heads * tiles_of_head);
  return {rest / section_heads, odd_heads + section * section_heads + rest % section_heads};
}

// The tile of queries with that number. If `longest_first`, those of a head go from the last to the first, as
// a causal mask makes the last ones the longest.
template <i32 tile_q, i32 section_heads, bool longest_first, class Params>
FLASHGEN_DEVICE RowTile row_tile(const Params& p, i32 number) {
  if (number >= p.tiles) return {};
  const SectionPlace place = place_in_sections<section_heads>(number, p.tiles, p.q_tiles);
  const i32 tile = longest_first ? p.q_tiles - 1 - place.turn : place.turn;
  const i32 sequence = place.head / p.heads_q;
  return {tile * tile_q, place.head - sequence * p.heads_q, sequence, 1};
}

// Of tiles of keys a causal mask makes the first ones the longest, so they go from the first to the last.
template <i32 tile_kv, i32 section_heads, class Params>
FLASHGEN_DEVICE KeyTile key_tile(const Params& p, i32 number) {
  if (number >= p.tiles) return {};
  const SectionPlace place = place_in_sections<section_heads>(number, p.tiles, p.kv_tiles);
  const i32 sequence = place.head / p.heads_kv;
  return {place.turn * tile_kv, place.head - sequence * p.heads_kv, sequence, true, true};
}

// The same where the last tiles are cut into parts. The parts of a tile have consecutive numbers.
template <i32 tile_kv, i32 section_heads, class Params>
FLASHGEN_DEVICE KeyTile key_tile_or_part(const Params& p, i32 number) {
  const i32 beyond = number - p.whole_tiles;
  if (beyond < 0) return key_tile<tile_kv, section_heads>(p, number);
  const i32 cut = beyond / p.tile_parts;
  KeyTile keys = key_tile<tile_kv, section_heads>(p, p.whole_tiles + cut);
  keys.part = static_cast<u8>(beyond - cut * p.tile_parts);
  keys.parts = static_cast<u8>(p.tile_parts);
  return keys;
}

// Draws the number of a block's next tile. Its first tile has the block's own number.
template <class Params>
FLASHGEN_DEVICE i32 draw_tile(const Params& p) {
  return grid_dim_x() + static_cast<i32>(atomic_add(p.counter, 1u));
}

// Each block calls this once, after its last draw. The last block resets the counters to 0 for the next
// launch.
template <class Params>
FLASHGEN_DEVICE void leave_counters(const Params& p) {
  if (atomic_add_release(p.counter + 1, 1u) + 1 == static_cast<u32>(grid_dim_x())) {
    store_release(p.counter, 0u);
    store_release(p.counter + 1, 0u);
  }
}

}  // namespace flashgen
