// Tiles of results that the mainloops could not compute, because an operand holds NaN or infinity.
//
// A mask gives a pair the probability 0, but 0 * NaN is NaN: a NaN in V, K, Q or dO reaches all results of
// the tiles that it meets in a product. Such data are rare, so the mainloops do not look for them. The
// epilogues check what they store, and flag tiles that are not finite. backward_repair.cuh computes these
// again, pair by pair. Without a mask nothing is to be checked, because all pairs are allowed.
#pragma once
#include "flashgen/panel.cuh"

namespace flashgen {

// Flags of tiles: of dQ first, for each tile of queries and head, then of dK and dV, for each tile of keys
// and head. Several warps may flag the same tile. Kernels without a mask have no such parameters.
template <bool has_mask, class Params>
FLASHGEN_DEVICE void flag_queries(const Params& p, i32 tile) {
  if constexpr (has_mask) atomic_or(p.failed_tiles + tile, 1u);
}
template <bool has_mask, class Params>
FLASHGEN_DEVICE void flag_keys(const Params& p, i32 tile) {
  if constexpr (has_mask) atomic_or(p.failed_tiles + p.query_flags + tile, 1u);
}

// 0, or NaN if an element of the first of a lane's two rows, or the first element of the second row, is not
// finite. That is enough. An operand that reaches rows that it must not reach spoils a column of all rows.
// Only rows of V and dO spoil a single row, of dK or dQ, but in all columns.
template <i32 count>
FLASHGEN_DEVICE float first_row_times_zero(const float (&strip)[count]) {
  float zero[2] = {strip[2] * 0.0f, 0.0f};
#pragma unroll
  for (i32 i = 0; i < count / 2; ++i)
    zero[i % 2] = fused_multiply_add(strip[4 * (i / 2) + i % 2], 0.0f, zero[i % 2]);
  return zero[0] + zero[1];
}

}  // namespace flashgen
