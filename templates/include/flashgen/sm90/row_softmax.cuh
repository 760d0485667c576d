// The online softmax of a warpgroup's rows, of which each lane has two in every warp's sixteen.
//
// `anchored`: exponentials are relative to a reference maximum that is set once, above the maximum of the
// row's first block. Numerator and denominator share the factor, so any reference near the row's maximum
// gives the same result. Later blocks then need no maximum, no shuffles and no rescale. A row that outgrows
// its reference is found in the end by its sum, and its tile is repeated with running maxima
// (tile_checks.cuh). Otherwise: exponentials relative to the running maximum, as in FlashAttention-2.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/row_statistics.cuh"

namespace flashgen {

// How many powers of two a reference maximum lies above the first block's maximum: a whole number, so that it
// rounds nothing. In half_t the probabilities need the bits.
template <class T>
constexpr float kHeadroom = 40.0f;
template <>
constexpr float kHeadroom<half_t> = 6.0f;
// A row has outgrown its reference maximum if it exceeds it by so many powers of two. Its products with
// values up to 2^100 are finite.
template <class T>
constexpr float kMostGrowth = 24.0f;
template <>
constexpr float kMostGrowth<half_t> = 14.0f;
// Rows that have outgrown it have larger sums.
template <class T>
constexpr float kLargestSum = 0x1p24f;
template <>
constexpr float kLargestSum<half_t> = 0x1p14f;

template <class T, i32 columns, bool anchored, class Logits>
struct RowSoftmax {
  static constexpr float kNone = Logits::kNowhere;

  RowStatistics rows;
  // What the output so far is to be multiplied by.
  float factor[2];
  // Whether some row of the warp has no reference maximum yet. Kept, because a vote in each step would delay
  // its products.
  bool lacks_reference;

  FLASHGEN_DEVICE void reset() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      rows.reference_max[h] = kNone;
      rows.sum[h] = 0.0f;
    }
    lacks_reference = true;
  }

  // Whether the next block may move some row's reference maximum. The same for all lanes of a warp.
  FLASHGEN_DEVICE bool may_move() const { return !anchored || lacks_reference; }

  // Moves reference maxima: of rows without one, and if it `watches`, of rows that have outgrown theirs.
  // Returns whether the output so far must be multiplied by `factor`. To watch changes no bit of other rows.
  FLASHGEN_DEVICE bool move(const Strip<columns>& scores, const Logits& logits, bool watches) {
    constexpr float most = anchored ? kMostGrowth<T> : 0.0f, headroom = anchored ? kHeadroom<T> : 0.0f;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      float highest = -kInfinity;
#pragma unroll
      for (i32 i = 0; i < columns / 4; ++i) {
        if (i % 2 == h) highest = maximum(highest, maximum(scores[2 * i], scores[2 * i + 1]));
      }
      const float found = logits.logit(row_maximum(highest), h), before = rows.reference_max[h];
      const bool moves = found > (before == kNone ? kNone
                                  : watches       ? before + logits.distance(most)
                                                  : kInfinity);
      const float reference = moves ? found + logits.distance(headroom) : before;
      factor[h] = moves ? exp2_approx(logits.powers(before - reference)) : 1.0f;
      rows.reference_max[h] = reference;
      rows.sum[h] *= factor[h];
    }
    lacks_reference = anchored && warp_any(rows.reference_max[0] == kNone || rows.reference_max[1] == kNone);
    return watches;
  }

  // Replaces scores by their exponentials, and adds these to the sums.
  FLASHGEN_DEVICE void exponentiate(Strip<columns>& scores, const Logits& logits) {
    float total[2][2] = {};
#pragma unroll
    for (i32 i = 0; i < columns / 4; ++i) {
      const i32 h = i % 2;
      // A row without allowed scores has a reference maximum of -inf, and -inf - -inf would be NaN.
      const float shift =
          kNone == -kInfinity && rows.reference_max[h] == kNone ? 0.0f : rows.reference_max[h];
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

// probabilities = others. `not_negative` is a number that never is negative: without it the assembler would
// give both the same registers, and one could not be written while a product reads the other.
template <i32 count>
FLASHGEN_DEVICE void take_over(u32 (&probabilities)[count][4], const u32 (&others)[count][4],
                               i32 not_negative) {
  const u32 zero = static_cast<u32>(not_negative) & 0x80000000u;
#pragma unroll
  for (i32 i = 0; i < 4 * count; ++i) probabilities[i / 4][i % 4] = others[i / 4][i % 4] ^ zero;
}

// Multiplies a warpgroup's rows by a factor each.
template <i32 count>
FLASHGEN_DEVICE void scale_rows(float (&out)[count], const float (&factor)[2]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) out[i] *= factor[i / 2 % 2];
}

// Whether the first of a lane's two rows is finite.
template <i32 count>
FLASHGEN_DEVICE bool is_finite_row(const float (&strip)[count]) {
  float zero[2] = {};
#pragma unroll
  for (i32 i = 0; i < count / 2; ++i)
    zero[i % 2] = fused_multiply_add(strip[4 * (i / 2) + i % 2], 0.0f, zero[i % 2]);
  return zero[0] + zero[1] == 0.0f;
}

}  // namespace flashgen
