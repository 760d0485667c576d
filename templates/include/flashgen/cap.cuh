// Softcaps: scores that are `amplitude * tanh(slope * s)` of products s. Logits hardly ever come near their
// cap, and well below it the tangent is a polynomial, which the softmax takes its exponentials of nearly as
// quickly as of products. Whether all products of a warp are so far below is found out on the way.
#pragma once
#include "flashgen/expression.cuh"
#include "flashgen/panel.cuh"

namespace flashgen {

// Where |x| is below kBelowCap, tanh(x) is taken for x times a polynomial of x^2: its relative error
// is 5.5e-7 at most (fitted).
constexpr float kBelowCap = 0.5f;
constexpr float kTangent[4] = {0x1.ffffeep-1f, -0x1.5542f2p-2f, 0x1.0e2324p-3f, -0x1.6bbe38p-5f};

// What is known of a cap between tiles of keys: how steep it is at zero, in powers of two, and the slope
// without its sign.
struct Cap {
  float steepness;
  float slope;

  FLASHGEN_DEVICE static Cap of(float amplitude, float slope) {
    return {amplitude * slope * kLog2E, magnitude(slope)};
  }
  // Logits with products.
  FLASHGEN_DEVICE bool rises() const { return steepness > 0.0f; }
};

// The logit in powers of two, s times a polynomial of s^2, for products that are below a limit.
struct CapPolynomial {
  float coefficients[4];
  float limit;

  FLASHGEN_DEVICE static CapPolynomial of(const Cap& cap) {
    const float square = squared(cap.slope);
    CapPolynomial made;
    made.coefficients[0] = cap.steepness * kTangent[0];
#pragma unroll
    for (i32 i = 1; i < 4; ++i)
      made.coefficients[i] = made.coefficients[i - 1] * (square * (kTangent[i] / kTangent[i - 1]));
    // Where powers of the slope vanish the last term must not count, and where they are infinite no product
    // is below.
    const float reach = cap.slope < 0x1p-20f                          ? 0.05f
                        : magnitude(made.coefficients[3]) < kInfinity ? kBelowCap
                                                                      : 0.0f;
    made.limit = reach * reciprocal_approx(cap.slope);
    return made;
  }

  FLASHGEN_DEVICE float factor(float s) const {
    const float square = squared(s);
    float sum = fused_multiply_add(coefficients[3], square, coefficients[2]);
    sum = fused_multiply_add(sum, square, coefficients[1]);
    return fused_multiply_add(sum, square, coefficients[0]);
  }
  FLASHGEN_DEVICE bool is_beyond(float s) const { return magnitude(s) >= limit; }
};

// The largest of a lane's products, without its sign. A NaN may be left out.
template <i32 count>
FLASHGEN_DEVICE float largest_of(const float (&products)[count]) {
  float largest[4] = {};
#pragma unroll
  for (i32 i = 0; i < count; ++i) largest[i % 4] = maximum(largest[i % 4], magnitude(products[i]));
  return maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
}

// For the softmax: products that are below the limit, ...
struct ProductsBelowCap {
  static constexpr i32 sums = 1;
  CapPolynomial polynomial;

  FLASHGEN_DEVICE void look(float, float) const {}
  FLASHGEN_DEVICE float relative(float s, float shift) const {
    return fused_multiply_add(s, polynomial.factor(s), -shift);
  }
};

// ... or are taken to be, and looked at while exponentials are taken, ...
struct SeenProducts : ProductsBelowCap {
  i32 largest_square = 0;

  FLASHGEN_DEVICE void look(float a, float b) {
    largest_square = larger(largest_square, larger(order_of(squared(a)), order_of(squared(b))));
  }
  // A square is rounded: what is beyond the limit has none that is below this. A NaN may be left out.
  FLASHGEN_DEVICE bool were_below() const {
    return largest_square < order_of(squared(polynomial.limit) * (1.0f - 0x1p-20f));
  }

 private:
  // Numbers without a sign are ordered as their bits are.
  FLASHGEN_DEVICE static i32 order_of(float square) { return static_cast<i32>(bits_of(square)); }
};

// Logits of products that are beyond the limit, counted in a unit in which they are beyond it, too.
struct CappedLogits {
  // Of 2^(exponent s), the tangent's e^2x; the highest logit; and the unit, in powers of two.
  float exponent;
  float highest;
  float unit;

  FLASHGEN_DEVICE static CappedLogits of(const Cap& cap) {
    const float highest = 2.0f * reciprocal_approx(cap.slope);
    return {cap.slope * (2.0f * kLog2E), cap.steepness < 0.0f ? -highest : highest,
            maximum(0.5f * magnitude(cap.steepness), 0x1p-100f)};
  }
  // tanh(x) is 1 - 2 / (e^2x + 1).
  FLASHGEN_DEVICE float logit(float s) const {
    const float rest = reciprocal_approx(exp2_approx(s * exponent) + 1.0f);
    return fused_multiply_add(-2.0f * highest, rest, highest);
  }
};

// ... and products of any size.
struct CappedProducts {
  static constexpr i32 sums = 1;
  CapPolynomial polynomial;
  CappedLogits capped;

  FLASHGEN_DEVICE void look(float, float) const {}
  FLASHGEN_DEVICE float logit(float s) const {
    return polynomial.is_beyond(s) ? capped.logit(s) * capped.unit : s * polynomial.factor(s);
  }
  FLASHGEN_DEVICE float relative(float s, float shift) const {
    const float below = fused_multiply_add(s, polynomial.factor(s), -shift);
    const float beyond = fused_multiply_add(capped.logit(s), capped.unit, -shift);
    return polynomial.is_beyond(s) ? beyond : below;
  }
};

// The same where more is to be known of them: products that are below the limit stay as they are, or are
// negated where logits fall, and others are replaced by their logits. So they are in the order of their
// logits, those that are forbidden may be -inf, and what the exponent of each comes to is the same number.
struct OrderedProducts {
  CapPolynomial polynomial;
  float unit;

  FLASHGEN_DEVICE static OrderedProducts of(const Cap& cap) {
    return {CapPolynomial::of({magnitude(cap.steepness), cap.slope}), CappedLogits::of(cap).unit};
  }

  static constexpr i32 sums = 1;
  FLASHGEN_DEVICE void look(float, float) const {}
  FLASHGEN_DEVICE float logit(float s) const { return s * factor(s); }
  FLASHGEN_DEVICE float relative(float s, float shift) const {
    return fused_multiply_add(s, factor(s), -shift);
  }

  // Whether the warp has a product beyond the limit.
  template <i32 count>
  FLASHGEN_DEVICE bool put_in_order(float (&products)[count], const Cap& cap) const {
    const CappedLogits capped = CappedLogits::of(cap);
    const bool falls = cap.steepness < 0.0f;
    // So many are replaced at once, if one of them needs it.
    constexpr i32 few = 8;
    bool some_are_beyond = false;
#pragma unroll
    for (i32 group = 0; group < count; group += few) {
      float largest = 0.0f;
#pragma unroll
      for (i32 i = group; i < smaller(group + few, count); ++i)
        largest = maximum(largest, magnitude(products[i]));
      const bool is_beyond = warp_any(polynomial.is_beyond(largest));
      if (!is_beyond && !falls) continue;
      some_are_beyond |= is_beyond;
#pragma unroll
      for (i32 i = group; i < smaller(group + few, count); ++i) {
        const float s = products[i];
        products[i] = polynomial.is_beyond(s) ? capped.logit(s) : falls ? -s : s;
      }
    }
    return some_are_beyond;
  }

 private:
  FLASHGEN_DEVICE float factor(float s) const {
    return polynomial.is_beyond(s) ? unit : polynomial.factor(s);
  }
};

}  // namespace flashgen
