// The online softmax of a warpgroup's rows. A lane holds two of its warp's 16 rows.
//
// `anchored`: exponentials are relative to a reference maximum that is set once, above the maximum of the
// row's first block. Numerator and denominator share the factor, so any reference near the row's maximum
// gives the same result. Later blocks then need no maximum, no shuffles and no rescale. A row whose logits
// outgrow the reference has a large sum. The epilogue detects it, and the tile is computed again with running
// maxima (tile_checks.cuh). Not `anchored`: a running maximum, as in FlashAttention-2.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/row_statistics.cuh"

namespace flashgen {

// How many powers of two a reference maximum lies above the first block's maximum, and above a running one:
// whole numbers, so that they round nothing.
template <class T>
constexpr float kHeadroom = 40.0f;
// It is small where probabilities would otherwise underflow.
template <>
constexpr float kHeadroom<half_t> = 6.0f;
template <class T>
constexpr float kRunningHeadroom = 0.0f;
// Logits may exceed the reference maximum by at most this many powers of two: products of exponentials with
// values up to 2^100 are then finite. A row whose logits exceed it has a larger sum than kLargestSum.
template <class T>
constexpr float kMaxGrowth = 24.0f;
template <>
constexpr float kMaxGrowth<half_t> = 14.0f;
template <class T>
constexpr float kLargestSum = 0x1p24f;
template <>
constexpr float kLargestSum<half_t> = 0x1p14f;

template <class T, i32 columns, bool anchored, class Logits>
struct RowSoftmax {
  static constexpr float kNoMax = Logits::kNoMax;
  // Whether blocks after a row's first one may multiply the output, other than in careful tiles.
  static constexpr bool may_rescale = !anchored;

  RowStatistics rows;
  // If update_max() returns true, the output so far must be multiplied by this.
  float scores_scale[2];
  // Whether some row of the warp has no reference maximum yet. A vote in each step would delay its products.
  bool lacks_max;

  FLASHGEN_DEVICE void reset() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      rows.reference_max[h] = kNoMax;
      rows.sum[h] = 0.0f;
    }
    lacks_max = true;
  }

  // Whether the next block sets a reference maximum, or may raise it. The same for all lanes of a warp.
  FLASHGEN_DEVICE bool needs_max() const { return !anchored || lacks_max; }

  // Sets the reference maximum of rows without one. If `may_raise`, also raises those that logits exceed by
  // `growth` powers of two, which changes no bit of other rows. A running maximum lies kRunningHeadroom below
  // the reference, so that `growth` is minus that. Returns whether the output must be multiplied by
  // `scores_scale`.
  FLASHGEN_DEVICE bool update_max(const Strip<columns>& scores, const Logits& logits, bool may_raise,
                                  bool /*is_cut*/,
                                  float growth = anchored ? kMaxGrowth<T> : 0.0f - kRunningHeadroom<T>) {
    constexpr float headroom = anchored ? kHeadroom<T> : kRunningHeadroom<T>;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      float highest = -kInfinity;
#pragma unroll
      for (i32 i = 0; i < columns / 4; ++i) {
        if (i % 2 == h) highest = maximum(highest, maximum(scores[2 * i], scores[2 * i + 1]));
      }
      const float found = logits.logit(row_maximum(highest), h), before = rows.reference_max[h];
      const bool is_new = found > (before == kNoMax ? kNoMax
                                   : may_raise      ? before + logits.distance(growth)
                                                    : kInfinity);
      const float reference = is_new ? found + logits.distance(headroom) : before;
      scores_scale[h] = is_new ? exp2_approx(logits.powers(before - reference)) : 1.0f;
      rows.reference_max[h] = reference;
      rows.sum[h] *= scores_scale[h];
    }
    lacks_max = anchored && warp_any(rows.reference_max[0] == kNoMax || rows.reference_max[1] == kNoMax);
    return may_raise;
  }

  // Replaces scores by their exponentials, and adds these to the sums.
  FLASHGEN_DEVICE void exponentiate(Strip<columns>& scores, const Logits& logits) {
    float total[2][2] = {};
#pragma unroll
    for (i32 i = 0; i < columns / 4; ++i) {
      const i32 h = i % 2;
      // A row without allowed scores has a reference maximum of -inf, and -inf - -inf would be NaN.
      const float shift =
          kNoMax == -kInfinity && rows.reference_max[h] == kNoMax ? 0.0f : rows.reference_max[h];
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        scores[2 * i + c] = exp2_approx(logits.relative(scores[2 * i + c], shift, h));
        total[h][c] += scores[2 * i + c];
      }
    }
#pragma unroll
    for (i32 h = 0; h < 2; ++h) rows.sum[h] += total[h][0] + total[h][1];
  }
};

// Exponentials rounded to T, as the left operand of P V.
template <class T, i32 columns>
FLASHGEN_DEVICE void round_to(Rounded<columns>& probabilities, const Strip<columns>& exponentials) {
#pragma unroll
  for (i32 i = 0; i < columns / 4; ++i)
    probabilities[i / 4][i % 4] = pack(T{}, exponentials[2 * i], exponentials[2 * i + 1]);
}

// Copies operands that a product in flight reads. Without the XOR ptxas would give both the same registers,
// and one could not be written while a product reads the other. It cannot know that the sign bit of
// `not_negative` is 0.
template <i32 count>
FLASHGEN_DEVICE void copy_operands(u32 (&to)[count][4], const u32 (&from)[count][4], i32 not_negative) {
  const u32 zero = static_cast<u32>(not_negative) & 0x80000000u;
#pragma unroll
  for (i32 i = 0; i < 4 * count; ++i) to[i / 4][i % 4] = from[i / 4][i % 4] ^ zero;
}

// Multiplies a warpgroup's rows by a factor each.
template <i32 count>
FLASHGEN_DEVICE void scale_rows(float (&out)[count], const float (&factor)[2]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) out[i] *= factor[i / 2 % 2];
}

}  // namespace flashgen
