// The transposers: warps that rewrite each block of 8-bit values as V^T, in the order of keys that
// eight_bit_values.cuh describes.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/primitives_eight_bits.cuh"
#include "flashgen/ring.cuh"

namespace flashgen {

// Two of the warps of the first warpgroup, after producer and scheduler.
constexpr i32 kFirstTransposer = 2;
constexpr i32 kTransposers = 2;

// One warp's share of the transpose of `from`: every kTransposers-th sixteen columns.
//
// ldmatrix transposes pairs of bytes. Lane 4j + t gets, of keys 2t and 2t + 1, columns 2j and 2j + 1. Bytes
// of two such words, eight keys apart, make four keys of one column. Lanes with j < 4 take the even column
// first and others the odd one, so that the eight rows of V^T that stmatrix writes together lie in different
// banks.
template <class From, class To>
FLASHGEN_DEVICE void transpose_share(From from, To to, i32 share, Thread thread) {
  static_assert(From::rows % 32 == 0 && From::cols % 16 == 0, "blocks of 32 keys and 16 columns");
  const bool is_odd = thread.lane >= 16;
  const u32 first_bytes = is_odd ? 0x7531u : 0x6420u, second_bytes = is_odd ? 0x6420u : 0x7531u;
  // The row of V^T, among sixteen, and the sixteen keys, among two, whose address this lane gives to
  // stmatrix.
  const i32 j = thread.lane % 8, row = 2 * j + (j / 4 ^ thread.lane / 8 % 2), sixteen = thread.lane / 16;
#pragma unroll 1
  for (i32 keys = 0; keys < From::rows / 32; ++keys) {
    // The first chunk of the lane's key. Others differ in the bits of the swizzle.
    const u32 first = from.chunk_at(32 * keys + thread.lane, 0),
              target = to.chunk_at(row, 2 * keys + sixteen);
    // More at a time would take more registers than the warpgroup has.
#pragma unroll 2
    for (i32 chunk = share; chunk < From::cols / 16; chunk += kTransposers) {
      u32 words[4];
      ldmatrix_x4_trans(words, (first ^ static_cast<u32>(chunk % 8 * kChunkBytes)) +
                                   static_cast<u32>(chunk / 8 * From::panel_stride));
      const u32 transposed[4] = {
          select_bytes(words[0], words[1], first_bytes), select_bytes(words[0], words[1], second_bytes),
          select_bytes(words[2], words[3], first_bytes), select_bytes(words[2], words[3], second_bytes)};
      stmatrix_x4(target + static_cast<u32>(16 * chunk * kPanelBytes), transposed);
    }
  }
}

// Transposes all blocks that the producer loads.
template <class Shared>
FLASHGEN_DEVICE void run_transposer(const Shared& shared, Thread thread) {
  // Both rings have as many slots, and each block fills one of each.
  for (typename Shared::VRing::State at;; at.advance()) {
    shared.loaded_v_ring().wait_full(at);
    if (shared.is_end(at.slot()) != 0) return;
    shared.v_ring().wait_empty(at);
    transpose_share(shared.loaded_v(at), shared.v(at), thread.warp - kFirstTransposer, thread);
    shared.loaded_v_ring().release(at, thread);
    // wgmma reads V^T through the async proxy.
    fence_proxy_async_shared();
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(shared.v_ring().full(at));
  }
}

}  // namespace flashgen
