// The steps that fours leave over, one to an asm statement (issue_in_fours.cuh).
#pragma once
#include "flashgen/issue_in_fours.cuh"

namespace flashgen {

template <class QTile, class KTile, i32 step>
FLASHGEN_DEVICE void issue_rest(Strip<KTile::rows>& scores, MatrixDescriptor left, MatrixDescriptor right,
                                ScoreSteps<QTile, KTile, step>) {
  using T = typename QTile::Element;
  const MatrixDescriptor a = left.advanced(QTile::along_columns(step));
  const MatrixDescriptor b = right.advanced(KTile::along_columns(step));
  if constexpr (step == 0) {
    wgmma_ss_first<T, KTile::rows>(scores, a, b);
  } else {
    wgmma_ss<T, KTile::rows>(scores, a, b, true);
  }
  if constexpr (step + 1 < QTile::steps)
    issue_rest(scores, left, right, ScoreSteps<QTile, KTile, step + 1>{});
}

template <class VTile, i32 count>
FLASHGEN_DEVICE void issue_rest(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                MatrixDescriptor right, bool accumulate, OutputSteps<VTile, count>) {
  wgmma_rs<typename VTile::Element, VTile::cols, Major::mn>(
      out, probabilities[count - 1], right.advanced(VTile::along_rows(count - 1)), accumulate);
  if constexpr (count > 1) issue_rest(out, probabilities, right, true, OutputSteps<VTile, count - 1>{});
}

}  // namespace flashgen
