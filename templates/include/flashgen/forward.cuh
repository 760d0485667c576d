// What the forward kernel is made of.
#pragma once
#include "flashgen/contain.cuh"
#include "flashgen/softmax.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

struct ForwardConfig {
  i32 head_dim, head_dim_v;
  i32 tile_q, tile_kv;
  i32 stages, warps;
  bool split_k;
  bool has_lower, has_upper;
  bool q_in_registers;
  i32 access_bytes;
  bool async_copy;
  bool turing;
};

// Shapes that follow from the config. O has elements of type O.
template <ForwardConfig cfg, class T, class O = T>
struct ForwardShape {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  // Rows of tiles are whole pairs of chunks.
  static constexpr i32 tile_columns = sizeof(T) == 1 ? 2 * kChunkBytes : 16;
  static constexpr i32 dim = round_up(cfg.head_dim, tile_columns);
  static constexpr i32 dim_v = round_up(cfg.head_dim_v, 16);
  // A warp's share of a tile of scores.
  static constexpr i32 warp_rows = cfg.split_k ? cfg.tile_q : cfg.tile_q / cfg.warps;
  static constexpr i32 warp_keys = cfg.split_k ? cfg.tile_kv / cfg.warps : cfg.tile_kv;
  static_assert(warp_rows % 16 == 0 && warp_rows > 0, "each warp must own a multiple of 16 query rows");
  static_assert(warp_keys % 16 == 0 && warp_keys > 0, "each warp must own a multiple of 16 keys");
  static constexpr i32 row_blocks = warp_rows / 16;
  static constexpr i32 key_blocks = warp_keys / 8;
  static constexpr i32 out_blocks = dim_v / 8;

  using QTile = SharedTile<T, cfg.tile_q, dim>;
  using KTile = SharedTile<T, cfg.tile_kv, dim>;
  using VTile = SharedTile<T, cfg.tile_kv, round_up(cfg.head_dim_v, tile_columns)>;
  using OTile = SharedTile<O, cfg.tile_q, dim_v>;
  using QStream = TileStream<QTile, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using KStream = TileStream<KTile, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using VStream = TileStream<VTile, threads, cfg.head_dim_v, cfg.access_bytes, cfg.async_copy>;
  using Scores = Accumulator<row_blocks, key_blocks>;
  using Output = Accumulator<row_blocks, out_blocks>;
  using Probabilities = LeftRegisters<T, row_blocks, key_blocks>;
};

// Calls visit(row, log_sum_exp) once for each row of the warp, from one lane.
template <i32 row_blocks, class Logits, class Visit>
FLASHGEN_DEVICE void for_each_row(const OnlineSoftmax<row_blocks, Logits>& softmax, Thread thread,
                                  const Visit& visit) {
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      if (thread.column() == 0) visit(16 * m + 8 * h + thread.row(), softmax.log_sum_exp(m, h));
    }
  }
}

// Merges what the warps of a block have computed over different keys for the same rows; warp 0 gets the
// result. `shared` holds rows x columns floats, then two numbers per warp and row. All threads of the block
// call it.
template <i32 warps, i32 rows, i32 columns, i32 row_blocks, class Logits, i32 out_blocks>
FLASHGEN_DEVICE void merge_warps(float* shared, OnlineSoftmax<row_blocks, Logits>& softmax,
                                 Accumulator<row_blocks, out_blocks>& out, Thread thread) {
  float* const maxima = shared + rows * columns;
  float* const sums = maxima + warps * rows;
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = 16 * m + 8 * h + thread.row();
      if (thread.column() == 0) {
        maxima[thread.warp * rows + row] = softmax.reference_max[m][h];
        sums[thread.warp * rows + row] = softmax.sum[m][h];
      }
    }
  }
  block_sync();
  // Every warp brings its rows to the common maximum.
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = 16 * m + 8 * h + thread.row();
      float common = -kInfinity;
#pragma unroll
      for (i32 w = 0; w < warps; ++w) common = maximum(common, maxima[w * rows + row]);
      const float shift = common == -kInfinity ? 0.0f : common;
      float total = 0.0f;
#pragma unroll
      for (i32 w = 0; w < warps; ++w)
        total += sums[w * rows + row] * exp2_approx(Logits::powers(maxima[w * rows + row] - shift));
      const float factor = exp2_approx(Logits::powers(softmax.reference_max[m][h] - shift));
#pragma unroll
      for (i32 n = 0; n < out_blocks; ++n) {
        out[m][n][2 * h] *= factor;
        out[m][n][2 * h + 1] *= factor;
      }
      softmax.reference_max[m][h] = common;
      softmax.sum[m][h] = total;
    }
  }
  // Warp after warp adds its rows, so the order of additions is always the same.
  for (i32 turn = warps - 1; turn >= 0; --turn) {
    if (thread.warp == turn) {
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
        for (i32 n = 0; n < out_blocks; ++n) {
#pragma unroll
          for (i32 e = 0; e < 4; ++e) {
            float& sum =
                shared[(16 * m + 8 * (e / 2) + thread.row()) * columns + 8 * n + thread.column() + e % 2];
            if (turn < warps - 1) out[m][n][e] += sum;
            if (turn > 0) sum = out[m][n][e];
          }
        }
      }
    }
    block_sync();
  }
}

}  // namespace flashgen
