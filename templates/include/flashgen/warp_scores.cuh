// Scores of a warp's own rows, by the warp itself: for the few tiles of keys whose exponentials have taken
// the place of scores, and are wanted once more. A warpgroup's product would have to wait until all four of
// its warps know whether one wants it, in every step.
#pragma once
#include "flashgen/panel.cuh"

namespace flashgen {

// S = Q K^T, of 16 rows of Q from `row` on, a multiple of eight.
template <class QTile, class KTile>
FLASHGEN_DEVICE void multiply_by_warp(Strip<KTile::rows>& scores, QTile q, i32 row, KTile k, Thread thread) {
  using T = typename QTile::Element;
  static_assert(KTile::rows % 16 == 0, "keys go by sixteens");
  clear(scores);
  const u32 of_queries = q.first_chunk(row, thread), of_keys = k.first_transposed_chunk(thread);
  // Narrow heads have no registers for more.
  constexpr i32 unrolled = QTile::steps > 4 ? 2 : 1;
#pragma unroll unrolled
  for (i32 step = 0; step < QTile::steps; ++step) {
    LeftFragment<T> left;
    ldmatrix_x4(left.words, QTile::chunk_after(of_queries, step));
    const u32 keys = KTile::chunk_after(of_keys, step);
#pragma unroll
    for (i32 n = 0; n < KTile::rows / 16; ++n) {
      u32 words[4];
      ldmatrix_x4(words, keys + static_cast<u32>(n * 16 * kPanelBytes));
      const RightFragment<T> right[2] = {{{words[0], words[1]}}, {{words[2], words[3]}}};
#pragma unroll
      for (i32 i = 0; i < 2; ++i) multiply_block<false>(blocks_of(scores)[0][2 * n + i], left, right[i]);
    }
  }
  mma_finish();
}

}  // namespace flashgen
