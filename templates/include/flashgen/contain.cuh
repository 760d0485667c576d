// Keeping NaN and infinity where they belong. A product with a probability of 0 is 0 * NaN = NaN, so a
// non-finite value in a key that a query may not attend to would reach the query through any tile that the
// mask cuts through. Such tiles are searched first. If one holds a non-finite value, which is rare, the
// non-finite values are cleared before the product, and the results they should have reached become NaN
// afterwards.
#pragma once
#include "flashgen/non_finite.cuh"
#include "flashgen/walk.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

FLASHGEN_DEVICE bool is_non_finite(float x) { return non_finite_signs<float>(bits_of(x)) != 0; }
FLASHGEN_DEVICE bool is_non_finite(half_t x) { return non_finite_signs<half_t>(x.bits) != 0; }
FLASHGEN_DEVICE bool is_non_finite(bfloat16_t x) { return non_finite_signs<bfloat16_t>(x.bits) != 0; }
FLASHGEN_DEVICE bool is_non_finite(e4m3_t x) { return non_finite_signs<e4m3_t>(x.bits) != 0; }

template <class T>
FLASHGEN_DEVICE T not_a_number() {
  if constexpr (kIsFloat<T>) {
    return float_of(0x7fffffffu);
  } else {
    return T{0x7fff};
  }
}

// Whether some element of the tile is not finite; all threads of the block call it and get the same answer.
template <i32 threads, class Tile>
FLASHGEN_DEVICE bool holds_non_finite(Tile tile, Thread thread) {
  u32 signs = 0;
#pragma unroll 4
  for (i32 i = thread.index(); i < Tile::rows * Tile::chunks; i += threads) {
    const Vec16 chunk = *reinterpret_cast<const Vec16*>(tile.data + i * kChunkBytes);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Tile::Element>(chunk.words[w]);
  }
  return block_any(signs != 0);
}

// Replaces every element that is not finite by 0.
template <i32 threads, class Tile>
FLASHGEN_DEVICE void clear_non_finite(Tile tile, Thread thread) {
  using T = typename Tile::Element;
  constexpr i32 bits = 8 * static_cast<i32>(sizeof(T));
#pragma unroll 1
  for (i32 i = thread.index(); i < Tile::bytes / static_cast<i32>(sizeof(u32)); i += threads) {
    u32& word = reinterpret_cast<u32*>(tile.data)[i];
    const u32 signs = non_finite_signs<T>(word);
    // From the sign bit of each non-finite element to all of its bits.
    word &= kIsFloat<T> ? (signs != 0 ? 0u : ~0u) : ~((signs >> (bits - 1)) * ((1u << bits % 32) - 1u));
  }
  block_sync();
}

// Puts NaN into the results of queries that attend to a non-finite value in a tile that the mask cuts
// through. `results` are the tile of queries from first_q on, `source` the keys' rows that were multiplied;
// every thread takes columns of its own.
template <i32 threads, i32 head_dim, i32 tile_kv, class Tile, class Mask, class T = typename Tile::Element>
FLASHGEN_DEVICE void mark_non_finite_results(Tile results, i32 first_q, GlobalRows<const T> source,
                                             Range keys, const Mask& mask, Thread thread) {
  const i32 end_q = smaller(first_q + Tile::rows, mask.len_q);
#pragma unroll 1
  for (i32 column = thread.index(); column < head_dim; column += threads) {
#pragma unroll 1
    for (i32 key = keys.begin * tile_kv; key < smaller(keys.end * tile_kv, source.row_count); ++key) {
      const i32 first_key = key / tile_kv * tile_kv;
      if (mask.is_full(first_q, end_q, first_key, first_key + tile_kv) ||
          !is_non_finite(*source.at(key, column)))
        continue;
#pragma unroll 1
      for (i32 q = first_q; q < end_q; ++q) {
        if (mask.allows(q, key))
          *results.element_at(q - first_q, column) = not_a_number<typename Tile::Element>();
      }
    }
  }
}

}  // namespace flashgen
