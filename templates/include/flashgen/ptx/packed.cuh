// Arithmetic on pairs of 16-bit numbers packed in a word (sm_90).
#pragma once
#include "flashgen/ptx/types.cuh"

namespace flashgen {

// Both products, rounded.
FLASHGEN_DEVICE u32 multiply_packed(bfloat16_t, u32 a, u32 b) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Both minima of signed integers.
FLASHGEN_DEVICE u32 minimum_packed(u32 a, u32 b) {
  u32 lower;
  asm("min.s16x2 %0, %1, %2;" : "=r"(lower) : "r"(a), "r"(b));
  return lower;
}

// 0x7fff in place of each number that is infinite or NaN, and zero in place of any other: x * 0 + 0 is NaN,
// which has these bits, exactly if x is not finite.
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
