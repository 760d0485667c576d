// Dropout of probabilities in the backward pass: the Dropout policy of the backward mainloops.
#pragma once
#include "flashgen/sm90/dropping.cuh"
#include "flashgen/sm90/kept_queries.cuh"

namespace flashgen {

struct NoBackwardDropout : NoDropout {
  static constexpr bool drops = false;

  template <i32 queries>
  FLASHGEN_DEVICE static NoDropout draw_queries(const auto&...) {
    return {};
  }
  template <bool has_slope>
  FLASHGEN_DEVICE static void drop(const auto&...) {}
  FLASHGEN_DEVICE static void drop_gradients(const auto&...) {}
  FLASHGEN_DEVICE static bool keeps(const auto&...) { return true; }
};

//     draw<keys>(...)                               which pairs are kept, where rows are queries
//     draw_queries<queries>(...)                    the same where rows are keys
//     drop(probabilities, factors, kept, chunk)     sets dropped pairs of P to 0, but not the factors of dS
//     drop_gradients(dp, kept, ...)                 sets dP of dropped pairs to 0
//     factor(p)                                     1 / (1 - rate), by which results are multiplied
//
// Kept pairs count 1 / (1 - rate) times in dV and in dP. Results are multiplied by this factor at the end. So
// accumulators of dP start at -D (1 - rate), which the prepare kernel writes.
struct PhiloxBackwardDropout : PhiloxDropout {
  static constexpr bool drops = true;
  template <i32 queries>
  using Queries = KeptQueries<queries>;

  // For the queries from `q` on and the warp's keys from `key` on.
  template <i32 queries, class Params>
  FLASHGEN_DEVICE static Queries<queries> draw_queries(const Params& p, i32 sequence, i32 head, i32 q,
                                                       i32 key, Thread thread) {
    return {Dropout::of(p, sequence, head), q, key, thread};
  }
  // Without a slope the factors of dS are P, before pairs are dropped.
  template <bool has_slope, i32 queries>
  FLASHGEN_DEVICE static void drop(Rounded<queries>& probabilities, Rounded<queries>& factors,
                                   const Queries<queries>& kept, i32 chunk) {
#pragma unroll
    for (i32 i = kChunkElements * chunk; i < kChunkElements * (chunk + 1); i += 2) {
      u32& two = probabilities[i / 8][i % 8 / 2];
      if constexpr (!has_slope) factors[i / 8][i % 8 / 2] = two;
      two &= (kept.has(i) ? 0xffffu : 0u) | (kept.has(i + 1) ? 0xffff0000u : 0u);
    }
  }
  // For one chunk of queries. Accumulators start at `preset`, so a dP of 0 leaves only this.
  template <i32 queries>
  FLASHGEN_DEVICE static void drop_gradients(Strip<queries>& dp, const Queries<queries>& kept, i32 chunk,
                                             const float* preset, Thread thread) {
#pragma unroll
    for (i32 i = kChunkElements * chunk; i < kChunkElements * (chunk + 1); ++i)
      dp[i] = kept.has(i) ? dp[i] : preset[i / 4 * 8 + thread.column() + i % 2];
  }
  // Where rows are queries: `preset` is for a lane's two rows.
  template <i32 count, class Kept>
  FLASHGEN_DEVICE static void drop_gradients(float (&dp)[count], const Kept& kept, const float (&preset)[2]) {
#pragma unroll
    for (i32 i = 0; i < count; ++i) dp[i] = kept.has(0, i / 4, i % 4) ? dp[i] : preset[i % 4 / 2];
  }
  FLASHGEN_DEVICE static bool keeps(const auto& p, i32 sequence, i32 head, i32 q, i32 key) {
    return Dropout::of(p, sequence, head).keeps(static_cast<u32>(q), static_cast<u32>(key));
  }
};

}  // namespace flashgen
