// What a warp knows of its rows under a softcap, from one tile of keys to the next: which way its tiles take
// their logits (cap_shares.cuh), and how near reference maxima are to maxima.
#pragma once
#include "flashgen/cap_shares.cuh"
#include "flashgen/panel.cuh"

namespace flashgen {

// Whether it is so for lanes that have different places in their rows.
FLASHGEN_DEVICE bool are_several(bool is_so) {
  u32 places = warp_ballot(is_so);
  places |= places >> 16;
  places |= places >> 8;
  places = (places | places >> 4) & 15;
  return (places & (places - 1)) != 0;
}

// What has become of a tile's products, as one number, as registers are short: none has been looked at; they
// have; and, besides, reference maxima move, so that what rows have so far is to be scaled.
enum class Inspection : i32 { kNone, kDone, kMovesReferenceMax };

// Of rows under a low cap, of which all logits may be shares.
struct FineCapRows {
  // How far they have come. They have had no tile; or all products were below the polynomial's end; or so
  // they were, and rows of a softmax that can take exponentials once more have reference maxima that are near
  // enough, so that products are not looked at before exponentials are taken of them; or some were beyond,
  // once; or many are, and all logits are shares of the cap, and no row can grow further above its reference
  // maximum than exponentials can reach, so that there is nothing to look for.
  enum Stage : i32 { kNew, kBelow, kCalm, kHadSome, kTakesShares };
  Stage stage;
  // Where products are looked at in every tile: a lane whose largest one, without its sign, is below has
  // nothing to ask for. All do in a first tile.
  float asked_from;

  FLASHGEN_DEVICE bool are_new() const { return stage == kNew; }
  FLASHGEN_DEVICE bool is_calm() const { return stage == kCalm; }
  FLASHGEN_DEVICE bool takes_shares() const { return stage >= kTakesShares; }
  // Whether follow() might find something to do, with such highest and largest products of a lane, or if it
  // has none higher or larger.
  template <class Softmax>
  FLASHGEN_DEVICE bool may_change(const Softmax& softmax, const Cap& cap, float highest,
                                  float largest) const {
    const float most = -maximum(-cap.steepness() * highest, -CapShare::of(cap).highest);
    return largest >= CapPolynomial::of(cap).limit || softmax.might_grow(most);
  }
  // Sees to it that reference maxima are near enough to maxima, of which there is one for each row at least
  // once; whether the output so far is to be multiplied by the softmax's factors. For rows that take no
  // shares yet: perhaps they do from now on. Of new rows all warps of a warpgroup ask together, by a barrier
  // of theirs.
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
  // All votes together, as each takes time by itself.
  const bool is_first = warp_any(are_new() || softmax.has_no_reference_max()),
             are_some = warp_any(largest >= limit);
  const bool are_safe = !warp_any(!is_safe);
  const bool are_several_large = are_several(largest >= 0.625f * limit);
  const bool are_some_near = warp_any(largest >= 0.75f * limit);
  // Whether products are beyond the limit for more than a single key. Lanes that have other places in their
  // rows have other keys. In a first tile one is enough that is near the limit, as others are likely to be
  // beyond it.
  const bool are_many = (stage >= kHadSome) | are_several_large;
  bool begins = Softmax::foresees & are_safe & (is_first ? are_some_near : are_some & are_many);
  // Products wait for the slowest of a warpgroup's warps, and instructions of two ways have no room beside
  // each other. So all begin where one does, but such whose exponentials might be infinite.
  if (Softmax::foresees && are_new()) begins = named_barrier_any(barrier, kWarpgroupSize, begins) & are_safe;
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    const bool grows = softmax.has_grown_to(found[row], row);
    // No further ahead than a row might get while its products are below.
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

// Of rows under any other cap, whose highest products are looked at in every tile.
struct CapRows {
  // Whether sums of all of a warp's rows are so large that their logits may be shares. Sums do not fall.
  bool are_large;

  // Sees to it that reference maxima are near enough to maxima, which are these. The softmax says whether it
  // rescales.
  template <class Softmax>
  FLASHGEN_DEVICE static void follow(Softmax& softmax, const CapShare& share, float first, float second) {
    const float found[2] = {first, second}, top = share.highest;
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
      const float reference_max = softmax.rows.reference_max[row];
      if constexpr (Softmax::span == 0.0f) {
        // By one instruction: compilers would make a branch of a choice, amid a tile's exponentials.
        softmax.move_reference_max(row, maximum(reference_max, found[row]));
      } else {
        // No further ahead than a row might get while its products are below the polynomial's end.
        const float end = kBelowCap * top;
        const float ahead = found[row] < end ? Softmax::reference_max_ahead(found[row], end, true)
                                             : softmax.reference_max_ahead_in(row, found[row], top);
        softmax.move_reference_max(row, softmax.has_grown_to(found[row], row) ? ahead : reference_max);
      }
    }
  }
  // Whether logits may be shares in a tile whose highest products are these, of each row and of a lane.
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
  // Mostly some logit is enough, where reference maxima are not ahead of these.
  if (!Softmax::foresees && !warp_any(peaks[0] < least || peaks[1] < least)) return are_large = true;
  bool is_large = true, is_exact = true;
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    // The row's sum is that of what it has, and of the highest of each lane, at least.
    const float before = softmax.rows.sum[row] * exp2_approx(softmax.rows.reference_max[row] - peaks[row]);
    const float of_tile = exp2_approx(share.logit(of_lane[row]) - peaks[row]);
    const float sum = peaks[row] + log2_approx(row_total(before + of_tile));
    // Nothing that a row has with a sum that is no number depends on it.
    is_large = is_large && !(sum < least);
    is_exact = is_exact && share.are_exact_for(sum);
  }
  are_large = !warp_any(!is_large);
  return !warp_any(!is_exact);
}

}  // namespace flashgen
