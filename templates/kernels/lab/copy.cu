// The ceiling of device memory: each thread copies 16 bytes at a time, and all of them stream through the
// array.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 256;

struct Params {
  const Vec16* source;
  Vec16* target;
  i64 count;
};

FLASHGEN_KERNEL(kThreads, 1) lab_copy(FLASHGEN_GRID_CONSTANT Params p) {
  const i64 stride = static_cast<i64>(grid_dim_x()) * kThreads;
  for (i64 i = static_cast<i64>(block_idx_x()) * kThreads + thread_idx(); i < p.count; i += stride) {
    p.target[i] = p.source[i];
  }
}
