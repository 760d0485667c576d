// O += P V of Hopper's latent kernel with P in shared memory, and P on its way there and back.
#pragma once
#include "flashgen/issue_in_fours.cuh"
#include "flashgen/sm90/row_softmax.cuh"

namespace flashgen {

// Puts a warp's 16 rows into the tile, from `row` on.
template <class Tile>
FLASHGEN_DEVICE void store_rounded(Tile tile, i32 row, const Rounded<Tile::cols>& rows, Thread thread) {
  const u32 first = tile.first_chunk(row, thread);
#pragma unroll
  for (i32 n = 0; n < Tile::cols / 16; ++n) stmatrix_x4(Tile::chunk_after(first, n), rows[n]);
}
template <class Tile>
FLASHGEN_DEVICE void load_rounded(Rounded<Tile::cols>& rows, Tile tile, i32 row, Thread thread) {
  const u32 first = tile.first_chunk(row, thread);
#pragma unroll
  for (i32 n = 0; n < Tile::cols / 16; ++n) ldmatrix_x4(rows[n], Tile::chunk_after(first, n));
}

// Issues O += P V. The last keys come first, as where P is in registers (issue_in_fours.cuh), so that both
// give the same bits.
template <class PTile, class VTile>
FLASHGEN_DEVICE void issue_output_from_shared(Strip<VTile::cols>& out, PTile probabilities, VTile v) {
  static_assert(VTile::rows == 64, "four steps");
  const MatrixDescriptor left = probabilities.by_columns(), right = v.by_rows();
  const auto a = [&](i32 step) { return left.advanced(PTile::along_columns(step)); };
  const auto b = [&](i32 step) { return right.advanced(VTile::along_rows(step)); };
  const MatrixDescriptor four_a[4] = {a(3), a(2), a(1), a(0)}, four_b[4] = {b(3), b(2), b(1), b(0)};
  wgmma_fence();
  wgmma_ss_four<typename VTile::Element, VTile::cols, Major::k, Major::mn>(out, four_a, four_b);
  wgmma_commit();
}

}  // namespace flashgen
