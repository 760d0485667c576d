// What the backward mainloops do with fragments: accumulators that are preset, products in parts, dS.
//
// A part of a product is a group of its own, so that it runs while the next one's operand is computed.
#pragma once
#include "flashgen/primitives_packed.cuh"
#include "flashgen/sm90/backward_dropping.cuh"
#include "flashgen/sm90/backward_scores.cuh"
#include "flashgen/strip.cuh"

namespace flashgen {

// Presets every row of an accumulator to `columns`, one float for each column. Products are added on top. The
// pin tells ptxas that no product in flight writes these registers; otherwise it waits.
template <i32 count>
FLASHGEN_DEVICE void preset_columns(float (&strip)[count], const float* columns, Thread thread) {
#pragma unroll
  for (i32 n = 0; n < count / 4; ++n) {
    const float first = columns[8 * n + thread.column()], second = columns[8 * n + thread.column() + 1];
    strip[4 * n] = first;
    strip[4 * n + 1] = second;
    strip[4 * n + 2] = first;
    strip[4 * n + 3] = second;
  }
  wgmma_pin(strip);
}
// The same with a float for each of a lane's two rows.
template <i32 count>
FLASHGEN_DEVICE void preset_rows(float (&strip)[count], const float (&rows)[2]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] = rows[i / 2 % 2];
  wgmma_pin(strip);
}
template <i32 count>
FLASHGEN_DEVICE void preset_zero(float (&strip)[count]) {
  clear_strip(strip);
  wgmma_pin(strip);
}

// Issues half of the steps of sums += A B^T.
template <class A, class B>
FLASHGEN_DEVICE void issue_half(Strip<B::rows>& sums, A a, B b, i32 half) {
  using T = typename A::Element;
  const MatrixDescriptor left = a.by_columns(), right = b.by_columns();
  wgmma_fence();
#pragma unroll
  for (i32 step = half * A::steps / 2; step < (half + 1) * A::steps / 2; ++step) {
    wgmma_ss<T, B::rows>(sums, left.advanced(A::along_columns(step)), right.advanced(B::along_columns(step)),
                         true);
  }
  wgmma_commit();
}

// Issues the chunk's part of sums += A B, of A in registers.
template <class B>
FLASHGEN_DEVICE void issue_chunk(Strip<B::cols>& sums, const Rounded<B::rows>& a, B b, i32 chunk) {
  using T = typename B::Element;
  const MatrixDescriptor right = b.by_rows();
  wgmma_fence();
#pragma unroll
  for (i32 step = kChunkSteps * chunk; step < kChunkSteps * (chunk + 1); ++step)
    wgmma_rs<T, B::cols, Major::mn>(sums, a[step], right.advanced(B::along_rows(step)), true);
  wgmma_commit();
}

// dS = factor (dP - D) of a chunk. dP - D is rounded in bf16, which has the exponents of float32 and
// multiplies two elements at once. In fp16 it may be infinite, so it stays float.
template <i32 count>
FLASHGEN_DEVICE void multiply_chunk(bfloat16_t, u32 (&ds)[count / 8][4], const float (&dp)[count],
                                    const u32 (&factors)[count / 8][4], i32 chunk) {
#pragma unroll
  for (i32 i = kChunkElements / 2 * chunk; i < kChunkElements / 2 * (chunk + 1); ++i)
    ds[i / 4][i % 4] =
        multiply_packed(bfloat16_t{}, pack(bfloat16_t{}, dp[2 * i], dp[2 * i + 1]), factors[i / 4][i % 4]);
}
template <i32 count>
FLASHGEN_DEVICE void multiply_chunk(half_t, u32 (&ds)[count / 8][4], const float (&dp)[count],
                                    const u32 (&factors)[count / 8][4], i32 chunk) {
#pragma unroll
  for (i32 i = kChunkElements / 2 * chunk; i < kChunkElements / 2 * (chunk + 1); ++i) {
    const u32 two = factors[i / 4][i % 4];
    ds[i / 4][i % 4] = pack(half_t{}, dp[2 * i] * to_float(half_t{static_cast<u16>(two)}),
                            dp[2 * i + 1] * to_float(half_t{static_cast<u16>(two >> 16)}));
  }
}

// Puts a chunk of dS of a warp's 16 keys, from `row` on, into the tile.
template <class DSTile>
FLASHGEN_DEVICE void store_chunk(DSTile tile, i32 row, const Rounded<DSTile::cols>& ds, i32 chunk,
                                 Thread thread) {
  const u32 first = tile.first_chunk(row, thread);
#pragma unroll
  for (i32 n = kChunkSteps * chunk; n < kChunkSteps * (chunk + 1); ++n)
    stmatrix_x4(DSTile::chunk_after(first, n), ds[n]);
}

}  // namespace flashgen
