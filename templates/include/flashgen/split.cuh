// Results of a block that goes over some of the keys: what it leaves for the combine kernel.
#pragma once
#include "flashgen/cache.cuh"
#include "flashgen/forward.cuh"

namespace flashgen {

// Calls mark(row, column) for each result of the tile of queries that a non-finite value in a tile that the
// mask cuts through should have reached; every thread takes columns of its own. See mark_non_finite_results.
template <i32 threads, i32 head_dim, i32 tile_kv, i32 tile_q, class Rows, class Mask, class Mark>
FLASHGEN_DEVICE void visit_non_finite_results(i32 first_q, Rows source, Range keys, const Mask& mask,
                                              Thread thread, const Mark& mark) {
  const i32 end_q = smaller(first_q + tile_q, mask.len_q);
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
        if (mask.allows(q, key)) mark(q - first_q, column);
      }
    }
  }
}

// Writes the rows of a warp, from `first_row` of the tile on, in float32: row r at destination + r *
// head_dim.
template <i32 head_dim, i32 row_blocks, i32 column_blocks, class Logits>
FLASHGEN_DEVICE void store_partial(float* destination, i32 row_count, i32 first_row,
                                   const Accumulator<row_blocks, column_blocks>& out,
                                   const OnlineSoftmax<row_blocks, Logits>& softmax, Thread thread) {
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = first_row + 16 * m + 8 * h + thread.row();
      const float scale = softmax.normalizer(m, h);
      if (row >= row_count) continue;
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 c = 0; c < 2; ++c) {
          const i32 column = 8 * n + thread.column() + c;
          if (column < head_dim)
            destination[static_cast<i64>(row) * head_dim + column] = out[m][n][2 * h + c] * scale;
        }
      }
    }
  }
}

}  // namespace flashgen
