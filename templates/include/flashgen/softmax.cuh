// The online softmax: running row maxima and sums, and the rescaling that keeps them consistent.
#pragma once
#include "flashgen/logits.cuh"
#include "flashgen/product.cuh"
#include "flashgen/row_statistics.cuh"

namespace flashgen {

// A row's maximum may lag behind by this many powers of two before the row is rescaled: the result is the
// same (numerator and denominator share the factor), and most tiles then need no rescaling at all.
constexpr float kMaximumLag = 8.0f;

// The power of two of the largest exponential of a row.
template <class Logits>
constexpr float headroom_of() {
  if constexpr (requires { Logits::kHeadroom; }) {
    return Logits::kHeadroom;
  } else {
    return 0.0f;
  }
}

// The reference maximum of a row whose largest logit is `logit`. Without headroom it is that logit: 16-bit
// kernels do not subtract.
template <class Logits>
FLASHGEN_DEVICE float reference_below(float logit) {
  if constexpr (headroom_of<Logits>() == 0.0f) {
    return logit;
  } else {
    return logit - Logits::distance(headroom_of<Logits>());
  }
}

// The exponential of a row's largest logit.
template <class Logits>
FLASHGEN_DEVICE float largest_exponential() {
  if constexpr (headroom_of<Logits>() == 0.0f) {
    return 1.0f;
  } else {
    return exp2_approx(headroom_of<Logits>());
  }
}

// What exponentials add to a row's sum: all of them count alike.
struct EqualWeights {
  FLASHGEN_DEVICE float weighted_sum(float a, float b, i32 /*n*/) const { return a + b; }
};

// Statistics of 16 * row_blocks rows; element [m][h] is that of the lane's row l/4 + 8h of block m.
template <i32 row_blocks, class Logits>
struct OnlineSoftmax {
  // The running maximum of the row's logits less the headroom, a reference maximum: the factor taken out of
  // the row.
  float reference_max[row_blocks][2];
  // This lane's share of the row's sum of exponentials.
  float sum[row_blocks][2];

  FLASHGEN_DEVICE void reset() {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        reference_max[m][h] = -kInfinity;
        sum[m][h] = 0.0f;
      }
    }
  }

  // Takes in one more logit per row, before all others; one lane of each row counts it.
  FLASHGEN_DEVICE void take_in_sink(float logit, Thread thread) {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        reference_max[m][h] = reference_below<Logits>(Logits::as_reference_max(logit));
        sum[m][h] = logit > -kInfinity && thread.column() == 0 ? largest_exponential<Logits>() : 0.0f;
      }
    }
  }

  // Takes in a tile of scores, which become exponentials, and rescales what was accumulated before.
  template <i32 columns, i32 out_columns, class Weights = EqualWeights>
  FLASHGEN_DEVICE void update(Accumulator<row_blocks, columns>& scores,
                              Accumulator<row_blocks, out_columns>& out, const Logits& logits,
                              const Weights& weights = {}) {
    // Each lane looks at its own columns: as long as no lane sees a score far above its row's maximum, which
    // is the rule, the lanes of a row need not even agree on one.
    float highest[row_blocks][2];
    bool lagging = false;
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) highest[m][h] = maximum(scores[m][0][2 * h], scores[m][0][2 * h + 1]);
    }
#pragma unroll
    for (i32 n = 1; n < columns; ++n) {
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          highest[m][h] = maximum(highest[m][h], maximum(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
        }
      }
    }
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        highest[m][h] = logits.logit(highest[m][h], h);
        lagging |= highest[m][h] > reference_max[m][h] + Logits::distance(kMaximumLag);
      }
    }
    if (warp_any(lagging)) rescale(highest, out);

    // A row with no allowed key so far subtracts 0, so that exp2(-inf - 0) is 0 and not NaN.
    float shift[row_blocks][2];
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h)
        shift[m][h] = reference_max[m][h] == -kInfinity ? 0.0f : reference_max[m][h];
    }
#pragma unroll
    for (i32 n = 0; n < columns; ++n) {
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) {
          scores[m][n][e] = exp2_approx(logits.relative(scores[m][n][e], shift[m][e / 2], e / 2));
        }
#pragma unroll
        for (i32 h = 0; h < 2; ++h)
          sum[m][h] += weights.weighted_sum(scores[m][n][2 * h], scores[m][n][2 * h + 1], n);
      }
    }
  }

  // Adds up the lanes' shares; afterwards every lane of a row has the row's sum.
  FLASHGEN_DEVICE void finish() {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) sum[m][h] = row_total(sum[m][h]);
    }
  }

  // 1 / sum, and 0 for a row that attended to nothing.
  FLASHGEN_DEVICE float normalizer(i32 m, i32 h) const { return sum[m][h] == 0.0f ? 0.0f : 1.0f / sum[m][h]; }

  // Natural log of the sum of exponentials; -inf for a row that attended to nothing.
  FLASHGEN_DEVICE float log_sum_exp(i32 m, i32 h) const {
    return sum[m][h] == 0.0f ? -kInfinity : Logits::natural_log(reference_max[m][h], log2_approx(sum[m][h]));
  }

 private:
  // Each row decides for itself, so no row's result depends on its neighbors.
  template <i32 out_columns>
  FLASHGEN_DEVICE void rescale(const float (&highest)[row_blocks][2],
                               Accumulator<row_blocks, out_columns>& out) {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const float tile_maximum = row_maximum(highest[m][h]);
        const bool lags = tile_maximum > reference_max[m][h] + Logits::distance(kMaximumLag);
        const float raised = reference_below<Logits>(tile_maximum);
        const float factor = lags ? exp2_approx(Logits::powers(reference_max[m][h] - raised)) : 1.0f;
        if (lags) reference_max[m][h] = raised;
        sum[m][h] *= factor;
#pragma unroll
        for (i32 n = 0; n < out_columns; ++n) {
          out[m][n][2 * h] *= factor;
          out[m][n][2 * h + 1] *= factor;
        }
      }
    }
  }
};

}  // namespace flashgen
