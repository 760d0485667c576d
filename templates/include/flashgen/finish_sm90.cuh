// From the sum of dQ to dQ, by a kernel of its own.
#pragma once
#include "flashgen/backward_sm90.cuh"

namespace flashgen {

template <i32 count>
FLASHGEN_DEVICE void read_fragments(float (&dq)[count], const float* part, Thread thread) {
#pragma unroll
  for (i32 n = 0; n < count / 4; ++n) {
    const Vec16 four = reinterpret_cast<const Vec16*>(part)[n * kWarpSize + thread.lane];
#pragma unroll
    for (i32 e = 0; e < 4; ++e) dq[4 * n + e] = float_of(four.words[e]);
  }
}

// A warp's part of dQ, as the tensor type: `columns` of rows from `row` on.
template <i32 columns, class T>
FLASHGEN_DEVICE void write_finished(const float* part, GlobalRows<T> results, i32 row, float scale,
                                    Thread thread) {
  Strip<columns> dq;
  read_fragments(dq, part, thread);
  const float scales[2] = {scale, scale};
  write_strip<T, columns>(results, row, dq, scales, thread);
}

}  // namespace flashgen
