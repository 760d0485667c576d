// S = Q K^T and O += P V of the forward kernel.
//
// Four steps of 16 are one asm statement (wgmma_fours.cuh). Recursion takes less time to compile than a loop
// to unroll. issue_rest() is for steps after the last four (issue_single_steps.cuh).
#pragma once
#include "flashgen/panel.cuh"

namespace flashgen {

template <class QTile, class KTile, i32 step = 0>
struct ScoreSteps {};

template <class QTile, class KTile, i32 step>
FLASHGEN_DEVICE void issue_steps(Strip<KTile::rows>& scores, MatrixDescriptor left, MatrixDescriptor right,
                                 ScoreSteps<QTile, KTile, step> steps) {
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
    issue_steps(scores, left, right, ScoreSteps<QTile, KTile, step + 4>{});
  } else if constexpr (step < QTile::steps) {
    issue_rest(scores, left, right, steps);
  }
}

// Issues S = Q K^T, of this warpgroup's 64 rows of Q.
template <class QTile, class KTile>
FLASHGEN_DEVICE void issue_scores(Strip<KTile::rows>& scores, QTile q, KTile k) {
  const MatrixDescriptor left = q.by_columns(), right = k.by_columns();
  wgmma_fence();
  issue_steps(scores, left, right, ScoreSteps<QTile, KTile>{});
  wgmma_commit();
}

// The first `count` groups of 16 keys.
template <class VTile, i32 count = VTile::rows / 16>
struct OutputSteps {};

template <class VTile, i32 count>
FLASHGEN_DEVICE void issue_steps(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                 MatrixDescriptor right, bool accumulate, OutputSteps<VTile, count> steps) {
  if constexpr (count >= 4) {
    const auto b = [&](i32 i) { return right.advanced(VTile::along_rows(count - 4 + i)); };
    const MatrixDescriptor four_b[4] = {b(0), b(1), b(2), b(3)};
    const auto& four_a = reinterpret_cast<const u32(&)[4][4]>(probabilities[count - 4]);
    wgmma_rs_four<typename VTile::Element, VTile::cols, Major::mn>(out, four_a, four_b, accumulate);
    issue_steps(out, probabilities, right, true, OutputSteps<VTile, count - 4>{});
  } else if constexpr (count > 0) {
    issue_rest(out, probabilities, right, accumulate, steps);
  }
}

// Issues O = P V, plus O if `accumulate`. The last keys come first, which is up to 1 % faster.
template <class VTile>
FLASHGEN_DEVICE void issue_output_in_fours(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                           VTile v, bool accumulate) {
  const MatrixDescriptor right = v.by_rows();
  wgmma_fence();
  issue_steps(out, probabilities, right, accumulate, OutputSteps<VTile>{});
  wgmma_commit();
}

}  // namespace flashgen
