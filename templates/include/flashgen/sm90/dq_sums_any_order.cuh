// dQ as a sum over tiles of keys, added in any order: one of the two Sums policies of the fused backward
// kernel.
//
// Consumers leave their shares of dQ in shared memory, and TMA adds them to a float32 sum in global memory.
// Only heads in progress have sums: a ring of p.sum_heads heads stays in the L2 cache. The three warps beside
// the producer finish sums that are complete:
//
//     reporter    counts, for all thread blocks, tiles of keys that have added; signals consumers when a ring
//                 slot is cleared
//     collector   one lane that draws tiles of queries, head after head, and loads their complete sums by TMA
//     finisher    scales, rounds and stores them, and clears the sums for a later head
//
// There is no deadlock. A head waits for the one that used its slot before, and a tile of queries for the
// tiles of keys of its head. Tiles are drawn in order by running blocks, and no section of heads waits for
// itself.
#pragma once
#include "flashgen/sm90/backward_shared.cuh"

namespace flashgen {

// Part of a sum in shared memory. The TMA map of the workspace is an array of lines; a box is two of them.
struct SumLines {
  static constexpr i32 floats = 256;
  static constexpr u32 box_bytes = 2 * floats * 4;
  u32 address;

  FLASHGEN_DEVICE void load(const TensorMap& map, u32 barrier, i32 line, i32 boxes) const {
#pragma unroll 1
    for (i32 i = 0; i < boxes; ++i)
      tma_load_4d(address + static_cast<u32>(i) * box_bytes, &map, barrier, 0, line + 2 * i, 0, 0);
  }
  // Stores the same bytes to each box.
  FLASHGEN_DEVICE void repeat(const TensorMap& map, i32 line, i32 boxes) const {
#pragma unroll 1
    for (i32 i = 0; i < boxes; ++i) tma_store_4d(&map, address, 0, line + 2 * i, 0, 0);
  }
};

template <BackwardSm90Config cfg, class T, class Params, class Smem, class Tile, class Mask, class Queries,
          class Dropping>
struct SumsInAnyOrder {
  using Shared = BackwardShared<cfg, T, Smem, Tile, Queries>;
  using Share = typename Shared::Share;
  using TileAt = typename Shared::TileRing::State;
  using StepAt = typename Shared::DORing::State;
  using SumRing = Ring<cfg.sum_stages>;
  using Order = FinishOrder<cfg, Params, Tile>;
  // Warps beside consumers that read announced tiles.
  static constexpr u32 tile_readers = 1;
  // Shares of a tile of dQ: one for each warp.
  static constexpr i32 parts = Shared::consumer_warps;

  // ---- Barriers and counters

  FLASHGEN_DEVICE static SumRing sum_ring(Shared shared) { return {shared.start + Smem::kSumBarriers}; }
  FLASHGEN_DEVICE static u8* sum(Shared shared, typename SumRing::State at) {
    return shared.base + Smem::kSums + at.slot() * Shared::out_bytes;
  }
  FLASHGEN_DEVICE static DqPart& part(Shared shared, typename SumRing::State at) {
    return reinterpret_cast<DqPart*>(shared.base + Smem::kSumParts)[at.slot()];
  }
  // Two barriers with a phase for each tile of keys: all warps' shares of the previous tile have been added
  // to dQ, and this tile's may be.
  FLASHGEN_DEVICE static u32 added(Shared shared) { return shared.start + Smem::kTurnBarriers; }
  FLASHGEN_DEVICE static u32 may_add(Shared shared) { return added(shared) + 8; }
  FLASHGEN_DEVICE static u32 turn_of(TileAt tile) { return tile.count % 2; }
  // How many tiles of keys have added to the sums of a group, and how many tiles of a head's dQ are finished
  // and cleared.
  FLASHGEN_DEVICE static u32* added_tiles(const Params& p, i32 first_head) {
    return p.head_counts + 1 + 2 * first_head;
  }
  FLASHGEN_DEVICE static u32* finished_tiles(const Params& p, i32 head) {
    return p.head_counts + 2 + 2 * head;
  }

  FLASHGEN_DEVICE static void init(Shared shared) {
    sum_ring(shared).init(2, kWarpSize);
    mbarrier_init(added(shared), Shared::consumer_warps);
    mbarrier_init(may_add(shared), 1);
  }
  // All threads call this before the block begins.
  FLASHGEN_DEVICE static void clear_shared(Shared shared, Thread thread) {
    constexpr i32 threads = (cfg.consumers + 1) * kWarpgroupSize;
    for (i32 i = thread.index(); i < static_cast<i32>(SumLines::box_bytes) / kChunkBytes; i += threads)
      reinterpret_cast<Vec16*>(shared.base + Smem::kZeros)[i] = Vec16{.words = {0, 0, 0, 0}};
    fence_proxy_async_shared();
  }

  // ---- A consumer's warp

  struct Adder {
    const Params& p;
    Shared shared;
    i32 consumer;
    // The number of the group's first tile of queries in the ring of sums.
    i32 first_number;

    FLASHGEN_DEVICE void begin(const Tile& tile) { first_number = tile.template first_sum<cfg.tile_q>(p); }
    FLASHGEN_DEVICE i32 number(const Tile&, QueryStep step) const { return Tile::sum(p, first_number, step); }

    // All additions of the previous tile of keys are complete. Its stores of dK and dV, two groups, may be in
    // flight.
    FLASHGEN_DEVICE void report(Thread thread) const {
      if (thread.lane == 0) {
        bulk_wait<2>();
        mbarrier_arrive(added(shared));
      }
    }
    // A tile that no query attends to adds nothing. But a warp that ran ahead could make the reporter miss a
    // phase.
    FLASHGEN_DEVICE void pass(TileAt tile_at, Thread thread) const {
      report(thread);
      mbarrier_wait(may_add(shared), turn_of(tile_at));
    }
    FLASHGEN_DEVICE void wait_buffer(StepAt) const {}
    FLASHGEN_DEVICE void add(i32 number, StepAt, TileAt tile_at, Thread thread) const {
      mbarrier_wait(may_add(shared), turn_of(tile_at));
      fence_proxy_async_shared();
      warp_sync();
      if (thread.lane == 0) {
        const i32 warp = thread.warp - 4;
        float* const sum =
            p.dq_accum + static_cast<i64>(number) * Share::tile_floats + Share::warp_begin(warp);
        bulk_reduce_add(sum, shared.out(warp), static_cast<u32>(Share::warp_floats(warp / 4) * 4));
        bulk_commit();
      }
    }
    FLASHGEN_DEVICE void leave(Thread thread) const { report(thread); }
  };

  // ---- The warps beside the producer

  FLASHGEN_DEVICE static void run_helper(const Params& p, Shared shared, Thread self) {
    const Thread thread = self.recomputed();
    if (thread.warp == 1) {
      report(p, shared, thread);
    } else if (thread.warp == 2) {
      if (Order::by_warp || thread.lane == 0) collect(p, shared, thread);
    } else {
      finish(p, shared, thread);
    }
  }

  FLASHGEN_DEVICE static void report(const Params& p, Shared shared, Thread thread) {
    TileAt tile_at;
    i32 previous_head = 0;
    while (true) {
      shared.tile_ring().wait_full(tile_at);
      const Tile tile = shared.tile(tile_at);
      mbarrier_arrive(shared.tile_ring().empty(tile_at));
      mbarrier_wait(added(shared), turn_of(tile_at));
      if (tile_at.count > 0 && thread.lane == 0) atomic_add_release(added_tiles(p, previous_head), 1u);
      if (!tile.exists) break;
      const i32 head = tile.first_head(p);
      if (head >= p.sum_heads) {
        // Earlier heads used these sums. Wait until they are finished, and the sums are cleared.
        for (i32 member = thread.lane; member < p.group; member += kWarpSize) {
          while (load_acquire(finished_tiles(p, head - p.sum_heads + member)) !=
                 static_cast<u32>(p.q_tiles)) {
          }
        }
        // TMA of another block cleared the sums, and TMA of this block adds to them.
        fence_proxy_async_global();
      }
      warp_sync();
      if (thread.lane == 0) mbarrier_arrive(may_add(shared));
      previous_head = head;
      tile_at.advance();
    }
  }

  FLASHGEN_DEVICE static void collect(const Params& p, Shared shared, Thread thread) {
    Order order{p};
    typename SumRing::State at;
    const bool elected = !Order::by_warp || thread.lane == 0;
    const auto draw = [&]() {
      const i32 number = elected ? static_cast<i32>(atomic_add(p.head_counts, 1u)) : 0;
      return Order::by_warp ? shuffle(number, 0) : number;
    };
    for (i32 number = draw();;) {
      const auto tile = order.by_heads(number, thread);
      if (!tile.exists) break;
      const i32 head = tile.sequence * p.heads_q + tile.head;
      const u32* const tiles_added = added_tiles(p, head - head % p.group);
      while (elected && load_acquire(tiles_added) != static_cast<u32>(tile.key_tiles(p, cfg.tile_kv))) {
      }
      fence_proxy_async();
      // The next draw overlaps the loads of this tile.
      number = draw();
      const i32 sum_number = Tile::sum_of(p, head, tile.number(p, cfg.tile_q));
      for (i32 warp = 0; warp < parts; ++warp) {
        const i32 consumer = warp / 4;
        const DqPart to = {
            Share::column(consumer),
            tile.first_row(p, cfg.tile_q) + Share::row(consumer) + warp % 4 * kWarpRows,
            tile.head,
            tile.place(),
            tile.number(p, cfg.tile_q),
            sum_number * (Share::tile_floats / SumLines::floats) + Share::warp_begin(warp) / SumLines::floats,
            Share::warp_floats(consumer) / (2 * SumLines::floats),
            Tile::is_sum_needed_again(p, head),
            warp == parts - 1};
        if (elected) {
          const u32 full = sum_ring(shared).full(at);
          sum_ring(shared).wait_empty(at);
          part(shared, at) = to;
          mbarrier_arrive_expect_tx(full, static_cast<u32>(to.boxes) * SumLines::box_bytes);
          SumLines{shared_address(sum(shared, at))}.load(p.dq_accum_map, full, to.line, to.boxes);
          // A second arrival, by this thread, orders the loads before the finisher clears the sum.
          mbarrier_arrive(full);
        }
        at.advance();
      }
    }
    if (!elected) return;
    sum_ring(shared).wait_empty(at);
    part(shared, at) = {};
    mbarrier_arrive(sum_ring(shared).full(at));
    mbarrier_arrive(sum_ring(shared).full(at));
  }

  // dQ_i = scale * (sum over the tiles of keys), for rows of one warp at a time.
  FLASHGEN_DEVICE static void finish(const Params& p, Shared shared, Thread thread) {
    using Rows = typename Shared::DQRows;
    typename SumRing::State at;
    while (true) {
      sum_ring(shared).wait_full(at);
      const DqPart& to = part(shared, at);
      const i32 boxes = to.boxes;
      if (boxes == 0) break;
      const Rows rows =
          Rows{shared.start + Smem::kDqRows}.slot(static_cast<i32>(at.count % cfg.rounded_stages));
      if (thread.lane == 0) bulk_wait_read<cfg.rounded_stages - 1>();
      warp_sync();
      const float* const from = reinterpret_cast<const float*>(sum(shared, at));
      if (has_failed<Queries::has_mask>(from, Share::columns(0) / 2 * boxes, thread) && thread.lane == 0)
        flag_queries<Queries::has_mask>(p, to.tile);
      const float scale = p.scale * Dropping::factor(p);
      finish_box<0, false>(rows, from, scale, thread);
      if (cfg.head_dim % kPanelColumns == 0 || boxes == 2) finish_box<1, false>(rows, from, scale, thread);
      fence_proxy_async_shared();
      warp_sync();
      if (thread.lane == 0) {
        const DqPart here = to;
        if (here.row < p.len_q)
          tma_store_4d(&p.dq_map, rows.address, here.column, here.row, here.head, here.place);
        if (here.is_needed_again)
          SumLines{shared.start + Smem::kZeros}.repeat(p.dq_accum_map, here.line, boxes);
        bulk_commit();
        if (here.is_needed_again && here.is_last) {
          bulk_wait<0>();
          atomic_add_release(finished_tiles(p, here.place * p.heads_q + here.head), 1u);
        }
      }
      mbarrier_arrive(sum_ring(shared).empty(at));
      at.advance();
    }
    if (thread.lane == 0) bulk_wait<0>();
  }
};

}  // namespace flashgen
