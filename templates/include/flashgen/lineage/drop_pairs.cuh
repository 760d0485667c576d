// Dropout on a tile of P in shared memory.
#pragma once
#include "flashgen/contain.cuh"
#include "flashgen/dropout.cuh"

namespace flashgen {

// Puts 0 for the pairs that are left out; the tile's rows are queries from first_q on, its columns keys from
// first_key on, both multiples of 16. All threads of the block call it. Each draws for four times two
// neighbors of a block of 16 x 16 pairs, as the lanes of other kernels do. If `keeps_nan`, a NaN stays: O of
// a row whose sum is NaN is NaN, whichever of its pairs are left out.
template <i32 threads, bool keeps_nan, class Tile>
FLASHGEN_DEVICE void drop_pairs(Tile tile, const Dropout& dropout, i32 first_q, i32 first_key,
                                Thread thread) {
  using T = typename Tile::Element;
  static_assert(Tile::rows % 16 == 0 && Tile::cols % 16 == 0, "a drawing is for 16 x 16 pairs");
  constexpr i32 drawings = Tile::rows * Tile::cols / 8;
#pragma unroll 1
  for (i32 i = thread.index(); i < drawings; i += threads) {
    const i32 block = i / kWarpSize, lane = i % kWarpSize;
    const i32 row = block / (Tile::cols / 16) * 16 + lane / 4,
              column = block % (Tile::cols / 16) * 16 + lane % 4 * 2;
    const FourWords numbers =
        dropout.draw(static_cast<u32>(first_q + row), static_cast<u32>(first_key + column));
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      const u32 kept = dropout.kept(numbers.words[w]);
      T* const pair = tile.element_at(row + w % 2 * 8, column + w / 2 * 8);
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        const bool stays = (kept >> (16 * e + 15) & 1u) != 0 || (keeps_nan && is_non_finite(pair[e]));
        if (!stays) pair[e] = T{};
      }
    }
  }
  block_sync();
}

}  // namespace flashgen
