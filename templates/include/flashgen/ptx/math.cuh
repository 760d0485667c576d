// Scalar arithmetic, one instruction each.
#pragma once
#include "flashgen/ptx/device.cuh"

namespace flashgen {

// 2^x within 2 ulp. Subnormal results are flushed to zero.
FLASHGEN_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLASHGEN_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x within 1 ulp. Subnormal operands and results are flushed to zero.
FLASHGEN_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The larger of two. If one is NaN, the result is the other.
FLASHGEN_DEVICE float maximum(float a, float b) {
  float c;
  asm("max.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
// The larger of a and |b|, or NaN if one of them is NaN (sm_80 and later).
FLASHGEN_DEVICE float maximum_magnitude(float a, float b) {
  float c;
  asm("{\n\t"
      ".reg .f32 magnitude;\n\t"
      "abs.f32 magnitude, %2;\n\t"
      "max.NaN.f32 %0, %1, magnitude;\n\t"
      "}"
      : "=f"(c)
      : "f"(a), "f"(b));
  return c;
}
FLASHGEN_DEVICE float fused_multiply_add(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
// The same, clipped to [0, 1]. NaN gives 0.
FLASHGEN_DEVICE float fused_multiply_add_clipped(float a, float b, float c) {
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
// Two floats rounded to 16 bits and packed, the first in the low half.
FLASHGEN_DEVICE u32 pack(bfloat16_t, float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
FLASHGEN_DEVICE u16 to_half_bits(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
FLASHGEN_DEVICE u32 pack(half_t, float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return static_cast<u32>(to_half_bits(low)) | static_cast<u32>(to_half_bits(high)) << 16;
#endif
}
FLASHGEN_DEVICE float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

}  // namespace flashgen
