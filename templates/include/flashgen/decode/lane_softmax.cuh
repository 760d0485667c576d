// The online softmax of a lane's two rows of 16, whose scores several warps share. These warps agree on the
// rows' reference maxima.
#pragma once
#include "flashgen/softmax.cuh"

namespace flashgen {

template <class Logits>
struct LaneSoftmax {
  float reference_max[2];
  // This lane's share of the row's sum of exponentials.
  float sum[2];

  FLASHGEN_DEVICE void reset() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      reference_max[h] = -kInfinity;
      sum[h] = 0.0f;
    }
  }

  // The largest logits among a lane's scores.
  template <i32 columns>
  FLASHGEN_DEVICE static void largest(float (&highest)[2], const Accumulator<1, columns>& scores,
                                      const Logits& logits) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      highest[h] = maximum(scores[0][0][2 * h], scores[0][0][2 * h + 1]);
#pragma unroll
      for (i32 n = 1; n < columns; ++n)
        highest[h] = maximum(highest[h], maximum(scores[0][n][2 * h], scores[0][n][2 * h + 1]));
      highest[h] = logits.logit(highest[h], h);
    }
  }

  // Whether a lane sees a score far above its row's reference maximum.
  FLASHGEN_DEVICE bool lags(const float (&highest)[2]) const {
    return highest[0] > reference_max[0] + Logits::distance(kMaximumLag) ||
           highest[1] > reference_max[1] + Logits::distance(kMaximumLag);
  }

  // Raises the reference maximum of row h if `most`, the largest logit of the row, is far above it. Returns
  // what the row's results are multiplied by.
  FLASHGEN_DEVICE float raise_row(i32 h, float most) {
    const bool rises = most > reference_max[h] + Logits::distance(kMaximumLag);
    const float factor = rises ? exp2_approx(Logits::powers(reference_max[h] - most)) : 1.0f;
    if (rises) reference_max[h] = most;
    sum[h] *= factor;
    return factor;
  }

  // Takes over the reference maximum of row h that other warps have chosen. Returns the same.
  FLASHGEN_DEVICE float follow_row(i32 h, float reference) {
    const bool rises = reference > reference_max[h];
    const float factor = rises ? exp2_approx(Logits::powers(reference_max[h] - reference)) : 1.0f;
    if (rises) reference_max[h] = reference;
    sum[h] *= factor;
    return factor;
  }

  // Scores become exponentials, which add to the sums.
  template <i32 columns>
  FLASHGEN_DEVICE void exponentiate(Accumulator<1, columns>& scores, const Logits& logits) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      // A row with no allowed key so far subtracts 0, so that exp2(-inf - 0) is 0 and not NaN.
      const float shift = reference_max[h] == -kInfinity ? 0.0f : reference_max[h];
#pragma unroll
      for (i32 n = 0; n < columns; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) {
          scores[0][n][e] = exp2_approx(logits.relative(scores[0][n][e], shift, h));
          sum[h] += scores[0][n][e];
        }
      }
    }
  }
};

}  // namespace flashgen
