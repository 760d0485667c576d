// The scheduler: one warp that draws tiles and announces them to the producer and the consumers. It announces
// failed tiles again when all others are done (tile_checks.cuh).
#pragma once
#include "flashgen/ring.cuh"
#include "flashgen/sm90/tile_checks.cuh"
#include "flashgen/sm90/tile_scheduler.cuh"

namespace flashgen {

template <class TileScheduler, class Params, class Tile, class Shared>
struct SchedulerWarp {
  const Params& p;
  Shared shared;
  Thread thread;
  RingState<kForwardTileStages> tile_at;

  // Writes the announcement into its slot, which is empty.
  FLASHGEN_DEVICE void announce(const Tile& tile) {
    if (thread.lane == 0) {
      shared.tile(tile_at) = tile;
      mbarrier_arrive(shared.tile_ring().full(tile_at));
    }
    warp_sync();
    tile_at.advance();
  }
  // run() reads the checks of a tile before it refills its slot. This reads those of slots not refilled.
  FLASHGEN_DEVICE void check_last(u32 tiles) {
    shared.checks().wait_drained(thread);
#pragma unroll 1
    for (u32 i = tiles < kForwardTileStages ? 0 : tiles - kForwardTileStages + 1; i < tiles; ++i)
      shared.checks().queue_if_failed(i, thread);
  }

  FLASHGEN_DEVICE void run() {
    TileScheduler tiles{p};
    auto& checks = shared.checks();
    bool is_drained = false;
    for (i32 number = tiles.first();;) {
      const u32 index = tile_at.count;
      if (thread.lane == 0) shared.tile_ring().wait_empty(tile_at);
      warp_sync();
      if (!is_drained && index >= kForwardTileStages)
        checks.queue_if_failed(index - kForwardTileStages, thread);
      Tile tile = tiles.tile(number, thread);
      if (tile.kind == TileKind::end) {
        if (is_drained) break;
        is_drained = true;
        tile.kind = TileKind::drain;
        announce(tile);
        check_last(index);
      } else {
        if (thread.lane == 0) {
          if (!is_drained) checks.set_number(index, number);
          if (checks.any_failed()) tile.kind = TileKind::careful;
        }
        announce(tile);
      }
      // The producer requests the next tile. Drawn earlier, it would wait while other thread blocks are idle.
      named_barrier_sync(kRequestBarrier, 2 * kWarpSize);
      i32 next = 0;
      if (thread.lane == 0) {
        next = is_drained ? checks.take_failed() : tiles.draw();
      }
      number = shuffle(next, 0);
    }
    Tile end = {};
    end.kind = TileKind::end;
    announce(end);
    if (thread.lane == 0) tiles.leave();
  }
};

}  // namespace flashgen
