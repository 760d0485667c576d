// Sums of floats that come out the same in whatever order they are added: every float is a whole multiple of
// the smallest one, 2^-149, so a sum kept as a wide whole number is exact.
//
// An accumulator is kBins signed 64-bit numbers, of which bin i counts 2^(24 i - 149): a float adds to two
// neighboring bins, at most 2^24 in magnitude to each, so 2^39 additions fit. One more number counts what was
// not finite; it makes the sum NaN. The accumulators of a tensor lie bin by bin: neighboring elements, whose
// sums tend to be of a size, are neighbors in memory.
#pragma once
#include "flashgen/element.cuh"

namespace flashgen {

constexpr i32 kBinBits = 24;
constexpr i32 kBins = 12;
constexpr i32 kAccumulatorWords = kBins + 1;

struct Accumulators {
  u64* words;
  i64 elements;

  FLASHGEN_DEVICE u64* word(i64 element, i32 bin) const { return words + bin * elements + element; }

  FLASHGEN_DEVICE void clear(i64 element) const {
#pragma unroll
    for (i32 i = 0; i < kAccumulatorWords; ++i) *word(element, i) = 0;
  }

  // Any number of threads of any blocks at once.
  FLASHGEN_DEVICE void add(i64 element, float x) const {
    const u32 bits = bits_of(x), exponent = bits >> 23 & 0xffu, fraction = bits & 0x7fffffu;
    if ((bits & 0x7fffffffu) == 0) return;
    if (exponent == 0xffu) {
      reduce_add(word(element, kBins), 1);
      return;
    }
    // Below the normal numbers the exponent stays where it is, and the leading one is missing.
    const u32 mantissa = exponent != 0 ? fraction | 0x800000u : fraction;
    const i32 place = exponent != 0 ? static_cast<i32>(exponent) - 1 : 0;
    const u64 shifted = static_cast<u64>(mantissa) << (place % kBinBits);
    const u64 low = shifted & ((1u << kBinBits) - 1), high = shifted >> kBinBits;
    const bool negative = (bits & 0x80000000u) != 0;
    u64* const bin = word(element, place / kBinBits);
    if (low != 0) reduce_add(bin, negative ? 0 - low : low);
    if (high != 0) reduce_add(bin + elements, negative ? 0 - high : high);
  }

  // The sum. Of a double's 53 bits at least 30 are right, and the last one is odd where something was cut
  // off: rounded to a float, that is the exact sum rounded.
  FLASHGEN_DEVICE double sum(i64 element) const {
    if (*word(element, kBins) != 0) return __builtin_bit_cast(double, 0x7ff8000000000000ull);
    i64 digits[kDigits];
    const bool negative = carry(element, 1, digits) < 0;
    if (negative) carry(element, -1, digits);
    u64 leading = 0, cut_off = 0;
    i32 place = 0;
#pragma unroll
    for (i32 i = kDigits - 1; i >= 0; --i) {
      const u64 digit = static_cast<u64>(digits[i]);
      const bool fits = leading < 1u << 29;
      cut_off |= fits ? 0 : digit;
      leading = fits ? leading << kBinBits | digit : leading;
      place = fits ? i : place;
    }
    const u64 exponent = static_cast<u64>(1023 - 149 + kBinBits * place);
    const double size = static_cast<double>(leading | static_cast<u64>(cut_off != 0)) *
                        __builtin_bit_cast(double, exponent << 52);
    return negative ? -size : size;
  }

 private:
  // What overflows the last bin takes two digits more.
  static constexpr i32 kDigits = kBins + 2;

  // The bins, times `sign`, as digits of 24 bits, all but the last of which are not negative; gives the last.
  FLASHGEN_DEVICE i64 carry(i64 element, i64 sign, i64 (&digits)[kDigits]) const {
    i64 rest = 0;
#pragma unroll
    for (i32 i = 0; i < kDigits; ++i) {
      if (i < kBins) rest += sign * static_cast<i64>(*word(element, i));
      digits[i] = i + 1 < kDigits ? rest & ((1 << kBinBits) - 1) : rest;
      rest >>= kBinBits;
    }
    return digits[kDigits - 1];
  }
};

}  // namespace flashgen
