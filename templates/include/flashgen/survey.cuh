// Tables of the smallest and the largest element of stretches of a captured tensor.
#pragma once
#include "flashgen/expression.cuh"

namespace flashgen {

struct SurveyConfig {
  i32 stretch;
  i32 blocks;
  i32 warps;
};

// Fills the table of `tensor` along `axis`: for each row along it, two numbers per stretch, rows in the order
// of the other dimensions. Warp `first` of `warps` takes every `warps`-th entry.
template <i32 stretch, i32 axis, class T, i32 rank>
FLASHGEN_DEVICE void survey(const Captured<T, rank>& tensor, i32* table, i32 first, i32 warps,
                            Thread thread) {
  const i32 length = tensor.sizes[axis], stretches = ceil_div(length, stretch);
  i64 rows = 1;
#pragma unroll
  for (i32 i = 0; i < rank; ++i) rows *= i == axis ? 1 : tensor.sizes[i];
  for (i64 entry = first; entry < rows * stretches; entry += warps) {
    const i32 begin = static_cast<i32>(entry % stretches) * stretch;
    i64 row = entry / stretches, offset = 0;
#pragma unroll
    for (i32 i = rank - 1; i >= 0; --i) {
      if (i == axis) continue;
      offset += row % tensor.sizes[i] * tensor.strides[i];
      row /= tensor.sizes[i];
    }
    i32 smallest = kLargestInt, largest = kSmallestInt;
    for (i32 i = begin + thread.lane; i < smaller(begin + stretch, length); i += kWarpSize) {
      const i32 value = element_value(tensor.pointer[offset + i * tensor.strides[axis]]);
      smallest = smaller(smallest, value);
      largest = larger(largest, value);
    }
#pragma unroll
    for (i32 apart = kWarpSize / 2; apart > 0; apart /= 2) {
      smallest = smaller(smallest, shuffle(smallest, thread.lane ^ apart));
      largest = larger(largest, shuffle(largest, thread.lane ^ apart));
    }
    if (thread.lane == 0) {
      table[2 * entry] = smallest;
      table[2 * entry + 1] = largest;
    }
  }
}

}  // namespace flashgen
