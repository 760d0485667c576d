// Bytes of words, and conversions of 8-bit floats.
#pragma once
#include "flashgen/ptx/types.cuh"

namespace flashgen {

// A word of four of eight bytes: byte i is the one that hexadecimal digit i of the selector counts. Bytes 0
// to 3 are those of a, 4 to 7 those of b.
FLASHGEN_DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
  u32 selected;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(selected) : "r"(a), "r"(b), "r"(selector));
  return selected;
}

// Both products of two pairs of numbers, rounded.
FLASHGEN_DEVICE u32 multiply_halves(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Four numbers, exactly, two in each word (sm_89 and later). Both conversions stand together, because the
// assembler reads the halves of a register where they are only if nothing but a move splits it.
FLASHGEN_DEVICE void halves_of(e4m3_t, u32 word, u32& first, u32& second) {
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "mov.b32 {low, high}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n\t"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n\t"
      "}"
      : "=r"(first), "=r"(second)
      : "r"(word));
}

// Four numbers of a word, each the nearest to a float, of two as near the even one. What is too large becomes
// the largest number, and NaN stays NaN (sm_89 and later).
FLASHGEN_DEVICE u32 pack_four(e4m3_t, float a, float b, float c, float d) {
  u32 word;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t"
      "}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

}  // namespace flashgen
