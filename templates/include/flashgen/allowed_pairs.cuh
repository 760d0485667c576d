// Which pairs a mask allows, as bits: they are found once in a step, and asked for twice.
#pragma once
#include "flashgen/band.cuh"

namespace flashgen {

// Of a lane's `count` elements of a strip whose rows are keys: bit 2n + c of rows[h] is for element 4n + 2h +
// c.
template <i32 count>
struct AllowedPairs {
  static_assert(count <= 64, "a lane's share of a row has a bit for each element");
  u32 rows[2] = {~0u, ~0u};

  FLASHGEN_DEVICE bool allows(i32 i) const { return (rows[i % 4 / 2] & 1u << (i / 4 * 2 + i % 2)) != 0; }

  // Puts `value` where a pair is not allowed.
  FLASHGEN_DEVICE void forbid(float (&strip)[count], float value) const {
#pragma unroll
    for (i32 i = 0; i < count; ++i) strip[i] = allows(i) ? strip[i] : value;
  }
  FLASHGEN_DEVICE void forbid(u32 (&rounded)[count / 8][4]) const {
#pragma unroll
    for (i32 i = 0; i < count; ++i) {
      if (!allows(i)) rounded[i / 8][i % 8 / 2] &= i % 2 == 0 ? 0xffff0000u : 0xffffu;
    }
  }
};

// Of a band, and of queries that exist. The warp's rows begin at first_key.
template <i32 count, bool has_lower, bool has_upper>
FLASHGEN_DEVICE AllowedPairs<count> allowed_pairs(const Band<has_lower, has_upper>& mask, i32 first_q,
                                                  i32 first_key, Thread thread) {
  const i32 q = first_q + thread.column();
  AllowedPairs<count> allowed;
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 key = first_key + thread.row() + 8 * h;
    // Queries from q + first to q + end.
    u32 bits = ~bits_from(mask.len_q - q);
    if constexpr (has_upper) bits &= bits_from(key - mask.upper - q);
    if constexpr (has_lower) bits &= ~bits_from(key - mask.lower - q + 1);
    allowed.rows[h] = key < mask.len_kv ? bits : 0;
  }
  return allowed;
}

// Of any mask, which never allows queries beyond the last. It is evaluated in a loop: so much code would
// stand there otherwise.
template <i32 count, class Mask>
FLASHGEN_DEVICE AllowedPairs<count> allowed_pairs(const Mask& mask, i32 first_q, i32 first_key,
                                                  Thread thread) {
  const i32 q = first_q + thread.column(), key = first_key + thread.row();
  AllowedPairs<count> allowed = {{0, 0}};
#pragma unroll 1
  for (i32 n = 0; n < count / 4; ++n) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      if (mask.allows(q + 8 * n + e % 2, key + 8 * (e / 2))) allowed.rows[e / 2] |= 1u << (2 * n + e % 2);
    }
  }
  return allowed;
}

}  // namespace flashgen
