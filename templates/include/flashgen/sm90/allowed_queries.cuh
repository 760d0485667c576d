// Which pairs of a warp's 16 keys and a block of queries the mask allows, as bits.
#pragma once
#include "flashgen/sm90/backward_scores.cuh"
#include "flashgen/band.cuh"

namespace flashgen {

// Of a lane's `count` elements of a strip whose rows are keys: bit 2n + c of rows[h] is for element 4n + 2h +
// c.
template <i32 count>
struct AllowedQueries {
  static_assert(count <= 64, "a lane's share of a row has a bit for each element");
  u32 rows[2];

  FLASHGEN_DEVICE bool allows(i32 i) const { return (rows[i % 4 / 2] & 1u << (i / 4 * 2 + i % 2)) != 0; }

  FLASHGEN_DEVICE void forbid(float (&scores)[count]) const {
#pragma unroll
    for (i32 i = 0; i < count; ++i) scores[i] = allows(i) ? scores[i] : -kInfinity;
  }
  // The same for a chunk of probabilities, where 0 takes the place of the exponential of -inf.
  FLASHGEN_DEVICE void forbid(u32 (&probabilities)[count / 8][4], i32 chunk) const {
#pragma unroll
    for (i32 i = kChunkElements * chunk; i < kChunkElements * (chunk + 1); ++i) {
      if (!allows(i)) probabilities[i / 8][i % 8 / 2] &= i % 2 == 0 ? 0xffff0000u : 0xffffu;
    }
  }
};

// Of a band, and of queries that exist. The warp's rows begin at first_key.
template <i32 count, bool has_lower, bool has_upper>
FLASHGEN_DEVICE AllowedQueries<count> allowed_queries(const Band<has_lower, has_upper>& mask, i32 first_q,
                                                      i32 first_key, Thread thread) {
  const i32 q = first_q + thread.column();
  AllowedQueries<count> allowed;
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 key = first_key + thread.row() + 8 * h;
    u32 bits = ~bits_from(mask.len_q - q);
    if constexpr (has_upper) bits &= bits_from(key - mask.upper - q);
    if constexpr (has_lower) bits &= ~bits_from(key - mask.lower - q + 1);
    allowed.rows[h] = key < mask.len_kv ? bits : 0;
  }
  return allowed;
}

// Of any mask, which never allows queries beyond the last. A loop keeps the code short.
template <i32 count, class Mask>
FLASHGEN_DEVICE AllowedQueries<count> allowed_queries(const Mask& mask, i32 first_q, i32 first_key,
                                                      Thread thread) {
  const i32 q = first_q + thread.column(), key = first_key + thread.row();
  AllowedQueries<count> allowed = {{0, 0}};
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
