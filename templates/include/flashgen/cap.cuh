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

// What a share of the cap is off by near zero, where it is computed exactly, is nothing beside any logarithm
// of a sum up to the first of these caps. Up to the second it is nothing beside one that is a hundredth of
// the cap, and nothing to what probabilities are rounded to.
constexpr float kLowCap = 100.0f;
constexpr float kModestCap = 1000.0f;

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

// Whether a lane has a product beyond the polynomial, and not one that stands for a forbidden one.
template <i32 count>
FLASHGEN_DEVICE bool are_allowed_beyond(const float (&products)[count], const CapPolynomial& polynomial) {
  bool are = false;
#pragma unroll
  for (i32 i = 0; i < count; ++i) are |= polynomial.is_beyond(products[i]) & (products[i] != kForbidden);
  return are;
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

// How much of the cap a product of any size has, and what the cap is in powers of two.
struct CapShare {
  // Beyond this power of two e^2x is no more than that: the share is 1, and four of them have a product.
  static constexpr float kMost = 25.0f;

  float exponent;
  float highest;

  FLASHGEN_DEVICE static CapShare of(const Cap& cap) {
    return {cap.slope * (2.0f * kLog2E), cap.steepness() * reciprocal_approx(cap.slope)};
  }
  // How large a row's sum has to be, as a power of two, for its logits to be taken as shares.
  FLASHGEN_DEVICE float least_sum() const {
    if (highest < 1.001f * kLowCap * kLog2E) return -kInfinity;
    return highest * (highest < 1.001f * kModestCap * kLog2E ? 0.01f : kBelowCap);
  }
  // tanh(x) is (e^2x - 1) / (e^2x + 1): near zero it is off by half of what the exponential is, as the
  // difference is exact there.
  FLASHGEN_DEVICE float operator()(float s) const {
    const float power = power_of(s);
    return reciprocal_approx(power + 1.0f) * (power - 1.0f);
  }
  // What a logit of a row is at most, in powers of two, some of whose divisors e^2x + 1 have a product.
  FLASHGEN_DEVICE float bound(float product) const {
    return fused_multiply_add(-2.0f * highest, reciprocal_approx(product), highest);
  }
  // e^2x, or a large number for all that are larger.
  FLASHGEN_DEVICE float power_of(float s) const { return exp2_approx(minimum_or_nan(s * exponent, kMost)); }
  // Of all products of a tile, before anything is made of the first: it hides what each of them takes. With a
  // cap of 100 and logits that are beyond it D=64 is 6 % faster than with powers by fours, others 0 to 2 %.
  template <i32 count>
  FLASHGEN_DEVICE void take_powers(float (&products)[count]) const {
#pragma unroll
    for (i32 i = 0; i < count; ++i) products[i] = power_of(products[i]);
  }
};

// Before a mask is applied: products are turned round where logits fall, and none is what stands for one that
// is forbidden.
template <i32 count>
FLASHGEN_DEVICE void prepare_products(float (&products)[count], const Cap& cap) {
  constexpr float kLeast = 0.5f * kForbidden;
  const float sign = cap.falls() ? -1.0f : 1.0f;
#pragma unroll
  for (i32 i = 0; i < count; ++i) {
    const float product = products[i] * sign;
    products[i] = product < kLeast ? kLeast : product;
  }
}

// For the softmax: products that are below the limit, ...
struct ProductsBelowCap {
  static constexpr i32 sums = 1;
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

// ... exponents that have taken the place of products, ...
struct Exponents {
  static constexpr i32 sums = 1;
  FLASHGEN_DEVICE float relative(float s, float /*shift*/, i32 /*row*/) const { return s; }
  FLASHGEN_DEVICE void see(float /*first*/, float /*second*/) {}
  static constexpr bool replaced = true;
};

// ... that are found of e^2x for two pairs of a row at once, of a warp's strip, where a lane has two columns
// for each row in turn. What comes of a forbidden product is for the mask to say once more. Four share a
// division, as it is slow: 1 / a is b / (a b).
template <i32 count, class Exponents>
FLASHGEN_DEVICE void replace_by_fours(float (&powers)[count], const Exponents& exponents) {
#pragma unroll
  for (i32 at = 0; at < count; at += 8) {
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
      float* const row_at = powers + at + 2 * row;
      float four[4] = {row_at[0], row_at[1], row_at[4], row_at[5]};
      exponents(four, row);
      row_at[0] = four[0];
      row_at[1] = four[1];
      row_at[4] = four[2];
      row_at[5] = four[3];
    }
  }
}

// ... and are shares of a low cap whatever their size, off by a little more near zero, which is nothing
// beside any logarithm of a sum if the cap is 50 at most (the plan says so), ...
struct SharesOfFineCap {
  // Whether it is known how high they may be.
  static constexpr bool are_bounded = false;
  CapShare share;

  template <i32 count>
  FLASHGEN_DEVICE void replace(float (&products)[count], const float (&shift)[2]) const {
    share.take_powers(products);
    replace_by_fours(products, [&](float (&four)[4], i32 row) { exponents(four, shift[row]); });
  }

 private:
  FLASHGEN_DEVICE void exponents(float (&powers)[4], float shift) const {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) powers[i] += 1.0f;
    const float pairs[2] = {powers[0] * powers[1], powers[2] * powers[3]};
    const float part = reciprocal_approx(pairs[0] * pairs[1]) * share.highest;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      const float of_pair = part * pairs[1 - i], first = powers[2 * i], second = powers[2 * i + 1];
      powers[2 * i] = fused_multiply_add(of_pair, fused_multiply_add(-2.0f, second, pairs[i]), -shift);
      powers[2 * i + 1] = fused_multiply_add(of_pair, fused_multiply_add(-2.0f, first, pairs[i]), -shift);
    }
  }
};

// ... or of any cap, computed exactly; the result is for CapShare::bound(), ...
struct SharesOfCap {
  static constexpr bool are_bounded = true;
  CapShare share;

  template <i32 count>
  FLASHGEN_DEVICE float replace(float (&products)[count], const float (&shift)[2]) const {
    share.take_powers(products);
    float largest = 0.0f;
    replace_by_fours(products, [&](float (&four)[4], i32 row) {
      largest = maximum(largest, exponents(four, shift[row]));
    });
    return largest;
  }

 private:
  // The larger of two products of two divisors. That of all four, which costs less, would have every logit
  // near seven eighths of the cap where all are near zero.
  FLASHGEN_DEVICE float exponents(float (&powers)[4], float shift) const {
    const float last[2] = {powers[1] + 1.0f, powers[3] + 1.0f};
    const float pairs[2] = {fused_multiply_add(powers[0], last[0], last[0]),
                            fused_multiply_add(powers[2], last[1], last[1])};
    const float part = reciprocal_approx(pairs[0] * pairs[1]) * share.highest;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      const float of_pair = part * pairs[1 - i], first = powers[2 * i], second = powers[2 * i + 1];
      // Divisors once more, times what they share: the powers are there, and they need no registers
      // meanwhile.
      const float by_second = fused_multiply_add(of_pair, second, of_pair);
      const float by_first = fused_multiply_add(of_pair, first, of_pair);
      powers[2 * i] = fused_multiply_add(by_second, first - 1.0f, -shift);
      powers[2 * i + 1] = fused_multiply_add(by_first, second - 1.0f, -shift);
    }
    return maximum(pairs[0], pairs[1]);
  }
};

// ... or are so where they are beyond the polynomial, for caps of which no other share would do.
struct CappedProducts {
  CapPolynomial polynomial;
  CapShare share;

  FLASHGEN_DEVICE static CappedProducts of(const Cap& cap) {
    return {CapPolynomial::of(cap), CapShare::of(cap)};
  }

  FLASHGEN_DEVICE float logit(float s) const {
    const float below = s * polynomial.factor(s), beyond = share(s) * share.highest;
    const float logit = polynomial.is_beyond(s) ? beyond : below;
    return s == kForbidden ? -kInfinity : logit;
  }

  template <i32 count>
  FLASHGEN_DEVICE void replace(float (&products)[count], const float (&shift)[2]) const {
#pragma unroll
    for (i32 i = 0; i < count; ++i) {
      const float s = products[i], less = -shift[i / 2 % 2];
      const float below = fused_multiply_add(s, polynomial.factor(s), less);
      const float beyond = fused_multiply_add(share(s), share.highest, less);
      products[i] = polynomial.is_beyond(s) ? beyond : below;
    }
  }
};

}  // namespace flashgen
