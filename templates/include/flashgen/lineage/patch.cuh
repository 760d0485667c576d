// Products of float tiles in shared memory, without tensor cores: 256 threads stand in a square of 16 x 16,
// and each computes every 16th row and column of a tile.
#pragma once
#include "flashgen/band.cuh"
#include "flashgen/convert.cuh"
#include "flashgen/lineage/exponential.cuh"

namespace flashgen {

constexpr i32 kSide = 16;

// Where a thread stands in the square. The 16 threads of a row are half a warp.
struct Square {
  i32 row, column;
  FLASHGEN_DEVICE static Square current() { return {thread_idx() / kSide, thread_idx() % kSide}; }
};

// rows x cols floats in shared memory. One column of padding keeps 16 rows of a column in different banks.
template <i32 rows_, i32 cols_>
struct FloatTile {
  static constexpr i32 rows = rows_;
  static constexpr i32 cols = cols_;
  static constexpr i32 stride = cols + 1;

  float* data;

  FLASHGEN_DEVICE float& at(i32 row, i32 col) const { return data[row * stride + col]; }

  // Copies rows of global memory, as floats. Rows that do not exist become zeros.
  template <class T>
  FLASHGEN_DEVICE void load(const T* source, i64 row_stride, i32 first_row, i32 row_count) const {
    for (i32 i = thread_idx(); i < rows * cols; i += kSide * kSide) {
      const i32 row = i / cols, col = i % cols;
      at(row, col) =
          first_row + row < row_count ? to_float(source[(first_row + row) * row_stride + col]) : 0.0f;
    }
  }
};

// A thread's share of a tile: element (i, j) lies in row 16i + its own and in column 16j + its own.
template <i32 rows, i32 cols>
using Patch = float[rows / kSide][ceil_div(cols, kSide)];

// S = scale * Q K^T, and minus infinity where the mask forbids a pair.
template <class QTile, class KTile, class Mask>
FLASHGEN_DEVICE void masked_scores(Patch<QTile::rows, KTile::rows>& scores, QTile queries, KTile keys,
                                   float scale, const Mask& mask, i32 first_q, i32 first_key) {
  const Square here = Square::current();
#pragma unroll
  for (i32 i = 0; i < QTile::rows / kSide; ++i) {
#pragma unroll
    for (i32 j = 0; j < KTile::rows / kSide; ++j) scores[i][j] = 0.0f;
  }
  for (i32 d = 0; d < QTile::cols; ++d) {
#pragma unroll
    for (i32 i = 0; i < QTile::rows / kSide; ++i) {
      const float q = queries.at(kSide * i + here.row, d);
#pragma unroll
      for (i32 j = 0; j < KTile::rows / kSide; ++j) {
        scores[i][j] = fused_multiply_add(q, keys.at(kSide * j + here.column, d), scores[i][j]);
      }
    }
  }
#pragma unroll
  for (i32 i = 0; i < QTile::rows / kSide; ++i) {
#pragma unroll
    for (i32 j = 0; j < KTile::rows / kSide; ++j) {
      const bool allowed = mask.allows(first_q + kSide * i + here.row, first_key + kSide * j + here.column);
      scores[i][j] = allowed ? scores[i][j] * scale : -kInfinity;
    }
  }
}

// O += P V. A forbidden pair adds nothing, even if V is NaN or infinite there.
template <class PTile, class VTile, class Mask>
FLASHGEN_DEVICE void add_products(Patch<PTile::rows, VTile::cols>& out, PTile probabilities, VTile values,
                                  const Mask& mask, i32 first_q, i32 first_key) {
  const Square here = Square::current();
  const i32 end_q = smaller(first_q + PTile::rows, mask.len_q);
  const bool is_full = mask.is_full(first_q, end_q, first_key, first_key + PTile::cols);
  for (i32 key = 0; key < PTile::cols; ++key) {
#pragma unroll
    for (i32 i = 0; i < PTile::rows / kSide; ++i) {
      const i32 row = kSide * i + here.row;
      if (!is_full && !mask.allows(first_q + row, first_key + key)) continue;
      const float p = probabilities.at(row, key);
#pragma unroll
      for (i32 j = 0; j < ceil_div(VTile::cols, kSide); ++j) {
        const i32 column = kSide * j + here.column;
        if (column < VTile::cols) out[i][j] = fused_multiply_add(p, values.at(key, column), out[i][j]);
      }
    }
  }
}

// The maximum and the sum of a row of the square, of which each of its 16 threads has one value.
FLASHGEN_DEVICE float row_maximum(float value) {
#pragma unroll
  for (i32 apart = kSide / 2; apart > 0; apart /= 2) value = maximum(value, shuffle_xor(value, apart));
  return value;
}
FLASHGEN_DEVICE float row_sum(float value) {
#pragma unroll
  for (i32 apart = kSide / 2; apart > 0; apart /= 2) value += shuffle_xor(value, apart);
  return value;
}

}  // namespace flashgen
