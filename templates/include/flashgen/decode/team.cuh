// Thread blocks that go over the same keys at the same time, each for different rows. One of them reads a key
// from device memory, and the others find it in L2.
#pragma once
#include "flashgen/element.cuh"

namespace flashgen {

struct Team {
  i32 size;
  // This thread block's number in its team.
  i32 rank;

  // The host chooses the size. Kernels without a `team` parameter have teams of one thread block.
  template <class Params>
  FLASHGEN_DEVICE static Team of(const Params& p) {
    if constexpr (requires { p.team; }) {
      return {p.team, block_idx_x() % p.team};
    } else {
      return {1, 0};
    }
  }
  // Rounds that a team needs for `tiles` tiles of rows.
  template <class Params>
  FLASHGEN_DEVICE static i32 rounds(const Params& p, i32 tiles) {
    if constexpr (requires { p.team; }) {
      return ceil_div(tiles, p.team);
    } else {
      return tiles;
    }
  }
  // This thread block's team, and how many there are. Thread blocks that are left over get no work.
  FLASHGEN_DEVICE i32 index() const { return block_idx_x() / size; }
  FLASHGEN_DEVICE i32 count() const { return grid_dim_x() / size; }
  // The thread block or tile number `index` of this thread block, where the thread blocks of a team take
  // turns.
  FLASHGEN_DEVICE i32 strided(i32 index) const { return index * size + rank; }
};

}  // namespace flashgen
