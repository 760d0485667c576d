// Products of fragments of the matrix instructions, in the layout of the PTX ISA. With g = lane / 4 and t =
// lane % 4:
//   A (16 x depth): register i holds row g + 8 (i % 2), columns 2t + 8 (i / 2) and the next one
//   B (depth x 8):  register i holds rows 2t + 8 i and the next one, column g
//   C, D (16 x 8):  elements 2i, 2i + 1 are row g + 8 i, columns 2t and 2t + 1
#pragma once
#if defined(__F16C__)
#include <immintrin.h>
#endif
#include <cstring>

#include "flashgen/ptx/types.cuh"

namespace flashgen::emu {

constexpr i32 kWarpSize = 32;

typedef float Floats __attribute__((vector_size(32)));
typedef u32 Words __attribute__((vector_size(32)));

// Eight 16-bit elements as floats.
template <bool bfloat16>
inline Floats widen(const u16* source) {
#if defined(__F16C__)
  if constexpr (!bfloat16) {
    const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    return reinterpret_cast<Floats>(wide);
  }
#endif
  typedef u16 Halves __attribute__((vector_size(16)));
  Halves halves;
  memcpy(&halves, source, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words);
  if constexpr (bfloat16) return reinterpret_cast<Floats>(words << 16);
  const Words sign = (words & 0x8000u) << 16;
  const Words magnitude = (words & 0x7fffu) << 13;
  Words wide = reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) * 0x1p112f);
  wide = magnitude >= (0x7c00u << 13) ? magnitude | 0x7f800000u : wide;  // infinity and NaN
  return reinterpret_cast<Floats>(wide | sign);
}

// The left and right operand of one product. Each lane stores its elements.
struct Operands {
  alignas(64) u16 a[4][8][8];  // one 8 x 8 matrix for each register
  alignas(64) u16 b[16][8];

  template <i32 depth>
  void put(u32 lane, const u32* a_registers, const u32* b_registers) {
    const u32 g = lane / 4;
    const u32 t = 2 * (lane % 4);
#pragma GCC unroll 4
    for (i32 i = 0; i < depth / 4; ++i) memcpy(&a[i][g][t], &a_registers[i], 4);
#pragma GCC unroll 2
    for (i32 i = 0; i < depth / 8; ++i) {
      b[t + 8 * i][g] = static_cast<u16>(b_registers[i]);
      b[t + 8 * i + 1][g] = static_cast<u16>(b_registers[i] >> 16);
    }
  }
};

// The accumulators of one product: 16 rows of eight columns.
struct Accumulators {
  Floats rows[16];

  void put(u32 lane, const float* registers) {
    memcpy(row_of(lane), registers, 8);
    memcpy(row_of(lane + kWarpSize), registers + 2, 8);
  }
  void get(u32 lane, float* registers) {
    memcpy(registers, row_of(lane), 8);
    memcpy(registers + 2, row_of(lane + kWarpSize), 8);
  }

 private:
  // The address of a lane's elements in rows 0 to 7. Those in rows 8 to 15 are 32 lanes further.
  char* row_of(u32 lane) { return reinterpret_cast<char*>(rows) + 8 * lane; }
};

template <i32 depth, bool bfloat16>
inline void multiply_add(const Operands& operands, Accumulators& accumulators) {
  alignas(32) float a[16][depth];
  Floats b[depth];
  for (i32 k = 0; k < depth; ++k) b[k] = widen<bfloat16>(operands.b[k]);
  for (i32 i = 0; i < depth / 4; ++i) {
    for (i32 g = 0; g < 8; ++g) {
      const Floats wide = widen<bfloat16>(operands.a[i][g]);
      memcpy(&a[g + 8 * (i % 2)][8 * (i / 2)], &wide, sizeof wide);
    }
  }
  // Sums have the same order as wgmma's, so that both give the same bits, as they do on a GPU. Two rows at a
  // time are faster.
  for (i32 row = 0; row < 16; row += 2) {
    Floats upper = accumulators.rows[row];
    Floats lower = accumulators.rows[row + 1];
    for (i32 k = 0; k < depth; ++k) {
      upper += a[row][k] * b[k];
      lower += a[row + 1][k] * b[k];
    }
    accumulators.rows[row] = upper;
    accumulators.rows[row + 1] = lower;
  }
}

}  // namespace flashgen::emu
