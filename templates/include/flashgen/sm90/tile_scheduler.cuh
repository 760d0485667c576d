// Which tile of queries a persistent block computes next.
//
// Blocks draw numbers from a counter in global memory, so that none waits while another has tiles left.
// Consecutive numbers are tiles of a few heads, a section, whose keys and values then stay in the L2 cache.
// Within a section the tile varies slowest, and the longest tiles come first where tiles differ in length.
#pragma once
#include "flashgen/primitives_sm90.cuh"
#include "flashgen/sm90/forward_config.cuh"
#include "flashgen/sm90/query_tile.cuh"
#include "flashgen/sm90/sequence_search.cuh"

namespace flashgen {

// Where a tile of some heads of one sequence lies: the number of its head, and its place among the head's
// tiles.
struct HeadPlace {
  i32 head;
  i32 tile;
};

// Tile `number` of `heads` heads with `tiles` tiles each.
template <ForwardSm90Config cfg>
FLASHGEN_DEVICE HeadPlace place_in_sections(i32 number, i32 heads, i32 tiles) {
  // A partial section comes first: at the end its few long tiles would leave most blocks without work.
  const i32 partial = heads % cfg.section_heads, rest = number - partial * tiles;
  i32 first_head = 0, section = partial;
  if (rest >= 0) {
    section = cfg.section_heads;
    first_head = partial + rest / (section * tiles) * section;
    number = rest % (section * tiles);
  }
  const i32 turn = number / section;
  return {first_head + number % section, cfg.longest_first ? tiles - 1 - turn : turn};
}

// Drawing numbers is the same for all kinds of tiles.
template <class Params>
struct TileCounter {
  const Params& p;

  FLASHGEN_DEVICE static i32 first() { return block_idx_x(); }
  FLASHGEN_DEVICE i32 draw() const { return grid_dim_x() + static_cast<i32>(atomic_add(p.counter, 1u)); }
  // Each block calls this once, after its last draw. The last block resets the counters for the next launch.
  FLASHGEN_DEVICE void leave() const {
    if (atomic_add_release(p.counter + 1, 1u) + 1 == static_cast<u32>(grid_dim_x())) {
      store_release(p.counter, 0u);
      store_release(p.counter + 1, 0u);
    }
  }
};

// Where sequences have their own lengths.
template <ForwardSm90Config cfg, class Params, class Tile>
struct TileScheduler : TileCounter<Params> {
  using Rows = typename Tile::Rows;

  SequenceSearch search = {};

  // Tile `number`; its kind is `end` if there are not so many. All lanes of a warp call.
  FLASHGEN_DEVICE Tile tile(i32 number, Thread thread) {
    const Params& p = this->p;
    const auto found = search.find(number, p.batch, p.heads_q, p.q_tiles, thread, [&](i32 sequence) {
      return ceil_div(Rows::of(p, sequence).result_rows(), cfg.tile_q);
    });
    if (!found.exists) return {{0, 0, 0, TileKind::end, {}}};
    const HeadPlace place = place_in_sections<cfg>(found.number, p.heads_q, found.tiles_of_head);
    return {
        {place.tile * cfg.tile_q, place.head, found.sequence, TileKind::normal, Rows::of(p, found.sequence)}};
  }
};

// All sequences have the same length.
template <ForwardSm90Config cfg, class Params>
struct TileScheduler<cfg, Params, DenseTile> : TileCounter<Params> {
  // Tile `number`; its kind is `end` if there are not so many. All lanes of a warp call.
  FLASHGEN_DEVICE DenseTile tile(i32 number, Thread) const {
    const Params& p = this->p;
    if (number >= p.tiles) return {0, 0, 0, TileKind::end};
    const HeadPlace place = place_in_sections<cfg>(number, p.tiles / p.q_tiles, p.q_tiles);
    return {place.tile * cfg.tile_q, place.head % p.heads_q, place.head / p.heads_q, TileKind::normal};
  }
};

}  // namespace flashgen
