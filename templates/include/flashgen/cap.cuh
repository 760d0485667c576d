// Softcaps: scores that are `amplitude * tanh(slope * s)` of products s. Logits hardly ever come near their
// cap, and well below it the tangent is a polynomial, which the softmax takes its exponentials of nearly as
// quickly as of products. The largest product of a lane tells whether all are so far below.
//
// How the tangent of a pair is found depends on its product and on its row alone, so that no row's bits
// depend on others of its warp.
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
  // Whether what is forbidden has a logit of -inf by the polynomial, as the square of what stands for it is
  // infinite.
  FLASHGEN_DEVICE bool forbids() const { return coefficients[2] > 0x1p-100f; }
};

// The largest of a lane's products, without its sign. A NaN may be left out, here and below.
template <i32 count>
FLASHGEN_DEVICE float largest_of(const float (&products)[count]) {
  float largest[4] = {};
#pragma unroll
  for (i32 i = 0; i < count; ++i) largest[i % 4] = maximum(largest[i % 4], magnitude(products[i]));
  return maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
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
  // Beyond this power of two e^2x is no more than that: the share is 1, and two of them have a product.
  static constexpr float kMost = 30.0f;

  float exponent;
  float highest;

  FLASHGEN_DEVICE static CapShare of(const Cap& cap) {
    return {cap.slope * (2.0f * kLog2E), cap.steepness() * reciprocal_approx(cap.slope)};
  }
  // tanh(x) is 1 - 2 / (e^2x + 1).
  FLASHGEN_DEVICE float operator()(float s) const {
    return fused_multiply_add(-2.0f, reciprocal_approx(divisor(s)), 1.0f);
  }
  // Exponents of two neighbours of a row, which share the division, as it is slow.
  FLASHGEN_DEVICE void exponents(float (&products)[2], float shift) const {
    const float of_first = divisor(products[0]), of_second = divisor(products[1]);
    const float both = reciprocal_approx(of_first * of_second) * (-2.0f * highest);
    products[0] = fused_multiply_add(both, of_second, highest - shift);
    products[1] = fused_multiply_add(both, of_first, highest - shift);
  }

 private:
  FLASHGEN_DEVICE float divisor(float s) const {
    return exp2_approx(minimum_or_nan(s * exponent, kMost)) + 1.0f;
  }
};

// What is known of rows between tiles of keys.
struct CapRows {
  // Of a lane's two: whether products of all sizes are taken for shares of the cap, as many are beyond the
  // polynomial. What a share is off by, 4e-7 of the cap, is nothing beside the logarithm of such a row's sum,
  // which is a quarter of the cap at least.
  bool takes_shares[2];
  // Of the warp's: whether all of them do; and whether besides none can grow further above its anchor than
  // the softmax can do without knowing, so that there is nothing to look for.
  bool all;
  bool settled;
  // For softmaxes that can take exponentials once more: whether every row has an anchor, and none has given
  // reason to look at products before exponentials are taken of them.
  bool is_calm;

  // Whether follow() might find something to do, with such highest products of a lane's rows, or if both are
  // no higher.
  template <class Softmax>
  FLASHGEN_DEVICE bool may_change(const Softmax& softmax, const Cap& cap, float highest) const;
  // Sees to it that anchors are near enough to maxima, of which there is one for each row at least once;
  // whether the output so far is to be multiplied by the softmax's factors.
  template <class Softmax>
  FLASHGEN_DEVICE bool follow(Softmax& softmax, const Cap& cap, const float (&highest)[2]);
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
  FLASHGEN_DEVICE void see(float /*s*/, i32 /*number*/) {}
  static constexpr bool replaced = false;
};

// ... or are taken to be, and the largest is found beside their exponentials, ...
struct ProductsSupposedBelowCap : ProductsBelowCap {
  float largest[4] = {};

  FLASHGEN_DEVICE void see(float s, i32 number) {
    largest[number % 4] = maximum(largest[number % 4], magnitude(s));
  }
  FLASHGEN_DEVICE float largest_seen() const {
    return maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
  }
};

// ... exponents that have taken the place of products, ...
struct Exponents {
  static constexpr i32 sums = 1;
  FLASHGEN_DEVICE float relative(float s, float /*shift*/, i32 /*row*/) const { return s; }
  FLASHGEN_DEVICE void see(float /*s*/, i32 /*number*/) {}
  static constexpr bool replaced = true;
};

// ... of rows that take shares of the cap whatever their size, ...
struct SharesOfCap {
  CapShare share;

  template <i32 count>
  FLASHGEN_DEVICE void replace(float (&products)[count], const float (&shift)[2]) const {
#pragma unroll
    for (i32 i = 0; i < count; i += 2) {
      float two[2] = {products[i], products[i + 1]};
      share.exponents(two, shift[i / 2 % 2]);
      products[i] = two[0];
      products[i + 1] = two[1];
    }
  }
};

// ... and of any row. Whichever way it is computed, an exponent is the same number.
struct CappedProducts {
  CapPolynomial polynomial;
  CapShare share;
  // Squared, of each of a lane's two rows.
  float limits[2];

  FLASHGEN_DEVICE static CappedProducts of(const Cap& cap, const CapRows& rows) {
    CappedProducts made = {CapPolynomial::of(cap), CapShare::of(cap)};
#pragma unroll
    for (i32 row = 0; row < 2; ++row)
      made.limits[row] = rows.takes_shares[row] ? 0.0f : squared(made.polynomial.limit);
    return made;
  }

  FLASHGEN_DEVICE bool is_beyond(float s, i32 row) const { return squared(s) >= limits[row]; }
  FLASHGEN_DEVICE float logit(float s, i32 row) const {
    const float below = s * polynomial.factor(s), beyond = share(s) * share.highest;
    const float logit = is_beyond(s, row) ? beyond : below;
    return s == kForbidden ? -kInfinity : logit;
  }

  // Of a warp's strip, where a lane has two columns for each row in turn. What comes of a forbidden product
  // is for the mask to say once more.
  template <i32 count>
  FLASHGEN_DEVICE void replace(float (&products)[count], const float (&shift)[2]) const {
#pragma unroll
    for (i32 i = 0; i < count; i += 2) {
      const i32 row = i / 2 % 2;
      float beyond[2] = {products[i], products[i + 1]};
      share.exponents(beyond, shift[row]);
#pragma unroll
      for (i32 j = 0; j < 2; ++j) {
        const float s = products[i + j];
        const float below = fused_multiply_add(s, polynomial.factor(s), -shift[row]);
        products[i + j] = is_beyond(s, row) ? beyond[j] : below;
      }
    }
  }
};

template <class Softmax>
FLASHGEN_DEVICE bool CapRows::may_change(const Softmax& softmax, const Cap& cap, float highest) const {
  const float most = -maximum(-cap.steepness() * highest, -CapShare::of(cap).highest);
  const bool may_begin = !(takes_shares[0] && takes_shares[1]) && highest >= CapPolynomial::of(cap).limit;
  return may_begin || softmax.might_grow(most);
}

template <class Softmax>
FLASHGEN_DEVICE bool CapRows::follow(Softmax& softmax, const Cap& cap, const float (&highest)[2]) {
  const CappedProducts capped = CappedProducts::of(cap, *this);
  const float top = capped.share.highest, limit = capped.polynomial.limit;
  bool is_safe = !cap.falls();
  const bool begins_rows = warp_any(softmax.has_no_anchor());
  // How many of a row's four lanes have seen products beyond the limit, and how many others nearly such ones;
  // for both rows in one number.
  constexpr i32 kNear = 1, kBeyond = 5, kSecond = 8;
  i32 lanes = 0;
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    const i32 seen = highest[row] >= limit ? kBeyond : highest[row] >= 0.625f * limit ? kNear : 0;
    lanes += seen << kSecond * row;
  }
  lanes += shuffle_xor(lanes, 1);
  lanes += shuffle_xor(lanes, 2);
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    const float found = capped.logit(row_maximum(highest[row]), row);
    // Not for a single key: others are near.
    const bool are_many = (lanes >> kSecond * row & 255) > kBeyond;
    const bool begins = Softmax::foresees && are_many && !takes_shares[row];
    // Rows that have begun are scaled, if the softmax does so, whether others have their warp come here or
    // not.
    const bool grows = softmax.has_grown_to(found, row, takes_shares[row]);
    takes_shares[row] = takes_shares[row] || begins;
    float anchor = softmax.rows.anchor[row];
    if (begins || grows)
      anchor = maximum(anchor, takes_shares[row] ? Softmax::anchor_ahead(found, top) : found);
    softmax.move_anchor(row, anchor);
    is_safe = is_safe && takes_shares[row] && softmax.is_near(top, row);
  }
  all = !warp_any(!(takes_shares[0] && takes_shares[1]));
  settled = !warp_any(!is_safe);
  if constexpr (Softmax::checks) {
    const bool is_not = cap.falls() || takes_shares[0] || takes_shares[1] || softmax.has_no_anchor();
    is_calm = (is_calm || begins_rows) && !warp_any(is_not);
  }
  return warp_any(softmax.factor[0] != 1.0f || softmax.factor[1] != 1.0f);
}

}  // namespace flashgen
