// The online softmax of e4m3 probabilities.
//
// The largest e4m3 number is 448 and the smallest 2^-9, so that the reference maximum of a row cannot stay as
// far from its maximum as with 16 bits. It is set below the maximum of the row's first block, and raised by a
// whole number of powers of two when an exponential of a later block would be too large. Exponentials, sums
// and O are then multiplied by the same factor. Most blocks need none of it.
#pragma once
#include "flashgen/primitives_eight_bits.cuh"
#include "flashgen/sm90/row_softmax.cuh"

namespace flashgen {

constexpr float kLargestE4m3 = 448.0f;
// The largest exponential of the first block is 2^4. Sixteen equal ones, of which a lane adds two columns'
// up, are still below 448.
template <>
constexpr float kHeadroom<e4m3_t> = -4.0f;
// That of a running maximum is 2^8, as far from the smallest number as possible.
template <>
constexpr float kRunningHeadroom<e4m3_t> = -8.0f;
template <>
constexpr float kMaxGrowth<e4m3_t> = 8.0f;
// Sums are finite unless a logit exceeds the reference maximum by a hundred powers of two.
template <>
constexpr float kLargestSum<e4m3_t> = 0x1p100f;

template <i32 columns, bool anchored, class Logits>
struct EightBitSoftmax : RowSoftmax<e4m3_t, columns, anchored, Logits> {
  using Base = RowSoftmax<e4m3_t, columns, anchored, Logits>;
  using Base::rows;
  using Base::scores_scale;
  static constexpr bool may_rescale = true;

  // `round` may run twice: before the test, because conversions then fill gaps between exponentials.
  FLASHGEN_DEVICE bool exponentiate(Strip<columns>& scores, const Logits& logits, bool rescales,
                                    const auto& round) {
    float total[2][2] = {};
    Base::exponentials_of(scores, logits, total);
    round();
    if constexpr (anchored) {
      // No exponential is larger than the sum of some.
      const float bound = maximum(maximum(total[0][0], total[0][1]), maximum(total[1][0], total[1][1]));
      if (warp_any(bound > kLargestE4m3)) {
        raise_maximum(scores, logits, total, rescales);
        rescales = true;
        round();
      }
    }
#pragma unroll
    for (i32 h = 0; h < 2; ++h) rows.sum[h] += total[h][0] + total[h][1];
    return rescales;
  }

 private:
  // Raises the reference maxima of rows with exponentials too large for e4m3.
  FLASHGEN_DEVICE void raise_maximum(Strip<columns>& exponentials, const Logits& logits, float (&total)[2][2],
                                     bool rescales) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      float highest = 0.0f;
#pragma unroll
      for (i32 i = h; i < columns / 4; i += 2)
        highest = maximum(highest, maximum(exponentials[2 * i], exponentials[2 * i + 1]));
      highest = row_maximum(highest);
      const float power = static_cast<float>(static_cast<i32>(bits_of(highest) >> 23) - 127);
      const float before = rows.reference_max[h];
      const bool is_new = highest > kLargestE4m3;
      const float reference = is_new ? before + logits.distance(power + kHeadroom<e4m3_t>) : before;
      const float factor = is_new ? exp2_approx(logits.powers(before - reference)) : 1.0f;
      rows.reference_max[h] = reference;
      rows.sum[h] *= factor;
      scores_scale[h] = rescales ? scores_scale[h] * factor : factor;
#pragma unroll
      for (i32 c = 0; c < 2; ++c) total[h][c] *= factor;
#pragma unroll
      for (i32 i = h; i < columns / 4; i += 2) {
        exponentials[2 * i] *= factor;
        exponentials[2 * i + 1] *= factor;
      }
    }
  }
};

}  // namespace flashgen
