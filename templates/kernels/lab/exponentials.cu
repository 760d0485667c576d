// The ceiling of exponentials: each thread takes eight at a time, each of the last one's result.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 256;
constexpr i32 kChains = 8;

struct Params {
  const float* source;  // [thread][kChains]
  float* target;
  i64 steps;
};

FLASHGEN_KERNEL(kThreads, 1) lab_exponentials(FLASHGEN_GRID_CONSTANT Params p) {
  const i64 first = (static_cast<i64>(block_idx_x()) * kThreads + thread_idx()) * kChains;
  float x[kChains];
#pragma unroll
  for (i32 i = 0; i < kChains; ++i) x[i] = p.source[first + i];
  for (i64 step = 0; step < p.steps; ++step) {
    // 2^-x stays between 0 and 1, so no chain leaves the range of floats.
#pragma unroll
    for (i32 i = 0; i < kChains; ++i) x[i] = exp2_approx(-x[i]);
  }
#pragma unroll
  for (i32 i = 0; i < kChains; ++i) p.target[first + i] = x[i];
}
