// Which tile of queries a persistent block computes next: the TileScheduler policy of the forward mainloop.
//
// The order is that of sections.cuh. Where tiles differ in length, the last tile of a head is the longest and
// comes first.
#pragma once
#include "flashgen/sm90/forward_config.cuh"
#include "flashgen/sm90/query_tile.cuh"
#include "flashgen/sm90/sections.cuh"

namespace flashgen {

// The first query of the tile whose turn it is.
template <ForwardSm90Config cfg>
FLASHGEN_DEVICE i32 first_row(i32 turn, i32 tiles_of_head) {
  // Sections of several heads mean that tiles differ in length.
  return (cfg.section_heads > 1 ? tiles_of_head - 1 - turn : turn) * cfg.tile_q;
}

// All sequences have the same length.
template <ForwardSm90Config cfg, class Params>
struct DynamicScheduler {
  const Params& p;

  // The number of the block's first tile, and of each later one.
  FLASHGEN_DEVICE static i32 first() { return block_idx_x(); }
  FLASHGEN_DEVICE i32 draw() const { return grid_dim_x() + static_cast<i32>(atomic_add(p.counter, 1u)); }
  // Tile `number`; its kind is `end` if there are not so many. All lanes of a warp call.
  FLASHGEN_DEVICE DenseTile tile(i32 number, Thread) const {
    if (number >= p.tiles) return {0, 0, 0, 0, TileKind::end};
    const SectionTile place = section_tile<cfg.section_heads>(number, p.tiles, p.q_tiles);
    const i32 first_q = first_row<cfg>(place.turn, p.q_tiles);
    const i32 sequence = place.head / p.heads_q, head = place.head - sequence * p.heads_q;
    return {first_q, head, head / p.group, sequence, TileKind::normal};
  }
  // Each block calls this once, after its last draw.
  FLASHGEN_DEVICE void leave() const { leave_counters(p); }
};

// Where sequences have their own lengths: the tiles of one sequence after another, sequences with many tiles
// before those with half as many. Only the device knows the lengths, so blocks count tiles as they go: each
// lane of the scheduler those of one sequence, 32 sequences at a time.
template <ForwardSm90Config cfg, class Params, class Tile>
struct VarlenScheduler : DynamicScheduler<cfg, Params> {
  using Rows = typename Tile::Rows;

  // Which 32 sequences, counted from 0 again for each class of lengths; and how many tiles there are before
  // them.
  i32 group = 0;
  i32 tiles_before = 0;

  FLASHGEN_DEVICE static i32 tiles_of(const Params& p, i32 sequence) {
    return ceil_div(Rows::of(p, sequence).result_rows(), cfg.tile_q);
  }

  FLASHGEN_DEVICE Tile tile(i32 number, Thread thread) {
    const Params& p = this->p;
    const i32 groups = ceil_div(p.batch, kWarpSize);
    // A repeated tile may lie before the current sequences.
    if (number < tiles_before) group = tiles_before = 0;
    for (; p.q_tiles >> (group / groups) != 0; ++group) {
      // Sequences of this class have at most so many tiles for each head, and more than half of it.
      const i32 most = p.q_tiles >> (group / groups), first = group % groups * kWarpSize,
                own = first + thread.lane;
      i32 tiles = own < p.batch ? tiles_of(p, own) : 0;
      if (tiles > most || tiles <= most / 2) tiles = 0;
      i32 end = tiles * p.heads_q;
#pragma unroll
      for (i32 distance = 1; distance < kWarpSize; distance *= 2) {
        const i32 other = shuffle(end, (thread.lane - distance) & 31);
        if (thread.lane >= distance) end += other;
      }
      const u32 later = warp_ballot(number < tiles_before + end);
      if (later != 0) {
        const i32 lane = lowest_bit(later), tiles_of_head = shuffle(tiles, lane), sequence = first + lane;
        const i32 in_sequence = number - tiles_before - shuffle(end, lane) + tiles_of_head * p.heads_q;
        const SectionTile place =
            section_tile<cfg.section_heads>(in_sequence, p.heads_q * tiles_of_head, tiles_of_head);
        const i32 first_q = first_row<cfg>(place.turn, tiles_of_head);
        return {
            {first_q, place.head, place.head / p.group, sequence, TileKind::normal, Rows::of(p, sequence)}};
      }
      tiles_before += shuffle(end, kWarpSize - 1);
    }
    return {{0, 0, 0, 0, TileKind::end, {}}};
  }
};

}  // namespace flashgen
