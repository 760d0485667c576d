// What a softmax takes exponentials of. The exponentials of a row are relative to its reference maximum: the
// row's maximum so far, or a number near it. Each kind of logits has its own unit for reference maxima.
//
//     logit(s, row)            accumulator s as a reference maximum; as_reference_max(x): logit x as one
//     relative(s, shift, row)  how far s is above reference maximum `shift`, in powers of two
//     powers(x), distance(x)   from a difference of reference maxima to powers of two, and back
//     natural_log(m, x)        the natural logarithm of 2^x times the factor of reference maximum m
//     kNoMax                   the reference maximum of a row without an allowed key so far
#pragma once
#include "flashgen/element.cuh"

namespace flashgen {

// Products that a scale turns into logits. Reference maxima are in powers of two, so that an exponent is one
// instruction. For logits beyond 2^30 its rounding error is many powers of two.
struct ScaledProducts {
  // No logit is below it but -inf, whose exponential is 0.
  static constexpr float kNoMax = -0x1.fffffep127f;
  float scale_log2;

  FLASHGEN_DEVICE float logit(float s, i32 /*row*/) const { return s * scale_log2; }
  FLASHGEN_DEVICE float relative(float s, float shift, i32 /*row*/) const {
    return fused_multiply_add(s, scale_log2, -shift);
  }
  FLASHGEN_DEVICE static float powers(float x) { return x; }
  FLASHGEN_DEVICE static float distance(float x) { return x; }
  FLASHGEN_DEVICE static float as_reference_max(float logit) { return logit * kLog2E; }
  FLASHGEN_DEVICE static float natural_log(float reference_max, float x) {
    return (reference_max + x) * kLn2;
  }
};

// a - b, where the compiler must not fuse a product that yields a: it was rounded when the maximum was found.
FLASHGEN_DEVICE float rounded_difference(float a, float b) { return fused_multiply_add(a, 1.0f, -b); }

// Logits that a score computes. They may have any size, such as a bias of -1e30. A reference maximum is
// itself a logit and is subtracted before the multiplication by log2 e, so that the difference of near logits
// is exact.
struct ScoredLogits {
  // Any finite number may be a row's maximum.
  static constexpr float kNoMax = -kInfinity;

  FLASHGEN_DEVICE static float logit(float s, i32 /*row*/) { return s; }
  FLASHGEN_DEVICE static float relative(float s, float shift, i32 /*row*/) {
    return rounded_difference(s, shift) * kLog2E;
  }
  FLASHGEN_DEVICE static float powers(float x) { return x * kLog2E; }
  FLASHGEN_DEVICE static float distance(float x) { return x * kLn2; }
  FLASHGEN_DEVICE static float as_reference_max(float logit) { return logit; }
  FLASHGEN_DEVICE static float natural_log(float reference_max, float x) { return reference_max + x * kLn2; }
};

// The same for scores counted in products, which a scale turns into logits.
struct ScoredProducts {
  static constexpr float kNoMax = -kInfinity;
  float scale;
  float scale_log2;

  FLASHGEN_DEVICE float logit(float s, i32 /*row*/) const { return s; }
  FLASHGEN_DEVICE float relative(float s, float shift, i32 /*row*/) const {
    return rounded_difference(s, shift) * scale_log2;
  }
  FLASHGEN_DEVICE float powers(float x) const { return x * scale_log2; }
  FLASHGEN_DEVICE float distance(float x) const { return x * reciprocal_approx(scale_log2); }
  FLASHGEN_DEVICE float as_reference_max(float logit) const { return logit * reciprocal_approx(scale); }
  FLASHGEN_DEVICE float natural_log(float reference_max, float x) const {
    return reference_max * scale + x * kLn2;
  }
};

// -L of a row in powers of two: P = exp(score - L) takes one instruction before the exponential. A row that
// attends to nothing has L = -inf. Such an L counts as +inf, so that P is 0 even where scores are -inf. So
// does an L that overflows in powers of two. Beyond 2^22 L is rounded up by its rounding error, so that P
// stays near or below 1.
FLASHGEN_DEVICE float negate_lse(float lse) {
  const float excess = maximum(maximum(lse, -lse) - 0x1p22f, 0.0f);
  const float rounded_up = fused_multiply_add(excess, 0x1p-22f, lse);
  return lse < -0x1p126f ? -kInfinity : -rounded_up * kLog2E;
}

}  // namespace flashgen
