// What ptx/eight_bits.cuh has, on a CPU.
#pragma once

namespace flashgen {

FLASHGEN_DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 selected = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 chosen = selector >> 4 * i & 7u;
    selected |= static_cast<u32>(bytes >> 8 * chosen & 0xffu) << 8 * i;
  }
  return selected;
}

FLASHGEN_DEVICE u32 multiply_halves(u32 a, u32 b) {
  const float low = half_to_float(static_cast<u16>(a)) * half_to_float(static_cast<u16>(b));
  const float high = half_to_float(static_cast<u16>(a >> 16)) * half_to_float(static_cast<u16>(b >> 16));
  return pack(half_t{}, low, high);
}

FLASHGEN_DEVICE float float_of_e4m3(u32 bits) {
  const u32 exponent = bits >> 3 & 15u;
  if ((bits & 0x7fu) == 0x7fu) return float_of(0x7fffffffu);
  const float magnitude = exponent == 0 ? static_cast<float>(bits & 7u) * 0x1p-9f
                                        : float_of((exponent + 120u) << 23 | (bits & 7u) << 20);
  return (bits & 0x80u) != 0 ? -magnitude : magnitude;
}
FLASHGEN_DEVICE void halves_of(e4m3_t, u32 word, u32& first, u32& second) {
  first = pack(half_t{}, float_of_e4m3(word & 0xffu), float_of_e4m3(word >> 8 & 0xffu));
  second = pack(half_t{}, float_of_e4m3(word >> 16 & 0xffu), float_of_e4m3(word >> 24));
}

FLASHGEN_DEVICE u32 e4m3_bits(float x) {
  const u32 sign = bits_of(x) >> 24 & 0x80u;
  const float magnitude = __builtin_fabsf(x);
  if (x != x) return 0x7f;
  if (magnitude >= 448.0f) return sign | 0x7eu;
  // The exponent of the last bit, by which the hardware's rounding of floats is the right one.
  const int exponent = magnitude < 0x1p-6f ? -9 : __builtin_ilogbf(magnitude) - 3;
  const u32 units = static_cast<u32>(__builtin_rintf(__builtin_ldexpf(magnitude, -exponent)));
  // 16 units carry into the exponent.
  return sign | (static_cast<u32>(exponent + 9) * 8 + units);
}
FLASHGEN_DEVICE u32 pack_four(e4m3_t, float a, float b, float c, float d) {
  return e4m3_bits(a) | e4m3_bits(b) << 8 | e4m3_bits(c) << 16 | e4m3_bits(d) << 24;
}

}  // namespace flashgen
