// What an online softmax keeps of each row from one tile of keys to the next.
#pragma once
#include "flashgen/logits.cuh"

namespace flashgen {

// The four lanes that share a row of accumulators combine their values.
FLASHGEN_DEVICE float row_maximum(float x) {
  x = maximum(x, shuffle_xor(x, 1));
  return maximum(x, shuffle_xor(x, 2));
}
FLASHGEN_DEVICE float row_total(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// Statistics of a warp's 16 rows, of which each lane has two: l/4 and l/4 + 8.
struct RowStatistics {
  float reference_max[2];  // the factor taken out of the row, in the unit of its logits' reference maxima
  float sum[2];            // this lane's share of the row's sum of exponentials

  // Every lane of a row gets the row's sum.
  FLASHGEN_DEVICE void finish() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) sum[h] = row_total(sum[h]);
  }
  FLASHGEN_DEVICE float normalizer(i32 h) const { return sum[h] == 0.0f ? 0.0f : reciprocal_approx(sum[h]); }
  // The whole powers of two in a sum are added to the reference maximum by themselves: where this is far
  // ahead, a logarithm of all of the sum would be as far from zero, and rounded accordingly.
  FLASHGEN_DEVICE float log_sum_exp(i32 h, const auto& logits) const {
    const u32 bits = bits_of(sum[h]);
    const float power = static_cast<float>(static_cast<i32>(bits >> 23) - 127);
    const float rest = log2_approx(float_of((bits & 0x7fffffu) | 0x3f800000u));
    const float finite = logits.natural_log(reference_max[h] + logits.distance(power), rest);
    return sum[h] == 0.0f ? -kInfinity : sum[h] < kInfinity ? finite : sum[h];
  }
};

}  // namespace flashgen
