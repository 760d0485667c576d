// Sine, cosine and tangent of any float: at most 3 units in the last place off, tangents 5. Angles are in
// radians. The GPU's own instructions lose all digits of large angles, and of results near zero.
#pragma once
#include "flashgen/element.cuh"

namespace flashgen {

// An angle less the nearest multiple of pi / 2, and that multiple's number, of which the last two bits count.
struct ReducedAngle {
  float rest;
  u32 quadrant;
};

// Up to this size a multiple's number is found by a product that is rounded once.
constexpr float kLargeAngle = 0x1p20f;

// 32 binary digits of 2 / pi, after a word of zeros.
FLASHGEN_DEVICE u32 two_over_pi(u32 word) {
  switch (word) {
    case 0:
      return 0u;
    case 1:
      return 0xa2f9836eu;
    case 2:
      return 0x4e441529u;
    case 3:
      return 0xfc2757d1u;
    case 4:
      return 0xf534ddc0u;
    case 5:
      return 0xdb629599u;
    case 6:
      return 0x3c439041u;
    default:
      return 0xfe5163abu;
  }
}

// Payne and Hanek's way: the mantissa times those 96 digits of 2 / pi that decide. Digits before these add
// multiples of four quadrants. One copy of it is enough: with one for each pair, kernels take minutes to
// compile.
__attribute__((noinline)) inline ReducedAngle reduced_large_angle(float x) {
  const u32 bits = bits_of(x), exponent = bits >> 23 & 0xffu;
  const u64 mantissa = (bits & 0x7fffffu) | 0x800000u;
  const u32 first = exponent - 120u, word = first >> 5, shift = first & 31u;
  u64 digits[3];
#pragma unroll
  for (u32 i = 0; i < 3; ++i) {
    const u64 both = static_cast<u64>(two_over_pi(word + i)) << 32 | two_over_pi(word + i + 1);
    digits[i] = both << shift >> 32;
  }
  // In units of 2^-62 of a quadrant, without whole turns.
  const u64 angle = (mantissa * digits[0] << 32) + mantissa * digits[1] + (mantissa * digits[2] >> 32);
  const u32 quadrant = static_cast<u32>((angle + (u64{1} << 61)) >> 62);
  const i64 rest = static_cast<i64>(angle - (static_cast<u64>(quadrant) << 62));
  const float radians = static_cast<float>(rest) * 0x1.921fb6p-62f;
  if (exponent == 255u) return {x - x, 0u};
  return bits >> 31 == 0 ? ReducedAngle{radians, quadrant} : ReducedAngle{-radians, 0u - quadrant};
}

FLASHGEN_DEVICE ReducedAngle reduced_angle(float x) {
  if (float_of(bits_of(x) & 0x7fffffffu) >= kLargeAngle) return reduced_large_angle(x);
  // Adding this leaves a whole number in the low bits of the mantissa.
  constexpr float kToWhole = 0x1.8p23f;
  const float whole = fused_multiply_add(x, 0x1.45f306p-1f, kToWhole);
  const float number = whole - kToWhole;
  float rest = fused_multiply_add(number, -0x1.921fb6p+0f, x);
  rest = fused_multiply_add(number, 0x1.777a5cp-25f, rest);
  rest = fused_multiply_add(number, 0x1.ee59dap-50f, rest);
  return {rest, bits_of(whole)};
}

// Of the rest of an angle: polynomials, fitted up to 0.84.
FLASHGEN_DEVICE float sine_of_rest(float x) {
  const float z = x * x;
  float series = -0x1.985676p-13f;
  series = fused_multiply_add(series, z, 0x1.11046cp-7f);
  series = fused_multiply_add(series, z, -0x1.55553ep-3f);
  return fused_multiply_add(series * z, x, x);
}
FLASHGEN_DEVICE float cosine_of_rest(float x) {
  const float z = x * x;
  float series = 0x1.98f9fep-16f;
  series = fused_multiply_add(series, z, -0x1.6c08b6p-10f);
  series = fused_multiply_add(series, z, 0x1.555544p-5f);
  series = fused_multiply_add(series, z, -0.5f);
  return fused_multiply_add(series, z, 1.0f);
}

// The sine of an angle and `quadrant` right angles.
FLASHGEN_DEVICE float sine_from(float rest, u32 quadrant) {
  const float value = (quadrant & 1u) != 0 ? cosine_of_rest(rest) : sine_of_rest(rest);
  return float_of(bits_of(value) ^ (quadrant & 2u) << 30);
}

FLASHGEN_DEVICE float sine(float x) {
  const ReducedAngle angle = reduced_angle(x);
  return sine_from(angle.rest, angle.quadrant);
}

FLASHGEN_DEVICE float cosine(float x) {
  const ReducedAngle angle = reduced_angle(x);
  return sine_from(angle.rest, angle.quadrant + 1u);
}

FLASHGEN_DEVICE float tangent(float x) {
  const ReducedAngle angle = reduced_angle(x);
  const float sine = sine_of_rest(angle.rest), cosine = cosine_of_rest(angle.rest);
  return (angle.quadrant & 1u) != 0 ? -cosine / sine : sine / cosine;
}

}  // namespace flashgen
