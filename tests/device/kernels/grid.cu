// Blocks that work together through global memory, and grids that follow each other.
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;

struct Params {
  i32 variant;
  i32 blocks;
  const i32* x;  // [block][thread]
  i32* sums;     // [1]
  float* total;  // [1]
  u32* counter;  // [1]
  u32* out;      // [block][thread]
};

enum class Variant { kTickets, kSums, kBits, kBarrier, kFlags, kDependent };

// Every block has come here, and what they did before is seen by all.
FLASHGEN_DEVICE void grid_sync(u32* counter, u32 blocks) {
  block_sync();
  if (thread_idx() == 0) {
    atomic_add_release(counter, 1u);
    while (load_acquire(counter) < blocks) {
    }
  }
  block_sync();
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  const i32 block = block_idx_x();
  const i32 thread = thread_idx();
  const i32 i = block * kThreads + thread;
  if constexpr (variant == Variant::kTickets) {
    // Who gets which ticket is open; all are given, each once.
    params.out[atomic_add(params.counter, 1u)] = 1;
  }
  if constexpr (variant == Variant::kSums) {
    atomic_add(params.sums, params.x[i]);
    atomic_add(params.total, static_cast<float>(params.x[i]));
  }
  if constexpr (variant == Variant::kBits) {
    // Bits that some set, beside what others add up.
    if (thread % 3 == 0) {
      atomic_or(params.counter, 1u << 31 | 1u << (20 + block));
    } else {
      atomic_add(params.counter, 1u);
    }
  }
  if constexpr (variant == Variant::kBarrier) {
    expect_cooperative_launch();
    params.out[i] = static_cast<u32>(params.x[i]);
    grid_sync(params.counter, static_cast<u32>(params.blocks));
    const u32 value = params.out[(block + 1) % params.blocks * kThreads + thread];
    grid_sync(params.counter, static_cast<u32>(2 * params.blocks));
    params.out[i] = 3 * value;
  }
  if constexpr (variant == Variant::kFlags) {
    expect_cooperative_launch();
    // Each block hands on to the next one.
    if (block > 0) {
      if (thread == 0) {
        while (load_acquire(params.counter) < static_cast<u32>(block)) {
        }
      }
      block_sync();
    }
    const u32 before = block > 0 ? params.out[i - kThreads] : 1;
    params.out[i] = before * 3 + static_cast<u32>(params.x[i]);
    block_sync();
    if (thread == 0) store_release(params.counter, static_cast<u32>(block) + 1);
  }
  if constexpr (variant == Variant::kDependent) {
    // Launched several times in a row; each launch takes up what the last one left.
    griddep_launch_dependents();
    const u32 x = static_cast<u32>(params.x[i]);
    griddep_wait();
    params.out[i] = params.out[i] * 3 + x;
  }
}
