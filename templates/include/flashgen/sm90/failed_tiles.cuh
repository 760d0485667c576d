// Tiles of results that the mainloops could not compute, because an operand holds NaN or infinity.
//
// A mask gives a pair the probability 0, but 0 * NaN is NaN: a NaN in V, K, Q or dO reaches all results of
// the tiles that it meets in a product. Such data are rare, so the mainloops do not look for them. The
// epilogues check what they store, and flag tiles that are not finite. backward_repair.cuh computes these
// again, pair by pair. Without a mask nothing is to be checked, because all pairs are allowed.
#pragma once
#include "flashgen/non_finite.cuh"
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

}  // namespace flashgen
