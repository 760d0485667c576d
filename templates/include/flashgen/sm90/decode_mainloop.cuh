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
#include "flashgen/issue_in_fours.cuh"
#include "flashgen/ring.cuh"
#include "flashgen/sm90/careful_product.cuh"
#include "flashgen/sm90/decode_boxes.cuh"
#include "flashgen/sm90/decode_roles.cuh"
#include "flashgen/sm90/row_softmax.cuh"

namespace flashgen {

template <DecodeConfig cfg, class T, class Params, class Smem, class Mask, class Score, bool paged>
struct DecodeSm90Mainloop {
  static_assert(kHasDecodeRoles<cfg>, "two warpgroups compute, and warps of a third copy");
  // An mbarrier wait tests only a parity, and copies may arrive out of order. If a stage changed warpgroups
  // between rounds, one could wait for round n while round n - 1 is incomplete, match the parity of round
  // n - 2, and read old keys.
  static_assert(cfg.stages % 2 == 0, "each stage belongs to one warpgroup while an item lasts");

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
  FLASHGEN_DEVICE void load_half(Panels ring_tiles, const TensorMap& map, const DecodeItem& item, Range tiles,
                                 i32 half) {
    load_tiles<cfg, Mask, paged, 2>(p, item, tiles, half, ring(), at, Panels::bytes / cfg.tile_kv, thread,
                                    [&](typename TileRing::State to, const BoxCoordinates& box) {
                                      const auto rows = ring_tiles.slot(to.slot()).from_row(box.tile_row);
                                      rows.load(map, ring().full(to), box.page_row, item.head_kv, box.page);
                                    });
  }
  FLASHGEN_DEVICE void load(i32 producer, const DecodeItem& item, Range tiles) {
    const i32 half = producer / 2;
    if (producer % 2 == 0) {
      load_half(k_tiles(), p.k_map, item, tiles, half);
    } else {
      load_half(v_tiles(), p.v_map, item, tiles, half);
    }
  }

  // ---- The warpgroups that compute

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
    const Range queries = visits.queries_of(item);
    await_queries<cfg>();
    clear_strip(out);
    softmax.reset();
    Walk<Mask::has_holes> walk(tiles);
    walk.advance(thread, visited);
#pragma unroll 1
    for (i32 turn = 0; !walk.over(); walk.advance(thread, visited), at.advance(), turn ^= 1) {
      if (turn != warpgroup) continue;
      const i32 key = walk.tile * cfg.tile_kv;
      const bool cut = visits.is_cut(item, queries, key);
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
        u32 allowed[2];
        find_allowed<cfg.tile_kv>(allowed, masks, key + thread.column());
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
    compute_parts<cfg>(p, assigned, scheduler.work, shared().is_last, thread, results, [&](Range tiles) {
      Strip<Element::dim_v> out;
      Softmax softmax;
      start_queries<cfg>(q_tile(), QueryRows<T>::of(p, assigned.item), p, assigned.item, cfg.head_dim,
                         thread);
      // Meanwhile: the copies take longer than finding the next assignment.
      if (!has_fetched) scheduler.fetch(p, turn ^ 1, thread);
      has_fetched = true;
      attend(out, softmax, assigned.item, tiles);
      results.reduce_warps(blocks_of(out), softmax);
    });
  }

  // ---- The kernel

  // The producers fill a slot, and the warps of one warpgroup empty it.
  FLASHGEN_DEVICE void init_rings() const { ring().init(cfg.producers, kWarpgroupWarps); }

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    DecodeSm90Mainloop self{p, base, shared_address(base), Thread::current()};
    run_decode_roles<cfg>(self);
  }
};

}  // namespace flashgen
