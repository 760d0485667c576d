// The online softmax of e4m3 probabilities.
//
// The largest e4m3 number is 448 and the smallest 2^-9, so that the reference maximum of a row cannot stay as
// far from its maximum as with 16 bits. It is set so that the largest exponential of the row's first block
// is 2^kLargestPower. When an exponential of a later block is too large, the reference maximum rises, so that
// this one becomes 2^kLargestPower. Exponentials, sums and O are then multiplied by the same factor. Most
// blocks need none of it.
//
// In a block that the mask cuts, a row may have few keys. So such a block may raise reference maxima before
// the exponentials are computed, which costs less.
//
// What raises a row's reference maximum depends only on the row and on where its blocks lie. So a row has the
// same bits whatever the other rows of its warp hold, and whether its tile is careful.
#pragma once
#include "flashgen/primitives_eight_bits.cuh"
#include "flashgen/sm90/row_softmax.cuh"

namespace flashgen {

// Less than 8: a row then seldom outgrows its first block. More would lose small probabilities.
constexpr float kLargestPower = 7.0f;
template <>
constexpr float kHeadroom<e4m3_t> = -kLargestPower;
// A running maximum needs no room above it.
template <>
constexpr float kRunningHeadroom<e4m3_t> = -8.0f;
template <>
constexpr float kMaxGrowth<e4m3_t> = 8.0f;
// Exponentials that round to at least 448 are too large.
constexpr float kTooLarge = 432.0f;
// A logit may exceed the reference maximum by at most this many powers of two, so that exponentials and their
// sums are finite. If one exceeds it by more, the row's sum becomes infinite and the tile is computed again,
// where this raises the reference maximum first.
constexpr float kCarefulGrowth = 110.0f, kLargestExponential = 0x1p110f;
template <>
constexpr float kLargestSum<e4m3_t> = 0x1p100f;

template <i32 columns, bool anchored, class Logits>
struct EightBitSoftmax : RowSoftmax<e4m3_t, columns, anchored, Logits> {
  using Base = RowSoftmax<e4m3_t, columns, anchored, Logits>;
  static constexpr bool may_rescale = true;

  FLASHGEN_DEVICE bool update_max(const Strip<columns>& scores, const Logits& logits, bool may_raise,
                                  bool is_cut) {
    return Base::update_max(scores, logits, may_raise || anchored, is_cut,
                            !anchored || is_cut ? kMaxGrowth<e4m3_t> : kCarefulGrowth);
  }

  // `round` rounds the exponentials, and returns whether one may be too large. Returns whether the output
  // must be multiplied by `scores_scale`, as `rescales` says so far.
  FLASHGEN_DEVICE bool round_in_range(Strip<columns>& exponentials, const Logits& logits, bool rescales,
                                      const auto& round) {
    const bool may_exceed = round();
    if constexpr (anchored) {
      if (warp_any(may_exceed)) {
        raise_maximum(exponentials, logits, rescales);
        round();
        return true;
      }
    }
    return rescales;
  }

 private:
  // Raises the reference maxima of rows with exponentials that are too large.
  FLASHGEN_DEVICE void raise_maximum(Strip<columns>& exponentials, const Logits& logits, bool rescales) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      float highest = 0.0f;
#pragma unroll
      for (i32 i = h; i < columns / 4; i += 2)
        highest = maximum(highest, maximum(exponentials[2 * i], exponentials[2 * i + 1]));
      highest = row_maximum(highest);
      const bool fails = highest > kLargestExponential;
      highest = fails ? kLargestExponential : highest;
      const float before = Base::rows.reference_max[h];
      const bool is_new = highest >= kTooLarge;
      const float reference =
          is_new ? before + logits.distance(log2_approx(highest) - kLargestPower) : before;
      const float factor = is_new ? exp2_approx(logits.powers(before - reference)) : 1.0f;
      Base::rows.reference_max[h] = reference;
      Base::rows.sum[h] = fails ? kInfinity : Base::rows.sum[h] * factor;
      Base::scores_scale[h] = rescales ? Base::scores_scale[h] * factor : factor;
#pragma unroll
      for (i32 i = h; i < columns / 4; i += 2) {
        exponentials[2 * i] *= factor;
        exponentials[2 * i + 1] *= factor;
      }
    }
  }
};

}  // namespace flashgen
