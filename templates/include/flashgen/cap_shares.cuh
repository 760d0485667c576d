// Logits as shares of the cap: share = tanh(slope * s) by exponentials, for tiles with products beyond the
// polynomial's range. There is a short formula, an exact one, and a bound on the row sum for which each is
// accurate enough.
#pragma once
#include "flashgen/cap.cuh"

namespace flashgen {

// The absolute error of an exact share near zero, times the cap, is negligible beside any log-sum-exp for
// caps up to kModestCap. Up to kHighCap it is negligible beside a log-sum-exp of a hundredth of the cap, and
// beside the rounding of P.
constexpr float kModestCap = 100.0f;
constexpr float kHighCap = 1000.0f;

// The share of a product of any size, and the cap times log2(e).
struct CapShare {
  // e^2x is clipped at 2^kMost: the share is 1 there, and a product of four such powers is finite.
  static constexpr float kMost = 25.0f;
  // e^2x is not zero down to 2^kLeast, where the share has long been -1.
  static constexpr float kLeast = -96.0f;

  float exponent;
  float highest;

  FLASHGEN_DEVICE static CapShare of(const Cap& cap) {
    return {cap.slope * (2.0f * kLog2E), cap.steepness() * reciprocal_approx(cap.slope)};
  }
  // log2 of the row sum from which shares are accurate enough.
  FLASHGEN_DEVICE float least_sum() const {
    if (highest < 1.001f * kModestCap * kLog2E) return -kInfinity;
    return highest * (highest < 1.001f * kHighCap * kLog2E ? 0.01f : kBelowCap);
  }
  // Whether shares are accurate for this log2 of a row sum: it is large enough, or so negative that no
  // further keys bring it near zero, or NaN.
  FLASHGEN_DEVICE bool are_exact_for(float sum) const {
    constexpr float kMoreKeys = 24.0f;
    const float least = least_sum();
    return !(sum < least) || sum <= -least - kMoreKeys;
  }
  // Whether a logit of minus the cap has an exponential that is not flushed to zero in either row.
  FLASHGEN_DEVICE bool lowest_counts(const float (&shift)[2]) const {
    constexpr float kFlushed = 128.0f;
    return !(shift[0] >= kFlushed - highest && shift[1] >= kFlushed - highest);
  }
  // tanh(x) = (e^2x - 1) / (e^2x + 1). Near zero the difference is exact, so the absolute error is half that
  // of the exponential.
  FLASHGEN_DEVICE float operator()(float s) const {
    const float power = power_of(s);
    return reciprocal_approx(power + 1.0f) * (power - 1.0f);
  }
  // A row's highest logit, accurate enough for a reference maximum.
  FLASHGEN_DEVICE float logit(float s) const {
    const float logit = (*this)(s)*highest;
    return s == kForbidden ? -kInfinity : logit;
  }
  // Products may be raised to this value before the mask is applied: e^2x is not zero there.
  FLASHGEN_DEVICE float least_product() const {
    return maximum(kLeastAllowed, kLeast * reciprocal_approx(exponent));
  }
  // e^2x, clipped at 2^kMost.
  FLASHGEN_DEVICE float power_of(float s) const { return exp2_approx(minimum_or_nan(s * exponent, kMost)); }
  // All powers of a tile come first, which hides the latency of ex2. With a cap of 100 and logits beyond it,
  // D=64 is 6 % faster than with four powers at a time, and other head dims 0 to 2 %.
  template <i32 count>
  FLASHGEN_DEVICE void take_powers(float (&products)[count]) const {
#pragma unroll
    for (i32 i = 0; i < count; ++i) products[i] = power_of(products[i]);
  }
};

// Replaces powers e^2x by exponents (logit - shift), four elements of a row at a time. The four share one
// slow division: 1 / a = b / (a b). The mask must be applied again afterwards.
//
// The formulas below first replace all products by powers, and then, once the shift of each row is known, the
// powers by exponents.
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

// The short formula. It is less accurate near zero, but accurate enough for caps of at most 50, which the
// plan checks.
struct SharesOfFineCap {
  CapShare share;
  // Added to a power of zero: 1, as to other powers. In a tile that the mask cuts, only forbidden pairs have
  // powers of zero. Adding a tiny number instead makes their exponentials zero, so the mask need not be
  // applied again.
  float added_to_zero;

  FLASHGEN_DEVICE static SharesOfFineCap of(const CapShare& share, bool are_some_forbidden) {
    return {share, are_some_forbidden ? 0x1p-20f : 1.0f};
  }

  template <i32 count>
  FLASHGEN_DEVICE void take_powers(float (&products)[count]) const {
    share.take_powers(products);
  }
  template <i32 count>
  FLASHGEN_DEVICE void replace_powers(float (&powers)[count], const float (&shift)[2]) const {
    replace_by_fours(powers, [&](float (&four)[4], i32 row) { exponents(four, shift[row]); });
  }

 private:
  FLASHGEN_DEVICE void exponents(float (&powers)[4], float shift) const {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) powers[i] += fused_multiply_add_clipped(powers[i], 0x1p100f, added_to_zero);
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

// The exact formula, for any cap.
struct SharesOfCap {
  CapShare share;

  FLASHGEN_DEVICE float logit(float s) const { return share.logit(s); }
  template <i32 count>
  FLASHGEN_DEVICE void take_powers(float (&products)[count]) const {
    share.take_powers(products);
  }
  template <i32 count>
  FLASHGEN_DEVICE void replace_powers(float (&powers)[count], const float (&shift)[2]) const {
    replace_by_fours(powers, [&](float (&four)[4], i32 row) { exponents(four, shift[row]); });
  }

 private:
  FLASHGEN_DEVICE void exponents(float (&powers)[4], float shift) const {
    const float last[2] = {powers[1] + 1.0f, powers[3] + 1.0f};
    const float pairs[2] = {fused_multiply_add(powers[0], last[0], last[0]),
                            fused_multiply_add(powers[2], last[1], last[1])};
    const float part = reciprocal_approx(pairs[0] * pairs[1]) * share.highest;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      const float of_pair = part * pairs[1 - i], first = powers[2 * i], second = powers[2 * i + 1];
      // Recomputes the divisors from the powers, which saves registers.
      const float by_second = fused_multiply_add(of_pair, second, of_pair);
      const float by_first = fused_multiply_add(of_pair, first, of_pair);
      powers[2 * i] = fused_multiply_add(by_second, first - 1.0f, -shift);
      powers[2 * i + 1] = fused_multiply_add(by_first, second - 1.0f, -shift);
    }
  }
};

// Each product by itself: the polynomial in its range, and the exact share beyond. For rows whose sum is too
// small for shares alone.
struct CappedProducts {
  CapPolynomial polynomial;
  CapShare share;

  FLASHGEN_DEVICE static CappedProducts of(const Cap& cap) {
    return {CapPolynomial::of(cap), CapShare::of(cap)};
  }

  // Whether products below -limit may matter in a row with this highest product. If they are kNothing powers
  // of two below it, all of them together are negligible, whatever the polynomial yields for them.
  FLASHGEN_DEVICE bool is_low(float highest) const {
    constexpr float kNothing = 20.0f;
    return (highest + polynomial.limit) * polynomial.coefficients[0] < kNothing && highest != kForbidden;
  }

  FLASHGEN_DEVICE float logit(float s) const {
    const float below = s * polynomial.factor(s), beyond = share(s) * share.highest;
    const float logit = polynomial.is_beyond(s) ? beyond : below;
    return s == kForbidden ? -kInfinity : logit;
  }
};

// The exponents of CappedProducts for a tile.
struct SharesBeyond {
  CappedProducts capped;
  bool are_some_forbidden;

  FLASHGEN_DEVICE float logit(float s) const { return capped.logit(s); }
  // No powers are computed ahead.
  template <i32 count>
  FLASHGEN_DEVICE void take_powers(float (&)[count]) const {}
  // A loop over a few elements at a time keeps this long, rare code out of the instruction cache. The
  // registers rotate, because a loop cannot index them. Groups with only forbidden pairs stay kForbidden,
  // whose exponential is 0.
  template <i32 count>
  FLASHGEN_DEVICE void replace_powers(float (&products)[count], const float (&shift)[2]) const {
    constexpr i32 few = count % 16 == 0 ? 16 : 8;
#pragma unroll 1
    for (i32 from = 0; from < count; from += few) {
      float replaced[few];
      bool are_some = !are_some_forbidden;
#pragma unroll
      for (i32 i = 0; i < few; ++i) {
        replaced[i] = products[i];
        are_some = are_some || replaced[i] != kForbidden;
      }
      if (warp_any(are_some)) replace_few(replaced, shift);
#pragma unroll
      for (i32 i = 0; i < count - few; ++i) products[i] = products[i + few];
#pragma unroll
      for (i32 i = 0; i < few; ++i) products[count - few + i] = replaced[i];
    }
  }

 private:
  template <i32 few>
  FLASHGEN_DEVICE void replace_few(float (&products)[few], const float (&shift)[2]) const {
    const CapPolynomial& polynomial = capped.polynomial;
    const CapShare& share = capped.share;
#pragma unroll
    for (i32 i = 0; i < few; ++i) {
      const float s = products[i], less = -shift[i / 2 % 2];
      const float below = fused_multiply_add(s, polynomial.factor(s), less);
      const float beyond = fused_multiply_add(share(s), share.highest, less);
      products[i] = polynomial.is_beyond(s) ? beyond : below;
    }
  }
};

}  // namespace flashgen
