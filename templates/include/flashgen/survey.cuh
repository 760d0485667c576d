// Tables of what a tensor has in stretches along a dimension, see Survey in expression.cuh.
#pragma once
#include "flashgen/expression.cuh"

namespace flashgen {

struct SurveyConfig {
  i32 stretch;
  i32 blocks;
  i32 warps;
};

// The elements of a tensor along `axis`, with rows counted in the order of the other dimensions.
template <i32 axis, class T, i32 rank>
FLASHGEN_DEVICE Captured<T, 1> row_along(const Captured<T, rank>& tensor, i64 row) {
  i64 offset = 0;
#pragma unroll
  for (i32 i = rank - 1; i >= 0; --i) {
    if (i == axis) continue;
    offset += row % tensor.sizes[i] * tensor.strides[i];
    row /= tensor.sizes[i];
  }
  return {tensor.pointer + offset, {tensor.strides[axis]}, {tensor.sizes[axis]}};
}

// The smallest and the largest element of `count` stretches from `first` on, which a warp reads at once.
template <i32 stretch, i32 count, class T>
FLASHGEN_DEVICE void survey_stretches(const Captured<T, 1>& elements, i32 first, i32 (&smallest)[count],
                                      i32 (&largest)[count], Thread thread) {
#pragma unroll
  for (i32 s = 0; s < count; ++s) {
    smallest[s] = kLargestInt;
    largest[s] = kSmallestInt;
#pragma unroll
    for (i32 i = thread.lane; i < round_up(stretch, kWarpSize) + thread.lane; i += kWarpSize) {
      const i32 place = (first + s) * stretch + i;
      const i32 value = load(elements, place);
      if (i >= stretch || place >= elements.sizes[0]) continue;
      smallest[s] = smaller(smallest[s], value);
      largest[s] = larger(largest[s], value);
    }
  }
#pragma unroll
  for (i32 s = 0; s < count; ++s) {
#pragma unroll
    for (i32 apart = kWarpSize / 2; apart > 0; apart /= 2) {
      smallest[s] = smaller(smallest[s], shuffle(smallest[s], thread.lane ^ apart));
      largest[s] = larger(largest[s], shuffle(largest[s], thread.lane ^ apart));
    }
  }
}

// Fills the table of extremes: two numbers per stretch. Warp `first` of `warps` takes every `warps`-th entry.
template <i32 stretch, i32 axis, class T, i32 rank>
FLASHGEN_DEVICE void survey(const Captured<T, rank>& tensor, i32* table, i32 first, i32 warps,
                            Thread thread) {
  const i32 stretches = ceil_div(tensor.sizes[axis], stretch);
  const i64 entries = rows_along<axis>(tensor) * stretches;
  for (i64 entry = first; entry < entries; entry += warps) {
    i32 smallest[1], largest[1];
    survey_stretches<stretch>(row_along<axis>(tensor, entry / stretches), static_cast<i32>(entry % stretches),
                              smallest, largest, thread);
    if (thread.lane == 0) {
      table[2 * entry] = smallest[0];
      table[2 * entry + 1] = largest[0];
    }
  }
}

// Of a row's entries, the largest element so far and the smallest from there on, by all threads of a block;
// `scratch` holds two numbers for each warp.
template <i32 warps>
FLASHGEN_DEVICE void accumulate_extremes(const i32* entries, i32* running, i32 count, i32* scratch,
                                         Thread thread) {
  i32 largest_before = kSmallestInt, smallest_after = kLargestInt;
  for (i32 begin = 0; begin < count; begin += warps * kWarpSize) {
    // One from the front, one from the back.
    const i32 front = begin + thread.index(), back = count - 1 - front;
    i32 largest = front < count ? entries[2 * front + 1] : kSmallestInt;
    i32 smallest = back >= 0 ? entries[2 * back] : kLargestInt;
#pragma unroll
    for (i32 apart = 1; apart < kWarpSize; apart *= 2) {
      const i32 from = larger(thread.lane - apart, 0);
      largest = larger(largest, shuffle(largest, from));
      smallest = smaller(smallest, shuffle(smallest, from));
    }
    if (thread.lane == kWarpSize - 1) {
      scratch[thread.warp] = largest;
      scratch[warps + thread.warp] = smallest;
    }
    block_sync();
    i32 largest_of_all = largest_before, smallest_of_all = smallest_after;
    for (i32 warp = 0; warp < warps; ++warp) {
      if (warp == thread.warp) {
        largest = larger(largest, largest_of_all);
        smallest = smaller(smallest, smallest_of_all);
      }
      largest_of_all = larger(largest_of_all, scratch[warp]);
      smallest_of_all = smaller(smallest_of_all, scratch[warps + warp]);
    }
    if (front < count) running[2 * front] = largest;
    if (back >= 0) running[2 * back + 1] = smallest;
    largest_before = largest_of_all;
    smallest_after = smallest_of_all;
    block_sync();
  }
}

// Fills a table that is searched, if its rows are long enough for that: behind the extremes of all stretches
// comes what the elements so far, and from there on, have of them. A block takes every `blocks`-th row.
template <i32 stretch, i32 axis, i32 warps, class T, i32 rank>
FLASHGEN_DEVICE void survey_for_search(const Captured<T, rank>& tensor, i32* table, i32 block, i32 blocks,
                                       i32* scratch, Thread thread) {
  constexpr i32 at_once = 4;
  const i32 stretches = ceil_div(tensor.sizes[axis], stretch);
  if (stretches <= kFewStretches) {
    survey<stretch, axis>(tensor, table, block * warps + thread.warp, blocks * warps, thread);
    return;
  }
  const i64 rows = rows_along<axis>(tensor);
  for (i64 row = block; row < rows; row += blocks) {
    const Captured<T, 1> elements = row_along<axis>(tensor, row);
    i32* const entries = table + 2 * row * stretches;
    for (i32 first = at_once * thread.warp; first < stretches; first += at_once * warps) {
      i32 smallest[at_once], largest[at_once];
      survey_stretches<stretch>(elements, first, smallest, largest, thread);
#pragma unroll
      for (i32 s = 0; s < at_once; ++s) {
        if (thread.lane != s || first + s >= stretches) continue;
        entries[2 * (first + s)] = smallest[s];
        entries[2 * (first + s) + 1] = largest[s];
      }
    }
    block_sync();
    accumulate_extremes<warps>(entries, entries + 2 * rows * stretches, stretches, scratch, thread);
  }
}

}  // namespace flashgen
