// Barriers: each thread reads what another one wrote to shared memory before.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 128;
constexpr i32 kRounds = 16;

struct Params {
  i32 variant;
  const u32* x;  // [thread]
  u32* out;      // [round][thread]
};

enum class Variant { kWarp, kBlock, kBlockAny };

template <Variant variant>
FLASHGEN_DEVICE void wait_for_others() {
  if constexpr (variant == Variant::kWarp) warp_sync();
  if constexpr (variant == Variant::kBlock) block_sync();
  if constexpr (variant == Variant::kBlockAny) block_any(false);
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  constexpr i32 group = variant == Variant::kWarp ? 32 : kThreads;
  FLASHGEN_SHARED_MEMORY(shared);
  auto* slots = reinterpret_cast<u32*>(shared);
  const i32 thread = thread_idx();
  const i32 first = thread / group * group;
  u32 value = params.x[thread];
  for (i32 round = 0; round < kRounds; ++round) {
    slots[thread] = value;
    wait_for_others<variant>();
    value = slots[first + (thread + 2 * round + 1) % group] * 3 + 1;
    wait_for_others<variant>();
    params.out[round * kThreads + thread] = value;
  }
}
