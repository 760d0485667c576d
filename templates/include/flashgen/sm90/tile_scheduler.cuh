// Which tile of queries a persistent block computes next: the TileScheduler policy of the forward mainloop.
//
// The order is that of sections.cuh. Where tiles differ in length, the last tile of a head is the longest and
// comes first.
#pragma once
#include "flashgen/sm90/forward_config.cuh"
#include "flashgen/sm90/query_tile.cuh"
#include "flashgen/sm90/sections.cuh"
#include "flashgen/sm90/sequence_search.cuh"

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

// Where sequences have their own lengths.
template <ForwardSm90Config cfg, class Params, class Tile>
struct VarlenScheduler : DynamicScheduler<cfg, Params> {
  using Rows = typename Tile::Rows;

  SequenceSearch search = {};

  FLASHGEN_DEVICE Tile tile(i32 number, Thread thread) {
    const Params& p = this->p;
    const auto found = search.find(number, p.batch, p.heads_q, p.q_tiles, thread, [&](i32 sequence) {
      return ceil_div(Rows::of(p, sequence).result_rows(), cfg.tile_q);
    });
    if (!found.exists) return {{0, 0, 0, 0, TileKind::end, {}}};
    const i32 sequence = found.sequence, tiles = found.tiles_of_head;
    const SectionTile place = section_tile<cfg.section_heads>(found.number, p.heads_q * tiles, tiles);
    return {{first_row<cfg>(place.turn, tiles), place.head, place.head / p.group, sequence, TileKind::normal,
             Rows::of(p, sequence)}};
  }
};

}  // namespace flashgen
