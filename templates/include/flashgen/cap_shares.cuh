// Logits that are near their cap, as shares of it: of few instructions, or exact; and how large a row's sum
// has to be for these.
#pragma once
#include "flashgen/cap.cuh"

namespace flashgen {

// What a share of the cap is off by near zero, where it is computed exactly, is nothing beside any logarithm
// of a sum up to the first of these caps. Up to the second it is nothing beside one that is a hundredth of
// the cap, and nothing to what probabilities are rounded to.
constexpr float kModestCap = 100.0f;
constexpr float kHighCap = 1000.0f;

// How much of the cap a product of any size has, and what the cap is in powers of two.
struct CapShare {
  // Beyond this power of two e^2x is no more than that: the share is 1, and four of them have a product.
  static constexpr float kMost = 25.0f;
  // Down to this one it is not zero, and long before the share is -1.
  static constexpr float kLeast = -96.0f;

  float exponent;
  float highest;

  FLASHGEN_DEVICE static CapShare of(const Cap& cap) {
    return {cap.slope * (2.0f * kLog2E), cap.steepness() * reciprocal_approx(cap.slope)};
  }
  // How large a row's sum has to be, as a power of two, for its logits to be taken as shares.
  FLASHGEN_DEVICE float least_sum() const {
    if (highest < 1.001f * kModestCap * kLog2E) return -kInfinity;
    return highest * (highest < 1.001f * kHighCap * kLog2E ? 0.01f : kBelowCap);
  }
  // Whether a sum is as large, or so far below zero that it will be, whatever keys come; or it is no number.
  FLASHGEN_DEVICE bool are_exact_for(float sum) const {
    constexpr float kMoreKeys = 24.0f;
    const float least = least_sum();
    return !(sum < least) || sum <= -least - kMoreKeys;
  }
  // Whether a logit as far below zero as the cap has an exponential beside what was subtracted of either row,
  // or it is so small that it is flushed to zero.
  FLASHGEN_DEVICE bool lowest_counts(const float (&shift)[2]) const {
    constexpr float kFlushed = 128.0f;
    return !(shift[0] >= kFlushed - highest && shift[1] >= kFlushed - highest);
  }
  // tanh(x) is (e^2x - 1) / (e^2x + 1): near zero it is off by half of what the exponential is, as the
  // difference is exact there.
  FLASHGEN_DEVICE float operator()(float s) const {
    const float power = power_of(s);
    return reciprocal_approx(power + 1.0f) * (power - 1.0f);
  }
  // A row's highest logit, as near as is of use to find out what its others are relative to.
  FLASHGEN_DEVICE float logit(float s) const {
    const float logit = (*this)(s)*highest;
    return s == kForbidden ? -kInfinity : logit;
  }
  // Products as far below, and further, may be taken for it before a mask is applied: there is a power of it.
  FLASHGEN_DEVICE float least_product() const {
    return maximum(kLeastAllowed, kLeast * reciprocal_approx(exponent));
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

// Finds exponents of e^2x for two pairs of a row at once, of a warp's strip, where a lane has two columns for
// each row in turn. What comes of a forbidden product is for the mask to say once more. Four share a
// division, as it is slow: 1 / a is b / (a b).
//
// All ways that follow take the powers of all products first, as it hides what each of them takes, and what
// else there is to be found out: then what is subtracted of each row is to be known.
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

// Logits are shares of a low cap whatever their size, off by a little more near zero, which is nothing beside
// any logarithm of a sum if the cap is 50 at most (the plan says so), ...
struct SharesOfFineCap {
  CapShare share;
  // What is added to a power of zero: 1, as to others. But where some pairs are forbidden no others have such
  // powers, and a number is added that is so small that the share is as low as exponentials of it are zero.
  // So those need not be asked for among others, nor taken out behind them.
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

// ... or of any cap, computed exactly, ...
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
      // Divisors once more, times what they share: the powers are there, and they need no registers
      // meanwhile.
      const float by_second = fused_multiply_add(of_pair, second, of_pair);
      const float by_first = fused_multiply_add(of_pair, first, of_pair);
      powers[2 * i] = fused_multiply_add(by_second, first - 1.0f, -shift);
      powers[2 * i + 1] = fused_multiply_add(by_first, second - 1.0f, -shift);
    }
  }
};

// ... or, where no other share would do, are so beyond the polynomial, ...
struct CappedProducts {
  CapPolynomial polynomial;
  CapShare share;

  FLASHGEN_DEVICE static CappedProducts of(const Cap& cap) {
    return {CapPolynomial::of(cap), CapShare::of(cap)};
  }

  // Whether a row with such a highest product may have others below the polynomial's lower end that count
  // beside it. So many powers of two below, all keys together are nothing, whatever the polynomial makes of
  // them.
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

// ... of a tile that a mask may cut.
struct SharesBeyond {
  CappedProducts capped;
  bool are_some_forbidden;

  FLASHGEN_DEVICE float logit(float s) const { return capped.logit(s); }
  // There are none to be taken ahead.
  template <i32 count>
  FLASHGEN_DEVICE void take_powers(float (&)[count]) const {}
  // A few at a time, which then make room for the next ones: it is a long text for each, and hardly ever
  // wanted. What a multiprocessor fetches for it, it no longer has of what it does in other steps. Where all
  // of a warp's are forbidden they stay as they are, which no exponential is left of.
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
