// Warp-wide matrix products, from registers to registers, several steps into one accumulator.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 32;

struct Params {
  i32 variant;
  i32 steps;
  const u32* a;    // [step][lane][4]
  const u32* b;    // [step][lane][2]
  const float* c;  // [lane][4]
  float* d;        // [lane][4]
};

enum class Variant {
  kHalf16,
  kBfloat16,
  kHalf8,
  kE4m3,
  kE5m2,
  kBatchedHalf16,
  kBatchedBfloat16,
  kBatchedHalf8,
  kBatchedE4m3
};

template <Variant variant>
FLASHGEN_DEVICE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (variant == Variant::kHalf16) mma_m16n8k16(half_t{}, d, a, b);
  if constexpr (variant == Variant::kBfloat16) mma_m16n8k16(bfloat16_t{}, d, a, b);
  if constexpr (variant == Variant::kHalf8) mma_m16n8k8(half_t{}, d, a[0], a[1], b[0]);
  if constexpr (variant == Variant::kE4m3) mma_m16n8k32(e4m3_t{}, d, a, b);
  if constexpr (variant == Variant::kE5m2) mma_m16n8k32(e5m2_t{}, d, a, b);
  if constexpr (variant == Variant::kBatchedHalf16) mma_m16n8k16_batched(half_t{}, d, a, b);
  if constexpr (variant == Variant::kBatchedBfloat16) mma_m16n8k16_batched(bfloat16_t{}, d, a, b);
  if constexpr (variant == Variant::kBatchedHalf8) mma_m16n8k8_batched(half_t{}, d, a[0], a[1], b[0]);
  if constexpr (variant == Variant::kBatchedE4m3) mma_m16n8k32_batched(e4m3_t{}, d, a, b);
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  const i32 lane = thread_idx();
  float d[4];
  for (i32 i = 0; i < 4; ++i) d[i] = params.c[4 * lane + i];
  for (i32 step = 0; step < params.steps; ++step) {
    const u32* a_from = params.a + 4 * (step * kThreads + lane);
    const u32* b_from = params.b + 2 * (step * kThreads + lane);
    const u32 a[4] = {a_from[0], a_from[1], a_from[2], a_from[3]};
    const u32 b[2] = {b_from[0], b_from[1]};
    multiply<variant>(d, a, b);
    // Waits for the batched ones; the others are done by now.
    mma_finish();
  }
  for (i32 i = 0; i < 4; ++i) params.d[4 * lane + i] = d[i];
}
