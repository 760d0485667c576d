// Accumulators of a warp's 16 rows in memory, in the layout of its lanes: for each block of 16 x 8, four
// floats per lane. Each lane reads what the same lane of a warp wrote, 16 bytes at a time.
#pragma once
#include "flashgen/element.cuh"
#include "flashgen/primitives.cuh"

namespace flashgen {

// Writes the columns from `first` to `end`.
template <i32 count>
FLASHGEN_DEVICE void write_columns(float* part, const float (&strip)[count], i32 first, i32 end,
                                   Thread thread) {
#pragma unroll
  for (i32 n = first / 8; n < end / 8; ++n) {
    const float* const four = strip + 4 * n;
    reinterpret_cast<Vec16*>(part)[(n - first / 8) * kWarpSize + thread.lane] =
        Vec16{{bits_of(four[0]), bits_of(four[1]), bits_of(four[2]), bits_of(four[3])}};
  }
}
// Writes all columns.
template <i32 count>
FLASHGEN_DEVICE void write_fragments(float* part, const float (&strip)[count], Thread thread) {
  write_columns(part, strip, 0, 2 * count, thread);
}
template <i32 count>
FLASHGEN_DEVICE void read_fragments(float (&strip)[count], const float* part, Thread thread) {
#pragma unroll
  for (i32 n = 0; n < count / 4; ++n) {
    const Vec16 four = reinterpret_cast<const Vec16*>(part)[n * kWarpSize + thread.lane];
#pragma unroll
    for (i32 e = 0; e < 4; ++e) strip[4 * n + e] = float_of(four.words[e]);
  }
}
// Adds a strip to the fragments of one before it.
template <i32 count>
FLASHGEN_DEVICE void add_fragments(float* part, float (&strip)[count], Thread thread) {
  float before[count];
  read_fragments(before, part, thread);
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] += before[i];
  write_fragments(part, strip, thread);
}

}  // namespace flashgen
