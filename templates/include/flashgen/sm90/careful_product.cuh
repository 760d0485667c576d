// P V of a block that the mask cuts, where V may hold NaN or infinity.
#pragma once
#include "flashgen/non_finite.cuh"
#include "flashgen/panel.cuh"

namespace flashgen {

template <class T>
constexpr u32 kOnes = 0x3f803f80u;
template <>
constexpr u32 kOnes<half_t> = 0x3c003c00u;

// Whether some element of a tile is not finite. Every warp that asks looks at the whole tile.
template <class Tile>
FLASHGEN_DEVICE bool panels_hold_non_finite(Tile tile, u8* base, Thread thread) {
  u32 signs = 0;
#pragma unroll 1
  for (i32 i = thread.lane; i < Tile::bytes / kChunkBytes; i += kWarpSize) {
    const Vec16 chunk =
        *reinterpret_cast<const Vec16*>(base + (tile.address - shared_address(base)) + i * kChunkBytes);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Tile::Element>(chunk.words[w]);
  }
  return warp_any(signs != 0);
}

// out += P V for a warp's 16 rows, without the elements of V that are not finite. Results that an allowed
// pair brings such an element become NaN. `allowed` is as find_allowed() leaves it. Arrays are copied to
// local memory, because loops keep this rare code short.
template <class VTile>
FLASHGEN_DEVICE void multiply_careful(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                      VTile v, const u32 (&allowed)[2], Thread thread) {
  using T = typename VTile::Element;
  float sums[VTile::cols / 8][4];
  u32 left[VTile::rows / 16][4];
#pragma unroll
  for (i32 i = 0; i < VTile::cols / 2; ++i) sums[i / 4][i % 4] = out[i];
#pragma unroll
  for (i32 i = 0; i < VTile::rows / 4; ++i) left[i / 4][i % 4] = probabilities[i / 4][i % 4];
#pragma unroll 1
  for (i32 step = 0; step < VTile::rows / 16; ++step) {
    // The left operand of a product that counts allowed pairs.
    u32 pairs[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const u32 bits = allowed[i % 2] >> (4 * step + 2 * (i / 2));
      pairs[i] = ((bits & 1u) * 0xffffu | (bits >> 1 & 1u) * 0xffff0000u) & kOnes<T>;
    }
    const u32 first = v.first_chunk(16 * step, thread);
#pragma unroll 1
    for (i32 n = 0; n < VTile::cols / 16; ++n) {
      u32 words[4], bad[4];
      ldmatrix_x4_trans(words, VTile::chunk_after(first, n));
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        bad[i] = (non_finite_signs<T>(words[i]) >> 15) * 0xffffu;
        words[i] &= ~bad[i];
      }
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        float (&sum)[4] = sums[2 * n + half];
        const u32 right[2] = {words[2 * half], words[2 * half + 1]};
        mma_m16n8k16(T{}, sum, left[step], right);
        const u32 bad_right[2] = {bad[2 * half] & kOnes<T>, bad[2 * half + 1] & kOnes<T>};
        float reached[4] = {};
        mma_m16n8k16(T{}, reached, pairs, bad_right);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) sum[e] = reached[e] > 0.0f ? float_of(0x7fffffffu) : sum[e];
      }
    }
  }
#pragma unroll
  for (i32 i = 0; i < VTile::cols / 2; ++i) out[i] = sums[i / 4][i % 4];
}

}  // namespace flashgen
