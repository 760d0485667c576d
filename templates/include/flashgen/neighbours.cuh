// Elements of a captured tensor that the pairs of a lane read, fetched before they are needed: a lane has two
// rows of scores, and of each block of eight columns two neighbours.
#pragma once
#include "flashgen/expression.cuh"

namespace flashgen {

template <class T, i32 blocks>
struct Neighbours {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "two neighbours are one or two words");
  static constexpr i32 words = static_cast<i32>(sizeof(T)) / 2;
  u32 bits[2][blocks][words];

  FLASHGEN_DEVICE float at(i32 h, i32 n, i32 c) const {
    if constexpr (words == 2) {
      return float_of(bits[h][n][c]);
    } else {
      return to_float(T{static_cast<u16>(bits[h][n][0] >> (16 * c))});
    }
  }
  // Two elements, ...
  FLASHGEN_DEVICE void put(i32 h, i32 n, T first, T second) {
    if constexpr (words == 2) {
      bits[h][n][0] = bits_of(first);
      bits[h][n][1] = bits_of(second);
    } else {
      bits[h][n][0] = first.bits | static_cast<u32>(second.bits) << 16;
    }
  }
  // ... or those at an address that is aligned to both, by one load.
  FLASHGEN_DEVICE void put(i32 h, i32 n, const T* two) {
    if constexpr (words == 2) {
      const u64 both = *reinterpret_cast<const u64*>(two);
      bits[h][n][0] = static_cast<u32>(both);
      bits[h][n][1] = static_cast<u32>(both >> 32);
    } else {
      bits[h][n][0] = *reinterpret_cast<const u32*>(two);
    }
  }
};

// Of two rows of `tensor`, whose last dimension is that of the columns. Neighbours come together where they
// lie together, which a warp finds out for all its rows; elsewhere one by one, moved into the tensor as those
// of other loads are.
template <i32 blocks, class T, i32 rank>
FLASHGEN_DEVICE Neighbours<T, blocks> neighbours(const Captured<T, rank>& tensor, const T* first,
                                                 const T* second, i32 first_column, Thread thread) {
  const T* const rows[2] = {first, second};
  const i64 stride = tensor.strides[rank - 1];
  const i32 columns = tensor.sizes[rank - 1], column = first_column + thread.column();
  const u64 places =
      reinterpret_cast<u64>(first + first_column) | reinterpret_cast<u64>(second + first_column);
  const bool apart = stride != 1 || first_column + 8 * blocks > columns || places % (2 * sizeof(T)) != 0;
  Neighbours<T, blocks> found;
  if (!warp_any(apart)) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const T* const row = rows[h] + column;
#pragma unroll
      for (i32 n = 0; n < blocks; ++n) found.put(h, n, row + 8 * n);
    }
  } else {
#pragma unroll
    for (i32 n = 0; n < blocks; ++n) {
      const i64 places[2] = {tensor.offset(rank - 1, column + 8 * n),
                             tensor.offset(rank - 1, column + 8 * n + 1)};
#pragma unroll
      for (i32 h = 0; h < 2; ++h) found.put(h, n, rows[h][places[0]], rows[h][places[1]]);
    }
  }
  return found;
}

}  // namespace flashgen
