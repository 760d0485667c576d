// How many blocks a grid has, and what the last of them leaves behind.
#pragma once
#include "flashgen/grid_sync.cuh"

namespace flashgen {

FLASHGEN_DEVICE u32 grid_blocks() { return static_cast<u32>(grid_dim_x() * grid_dim_y() * grid_dim_z()); }

// Every block calls this after its last barrier. The last one sets both counters to 0 for the next launch.
FLASHGEN_DEVICE void leave_grid(u32* counter, u32 blocks) {
  if (thread_idx() == 0 && atomic_add_release(counter + 1, 1u) + 1 == blocks) {
    store_release(counter, 0u);
    store_release(counter + 1, 0u);
  }
}

}  // namespace flashgen
