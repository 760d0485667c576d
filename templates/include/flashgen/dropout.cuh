// Dropout: which pairs of a query and a key are left out of the product with V.
//
// Whether a pair is kept is a function of the seed, the offset, the sequence, the head, the query and the
// key, and of nothing else. One drawing serves what a lane holds of a block of 16 x 16 pairs: queries q and q
// + 8, keys k, k + 1, k + 8 and k + 9, with 15 bits for each, which leaves a bit to see a comparison's result
// in: two pairs are compared at once. A pair is left out if its number is below p * 2^15.
#pragma once
#include "flashgen/philox.cuh"
#include "flashgen/product.cuh"

namespace flashgen {

struct Dropout {
  u64 key;
  u32 offset;
  u32 place;
  u32 dropped_below;

  // The seed and the offset come by value or, for graphs that are launched again and again, from memory.
  template <class Params>
  FLASHGEN_DEVICE static Dropout of(const Params& p, i32 sequence, i32 head) {
    const bool in_memory = p.dropout_state != nullptr;
    const u64 seed = in_memory ? p.dropout_state[0] : p.dropout_seed;
    const u64 offset = in_memory ? p.dropout_state[1] : p.dropout_offset;
    return {seed ^ (offset >> 32 << 32), static_cast<u32>(offset),
            static_cast<u32>(sequence) << 16 | static_cast<u32>(head), p.dropout_below};
  }

  // The numbers of the block that pair (q, k) lies in, for the lane that holds the pair: those of row q are
  // the first and the third, two keys each, the even one in the low half.
  FLASHGEN_DEVICE FourWords draw(u32 q, u32 k) const {
    const u32 row = q / 16 * 8 + q % 8, column = k / 16 * 4 + k % 8 / 2;
    return philox({{row, column, place, offset}}, key);
  }

  // Bits 15 and 31: whether the pairs of the low and of the high half are kept. Others mean nothing.
  FLASHGEN_DEVICE u32 kept(u32 two) const { return (two | 0x80008000u) - dropped_below * 0x00010001u; }

  // Whether one pair is kept.
  FLASHGEN_DEVICE bool keeps(u32 q, u32 k) const {
    return (kept(draw(q, k).words[k / 8 % 2 * 2 + q / 8 % 2]) >> (16 * (k % 2) + 15) & 1u) != 0;
  }
};

// Which of a lane's pairs are kept, a bit for each: of even keys in the low half of a word, of odd ones
// above.
template <i32 row_blocks, i32 column_blocks>
struct KeptPairs {
  // Blocks of eight columns are drawn in twos. A warp that owns an odd number of them draws for each by
  // itself.
  static constexpr i32 together = column_blocks % 2 == 0 ? 2 : 1;
  static constexpr i32 width = 2 * together;
  static constexpr i32 draws = column_blocks / together;
  static constexpr i32 draws_per_word = 16 / width;
  static constexpr i32 words = ceil_div(draws, draws_per_word);
  u32 bits[row_blocks][words];

  // The warp's block begins at (first_q, first_key), multiples of 16 and of 8 times `together`. Loops stay
  // loops: drawn all at once, the numbers would take more registers than there are.
  FLASHGEN_DEVICE KeptPairs(const Dropout& dropout, i32 first_q, i32 first_key, Thread thread) {
    const u32 q = static_cast<u32>(first_q + thread.row());
    u32 key = static_cast<u32>(first_key + thread.column());
#pragma unroll
    for (i32 w = 0; w < words; ++w) {
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) bits[m][w] = 0;
#pragma unroll 1
      for (i32 i = 0; i < count(w); ++i, key += 8 * together) {
#pragma unroll
        for (i32 m = 0; m < row_blocks; ++m)
          bits[m][w] = bits[m][w] >> width | drawn(dropout, q + 16 * m, key);
      }
    }
  }

  FLASHGEN_DEVICE bool has(i32 m, i32 n, i32 e) const {
    const i32 draw = n / together, w = draw / draws_per_word;
    const i32 later = count(w) - 1 - draw % draws_per_word;
    const i32 place = 15 - (n % together * 2 + e / 2) - later * width;
    return (bits[m][w] >> (16 * (e % 2) + place) & 1u) != 0;
  }

  // Puts 0 for what is left out, and `factor` times what is kept.
  FLASHGEN_DEVICE void keep(Accumulator<row_blocks, column_blocks>& values, float factor) const {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) values[m][n][e] = has(m, n, e) ? values[m][n][e] * factor : 0.0f;
      }
    }
  }

 private:
  static constexpr i32 count(i32 w) { return smaller(draws_per_word, draws - w * draws_per_word); }

  // The bits of one drawing, in the upper ends of both halves.
  FLASHGEN_DEVICE static u32 drawn(const Dropout& dropout, u32 q, u32 key) {
    const FourWords numbers = dropout.draw(q, key);
    const bool right = together == 1 && key / 8 % 2 != 0;
    u32 found = 0;
#pragma unroll
    for (i32 i = 0; i < width; ++i) {
      const u32 two = right ? numbers.words[2 + i % 2] : numbers.words[i];
      found |= dropout.kept(two) >> i & 0x80008000u >> i;
    }
    return found;
  }
};

// Writes what is kept of some accumulators, and 0 for what is left out.
template <class Tile, i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void store_kept(Tile tile, i32 first_row, i32 first_column,
                                const Accumulator<row_blocks, column_blocks>& values,
                                const KeptPairs<row_blocks, column_blocks>& kept, Thread thread) {
  using T = typename Tile::Element;
  const i32 row = first_row + thread.row(), column = first_column + thread.column();
  const auto value = [&](i32 m, i32 n, i32 e) { return kept.has(m, n, e) ? values[m][n][e] : 0.0f; };
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        *reinterpret_cast<Pair<T>*>(tile.element_at(row + 16 * m + 8 * h, column + 8 * n)) =
            Pair<T>::from(value(m, n, 2 * h), value(m, n, 2 * h + 1));
      }
    }
  }
}

}  // namespace flashgen
