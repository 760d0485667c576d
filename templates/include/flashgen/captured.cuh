// Gradients of captured tensors. The gradient of an element is the sum, over the pairs that load it, of
// dS = P (dP - D) times the derivative of the score with respect to the element.
//
// A share is the part of the gradient that comes from one load of a tensor:
//
//     Share::over             the pairs of a sequence and head that load the same element
//     slope(s, q, k)          d score / d element
//     element(q, k)           the element's index in the gradient, which is contiguous
//     add(q, k, x)            adds to the element's exact sum
#pragma once
#include "flashgen/accumulator.cuh"
#include "flashgen/expression.cuh"
#include "flashgen/logits.cuh"
#include "flashgen/product.cuh"

namespace flashgen {

enum class Over { kBlock, kRows, kColumns, kDiagonals, kPairs };

// The index of an element in a contiguous tensor. Indices are clamped, as loads clamp theirs.
template <class T, i32 rank, class... Indices>
FLASHGEN_DEVICE i64 element_of(const Captured<T, rank>& tensor, Indices... indices) {
  i64 element = 0;
  i32 axis = 0;
  ((element = element * tensor.sizes[axis] + larger(0, smaller(indices, tensor.sizes[axis] - 1)), ++axis),
   ...);
  return element;
}

// Rounds to the element type. Rounding to 16 bits goes through float.
FLASHGEN_DEVICE void store_as(double* to, double x) { *to = x; }
FLASHGEN_DEVICE void store_as(float* to, double x) { *to = static_cast<float>(x); }
FLASHGEN_DEVICE void store_as(half_t* to, double x) { to->bits = to_half_bits(static_cast<float>(x)); }
FLASHGEN_DEVICE void store_as(bfloat16_t* to, double x) {
  // sm_75 lacks the instruction, but may have tensors of bfloat16.
  const float value = static_cast<float>(x);
  const u32 bits = bits_of(value);
  to->bits = value != value ? 0x7fff : static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The slope of a masked pair may be NaN or infinite, and must not matter.
FLASHGEN_DEVICE float term(float ds, float slope) { return ds == 0.0f ? 0.0f : ds * slope; }

// Replaces products by scaled logits, and dP by dS = P (dP - D). `lse` and `dsum` are L and D of the warp's
// rows.
template <class Score, i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void differentiate_scores(Accumulator<row_blocks, column_blocks>& products,
                                          Accumulator<row_blocks, column_blocks>& dp, const Score& score,
                                          float scale, const float* lse, const float* dsum, i32 first_q,
                                          i32 first_key, Thread thread) {
  const typename Score::First first = score.first_at(first_q + thread.row(), first_key + thread.column());
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = 16 * m + 8 * h;
      const float negated_lse = negate_lse(lse[row + thread.row()]), d = dsum[row + thread.row()];
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) {
          const float s = products[m][n][e] * scale;
          const float value = score.value(s, first, row, 8 * n + e % 2);
          products[m][n][e] = s;
          dp[m][n][e] = exp2_approx(fused_multiply_add(value, kLog2E, negated_lse)) * (dp[m][n][e] - d);
        }
      }
    }
  }
}

// Calls `use(q, k, value)` for each of the lane's values; the warp's block begins at (first_q, first_key).
template <i32 row_blocks, i32 column_blocks, class Use>
FLASHGEN_DEVICE void for_each_pair(const Accumulator<row_blocks, column_blocks>& values, i32 first_q,
                                   i32 first_key, Thread thread, const Use& use) {
  const i32 q = first_q + thread.row(), key = first_key + thread.column();
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
      for (i32 e = 0; e < 4; ++e) use(q + 16 * m + 8 * (e / 2), key + 8 * n + e % 2, values[m][n][e]);
    }
  }
}

// Adds each pair's term to `total`.
template <class Share, i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void add_terms(Accumulator<row_blocks, column_blocks>& total, const Share& share,
                               const Accumulator<row_blocks, column_blocks>& logits,
                               const Accumulator<row_blocks, column_blocks>& ds, i32 first_q, i32 first_key,
                               Thread thread) {
  const i32 q = first_q + thread.row(), key = first_key + thread.column();
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        const float slope = share.slope(logits[m][n][e], q + 16 * m + 8 * (e / 2), key + 8 * n + e % 2);
        total[m][n][e] += term(ds[m][n][e], slope);
      }
    }
  }
}

// Adds the sum of all threads' totals to a share's element; `scratch` holds a float for each warp.
template <i32 warps, class Share>
FLASHGEN_DEVICE void add_block_sum(const Share& share, float total, float* scratch, Thread thread) {
#pragma unroll
  for (i32 distance = kWarpSize / 2; distance > 0; distance /= 2) total += shuffle_xor(total, distance);
  block_sync();
  if (thread.lane == 0) scratch[thread.warp] = total;
  block_sync();
  if (thread.index() != 0) return;
  float sum = 0.0f;
#pragma unroll
  for (i32 warp = 0; warp < warps; ++warp) sum += scratch[warp];
  share.add(0, 0, sum);
}

// Adds up a share's terms before they go to the element's sum in memory: over all pairs of a block, over the
// keys of a row, or over the columns or diagonals of a tile. Every warp owns whole rows of the tile of `rows`
// queries and `columns` keys.
template <class Share, i32 rows, i32 columns, i32 warps>
struct Gather {
  static constexpr i32 row_blocks = rows / (16 * warps), column_blocks = columns / 8;
  static constexpr i32 threads = warps * kWarpSize;
  static constexpr bool by_lines = Share::over == Over::kColumns || Share::over == Over::kDiagonals;
  static constexpr i32 line_stride = columns + 8;
  using Product = Accumulator<row_blocks, column_blocks>;

  // Over::kBlock: the lane's sum so far. Over::kRows: the lane's sums so far, by row.
  float total;
  float row_totals[row_blocks][2];

  FLASHGEN_DEVICE Gather() : total(0.0f) {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) row_totals[m][0] = row_totals[m][1] = 0.0f;
  }

  // Adds the terms of the tile that begins at (first_q, first_key). All threads call it. `lines` is shared
  // memory.
  FLASHGEN_DEVICE void take(const Share& share, const Product& logits, const Product& ds, i32 first_q,
                            i32 first_key, float* lines, Thread thread) {
    const i32 row = thread.warp * (16 * row_blocks) + thread.row(), column = thread.column();
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) {
          const i32 r = row + 16 * m + 8 * (e / 2), c = column + 8 * n + e % 2;
          const float x = term(ds[m][n][e], share.slope(logits[m][n][e], first_q + r, first_key + c));
          if constexpr (by_lines) {
            lines[r * line_stride + c] = x;
          } else if constexpr (Share::over == Over::kBlock) {
            total += x;
          } else if constexpr (Share::over == Over::kRows) {
            row_totals[m][e / 2] += x;
          } else {
            share.add(first_q + r, first_key + c, x);
          }
        }
      }
    }
    if constexpr (by_lines) {
      block_sync();
      add_lines(share, first_q, first_key, lines, thread);
      block_sync();
    }
  }

  // Adds the sums of the block or its rows to memory. All threads call it. `scratch` holds a float per warp.
  FLASHGEN_DEVICE void finish(const Share& share, i32 first_q, float* scratch, Thread thread) {
    if constexpr (Share::over == Over::kBlock) {
      add_block_sum<warps>(share, total, scratch, thread);
    } else if constexpr (Share::over == Over::kRows) {
      const i32 row = thread.warp * (16 * row_blocks) + thread.row();
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          // Four lanes share a row.
          float& x = row_totals[m][h];
          x += shuffle_xor(x, 1);
          x += shuffle_xor(x, 2);
          if (thread.lane % 4 == 0) share.add(first_q + row + 16 * m + 8 * h, 0, x);
        }
      }
    }
  }

 private:
  FLASHGEN_DEVICE static void add_lines(const Share& share, i32 first_q, i32 first_key, const float* lines,
                                        Thread thread) {
    constexpr bool diagonal = Share::over == Over::kDiagonals;
    constexpr i32 count = diagonal ? rows + columns - 1 : columns;
#pragma unroll 1
    for (i32 line = thread.index(); line < count; line += threads) {
      // On a diagonal, column - row is constant.
      const i32 shift = diagonal ? line - (rows - 1) : 0;
      const i32 begin = diagonal ? larger(0, -shift) : 0,
                end = diagonal ? smaller(rows, columns - shift) : rows;
      float sum = 0.0f;
#pragma unroll 4
      for (i32 r = begin; r < end; ++r) sum += lines[r * line_stride + (diagonal ? r + shift : line)];
      share.add(first_q + begin, first_key + (diagonal ? begin + shift : line), sum);
    }
  }
};

}  // namespace flashgen
