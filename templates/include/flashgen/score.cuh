// Scores: what becomes of logits before the softmax.
#pragma once
#include "flashgen/product.cuh"

namespace flashgen {

struct ScoreAndSlope {
  float value;
  float slope;
};

// A score is asked for pairs of which the first one is told in full, and others by how far they are from it:
//
//     Score::First                       a pair, with all that takes long to find out
//     first_at(q, k)                     it
//     value(s, first, row, column)       the score; of numbers that the compiler knows, row and column
//     value_and_slope(s, first, row, column)

// Turns products Q K^T into scores; the warp's block begins at (first_q, first_key).
template <class Score, i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void change_scores(Accumulator<row_blocks, column_blocks>& products, const Score& score,
                                   float scale, i32 first_q, i32 first_key, Thread thread) {
  const typename Score::First first = score.first_at(first_q + thread.row(), first_key + thread.column());
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        float& s = products[m][n][e];
        s = score.value(s * scale, first, 16 * m + 8 * (e / 2), 8 * n + e % 2);
      }
    }
  }
}

// The same where a lane's pairs come with what they read of captured tensors.
template <class Score, class Pairs, i32 column_blocks>
FLASHGEN_DEVICE void change_scores(Accumulator<1, column_blocks>& products, const Score& score,
                                   const Pairs& pairs, float scale, i32 first_q, i32 first_key,
                                   Thread thread) {
  const typename Score::First first = score.first_at(first_q + thread.row(), first_key + thread.column());
#pragma unroll
  for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      float& s = products[0][n][e];
      s = score.value(s * scale, first, 8 * (e / 2), 8 * n + e % 2, pairs.at(e / 2, n, e % 2));
    }
  }
}

// Turns products into probabilities P = exp(score - L), and dP into dS = P * (dP - D) * slope, the gradient
// of the scaled logits. L and D are those of the warp's rows.
template <class Score, i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void differentiate(Accumulator<row_blocks, column_blocks>& products,
                                   Accumulator<row_blocks, column_blocks>& dp, const Score& score,
                                   float scale, const float* lse, const float* dsum, i32 first_q,
                                   i32 first_key, Thread thread) {
  const typename Score::First first = score.first_at(first_q + thread.row(), first_key + thread.column());
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = 16 * m + 8 * h;
      const float lse_log2 = lse[row + thread.row()] * kLog2E, d = dsum[row + thread.row()];
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) {
          const ScoreAndSlope score_of =
              score.value_and_slope(products[m][n][e] * scale, first, row, 8 * n + e % 2);
          const float p = exp2_approx(fused_multiply_add(score_of.value, kLog2E, -lse_log2));
          products[m][n][e] = p;
          dp[m][n][e] = p * (dp[m][n][e] - d) * score_of.slope;
        }
      }
    }
  }
}

}  // namespace flashgen
