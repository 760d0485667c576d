// Prefetching the elements of a captured tensor for a lane's pairs, such as a bias. A lane has two rows of
// scores, and in each block of eight columns two neighbors.
#pragma once
#include "flashgen/expression.cuh"

namespace flashgen {

template <class T, i32 blocks>
struct Neighbors {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "two neighbors are one or two words");
  static constexpr i32 words = static_cast<i32>(sizeof(T)) / 2;
  u32 bits[2][blocks][words];

  FLASHGEN_DEVICE float at(i32 h, i32 n, i32 c) const {
    if constexpr (words == 2) {
      return float_of(bits[h][n][c]);
    } else {
      return to_float(T{static_cast<u16>(bits[h][n][0] >> (16 * c))});
    }
  }
  // Stores two elements.
  FLASHGEN_DEVICE void put(i32 h, i32 n, T first, T second) {
    if constexpr (words == 2) {
      bits[h][n][0] = bits_of(first);
      bits[h][n][1] = bits_of(second);
    } else {
      bits[h][n][0] = first.bits | static_cast<u32>(second.bits) << 16;
    }
  }
  // Loads two elements from an aligned address.
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

// Loads from two rows of `tensor`, whose last dimension is indexed by the column. Two neighbors take one load
// if they are contiguous and aligned in all rows of the warp. Otherwise each takes a load, with its index
// clamped to the tensor.
template <i32 blocks, class T, i32 rank>
FLASHGEN_DEVICE Neighbors<T, blocks> neighbors(const Captured<T, rank>& tensor, const T* first,
                                               const T* second, i32 first_column, Thread thread) {
  const T* const rows[2] = {first, second};
  const i64 stride = tensor.strides[rank - 1];
  const i32 columns = tensor.sizes[rank - 1], column = first_column + thread.column();
  const u64 places =
      reinterpret_cast<u64>(first + first_column) | reinterpret_cast<u64>(second + first_column);
  const bool apart = stride != 1 || first_column + 8 * blocks > columns || places % (2 * sizeof(T)) != 0;
  Neighbors<T, blocks> found;
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

// The same for transposed scores, whose rows are keys. For each block of eight queries and eight keys a lane
// loads two neighboring keys of one query. Shuffles bring them to the lanes that own the pairs.
template <class T, i32 blocks>
struct AcrossNeighbors {
  static_assert(sizeof(T) == 2, "two neighbors are one word");
  u32 bits[blocks][2];

  // The element for score i of the lane's strip. All lanes of a warp must pass the same i.
  FLASHGEN_DEVICE float at(i32 i, Thread thread) const {
    const i32 lane = 4 * (thread.column() + i % 2) + thread.row() / 2;
    const u32 two = bits_of(shuffle(float_of(bits[i / 4][i % 4 / 2]), lane));
    return to_float(T{static_cast<u16>(two >> (16 * (thread.row() % 2)))});
  }
};

// Loads for the queries from first_q on and sixteen keys. `row_at(q)` is a query's row of `tensor`.
template <i32 blocks, class T, i32 rank, class RowAt>
FLASHGEN_DEVICE AcrossNeighbors<T, blocks> across_neighbors(const Captured<T, rank>& tensor,
                                                            const RowAt& row_at, i32 first_q, i32 first_key,
                                                            Thread thread) {
  const i32 q = first_q + thread.row(), key = first_key + thread.column();
  // All rows are aligned to two elements if the pointer is and all strides are even.
  u64 steps = reinterpret_cast<u64>(tensor.pointer) / sizeof(T);
#pragma unroll
  for (i32 axis = 0; axis < rank - 1; ++axis) steps |= static_cast<u64>(tensor.strides[axis]);
  const bool apart =
      tensor.strides[rank - 1] != 1 || first_key + 16 > tensor.sizes[rank - 1] || steps % 2 != 0;
  AcrossNeighbors<T, blocks> found;
  if (!apart) {
#pragma unroll
    for (i32 n = 0; n < blocks; ++n) {
      const T* const row = row_at(q + 8 * n) + key;
#pragma unroll
      for (i32 h = 0; h < 2; ++h) found.bits[n][h] = *reinterpret_cast<const u32*>(row + 8 * h);
    }
  } else {
    // A few blocks at a time: all loads in flight would take twice the registers.
    constexpr i32 at_once = 4;
    static_assert(blocks % at_once == 0, "each turn of the loop has as many blocks");
    found = {};
#pragma unroll 1
    for (i32 first = 0; first < blocks; first += at_once) {
#pragma unroll
      for (i32 i = 0; i < 2 * at_once; ++i) {
        const i32 h = i % 2;
        const T* const row = row_at(q + 8 * (first + i / 2));
        const u32 left = row[tensor.offset(rank - 1, key + 8 * h)].bits;
        const u32 right = row[tensor.offset(rank - 1, key + 8 * h + 1)].bits;
#pragma unroll
        for (i32 n = i / 2; n < blocks; n += at_once) {
          if (n == first + i / 2) found.bits[n][h] = left | right << 16;
        }
      }
    }
  }
  return found;
}

}  // namespace flashgen
