// A barrier of all blocks of a grid that was launched cooperatively.
#pragma once
#include "flashgen/primitives_sm90.cuh"

namespace flashgen {

// All threads of all `blocks` blocks call; what any of them wrote before, all of them can read afterwards.
// `counter` is zero before the kernel starts and counts arrivals: the one that fills a round ends it.
FLASHGEN_DEVICE void grid_sync(u32* counter, u32 blocks) {
  expect_cooperative_launch();
  block_sync();
  if (thread_idx() == 0) {
    const u32 before = atomic_add_release(counter, 1);
    const u32 target = (before / blocks + 1) * blocks;
    // The counter may wrap around, and others may have come further.
    while (static_cast<i32>(load_acquire(counter) - target) < 0) {
    }
  }
  block_sync();
}

// Every block calls this after its last barrier. The last one sets both counters to 0 for the next launch.
FLASHGEN_DEVICE void leave_grid(u32* counter, u32 blocks) {
  if (thread_idx() == 0 && atomic_add_release(counter + 1, 1u) + 1 == blocks) {
    store_release(counter, 0u);
    store_release(counter + 1, 0u);
  }
}

}  // namespace flashgen
