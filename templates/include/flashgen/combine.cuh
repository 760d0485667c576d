// The log-sum-exps of the splits of a row: the maximum, and the sum of exponentials. The lanes of a warp take
// splits in turns, and all get the same.
#pragma once
#include "flashgen/convert.cuh"

namespace flashgen {

struct CombineConfig {
  i32 head_dim_v;
  i32 rows;
  i32 warps;
};

FLASHGEN_DEVICE float splits_maximum(const float* lse, i64 rows, i32 splits, Thread thread) {
  float most = -kInfinity;
  for (i32 split = thread.lane; split < splits; split += kWarpSize) most = maximum(most, lse[split * rows]);
#pragma unroll
  for (i32 mask = kWarpSize / 2; mask > 0; mask /= 2) most = maximum(most, shuffle_xor(most, mask));
  return most;
}

// A split's weight is exp(L_s - m); that of one without keys is 0.
FLASHGEN_DEVICE float weight_of(float lse, float shift) { return exp2_approx((lse - shift) * kLog2E); }

FLASHGEN_DEVICE float splits_total(const float* lse, i64 rows, i32 splits, float shift, Thread thread) {
  float total = 0.0f;
  for (i32 split = thread.lane; split < splits; split += kWarpSize)
    total += weight_of(lse[split * rows], shift);
#pragma unroll
  for (i32 mask = kWarpSize / 2; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
  return total;
}

}  // namespace flashgen
