// Maxima and sums over the values of a block's threads. All threads of the block call them and get the
// result; `shared` has room for one float for each warp, which no other call may use.
#pragma once
#include "flashgen/element.cuh"

namespace flashgen {

template <i32 warps, class Combine>
FLASHGEN_DEVICE float block_reduction(float x, float* shared, Thread thread, const Combine& combine) {
#pragma unroll
  for (i32 distance = kWarpSize / 2; distance > 0; distance /= 2) x = combine(x, shuffle_xor(x, distance));
  if (thread.lane == 0) shared[thread.warp] = x;
  block_sync();
  x = shared[0];
#pragma unroll
  for (i32 warp = 1; warp < warps; ++warp) x = combine(x, shared[warp]);
  return x;
}

template <i32 warps>
FLASHGEN_DEVICE float block_maximum(float x, float* shared, Thread thread) {
  return block_reduction<warps>(x, shared, thread, [](float a, float b) { return maximum(a, b); });
}

template <i32 warps>
FLASHGEN_DEVICE float block_total(float x, float* shared, Thread thread) {
  return block_reduction<warps>(x, shared, thread, [](float a, float b) { return a + b; });
}

}  // namespace flashgen
