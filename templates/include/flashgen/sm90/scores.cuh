// What happens to products Q K^T before the softmax: the Score policy of the mainloop.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/score.cuh"

namespace flashgen {

// Logits are the products, scaled.
struct NoScore {
  using Logits = ScaledProducts;
  static constexpr bool has_sink = false;

  // `factor`: what products are multiplied by, besides the scale.
  FLASHGEN_DEVICE static Logits logits(const auto& p, float factor = 1.0f) { return {p.scale_log2 * factor}; }
  template <i32 columns>
  FLASHGEN_DEVICE static NoScore load(const auto&...) {
    return {};
  }
  template <i32 columns>
  FLASHGEN_DEVICE static void apply(const auto&...) {}
  FLASHGEN_DEVICE static float sink(const auto&...) { return -kInfinity; }
};

// The unit of what an expression makes of a product.
template <class Logits>
struct LogitsOf {
  FLASHGEN_DEVICE static Logits from(const auto&, float /*factor*/) { return {}; }
};
template <>
struct LogitsOf<ScaledProducts> {
  FLASHGEN_DEVICE static ScaledProducts from(const auto& p, float factor) { return {p.scale_log2 * factor}; }
};
template <>
struct LogitsOf<ScoredProducts> {
  FLASHGEN_DEVICE static ScoredProducts from(const auto& p, float /*factor*/) {
    return {p.scale, p.scale_log2};
  }
};

// Scores and sinks that expressions compute. `Score` is the kernel's own struct of that name.
template <class Score, class Logits_, bool changes_scores, bool loads_ahead, bool has_sink_>
struct ExpressionScore {
  using Logits = Logits_;
  static constexpr bool has_sink = has_sink_;
  // What is loaded for a block's pairs while its products are under way.
  template <i32 columns, bool loads = loads_ahead>
  struct PairsOf {};
  template <i32 columns>
  struct PairsOf<columns, true> {
    typename Score::template Pairs<columns / 8> loaded;
  };
  template <i32 columns>
  using Pairs = PairsOf<columns>;

  // `factor`: what products are multiplied by before the score, besides the scale.
  FLASHGEN_DEVICE static Logits logits(const auto& p, float factor = 1.0f) {
    return LogitsOf<Logits>::from(p, factor);
  }
  // For the warp's rows from `q` on and the keys from `key` on.
  template <i32 columns>
  FLASHGEN_DEVICE static Pairs<columns> load(const auto& p, const auto& tile, i32 q, i32 key, Thread thread) {
    if constexpr (loads_ahead) {
      const Score score = tile.template score<Score>(p);
      return {score.template pairs_at<columns / 8>(q + thread.row(), key, thread)};
    } else {
      return {};
    }
  }
  template <i32 columns>
  FLASHGEN_DEVICE static void apply(Strip<columns>& scores, float factor, const Pairs<columns>& pairs,
                                    const auto& p, const auto& tile, i32 q, i32 key, Thread thread) {
    if constexpr (loads_ahead) {
      change_scores(blocks_of(scores), tile.template score<Score>(p), factor, q, key, thread, pairs.loaded);
    } else if constexpr (changes_scores) {
      change_scores(blocks_of(scores), tile.template score<Score>(p), factor, q, key, thread);
    }
  }
  FLASHGEN_DEVICE static float sink(const auto& p, const auto& tile) {
    return tile.template score<Score>(p).sink();
  }
};

}  // namespace flashgen
