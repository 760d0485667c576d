// The state of a warp's rows under a softcap, from one tile of keys to the next: how logits are computed, and
// when reference maxima move.
#pragma once
#include "flashgen/cap_shares.cuh"
#include "flashgen/panel.cuh"

namespace flashgen {

// Whether `is_so` holds for lanes in at least two of the four positions within a row.
FLASHGEN_DEVICE bool are_several(bool is_so) {
  u32 places = warp_ballot(is_so);
  places |= places >> 16;
  places |= places >> 8;
  places = (places | places >> 4) & 15;
  return (places & (places - 1)) != 0;
}

// Whether a tile's products have been inspected, and whether reference maxima moved, so that O needs a
// rescale. One value, because registers are short.
enum class Inspection : i32 { kNone, kDone, kMovesReferenceMax };

// Rows under a low cap, for which shares are accurate for every logit.
struct FineCapRows {
  // kNew: no tile yet.
  // kBelow: all products were in the polynomial's range.
  // kCalm: also, reference maxima are near enough. Exponentials are computed first, and products are
  // inspected
  //   along with them. Only for a softmax that keeps its scores and can repeat the exponentials.
  // kHadSome: one tile had products beyond the range.
  // kTakesShares: many products are beyond it. All logits are shares, and bounded by the cap: no row can
  // outgrow
  //   its reference maximum, so products need no inspection.
  enum Stage : i32 { kNew, kBelow, kCalm, kHadSome, kTakesShares };
  Stage stage;
  // A lane whose products are all smaller in magnitude needs no vote. 0 in the first tile.
  float asked_from;

  FLASHGEN_DEVICE bool are_new() const { return stage == kNew; }
  FLASHGEN_DEVICE bool is_calm() const { return stage == kCalm; }
  FLASHGEN_DEVICE bool takes_shares() const { return stage >= kTakesShares; }
  // Whether follow() may change anything, for a lane whose highest product is at most `highest`, and whose
  // largest magnitude is at most `largest`.
  template <class Softmax>
  FLASHGEN_DEVICE bool may_change(const Softmax& softmax, const Cap& cap, float highest,
                                  float largest) const {
    const float most = -maximum(-cap.steepness() * highest, -CapShare::of(cap).highest);
    return largest >= CapPolynomial::of(cap).limit || softmax.might_grow(most);
  }
  // Moves reference maxima near enough to the row maxima, and decides whether rows take shares from now on.
  // Returns whether O must be rescaled. Only for rows that do not take shares yet. For new rows all warps of
  // a warpgroup decide together, through `barrier`.
  template <class Softmax>
  FLASHGEN_DEVICE bool follow(Softmax& softmax, const Cap& cap, const float (&highest)[2], float largest,
                              i32 barrier);
};

template <class Softmax>
FLASHGEN_DEVICE bool FineCapRows::follow(Softmax& softmax, const Cap& cap, const float (&highest)[2],
                                         float largest, i32 barrier) {
  const auto share = CapShare::of(cap);
  const float top = share.highest, limit = CapPolynomial::of(cap).limit;
  const float found[2] = {share.logit(row_maximum(highest[0])), share.logit(row_maximum(highest[1]))};
  float ahead[2];
  bool is_safe = true;
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    ahead[row] = softmax.reference_max_ahead_in(row, found[row], top);
    is_safe = is_safe && Softmax::is_near(top, ahead[row]);
  }
  // The votes are issued together to overlap their latency.
  const bool is_first = warp_any(are_new() || softmax.has_no_reference_max()),
             are_some = warp_any(largest >= limit);
  const bool are_safe = !warp_any(!is_safe);
  const bool are_several_large = are_several(largest >= 0.625f * limit);
  const bool are_some_near = warp_any(largest >= 0.75f * limit);
  // Whether several keys have products near or beyond the limit: lanes in different positions have different
  // keys. In the first tile one product near the limit suffices, because others are then likely beyond it.
  const bool are_many = (stage >= kHadSome) | are_several_large;
  bool begins = Softmax::bounds_growth & are_safe & (is_first ? are_some_near : are_some & are_many);
  // wgmma waits for the slowest warp of a warpgroup, and the code of both branches exceeds the instruction
  // cache. So all warps take shares if one does, except those whose exponentials might overflow.
  if (Softmax::bounds_growth && are_new())
    begins = named_barrier_any(barrier, kWarpgroupSize, begins) & are_safe;
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    const bool grows = softmax.has_grown_to(found[row], row);
    // At most as far ahead as a row can get while its products are below the limit.
    const float grown = Softmax::reference_max_ahead(found[row], kBelowCap * top, true);
    softmax.move_reference_max(row, begins ? ahead[row] : grows ? grown : softmax.rows.reference_max[row]);
  }
  if (stage <= kCalm) {
    const bool may_be_calm = Softmax::checks && (is_first | is_calm());
    const bool are_calm = may_be_calm && !warp_any(cap.falls() || softmax.has_no_reference_max());
    stage = are_some ? kHadSome : are_calm ? kCalm : kBelow;
  }
  if (begins) stage = kTakesShares;
  const float grown = softmax.growth_limit() * reciprocal_approx(cap.steepness());
  asked_from = -maximum(-grown, -limit);
  return softmax.rescales();
}

// Rows under any other cap. Their highest products are inspected in every tile.
struct CapRows {
  // Whether the sums of all of a warp's rows are large enough for shares. Sums only grow.
  bool are_large;

  // Moves reference maxima near enough to the rows' maxima `first` and `second`.
  template <class Softmax>
  FLASHGEN_DEVICE static void follow(Softmax& softmax, const CapShare& share, float first, float second) {
    const float found[2] = {first, second}, top = share.highest;
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
      const float reference_max = softmax.rows.reference_max[row];
      if constexpr (Softmax::span == 0.0f) {
        // One instruction. The compiler would turn a conditional into a branch amid the exponentials.
        softmax.move_reference_max(row, maximum(reference_max, found[row]));
      } else {
        // At most as far ahead as a row can get while its products are in the polynomial's range.
        const float end = kBelowCap * top;
        const float ahead = found[row] < end ? Softmax::reference_max_ahead(found[row], end, true)
                                             : softmax.reference_max_ahead_in(row, found[row], top);
        softmax.move_reference_max(row, softmax.has_grown_to(found[row], row) ? ahead : reference_max);
      }
    }
  }
  // Whether shares are accurate in a tile, given the highest products of the rows and of a lane.
  template <class Softmax>
  FLASHGEN_DEVICE bool may_be_shares(const Softmax& softmax, const CapShare& share, const float (&of_rows)[2],
                                     const float (&of_lane)[2]);
};

template <class Softmax>
FLASHGEN_DEVICE bool CapRows::may_be_shares(const Softmax& softmax, const CapShare& share,
                                            const float (&of_rows)[2], const float (&of_lane)[2]) {
  if (are_large) return true;
  const float least = share.least_sum();
  const float peaks[2] = {maximum(softmax.rows.reference_max[0], share.logit(of_rows[0])),
                          maximum(softmax.rows.reference_max[1], share.logit(of_rows[1]))};
  // Usually one logit per row is large enough, if reference maxima are not ahead of it.
  if (!Softmax::bounds_growth && !warp_any(peaks[0] < least || peaks[1] < least)) return are_large = true;
  bool is_large = true, is_exact = true;
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    // A lower bound of the row's sum: the sum so far, and the highest logit of each lane.
    const float before = softmax.rows.sum[row] * exp2_approx(softmax.rows.reference_max[row] - peaks[row]);
    const float of_tile = exp2_approx(share.logit(of_lane[row]) - peaks[row]);
    const float sum = peaks[row] + log2_approx(row_total(before + of_tile));
    // Written so that a NaN sum counts as large: the row is NaN anyway.
    is_large = is_large && !(sum < least);
    is_exact = is_exact && share.are_exact_for(sum);
  }
  are_large = !warp_any(!is_large);
  return !warp_any(!is_exact);
}

}  // namespace flashgen
