// e4m3 queries for a cache of 8-bit floats.
#pragma once
#include "flashgen/decode/eight_bit_queries.cuh"
#include "flashgen/eight_bits.cuh"
#include "flashgen/scales.cuh"

namespace flashgen {

// A lane's four elements are one word.
template <>
struct QueryWords<e4m3_t> {
  template <i32 head_dim>
  FLASHGEN_DEVICE static LeftFragment<half_t> read(const e4m3_t* const (&rows)[2], i32 step, Thread thread) {
    LeftFragment<half_t> fragment = {};
    const i32 first = 16 * step + 2 * thread.column();
    if (16 * step + 16 <= head_dim || first < head_dim) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const u32 word = *reinterpret_cast<const u32*>(rows[h] + first);
        // Without the instruction of sm_89, because this happens once for all keys of a part.
        to_halves<false>(e4m3_t{}, word, fragment.words[h], fragment.words[h + 2]);
      }
    }
    return fragment;
  }
  template <class Params>
  FLASHGEN_DEVICE static float scale(const Params& p, const DecodeItem& item, RowPlace place) {
    return query_scale(p, item.sequence, place.head, item.head_kv);
  }
};

}  // namespace flashgen
