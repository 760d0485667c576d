// The exponentials of a softmax that subtracts the maximum of each row.
#pragma once
#include "flashgen/logits.cuh"

namespace flashgen {

// The maximum to subtract. A row without allowed keys subtracts 0, because -inf - (-inf) is NaN.
FLASHGEN_DEVICE float shift_of(float maximum) { return maximum == -kInfinity ? 0.0f : maximum; }

// exp(s - shift). The difference is rounded by itself: fused with the product that gave s, it would differ
// from the maximum's by the rounding of s, which is 0.03 for scores of a million.
FLASHGEN_DEVICE float exponential(float s, float shift) {
  return exp2_approx(rounded_difference(s, shift) * kLog2E);
}

// log(sum of exp(s)) of a row from its maximum and its sum of exp(s - maximum).
FLASHGEN_DEVICE float log_sum_exp(float maximum, float sum) {
  return sum == 0.0f ? -kInfinity : maximum + log2_approx(sum) * kLn2;
}

}  // namespace flashgen
