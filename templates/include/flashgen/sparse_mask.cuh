// A lane's pairs of a block of 16 rows under a mask that is more than a band. band.cuh has the same for
// bands.
#pragma once
#include "flashgen/band.cuh"

namespace flashgen {

// Sets the bits of a lane's pairs that a mask forbids. Rows beyond the last query may get any bits. The
// mask's bounds on keys give a word of bits at once. The rest of the mask is evaluated pair by pair. Each
// lane first loads what the rest reads of one of 32 keys, and the lanes exchange these by shuffles. A costly
// mask is evaluated in a loop over single columns: unrolled, it takes too much code and too many registers.
template <i32 column_blocks, class Mask>
FLASHGEN_DEVICE void find_forbidden(u32 (&forbidden)[2], const Mask& mask, i32 first_q, i32 first_key,
                                    Thread thread) {
  static_assert(column_blocks <= 16, "a lane's share of a row has a bit for each column");
  constexpr i32 blocks_at_once = kWarpSize / 8;
  const typename Mask::Query queries[2] = {mask.query_at(first_q + thread.row()),
                                           mask.query_at(first_q + thread.row() + 8)};
  const i32 first_column = first_key + thread.column();
  const auto from = [&](i32 k) { return bits_from(larger(k, 0) - first_column); };
#pragma unroll
  for (i32 h = 0; h < 2; ++h) forbidden[h] = ~(mask.ordered_bits(queries[h], from) & ~from(mask.len_kv));
  if constexpr (Mask::has_rest) {
#pragma unroll 1
    for (i32 first = 0; first < column_blocks; first += blocks_at_once) {
      const i32 key = first_key + 8 * first;
      const typename Mask::Key own = mask.key_at(key + thread.lane);
      // Four columns are a lane's share of 16 keys. The addresses for 32 keys need too many registers.
      constexpr i32 at_once = Mask::is_light ? 4 : 1;
      static_assert(column_blocks % 2 == 0, "tiles are of 16 keys");
      const i32 count = 2 * smaller(blocks_at_once, column_blocks - first);
#pragma unroll 1
      for (i32 begin = 0; begin < count; begin += at_once) {
#pragma unroll
        for (i32 i = begin; i < begin + at_once; ++i) {
          const i32 column = 8 * (i / 2) + thread.column() + i % 2;
          const typename Mask::Key of_column = own.of_lane(column, key + column);
#pragma unroll
          for (i32 h = 0; h < 2; ++h) {
            if (!mask.allows_rest(queries[h], of_column)) forbidden[h] |= 1u << (2 * first + i);
          }
        }
      }
    }
  }
}

// Puts `value` where the bits of a lane's two rows are set. The assembler tests seven bits at once.
template <i32 column_blocks>
FLASHGEN_DEVICE void put_where(Accumulator<1, column_blocks>& values, float value, const u32 (&bits)[2]) {
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
#pragma unroll
    for (i32 i = 0; i < 2 * column_blocks; ++i) {
      if ((bits[h] & 1u << i) != 0) values[0][i / 2][2 * h + i % 2] = value;
    }
  }
}

// Sets the bits of a lane's pairs that a mask allows.
template <i32 column_blocks, class Mask>
FLASHGEN_DEVICE void find_allowed(u32 (&allowed)[2], const Mask& mask, i32 first_q, i32 first_key,
                                  Thread thread) {
  find_forbidden<column_blocks>(allowed, mask, first_q, first_key, thread);
#pragma unroll
  for (i32 h = 0; h < 2; ++h) allowed[h] = ~allowed[h];
}

// Whether a mask is so cheap that pairs are masked as they are evaluated. The bits of a costlier mask are
// computed first.
template <class Mask>
constexpr bool kIsDirect = Mask::is_light && Mask::is_quick && !Mask::in_groups;

// Puts `value` where the mask forbids a pair.
template <class Mask, i32 column_blocks>
FLASHGEN_DEVICE void mask_keys(Accumulator<1, column_blocks>& values, float value, const Mask& mask,
                               i32 first_q, i32 first_key, Thread thread) {
  static_assert(column_blocks <= 16, "a lane's share of a row has a bit for each column");
  constexpr i32 blocks_at_once = kWarpSize / 8;
  if constexpr (Mask::has_rest && kIsDirect<Mask>) {
    const typename Mask::Query queries[2] = {mask.query_at(first_q + thread.row()),
                                             mask.query_at(first_q + thread.row() + 8)};
    const i32 first_column = first_key + thread.column();
    const auto from = [&](i32 k) { return bits_from(larger(k, 0) - first_column); };
    const auto allowed_by_order = [&](i32 h) {
      return mask.ordered_bits(queries[h], from) & ~from(mask.len_kv);
    };
    const u32 allowed[2] = {allowed_by_order(0), allowed_by_order(1)};
#pragma unroll
    for (i32 first = 0; first < column_blocks; first += blocks_at_once) {
      const i32 key = first_key + 8 * first;
      const typename Mask::Key own = mask.key_at(key + thread.lane);
#pragma unroll
      for (i32 i = 0; i < 2 * smaller(blocks_at_once, column_blocks - first); ++i) {
        const i32 column = 8 * (i / 2) + thread.column() + i % 2;
        const typename Mask::Key of_column = own.of_lane(column, key + column);
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          const bool in_order = (allowed[h] & 1u << (2 * first + i)) != 0;
          if (!(in_order & mask.allows_rest(queries[h], of_column)))
            values[0][first + i / 2][2 * h + i % 2] = value;
        }
      }
    }
  } else {
    u32 forbidden[2];
    find_forbidden<column_blocks>(forbidden, mask, first_q, first_key, thread);
    put_where(values, value, forbidden);
  }
}

}  // namespace flashgen
