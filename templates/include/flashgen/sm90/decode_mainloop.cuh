// Attention of few new tokens to a cache, on Hopper. Items, and how blocks share them, are those of
// decode/mainloop.cuh.
//
// Two warps, the producers, copy tiles of keys and of values to a ring in shared memory by TMA. Two
// warpgroups take turns at the tiles. Each multiplies all rows of an item, at most 64, by its tile. While one
// takes exponentials, the other one multiplies. They merge their results at the end of the item:
//
//     producers     | tile 0 | tile 1 | tile 2 | tile 3 |
//     warpgroup 0            | S, P, P V of 0  | of 2            |
//     warpgroup 1                     | S, P, P V of 1  | of 3            |
#pragma once
#include "flashgen/decode/cache_element.cuh"
#include "flashgen/decode/parts.cuh"
#include "flashgen/issue_in_fours.cuh"
#include "flashgen/ring.cuh"
#include "flashgen/sm90/careful_product.cuh"
#include "flashgen/sm90/query_tile.cuh"
#include "flashgen/sm90/row_softmax.cuh"
#include "flashgen/walk.cuh"

namespace flashgen {

// The boxes of one tile that a lane loads: places in the cache that lie in one page each.
template <i32 rows, bool paged>
struct LaneBoxes {
  // With boxes of one row a lane has several.
  static constexpr i32 count = ceil_div(rows, kWarpSize);
  i32 box;
  i32 pages[count];
  i32 places[count];

  // `keys` are those that may be read. In place of a box beyond them the last one is loaded again.
  template <class Params>
  FLASHGEN_DEVICE void find(const Params& p, const CachedSequence& cached, Range keys, i32 first_key,
                            Thread thread) {
    if constexpr (paged) {
      const i32 first_box = keys.begin / box * box, last_box = larger(keys.end - 1, 0) / box * box;
#pragma unroll
      for (i32 i = 0; i < count; ++i) {
        const i32 row = (thread.lane + i * kWarpSize) * box;
        if (row >= rows) continue;
        const i32 key = larger(first_box, smaller(first_key + row, last_box)), page = key / p.page_size;
        places[i] = key - page * p.page_size;
        pages[i] = keys.size() > 0 ? p.block_table[cached.row * p.table_row + page] : 0;
      }
    } else {
      places[0] = cached.first_key + first_key;
    }
  }
  template <class Panels>
  FLASHGEN_DEVICE void load(Panels panels, const TensorMap& map, u32 barrier, i32 head,
                            const CachedSequence& cached, Thread thread) const {
    if constexpr (paged) {
#pragma unroll
      for (i32 i = 0; i < count; ++i) {
        const i32 row = (thread.lane + i * kWarpSize) * box;
        if (row < rows) panels.from_row(row).load(map, barrier, places[i], head, pages[i]);
      }
    } else {
      if (thread.lane == 0) panels.load(map, barrier, places[0], head, static_cast<i32>(cached.row));
    }
  }
};

template <DecodeConfig cfg, class T, class Params, class Smem, class Mask, class Score, bool paged>
struct DecodeSm90Mainloop {
  static_assert(cfg.tile_q == kWarpgroupRows && cfg.warps == 8 && cfg.producers == 4,
                "two warpgroups compute, and warps of a third copy");
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
  static_assert(Smem::kMerge + Results::bytes <= Smem::kBarriers, "results take the place of the ring");

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

  // ---- The producers. Copies of several boxes take a warp as many turns, so keys and values have a warp
  // each.

  // Loads the keys, or the values, of some tiles.
  template <class Panels>
  FLASHGEN_DEVICE void load_tiles(Panels ring_tiles, const TensorMap& map, const DecodeItem& item,
                                  Range tiles) {
    // No page outside these keys is read: it may belong to another sequence by now.
    const Range existing = existing_keys<cfg, Mask>(p, item);
    const auto visited = visited_by<cfg, Mask>(p, item);
    Walk<Mask::has_holes> walk(tiles);
    LaneBoxes<cfg.tile_kv, paged> boxes;
    if constexpr (paged) boxes.box = page_box_rows<cfg.tile_kv>(p.page_size);
    const auto find_next = [&]() {
      walk.advance(thread, visited);
      if (!walk.over()) boxes.find(p, item.cached, existing, walk.tile * cfg.tile_kv, thread);
    };
    find_next();
#pragma unroll 1
    for (; !walk.over(); at.advance()) {
      // Page numbers are read one tile ahead, because each copy would wait for them.
      const LaneBoxes<cfg.tile_kv, paged> own = boxes;
      find_next();
      if (thread.lane == 0) {
        ring().wait_empty(at);
        mbarrier_arrive_expect_tx(ring().full(at), Panels::bytes);
      }
      warp_sync();
      own.load(ring_tiles.slot(at.slot()), map, ring().full(at), item.head_kv, item.cached, thread);
    }
  }

  // ---- The warpgroups that compute

  // Brings the item's rows of Q to shared memory.
  FLASHGEN_DEVICE void load_queries(const DecodeItem& item) const {
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
    const i32 team = thread.warp / kWarpgroupWarps, row_block = thread.warp % kWarpgroupWarps;
    const LaneRows rows = LaneRows::of(p, item, row_block, thread);
    const auto masks = LaneMasks<Mask>::of(p, item, rows);
    const Logits logits = Score::logits(p);
    // Products have 64 rows in any case. Only warps with rows of the item take exponentials.
    const bool has_rows = row_block < item.row_blocks();
    const auto visited = visited_by<cfg, Mask>(p, item);
    load_queries(item);
    clear_strip(out);
    softmax.reset();
    Walk<Mask::has_holes> walk(tiles);
    walk.advance(thread, visited);
#pragma unroll 1
    for (i32 turn = 0; !walk.over(); walk.advance(thread, visited), at.advance(), turn ^= 1) {
      if (turn != team) continue;
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
      if (Mask::is_bounded && cut && panels_hold_non_finite(v_tile(), base, thread)) {
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

  FLASHGEN_DEVICE void compute(const Assignment& assigned, const Shares& shares) {
    const Results results{
        p,     assigned.item, reinterpret_cast<float*>(base + Smem::kMerge), shared().totals, kWarpgroupWarps,
        thread};
    compute_parts<cfg>(results, assigned, shares, shared().is_last, [&](Range tiles) {
      Strip<Element::dim_v> out;
      Softmax softmax;
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
      self.ring().init(2, kWarpgroupWarps);
      fence_mbarrier_init();
    }
    if (thread.warp >= cfg.warps) {
      setmaxnreg_dec<cfg.producer_registers>();
      // The barrier of scheduler.init().
      warps_sync<cfg>();
      while (scheduler.next(p, thread).exists) {
        const Assignment& assigned = scheduler.assignment;
        for_each_part(p, assigned, [&](i32, Range tiles) {
          if (thread.warp == cfg.warps) self.load_tiles(self.k_tiles(), p.k_map, assigned.item, tiles);
          if (thread.warp == cfg.warps + 1) self.load_tiles(self.v_tiles(), p.v_map, assigned.item, tiles);
          // Until here results take the place of the ring.
          warps_sync<cfg>();
        });
      }
    } else {
      setmaxnreg_inc<cfg.consumer_registers>();
      scheduler.init(p, thread);
      while (scheduler.next(p, thread).exists) self.compute(scheduler.assignment, scheduler.shares);
    }
  }
};

}  // namespace flashgen
