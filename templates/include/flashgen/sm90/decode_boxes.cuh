// How the producer warps of Hopper's decode kernels copy tiles of keys and values: by TMA, in boxes.
#pragma once
#include "flashgen/decode/visited_tiles.cuh"
#include "flashgen/sm90/key_boxes.cuh"
#include "flashgen/walk.cuh"

namespace flashgen {

// Fills the slots of a ring with tiles of an item. `sharing` warps take the boxes of a tile in turns, and
// `own` is the number of this one among them. `load(at, box)` starts the copy of a box, whose rows have
// `row_bytes` each.
template <DecodeConfig cfg, class Mask, bool paged, i32 sharing, class Params, class TileRing, class Load>
FLASHGEN_DEVICE void load_tiles(const Params& p, const DecodeItem& item, Range tiles, i32 own, TileRing ring,
                                typename TileRing::State& at, i32 row_bytes, Thread thread,
                                const Load& load) {
  // No page outside these keys is read: it may belong to another sequence by now.
  const VisitedTiles<cfg, Mask, Params> visits{p};
  const auto boxes = KeyBoxes<cfg.tile_kv, paged>::of(p, visits.existing_keys(item));
  // This warp has the boxes own, own + sharing, ..., and of these this lane has the first_box and each 32nd
  // after it.
  const i32 first_box = sharing * thread.lane + own;
  const bool has_box = first_box < boxes.count();
  const i32 own_boxes = (boxes.count() + sharing - 1 - own) / sharing,
            own_bytes = (own_boxes << boxes.shift) * row_bytes;
  const auto visited = visits.visited_by(item);
  Walk<Mask::has_holes> walk(tiles);
  const auto box_of = [&](i32 tile, i32 index) {
    return boxes.at(p, item.cached, tile * cfg.tile_kv, index);
  };
  BoxCoordinates next = {};
  const auto find_next = [&]() {
    walk.advance(thread, visited);
    if (!walk.over() && has_box) next = box_of(walk.tile, first_box);
  };
  find_next();
#pragma unroll 1
  for (; !walk.over(); at.advance()) {
    // Page numbers are read one tile ahead, because each copy would wait for them.
    const BoxCoordinates box = next;
    const i32 tile = walk.tile;
    find_next();
    if (thread.lane == 0) {
      ring.wait_empty(at);
      mbarrier_arrive_expect_tx(ring.full(at), own_bytes);
    }
    warp_sync();
    if (has_box) load(at, box);
    if constexpr (paged && cfg.tile_kv > sharing * kWarpSize) {
      // A page with an odd number of rows has boxes of one row each: more than these warps have lanes.
#pragma unroll 1
      for (i32 i = first_box + sharing * kWarpSize; i < boxes.count(); i += sharing * kWarpSize)
        load(at, box_of(tile, i));
    }
  }
}

}  // namespace flashgen
