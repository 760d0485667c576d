// What a warp knows of its rows under a softcap, from one tile of keys to the next: which way its tiles take
// their logits (cap_shares.cuh), and whether rows can grow further above their anchors than exponentials
// reach.
#pragma once
#include "flashgen/cap_shares.cuh"

namespace flashgen {

// What is known of a warp's rows between tiles of keys.
struct CapRows {
  // How far they have come. All products were below the polynomial's end; or some were beyond, once; or many
  // are, and all logits are shares of the cap, for the first time, in a tile that is cut, in which rows may
  // have found few keys, or not; or besides no row can grow further above its anchor than exponentials can
  // reach, so that there is nothing to look for.
  enum Stage : i32 { kBelow, kHadSome, kBeganShares, kTakesShares, kSettled };
  Stage stage;
  // Whether all rows that take shares have sums that are so large that these may be in the fewest
  // instructions.
  bool has_large_sums;
  // For softmaxes that can take exponentials once more: whether every row has an anchor, and none has given
  // reason to look at products before exponentials are taken of them.
  bool is_calm;

  FLASHGEN_DEVICE bool takes_shares() const { return stage >= kBeganShares; }
  FLASHGEN_DEVICE bool is_settled() const { return stage == kSettled; }
  // Whether some exponent might be too high for exponentials, or anchors should move ahead once more.
  template <class Softmax>
  FLASHGEN_DEVICE bool may_lower(const Softmax& softmax, float bound) const {
    return stage == kBeganShares || (stage == kTakesShares && softmax.might_outgrow(bound));
  }
  // Looks whether the sums of rows that take shares have become so large.
  template <class Softmax>
  FLASHGEN_DEVICE void see_sums(const Softmax& softmax, const Cap& cap);
  // Whether follow() might find something to do, with such highest and largest products of a lane, or if it
  // has none higher or larger.
  template <class Softmax>
  FLASHGEN_DEVICE bool may_change(const Softmax& softmax, const Cap& cap, float highest, float largest) const;
  // Sees to it that anchors are near enough to maxima, of which there is one for each row at least once;
  // whether the output so far is to be multiplied by the softmax's factors. For rows that take no shares yet;
  // where these are not bounded they do once they are settled.
  template <class Shares, class Softmax>
  FLASHGEN_DEVICE bool follow(Softmax& softmax, const Cap& cap, const float (&highest)[2], float largest,
                              bool is_cut);
  // The same for rows that do, and of which exponents are there.
  template <i32 count, class Softmax>
  FLASHGEN_DEVICE bool lower(Softmax& softmax, const Cap& cap, float (&exponents)[count]);
};

// Whether it is so for lanes that have different places in their rows.
FLASHGEN_DEVICE bool are_several(bool is_so) {
  u32 places = warp_ballot(is_so);
  places |= places >> 16;
  places |= places >> 8;
  places = (places | places >> 4) & 15;
  return (places & (places - 1)) != 0;
}

template <class Softmax>
FLASHGEN_DEVICE bool CapRows::may_change(const Softmax& softmax, const Cap& cap, float highest,
                                         float largest) const {
  const float most = -maximum(-cap.steepness() * highest, -CapShare::of(cap).highest);
  return largest >= CapPolynomial::of(cap).limit || softmax.might_grow(most);
}

template <class Shares, class Softmax>
FLASHGEN_DEVICE bool CapRows::follow(Softmax& softmax, const Cap& cap, const float (&highest)[2],
                                     float largest, bool is_cut) {
  const auto capped = CappedProducts::of(cap);
  const float top = capped.share.highest, limit = capped.polynomial.limit;
  const float of_lane[2] = {capped.logit(highest[0]), capped.logit(highest[1])};
  const float found[2] = {row_maximum(of_lane[0]), row_maximum(of_lane[1])};
  const bool begins_rows = warp_any(softmax.has_no_anchor());
  // Whether products are beyond the limit for more than a single key. Lanes that have other places in their
  // rows have other keys.
  const bool are_many = begins_rows || stage != kBelow || are_several(largest >= 0.625f * limit);
  // In a first tile one key is enough, as it is likely that there are more, and so are several near the
  // limit.
  const bool are_near = begins_rows && are_several(largest >= 0.8f * limit);
  const bool are_some = warp_any(largest >= limit);
  bool are_large = true, are_larger = true, is_safe = true;
  float ahead[2];
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    if constexpr (Shares::are_bounded) {
      // The row's sum is that of what it has, and of the highest of each lane, at least.
      const float from = maximum(found[row], softmax.rows.anchor[row]);
      const float so_far = softmax.rows.sum[row] * exp2_approx(softmax.rows.anchor[row] - from);
      const float least = from + log2_approx(row_total(so_far + exp2_approx(of_lane[row] - from)));
      are_large = are_large && !(least < capped.share.least_sum());
      are_larger = are_larger && least >= capped.share.least_large_sum();
    }
    ahead[row] = softmax.anchor_ahead_in(row, found[row], top);
    is_safe = is_safe && Softmax::is_near(top, ahead[row]);
  }
  const bool settles = !warp_any(!is_safe);
  const bool begins = Softmax::foresees && (are_near || (are_some && are_many)) && !warp_any(!are_large) &&
                      (settles || Shares::are_bounded);
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    const bool grows = softmax.has_grown_to(found[row], row);
    // No further ahead than a row might get while its products are below.
    const float grown = Softmax::anchor_ahead(found[row], kBelowCap * top, true);
    softmax.move_anchor(row, begins ? ahead[row] : grows ? grown : softmax.rows.anchor[row]);
  }
  const Stage begun = settles ? kSettled : is_cut ? kBeganShares : kTakesShares;
  has_large_sums = begins && !warp_any(!are_larger);
  stage = begins ? begun : are_some ? kHadSome : stage;
  if constexpr (Softmax::checks)
    is_calm = (is_calm || begins_rows) && !begins && !warp_any(cap.falls() || softmax.has_no_anchor());
  return warp_any(softmax.factor[0] != 1.0f || softmax.factor[1] != 1.0f);
}

template <class Softmax>
FLASHGEN_DEVICE void CapRows::see_sums(const Softmax& softmax, const Cap& cap) {
  if (stage < kTakesShares || has_large_sums) return;
  const float least = CapShare::of(cap).least_large_sum();
  bool are_large = true;
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    const float of_row = row_total(softmax.rows.sum[row]);
    are_large = are_large && softmax.rows.anchor[row] + log2_approx(of_row) >= least;
  }
  has_large_sums = !warp_any(!are_large);
}

template <i32 count, class Softmax>
FLASHGEN_DEVICE bool CapRows::lower(Softmax& softmax, const Cap& cap, float (&exponents)[count]) {
  const float top = CapShare::of(cap).highest;
  const bool moves = softmax.lower(exponents, top, stage == kBeganShares);
  const float* const anchor = softmax.rows.anchor;
  const bool is_safe = Softmax::is_near(top, anchor[0]) && Softmax::is_near(top, anchor[1]);
  stage = warp_any(!is_safe) ? kTakesShares : kSettled;
  return moves;
}

}  // namespace flashgen
