// A step of the backward kernels for Hopper: the next tile of queries, and P and dS from its scores. Scores
// are transposed: rows are keys, 64 per warpgroup, and columns are queries.
#pragma once
#include "flashgen/block_sparse_tile.cuh"
#include "flashgen/query_walk.cuh"
#include "flashgen/score.cuh"
#include "flashgen/strip.cuh"

namespace flashgen {

// A tile of queries as the producer announces it: its head within the group, and for consumer i whether the
// mask forbids some pair (bit i).
constexpr i32 kMemberFact = 8;
FLASHGEN_DEVICE BlockSparseTile sparse_query_tile(Step step, bool is_last, u32 cut) {
  constexpr u32 consumers = (1u << kMemberFact) - 1;
  return BlockSparseTile::of(step.tile, is_last,
                             static_cast<u32>(step.member) << kMemberFact | (cut & consumers));
}
FLASHGEN_DEVICE Step step_of(BlockSparseTile queries) {
  return {static_cast<i32>(queries.others() >> kMemberFact), queries.tile};
}

// Initializes every row of a strip with `columns`, one float per column.
template <i32 count>
FLASHGEN_DEVICE void spread_columns(float (&strip)[count], const float* columns, Thread thread) {
#pragma unroll
  for (i32 n = 0; n < count / 4; ++n) {
    const float first = columns[8 * n + thread.column()], second = columns[8 * n + thread.column() + 1];
    strip[4 * n] = first;
    strip[4 * n + 1] = second;
    strip[4 * n + 2] = first;
    strip[4 * n + 3] = second;
  }
}

// Rounds pairs of neighbours along a row.
template <class T, i32 count>
FLASHGEN_DEVICE void round_strip(u32 (&rounded)[count / 8][4], const float (&strip)[count]) {
#pragma unroll
  for (i32 i = 0; i < count / 2; ++i) rounded[i / 4][i % 4] = pack(T{}, strip[2 * i], strip[2 * i + 1]);
}

// P = exp(S - L) of products from which L has been subtracted.
template <i32 count>
FLASHGEN_DEVICE void exponentials(float (&scores)[count], float scale_log2) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) scores[i] = exp2_approx(scores[i] * scale_log2);
}

// The same with a score function. `probabilities` becomes rounded P, and `products` becomes P times the slope
// of the score, the factor of dS. `pairs`, if given, holds the prefetched elements of captured tensors.
template <class T, class Score, i32 count, class... Pairs>
FLASHGEN_DEVICE void score_exponentials(float (&products)[count], u32 (&probabilities)[count / 8][4],
                                        const Score& score, float scale, const float* negated_lse_log2,
                                        i32 first_q, i32 first_key, Thread thread, const Pairs&... pairs) {
  const typename Score::First first = score.first_at(first_q + thread.column(), first_key + thread.row());
#pragma unroll
  for (i32 i = 0; i < count; i += 2) {
    float p[2];
#pragma unroll
    for (i32 c = 0; c < 2; ++c) {
      const i32 q = 2 * (i - i % 4) + c;
      const ScoreAndSlope of = score.value_and_slope(products[i + c] * scale, first, q, 8 * (i % 4 / 2),
                                                     pairs.at(i + c, thread)...);
      p[c] = exp2_approx(fused_multiply_add(of.value, kLog2E, negated_lse_log2[thread.column() + q]));
      products[i + c] = p[c] * of.slope;
    }
    probabilities[i / 8][i % 8 / 2] = pack(T{}, p[0], p[1]);
  }
}

// Marks forbidden pairs in P, or in P times a slope: values that do not occur otherwise. In P it must be a
// zero.
constexpr u32 kForbidden = 0x80000000u;
constexpr u32 kForbiddenSlope = 0x7fc0dea1u;

// dS = P (dP - D), where D has already been subtracted from dP. For a forbidden pair the result must not
// depend on dP, even if that is NaN.
template <u32 forbidden, i32 count>
FLASHGEN_DEVICE void multiply_where_allowed(float (&dp)[count], const float (&p)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) dp[i] = bits_of(p[i]) == forbidden ? 0.0f : p[i] * dp[i];
}
template <i32 count>
FLASHGEN_DEVICE void multiply_strips(float (&dp)[count], const float (&p)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) dp[i] *= p[i];
}

// Calls `forbid(i)` for those of a lane's elements of a strip with `count` of them whose pairs a band does
// not allow, and for those of queries beyond the last. The warp's rows begin at first_key.
template <i32 count, bool has_lower, bool has_upper, class Forbid>
FLASHGEN_DEVICE void for_forbidden(const Band<has_lower, has_upper>& mask, i32 first_q, i32 first_key,
                                   Thread thread, const Forbid& forbid) {
  const i32 q = first_q + thread.column();
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 key = first_key + thread.row() + 8 * h;
    // The mask allows queries from q + first to q + last.
    i32 first = key < mask.len_kv ? -1 : 2 * count, last = mask.len_q - 1 - q;
    if constexpr (has_upper) first = larger(first, key - mask.upper - q);
    if constexpr (has_lower) last = smaller(last, key - mask.lower - q);
#pragma unroll
    for (i32 n = 0; n < count / 4; ++n) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        if (8 * n + c < first || 8 * n + c > last) forbid(4 * n + 2 * h + c);
      }
    }
  }
}

// The same for any mask. The terms that depend on the query are computed for 32 queries at a time, one per
// lane, and shuffled. Expensive masks use a loop, to bound the code size.
template <i32 count, class Mask, class Forbid>
FLASHGEN_DEVICE void for_forbidden(const Mask& mask, i32 first_q, i32 first_key, Thread thread,
                                   const Forbid& forbid) {
  constexpr i32 at_once = kWarpSize / 2;
  const i32 key = first_key + thread.row();
  const typename Mask::Key keys[2] = {mask.key_at(key), mask.key_at(key + 8)};
  const bool exists[2] = {key < mask.len_kv, key + 8 < mask.len_kv};
#pragma unroll
  for (i32 first = 0; first < count; first += at_once) {
    const i32 q = first_q + 2 * first;
    const typename Mask::Query own = mask.query_at(q + thread.lane);
    // Calls `use(h, is_allowed)` for both rows of column `i` of the lane's.
    const auto ask = [&](i32 i, const auto& use) {
      const i32 column = 8 * (i / 2) + thread.column() + i % 2;
      const typename Mask::Query of_column = own.of_lane(column, q + column);
      const bool is_query = of_column.q < mask.len_q;
#pragma unroll
      for (i32 h = 0; h < 2; ++h) use(h, is_query & exists[h] & mask.allows(of_column, keys[h]));
    };
    if constexpr (Mask::is_light) {
#pragma unroll
      for (i32 i = 0; i < at_once / 2; ++i) {
        ask(i, [&](i32 h, bool is_allowed) {
          if (!is_allowed) forbid(first + 4 * (i / 2) + 2 * h + i % 2);
        });
      }
    } else {
      u32 allowed = 0;
#pragma unroll 1
      for (i32 i = 0; i < at_once / 2; ++i) {
        ask(i, [&](i32 h, bool is_allowed) {
          if (is_allowed) allowed |= 1u << (2 * i + h);
        });
      }
#pragma unroll
      for (i32 i = 0; i < at_once; ++i) {
        if ((allowed >> i & 1u) == 0) forbid(first + 4 * (i / 4) + 2 * (i % 2) + i / 2 % 2);
      }
    }
  }
}

}  // namespace flashgen
