// Which pairs dropout keeps in transposed scores: rows are keys, columns are queries.
#pragma once
#include "flashgen/dropout.cuh"
#include "flashgen/panel.cuh"

namespace flashgen {

// Steps of 16 queries that make a chunk of transposed scores.
constexpr i32 kChunkSteps = 2;
constexpr i32 kChunkElements = 8 * kChunkSteps;
constexpr i32 chunks_of(i32 queries) { return queries / (16 * kChunkSteps); }

// A bit for each of a lane's pairs: of even queries in the low half of a word, of odd ones above.
//
// One call of Philox serves neighboring keys k and k + 1, but not neighboring queries (dropout.cuh). Here a
// lane holds neighboring queries and only one of the two keys. So of two lanes with neighboring keys, one
// draws for even queries and the other one for odd ones. They exchange halves of words.
template <i32 queries>
struct KeptQueries {
  static constexpr i32 width = 4;
  static constexpr i32 draws = queries / 16;
  static constexpr i32 draws_per_word = 4;
  static constexpr i32 words = ceil_div(draws, draws_per_word);
  static_assert(draws % draws_per_word == 0, "words are full");
  // From one row of a strip to the next.
  static constexpr i32 row_lanes = 4;
  u32 bits[words];

  // The warp's block begins at (first_q, first_key), multiples of 16. Loops stay loops, as in KeptPairs.
  FLASHGEN_DEVICE KeptQueries(const Dropout& dropout, i32 first_q, i32 first_key, Thread thread) {
    const u32 odd = static_cast<u32>(thread.row() % 2), key = static_cast<u32>(first_key + thread.row());
    u32 q = static_cast<u32>(first_q + thread.column()) + odd;
#pragma unroll
    for (i32 w = 0; w < words; ++w) {
      u32 own = 0;
#pragma unroll 1
      for (i32 i = 0; i < draws_per_word; ++i, q += 16) {
        const FourWords numbers = dropout.draw(q, key);
        own >>= width;
#pragma unroll
        for (i32 n = 0; n < width; ++n) own |= dropout.kept(numbers.words[n]) >> n & 0x80008000u >> n;
      }
      const u32 other = static_cast<u32>(shuffle(static_cast<i32>(own), thread.lane ^ row_lanes));
      bits[w] = odd ? other >> 16 | (own & 0xffff0000u) : (own & 0xffffu) | other << 16;
    }
  }

  // Element i of the strip.
  FLASHGEN_DEVICE bool has(i32 i) const {
    const i32 n = i / 4, draw = n / 2, later = draws_per_word - 1 - draw % draws_per_word;
    const i32 place = 15 - (i % 4 / 2 * 2 + n % 2) - later * width;
    return (bits[draw / draws_per_word] >> (16 * (i % 2) + place) & 1u) != 0;
  }
};

}  // namespace flashgen
