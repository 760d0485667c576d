// What the producer tells of a tile, where it chooses which ones come, and what the mask makes of it.
#pragma once
#include "flashgen/element.cuh"
#include "flashgen/primitives.cuh"

namespace flashgen {

// It lies beside a slot of a ring. Of each warp one lane reads it and hands it to the others, the one that
// gives the slot back: what many had read would be in order only by way of their warp, and then of that lane.
struct alignas(8) BlockSparseTile {
  i32 tile;
  // Bit 0: whether it is the last one. What the others mean is the kernel's.
  u32 facts;

  FLASHGEN_DEVICE static BlockSparseTile of(i32 tile, bool is_last, u32 facts) {
    return {tile, facts << 1 | static_cast<u32>(is_last)};
  }
  // All lanes of a warp call, and get the same.
  FLASHGEN_DEVICE static BlockSparseTile read(const BlockSparseTile& slot, Thread thread) {
    BlockSparseTile read = {};
    if (thread.lane == 0) read = slot;
    return {shuffle(read.tile, 0), static_cast<u32>(shuffle(static_cast<i32>(read.facts), 0))};
  }

  FLASHGEN_DEVICE bool is_last() const { return (facts & 1u) != 0; }
  FLASHGEN_DEVICE u32 others() const { return facts >> 1; }
  FLASHGEN_DEVICE bool has(i32 fact) const { return (others() >> fact & 1u) != 0; }
};

}  // namespace flashgen
