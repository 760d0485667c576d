// The online softmax of a tile whose rows warps share. The scores of 16 rows are spread over several warps,
// each with keys of its own. The columns of O are spread over all warps, each with all rows.
#pragma once
#include "flashgen/decode/config.cuh"
#include "flashgen/decode/partials.cuh"

namespace flashgen {

// What warps exchange in shared memory.
template <DecodeConfig cfg>
struct RowExchange {
  // Warps that have the scores of the same rows.
  static constexpr i32 key_warps = cfg.warps * kRowBlock / cfg.tile_q;
  // Of each of these warps and each row of the tile: the largest logit, and at the end the sum.
  float of_warps[key_warps][cfg.tile_q];
  // What the results of each row are multiplied by when its reference maximum rises.
  float factors[cfg.tile_q];
  // Whether the mask cuts through the keys of a warp.
  u32 is_cut[cfg.warps];
};

// Statistics of a warp's 16 rows, of which each lane has two. The warps that have the same rows agree on
// their reference maxima.
template <DecodeConfig cfg, class Logits>
struct LatentSoftmax {
  using Exchange = RowExchange<cfg>;
  static constexpr i32 row_blocks = cfg.tile_q / kRowBlock;

  float reference_max[2];
  // This lane's share of the row's sum of exponentials.
  float sum[2];

  FLASHGEN_DEVICE void reset() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      reference_max[h] = -kInfinity;
      sum[h] = 0.0f;
    }
  }

  // The largest logits among a lane's scores.
  template <i32 columns>
  FLASHGEN_DEVICE static void largest(float (&highest)[2], const Accumulator<1, columns>& scores,
                                      const Logits& logits) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      highest[h] = maximum(scores[0][0][2 * h], scores[0][0][2 * h + 1]);
#pragma unroll
      for (i32 n = 1; n < columns; ++n)
        highest[h] = maximum(highest[h], maximum(scores[0][n][2 * h], scores[0][n][2 * h + 1]));
      highest[h] = logits.logit(highest[h], h);
    }
  }

  // Whether a lane sees a score far above its row's reference maximum.
  FLASHGEN_DEVICE bool lags(const float (&highest)[2]) const {
    return highest[0] > reference_max[0] + Logits::distance(kMaximumLag) ||
           highest[1] > reference_max[1] + Logits::distance(kMaximumLag);
  }

  // Raises the reference maxima that lag, and rescales all results. Returns whether the mask cuts through the
  // tile. All threads of the block call. Each row decides for itself.
  template <i32 out_columns>
  FLASHGEN_DEVICE bool raise(const float (&highest)[2], Accumulator<row_blocks, out_columns>& out,
                             Exchange& exchange, bool is_cut, Thread thread) {
    const i32 first_row = thread.warp % row_blocks * kRowBlock + thread.row(),
              key_warp = thread.warp / row_blocks;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float of_warp = row_maximum(highest[h]);
      if (thread.column() == 0) exchange.of_warps[key_warp][first_row + 8 * h] = of_warp;
    }
    if (thread.lane == 0) exchange.is_cut[thread.warp] = is_cut ? 1 : 0;
    block_sync();
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      float most = exchange.of_warps[0][first_row + 8 * h];
#pragma unroll
      for (i32 w = 1; w < Exchange::key_warps; ++w)
        most = maximum(most, exchange.of_warps[w][first_row + 8 * h]);
      const bool rises = most > reference_max[h] + Logits::distance(kMaximumLag);
      const float factor = rises ? exp2_approx(Logits::powers(reference_max[h] - most)) : 1.0f;
      if (rises) reference_max[h] = most;
      sum[h] *= factor;
      if (key_warp == 0 && thread.column() == 0) exchange.factors[first_row + 8 * h] = factor;
    }
    u32 any_cut = 0;
#pragma unroll
    for (i32 w = 0; w < cfg.warps; ++w) any_cut |= exchange.is_cut[w];
    block_sync();
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const float factor = exchange.factors[m * kRowBlock + thread.row() + 8 * h];
#pragma unroll
        for (i32 n = 0; n < out_columns; ++n) {
          out[m][n][2 * h] *= factor;
          out[m][n][2 * h + 1] *= factor;
        }
      }
    }
    return any_cut != 0;
  }

  // Scores become exponentials, which add to the sums.
  template <i32 columns>
  FLASHGEN_DEVICE void exponentiate(Accumulator<1, columns>& scores, const Logits& logits) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      // A row with no allowed key so far subtracts 0, so that exp2(-inf - 0) is 0 and not NaN.
      const float shift = reference_max[h] == -kInfinity ? 0.0f : reference_max[h];
#pragma unroll
      for (i32 n = 0; n < columns; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) {
          scores[0][n][e] = exp2_approx(logits.relative(scores[0][n][e], shift, h));
          sum[h] += scores[0][n][e];
        }
      }
    }
  }

  // Adds up the sums of all warps. All threads of the block call.
  FLASHGEN_DEVICE void finish(RowTotal (&totals)[cfg.tile_q], Exchange& exchange, Thread thread) const {
    const i32 first_row = thread.warp % row_blocks * kRowBlock + thread.row(),
              key_warp = thread.warp / row_blocks;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float of_warp = row_total(sum[h]);
      if (thread.column() == 0) exchange.of_warps[key_warp][first_row + 8 * h] = of_warp;
    }
    block_sync();
    if (key_warp == 0 && thread.column() == 0) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        float total = 0.0f;
#pragma unroll
        for (i32 w = 0; w < Exchange::key_warps; ++w) total += exchange.of_warps[w][first_row + 8 * h];
        totals[first_row + 8 * h] = {reference_max[h], total};
      }
    }
    block_sync();
  }
};

}  // namespace flashgen
