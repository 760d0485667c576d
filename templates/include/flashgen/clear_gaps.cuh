// Rows of packed arrays that belong to no sequence.
#pragma once
#include "flashgen/band.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

struct ClearGapsConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 rows;
  i32 warps;
  i32 access_bytes;
};

// Where the sequences of packed rows begin, as the other kernels read it: none is longer than `longest`.
struct PackedRows {
  const i32* starts;
  i32 sequences;
  i32 longest;
  i64 total;

  // Gap g lies before sequence g, and the last one behind all sequences. Gaps and sequences together form a
  // path from row 0 to row `total`, so they cover every row, whatever numbers `starts` holds.
  FLASHGEN_DEVICE i64 gap_begin(i32 gap) const {
    if (gap == 0) return 0;
    const i64 first = starts[gap - 1], length = starts[gap] - first;
    return first + (length < 0 ? 0 : length < longest ? length : longest);
  }
  FLASHGEN_DEVICE i64 gap_end(i32 gap) const { return gap < sequences ? starts[gap] : total; }
};

FLASHGEN_DEVICE i32 clamp_row(i64 row, Range rows) {
  return static_cast<i32>(row < rows.begin ? rows.begin : row > rows.end ? rows.end : row);
}

// Calls `visit` with each stretch of `rows` that lies in a gap. Lane l looks at gaps l, l + 32 ...
FLASHGEN_DEVICE void for_each_gap(const PackedRows& packed, Range rows, Thread thread, const auto& visit) {
#pragma unroll 1
  for (i32 first = 0; first <= packed.sequences; first += kWarpSize) {
    const i32 gap = first + thread.lane;
    const bool exists = gap <= packed.sequences;
    const Range own{exists ? clamp_row(packed.gap_begin(gap), rows) : 0,
                    exists ? clamp_row(packed.gap_end(gap), rows) : 0};
    for (u32 left = warp_ballot(own.size() > 0); left != 0; left &= left - 1) {
      const i32 lane = lowest_bit(left);
      visit(Range{shuffle(own.begin, lane), shuffle(own.end, lane)});
    }
  }
}

// Zeros into whole rows of a contiguous (rows, heads, head_dim) array, by one warp. A null array is none.
template <i32 access_bytes, class T>
FLASHGEN_DEVICE void clear_whole_rows(T* data, Range rows, i64 row_elements, Thread thread) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  if (data == nullptr) return;
  const i64 end = rows.end * row_elements;
  for (i64 i = rows.begin * row_elements + thread.lane * chunk_elements; i < end;
       i += kWarpSize * chunk_elements) {
    const i32 valid = end - i < chunk_elements ? static_cast<i32>(end - i) : chunk_elements;
    write_chunk<T, access_bytes>(data + i, Vec16{.words = {0, 0, 0, 0}}, valid);
  }
}

// Minus infinity into rows of a contiguous (heads, total) array.
FLASHGEN_DEVICE void clear_log_sums(float* lse, Range rows, i32 heads, i64 total, Thread thread) {
  if (lse == nullptr) return;
  for (i32 head = 0; head < heads; ++head) {
    for (i32 row = rows.begin + thread.lane; row < rows.end; row += kWarpSize)
      lse[head * total + row] = -kInfinity;
  }
}

}  // namespace flashgen
