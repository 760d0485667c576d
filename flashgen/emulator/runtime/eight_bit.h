// 8-bit floats: e4m3 has no infinity and one NaN; e5m2 is the upper half of a 16-bit float.
#pragma once
#include "matrix.h"

namespace flashgen::emu {

// The value of each byte.
struct EightBitFloats {
  float values[256];
};

inline float decode_eight_bits(u32 bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const u32 mantissa = bits & ((1u << mantissa_bits) - 1);
  const auto fraction = static_cast<float>(mantissa) / static_cast<float>(1 << mantissa_bits);
  const float magnitude = exponent == 0 ? __builtin_ldexpf(fraction, 1 - bias)
                                        : __builtin_ldexpf(1.0f + fraction, exponent - bias);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

inline const EightBitFloats& e4m3_floats() {
  static const EightBitFloats floats = [] {
    EightBitFloats table;
    for (u32 bits = 0; bits < 256; ++bits) {
      table.values[bits] = (bits & 0x7f) == 0x7f ? __builtin_nanf("") : decode_eight_bits(bits, 4, 3);
    }
    return table;
  }();
  return floats;
}

inline const EightBitFloats& e5m2_floats() {
  static const EightBitFloats floats = [] {
    EightBitFloats table;
    for (u32 bits = 0; bits < 256; ++bits) {
      const u32 magnitude = bits & 0x7f;
      const float special = magnitude == 0x7c ? __builtin_inff() : __builtin_nanf("");
      table.values[bits] = magnitude < 0x7c     ? decode_eight_bits(bits, 5, 2)
                           : (bits & 0x80) != 0 ? -special
                                                : special;
    }
    return table;
  }();
  return floats;
}

// m16n8k32. Registers hold four elements, which Operands keeps as two pairs.
inline void multiply_add_eight_bit(const Operands& operands, Accumulators& accumulators,
                                   const EightBitFloats& floats) {
  for (i32 row = 0; row < 16; ++row) {
    Floats sum = accumulators.rows[row];
    for (i32 pair = 0; pair < 16; ++pair) {
      const u16 a = operands.a[row / 8 + pair / 8 * 2][row % 8][pair % 8];
      Floats low, high;
      for (i32 column = 0; column < 8; ++column) {
        low[column] = floats.values[operands.b[pair][column] & 0xff];
        high[column] = floats.values[operands.b[pair][column] >> 8];
      }
      sum += floats.values[a & 0xff] * low + floats.values[a >> 8] * high;
    }
    accumulators.rows[row] = sum;
  }
}

}  // namespace flashgen::emu
