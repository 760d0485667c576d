// Bytes of words, and 8-bit floats as 16-bit ones.
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

}  // namespace flashgen
