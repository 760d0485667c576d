// The ceiling of matrix products by mma.sync (sm_80 and later): each warp multiplies fragments that stay in
// its registers, eight products at a time, which do not wait for each other.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 256;
constexpr i32 kProducts = 8;

struct Params {
  const u32* source;  // [lane][4], fragments of 16 x 16 elements; [product][lane][2], of 16 x 8
  float* target;      // [block][thread][product][4]
  i64 steps;
};

FLASHGEN_KERNEL(kThreads, 1) lab_products(FLASHGEN_GRID_CONSTANT Params p) {
  const i32 lane = thread_idx() % 32;
  u32 a[4], b[kProducts][2];
  float d[kProducts][4] = {};
#pragma unroll
  for (i32 i = 0; i < 4; ++i) a[i] = p.source[lane * 4 + i];
#pragma unroll
  for (i32 j = 0; j < kProducts; ++j) {
    const u32* const fragment = p.source + 32 * 4 + (j * 32 + lane) * 2;
    b[j][0] = fragment[0];
    b[j][1] = fragment[1];
  }
  for (i64 step = 0; step < p.steps; ++step) {
#pragma unroll
    for (i32 j = 0; j < kProducts; ++j) mma_m16n8k16(bfloat16_t{}, d[j], a, b[j]);
  }
  float* const target =
      p.target + (static_cast<i64>(block_idx_x()) * kThreads + thread_idx()) * kProducts * 4;
#pragma unroll
  for (i32 j = 0; j < kProducts; ++j) {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) target[j * 4 + i] = d[j][i];
  }
}
