// P V of a slice that the mask cuts, where V may hold NaN or infinity for keys that a row must not attend to:
// the row's probability is 0, but 0 * NaN is NaN.
#pragma once
#include "flashgen/contain.cuh"
#include "flashgen/decode/rows.cuh"

namespace flashgen {

// Whether some element of a slice is not finite. All lanes of a warp call, and get the same.
template <class Slice>
FLASHGEN_DEVICE bool slice_holds_non_finite(Slice slice, Thread thread) {
  u32 signs = 0;
#pragma unroll 1
  for (i32 i = thread.lane; i < Slice::rows * Slice::chunks; i += kWarpSize) {
    const Vec16 chunk = *reinterpret_cast<const Vec16*>(slice.data + i * kChunkBytes);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Slice::Element>(chunk.words[w]);
  }
  return warp_any(signs != 0);
}

// sums += P V of 16 keys without the elements of V that are not finite. Results that an allowed pair brings
// such an element become NaN. `pairs` is 1 for allowed pairs and 0 for others. A loop keeps this rare code
// short, so `sums` lies in local memory.
template <class T, i32 blocks, class Values>
FLASHGEN_DEVICE void add_careful(float (&sums)[blocks][4], const LeftFragment<T>& left,
                                 const LeftFragment<T>& pairs, const Values& values) {
  const u32 ones = pack(T{}, 1.0f, 1.0f);
#pragma unroll 1
  for (i32 n = 0; n < blocks; n += 2) {
    RightFragment<T> finite[2];
    values.load_pair(finite, n, 0);
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      // Ones in place of what is not finite count the allowed pairs with such an element.
      RightFragment<T> bad;
#pragma unroll
      for (i32 w = 0; w < 2; ++w) {
        const u32 lost = (non_finite_signs<T>(finite[i].words[w]) >> 15) * 0xffffu;
        finite[i].words[w] &= ~lost;
        bad.words[w] = lost & ones;
      }
      float (&sum)[4] = sums[n + i];
      float reached[4] = {};
      multiply_block<false>(sum, left, finite[i]);
      multiply_block<false>(reached, pairs, bad);
      mma_finish();
#pragma unroll
      for (i32 e = 0; e < 4; ++e) sum[e] = reached[e] > 0.0f ? not_a_number<float>() : sum[e];
    }
  }
}

// The same for O in registers, and P and `allowed` as numbers. `values_of(step)` are those of 16 keys.
template <class T, i32 blocks, i32 score_blocks, class ValuesOf>
FLASHGEN_DEVICE void multiply_careful(Accumulator<1, blocks>& out,
                                      const Accumulator<1, score_blocks>& probabilities,
                                      const Accumulator<1, score_blocks>& allowed, Thread thread,
                                      const ValuesOf& values_of) {
  const LeftRegisters<T, 1, score_blocks> left(probabilities, thread), pairs(allowed, thread);
  Accumulator<1, blocks> sums;
#pragma unroll
  for (i32 i = 0; i < 4 * blocks; ++i) sums[0][i / 4][i % 4] = out[0][i / 4][i % 4];
#pragma unroll
  for (i32 step = 0; step < score_blocks / 2; ++step)
    add_careful<T>(sums[0], left.fragments[0][step], pairs.fragments[0][step], values_of(step));
#pragma unroll
  for (i32 i = 0; i < 4 * blocks; ++i) out[0][i / 4][i % 4] = sums[0][i / 4][i % 4];
}

}  // namespace flashgen
