// The results of a tile: O and the log-sum-exp. The Epilogue policy stores O: each warp its own 16 rows, from
// `warp_row` of the tile and `row` of the sequence on, multiplied by `scale`, and none from `end` on.
#pragma once
#include "flashgen/non_finite.cuh"
#include "flashgen/sm90/forward_config.cuh"
#include "flashgen/sm90/query_tile.cuh"
#include "flashgen/sm90/row_softmax.cuh"
#include "flashgen/sm90/write_rows.cuh"
#include "flashgen/strip.cuh"

namespace flashgen {

// Stores by TMA from shared memory, where O has its own tile at `offset`. TMA clips only at the end of the
// tensor, so the sequence must end there.
template <ForwardSm90Config cfg, class T, u32 offset>
struct TmaEpilogue {
  using OTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;

  FLASHGEN_DEVICE static void store(u32 shared, const auto& tile, const auto& p, i32 warp_row, i32 row,
                                    i32 end, const auto& out, const float (&scale)[2], Thread thread) {
    const OTile o{shared + offset};
    // The previous rows must have left shared memory. If this tile is computed again, its first results must
    // also have reached global memory, so that they do not overwrite the new ones.
    if (thread.lane == 0) {
      if (tile.kind == TileKind::careful) {
        bulk_wait<0>();
      } else {
        bulk_wait_read<0>();
      }
    }
    warp_sync();
    store_strip(o, warp_row, out, scale, thread);
    fence_proxy_async_shared();
    warp_sync();
    if (thread.lane == 0 && row < end) {
      tile.store_o(o.from_row(warp_row), p, row);
      bulk_commit();
    }
  }
  FLASHGEN_DEVICE static void wait(Thread thread) {
    if (thread.lane == 0) bulk_wait<0>();
  }
};

// Stores from registers.
template <ForwardSm90Config cfg>
struct DirectEpilogue {
  FLASHGEN_DEVICE static void store(u32, const auto& tile, const auto& p, i32, i32 row, i32, const auto& out,
                                    const float (&scale)[2], Thread thread) {
    write_rows<cfg.stored_columns>(tile.o_rows(p), row, out, scale, thread);
  }
  FLASHGEN_DEVICE static void wait(Thread) {}
};

// Stores by TMA, except where a sequence ends within the warp's rows: TMA would overwrite the next sequence.
template <ForwardSm90Config cfg, class T, u32 offset>
struct VarlenEpilogue : TmaEpilogue<cfg, T, offset> {
  FLASHGEN_DEVICE static void store(u32 shared, const auto& tile, const auto& p, i32 warp_row, i32 row,
                                    i32 end, const auto& out, const float (&scale)[2], Thread thread) {
    if (row + kWarpRows <= end) {
      TmaEpilogue<cfg, T, offset>::store(shared, tile, p, warp_row, row, end, out, scale, thread);
    } else {
      DirectEpilogue<cfg>::store(shared, tile, p, warp_row, row, end, out, scale, thread);
    }
  }
};

// Zeroes what was computed for rows beyond the warp's first `used` ones: such queries attend to nothing.
template <i32 count>
FLASHGEN_DEVICE void clear_unused(RowStatistics& rows, float (&out)[count], i32 used, Thread thread) {
  if (used >= kWarpRows) return;
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const bool is_used = 8 * h + thread.row() < used;
    rows.sum[h] = is_used ? rows.sum[h] : 0.0f;
#pragma unroll
    for (i32 i = 0; i < count / 2; ++i) {
      float& o = out[4 * (i / 2) + 2 * h + i % 2];
      o = is_used ? o : 0.0f;
    }
  }
}

// Lines 12 to 15: O = O / l, L = m + log l, and both to global memory.
template <class T, class Score, class DropoutPolicy, class Scales, class Epilogue, bool forbids_values>
FLASHGEN_DEVICE void store_results(auto& consumer, auto tile_at, RowStatistics rows) {
  const auto& p = consumer.p;
  const auto& shared = consumer.shared;
  auto& out = consumer.out;
  const auto tile = shared.tile(tile_at);
  // Addresses are computed here, so that they take no registers in the mainloop.
  const Thread thread = consumer.thread.recomputed();
  const i32 warp_row = consumer.number * kWarpgroupRows + thread.warp % 4 * kWarpRows,
            row = tile.first_q + warp_row;
  const auto logits = Score::logits(p);
  const i32 used = tile.len_q(p) - row;
  if constexpr (!tile.ends_with_tensor) clear_unused(rows, out, used, thread);
  // Negated, so that NaN fails, too.
  bool has_failed = !(rows.sum[0] < kLargestSum<T>) || !(rows.sum[1] < kLargestSum<T>);
  if constexpr (forbids_values) has_failed = has_failed || first_row_times_zero(out) != 0.0f;
  const float factor = Scales::of_out(p, tile);
  float scale[2];
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    scale[h] = 1.0f;
    if constexpr (Score::has_sink) {
      const float sink = logits.as_reference_max(Score::sink(p, tile));
      const float reference = maximum(rows.reference_max[h], sink);
      const bool is_used = tile.ends_with_tensor || 8 * h + thread.row() < used;
      if (sink > -kInfinity && is_used) {
        scale[h] = exp2_approx(logits.powers(rows.reference_max[h] - reference));
        rows.sum[h] = rows.sum[h] * scale[h] + exp2_approx(logits.powers(sink - reference));
        rows.reference_max[h] = reference;
      }
    }
    scale[h] *= rows.normalizer(h) * DropoutPolicy::factor(p) * factor;
  }
  shared.checks().set_failed(tile_at.count, thread.warp - 4,
                             warp_any(has_failed && tile.kind != TileKind::careful), thread);
  const i32 end = tile.result_rows(p);
  Epilogue::store(shared.start, tile, p, warp_row, row, end, out, scale, thread);
  if (thread.column() == 0) {
    float* const lse = tile.lse_rows(p) + row;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 own = 8 * h + thread.row();
      if (row + own < end) lse[own] = rows.log_sum_exp(h, logits);
    }
  }
  shared.tile_ring().release(tile_at, thread);
}

}  // namespace flashgen
