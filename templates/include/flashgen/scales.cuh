// The scales of 8-bit queries, keys and values.
#pragma once
#include "flashgen/element.cuh"

namespace flashgen {

// A scale of a head or of some of its rows. `scales` is null where it is 1.
FLASHGEN_DEVICE float input_scale(const float* scales, i64 at) {
  return scales == nullptr ? 1.0f : scales[at];
}

// The scale of 8-bit queries that attend to a cache. Query heads that share keys may have scales of their
// own.
FLASHGEN_DEVICE float query_scale(const auto& p, i32 sequence, i32 head, i32 head_kv) {
  const i32 member = head - head_kv * p.group;
  return input_scale(p.q_scale,
                     sequence * p.q_scale_batch + head_kv * p.q_scale_group + member * p.q_scale_head);
}

// What a product of a query and a key is multiplied by: at least 2^-100. Blocks of zeros have tiny scales,
// whose product may underflow to 0, and 0 times a forbidden logit of -inf would be NaN.
FLASHGEN_DEVICE float logit_factor(float of_q, float of_k) {
  const float factor = of_q * of_k;
  return factor < 0x1p-100f ? 0x1p-100f : factor;
}

}  // namespace flashgen
