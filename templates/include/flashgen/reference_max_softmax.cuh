// The online softmax with as little work per score as possible. A row's exponentials are taken relative to a
// reference maximum. Any number near enough to the row's maximum gives the same result, because numerator and
// denominator share the factor. One chosen ahead of the first tile's maximum usually serves the whole row, so
// that no later tile needs shuffles or a rescale. If it does not serve, the row's sum grows too large. The
// tile is then recomputed with a better reference maximum: from its scores where there are registers to keep
// them, else from scores that the caller recomputes. Only a row's own maximum decides whether its reference
// maximum moves, so a row's bits do not depend on the other rows of its warp.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/row_statistics.cuh"

namespace flashgen {

// How far a row's maximum may exceed its reference maximum, in powers of two, where a tile may be recomputed.
// In half_t the limit is its range; otherwise values of up to 2^60 must have finite products.
template <class T>
constexpr float kSpan = 61.0f;
template <>
constexpr float kSpan<half_t> = 15.0f;
// A lane's sum over its columns of a tile. All rows that grow further exceed it, and few others.
template <class T>
constexpr float kGrown = 0x1p60f;
template <>
constexpr float kGrown<half_t> = 0x1p14f;
// As kSpan, where a bound moves reference maxima before exponentials are taken, and exponentials are scaled
// afterwards.
template <class T>
constexpr float kScaledSpan = 59.0f;
template <>
constexpr float kScaledSpan<half_t> = 13.0f;

// By how many powers of two a reference maximum is placed above the maximum, so that it rarely has to move.
// Exponentials must keep enough significant bits, and the logarithm of their sum loses accuracy with the
// distance. So the distance is `little` where logits are near zero, `more` where they are not, and `most`
// where they are shares of a cap: there logarithms are large, and rows may grow up to the cap. Rows whose
// first logits are at least `wide` above zero are likely to outgrow any of these.
template <class T>
struct Ahead {
  static constexpr float little = 24.0f, more = 60.0f, most = 90.0f, wide = 120.0f;
};
template <>
struct Ahead<half_t> {
  static constexpr float little = 6.0f, more = little, most = little, wide = 27.0f;
};
// Up to this distance from zero, in powers of two, a few of a row's first logits stand for all.
constexpr float kFar = 12.0f;

// How far a row's maximum may exceed its reference maximum, in powers of two, where a tile's exponentials are
// checked.
constexpr float kFinite = 118.0f;
// The most powers of two by which one factor may lower a row's sum and output without making them 0.
constexpr float kMostAtOnce = 120.0f;

// How to handle a row that grows far above its reference maximum.
enum class Regrowth {
  // It cannot happen: the reference maximum is the running maximum. This takes a pass over all scores.
  never,
  // It cannot happen: reference maxima move whenever a bound on the logits permits growth.
  bounded,
  // Exponentials have registers of their own. They are recomputed where such a bound requires it.
  checked,
  // Exponentials have registers of their own. Too large ones are recomputed from the scores.
  keeps_scores,
  // Exponentials replace the scores, so the caller recomputes the scores first.
  recomputes_scores,
};

// The steps for a tile: update_reference_max(), exponentiate(), both again where has_grown() and not
// watches(), and add().
template <class T, i32 columns, Regrowth regrowth, bool computes_before_wait, class Logits = ScaledProducts>
struct ReferenceMaxSoftmax {
  static constexpr float kNowhere = Logits::kNowhere;
  static constexpr bool in_place = regrowth != Regrowth::keeps_scores && regrowth != Regrowth::checked;
  static constexpr bool bounds_growth = regrowth == Regrowth::bounded || regrowth == Regrowth::checked;
  static constexpr bool checks = regrowth == Regrowth::checked;

  // How far a row's maximum may exceed its reference maximum, in powers of two.
  static constexpr float span = regrowth == Regrowth::never ? 0.0f
                                : bounds_growth             ? kScaledSpan<T>
                                                            : kSpan<T>;

  RowStatistics rows;
  // See update_reference_max().
  float factor[2];
  // The checks due before a tile's exponentials, 0 if none; the same for all lanes of a warp.
  u32 due;

  FLASHGEN_DEVICE void reset() {
    due = kNoReferenceMax;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      rows.reference_max[h] = kNowhere;
      rows.sum[h] = 0.0f;
    }
  }

  // Adds one more logit per row, before all others. One lane of each row counts it.
  FLASHGEN_DEVICE void take_in_sink(float logit, const Logits& logits, Thread thread) {
    const bool counts = logit > -kInfinity;
    due = counts ? 0 : kNoReferenceMax;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      rows.reference_max[h] = logit == -kInfinity ? kNowhere : logits.as_reference_max(logit);
      rows.sum[h] = counts && thread.column() == 0 ? 1.0f : 0.0f;
    }
  }

  // Moves reference maxima that are too far from the row's maximum. Returns whether the output so far must be
  // multiplied by `factor`.
  FLASHGEN_DEVICE bool update_reference_max(const Strip<columns>& scores, const Logits& logits) {
    factor[0] = factor[1] = 1.0f;
    if constexpr (regrowth == Regrowth::never) {
      follow_maximum(scores, logits);
      return true;
    }
    // Votes tell the assembler that warps do not diverge.
    if (warp_any((due & kNoReferenceMax) != 0)) set_reference_max(scores, logits);
    if (!warp_any(due >= kWatchedTile)) return false;
    follow_maximum(scores, logits);
    const bool moves = rescales();
    due = (due & kNoReferenceMax) | (moves ? kWatchedTiles : (due & ~kNoReferenceMax) - kWatchedTile);
    return moves;
  }

  // Whether the output so far must be multiplied by `factor`; the same for all lanes of a warp.
  FLASHGEN_DEVICE bool rescales() const { return warp_any(factor[0] != 1.0f || factor[1] != 1.0f); }
  // Whether update_reference_max() would leave all as it is.
  FLASHGEN_DEVICE bool is_settled() const { return regrowth != Regrowth::never && due == 0; }
  // Up to this logit neither of a lane's rows exceeds its reference maximum too far.
  FLASHGEN_DEVICE float growth_limit() const {
    if constexpr (regrowth == Regrowth::never) return -kInfinity;
    return -maximum(-rows.reference_max[0], -rows.reference_max[1]) + (kScaledSpan<T> - 0.125f);
  }
  // Whether a row with a logit of so many powers of two might exceed its reference maximum too far.
  FLASHGEN_DEVICE bool might_grow(float logit) const {
    if constexpr (regrowth == Regrowth::never) return true;
    return logit > growth_limit();
  }
  // The same, given the square of that number, which may be NaN.
  FLASHGEN_DEVICE bool might_grow_by_square(float square) const {
    const float limit = growth_limit();
    return !(square <= limit * maximum(limit, -limit));
  }
  // Whether a reference maximum is so near the highest logit that no exponential can be infinite before it is
  // checked.
  FLASHGEN_DEVICE static bool is_near(float highest, float reference_max) {
    return bounds_growth && reference_max >= highest - kFinite;
  }
  // Whether one of a lane's two rows has no reference maximum yet.
  FLASHGEN_DEVICE bool has_no_reference_max() const {
    return rows.reference_max[0] == kNowhere || rows.reference_max[1] == kNowhere;
  }
  // Whether a row's reference maximum must move to a logit found in the row.
  FLASHGEN_DEVICE bool has_grown_to(float found, i32 row, float distance = span) const {
    return found > rows.reference_max[row] + distance;
  }
  FLASHGEN_DEVICE void move_reference_max(i32 row, float reference_max, const Logits& logits = {}) {
    // Reference maxima that move in most tiles do not branch: the formula gives a factor of 1 if they stay.
    const bool stays = regrowth != Regrowth::never && reference_max == rows.reference_max[row];
    factor[row] = stays ? 1.0f : exp2_approx(logits.powers(rows.reference_max[row] - reference_max));
    rows.reference_max[row] = reference_max;
    rows.sum[row] *= factor[row];
  }
  // The reference maximum for a row with logit `found` that may grow to `highest`. It is no further ahead
  // than the growth requires, and by a whole power of two, so that a probability of 1 is not rounded.
  FLASHGEN_DEVICE static float reference_max_ahead(float found, float highest, bool is_little = false) {
    if constexpr (regrowth == Regrowth::never) return found;
    const float most = is_little ? Ahead<T>::little : Ahead<T>::most;
    const float room = highest - (kScaledSpan<T> - 1.0f) - found;
    return found + static_cast<float>(static_cast<i32>(room < most ? maximum(room, 0.0f) : most));
  }

  // The same for a row that may already have one. It never moves down. It moves up by at most what the row's
  // sum and output can be scaled by at once, unless `found` requires more.
  FLASHGEN_DEVICE float reference_max_ahead_in(i32 row, float found, float highest) const {
    const float reference_max = rows.reference_max[row],
                ahead = maximum(reference_max, reference_max_ahead(found, highest));
    const float most = reference_max == kNowhere ? ahead : maximum(reference_max + kMostAtOnce, found);
    return ahead < most ? ahead : most;
  }

  // The same without a bound on logits. It is further ahead where logits are far from zero: such rows grow
  // further, and their logarithms are rounded more coarsely anyway.
  FLASHGEN_DEVICE static float ahead_of(float found, const Logits& logits) {
    const float powers = logits.powers(found);
    const float apart = maximum(maximum(powers, -powers), Ahead<T>::little);
    const i32 ahead = static_cast<i32>(apart < Ahead<T>::more ? apart : Ahead<T>::more);
    return found + logits.distance(static_cast<float>(ahead));
  }

  // What is subtracted from a row's logits. A row without a reference maximum subtracts 0 if exponentials are
  // taken before all rows have reference maxima, or if kNowhere is -inf: -inf - -inf would be NaN.
  FLASHGEN_DEVICE float shift(i32 row) const {
    return bounds_growth || kNowhere == -kInfinity ? finite_shift(row) : rows.reference_max[row];
  }
  // The same where masked logits are finite and far below zero.
  FLASHGEN_DEVICE float finite_shift(i32 row) const {
    return rows.reference_max[row] == kNowhere ? 0.0f : rows.reference_max[row];
  }

  // Computes a tile's exponentials and their sums. The exponentials go to `probabilities`, rounded, if scores
  // are kept, and otherwise replace the scores.
  template <class AnyLogits>
  FLASHGEN_DEVICE void exponentiate(Strip<columns>& scores, Rounded<columns>& probabilities,
                                    AnyLogits& logits) {
    const float shifts[2] = {shift(0), shift(1)};
    float total[2][2] = {};
#pragma unroll
    for (i32 i = 0; i < columns / 4; ++i) {
      const i32 h = i % 2;
      logits.see(scores[2 * i], scores[2 * i + 1]);
      const float first = exp2_approx(logits.relative(scores[2 * i], shifts[h], h));
      const float second = exp2_approx(logits.relative(scores[2 * i + 1], shifts[h], h));
      total[h][0] += first;
      total[h][AnyLogits::sums - 1] += second;
      if constexpr (in_place || AnyLogits::replaced) {
        scores[2 * i] = first;
        scores[2 * i + 1] = second;
      } else {
        probabilities[i / 4][i % 4] = pack(T{}, first, second);
      }
    }
#pragma unroll
    for (i32 h = 0; h < 2; ++h) tile_sum[h] = total[h][0] + total[h][1];
  }

  // Recomputes the sums of exponentials that have replaced the scores, after some were removed.
  FLASHGEN_DEVICE void add_up(const Strip<columns>& exponentials) {
    tile_sum[0] = tile_sum[1] = 0.0f;
#pragma unroll
    for (i32 i = 0; i < columns / 2; ++i) tile_sum[i / 2 % 2] += exponentials[i];
  }

  // Whether this lane has a row that might exceed its reference maximum too far.
  FLASHGEN_DEVICE bool has_grown() const { return tile_sum[0] > kGrown<T> || tile_sum[1] > kGrown<T>; }
  // Called if any lane has such a row. Returns whether maxima were checked before, so that no row exceeds its
  // reference maximum too far after all. Otherwise they are checked from now on: in this tile, which is
  // recomputed, and in some that follow.
  FLASHGEN_DEVICE bool watches() {
    if (warp_any(due >= kWatchedTile)) return true;
    due |= kWatchedTiles;
    return false;
  }

  // Whether this lane has a row that exceeds its reference maximum too far, with no check before.
  FLASHGEN_DEVICE bool has_outgrown(bool are_scaled) const {
    return bounds_growth && are_scaled && (tile_sum[0] > kGrown<T> || tile_sum[1] > kGrown<T>);
  }
  // Moves the reference maxima of such rows, and scales a tile's exponentials with them. The output so far is
  // then to be multiplied by `factor`, as it may have been before.
  FLASHGEN_DEVICE void scale(Strip<columns>& exponentials, bool rescales) {
    float shrinks[2];
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float largest = row_maximum(tile_sum[h]);
      // Whole powers of two, so that nothing is rounded.
      const i32 power = largest > kGrown<T> ? static_cast<i32>(bits_of(largest) >> 23) - 127 : 0;
      shrinks[h] = float_of(static_cast<u32>(127 - power) << 23);
      factor[h] = rescales ? factor[h] * shrinks[h] : shrinks[h];
      rows.reference_max[h] += static_cast<float>(power);
      rows.sum[h] *= shrinks[h];
      tile_sum[h] *= shrinks[h];
    }
#pragma unroll
    for (i32 i = 0; i < columns / 2; ++i) exponentials[i] *= shrinks[i / 2 % 2];
  }

  // Adds the tile's exponentials to the rows'. `scratch` is any word of shared memory.
  FLASHGEN_DEVICE void add(u32 scratch) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) rows.sum[h] += tile_sum[h];
    // Other variants test the sums, which keeps the arithmetic before the wait anyway.
    if constexpr (computes_before_wait && (regrowth == Regrowth::never || bounds_growth))
      wgmma_compute_before_wait(rows.sum[0] + rows.sum[1], scratch);
  }

  // Exponentials that have taken the place of scores, rounded.
  FLASHGEN_DEVICE static void round(Rounded<columns>& probabilities, const Strip<columns>& scores) {
    if constexpr (in_place) round_replaced(probabilities, scores);
  }
  FLASHGEN_DEVICE static void round_replaced(Rounded<columns>& probabilities, const Strip<columns>& scores) {
#pragma unroll
    for (i32 i = 0; i < columns / 4; ++i)
      probabilities[i / 4][i % 4] = pack(T{}, scores[2 * i], scores[2 * i + 1]);
  }

 private:
  // Bits of `due`: some row needs a reference maximum, and the number of tiles whose maxima are still
  // checked. A check costs about half as much as recomputing a tile.
  static constexpr u32 kNoReferenceMax = 1, kWatchedTile = 2, kWatchedTiles = 15 * kWatchedTile;

  // This lane's share of each row's sum over the current tile.
  float tile_sum[2];

  // The largest score of a row in every `every`-th block of columns.
  FLASHGEN_DEVICE static float highest(const Strip<columns>& scores, i32 h, i32 every) {
    float found = -kInfinity;
#pragma unroll
    for (i32 n = 0; n < columns / 8; ++n) {
      if (n % every == 0) found = maximum(found, maximum(scores[4 * n + 2 * h], scores[4 * n + 2 * h + 1]));
    }
    return row_maximum(found);
  }

  // Sets a reference maximum for rows that have none: ahead of the maximum of a quarter of the columns, which
  // is usually near that of all. If that is far from zero, or if these columns are all masked, it takes all
  // columns.
  FLASHGEN_DEVICE void set_reference_max(const Strip<columns>& scores, const Logits& logits) {
    set_reference_max_from<4>(scores, logits);
    if (warp_any((due & kNoReferenceMax) != 0)) set_reference_max_from<1>(scores, logits);
  }
  template <i32 every>
  FLASHGEN_DEVICE void set_reference_max_from(const Strip<columns>& scores, const Logits& logits) {
    bool is_wide = false;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float found = logits.logit(highest(scores, h, every), h);
      const float powers = logits.powers(found);
      const bool serves = every == 1 || maximum(powers, -powers) < kFar;
      if (rows.reference_max[h] == kNowhere && serves)
        rows.reference_max[h] = maximum(ahead_of(found, logits), kNowhere);
      is_wide = is_wide || powers > Ahead<T>::wide;
    }
    if (!warp_any(has_no_reference_max())) due &= ~kNoReferenceMax;
    // Some row is likely to need recomputed tiles. Following the maxima of all rows costs less.
    if (every == 1 && warp_any(is_wide)) due |= kWatchedTiles;
  }

  // Moves the reference maxima of rows that reach too far above them, to the maximum or `little` ahead of it.
  // A larger distance would underflow what such rows had before.
  FLASHGEN_DEVICE void follow_maximum(const Strip<columns>& scores, const Logits& logits) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float found = logits.logit(highest(scores, h, 1), h);
      if constexpr (regrowth == Regrowth::never) {
        if (has_grown_to(found, h)) move_reference_max(h, found, logits);
      } else if (has_grown_to(found, h, logits.distance(span))) {
        move_reference_max(h, found + logits.distance(Ahead<T>::little), logits);
      }
    }
  }
};

}  // namespace flashgen
