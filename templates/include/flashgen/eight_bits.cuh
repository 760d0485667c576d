// 8-bit floats: e4m3 has four bits of exponent, no infinity and one NaN; e5m2 is the upper half of a 16-bit
// float. Every one of them is a 16-bit float, too.
#pragma once
#include "flashgen/element.cuh"
#include "flashgen/primitives_eight_bits.cuh"

namespace flashgen {

template <class E>
struct EightBitFormat;
template <>
struct EightBitFormat<e4m3_t> {
  static constexpr i32 mantissa_bits = 3;
  static constexpr i32 bias = 7;
  static constexpr u32 largest = 0x7e;
};
template <>
struct EightBitFormat<e5m2_t> {
  static constexpr i32 mantissa_bits = 2;
  static constexpr i32 bias = 15;
  static constexpr u32 largest = 0x7b;
};

// The nearest number, of two as near the even one. What is too large becomes the largest number, and NaN
// stays NaN.
template <class E>
FLASHGEN_DEVICE E quantized(float x) {
  using Format = EightBitFormat<E>;
  constexpr i32 dropped = 23 - Format::mantissa_bits;
  // Bits of the smallest normal number, and of a float whose last bit is worth as much as the smallest
  // number.
  constexpr u32 least_normal = static_cast<u32>(128 - Format::bias) << 23;
  constexpr u32 rounder = static_cast<u32>(128 - Format::bias + dropped) << 23;
  const u32 sign = bits_of(x) >> 24 & 0x80u, magnitude = bits_of(x) & 0x7fffffffu;
  u32 code;
  if (magnitude > 0x7f800000u) {
    return {0x7f};
  } else if (magnitude < least_normal) {
    code = bits_of(float_of(magnitude) + float_of(rounder)) - rounder;
  } else {
    const u32 even = magnitude >> dropped & 1u;
    code = (magnitude - least_normal + (1u << 23) + (1u << (dropped - 1)) - 1u + even) >> dropped;
    code = code < Format::largest ? code : Format::largest;
  }
  return {static_cast<u8>(sign | code)};
}

// Two e4m3 numbers in the upper bytes of 16-bit halves, by integer arithmetic. Shifted right by one place
// they are 16-bit floats 2^8 times too small. NaN is the one whose magnitude has all bits set.
FLASHGEN_DEVICE u32 half_pair_by_bits(u32 upper_bytes) {
  const u32 magnitudes = (upper_bytes >> 1) & 0x3f803f80u;
  const u32 not_numbers = (magnitudes + 0x00800080u) & 0x40004000u;
  constexpr u32 two_factors = 0x5c005c00u;  // 2^8
  return multiply_halves(magnitudes | (upper_bytes & 0x80008000u), two_factors) | (not_numbers >> 1);
}

// The four numbers of a word, in order, as two words of 16-bit floats. `by_instruction`: the GPU has one for
// it.
template <bool by_instruction>
FLASHGEN_DEVICE void to_halves(e4m3_t, u32 word, u32& first, u32& second) {
  if constexpr (by_instruction) {
    halves_of(e4m3_t{}, word, first, second);
  } else {
    first = half_pair_by_bits(select_bytes(word, 0, 0x1404));
    second = half_pair_by_bits(select_bytes(word, 0, 0x3424));
  }
}
template <bool by_instruction>
FLASHGEN_DEVICE void to_halves(e5m2_t, u32 word, u32& first, u32& second) {
  first = select_bytes(word, 0, 0x1404);
  second = select_bytes(word, 0, 0x3424);
}

}  // namespace flashgen
