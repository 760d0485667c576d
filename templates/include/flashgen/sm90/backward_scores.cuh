// Probabilities P of transposed scores, and the factor of dS: the Score policy of the backward kernels.
//
//     dS = factor (dP - D),   factor = P times the slope of the score
//
// Rows are keys, and columns are queries. Scores come in chunks of 32 queries. `masks_query_end`: queries
// beyond the last must be masked, because an expression may turn their products, which are 0, into anything.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/score.cuh"
#include "flashgen/sm90/kept_queries.cuh"
#include "flashgen/sm90/key_tile.cuh"

namespace flashgen {

// Logits are the products, scaled. Accumulators start at -L / scale, so a product is S - L already.
struct NoScore {
  static constexpr bool presets_lse = true;
  static constexpr bool masks_query_end = false;
  static constexpr bool has_slope = false;
  // What is loaded for a block's pairs while its products are under way.
  template <i32 queries>
  struct Pairs {};

  template <i32 queries, class Params, class Tile>
  FLASHGEN_DEVICE static Pairs<queries> load(const Params&, const Tile&, QueryStep, i32, i32, Thread) {
    return {};
  }
  // Of one pair, whose logit is given.
  template <class Params, class Tile>
  FLASHGEN_DEVICE static ScoreAndSlope of_pair(const Params&, const Tile&, i32, i32, i32, float logit) {
    return {logit, 1.0f};
  }
  // Of one chunk: P, rounded.
  template <class T, i32 queries, class Params, class Tile>
  FLASHGEN_DEVICE static void exponentiate(const Strip<queries>& scores, Rounded<queries>& probabilities,
                                           Rounded<queries>&, i32 chunk, const Pairs<queries>&,
                                           const Params& p, const Tile&, QueryStep, const float*, i32, i32,
                                           Thread) {
#pragma unroll
    for (i32 i = kChunkElements * chunk; i < kChunkElements * (chunk + 1); i += 2)
      probabilities[i / 8][i % 8 / 2] =
          pack(T{}, exp2_approx(scores[i] * p.scale_log2), exp2_approx(scores[i + 1] * p.scale_log2));
  }

  // Where rows are queries: the factors of dS take the place of the scores.
  template <i32 keys, class Params, class Tile>
  FLASHGEN_DEVICE static void take_factors(Strip<keys>& scores, const Params& p, const Tile&,
                                           const float (&)[2], i32, i32, Thread) {
#pragma unroll
    for (i32 i = 0; i < keys / 2; ++i) scores[i] = exp2_approx(scores[i] * p.scale_log2);
  }
};

// Scores that expressions compute. `Score` is the kernel's own struct of that name. Without `has_slope_` all
// slopes are 1, and the factor of dS is P. `loads_ahead`: what the score loads for each pair comes while S is
// multiplied.
template <class Score, bool has_slope_, bool loads_ahead>
struct ExpressionScore {
  static constexpr bool presets_lse = false;
  static constexpr bool masks_query_end = true;
  static constexpr bool has_slope = has_slope_;
  template <i32 queries, bool loads = loads_ahead>
  struct PairsOf {};
  template <i32 queries>
  struct PairsOf<queries, true> {
    typename Score::template Pairs<queries / 8> loaded;
  };
  template <i32 queries>
  using Pairs = PairsOf<queries>;

  template <i32 queries, class Params, class Tile>
  FLASHGEN_DEVICE static Pairs<queries> load(const Params& p, const Tile& tile, QueryStep step, i32 first_q,
                                             i32 first_key, Thread thread) {
    if constexpr (loads_ahead) {
      return {tile.template score<Score>(p, step.member)
                  .template pairs_at<queries / 8>(first_q, first_key, thread)};
    } else {
      return {};
    }
  }
  template <class Params, class Tile>
  FLASHGEN_DEVICE static ScoreAndSlope of_pair(const Params& p, const Tile& tile, i32 head, i32 q, i32 key,
                                               float logit) {
    const Score score = tile.template score<Score>(p, head);
    return score.value_and_slope(logit, score.first_at(q, key), 0, 0);
  }
  // `lse`: -L of each query in powers of two.
  template <class T, i32 queries, class Params, class Tile>
  FLASHGEN_DEVICE static void exponentiate(const Strip<queries>& products, Rounded<queries>& probabilities,
                                           Rounded<queries>& factors, i32 chunk, const Pairs<queries>& pairs,
                                           const Params& p, const Tile& tile, QueryStep step,
                                           const float* lse, i32 first_q, i32 first_key, Thread thread) {
    const Score score = tile.template score<Score>(p, step.member);
    const typename Score::First first = score.first_at(first_q + thread.column(), first_key + thread.row());
#pragma unroll
    for (i32 i = kChunkElements * chunk; i < kChunkElements * (chunk + 1); i += 2) {
      float probability[2], factor[2];
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const i32 q = 2 * (i - i % 4) + c, key = 8 * (i % 4 / 2);
        const float logit = products[i + c] * p.scale;
        ScoreAndSlope of;
        if constexpr (loads_ahead) {
          of = score.value_and_slope(logit, first, q, key, pairs.loaded.at(i + c, thread));
        } else {
          of = score.value_and_slope(logit, first, q, key);
        }
        probability[c] = exp2_approx(fused_multiply_add(of.value, kLog2E, lse[thread.column() + q]));
        factor[c] = probability[c] * of.slope;
      }
      probabilities[i / 8][i % 8 / 2] = pack(T{}, probability[0], probability[1]);
      if constexpr (has_slope) factors[i / 8][i % 8 / 2] = pack(T{}, factor[0], factor[1]);
    }
  }

  template <i32 keys, class Params, class Tile>
  FLASHGEN_DEVICE static void take_factors(Strip<keys>& products, const Params& p, const Tile& tile,
                                           const float (&lse)[2], i32 first_q, i32 first_key, Thread thread) {
    const Score score = tile.template score<Score>(p);
    const typename Score::First first = score.first_at(first_q + thread.row(), first_key + thread.column());
#pragma unroll
    for (i32 i = 0; i < keys / 2; ++i) {
      const i32 h = i / 2 % 2;
      const ScoreAndSlope of =
          score.value_and_slope(products[i] * p.scale, first, 8 * h, 8 * (i / 4) + i % 2);
      products[i] = exp2_approx(fused_multiply_add(of.value, kLog2E, lse[h])) * of.slope;
    }
  }
};

}  // namespace flashgen
