// The online softmax of a tile whose rows warps share. The scores of 16 rows are spread over several warps,
// each with keys of its own. The columns of O are spread over all warps, each with all rows.
#pragma once
#include "flashgen/decode/lane_softmax.cuh"
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

// The softmax of a thread block's rows. Warps that have the scores of the same rows, each for keys of its
// own, agree on reference maxima through shared memory.
template <DecodeConfig cfg, class Logits>
struct LatentSoftmax : LaneSoftmax<Logits> {
  using Exchange = RowExchange<cfg>;
  using LaneSoftmax<Logits>::reference_max;
  using LaneSoftmax<Logits>::sum;
  static constexpr i32 row_blocks = cfg.tile_q / kRowBlock;

  // Raises the reference maxima that lag, and rescales all results. Returns whether the mask cuts through the
  // tile. All threads of the thread block call. Each row decides for itself.
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
      float row_max = exchange.of_warps[0][first_row + 8 * h];
#pragma unroll
      for (i32 w = 1; w < Exchange::key_warps; ++w)
        row_max = maximum(row_max, exchange.of_warps[w][first_row + 8 * h]);
      const float factor = this->raise_row(h, row_max);
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

  // Adds up the sums of all warps. All threads of the thread block call.
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
