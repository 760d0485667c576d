// What a warp knows of its rows under a softcap, from one tile of keys to the next: which way its tiles take
// their logits (cap_shares.cuh), and how near anchors are to maxima.
#pragma once
#include "flashgen/cap_shares.cuh"

namespace flashgen {

// Whether it is so for lanes that have different places in their rows.
FLASHGEN_DEVICE bool are_several(bool is_so) {
  u32 places = warp_ballot(is_so);
  places |= places >> 16;
  places |= places >> 8;
  places = (places | places >> 4) & 15;
  return (places & (places - 1)) != 0;
}

// Of rows under a low cap, of which all logits may be shares.
struct FineCapRows {
  // How far they have come. All products were below the polynomial's end; or some were beyond, once; or many
  // are, and all logits are shares of the cap, and no row can grow further above its anchor than exponentials
  // can reach, so that there is nothing to look for.
  enum Stage : i32 { kBelow, kHadSome, kTakesShares };
  Stage stage;
  // For softmaxes that can take exponentials once more: whether every row has an anchor, and none has given
  // reason to look at products before exponentials are taken of them.
  bool is_calm;

  FLASHGEN_DEVICE bool takes_shares() const { return stage >= kTakesShares; }
  // Whether follow() might find something to do, with such highest and largest products of a lane, or if it
  // has none higher or larger.
  template <class Softmax>
  FLASHGEN_DEVICE bool may_change(const Softmax& softmax, const Cap& cap, float highest,
                                  float largest) const {
    const float most = -maximum(-cap.steepness() * highest, -CapShare::of(cap).highest);
    return largest >= CapPolynomial::of(cap).limit || softmax.might_grow(most);
  }
  // Sees to it that anchors are near enough to maxima, of which there is one for each row at least once;
  // whether the output so far is to be multiplied by the softmax's factors. For rows that take no shares yet:
  // perhaps they do from now on.
  template <class Softmax>
  FLASHGEN_DEVICE bool follow(Softmax& softmax, const Cap& cap, const float (&highest)[2], float largest);
};

template <class Softmax>
FLASHGEN_DEVICE bool FineCapRows::follow(Softmax& softmax, const Cap& cap, const float (&highest)[2],
                                         float largest) {
  const auto capped = CappedProducts::of(cap);
  const float top = capped.share.highest, limit = capped.polynomial.limit;
  const float found[2] = {row_maximum(capped.logit(highest[0])), row_maximum(capped.logit(highest[1]))};
  const bool begins_rows = warp_any(softmax.has_no_anchor());
  // Whether products are beyond the limit for more than a single key. Lanes that have other places in their
  // rows have other keys.
  const bool are_many = begins_rows || stage != kBelow || are_several(largest >= 0.625f * limit);
  // In a first tile one key is enough, as it is likely that there are more, and so are several near the
  // limit.
  const bool are_near = begins_rows && are_several(largest >= 0.8f * limit);
  const bool are_some = warp_any(largest >= limit);
  float ahead[2];
  bool is_safe = true;
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    ahead[row] = softmax.anchor_ahead_in(row, found[row], top);
    is_safe = is_safe && Softmax::is_near(top, ahead[row]);
  }
  const bool begins = Softmax::foresees && (are_near || (are_some && are_many)) && !warp_any(!is_safe);
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    const bool grows = softmax.has_grown_to(found[row], row);
    // No further ahead than a row might get while its products are below.
    const float grown = Softmax::anchor_ahead(found[row], kBelowCap * top, true);
    softmax.move_anchor(row, begins ? ahead[row] : grows ? grown : softmax.rows.anchor[row]);
  }
  stage = begins ? kTakesShares : are_some ? kHadSome : stage;
  if constexpr (Softmax::checks)
    is_calm = (is_calm || begins_rows) && !begins && !warp_any(cap.falls() || softmax.has_no_anchor());
  return softmax.rescales();
}

// Of rows under any other cap, whose highest products are looked at in every tile.
struct CapRows {
  // Whether sums of all of a warp's rows are so large that their logits may be shares, and in the fewest
  // instructions. Sums do not fall.
  bool are_large, are_larger;

  // Sees to it that anchors are near enough to maxima, which are these. The softmax says whether it rescales.
  template <class Softmax>
  FLASHGEN_DEVICE static void follow(Softmax& softmax, const CapShare& share, float first, float second) {
    const float found[2] = {first, second}, top = share.highest;
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
      // No further ahead than a row might get while its products are below the polynomial's end.
      const float end = kBelowCap * top;
      const float ahead = found[row] < end ? Softmax::anchor_ahead(found[row], end, true)
                                           : softmax.anchor_ahead_in(row, found[row], top);
      softmax.move_anchor(row, softmax.has_grown_to(found[row], row) ? ahead : softmax.rows.anchor[row]);
    }
  }
  // Whether logits may be shares in a tile that has these highest products of a lane, and anchors for them.
  template <class Softmax>
  FLASHGEN_DEVICE bool see_highest(const Softmax& softmax, const CappedProducts& capped,
                                   const float (&highest)[2]);
  // Between tiles, while the next one's products are on their way.
  template <class Softmax>
  FLASHGEN_DEVICE void see_sums(const Softmax& softmax, const Cap& cap) {
    if (!are_large || are_larger) return;
    const auto share = CapShare::of(cap);
    const RowSum sums[2] = {sum_of(softmax, 0, 0.0f), sum_of(softmax, 1, 0.0f)};
    are_larger = !warp_any(!sums[0].is_larger(share) || !sums[1].is_larger(share));
  }

 private:
  // The logarithm of a row's sum, and how far it is above the largest exponential, as far as that is known.
  struct RowSum {
    float sum, above;

    FLASHGEN_DEVICE bool is_larger(const CapShare& share) const {
      return share.are_nearly_exact_for(sum, above);
    }
  };
  // With so much more in each lane.
  template <class Softmax>
  FLASHGEN_DEVICE static RowSum sum_of(const Softmax& softmax, i32 row, float more) {
    const float above = log2_approx(row_total(softmax.rows.sum[row] + more));
    return {softmax.shift(row) + above, Softmax::foresees ? 0.0f : above};
  }
};

template <class Softmax>
FLASHGEN_DEVICE bool CapRows::see_highest(const Softmax& softmax, const CappedProducts& capped,
                                          const float (&highest)[2]) {
  if (are_large) return true;
  // Mostly some logit is enough.
  const CapShare& share = capped.share;
  if constexpr (!Softmax::foresees) {
    const float least = share.least_large_sum();
    if (!warp_any(softmax.rows.anchor[0] < least || softmax.rows.anchor[1] < least))
      return are_large = are_larger = true;
  }
  bool is_exact = true, is_large = true, is_larger = true;
#pragma unroll
  for (i32 row = 0; row < 2; ++row) {
    // The row's sum is that of what it has, and of the highest of each lane, at least.
    const float of_lane = exp2_approx(capped.logit(highest[row]) - softmax.shift(row));
    const RowSum with_tile = sum_of(softmax, row, of_lane);
    is_exact = is_exact && share.are_exact_for(with_tile.sum);
    is_large = is_large && with_tile.sum >= share.least_sum();
    is_larger = is_larger && with_tile.is_larger(share);
  }
  are_large = !warp_any(!is_large);
  are_larger = !warp_any(!is_larger);
  return are_large || !warp_any(!is_exact);
}

}  // namespace flashgen
