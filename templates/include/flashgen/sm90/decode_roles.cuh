// What Hopper's decode kernels have in common: warps that copy, warps that compute, and the rows of Q.
#pragma once
#include "flashgen/decode/assignment.cuh"
#include "flashgen/panel.cuh"

namespace flashgen {

// Two warpgroups compute, and the four warps of a third copy.
constexpr i32 kWarpgroupWarps = 4;

template <DecodeConfig cfg>
constexpr bool kHasDecodeRoles =
    cfg.tile_q == kWarpgroupRows && cfg.warps == 2 * kWarpgroupWarps && cfg.producers == kWarpgroupWarps;

// Runs a block. The mainloop has
//
//     init_rings()                      called by one thread
//     load(producer, item, tiles)       called by a producer warp
//     compute(scheduler, turn)          called by the warps that compute, for assignment `turn`
template <DecodeConfig cfg, class Mainloop>
FLASHGEN_DEVICE void run_decode_roles(Mainloop& mainloop) {
  const auto& p = mainloop.p;
  const Thread thread = mainloop.thread;
  auto& scheduler = mainloop.shared().scheduler;
  if (thread.index() == 0) {
    mainloop.init_rings();
    fence_mbarrier_init();
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
  }
  // Programmatic dependent launch: waits for the previous grids, and lets the next one start.
  griddep_wait();
  griddep_launch_dependents();
  // All warps wait here for the rings and for the scheduler.
  if (thread.warp < cfg.warps) scheduler.init(p, thread);
  block_sync();
  if (thread.warp >= cfg.warps) {
    setmaxnreg_dec<cfg.producer_registers>();
    const i32 producer = thread.warp - cfg.warps;
#pragma unroll 1
    while (true) {
      const Assignment& assigned = scheduler.next_to_copy(p, producer, thread);
      if (!assigned.exists) break;
      for_each_part(p, assigned, [&](i32, Range tiles) { mainloop.load(producer, assigned.item, tiles); });
    }
  } else {
    setmaxnreg_inc<cfg.consumer_registers>();
    scheduler.fetch(p, 0, thread);
#pragma unroll 1
    for (i32 turn = 0;; turn ^= 1) {
      consumers_sync<cfg>();
      if (!scheduler.assignments[turn].exists) break;
      mainloop.compute(scheduler, turn);
    }
  }
}

// Starts copies of an item's rows to shared memory. A row has `columns` elements.
template <DecodeConfig cfg, class QTile, class Params>
FLASHGEN_DEVICE void start_queries(QTile tile, const QueryRows<typename QTile::Element>& source,
                                   const Params& p, const DecodeItem& item, i32 columns, Thread thread) {
  using T = typename QTile::Element;
  constexpr i32 chunk_columns = kChunkBytes / static_cast<i32>(sizeof(T)),
                chunks = QTile::cols / chunk_columns;
#pragma unroll 2
  for (i32 i = thread.index(); i < kWarpgroupRows * chunks; i += cfg.warps * kWarpSize) {
    const i32 row = i / chunks, chunk = i % chunks;
    const T* const from = source.at(RowPlace::of(p, item, row)) + chunk * chunk_columns;
    copy_chunk_async<T, cfg.access_bytes>(tile.chunk_at(row, chunk), from, columns - chunk * chunk_columns);
  }
  cp_async_commit();
}

// Waits until the rows of Q have arrived, and makes them visible to wgmma.
template <DecodeConfig cfg>
FLASHGEN_DEVICE void await_queries() {
  cp_async_wait<0>();
  fence_proxy_async_shared();
  consumers_sync<cfg>();
}

}  // namespace flashgen
