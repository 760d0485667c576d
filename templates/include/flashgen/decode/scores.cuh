// What happens to products Q K^T before the softmax: the Score policy of the decode mainloop. Rows have their
// own query and head.
#pragma once
#include "flashgen/decode/rows.cuh"
#include "flashgen/logits.cuh"

namespace flashgen {

// Logits are the products, scaled.
struct NoRowScore {
  using Logits = ScaledProducts;

  template <class Params>
  FLASHGEN_DEVICE static Logits logits(const Params& p) {
    return {p.scale_log2};
  }
  template <i32 blocks, class Params>
  FLASHGEN_DEVICE static void apply(Accumulator<1, blocks>&, const Params&, const DecodeItem&,
                                    const LaneRows&, i32, Thread) {}
  template <class Params>
  FLASHGEN_DEVICE static float sink(const Params&, const DecodeItem&, i32) {
    return -kInfinity;
  }
};

template <bool changes_scores>
struct LogitsOfRows {
  using Logits = ScaledProducts;
};
template <>
struct LogitsOfRows<true> {
  using Logits = ScoredLogits;
};

// Scores and sinks that expressions compute. `Score` is the kernel's own struct of that name.
template <class Score, bool changes_scores>
struct ExpressionRowScore {
  using Logits = typename LogitsOfRows<changes_scores>::Logits;

  template <class Params>
  FLASHGEN_DEVICE static Logits logits(const Params& p) {
    if constexpr (changes_scores) {
      return {};
    } else {
      return {p.scale_log2};
    }
  }
  // For the keys from `key` on.
  template <i32 blocks, class Params>
  FLASHGEN_DEVICE static void apply(Accumulator<1, blocks>& scores, const Params& p, const DecodeItem& item,
                                    const LaneRows& rows, i32 key, Thread thread) {
    if constexpr (changes_scores) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const Score score = of(p, item, rows.places[h].head);
        const typename Score::First first = score.first_at(rows.places[h].q, key + thread.column());
        for_each_score(scores, [&](float& s, i32 row, i32 column) {
          if (row == h) s = score.value(s * p.scale, first, 0, column);
        });
      }
    }
  }
  template <class Params>
  FLASHGEN_DEVICE static float sink(const Params& p, const DecodeItem& item, i32 head) {
    if constexpr (requires(const Score& score) { score.sink(); }) {
      return of(p, item, head).sink();
    } else {
      return -kInfinity;
    }
  }

 private:
  template <class Params>
  FLASHGEN_DEVICE static Score of(const Params& p, const DecodeItem& item, i32 head) {
    return {p, item.sequence, head, item.cached.len_q, item.cached.len_kv};
  }
};

// The same with logits that the scale is part of, so that numbers can be added to them.
template <class Inner>
struct NaturalLogits {
  using Logits = ScoredLogits;

  template <class Params>
  FLASHGEN_DEVICE static Logits logits(const Params&) {
    return {};
  }
  template <i32 blocks, class Params>
  FLASHGEN_DEVICE static void apply(Accumulator<1, blocks>& scores, const Params& p, const DecodeItem& item,
                                    const LaneRows& rows, i32 key, Thread thread) {
    Inner::apply(scores, p, item, rows, key, thread);
    for_each_score(scores, [&](float& s, i32, i32) { s = logit_of(Inner::logits(p), s, p.scale); });
  }
  template <class Params>
  FLASHGEN_DEVICE static float sink(const Params& p, const DecodeItem& item, i32 head) {
    return Inner::sink(p, item, head);
  }

 private:
  FLASHGEN_DEVICE static float logit_of(ScaledProducts, float s, float scale) { return s * scale; }
  FLASHGEN_DEVICE static float logit_of(ScoredLogits, float s, float) { return s; }
};

}  // namespace flashgen
