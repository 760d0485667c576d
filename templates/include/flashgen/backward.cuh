// What the backward kernels are made of.
#pragma once
#include "flashgen/contain.cuh"
#include "flashgen/product.cuh"
#include "flashgen/query_walk.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

struct BackwardConfig {
  i32 head_dim, head_dim_v;
  i32 tile_q, tile_kv;
  i32 stages, warps;
  // How many warps stand above one another on each product; the others stand side by side.
  i32 score_warps, dk_warps, dv_warps, dq_warps;
  bool has_lower, has_upper;
  bool vector_reduction;
  i32 access_bytes;
  bool async_copy;
  bool turing;
};

// A warp's place on a product of rows x columns shared by `warps` warps, `above` of them above one another.
template <i32 rows, i32 columns, i32 warps, i32 above>
struct WarpShare {
  static constexpr i32 beside = warps / above;
  static constexpr i32 warp_rows = rows / above;
  static constexpr i32 warp_columns = columns / beside;
  static_assert(warp_rows % 16 == 0 && warp_rows > 0,
                "each warp must own a multiple of 16 rows of a product");
  static_assert(warp_columns % 8 == 0 && warp_columns > 0,
                "each warp must own a multiple of 8 columns of a product");
  static constexpr i32 row_blocks = warp_rows / 16;
  static constexpr i32 column_blocks = warp_columns / 8;
  // No column step of a warp shares a bit with where its columns begin.
  static constexpr bool aligned =
      beside == 1 || (column_blocks & (column_blocks - 1)) == 0 || column_blocks % 8 == 0;
  using Product = Accumulator<row_blocks, column_blocks>;

  FLASHGEN_DEVICE static i32 row(i32 warp) { return warp / beside * warp_rows; }
  FLASHGEN_DEVICE static i32 column(i32 warp) { return warp % beside * warp_columns; }
};

template <BackwardConfig cfg, class T>
struct BackwardShape {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 dim = round_up(cfg.head_dim, 16);
  static constexpr i32 dim_v = round_up(cfg.head_dim_v, 16);
  static constexpr i32 depth = kStepDepth<T>;

  using QTile = SharedTile<T, cfg.tile_q, dim>;
  using DOTile = SharedTile<T, cfg.tile_q, dim_v>;
  using KTile = SharedTile<T, cfg.tile_kv, dim>;
  using VTile = SharedTile<T, cfg.tile_kv, dim_v>;
  using ScoreTile = SharedTile<T, cfg.tile_q, cfg.tile_kv>;
  using QStream = TileStream<QTile, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using DOStream = TileStream<DOTile, threads, cfg.head_dim_v, cfg.access_bytes, cfg.async_copy>;
  using KStream = TileStream<KTile, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using VStream = TileStream<VTile, threads, cfg.head_dim_v, cfg.access_bytes, cfg.async_copy>;

  using ScoreShare = WarpShare<cfg.tile_q, cfg.tile_kv, cfg.warps, cfg.score_warps>;
  using DKShare = WarpShare<cfg.tile_kv, dim, cfg.warps, cfg.dk_warps>;
  using DVShare = WarpShare<cfg.tile_kv, dim_v, cfg.warps, cfg.dv_warps>;
  using DQShare = WarpShare<cfg.tile_q, dim, cfg.warps, cfg.dq_warps>;
};

// Streams one float per row: L and D of a tile of queries. Rows that do not exist arrive as 0.
template <i32 rows, i32 threads, bool async_copy>
struct RowStream {
  const float* source;
  i32 row_count;
  float staged[async_copy ? 1 : ceil_div(rows, threads)];

  FLASHGEN_DEVICE void fetch(float* shared, i32 first_row, Thread thread) {
#pragma unroll
    for (i32 i = 0; i < ceil_div(rows, threads); ++i) {
      const i32 row = thread.index() + i * threads;
      const bool exists = row < rows && first_row + row < row_count;
      if constexpr (async_copy) {
        if (row < rows)
          cp_async_4(shared_address(shared + row), exists ? source + first_row + row : source,
                     exists ? 4 : 0);
      } else {
        staged[i] = exists ? source[first_row + row] : 0.0f;
      }
    }
  }
  FLASHGEN_DEVICE void land(float* shared, Thread thread) const {
    if constexpr (!async_copy) {
#pragma unroll
      for (i32 i = 0; i < ceil_div(rows, threads); ++i) {
        if (thread.index() + i * threads < rows) shared[thread.index() + i * threads] = staged[i];
      }
    }
  }
};

// Turns scores S into probabilities P = exp(S - L), with L of the warp's rows.
template <i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void probabilities(Accumulator<row_blocks, column_blocks>& scores, const float* lse,
                                   float scale_log2, Thread thread) {
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float lse_log2 = lse[16 * m + 8 * h + thread.row()] * kLog2E;
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) {
          scores[m][n][e] = exp2_approx(fused_multiply_add(scores[m][n][e], scale_log2, -lse_log2));
        }
      }
    }
  }
}

// Turns dP into dS = P * (dP - D), with D of the warp's rows.
template <i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void score_gradients(Accumulator<row_blocks, column_blocks>& dp,
                                     const Accumulator<row_blocks, column_blocks>& p, const float* dsum,
                                     Thread thread) {
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float d = dsum[16 * m + 8 * h + thread.row()];
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) dp[m][n][e] = p[m][n][e] * (dp[m][n][e] - d);
      }
    }
  }
}

// The dQ workspace holds each tile in the order in which the warps hold it, so that both the additions and
// the final reading are contiguous: per warp and block, four floats for each lane (or four rows of 32 floats
// where reductions are one float wide).
template <bool vectors, class Share>
FLASHGEN_DEVICE void add_to_workspace(float* tile, Thread thread, const typename Share::Product& values) {
#pragma unroll
  for (i32 m = 0; m < Share::row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < Share::column_blocks; ++n) {
      float* const block = tile + ((thread.warp * Share::row_blocks + m) * Share::column_blocks + n) * 128;
      if constexpr (vectors) {
        reduce_add_x4(block + 4 * thread.lane, values[m][n]);
      } else {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) reduce_add(block + 32 * e + thread.lane, values[m][n][e]);
      }
    }
  }
}

// The same for one element after another and only for pairs that the mask allows, without tensor cores: the
// slow way, for the rare tile where the mask cuts through and a key is not finite.
template <bool vectors, i32 threads, class Share, class ScoreTile, class KTile, class Mask>
FLASHGEN_DEVICE void add_allowed_pairs(float* tile, ScoreTile ds, KTile keys, const Mask& mask, i32 first_q,
                                       i32 first_key, Thread thread) {
#pragma unroll 1
  for (i32 i = thread.index(); i < ScoreTile::rows * KTile::cols; i += threads) {
    const i32 row = i / KTile::cols, column = i % KTile::cols;
    float total = 0.0f;
#pragma unroll 1
    for (i32 key = 0; key < KTile::rows; ++key) {
      if (!mask.allows(first_q + row, first_key + key)) continue;
      total = fused_multiply_add(to_float(*ds.element_at(row, key)), to_float(*keys.element_at(key, column)),
                                 total);
    }
    const i32 warp = row / Share::warp_rows * Share::beside + column / Share::warp_columns;
    const i32 m = row % Share::warp_rows / 16, n = column % Share::warp_columns / 8;
    const i32 lane = row % 8 * 4 + column % 8 / 2, element = row % 16 / 8 * 2 + column % 2;
    float* const block = tile + ((warp * Share::row_blocks + m) * Share::column_blocks + n) * 128;
    reduce_add(block + (vectors ? 4 * lane + element : 32 * element + lane), total);
  }
}

template <bool vectors, class Share>
FLASHGEN_DEVICE void read_workspace(const float* tile, Thread thread, typename Share::Product& values) {
#pragma unroll
  for (i32 m = 0; m < Share::row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < Share::column_blocks; ++n) {
      const float* const block =
          tile + ((thread.warp * Share::row_blocks + m) * Share::column_blocks + n) * 128;
      if constexpr (vectors) {
        const Vec16 four = *reinterpret_cast<const Vec16*>(block + 4 * thread.lane);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) values[m][n][e] = float_of(four.words[e]);
      } else {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) values[m][n][e] = block[32 * e + thread.lane];
      }
    }
  }
}

}  // namespace flashgen
