// Softcaps: scores that are `amplitude * tanh(slope * s)` of products s. Logits hardly ever come near their
// cap, and far below it the tangent is a polynomial, which the softmax takes its exponentials of nearly as quickly
// as of products. Whether all products of a warp are so far below is found out on the way.
#pragma once
#include "flashgen/expression.cuh"
#include "flashgen/panel.cuh"

namespace flashgen {

// Where |x| is below kFarBelowCap, tanh(x) is taken for x (kTangent[0] + kTangent[1] x^2 + kTangent[2] x^4): its
// relative error is 7.8e-7 at most (fitted).
constexpr float kFarBelowCap = 0.28f;
constexpr float kTangent[3] = {0x1.ffffe6p-1f, -0x1.5526a6p-2f, 0x1.04863ep-3f};

struct Cap {
  float amplitude;
  float slope;

  // Whether logits fall where products rise.
  FLASHGEN_DEVICE bool falls() const { return amplitude * slope < 0.0f; }
};

// What is kept of a cap between tiles of keys, without signs: how steep it is at zero, in powers of two, and the
// slope.
struct CapAtZero {
  float steepness;
  float slope;

  FLASHGEN_DEVICE static CapAtZero of(const Cap& cap) {
    return {magnitude(cap.amplitude * cap.slope * kLog2E), magnitude(cap.slope)};
  }
};

// The logit in powers of two, s (first + second s^2 + third s^4), for products that are below a limit.
struct CapPolynomial {
  float first, second, third;
  float limit;

  FLASHGEN_DEVICE static CapPolynomial of(const CapAtZero& cap) {
    const float square = squared(cap.slope), third = cap.steepness * squared(square) * kTangent[2];
    // Where powers of the slope vanish the last term must not count, and where they are infinite no product is below.
    const float reach = cap.slope < 0x1p-31f ? 0.05f : third < kInfinity ? kFarBelowCap : 0.0f;
    return {cap.steepness * kTangent[0], cap.steepness * square * kTangent[1], third,
            reach * reciprocal_approx(cap.slope)};
  }

  FLASHGEN_DEVICE float factor(float s) const {
    const float square = squared(s);
    return fused_multiply_add(fused_multiply_add(square, third, second), square, first);
  }
  FLASHGEN_DEVICE bool is_beyond(float s) const { return magnitude(s) >= limit; }
};

// Products that are taken to be far below the cap, and looked at while exponentials are taken. A NaN may be left
// out.
struct ProductsBelowCap {
  CapPolynomial polynomial;
  i32 largest_square = 0;

  FLASHGEN_DEVICE void look(float a, float b) {
    largest_square = larger(largest_square, larger(order_of(squared(a)), order_of(squared(b))));
  }
  // A square is rounded: what is beyond the limit has none that is below this.
  FLASHGEN_DEVICE bool were_below() const {
    return largest_square < order_of(squared(polynomial.limit) * (1.0f - 0x1p-20f));
  }
  FLASHGEN_DEVICE float relative(float s, float shift) const {
    return fused_multiply_add(s, polynomial.factor(s), -shift);
  }

 private:
  // Numbers without a sign are ordered as their bits are.
  FLASHGEN_DEVICE static i32 order_of(float square) { return static_cast<i32>(bits_of(square)); }
};

// Products of any size: where they are far below the cap they stay as they are, elsewhere something stands for them
// that is beyond the limit, too, and which the logit is `unit` times as large as, in powers of two. Where logits
// fall, products are negated. So order is kept, a forbidden product is -inf, and what the logit of a product comes
// to does not depend on others.
struct CappedProducts {
  CapPolynomial polynomial;
  float unit;

  FLASHGEN_DEVICE static CappedProducts of(const CapPolynomial& polynomial) {
    return {polynomial, maximum(0.5f * polynomial.first, 0x1p-100f)};
  }

  FLASHGEN_DEVICE void look(float, float) const {}
  FLASHGEN_DEVICE float logit(float s) const { return s * factor(s); }
  FLASHGEN_DEVICE float relative(float s, float shift) const {
    return fused_multiply_add(s, factor(s), -shift);
  }

  // Puts what stands for them in the place of products; whether some product of the warp was not far below.
  template <i32 count>
  FLASHGEN_DEVICE bool stand_for(float (&products)[count], const Cap& cap) const {
    // So many have their tangents computed at once if one of them needs it.
    constexpr i32 at_once = 8;
    const bool falls = cap.falls();
    const float exponent = cap.slope * (2.0f * kLog2E), sign = falls ? -1.0f : 1.0f;
    const float highest = cap.amplitude * kLog2E * reciprocal_approx(unit);
    bool some_beyond = false;
#pragma unroll
    for (i32 group = 0; group < count; group += at_once) {
      float largest = 0.0f;
#pragma unroll
      for (i32 i = 0; i < at_once; ++i) largest = maximum(largest, magnitude(products[group + i]));
      const bool are_beyond = warp_any(polynomial.is_beyond(largest));
      if (!are_beyond && !falls) continue;
      some_beyond |= are_beyond;
#pragma unroll
      for (i32 i = group; i < group + at_once; ++i) {
        const float s = products[i];
        // 1 - 2 / (e^2x + 1)
        const float rest = reciprocal_approx(exp2_approx(s * exponent) + 1.0f);
        const float beyond = fused_multiply_add(-2.0f * highest, rest, highest);
        products[i] = polynomial.is_beyond(s) ? beyond : sign * s;
      }
    }
    return some_beyond;
  }

 private:
  FLASHGEN_DEVICE float factor(float s) const {
    return polynomial.is_beyond(s) ? unit : polynomial.factor(s);
  }
};

}  // namespace flashgen
