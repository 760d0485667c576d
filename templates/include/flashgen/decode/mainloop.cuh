// Attention of few new tokens to a cache: O = softmax(Q K^T) V. Reading K and V takes most of the time, so
// each is read once for all query heads that share it.
//
// An item is a tile of query rows of one key/value head of one sequence (rows.cuh). The warps of a thread
// block split the keys of a tile between them. If the rows fill more than one block of 16, the warps split
// the rows, too: `row_warps` of them take different rows of the same keys. Each warp copies its own slice of
// every tile through a ring of stages. So if no warp reads another's keys (row_warps == 1), the loop has no
// barrier.
//
//     wait for the slice     copies of a later slice start     S = Q K^T, softmax, O += P V
//
// Page numbers come by the same way: their copies start `lead` steps before those of their keys.
//
// At the end of an item the thread block merges its warps' results through shared memory. Thread blocks that
// share an item write their parts to a workspace, and the last of them to finish merges these.
//
// Policies: Mask says which keys a row may attend to, Score (scores.cuh) how logits follow from products,
// CacheElement (cache_element.cuh) what the cache holds, `paged` where keys lie. Smem holds the offsets in
// shared memory, which the plan computes.
#pragma once
#include "flashgen/decode/cache_element.cuh"
#include "flashgen/decode/careful_product.cuh"
#include "flashgen/decode/key_slices.cuh"
#include "flashgen/decode/results.cuh"
#include "flashgen/decode/scheduler.cuh"
#include "flashgen/decode/scores.cuh"
#include "flashgen/decode/assignment.cuh"
#include "flashgen/decode/visited_tiles.cuh"
#include "flashgen/walk.cuh"

namespace flashgen {

template <DecodeConfig cfg, class T, class Params, class Smem, class Mask, class Score, bool paged,
          class CacheElement>
struct DecodeMainloop {
  static constexpr i32 slice_keys = cfg.slice_keys();
  static_assert(cfg.tile_q == kRowBlock * cfg.warps && cfg.tile_kv == slice_keys * cfg.warps,
                "each warp has 16 rows and a slice of a tile");
  static constexpr i32 score_blocks = slice_keys / 8;
  // Steps of 16 keys in P V.
  static constexpr i32 value_steps = slice_keys / 16;

  using Operand = typename CacheElement::Operand;
  using KSlice = typename CacheElement::KSlice;
  using VSlice = typename CacheElement::VSlice;
  using Keys = typename CacheElement::Keys;
  using Values = typename CacheElement::Values;
  using Queries = typename CacheElement::Queries;
  // A warp copies its slice 16 keys at a time, so that registers hold the addresses. Where rows have 128
  // bytes or more, eight lanes copy a line of them.
  static constexpr i32 copied_keys = 16;
  using Share = LaneShare<copied_keys, smaller(KSlice::chunks, VSlice::chunks) < 8 ? 4 : 8>;
  using Scores = Accumulator<1, score_blocks>;
  using Output = Accumulator<1, CacheElement::dim_v / 8>;
  using Logits = typename Score::Logits;
  using Softmax = OnlineSoftmax<1, Logits>;
  using Results = DecodeResults<cfg, T, Params, Score, CacheElement>;

  // ---- Shared memory

  // Locations until the loop over keys is over, then totals.
  union Exchanged {
    KeyLocation<true> locations[paged ? cfg.stages * cfg.warps : 1][slice_keys];
    RowTotals<cfg> totals;
  };
  struct Shared {
    DecodeScheduler<cfg, Mask> scheduler;
    u32 is_last;
    Exchanged exchanged;
  };
  static_assert(Smem::kShared + sizeof(Shared) <= Smem::kBytes,
                "the plan leaves room for what threads exchange");
  static_assert(Smem::kMerge + Results::bytes <= Smem::kShared, "results take the place of the ring");

  const Params& p;
  u8* base;
  Thread thread;

  FLASHGEN_DEVICE Shared& shared() const { return *reinterpret_cast<Shared*>(base + Smem::kShared); }
  FLASHGEN_DEVICE KSlice k_slice(i32 stage, i32 slice) const {
    return KSlice{base + Smem::kK}.slot(stage * cfg.warps + slice);
  }
  FLASHGEN_DEVICE VSlice v_slice(i32 stage, i32 slice) const {
    return VSlice{base + Smem::kV}.slot(stage * cfg.warps + slice);
  }
  FLASHGEN_DEVICE RequestedLocations requested_locations(i32 stage, i32 slice) const {
    return {paged ? shared().exchanged.locations[stage * cfg.warps + slice] : nullptr};
  }

  // ---- How the warps share a tile

  // How many warps take different rows of the same keys: a power of two.
  FLASHGEN_DEVICE static i32 row_warps_of(const DecodeItem& item) {
    i32 warps = 1;
    while (warps < item.row_blocks()) warps *= 2;
    return warps;
  }

  // ---- The loop over tiles of keys

  // The copies of page numbers start so many steps before the copies of their keys.
  static constexpr i32 lead = paged ? cfg.stages - 1 : 0;

  FLASHGEN_DEVICE static i32 next_stage(i32 stage) { return stage + 1 < cfg.stages ? stage + 1 : 0; }
  FLASHGEN_DEVICE static i32 stage_before(i32 stage) { return (stage == 0 ? cfg.stages : stage) - 1; }

  // Computes O and the softmax of a warp's rows over its keys of some tiles.
  FLASHGEN_DEVICE void attend(Output& out, Softmax& softmax, const DecodeItem& item, Range tiles,
                              i32 row_warps) const {
    const i32 row_block = thread.warp & (row_warps - 1);
    // A shift in place of divisions by row_warps.
    i32 shift = 0;
    while (1 << shift < row_warps) ++shift;
    const LaneRows rows = LaneRows::of(p, item, row_block, thread);
    const auto masks = LaneMasks<Mask>::of(p, item, rows);
    const Logits logits = Score::logits(p);

    const auto queries = Queries::load(p, item, rows, base + Smem::kQ, row_block, thread);
    const CacheElement cache = CacheElement::of(p, item, base);
    const i64 row = paged ? 0 : item.cached.row;
    const SliceCopies<cfg.head_dim, cfg.access_bytes, KSlice, Share> keys(
        p.k + row * p.k_batch + item.head_kv * p.k_head, 0, thread);
    const SliceCopies<cfg.head_dim_v, cfg.access_bytes, VSlice, Share> values(
        p.v + row * p.v_batch + item.head_kv * p.v_head, 0, thread);
    // No key outside this range is read: its page may belong to another sequence by now.
    const VisitedTiles<cfg, Mask, Params> visits{p};
    const Range existing = visits.existing_keys(item);
    const auto visited = visits.visited_by(item);
    Walk<Mask::has_holes> requests(tiles), ahead(tiles);
    const auto pages = SequencePages::of<paged>(p, item.cached);
    // Requests the locations of the keys of a tile.
    const auto request_next = [&](i32 stage, Thread thread) {
      if constexpr (paged) {
        requests.advance(thread, visited);
        if (!requests.over())
          requested_locations(stage, thread.warp)
              .template request<slice_keys>(pages, existing,
                                            requests.tile * cfg.tile_kv + thread.warp * slice_keys, thread);
      }
    };
    // Starts the copies of the next tile, and returns its number.
    const auto fetch_next = [&](i32 stage, Thread thread) {
      ahead.advance(thread, visited);
      if (!ahead.over()) {
        const i32 first_key = ahead.tile * cfg.tile_kv + thread.warp * slice_keys;
        const RequestedLocations requested = requested_locations(stage, thread.warp);
#pragma unroll
        for (i32 first = 0; first < slice_keys; first += copied_keys) {
          LaneLocations<paged, Share> own;
          if constexpr (paged) {
            own = LaneLocations<paged, Share>::of(RequestedLocations{requested.locations + first}, thread);
          } else {
            own = LaneLocations<paged, Share>::of(p, item.cached, existing, first_key + first, thread);
          }
          keys.start(k_slice(stage, thread.warp).from_row(first), p.k_batch, p.k_row, own);
          values.start(v_slice(stage, thread.warp).from_row(first), p.v_batch, p.v_row, own);
        }
        cache.fetch_scales(stage * cfg.warps + thread.warp, requested, thread);
      }
      return ahead.tile;
    };
    clear(out);
    softmax.reset();

    // The numbers of the tiles whose copies are in flight. The first steps only start copies.
    i32 in_flight[cfg.stages - 1] = {};
    i32 stage = 0, filled_stage = (cfg.stages - lead) % cfg.stages;
#pragma unroll 1
    for (i32 step = 1 - cfg.stages - lead; step < 0 || in_flight[0] < tiles.end; ++step) {
      const Thread here = thread.recomputed();
      const i32 first_key = in_flight[0] * cfg.tile_kv;
      // The oldest copies have arrived, and no warp still reads what the next ones overwrite.
      cp_async_wait<cfg.stages - 2>();
      if (row_warps == 1) {
        warp_sync();
      } else {
        block_sync();
      }
      if (step >= 1 - cfg.stages) {
#pragma unroll
        for (i32 i = 0; i + 2 < cfg.stages; ++i) in_flight[i] = in_flight[i + 1];
        in_flight[cfg.stages - 2] = fetch_next(filled_stage, here);
      }
      request_next(stage_before(filled_stage), here);
      cp_async_commit();
      filled_stage = next_stage(filled_stage);
      if (step < 0) continue;

#pragma unroll 1
      for (i32 slice = thread.warp >> shift; slice < cfg.warps; slice += cfg.warps >> shift) {
        const i32 key = first_key + slice * slice_keys;
        const bool is_cut = warp_any(!masks.is_full(key, key + slice_keys));
        if (is_cut && !warp_any(!masks.is_empty(key, key + slice_keys))) continue;
        Scores scores;
        clear(scores);
        multiply<Operand, false, CacheElement::dim / 16>(scores, queries.left(here),
                                                         Keys(k_slice(stage, slice), 0, here));
        const auto scales = cache.slice_scales(stage * cfg.warps + slice, here);
        scales.apply_qk_scales(scores, queries);
        Score::apply(scores, p, item, rows, key, thread);
        scales.add_log_v_scales(scores);
        if (is_cut) {
          for_each_score(scores, [&](float& s, i32 h, i32 column) {
            if (!masks.allows(h, key + thread.column() + column)) s = -kInfinity;
          });
        }
        softmax.update(scores, out, logits, scales);
        const VSlice v = v_slice(stage, slice);
        // Values beyond the sequence arrive as zeros, so only a mask can forbid some that are not finite.
        if (Mask::is_bounded && is_cut && slice_holds_non_finite(v, thread)) {
          Scores allowed;
          clear(allowed);
          for_each_score(allowed, [&](float& a, i32 h, i32 column) {
            a = masks.allows(h, key + thread.column() + column) ? 1.0f : 0.0f;
          });
          multiply_careful<Operand>(out, scores, allowed, thread,
                                    [&](i32 step) { return Values(v.from_row(16 * step), 0, thread); });
        } else {
          multiply<Operand, false, value_steps>(out, LeftRegisters<Operand, 1, score_blocks>(scores, thread),
                                                Values(v, 0, here));
        }
      }
      stage = next_stage(stage);
    }
    softmax.finish();
    cache.scale_and_reorder(out);
    cp_async_wait<0>();
  }

  // ---- What the thread block computes of an item

  FLASHGEN_DEVICE void compute(const Assignment& assigned, const WorkPartition& work) const {
    const DecodeItem& item = assigned.item;
    const i32 row_warps = row_warps_of(item);
    const Results results{{p, item, shared().exchanged.totals.of_rows, thread},
                          reinterpret_cast<float*>(base + Smem::kMerge),
                          shared().exchanged.totals.of_warps,
                          row_warps};
    compute_parts<cfg>(p, assigned, work, shared().is_last, thread, results, [&](Range tiles) {
      Output out;
      Softmax softmax;
      attend(out, softmax, item, tiles, row_warps);
      results.reduce_warps(out, softmax);
    });
  }

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Thread thread = Thread::current();
    const DecodeMainloop self{p, base, thread};
    DecodeScheduler<cfg, Mask>& scheduler = self.shared().scheduler;
    scheduler.init(p, thread);
#pragma unroll 1
    while (scheduler.next(p, thread).exists) self.compute(scheduler.assignments[0], scheduler.work);
  }
};

}  // namespace flashgen
