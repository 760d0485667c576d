// Softcaps: scores that are `amplitude * tanh(slope * s)` of products s. Logits hardly ever come near their
// cap, and well below it the tangent is a polynomial, which the softmax takes its exponentials of nearly as
// quickly as of products. The largest product of a lane tells whether all are so far below.
//
// How the tangent of a pair is found depends on its product and on its row alone, so that no row's bits
// depend on others of its warp.
#pragma once
#include "flashgen/expression.cuh"
#include "flashgen/panel.cuh"

namespace flashgen {

// Where |x| is below kBelowCap, tanh(x) is taken for x times a polynomial of x^2: its relative error
// is 5.6e-7 at most (fitted). One more term would reach to .5, and is an instruction of every pair.
constexpr float kBelowCap = 0.265f;
constexpr float kTangent[3] = {0x1.ffffeep-1f, -0x1.552fb2p-2f, 0x1.05ca76p-3f};

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
  float coefficients[3];
  float limit;

  FLASHGEN_DEVICE static CapPolynomial of(const Cap& cap) {
    const float square = squared(cap.slope);
    CapPolynomial made;
    made.coefficients[0] = cap.steepness * kTangent[0];
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

// How much of the cap a product of any size has, and what the cap is in powers of two.
struct CapShare {
  float exponent;
  float highest;

  FLASHGEN_DEVICE static CapShare of(const Cap& cap) {
    return {cap.slope * (2.0f * kLog2E), cap.steepness * reciprocal_approx(cap.slope)};
  }
  // tanh(x) is 1 - 2 / (e^2x + 1).
  FLASHGEN_DEVICE float operator()(float s) const {
    return fused_multiply_add(-2.0f, reciprocal_approx(exp2_approx(s * exponent) + 1.0f), 1.0f);
  }
};

// Rows whose anchors are so near the cap that none can grow far above it: of a lane's two, and of its warp's.
struct NearCap {
  bool rows[2];
  bool some;
  bool all;

  template <class Softmax>
  FLASHGEN_DEVICE static NearCap of(const Cap& cap, const Softmax& softmax) {
    const float highest = magnitude(CapShare::of(cap).highest);
    NearCap near = {{softmax.is_near(highest, 0), softmax.is_near(highest, 1)}};
    near.some = warp_any(near.rows[0] || near.rows[1]);
    near.all = !warp_any(!near.rows[0] || !near.rows[1]);
    return near;
  }
};

// For the softmax: products that are below the limit, ...
struct ProductsBelowCap {
  static constexpr i32 sums = 1;
  CapPolynomial polynomial;

  FLASHGEN_DEVICE float relative(float s, float shift, i32 /*row*/) const {
    return fused_multiply_add(s, polynomial.factor(s), -shift);
  }
};

// ... products of rows near their cap, which need no polynomial: what a share is off by, 2.7e-7 of the cap,
// is nothing beside the logarithm of such a row's sum, ...
struct SharesOfCap {
  static constexpr i32 sums = 1;
  CapShare share;

  FLASHGEN_DEVICE float relative(float s, float shift, i32 /*row*/) const {
    return fused_multiply_add(share(s), share.highest, -shift);
  }
};

// ... and products of any size and of any row.
struct CappedProducts {
  static constexpr i32 sums = 1;
  CapPolynomial polynomial;
  CapShare share;
  // Of each of a lane's two rows.
  float limits[2];

  FLASHGEN_DEVICE static CappedProducts of(const Cap& cap, const NearCap& near) {
    CappedProducts made = {CapPolynomial::of(cap), CapShare::of(cap)};
#pragma unroll
    for (i32 row = 0; row < 2; ++row) made.limits[row] = near.rows[row] ? 0.0f : made.polynomial.limit;
    return made;
  }

  FLASHGEN_DEVICE bool is_beyond(float s, i32 row) const { return magnitude(s) >= limits[row]; }
  FLASHGEN_DEVICE float logit(float s, i32 row) const {
    return is_beyond(s, row) ? share(s) * share.highest : s * polynomial.factor(s);
  }
  FLASHGEN_DEVICE float relative(float s, float shift, i32 row) const {
    const float below = fused_multiply_add(s, polynomial.factor(s), -shift);
    const float beyond = fused_multiply_add(share(s), share.highest, -shift);
    return is_beyond(s, row) ? beyond : below;
  }
};

// The same where more is to be known of them: products that are below their limit stay as they are, or are
// negated where logits fall, and others are replaced by their share of the cap, times a power of two with
// which it is beyond the limit, too. So they are in the order of their logits, those that are forbidden may
// be -inf, and what the exponent of each comes to is the same number.
struct OrderedProducts {
  // Of logits that rise.
  CappedProducts capped;
  // What a share is multiplied by, and the cap over that.
  float stretch;
  float rest;

  FLASHGEN_DEVICE static OrderedProducts of(const Cap& cap, const NearCap& near) {
    OrderedProducts made;
    made.capped = CappedProducts::of({magnitude(cap.steepness), cap.slope}, near);
    // The least share beyond a limit is more than 2^-5.
    const i32 exponent =
        smaller(static_cast<i32>(bits_of(made.capped.polynomial.limit) & 0x7f800000u), 0x78000000);
    made.stretch = maximum(float_of(static_cast<u32>(exponent + (6 << 23))), 0x1p-100f);
    // Not 0, so that what is forbidden stays -inf.
    made.rest = maximum(made.capped.share.highest * reciprocal_approx(made.stretch), 0x1p-100f);
    return made;
  }

  static constexpr i32 sums = 1;
  FLASHGEN_DEVICE float logit(float s, i32 row) const { return s * factor(s, row); }
  FLASHGEN_DEVICE float relative(float s, float shift, i32 row) const {
    return fused_multiply_add(s, factor(s, row), -shift);
  }

  // Of a warp's strip, where a lane has two columns for each row in turn.
  template <i32 count>
  FLASHGEN_DEVICE void put_in_order(float (&products)[count], const Cap& cap) const {
    const bool falls = cap.steepness < 0.0f;
    const float stretched = falls ? -stretch : stretch;
    // So many are replaced at once, if one of them needs it.
    constexpr i32 few = 8;
#pragma unroll
    for (i32 group = 0; group < count; group += few) {
      bool is_any_beyond = falls;
#pragma unroll
      for (i32 i = group; i < smaller(group + few, count); ++i)
        is_any_beyond = capped.is_beyond(products[i], i / 2 % 2) || is_any_beyond;
      if (!warp_any(is_any_beyond)) continue;
#pragma unroll
      for (i32 i = group; i < smaller(group + few, count); ++i) {
        const float s = products[i];
        products[i] = capped.is_beyond(s, i / 2 % 2) ? capped.share(s) * stretched : falls ? -s : s;
      }
    }
  }

 private:
  FLASHGEN_DEVICE float factor(float s, i32 row) const {
    return capped.is_beyond(s, row) ? rest : capped.polynomial.factor(s);
  }
};

}  // namespace flashgen
