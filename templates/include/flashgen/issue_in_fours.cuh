// The products of the forward kernel for Hopper, issued four steps at a time (wgmma_fours.cuh). Steps are
// distinguished by templates and not by a loop: arrays that a loop counts through are memory to compilers
// until it is unrolled, and all that they do before takes longer.
#pragma once
#include "flashgen/panel.cuh"

namespace flashgen {

template <class QTile, class KTile, i32 step = 0>
FLASHGEN_DEVICE void issue_scores_from(Strip<KTile::rows>& scores, MatrixDescriptor left,
                                       MatrixDescriptor right) {
  using T = typename QTile::Element;
  const auto a = [&](i32 i) { return left.advanced(QTile::along_columns(step + i)); };
  const auto b = [&](i32 i) { return right.advanced(KTile::along_columns(step + i)); };
  if constexpr (step + 4 <= QTile::steps) {
    const MatrixDescriptor four_a[4] = {a(0), a(1), a(2), a(3)}, four_b[4] = {b(0), b(1), b(2), b(3)};
    if constexpr (step == 0) {
      wgmma_ss_first_four<T, KTile::rows>(scores, four_a, four_b);
    } else {
      wgmma_ss_four<T, KTile::rows>(scores, four_a, four_b);
    }
    issue_scores_from<QTile, KTile, step + 4>(scores, left, right);
  } else if constexpr (step < QTile::steps) {
    if constexpr (step == 0) {
      wgmma_ss_first<T, KTile::rows>(scores, a(0), b(0));
    } else {
      wgmma_ss<T, KTile::rows>(scores, a(0), b(0), true);
    }
    issue_scores_from<QTile, KTile, step + 1>(scores, left, right);
  }
}

// Issues S = Q K^T, of this warpgroup's 64 rows of Q.
template <class QTile, class KTile>
FLASHGEN_DEVICE void issue_scores(Strip<KTile::rows>& scores, QTile q, KTile k) {
  const MatrixDescriptor left = q.by_columns(), right = k.by_columns();
  wgmma_fence();
  issue_scores_from<QTile, KTile>(scores, left, right);
  wgmma_commit();
}

// Of the first `left` groups of 16 keys, the last one first.
template <class VTile, i32 left = VTile::rows / 16>
FLASHGEN_DEVICE void issue_output_from(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                       MatrixDescriptor right, bool kept) {
  using T = typename VTile::Element;
  constexpr i32 at_once = left >= 4 ? 4 : 1, first = left - at_once;
  const auto b = [&](i32 i) { return right.advanced(VTile::along_rows(first + i)); };
  if constexpr (at_once == 4) {
    const MatrixDescriptor four_b[4] = {b(0), b(1), b(2), b(3)};
    const auto& four_a = reinterpret_cast<const u32(&)[4][4]>(probabilities[first]);
    wgmma_rs_four<T, VTile::cols, Major::mn>(out, four_a, four_b, kept);
  } else {
    wgmma_rs<T, VTile::cols, Major::mn>(out, probabilities[first], b(0), kept);
  }
  if constexpr (first > 0) issue_output_from<VTile, first>(out, probabilities, right, true);
}

// Issues O += P V, or O = P V where O is not to be `kept`. The last keys come first, which is up to 1 %
// faster.
template <class VTile>
FLASHGEN_DEVICE void issue_output_in_fours(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                           VTile v, bool kept) {
  const MatrixDescriptor right = v.by_rows();
  wgmma_fence();
  issue_output_from<VTile>(out, probabilities, right, kept);
  wgmma_commit();
}

}  // namespace flashgen
