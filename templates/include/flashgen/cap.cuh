// Softcaps: logits `amplitude * tanh(slope * s)` of products s = Q K^T. Logits are hardly ever near the cap.
// Well below it a polynomial computes tanh, almost for free. A vote on the largest product of each lane
// decides whether a tile is below the cap.
//
// If some product is beyond the polynomial's range, all logits of the tile are computed as shares of the cap:
// tanh by exponentials (cap_shares.cuh). All rows of a warp take the same branch, so the rounding of a row
// may depend on the other rows of its warp.
#pragma once
#include "flashgen/expression.cuh"
#include "flashgen/panel.cuh"
#include "flashgen/softmax.cuh"

namespace flashgen {

// For |x| < kBelowCap, tanh(x) is x times a polynomial of x^2, with a relative error of at most 5.6e-7
// (fitted). One more term would reach to .5, but costs an instruction per pair.
constexpr float kBelowCap = 0.265f;
constexpr float kTangent[3] = {0x1.ffffeep-1f, -0x1.552fb2p-2f, 0x1.05ca76p-3f};

// The product of a pair that the mask forbids. Lower products are raised first (raise_lowest).
constexpr float kForbidden = -0x1.fffffep+127f;

// A softcap: its derivative at zero times log2(e), and the magnitude of the slope.
struct Cap {
  float signed_steepness;
  float slope;

  FLASHGEN_DEVICE static Cap of(float amplitude, float slope) {
    return {amplitude * slope * kLog2E, magnitude(slope)};
  }
  // Whether logits fall as products rise. The products are then negated.
  FLASHGEN_DEVICE bool falls() const { return signed_steepness < 0.0f; }
  FLASHGEN_DEVICE float steepness() const { return magnitude(signed_steepness); }
};

// The logit times log2(e): s times a polynomial of s^2, for |s| below a limit.
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
    // If powers of the slope underflow, the last term must not matter. If they overflow, no product is below
    // the limit.
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
  // Compares squares, because the polynomial needs the square anyway.
  FLASHGEN_DEVICE bool is_beyond(float s) const { return squared(s) >= squared(limit); }
  // Also true for NaN, which may have hidden other products.
  FLASHGEN_DEVICE bool might_be_beyond(float square) const { return !(square < squared(limit)); }
  // Whether the polynomial maps kForbidden to -inf: its square is infinite.
  FLASHGEN_DEVICE bool forbids() const { return coefficients[2] > 0x1p-100f; }
};

// The largest of three non-negative floats. As integers they have the same order, and one instruction
// compares three. NaN is the largest or is ignored.
FLASHGEN_DEVICE float largest_of_three(float a, float b, float c) {
  const i32 bits[3] = {static_cast<i32>(bits_of(a)), static_cast<i32>(bits_of(b)),
                       static_cast<i32>(bits_of(c))};
  const i32 of_two = bits[0] > bits[1] ? bits[0] : bits[1];
  return float_of(static_cast<u32>(of_two > bits[2] ? of_two : bits[2]));
}

// The largest magnitude of a lane's products. May ignore NaN, as the functions below.
template <i32 count>
FLASHGEN_DEVICE float largest_of(const float (&products)[count]) {
  float largest[4] = {};
#pragma unroll
  for (i32 i = 0; i < count; ++i) largest[i % 4] = maximum(largest[i % 4], magnitude(products[i]));
  return maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
}

// The lowest of a lane's products, if one is negative: as unsigned integers negative floats are the largest.
// The result may be a NaN, which hides the others.
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

// Whether a lane has a product below -limit, other than kForbidden. As unsigned integers negative floats are
// the largest. An offset wraps kForbidden, the lowest of them, around to zero.
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
  // Compares bits again, so that NaN does not count.
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

// Negates products, if logits fall as products rise.
template <i32 count>
FLASHGEN_DEVICE void turn_round(float (&products)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) products[i] = -products[i];
}

// Before the mask is applied: raises products to `least`, so that none equals kForbidden.
constexpr float kLeastAllowed = 0.5f * kForbidden;
template <i32 count>
FLASHGEN_DEVICE void raise_lowest(float (&products)[count], float least = kLeastAllowed) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) products[i] = products[i] < least ? least : products[i];
}

// Arguments of the softmax. Products that are known to be below the limit:
struct ProductsBelowCap {
  static constexpr i32 sums = 2;
  CapPolynomial polynomial;

  FLASHGEN_DEVICE float relative(float s, float shift, i32 /*row*/) const {
    return fused_multiply_add(s, polynomial.factor(s), -shift);
  }
  FLASHGEN_DEVICE void see(float /*first*/, float /*second*/) {}
  static constexpr bool replaced = false;
};

// Products that are assumed to be below the limit. The largest is found along with the exponentials.
struct ProductsSupposedBelowCap : ProductsBelowCap {
  // Compares squares, because the polynomial needs them anyway.
  float largest_square = 0.0f;

  FLASHGEN_DEVICE void see(float first, float second) {
    largest_square = largest_of_three(largest_square, squared(first), squared(second));
  }
};

// Exponents (logit - shift) that have already replaced the products.
struct Exponents {
  static constexpr i32 sums = 1;
  FLASHGEN_DEVICE float relative(float s, float /*shift*/, i32 /*row*/) const { return s; }
  FLASHGEN_DEVICE void see(float /*first*/, float /*second*/) {}
  static constexpr bool replaced = true;
};

}  // namespace flashgen
