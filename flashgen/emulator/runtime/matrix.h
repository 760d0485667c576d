// Fragments of the matrix instructions, laid out as the PTX ISA draws them: with g = lane / 4 and t = lane %
// 4,
//   A (16 x depth): register i holds row g + 8 (i % 2), columns 2t + 8 (i / 2) and the next one
//   B (depth x 8):  register i holds rows 2t + 8 i and the next one, column g
//   C, D (16 x 8):  elements 2i, 2i + 1 are row g + 8 i, columns 2t and 2t + 1
#pragma once
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "model.h"

namespace flashgen::emu {

typedef float Floats __attribute__((vector_size(32)));
typedef u32 Words __attribute__((vector_size(32)));

// Eight 16-bit elements as floats.
inline Floats widen(const u16* source, bool bfloat16) {
#if defined(__F16C__)
  if (!bfloat16) {
    const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    return reinterpret_cast<Floats>(wide);
  }
#endif
  Words words = {};
  for (int i = 0; i < 8; ++i) words[i] = source[i];
  if (bfloat16) return reinterpret_cast<Floats>(words << 16);
  const Words sign = (words & 0x8000u) << 16;
  const Words magnitude = (words & 0x7fffu) << 13;
  Words wide = reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) * 0x1p112f);
  wide = magnitude >= (0x7c00u << 13) ? magnitude | 0x7f800000u : wide;  // infinity and NaN
  return reinterpret_cast<Floats>(wide | sign);
}

struct MatrixOperands {
  alignas(32) float a[16][16];
  alignas(32) Floats b[16];
  alignas(32) Floats c[16];
};

// The operands of one m16n8k{depth} product, gathered from the lanes' registers.
inline void gather(const LaneCall (&calls)[kWarpSize], int depth, bool bfloat16, MatrixOperands& m) {
  u16 a[16][16];
  u16 b[16][8];
  float c[16][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4;
    const int t = 2 * (lane % 4);
    const auto* a_registers = static_cast<const u32*>(calls[lane].a);
    const auto* b_registers = static_cast<const u32*>(calls[lane].b);
    const auto* accumulator = static_cast<const float*>(calls[lane].out);
    for (int i = 0; i < depth / 4; ++i) memcpy(&a[g + 8 * (i % 2)][t + 8 * (i / 2)], &a_registers[i], 4);
    for (int i = 0; i < depth / 8; ++i) {
      b[t + 8 * i][g] = static_cast<u16>(b_registers[i]);
      b[t + 8 * i + 1][g] = static_cast<u16>(b_registers[i] >> 16);
    }
    memcpy(&c[g][t], accumulator, 8);
    memcpy(&c[g + 8][t], accumulator + 2, 8);
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < depth; k += 8) {
      const Floats wide = widen(&a[row][k], bfloat16);
      memcpy(&m.a[row][k], &wide, sizeof wide);
    }
    memcpy(&m.c[row], c[row], sizeof c[row]);
  }
  for (int k = 0; k < depth; ++k) m.b[k] = widen(b[k], bfloat16);
}

// d += a * b for the lanes' fragments.
inline void matrix_multiply(const LaneCall (&calls)[kWarpSize], int depth, bool bfloat16) {
  MatrixOperands m;
  gather(calls, depth, bfloat16, m);
  for (int row = 0; row < 16; ++row) {
    // Two chains of additions, for the processor's sake.
    Floats even = m.c[row];
    Floats odd = {};
    for (int k = 0; k < depth; k += 2) {
      even += m.a[row][k] * m.b[k];
      odd += m.a[row][k + 1] * m.b[k + 1];
    }
    m.c[row] = even + odd;
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4;
    const int t = 2 * (lane % 4);
    auto* accumulator = static_cast<char*>(calls[lane].out);
    memcpy(accumulator, reinterpret_cast<const float*>(&m.c[g]) + t, 8);
    memcpy(accumulator + 8, reinterpret_cast<const float*>(&m.c[g + 8]) + t, 8);
  }
}

}  // namespace flashgen::emu
