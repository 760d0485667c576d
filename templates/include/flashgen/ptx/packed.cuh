// Arithmetic of two 16-bit numbers in a word (sm_90).
#pragma once
#include "flashgen/ptx/types.cuh"

namespace flashgen {

// Two products of packed numbers, rounded.
FLASHGEN_DEVICE u32 multiply_packed(bfloat16_t, u32 a, u32 b) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// The lower ones of two pairs of signed whole numbers.
FLASHGEN_DEVICE u32 minimum_packed(u32 a, u32 b) {
  u32 lower;
  asm("min.s16x2 %0, %1, %2;" : "=r"(lower) : "r"(a), "r"(b));
  return lower;
}

// All bits but the signs of those of two numbers that are infinite or NaN: times zero they are NaN of these
// bits, and all others zero.
FLASHGEN_DEVICE u32 not_finite_packed(bfloat16_t, u32 pair) {
  u32 bits;
  asm("fma.rn.bf16x2 %0, %1, %2, %2;" : "=r"(bits) : "r"(pair), "r"(0u));
  return bits;
}
FLASHGEN_DEVICE u32 not_finite_packed(half_t, u32 pair) {
  u32 bits;
  asm("fma.rn.f16x2 %0, %1, %2, %2;" : "=r"(bits) : "r"(pair), "r"(0u));
  return bits;
}

}  // namespace flashgen
