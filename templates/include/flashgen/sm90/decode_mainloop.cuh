// Attention of few new tokens to a cache, on Hopper. Items, and how blocks share them, are those of
// decode/mainloop.cuh.
//
// Four producer warps copy tiles of K and V to a ring in shared memory by TMA. They run ahead into the
// block's next item. Two warpgroups take turns at the tiles. Each multiplies all rows of an item, at most 64,
// by its tile. While one takes exponentials, the other one multiplies. They merge their results at the end of
// the item:
//
//     producers     | tile 0 | tile 1 | tile 2 | tile 3 |
//     warpgroup 0            | S, P, P V of 0  | of 2            |
//     warpgroup 1                     | S, P, P V of 1  | of 3            |
#pragma once
#include "flashgen/decode/cache_element.cuh"
#include "flashgen/decode/results.cuh"
#include "flashgen/decode/share.cuh"
#include "flashgen/decode/visited_tiles.cuh"
#include "flashgen/issue_in_fours.cuh"
#include "flashgen/ring.cuh"
#include "flashgen/sm90/careful_product.cuh"
#include "flashgen/sm90/key_boxes.cuh"
#include "flashgen/sm90/row_softmax.cuh"
#include "flashgen/walk.cuh"

namespace flashgen {

template <DecodeConfig cfg, class T, class Params, class Smem, class Mask, class Score, bool paged>
struct DecodeSm90Mainloop {
  static_assert(cfg.tile_q == kWarpgroupRows && cfg.warps == 8 && cfg.producers == 4,
                "two warpgroups compute, and warps of a third copy");
  // An mbarrier wait tests only a parity, and copies may arrive out of order. If a stage changed warpgroups
  // between rounds, one could wait for round n while round n - 1 is incomplete, match the parity of round
  // n - 2, and read old keys.
  static_assert(cfg.stages % 2 == 0, "each stage belongs to one warpgroup while an item lasts");
  static constexpr i32 kWarpgroupWarps = 4;

  using Element = SameElement<cfg, T>;
  using QTile = PanelTile<T, kWarpgroupRows, Element::dim>;
  using KTile = PanelTile<T, cfg.tile_kv, Element::dim>;
  using VTile = PanelTile<T, cfg.tile_kv, Element::dim_v>;
  using TileRing = Ring<cfg.stages>;
  using Logits = typename Score::Logits;
  using Softmax = OnlineSoftmax<1, Logits>;
  using Results = DecodeResults<cfg, T, Params, Score, Element>;

  struct Shared {
    DecodeScheduler<cfg, Mask> scheduler;
    u32 is_last;
    RowTotals<cfg> totals;
  };
  static_assert(Smem::kShared + sizeof(Shared) <= Smem::kBytes,
                "the plan leaves room for what threads exchange");
  static_assert(Smem::kMerge + Results::bytes <= Smem::kBytes, "the plan leaves room for results");

  const Params& p;
  u8* base;
  u32 start;
  Thread thread;
  // The next tile of the ring.
  typename TileRing::State at = {};

  FLASHGEN_DEVICE Shared& shared() const { return *reinterpret_cast<Shared*>(base + Smem::kShared); }
  FLASHGEN_DEVICE TileRing ring() const { return {start + Smem::kBarriers}; }
  FLASHGEN_DEVICE QTile q_tile() const { return {start + Smem::kQ}; }
  FLASHGEN_DEVICE KTile k_tiles() const { return {start + Smem::kK}; }
  FLASHGEN_DEVICE VTile v_tiles() const { return {start + Smem::kV}; }
  FLASHGEN_DEVICE KTile k_tile() const { return k_tiles().slot(at.slot()); }
  FLASHGEN_DEVICE VTile v_tile() const { return v_tiles().slot(at.slot()); }

  // ---- The producers. A warp issues the copies of its lanes one after another, so four warps share them:
  // two of keys, two of values, and of each pair one has the even boxes of a tile.

  // Loads half of the boxes of the keys, or of the values, of some tiles.
  template <class Panels>
  FLASHGEN_DEVICE void load_tiles(Panels ring_tiles, const TensorMap& map, const DecodeItem& item,
                                  Range tiles, i32 half) {
    // No page outside these keys is read: it may belong to another sequence by now.
    const VisitedTiles<cfg, Mask, Params> visits{p};
    const auto boxes = KeyBoxes<cfg.tile_kv, paged>::of(p, visits.existing_keys(item));
    const i32 own = 2 * thread.lane + half;
    const bool has_box = own < boxes.count();
    const i32 own_bytes = ((boxes.count() + 1 - half) / 2 << boxes.shift) * (Panels::bytes / cfg.tile_kv);
    const auto visited = visits.visited_by(item);
    Walk<Mask::has_holes> walk(tiles);
    const auto box_of = [&](i32 tile, i32 index) {
      return boxes.at(p, item.cached, tile * cfg.tile_kv, index);
    };
    KeyBox next = {};
    const auto find_next = [&]() {
      walk.advance(thread, visited);
      if (!walk.over() && has_box) next = box_of(walk.tile, own);
    };
    find_next();
#pragma unroll 1
    for (; !walk.over(); at.advance()) {
      // Page numbers are read one tile ahead, because each copy would wait for them.
      const KeyBox box = next;
      const i32 tile = walk.tile;
      find_next();
      if (thread.lane == 0) {
        ring().wait_empty(at);
        mbarrier_arrive_expect_tx(ring().full(at), own_bytes);
      }
      warp_sync();
      const auto load = [&](const KeyBox& some) {
        const auto rows = ring_tiles.slot(at.slot()).from_row(some.first_row);
        rows.load(map, ring().full(at), some.place, item.head_kv, some.page);
      };
      if (has_box) load(box);
      if constexpr (paged && cfg.tile_kv > 2 * kWarpSize) {
        // A page with an odd number of rows has boxes of one row: 128 in a tile, for 64 lanes of two warps.
#pragma unroll 1
        for (i32 i = own + 2 * kWarpSize; i < boxes.count(); i += 2 * kWarpSize) load(box_of(tile, i));
      }
    }
  }

  FLASHGEN_DEVICE void produce(DecodeScheduler<cfg, Mask>& scheduler) {
    const i32 producer = thread.warp - cfg.warps, half = producer / 2;
#pragma unroll 1
    while (true) {
      const Assignment& assigned = scheduler.next_to_copy(p, producer, thread);
      if (!assigned.exists) return;
      for_each_part(p, assigned, [&](i32, Range tiles) {
        if (producer % 2 == 0) {
          load_tiles(k_tiles(), p.k_map, assigned.item, tiles, half);
        } else {
          load_tiles(v_tiles(), p.v_map, assigned.item, tiles, half);
        }
      });
    }
  }

  // ---- The warpgroups that compute

  // Starts copies of the item's rows of Q to shared memory.
  FLASHGEN_DEVICE void start_queries(const DecodeItem& item) const {
    constexpr i32 columns = kChunkBytes / static_cast<i32>(sizeof(T)), chunks = Element::dim / columns;
    const auto source = QueryRows<T>::of(p, item);
#pragma unroll 1
    for (i32 i = thread.index(); i < kWarpgroupRows * chunks; i += cfg.warps * kWarpSize) {
      const i32 row = i / chunks, chunk = i % chunks;
      const T* const from = source.at(RowPlace::of(p, item, row)) + chunk * columns;
      copy_chunk_async<T, cfg.access_bytes>(q_tile().chunk_at(row, chunk), from,
                                            cfg.head_dim - chunk * columns);
    }
    cp_async_commit();
  }
  FLASHGEN_DEVICE void await_queries() const {
    cp_async_wait<0>();
    fence_proxy_async_shared();
    consumers_sync<cfg>();
  }

  // Whether the mask forbids some pair of the item's rows and a tile. All warps get the same.
  FLASHGEN_DEVICE bool is_cut(const DecodeItem& item, i32 first_key) const {
    const RowPlace first = RowPlace::of(p, item, 0), last = RowPlace::of(p, item, item.rows - 1);
    const i32 heads = cfg.varies_by_head ? p.group : 1;
    bool cut = false;
#pragma unroll 1
    for (i32 i = 0; i < heads; ++i) {
      const Mask mask = mask_of<Mask>(p, item.cached, item.sequence, item.head_kv * p.group + i);
      cut |= !mask.is_full(first.q, last.q + 1, first_key, first_key + cfg.tile_kv);
    }
    return cut;
  }

  // O and the softmax of the warpgroup's share of some tiles.
  FLASHGEN_DEVICE void attend(Strip<Element::dim_v>& out, Softmax& softmax, const DecodeItem& item,
                              Range tiles) {
    const i32 warpgroup = thread.warp / kWarpgroupWarps, row_block = thread.warp % kWarpgroupWarps;
    const LaneRows rows = LaneRows::of(p, item, row_block, thread);
    const auto masks = LaneMasks<Mask>::of(p, item, rows);
    const Logits logits = Score::logits(p);
    // Products have 64 rows in any case. Only warps with rows of the item take exponentials.
    const bool has_rows = row_block < item.row_blocks();
    const VisitedTiles<cfg, Mask, Params> visits{p};
    const auto visited = visits.visited_by(item);
    await_queries();
    clear_strip(out);
    softmax.reset();
    Walk<Mask::has_holes> walk(tiles);
    walk.advance(thread, visited);
#pragma unroll 1
    for (i32 turn = 0; !walk.over(); walk.advance(thread, visited), at.advance(), turn ^= 1) {
      if (turn != warpgroup) continue;
      const i32 key = walk.tile * cfg.tile_kv;
      const bool cut = is_cut(item, key);
      ring().wait_full(at);
      Strip<cfg.tile_kv> strip;
      issue_scores(strip, q_tile(), k_tile());
      wgmma_wait<0>();
      wgmma_pin(strip);
      Accumulator<1, cfg.tile_kv / 8>& scores = blocks_of(strip);
      if (has_rows) {
        Score::apply(scores, p, item, rows, key, thread);
        if (cut) {
          for_each_score(scores, [&](float& s, i32 h, i32 column) {
            if (!masks.allows(h, key + thread.column() + column)) s = -kInfinity;
          });
        }
        softmax.update(scores, blocks_of(out), logits);
      }
      Rounded<cfg.tile_kv> probabilities;
      round_to<T, cfg.tile_kv>(probabilities, strip);
      if (cut && panels_hold_non_finite(v_tile(), base, thread)) {
        u32 allowed[2] = {};
        for_each_score(scores, [&](float&, i32 h, i32 column) {
          const bool is_allowed = masks.allows(h, key + thread.column() + column);
          allowed[h] |= static_cast<u32>(is_allowed) << (column / 8 * 2 + column % 2);
        });
        multiply_careful(out, probabilities, v_tile(), allowed, thread);
      } else {
        issue_output_in_fours(out, probabilities, v_tile(), true);
        wgmma_wait<0>();
        wgmma_pin(out);
      }
      ring().release(at, thread);
    }
    softmax.finish();
  }

  FLASHGEN_DEVICE void compute(DecodeScheduler<cfg, Mask>& scheduler, i32 turn) {
    const Assignment& assigned = scheduler.assignments[turn];
    const Results results{{p, assigned.item, shared().totals.of_rows, thread},
                          reinterpret_cast<float*>(base + Smem::kMerge),
                          shared().totals.of_warps,
                          kWarpgroupWarps};
    bool has_fetched = false;
    compute_share<cfg>(p, assigned, scheduler.shares, shared().is_last, thread, results, [&](Range tiles) {
      Strip<Element::dim_v> out;
      Softmax softmax;
      start_queries(assigned.item);
      // The copies take longer than this.
      if (!has_fetched) scheduler.fetch(p, turn ^ 1, thread);
      has_fetched = true;
      attend(out, softmax, assigned.item, tiles);
      results.share(blocks_of(out), softmax);
    });
  }

  // ---- The kernel

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Thread thread = Thread::current();
    DecodeSm90Mainloop self{p, base, shared_address(base), thread};
    DecodeScheduler<cfg, Mask>& scheduler = self.shared().scheduler;
    if (thread.index() == 0) {
      // The producers fill a slot, and the warps of one warpgroup empty it.
      self.ring().init(cfg.producers, kWarpgroupWarps);
      fence_mbarrier_init();
      prefetch_tensormap(&p.k_map);
      prefetch_tensormap(&p.v_map);
    }
    // Programmatic dependent launch: waits for the previous grids, and lets the next one start.
    griddep_wait();
    griddep_launch_dependents();
    if (thread.warp >= cfg.warps) {
      setmaxnreg_dec<cfg.producer_registers>();
      warps_sync<cfg>();
      self.produce(scheduler);
    } else {
      setmaxnreg_inc<cfg.consumer_registers>();
      scheduler.init(p, thread);
      warps_sync<cfg>();
      scheduler.fetch(p, 0, thread);
#pragma unroll 1
      for (i32 turn = 0;; turn ^= 1) {
        consumers_sync<cfg>();
        if (!scheduler.assignments[turn].exists) break;
        self.compute(scheduler, turn);
      }
    }
  }
};

}  // namespace flashgen
