// From the sum of dQ to dQ, by a kernel of its own.
#pragma once
#include "flashgen/backward_sm90.cuh"

namespace flashgen {

// A warp's part of dQ, as the tensor type: `columns` of rows from `row` on. Where nobody has added there is no sum.
template <i32 columns, class T>
FLASHGEN_DEVICE void write_finished(const float* part, bool is_there, GlobalRows<T> results, i32 row,
                                    float scale, Thread thread) {
  Strip<columns> dq;
  clear(dq);
  if (is_there) read_fragments(dq, part, thread);
  const float scales[2] = {scale, scale};
  write_strip<T, columns>(results, row, dq, scales, thread);
}

}  // namespace flashgen
