// Scores: what becomes of logits before the softmax.
#pragma once
#include "flashgen/logits.cuh"
#include "flashgen/product.cuh"

namespace flashgen {

// Blocks of eight columns whose scores are computed together.
constexpr i32 kBlocksAtOnce = 4;

struct ScoreAndSlope {
  float value;
  float slope;
};

// A score is asked for pairs of which the first one is given in full, and others by their distance from it:
//
//     Score::First                       a pair, with all that takes long to find out
//     first_at(q, k)                     it
//     value(s, first, row, column)       the score; of numbers that the compiler knows, row and column
//     value_and_slope(s, first, row, column)
//     Score::has_near                    whether it is cheaper for some logits, of which
//     is_near(square(s, first, row, column))
//                                        tells, also of the largest of some squares, whether they are, and
//     value<true>(...)                   then is the same number as value(...)

// Turns products Q K^T into scores; the warp's block begins at (first_q, first_key). `pairs`, if given, tells
// what a lane's pairs read of captured tensors. Where functions are cheaper near zero, they are so for groups
// of blocks of columns that are near it altogether.
template <class Score, i32 row_blocks, i32 column_blocks, class... Pairs>
FLASHGEN_DEVICE void change_scores(Accumulator<row_blocks, column_blocks>& products, const Score& score,
                                   float scale, i32 first_q, i32 first_key, Thread thread,
                                   const Pairs&... pairs) {
  constexpr i32 at_once = Score::has_near ? kBlocksAtOnce : column_blocks;
  const typename Score::First first = score.first_at(first_q + thread.row(), first_key + thread.column());
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 group = 0; group < column_blocks; group += at_once) {
      // Calls `use` with each logit and its pair.
      const auto for_each = [&](const auto& use) {
#pragma unroll
        for (i32 n = group; n < smaller(group + at_once, column_blocks); ++n) {
#pragma unroll
          for (i32 e = 0; e < 4; ++e)
            use(products[m][n][e], 16 * m + 8 * (e / 2), 8 * n + e % 2, pairs.at(e / 2, n, e % 2)...);
        }
      };
      const auto compute = [&](float& s, i32 row, i32 column, const auto&... pair) {
        s = score.value(s * scale, first, row, column, pair...);
      };
      if constexpr (Score::has_near) {
        float square = 0.0f;
        for_each([&](float s, i32 row, i32 column, const auto&... pair) {
          square = maximum(square, score.square(s * scale, first, row, column, pair...));
        });
        if (warp_any(!score.is_near(square))) {
          for_each(compute);
        } else {
          for_each([&](float& s, i32 row, i32 column, const auto&... pair) {
            s = score.template value<true>(s * scale, first, row, column, pair...);
          });
        }
      } else {
        for_each(compute);
      }
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
      const float negated_lse = negate_lse(lse[row + thread.row()]), d = dsum[row + thread.row()];
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) {
          const ScoreAndSlope score_of =
              score.value_and_slope(products[m][n][e] * scale, first, row, 8 * n + e % 2);
          const float p = exp2_approx(fused_multiply_add(score_of.value, kLog2E, negated_lse));
          products[m][n][e] = p;
          dp[m][n][e] = p * (dp[m][n][e] - d) * score_of.slope;
        }
      }
    }
  }
}

}  // namespace flashgen
