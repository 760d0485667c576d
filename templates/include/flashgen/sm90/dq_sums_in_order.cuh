// dQ as a sum over tiles of keys, added in a fixed order: the other Sums policy of the fused backward kernel.
// Sums are then the same bits in every run.
//
// Each tile of queries has a turn in global memory: one more than the last tile of keys that has added to it.
// Tiles of keys add from the first to the last. The first one stores, so that sums need not be cleared.
// Consumers leave their shares in shared memory, as always, and the three warps beside the producer go on:
//
//     two adders   wait for the turn, have TMA add, wait for completion and pass the turn; they alternate
//     finisher     waits for the last turn of a tile of queries, then scales, rounds and stores its sum
//
// There is no deadlock. Blocks draw tiles of keys in order, process theirs in that order, and a tile waits
// only for earlier tiles of the same head. So the earliest unfinished tile waits for no other, however few
// blocks run.
//
// Waits are rare. All tiles of keys visit the queries from the last to the first. If two start together, the
// later one waits for one addition, once, and stays behind. A causal mask makes the later one come later
// anyway.
#pragma once
#include "flashgen/sm90/backward_shared.cuh"

namespace flashgen {

template <BackwardSm90Config cfg, class T, class Params, class Smem, class Tile, class Mask, class Queries,
          class Dropping>
struct SumsInOrder {
  using Shared = BackwardShared<cfg, T, Smem, Tile, Queries>;
  using Share = typename Shared::Share;
  using TileAt = typename Shared::TileRing::State;
  using StepAt = typename Shared::DORing::State;
  // What a consumer hands to the adders: one buffer, with barriers for each adder.
  using DQRing = Ring<2>;
  using SumRing = Ring<1>;
  static constexpr i32 first_adder = 1;
  static constexpr u32 tile_readers = 2;

  FLASHGEN_DEVICE static DQRing dq_ring(Shared shared, i32 consumer) {
    return {shared.start + Smem::kDqBarriers + static_cast<u32>(32 * consumer)};
  }
  FLASHGEN_DEVICE static SumRing sum_ring(Shared shared) { return {shared.start + Smem::kSumBarriers}; }

  FLASHGEN_DEVICE static void init(Shared shared) {
    for (i32 consumer = 0; consumer < cfg.consumers; ++consumer) dq_ring(shared, consumer).init(4, 1);
    sum_ring(shared).init(1, kWarpSize);
  }
  FLASHGEN_DEVICE static void clear_shared(Shared, Thread) {}

  // ---- A consumer's warp. The position in the ring of dS counts the steps.

  struct Adder {
    const Params& p;
    Shared shared;
    i32 consumer;

    FLASHGEN_DEVICE void begin(const Tile&) {}
    FLASHGEN_DEVICE i32 number(const Tile&, QueryStep) const { return 0; }
    FLASHGEN_DEVICE void report(Thread) const {}
    FLASHGEN_DEVICE void pass(TileAt, Thread) const {}
    // The buffer's previous share has been read. `at` is the position of the share that is to follow.
    FLASHGEN_DEVICE void wait_buffer(StepAt at) const {
      StepAt next = at;
      next.advance();
      dq_ring(shared, consumer).wait_empty({next.count});
    }
    FLASHGEN_DEVICE void add(i32, StepAt at, TileAt, Thread thread) const {
      fence_proxy_async_shared();
      warp_sync();
      if (thread.lane == 0) mbarrier_arrive(dq_ring(shared, consumer).full({at.count}));
    }
    FLASHGEN_DEVICE void leave(Thread) const {}
  };

  // ---- Turns

  // Whether a tile of keys adds to a block of queries, by the rule of for_each.
  FLASHGEN_DEVICE static bool adds(const Mask& mask, i32 block, i32 key_tile) {
    const i32 first_key = key_tile * cfg.tile_kv;
    if constexpr (Queries::sends_messages) {
      return mask.query_tiles(first_key, first_key + cfg.tile_kv, cfg.tile_q).has(block) &&
             !is_empty_block<cfg>(mask, block, first_key);
    } else {
      return Queries::visited(mask, first_key).has(block);
    }
  }
  // One more than the last tile of keys before `end` that adds to the block of queries, or 0. All lanes of a
  // warp call, and get the same.
  FLASHGEN_DEVICE static u32 end_of_adding(const Mask& mask, i32 block, i32 end, Thread thread) {
    for (i32 left = end; left > 0; left -= kWarpSize) {
      const i32 earlier = left - 1 - thread.lane;
      const u32 found = warp_ballot(earlier >= 0 && adds(mask, block, earlier));
      if (found != 0) return static_cast<u32>(left - lowest_bit(found));
    }
    return 0;
  }
  // The turn that a tile of keys waits for. Of a band, tiles that add to the same queries follow one another.
  FLASHGEN_DEVICE static u32 turn_of(const Mask& mask, i32 block, i32 key_tile, Thread thread) {
    if constexpr (Queries::sends_messages) return end_of_adding(mask, block, key_tile, thread);
    return key_tile > 0 && adds(mask, block, key_tile - 1) ? static_cast<u32>(key_tile) : 0;
  }
  // Waits until `turns` says `turn`. Bulk additions that this thread issues afterwards are ordered after
  // those of the previous tiles of keys.
  FLASHGEN_DEVICE static void wait_turn(const u32* turns, u32 turn) {
    while (load_acquire(turns) != turn) {
    }
    fence_proxy_async_global();
  }

  // ---- The warps beside the producer

  FLASHGEN_DEVICE static void run_helper(const Params& p, Shared shared, Thread self) {
    const Thread thread = self.recomputed();
    if (thread.warp < first_adder + 2) {
      add(p, shared, thread);
    } else {
      finish(p, shared, thread);
    }
  }

  // Consumers reuse the buffer in each step, so an adder starts once TMA has read the other adder's step.
  FLASHGEN_DEVICE static void add(const Params& p, Shared shared, Thread thread) {
    StepAt at;
    TileAt tile_at;
    while (true) {
      shared.tile_ring().wait_full(tile_at);
      const Tile& tile = shared.tile(tile_at);
      if (!tile.exists) break;
      const auto ignore = [](bool) {};
      Queries::for_each(p, tile, thread, ignore, [&](QueryStep step, const auto&) {
        if (at.slot() == thread.warp - first_adder) add_step(p, shared, tile, step, at, thread);
        at.advance();
      });
      mbarrier_arrive(shared.tile_ring().empty(tile_at));
      tile_at.advance();
    }
  }
  FLASHGEN_DEVICE static void add_step(const Params& p, Shared shared, const Tile& tile, QueryStep step,
                                       StepAt at, Thread thread) {
    const i32 key_tile = tile.first_key / cfg.tile_kv;
    const u32 turn = turn_of(tile.template mask<Mask>(p, step.member), step.block, key_tile, thread);
    if (thread.lane != 0) return;
    const i32 number = tile.template query_tile<cfg.tile_q>(p, step);
    u32* const turns = p.dq_semaphore + number;
    wait_turn(turns, turn);
    float* const sum = p.dq_accum + static_cast<i64>(number) * Share::tile_floats;
    // Each consumer's share as soon as it is ready.
#pragma unroll
    for (i32 consumer = 0; consumer < cfg.consumers; ++consumer) {
      dq_ring(shared, consumer).wait_full({at.count});
#pragma unroll 1
      for (i32 warp = 4 * consumer; warp < 4 * consumer + 4; ++warp) {
        const u32 bytes = static_cast<u32>(Share::warp_floats(consumer) * 4);
        if (turn == 0) {
          bulk_store(sum + Share::warp_begin(warp), shared.out(warp), bytes);
        } else {
          bulk_reduce_add(sum + Share::warp_begin(warp), shared.out(warp), bytes);
        }
      }
      bulk_commit();
      bulk_wait_read<0>();
      mbarrier_arrive(dq_ring(shared, consumer).empty({at.count}));
    }
    // The next tile of keys may add only after all additions have reached memory.
    bulk_wait<0>();
    store_release(turns, static_cast<u32>(key_tile + 1));
  }

  // What the finisher knows of a share. It lies in shared memory, because the finisher has few registers.
  struct Finished {
    // Where it goes in the map of dQ.
    i32 column;
    i32 row;
    i32 head;
    i32 place;
    // The number of its tile, among all.
    i32 tile;
    // The share's number among all, and how many shares the block has finished.
    i32 number;
    u32 count;
  };

  // Blocks divide the shares of all tiles of queries in the order in which these are likely to complete.
  // Nobody waits for a finisher.
  FLASHGEN_DEVICE static void finish(const Params& p, Shared shared, Thread thread) {
    Finished& share = *reinterpret_cast<Finished*>(shared.base + Smem::kSumParts);
    FinishOrder<cfg, Params, Tile> order{p};
    const auto at = [&]() { return typename SumRing::State{share.count}; };
    if (thread.lane == 0) {
      share.number = block_idx_x();
      share.count = 0;
    }
    while (true) {
      warp_sync();
      const i32 number = share.number, consumer = number % cfg.consumers;
      // Without a mask the last queries are complete first.
      const auto tile = order.template by_sections<!Queries::has_mask>(number / cfg.consumers, thread);
      if (!tile.exists) break;
      const i32 query_tile = tile.number(p, cfg.tile_q);
      if (thread.lane == 0) {
        share.column = Share::column(consumer);
        share.row = tile.first_row(p, cfg.tile_q) + Share::row(consumer);
        share.head = tile.head;
        share.place = tile.place();
        share.tile = query_tile;
      }
      const u32 last = end_of_adding(tile.template mask<Mask>(p), tile.block,
                                     tile.attended_key_tiles(p, cfg.tile_kv), thread);
      const u32 bytes = static_cast<u32>(4 * Share::warp_floats(consumer) * 4);
      if (last != 0) {
        if (thread.lane == 0) {
          wait_turn(p.dq_semaphore + query_tile, last);
          bulk_wait_read<0>();
          sum_ring(shared).wait_empty(at());
          mbarrier_arrive_expect_tx(sum_ring(shared).full(at()), bytes);
          bulk_load(shared.start + Smem::kSum,
                    p.dq_accum + static_cast<i64>(query_tile) * Share::tile_floats +
                        Share::warp_begin(4 * consumer),
                    bytes, sum_ring(shared).full(at()));
        }
        sum_ring(shared).wait_full(at());
      } else {
        // No tile of keys adds anything.
        if (thread.lane == 0) {
          bulk_wait_read<0>();
          mbarrier_arrive(sum_ring(shared).full(at()));
        }
        warp_sync();
#pragma unroll 1
        for (i32 i = thread.recomputed().lane; i < static_cast<i32>(bytes) / kChunkBytes; i += kWarpSize)
          reinterpret_cast<Vec16*>(shared.base + Smem::kSum)[i] = Vec16{.words = {0, 0, 0, 0}};
        warp_sync();
      }
      store_share(p, shared, share, consumer, thread);
      mbarrier_arrive(sum_ring(shared).empty(at()));
      warp_sync();
      if (thread.lane == 0) {
        share.number += grid_dim_x();
        ++share.count;
      }
    }
    if (thread.lane == 0) bulk_wait<0>();
  }
  // dQ_i = scale * (sum over the tiles of keys), 16 rows at a time.
  FLASHGEN_DEVICE static void store_share(const Params& p, Shared shared, const Finished& share, i32 consumer,
                                          Thread thread) {
#pragma unroll 1
    for (i32 warp = 0; warp < 4; ++warp) {
      const Thread here = thread.recomputed();
      const float* const from = reinterpret_cast<const float*>(shared.base + Smem::kSum) +
                                opaque(warp) * Share::warp_floats(consumer);
      const typename Shared::DQRows rows = {shared_address(from)};
      if (has_failed<Queries::has_mask>(from, Share::columns(consumer), here) && here.lane == 0)
        flag_queries<Queries::has_mask>(p, share.tile);
      const float scale = p.scale * Dropping::factor(p);
      finish_box<0, true>(rows, from, scale, here);
      if (Share::columns(consumer) > kPanelColumns / 2) finish_box<1, true>(rows, from, scale, here);
      fence_proxy_async_shared();
      warp_sync();
      if (here.lane == 0) {
        const i32 row = share.row + warp * kWarpRows;
        if (row < p.len_q) tma_store_4d(&p.dq_map, rows.address, share.column, row, share.head, share.place);
        bulk_commit();
      }
    }
  }
};

}  // namespace flashgen
