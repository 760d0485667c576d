// Attention of few new tokens to a cache of latent vectors, which are keys and values at once (multi-head
// latent attention, absorbed): O = softmax(Q K^T + Qv V^T) V, where V is wide and one head of it serves many
// query heads.
//
// An item is a tile of query rows of one key/value head of one sequence (rows.cuh), up to 64 query heads.
// O is too wide for the registers of one warp, so the warps of a thread block split the columns of V between
// them. All warps need all of P for that. Each computes S and P for 16 rows and some keys, and leaves P in
// shared memory:
//
//     wait for the tile     copies of a later tile start     S = Q K^T + Qv V^T     O += P V
//
// Each key is read from global memory once for all rows of a tile.
//
// Policies: as for the decode mainloop (mainloop.cuh).
#pragma once
#include "flashgen/decode/cache_element.cuh"
#include "flashgen/decode/careful_product.cuh"
#include "flashgen/decode/latent_results.cuh"
#include "flashgen/decode/latent_softmax.cuh"
#include "flashgen/decode/latent_tiles.cuh"
#include "flashgen/decode/assignment.cuh"
#include "flashgen/decode/visited_tiles.cuh"
#include "flashgen/walk.cuh"

namespace flashgen {

template <DecodeConfig cfg, class T, class Params, class Smem, class Mask, class Score, bool paged>
struct LatentMainloop {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 row_blocks = cfg.tile_q / kRowBlock;
  // Keys of a warp's scores, keys that a warp copies, and columns of a warp's O.
  static constexpr i32 own_keys = cfg.tile_kv * row_blocks / cfg.warps;
  static constexpr i32 copied_keys = cfg.slice_keys();
  static constexpr i32 own_columns = cfg.head_dim_v / cfg.warps;
  static_assert(copied_keys <= kWarpSize, "a lane knows the location of one key");
  static_assert(cfg.warps % row_blocks == 0 && own_keys % 8 == 0 && cfg.tile_kv % cfg.warps == 0,
                "the warps share a tile of scores");
  static_assert(own_columns % 16 == 0 && cfg.head_dim % 16 == 0, "each warp has pairs of blocks of columns");
  // Whether a warp's first column shares no bit with its steps over columns.
  static constexpr bool is_aligned = (own_columns & (own_columns - 1)) == 0;

  using QTile = SharedTile<T, cfg.tile_q, cfg.head_dim>;
  using QvTile = SharedTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = SharedTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = SharedTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using PTile = SharedTile<T, cfg.tile_q, cfg.tile_kv>;
  using Share = LaneShare<copied_keys>;
  using Values = RightRows<VTile, is_aligned>;
  using Scores = Accumulator<1, own_keys / 8>;
  using Output = Accumulator<row_blocks, own_columns / 8>;
  using Logits = typename Score::Logits;
  using Softmax = LatentSoftmax<cfg, Logits>;
  using Results = LatentResults<cfg, T, Params, Score, SameElement<cfg, T>, 1>;

  // ---- Shared memory

  struct Shared {
    DecodeScheduler<cfg, Mask> scheduler;
    u32 is_last;
    RowTotal totals[cfg.tile_q];
    RowExchange<cfg> exchange;
  };
  static_assert(Smem::kShared + sizeof(Shared) <= Smem::kBytes,
                "the plan leaves room for what threads exchange");

  const Params& p;
  u8* base;
  Thread thread;

  FLASHGEN_DEVICE Shared& shared() const { return *reinterpret_cast<Shared*>(base + Smem::kShared); }
  FLASHGEN_DEVICE QTile q_tile() const { return {base + Smem::kQ}; }
  FLASHGEN_DEVICE QvTile qv_tile() const { return {base + Smem::kQv}; }
  FLASHGEN_DEVICE PTile p_tile() const { return {base + Smem::kP}; }
  FLASHGEN_DEVICE KTile k_tile(i32 stage) const { return KTile{base + Smem::kK}.slot(stage); }
  FLASHGEN_DEVICE VTile v_tile(i32 stage) const { return VTile{base + Smem::kV}.slot(stage); }

  // ---- The steps of a tile of keys

  // Starts the copies of an item's queries. They arrive with the first keys.
  FLASHGEN_DEVICE void fetch_queries(const DecodeItem& item) const {
    copy_queries<threads, cfg.access_bytes>(q_tile(), QueryRows<T>::of(p, item), p, item, thread);
    const QueryRows<T> latent{p.qv + item.sequence * p.qv_batch + item.cached.first_q * p.qv_row, p.qv_row,
                              p.qv_head};
    copy_queries<threads, cfg.access_bytes>(qv_tile(), latent, p, item, thread);
  }

  // The products of 16 rows and the warp's keys, from row `first_key` of the tile on.
  FLASHGEN_DEVICE void score(Scores& scores, i32 stage, i32 row_block, i32 first_key, Thread thread) const {
    clear(scores);
    multiply_streamed<T, cfg.head_dim / 16>(scores, LeftRows<QTile>(q_tile(), row_block * kRowBlock, thread),
                                            RightTransposed<KTile>(k_tile(stage), first_key, thread));
    multiply_streamed<T, cfg.head_dim_v / 16>(scores,
                                              LeftRows<QvTile>(qv_tile(), row_block * kRowBlock, thread),
                                              RightTransposed<VTile>(v_tile(stage), first_key, thread));
  }

  // Leaves the warp's probabilities in shared memory.
  FLASHGEN_DEVICE void write_probabilities(const Scores& scores, i32 row_block, i32 first_key,
                                           Thread thread) const {
#pragma unroll
    for (i32 n = 0; n < own_keys / 8; ++n) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i32 row = row_block * kRowBlock + thread.row() + 8 * h;
        *reinterpret_cast<u32*>(p_tile().element_at(row, first_key + 8 * n + thread.column())) =
            pack(T{}, scores[0][n][2 * h], scores[0][n][2 * h + 1]);
      }
    }
  }

  // O += P V where V may hold NaN or infinity for keys that a row must not attend to.
  FLASHGEN_DEVICE void add_values_careful(Output& out, const DecodeItem& item, i32 stage,
                                          i32 first_key) const {
    Output sums;
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 i = 0; i < own_columns / 2; ++i) sums[m][i / 4][i % 4] = out[m][i / 4][i % 4];
    }
#pragma unroll 1
    for (i32 m = 0; m < row_blocks; ++m) {
      const auto masks = LaneMasks<Mask>::of(p, item, LaneRows::of(p, item, m, thread));
      const LeftRows<PTile> probabilities(p_tile(), m * kRowBlock, thread);
#pragma unroll 1
      for (i32 step = 0; step < cfg.tile_kv / 16; ++step) {
        Accumulator<1, 2> allowed;
        const i32 key = first_key + 16 * step + thread.column();
        for_each_score(allowed,
                       [&](float& a, i32 h, i32 column) { a = masks.allows(h, key + column) ? 1.0f : 0.0f; });
        LeftFragment<T> left;
        probabilities.load(left, 0, step);
        add_careful<T>(sums[m], left, LeftRegisters<T, 1, 2>(allowed, thread).fragments[0][0],
                       Values(v_tile(stage).from_row(16 * step), thread.warp * own_columns, thread));
      }
    }
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 i = 0; i < own_columns / 2; ++i) out[m][i / 4][i % 4] = sums[m][i / 4][i % 4];
    }
  }

  // ---- The loop over tiles of keys

  FLASHGEN_DEVICE static i32 next_stage(i32 stage) { return stage + 1 < cfg.stages ? stage + 1 : 0; }

  // Computes O of a warp's columns, and the totals of all rows, over some tiles of keys.
  FLASHGEN_DEVICE void attend(Output& out, const DecodeItem& item, Range assigned) const {
    const LaneRows rows = LaneRows::of(p, item, thread.warp % row_blocks, thread);
    const auto masks = LaneMasks<Mask>::of(p, item, rows);
    const Logits logits = Score::logits(p);

    fetch_queries(item);
    // No key outside this range is read: its page may belong to another sequence by now.
    const VisitedTiles<cfg, Mask, Params> visits{p};
    const Range tiles = visits.tiles_of(item, assigned);
    const Range existing = visits.existing_keys(item);
    const auto visited = visits.visited_by(item);
    Walk<Mask::has_holes> ahead(tiles);
    KeyLocation<paged> location;
    const auto find_next = [&](Thread thread) {
      ahead.advance(thread, visited);
      if (!ahead.over())
        location = KeyLocation<paged>::of(
            p, item.cached, existing,
            ahead.tile * cfg.tile_kv + thread.warp * copied_keys + thread.lane % copied_keys);
    };
    // Starts the copies of the next tile, and returns its number.
    const auto fetch_next = [&](i32 stage, Thread thread) {
      const i32 tile = ahead.tile;
      if (!ahead.over()) {
        const auto own = LaneLocations<paged, Share>::of(location, thread);
        // Made here, because O leaves no registers for what they hold.
        const i64 row = paged ? 0 : item.cached.row;
        const i32 first = thread.warp * copied_keys;
        SliceCopies<cfg.head_dim, cfg.access_bytes, KTile, Share>(
            p.k + row * p.k_batch + item.head_kv * p.k_head, first, thread)
            .start(k_tile(stage), p.k_batch, p.k_row, own);
        SliceCopies<cfg.head_dim_v, cfg.access_bytes, VTile, Share>(
            p.v + row * p.v_batch + item.head_kv * p.v_head, first, thread)
            .start(v_tile(stage), p.v_batch, p.v_row, own);
        find_next(thread);
      }
      cp_async_commit();
      return tile;
    };
    Softmax softmax;
    clear(out);
    softmax.reset();

    find_next(thread);
    // The numbers of the tiles whose copies are in flight. The first steps only start copies.
    i32 in_flight[cfg.stages - 1] = {};
    i32 stage = 0, filled_stage = 0;
#pragma unroll 1
    for (i32 step = 1 - cfg.stages; step < 0 || in_flight[0] < tiles.end; ++step) {
      const Thread here = thread.recomputed();
      const i32 row_block = here.warp % row_blocks, own_first = here.warp / row_blocks * own_keys;
      const i32 first_key = in_flight[0] * cfg.tile_kv, key = first_key + own_first;
      if (step >= 0) {
        // The tile has arrived, and no warp still reads the stage that the next copies overwrite.
        cp_async_wait<cfg.stages - 2>();
        block_sync();
      }
#pragma unroll
      for (i32 i = 0; i + 2 < cfg.stages; ++i) in_flight[i] = in_flight[i + 1];
      in_flight[cfg.stages - 2] = fetch_next(filled_stage, here);
      filled_stage = next_stage(filled_stage);
      if (step < 0) continue;

      Scores scores;
      score(scores, stage, row_block, own_first, here);
      Score::apply(scores, p, item, rows, key, here);
      const bool is_cut = warp_any(!masks.is_full(key, key + own_keys));
      if (is_cut) {
        for_each_score(scores, [&](float& s, i32 h, i32 column) {
          if (!masks.allows(h, key + here.column() + column)) s = -kInfinity;
        });
      }
      float highest[2];
      Softmax::largest(highest, scores, logits);
      bool tile_is_cut = false;
      if (block_any(softmax.lags(highest) || (Mask::is_bounded && is_cut)))
        tile_is_cut = softmax.raise(highest, out, shared().exchange, is_cut, here);
      softmax.exponentiate(scores, logits);
      write_probabilities(scores, row_block, own_first, here);
      block_sync();
      // Values beyond the sequence arrive as zeros, so only a mask can forbid some that are not finite.
      if (Mask::is_bounded && tile_is_cut && holds_non_finite<threads>(v_tile(stage), thread)) {
        add_values_careful(out, item, stage, first_key);
      } else {
        multiply<T, false, cfg.tile_kv / 16>(out, LeftRows<PTile>(p_tile(), 0, here),
                                             Values(v_tile(stage), here.warp * own_columns, here));
      }
      stage = next_stage(stage);
    }
    softmax.finish(shared().totals, shared().exchange, thread);
    cp_async_wait<0>();
  }

  // ---- What the thread block computes of an item

  FLASHGEN_DEVICE void compute(const Assignment& assigned, const WorkPartition& work) const {
    Output out;
    const Results results{{p, assigned.item, shared().totals, thread}, out};
    compute_parts<cfg>(p, assigned, work, shared().is_last, thread, results,
                       [&](Range tiles) { attend(out, assigned.item, tiles); });
  }

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Thread thread = Thread::current();
    const LatentMainloop self{p, base, thread};
    DecodeScheduler<cfg, Mask>& scheduler = self.shared().scheduler;
    scheduler.init(p, thread);
#pragma unroll 1
    while (scheduler.next(p, thread).exists) self.compute(scheduler.assignments[0], scheduler.work);
  }
};

}  // namespace flashgen
