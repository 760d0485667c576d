// The online softmax with as little as possible done to each score. A row's exponentials are taken relative
// to an anchor: any number near enough to the row's maximum gives the same result, since numerator and
// denominator share the factor. An anchor found in the first tile usually serves the whole row, so that no
// tile needs shuffles or a rescaling. That it does not is seen in one of two ways. Where registers allow to
// keep the scores, by sums that have grown: the tile is then taken once more, with a better anchor. Elsewhere
// before any exponential, by comparing the bits of scores.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/softmax.cuh"

namespace flashgen {

// A lane's sum over its columns of a tile beyond which the row's anchor moves. Every exponential is then
// small enough for half_t too.
constexpr float kGrown = 0x1p14f;
// How far above its anchor a row whose scores are compared may reach, in powers of two.
constexpr float kReach = 13.0f;

// Statistics of a warp's 16 rows, of which each lane has two: l/4 and l/4 + 8.
struct RowStatistics {
  // log2 of the factor taken out of the row.
  float anchor[2];
  // This lane's share of the row's sum of exponentials.
  float sum[2];

  // Every lane of a row gets the row's sum.
  FLASHGEN_DEVICE void finish() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) sum[h] = row_total(sum[h]);
  }
  FLASHGEN_DEVICE float normalizer(i32 h) const { return sum[h] == 0.0f ? 0.0f : reciprocal_approx(sum[h]); }
  FLASHGEN_DEVICE float log_sum_exp(i32 h) const {
    return sum[h] == 0.0f ? -kInfinity : (anchor[h] + log2_approx(sum[h])) * kLn2;
  }
};

// `running_maximum`: the anchor is the maximum so far, exactly. `keeps_scores`: exponentials have registers
// of their own. `holds_waits`: waits for products do not overtake exponentials, for which there are
// registers.
template <class T, i32 columns, bool running_maximum, bool keeps_scores, bool holds_waits>
struct AnchoredSoftmax {
  RowStatistics rows;
  // What to multiply the output so far with.
  float factor[2];
  // Every row of the warp has an anchor.
  bool anchored;
  // Rows whose maxima are looked at in every tile: those that have grown, or whose anchor is so low that
  // scores below zero could reach far above it.
  bool watched[2];

  FLASHGEN_DEVICE void reset() {
    anchored = false;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      rows.anchor[h] = -kInfinity;
      rows.sum[h] = 0.0f;
      watched[h] = false;
    }
  }

  // Takes in one more logit per row, before all others; one lane of each row counts it.
  FLASHGEN_DEVICE void take_in_sink(float logit, Thread thread) {
    const bool counts = logit > -kInfinity;
    anchored = counts;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      rows.anchor[h] = logit * kLog2E;
      rows.sum[h] = counts && thread.column() == 0 ? 1.0f : 0.0f;
      watched[h] = is_low(h);
    }
  }

  // Takes in a tile of scores, of which it makes exponentials; whether the output so far is to be multiplied
  // by `factor`. Where scores are kept, `probabilities` are done too.
  // `scratch` is any word of shared memory.
  FLASHGEN_DEVICE bool take(Strip<columns>& scores, Rounded<columns>& probabilities, float scale_log2,
                            u32 scratch) {
    factor[0] = factor[1] = 1.0f;
    if (!running_maximum && !anchored) drop_anchor(scores, scale_log2);
    bool moves = running_maximum || watched[0] || watched[1];
    if (!running_maximum && !keeps_scores) moves |= reaches_far(scores, scale_log2);
    moves = warp_any(moves);
    float sum[2];
    if constexpr (keeps_scores && !running_maximum) {
#pragma unroll 1
      for (;;) {
        if (moves) follow_maximum(scores, scale_log2);
        exponentiate(scores, sum, scale_log2, [&](i32 i, float first, float second) {
          probabilities[i / 4][i % 4] = pack(T{}, first, second);
        });
        const bool grown[2] = {sum[0] > kGrown && !watched[0], sum[1] > kGrown && !watched[1]};
        if (!warp_any(grown[0] || grown[1])) break;
#pragma unroll
        for (i32 h = 0; h < 2; ++h) watched[h] |= row_maximum(grown[h] ? 1.0f : 0.0f) > 0.0f;
        moves = true;
      }
    } else {
      if (moves) follow_maximum(scores, scale_log2);
      exponentiate(scores, sum, scale_log2, [&](i32 i, float first, float second) {
        scores[2 * i] = first;
        scores[2 * i + 1] = second;
      });
    }
#pragma unroll
    for (i32 h = 0; h < 2; ++h) rows.sum[h] = fused_multiply_add(rows.sum[h], factor[h], sum[h]);
    // Sums that were kept to be looked at hold waits as it is.
    if constexpr (holds_waits && !(keeps_scores && !running_maximum))
      wgmma_compute_before_wait(rows.sum[0] + rows.sum[1], scratch);
    return moves;
  }

  // What take() has made of the scores, rounded, where it has put it in their place.
  FLASHGEN_DEVICE static void round(Rounded<columns>& probabilities, const Strip<columns>& scores) {
    if constexpr (keeps_scores && !running_maximum) return;
#pragma unroll
    for (i32 i = 0; i < columns / 4; ++i)
      probabilities[i / 4][i % 4] = pack(T{}, scores[2 * i], scores[2 * i + 1]);
  }

 private:
  // The largest score of a row, over every `every`-th block of columns.
  FLASHGEN_DEVICE static float highest(const Strip<columns>& scores, i32 h, i32 every) {
    float found = -kInfinity;
#pragma unroll
    for (i32 n = 0; n < columns / 8; ++n) {
      if (n % every == 0) found = maximum(found, maximum(scores[4 * n + 2 * h], scores[4 * n + 2 * h + 1]));
    }
    return row_maximum(found);
  }

  FLASHGEN_DEVICE bool is_low(i32 h) const { return !keeps_scores && !(rows.anchor[h] > -kReach); }

  // An anchor for rows that have none: the maximum of a quarter of the columns, which need only be near that
  // of all; or, where these are masked, of all.
  FLASHGEN_DEVICE void drop_anchor(const Strip<columns>& scores, float scale_log2) {
    drop_anchor_from<4>(scores, scale_log2);
    if (!anchored) drop_anchor_from<1>(scores, scale_log2);
  }
  template <i32 every>
  FLASHGEN_DEVICE void drop_anchor_from(const Strip<columns>& scores, float scale_log2) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float found = highest(scores, h, every) * scale_log2;
      if (rows.anchor[h] == -kInfinity) rows.anchor[h] = found;
      watched[h] |= is_low(h);
    }
    anchored = !warp_any(rows.anchor[0] == -kInfinity || rows.anchor[1] == -kInfinity);
  }

  // Whether some score of this lane reaches far above its row's anchor, which is above -kReach. Floats that
  // are not negative compare as whole numbers do, and negative ones are whole numbers below zero.
  FLASHGEN_DEVICE bool reaches_far(const Strip<columns>& scores, float scale_log2) const {
    bool far = false;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      // Two chains, of steps that compare three numbers at once.
      i32 found[2] = {0, 0};
#pragma unroll
      for (i32 n = 0; n < columns / 8; ++n) {
        i32& chain = found[n % 2];
        chain = larger(larger(chain, static_cast<i32>(bits_of(scores[4 * n + 2 * h]))),
                       static_cast<i32>(bits_of(scores[4 * n + 2 * h + 1])));
      }
      far |= float_of(static_cast<u32>(larger(found[0], found[1]))) * scale_log2 > rows.anchor[h] + kReach;
    }
    return far;
  }

  // Moves the anchors of rows that reach far above them to the maximum.
  FLASHGEN_DEVICE void follow_maximum(const Strip<columns>& scores, float scale_log2) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float found = highest(scores, h, 1) * scale_log2;
      if (!keeps_scores || running_maximum || watched[h])
        move_anchor(h, found, running_maximum ? 0.0f : kReach);
      if (!keeps_scores) watched[h] = is_low(h);
    }
  }

  FLASHGEN_DEVICE void move_anchor(i32 h, float to, float reach) {
    if (!(to > rows.anchor[h] + reach)) return;
    factor[h] *= exp2_approx(rows.anchor[h] - to);
    rows.anchor[h] = to;
  }

  template <class Use>
  FLASHGEN_DEVICE void exponentiate(const Strip<columns>& scores, float (&sum)[2], float scale_log2,
                                    const Use& use) const {
    // A row with no allowed key so far subtracts 0, so that exp2(-inf - 0) is 0 and not NaN.
    float shift[2], total[2][2] = {};
#pragma unroll
    for (i32 h = 0; h < 2; ++h) shift[h] = rows.anchor[h] == -kInfinity ? 0.0f : rows.anchor[h];
#pragma unroll
    for (i32 i = 0; i < columns / 4; ++i) {
      const i32 h = i % 2;
      const float first = exp2_approx(fused_multiply_add(scores[2 * i], scale_log2, -shift[h]));
      const float second = exp2_approx(fused_multiply_add(scores[2 * i + 1], scale_log2, -shift[h]));
      total[h][0] += first;
      total[h][1] += second;
      use(i, first, second);
    }
#pragma unroll
    for (i32 h = 0; h < 2; ++h) sum[h] = total[h][0] + total[h][1];
  }
};

}  // namespace flashgen
