// What happens to products Q K^T before the softmax: the Score policy of the mainloop.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/score.cuh"

namespace flashgen {

// Logits are the products, scaled.
struct NoScore {
  using Logits = ScaledProducts;
  static constexpr bool has_sink = false;
  // What is loaded for a block's pairs while its products are under way.
  template <i32 columns>
  struct Pairs {};

  template <class Params>
  FLASHGEN_DEVICE static Logits logits(const Params& p) {
    return {p.scale_log2};
  }
  template <i32 columns, class Params, class Tile>
  FLASHGEN_DEVICE static Pairs<columns> load(const Params&, const Tile&, i32, i32, Thread) {
    return {};
  }
  template <i32 columns, class Params, class Tile>
  FLASHGEN_DEVICE static void apply(Strip<columns>&, const Pairs<columns>&, const Params&, const Tile&, i32,
                                    i32, Thread) {}
  template <class Params, class Tile>
  FLASHGEN_DEVICE static float sink(const Params&, const Tile&) {
    return -kInfinity;
  }
};

// The unit of what an expression makes of a product.
template <class Logits>
struct LogitsOf {
  template <class Params>
  FLASHGEN_DEVICE static Logits from(const Params&) {
    return {};
  }
};
template <>
struct LogitsOf<ScaledProducts> {
  template <class Params>
  FLASHGEN_DEVICE static ScaledProducts from(const Params& p) {
    return {p.scale_log2};
  }
};
template <>
struct LogitsOf<ScoredProducts> {
  template <class Params>
  FLASHGEN_DEVICE static ScoredProducts from(const Params& p) {
    return {p.scale, p.scale_log2};
  }
};

// Scores and sinks that expressions compute. `Score` is the kernel's own struct of that name.
template <class Score, class Logits_, bool changes_scores, bool loads_ahead, bool has_sink_>
struct ExpressionScore {
  using Logits = Logits_;
  static constexpr bool has_sink = has_sink_;
  template <i32 columns, bool loads = loads_ahead>
  struct PairsOf {};
  template <i32 columns>
  struct PairsOf<columns, true> {
    typename Score::template Pairs<columns / 8> loaded;
  };
  template <i32 columns>
  using Pairs = PairsOf<columns>;

  template <class Params>
  FLASHGEN_DEVICE static Logits logits(const Params& p) {
    return LogitsOf<Logits>::from(p);
  }
  // For the warp's rows from `q` on and the keys from `key` on.
  template <i32 columns, class Params, class Tile>
  FLASHGEN_DEVICE static Pairs<columns> load(const Params& p, const Tile& tile, i32 q, i32 key,
                                             Thread thread) {
    if constexpr (loads_ahead) {
      const Score score = tile.template score<Score>(p);
      return {score.template pairs_at<columns / 8>(q + thread.row(), key, thread)};
    } else {
      return {};
    }
  }
  template <i32 columns, class Params, class Tile>
  FLASHGEN_DEVICE static void apply(Strip<columns>& scores, const Pairs<columns>& pairs, const Params& p,
                                    const Tile& tile, i32 q, i32 key, Thread thread) {
    if constexpr (loads_ahead) {
      change_scores(blocks_of(scores), tile.template score<Score>(p), 1.0f, q, key, thread, pairs.loaded);
    } else if constexpr (changes_scores) {
      change_scores(blocks_of(scores), tile.template score<Score>(p), 1.0f, q, key, thread);
    }
  }
  template <class Params, class Tile>
  FLASHGEN_DEVICE static float sink(const Params& p, const Tile& tile) {
    return tile.template score<Score>(p).sink();
  }
};

}  // namespace flashgen
