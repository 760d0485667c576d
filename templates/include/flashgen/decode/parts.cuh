// A block's share of an item: the tiles of keys that it visits, and what becomes of its results.
#pragma once
#include "flashgen/decode/results.cuh"
#include "flashgen/decode/scheduler.cuh"

namespace flashgen {

// A function that tells whether a tile of keys holds allowed pairs.
template <DecodeConfig cfg, class Mask, class Params>
FLASHGEN_DEVICE auto visited_by(const Params& p, const DecodeItem& item) {
  return [&p, &item](i32 tile) {
    const RowPlace first = RowPlace::of(p, item, 0), last = RowPlace::of(p, item, item.rows - 1);
    const i32 heads = cfg.varies_by_head ? p.group : 1;
    bool is_visited = false;
#pragma unroll 1
    for (i32 i = 0; i < heads; ++i) {
      const Mask mask = mask_of<Mask>(p, item.cached, item.sequence, item.head_kv * p.group + i);
      is_visited |= !mask.is_empty(first.q, last.q + 1, tile * cfg.tile_kv, (tile + 1) * cfg.tile_kv);
    }
    return is_visited;
  };
}

// The keys that some row may attend to.
template <DecodeConfig cfg, class Mask, class Params>
FLASHGEN_DEVICE Range existing_keys(const Params& p, const DecodeItem& item) {
  if constexpr (cfg.varies_by_head) {
    return {0, item.cached.len_kv};
  } else {
    const Range keys = mask_of<Mask>(p, item.cached, item.sequence, 0).key_tiles(0, item.cached.len_q, 1);
    return {keys.begin, smaller(keys.end, item.cached.len_kv)};
  }
}

// Calls visit(part, tiles) for the parts of a share: those of fixed size one by one (batch_invariant), or all
// tiles at once.
template <class Params, class Visit>
FLASHGEN_DEVICE void for_each_part(const Params& p, const Assignment& assigned, const Visit& visit) {
  const DecodeItem& item = assigned.item;
  const bool is_fixed = p.part_tiles != 0;
  const i32 unit_tiles = is_fixed ? p.part_tiles : 1;
  const i32 step = is_fixed ? 1 : assigned.end - assigned.begin;
#pragma unroll 1
  for (i32 unit = assigned.begin; unit < assigned.end; unit += step) {
    const i32 first = item.tiles.begin + unit * unit_tiles;
    visit(unit, Range{first, smaller(item.tiles.end, first + step * unit_tiles)});
  }
}

// Computes a share. `attend(tiles)` leaves the results of some tiles in shared memory.
template <DecodeConfig cfg, class Results, class Attend>
FLASHGEN_DEVICE void compute_parts(const Results& results, const Assignment& assigned, const Shares& shares,
                                   u32& is_last, const Attend& attend) {
  const auto& p = results.p;
  const i32 first_block = shares.owner(assigned.first_unit);
  const i32 blocks = shares.owner(assigned.first_unit + assigned.units - 1) - first_block + 1;
  const bool is_fixed = p.part_tiles != 0;
  const PartSlots slots{is_fixed, is_fixed ? assigned.units : blocks, assigned.first_unit, first_block};
  for_each_part(p, assigned, [&](i32 unit, Range tiles) {
    attend(tiles);
    if (slots.count == 1) {
      results.store_whole();
    } else {
      results.store_part(slots(is_fixed ? unit : block_idx_x() - first_block));
    }
    // The next copies overwrite these results, where results take the place of the ring.
    if constexpr (cfg.producers == 0) block_sync();
  });
  if (slots.count > 1 && (blocks == 1 || arrives_last<cfg>(p.counter + first_block, static_cast<u32>(blocks),
                                                           is_last, results.thread)))
    results.merge(slots);
}

}  // namespace flashgen
