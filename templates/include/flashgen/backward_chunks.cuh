// A step of the backward pass in chunks: 32 queries of what a warp computes are the left operand of one part
// of a product, which runs while the next chunk is computed.
#pragma once
#include "flashgen/primitives_packed.cuh"
#include "flashgen/strip.cuh"

namespace flashgen {

// Steps of a product that make a chunk, of 16 queries each.
constexpr i32 kChunkSteps = 2;
constexpr i32 chunks_of(i32 queries) { return queries / (16 * kChunkSteps); }

// Calls `compute(i)` for each of a lane's elements of a chunk.
template <class Compute>
FLASHGEN_DEVICE void for_chunk(i32 chunk, const Compute& compute) {
#pragma unroll
  for (i32 i = 8 * kChunkSteps * chunk; i < 8 * kChunkSteps * (chunk + 1); ++i) compute(i);
}

// Rounds pairs of neighbours along a row.
template <class T, i32 count>
FLASHGEN_DEVICE void round_chunk(u32 (&rounded)[count / 8][4], const float (&strip)[count], i32 chunk) {
#pragma unroll
  for (i32 i = 4 * kChunkSteps * chunk; i < 4 * kChunkSteps * (chunk + 1); ++i)
    rounded[i / 4][i % 4] = pack(T{}, strip[2 * i], strip[2 * i + 1]);
}

// dS = P (dP - D) of a chunk, of P rounded.
template <i32 count>
FLASHGEN_DEVICE void multiply_chunk(bfloat16_t, u32 (&ds)[count / 8][4], const float (&dp)[count],
                                    const u32 (&p)[count / 8][4], i32 chunk) {
#pragma unroll
  for (i32 i = 4 * kChunkSteps * chunk; i < 4 * kChunkSteps * (chunk + 1); ++i)
    ds[i / 4][i % 4] =
        multiply_packed(bfloat16_t{}, pack(bfloat16_t{}, dp[2 * i], dp[2 * i + 1]), p[i / 4][i % 4]);
}

// Issues the chunk's part of O += P V, which is a group of its own.
template <class VTile>
FLASHGEN_DEVICE void issue_chunk(Strip<VTile::cols>& out, const Rounded<VTile::rows>& left, VTile v,
                                 i32 chunk) {
  using T = typename VTile::Element;
  const MatrixDescriptor right = v.by_rows();
  wgmma_fence();
#pragma unroll
  for (i32 step = kChunkSteps * chunk; step < kChunkSteps * (chunk + 1); ++step)
    wgmma_rs<T, VTile::cols, Major::mn>(out, left[step], right.advanced(VTile::along_rows(step)), true);
  wgmma_commit();
}

// A warp's 16 rows of a tile, from `row` on, as a left operand in registers.
template <class Tile>
FLASHGEN_DEVICE void load_operand(u32 (&operand)[Tile::steps][4], Tile tile, i32 row, Thread thread) {
#pragma unroll
  for (i32 step = 0; step < Tile::steps; ++step)
    ldmatrix_x4(operand[step], tile.chunk_at(row + thread.lane % 16, 2 * step + thread.lane / 16));
}

// Issues sums += A B^T, of 64 rows of A in registers: a sum over columns of both.
template <class B>
FLASHGEN_DEVICE void issue_held(Strip<B::rows>& sums, const u32 (&a)[B::steps][4], B b) {
  using T = typename B::Element;
  const MatrixDescriptor right = b.by_columns();
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < B::steps; ++step)
    wgmma_rs<T, B::rows>(sums, a[step], right.advanced(B::along_columns(step)), true);
  wgmma_commit();
}

// Issues half of the steps of sums += A B^T, which is a group of its own.
template <class A, class B>
FLASHGEN_DEVICE void issue_half(Strip<B::rows>& sums, A a, B b, i32 half) {
  using T = typename A::Element;
  const MatrixDescriptor left = a.by_columns(), right = b.by_columns();
  wgmma_fence();
#pragma unroll
  for (i32 step = half * A::steps / 2; step < (half + 1) * A::steps / 2; ++step) {
    wgmma_ss<T, B::rows>(sums, left.advanced(A::along_columns(step)), right.advanced(B::along_columns(step)),
                         true);
  }
  wgmma_commit();
}

// Puts a chunk of dS of a warp's 16 keys, from `row` on, into the tile.
template <class DSTile>
FLASHGEN_DEVICE void store_chunk(DSTile tile, i32 row, const Rounded<DSTile::cols>& ds, i32 chunk,
                                 Thread thread) {
  const u32 first = tile.first_chunk(row, thread);
#pragma unroll
  for (i32 n = kChunkSteps * chunk; n < kChunkSteps * (chunk + 1); ++n)
    stmatrix_x4(DSTile::chunk_after(first, n), ds[n]);
}

}  // namespace flashgen
