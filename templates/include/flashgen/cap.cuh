// Softcaps: scores that are `amplitude * tanh(slope * s)` of products s. Logits hardly ever come near their
// cap, and well below it the tangent is a polynomial, which the softmax takes its exponentials of nearly as
// quickly as of products. The largest product of a lane tells whether all are so far below.
//
// A tile with a product beyond has all its logits as shares of the cap. Which way a warp goes is for its rows
// together to say: no row's number depends on others of its warp, but what it is rounded to may.
#pragma once
#include "flashgen/expression.cuh"
#include "flashgen/panel.cuh"
#include "flashgen/softmax.cuh"

namespace flashgen {

// Where |x| is below kBelowCap, tanh(x) is taken for x times a polynomial of x^2: its relative error
// is 5.6e-7 at most (fitted). One more term would reach to .5, and is an instruction of every pair.
constexpr float kBelowCap = 0.265f;
constexpr float kTangent[3] = {0x1.ffffeep-1f, -0x1.552fb2p-2f, 0x1.05ca76p-3f};

// What stands for a forbidden product. No other is as far below zero, or it is moved.
constexpr float kForbidden = -0x1.fffffep+127f;

// What is known of a cap between tiles of keys: how steep it is at zero, in powers of two, and the slope
// without its sign.
struct Cap {
  float signed_steepness;
  float slope;

  FLASHGEN_DEVICE static Cap of(float amplitude, float slope) {
    return {amplitude * slope * kLog2E, magnitude(slope)};
  }
  // Logits that fall with their products are turned round.
  FLASHGEN_DEVICE bool falls() const { return signed_steepness < 0.0f; }
  FLASHGEN_DEVICE float steepness() const { return magnitude(signed_steepness); }
};

// The logit in powers of two, s times a polynomial of s^2, for products that are below a limit.
struct CapPolynomial {
  float coefficients[3];
  float limit;

  FLASHGEN_DEVICE static CapPolynomial of(const Cap& cap) {
    const float square = squared(cap.slope);
    CapPolynomial made;
    made.coefficients[0] = cap.steepness() * kTangent[0];
#pragma unroll
    for (i32 i = 1; i < 3; ++i)
      made.coefficients[i] = made.coefficients[i - 1] * (square * (kTangent[i] / kTangent[i - 1]));
    // Where powers of the slope vanish the last term must not count, and where they are infinite no product
    // is below.
    const float reach = cap.slope < 0x1p-20f                          ? 0.05f
                        : magnitude(made.coefficients[2]) < kInfinity ? kBelowCap
                                                                      : 0.0f;
    made.limit = reach * reciprocal_approx(cap.slope);
    return made;
  }

  FLASHGEN_DEVICE float factor(float s) const {
    const float square = squared(s);
    const float sum = fused_multiply_add(coefficients[2], square, coefficients[1]);
    return fused_multiply_add(sum, square, coefficients[0]);
  }
  // By the square, as that is needed anyway.
  FLASHGEN_DEVICE bool is_beyond(float s) const { return squared(s) >= squared(limit); }
  // Or it is a NaN, beside which others may not have been seen.
  FLASHGEN_DEVICE bool might_be_beyond(float square) const { return !(square < squared(limit)); }
  // Whether what is forbidden has a logit of -inf by the polynomial, as the square of what stands for it is
  // infinite.
  FLASHGEN_DEVICE bool forbids() const { return coefficients[2] > 0x1p-100f; }
};

// The largest of three numbers that are not negative, and so in the order of their bits: of whole numbers it
// is found by one instruction. A NaN is the largest, or it is left out.
FLASHGEN_DEVICE float largest_of_three(float a, float b, float c) {
  const i32 bits[3] = {static_cast<i32>(bits_of(a)), static_cast<i32>(bits_of(b)),
                       static_cast<i32>(bits_of(c))};
  const i32 of_two = bits[0] > bits[1] ? bits[0] : bits[1];
  return float_of(static_cast<u32>(of_two > bits[2] ? of_two : bits[2]));
}

// The largest of a lane's products, without its sign. A NaN may be left out, here and below.
template <i32 count>
FLASHGEN_DEVICE float largest_of(const float (&products)[count]) {
  float largest[4] = {};
#pragma unroll
  for (i32 i = 0; i < count; ++i) largest[i % 4] = maximum(largest[i % 4], magnitude(products[i]));
  return maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
}

// The lowest of a lane's products, if one is below zero: those are in the order of their bits, which are
// larger than those of others. It may be a NaN, beside which others are not seen.
template <i32 count>
FLASHGEN_DEVICE float lowest_of(const float (&products)[count]) {
  u32 last[2] = {};
#pragma unroll
  for (i32 i = 0; i < count; i += 2) {
    u32& of_both = last[i / 2 % 2];
    const u32 first = bits_of(products[i]), second = bits_of(products[i + 1]);
    const u32 of_two = of_both > first ? of_both : first;
    of_both = of_two > second ? of_two : second;
  }
  return float_of(last[0] > last[1] ? last[0] : last[1]);
}

// Whether a lane has a product below the polynomial's lower end, and not one that stands for a forbidden one:
// if there are some of those, none is lower. Numbers below zero are in the order of their bits, which are
// larger than those of others, and one is added to have forbidden ones come first of all.
template <i32 count>
FLASHGEN_DEVICE bool are_below(const float (&products)[count], const CapPolynomial& polynomial,
                               bool are_some_forbidden) {
  const u32 first = are_some_forbidden ? 0u - bits_of(kForbidden) : 0u;
  u32 last = 0;
#pragma unroll
  for (i32 i = 0; i < count; ++i) {
    const u32 place = bits_of(products[i]) + first;
    last = place > last ? place : last;
  }
  const bool are_all_forbidden = are_some_forbidden && last == 0;
  // By bits as well: of a row without a number, whose bits come before those of numbers below zero, nothing
  // is asked.
  return !are_all_forbidden && last - first >= bits_of(-polynomial.limit);
}

// The highest product of each of a lane's two rows.
template <i32 count>
FLASHGEN_DEVICE void highest_of(const float (&products)[count], float (&highest)[2]) {
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    highest[row] = -kInfinity;
#pragma unroll
    for (i32 i = 2 * row; i < count; i += 4)
      highest[row] = maximum(highest[row], maximum(products[i], products[i + 1]));
  }
}

// Of logits that fall with their products, before these are looked at.
template <i32 count>
FLASHGEN_DEVICE void turn_round(float (&products)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) products[i] = -products[i];
}

// Before a mask is applied: none is what stands for a product that is forbidden, or lower than `least`.
constexpr float kLeastAllowed = 0.5f * kForbidden;
template <i32 count>
FLASHGEN_DEVICE void raise_lowest(float (&products)[count], float least = kLeastAllowed) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) products[i] = products[i] < least ? least : products[i];
}

// For the softmax: products that are below the limit, ...
struct ProductsBelowCap {
  static constexpr i32 sums = 2;
  CapPolynomial polynomial;

  FLASHGEN_DEVICE float relative(float s, float shift, i32 /*row*/) const {
    return fused_multiply_add(s, polynomial.factor(s), -shift);
  }
  FLASHGEN_DEVICE void see(float /*first*/, float /*second*/) {}
  static constexpr bool replaced = false;
};

// ... or are taken to be, and the largest is found beside their exponentials, ...
struct ProductsSupposedBelowCap : ProductsBelowCap {
  // By the squares, as these are needed anyway.
  float largest_square = 0.0f;

  FLASHGEN_DEVICE void see(float first, float second) {
    largest_square = largest_of_three(largest_square, squared(first), squared(second));
  }
};

// ... or exponents that have taken their place.
struct Exponents {
  static constexpr i32 sums = 1;
  FLASHGEN_DEVICE float relative(float s, float /*shift*/, i32 /*row*/) const { return s; }
  FLASHGEN_DEVICE void see(float /*first*/, float /*second*/) {}
  static constexpr bool replaced = true;
};

}  // namespace flashgen
