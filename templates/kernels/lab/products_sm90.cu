// The ceiling of matrix products by wgmma (sm_90a): two warpgroups multiply the same tiles of shared memory
// again and again, 128 x 256 x 64 a step.
#define WGMMA_SHAPES(shape) shape(256)
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;

constexpr i32 kThreads = 256;
constexpr i32 kWarpgroup = 128;
constexpr i32 kColumns = 256;
// Rows of 64 elements, swizzled by their 128 bytes; eight rows follow one another.
constexpr i32 kRowBytes = 128;
constexpr i32 kStride = 8 * kRowBytes;
constexpr i32 kTileA = 64 * kRowBytes;
constexpr i32 kTileB = kColumns * kRowBytes;
constexpr i32 kSteps = 4;
constexpr i32 kStepBytes = 32;

struct Params {
  const Vec16* tiles;  // A of each warpgroup, and then B, as shared memory holds them
  float* target;       // [block][thread][kColumns / 2]
  i64 steps;
};

FLASHGEN_KERNEL(kThreads, 1) lab_products_sm90(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  for (i32 i = thread_idx(); i < (2 * kTileA + kTileB) / 16; i += kThreads) {
    reinterpret_cast<Vec16*>(shared)[i] = p.tiles[i];
  }
  fence_proxy_async();
  block_sync();

  const u32 base = shared_address(shared);
  const u32 own = thread_idx() / kWarpgroup * kTileA;
  const MatrixDescriptor a = matrix_descriptor(base + own, 16, kStride, Swizzle::bytes_128);
  const MatrixDescriptor b = matrix_descriptor(base + 2 * kTileA, 16, kStride, Swizzle::bytes_128);
  float d[kColumns / 2] = {};
  wgmma_pin(d);
  wgmma_fence();
  for (i64 step = 0; step < p.steps; ++step) {
#pragma unroll
    for (i32 k = 0; k < kSteps; ++k) {
      wgmma_ss<bfloat16_t, kColumns>(d, a.advanced(k * kStepBytes), b.advanced(k * kStepBytes), true);
    }
    wgmma_commit();
    // The next step's products are issued while these are under way.
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  wgmma_pin(d);
  float* const target =
      p.target + (static_cast<i64>(block_idx_x()) * kThreads + thread_idx()) * (kColumns / 2);
#pragma unroll
  for (i32 i = 0; i < kColumns / 2; ++i) target[i] = d[i];
}
