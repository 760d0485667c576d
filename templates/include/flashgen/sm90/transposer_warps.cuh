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

// Blocks of 32 keys and 16 columns that a warp reads before it writes any, because a read after a write waits
// for the write. Four are its share of a panel; registers hold no more.
constexpr i32 kTransposedTogether = 4;

// One warp's share of the transpose of `from`: every kTransposers-th sixteen columns.
//
// ldmatrix transposes pairs of bytes. Lane 4j + t gets, of keys 2t and 2t + 1, columns 2j and 2j + 1. Bytes
// of two such words, eight keys apart, make four keys of one column. Lanes with j < 4 take the even column
// first and others the odd one, so that the eight rows of V^T that stmatrix writes together lie in different
// banks.
template <class From, class To>
FLASHGEN_DEVICE void transpose_share(From from, To to, i32 share, Thread thread) {
  static_assert(From::rows % 32 == 0 && From::cols % 16 == 0, "blocks of 32 keys and 16 columns");
  static_assert(kTransposers * kTransposedTogether * 16 == From::panel_cols, "a panel at a time");
  constexpr i32 chunks = From::cols / 16;
  const bool is_odd = thread.lane >= 16;
  const u32 first_bytes = is_odd ? 0x7531u : 0x6420u, second_bytes = is_odd ? 0x6420u : 0x7531u;
  // The row of V^T, among sixteen, and the group of sixteen keys, among two, whose address this lane gives to
  // stmatrix.
  const i32 j = thread.lane % 8, row = 2 * j + (j / 4 ^ thread.lane / 8 % 2), key_group = thread.lane / 16;
  // The lane's addresses for the first block. Others differ in bits of the swizzle and by constants.
  const u32 source = from.chunk_at(thread.lane, share), target = to.chunk_at(16 * share + row, key_group);
  // Unrolling would take more registers than the warpgroup has.
#pragma unroll 1
  for (i32 panel = 0; panel < From::panels; ++panel) {
    // Columns may end within a panel, which is read as a whole, and then one warp may have a block more than
    // the other.
    const i32 left = chunks - panel * (From::panel_cols / 16);
    const auto exists = [&](i32 i) {
      if (From::cols % From::panel_cols == 0 || (i + 1) * kTransposers <= left) return true;
      return chunks % kTransposers != 0 && i * kTransposers + share < left;
    };
#pragma unroll 1
    for (i32 keys = 0; keys < From::rows / 32; ++keys) {
      const u32 first_source =
          source + static_cast<u32>(panel * From::panel_stride + keys * 32 * kPanelBytes);
      const u32 first_target =
          (target ^ static_cast<u32>(keys % 4 * 2 * kChunkBytes)) +
          static_cast<u32>(keys / 4 * To::panel_stride + panel * From::panel_cols * kPanelBytes);
      u32 words[kTransposedTogether][4];
#pragma unroll
      for (i32 i = 0; i < kTransposedTogether; ++i) {
        ldmatrix_x4_trans(words[i], first_source ^ static_cast<u32>(i * kTransposers * kChunkBytes));
      }
#pragma unroll
      for (i32 i = 0; i < kTransposedTogether; ++i) {
        const u32(&w)[4] = words[i];
        const u32 transposed[4] = {
            select_bytes(w[0], w[1], first_bytes), select_bytes(w[0], w[1], second_bytes),
            select_bytes(w[2], w[3], first_bytes), select_bytes(w[2], w[3], second_bytes)};
        if (exists(i))
          stmatrix_x4(first_target + static_cast<u32>(16 * i * kTransposers * kPanelBytes), transposed);
      }
    }
  }
}

// Transposes all blocks that the producer loads.
template <class Shared>
FLASHGEN_DEVICE void run_transposer(const Shared& shared, Thread thread) {
  // Both rings have as many slots, and each block fills one of each. All lanes may wait: no phase that they
  // wait for can be followed by another one before this warp arrives.
  for (typename Shared::VRing::State at;; at.advance()) {
    shared.loaded_v_ring().wait_full(at);
    // The lane that frees the slot reads it.
    if (shuffle(thread.lane == 0 ? shared.is_end(at.slot()) : 0, 0) != 0) return;
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
