// Which keys, and which tiles of them, the rows of an item may attend to.
#pragma once
#include "flashgen/decode/rows.cuh"

namespace flashgen {

template <DecodeConfig cfg, class Mask, class Params>
struct VisitedTiles {
  const Params& p;

  // The keys that some row may attend to.
  FLASHGEN_DEVICE Range existing_keys(const DecodeItem& item) const {
    if constexpr (cfg.varies_by_head) {
      return {0, item.cached.len_kv};
    } else {
      const Range keys = mask_of<Mask>(p, item.cached, item.sequence, 0).key_tiles(0, item.cached.len_q, 1);
      return {keys.begin, smaller(keys.end, item.cached.len_kv)};
    }
  }

  // Narrows `tiles`, which serve the whole sequence, to those that the rows of this item may attend to.
  FLASHGEN_DEVICE Range tiles_of(const DecodeItem& item, Range tiles) const {
    if constexpr (cfg.varies_by_head) {
      return tiles;
    } else {
      const RowPlace first = RowPlace::of(p, item, 0), last = RowPlace::of(p, item, item.rows - 1);
      const Range own =
          mask_of<Mask>(p, item.cached, item.sequence, 0).key_tiles(first.q, last.q + 1, cfg.tile_kv);
      const i32 begin = larger(tiles.begin, own.begin);
      return {begin, larger(begin, smaller(tiles.end, own.end))};
    }
  }

  // The queries of an item's rows.
  FLASHGEN_DEVICE Range queries_of(const DecodeItem& item) const {
    return {RowPlace::of(p, item, 0).q, RowPlace::of(p, item, item.rows - 1).q + 1};
  }

  // Whether the mask forbids some pair of an item's queries and a tile. All warps get the same.
  FLASHGEN_DEVICE bool is_cut(const DecodeItem& item, Range queries, i32 first_key) const {
    const i32 heads = cfg.varies_by_head ? p.group : 1;
    bool cut = false;
#pragma unroll 1
    for (i32 i = 0; i < heads; ++i) {
      const Mask mask = mask_of<Mask>(p, item.cached, item.sequence, item.head_kv * p.group + i);
      cut |= !mask.is_full(queries.begin, queries.end, first_key, first_key + cfg.tile_kv);
    }
    return cut;
  }

  // A function that tells whether a tile of keys holds allowed pairs.
  FLASHGEN_DEVICE auto visited_by(const DecodeItem& item) const {
    return [this, &item](i32 tile) {
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
};

}  // namespace flashgen
