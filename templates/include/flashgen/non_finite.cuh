// Finding NaN and infinity.
#pragma once
#include "flashgen/element.cuh"

namespace flashgen {

// Adding this to the bits of a magnitude carries into the sign exactly when the exponent is all ones.
template <class T>
constexpr u32 kToInfinity = 0;
template <>
constexpr u32 kToInfinity<half_t> = 0x04000400u;
template <>
constexpr u32 kToInfinity<bfloat16_t> = 0x00800080u;
template <>
constexpr u32 kToInfinity<float32_t> = 0x00800000u;
template <>
constexpr u32 kToInfinity<e4m3_t> = 0x01010101u;  // all bits of its NaN are ones, and it has no infinity
template <>
constexpr u32 kToInfinity<e5m2_t> = 0x04040404u;
template <class T>
constexpr u32 kSigns = kIsFloat<T>      ? 0x80000000u
                       : sizeof(T) == 2 ? 0x80008000u
                                        : 0x80808080u;

// The sign bits of those elements of a word that are not finite.
template <class T>
FLASHGEN_DEVICE u32 non_finite_signs(u32 word) {
  return ((word & ~kSigns<T>)+kToInfinity<T>)&kSigns<T>;
}

// 0, or NaN if an element of a lane's first row, or the first one of its second row, is not finite. That is
// enough: an operand that reaches rows it must not reach makes a column of all rows NaN, or a whole row.
template <i32 count>
FLASHGEN_DEVICE float first_row_times_zero(const float (&strip)[count]) {
  float zero[2] = {strip[2] * 0.0f, 0.0f};
#pragma unroll
  for (i32 i = 0; i < count / 2; ++i)
    zero[i % 2] = fused_multiply_add(strip[4 * (i / 2) + i % 2], 0.0f, zero[i % 2]);
  return zero[0] + zero[1];
}

}  // namespace flashgen
