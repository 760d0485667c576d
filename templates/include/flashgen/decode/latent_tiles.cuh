// Tiles of the latent kernel in shared memory: copies of queries, and the product of streamed operands.
#pragma once
#include "flashgen/decode/key_slices.cuh"

namespace flashgen {

// Starts the copies of all rows of a tile of queries. Rows that do not exist repeat the last one.
template <i32 threads, i32 access_bytes, class Tile, class Params>
FLASHGEN_DEVICE void copy_queries(Tile tile, const QueryRows<typename Tile::Element>& source, const Params& p,
                                  const DecodeItem& item, Thread thread) {
  using T = typename Tile::Element;
#pragma unroll 1
  for (i32 i = thread.index(); i < Tile::rows * Tile::chunks; i += threads) {
    const i32 row = i / Tile::chunks, chunk = i % Tile::chunks;
    copy_chunk_async<T, access_bytes>(shared_address(tile.chunk_at(row, chunk)),
                                      source.at(RowPlace::of(p, item, row)) + chunk * Tile::chunk_elements,
                                      Tile::chunk_elements);
  }
}

// accumulator += left * right. Fragments of both operands are fetched one step ahead.
template <class T, i32 steps, class Left, class Right, i32 column_blocks>
FLASHGEN_DEVICE void multiply_streamed(Accumulator<1, column_blocks>& accumulator, const Left& left,
                                       const Right& right) {
  constexpr i32 pairs = ceil_div(column_blocks, 2);
  LeftFragment<T> a[2];
  RightFragment<T> b[2][pairs][2];
  const auto load = [&](i32 step) {
    left.load(a[step % 2], 0, step);
#pragma unroll
    for (i32 pair = 0; pair < pairs; ++pair)
      load_right<column_blocks>(b[step % 2][pair], right, 2 * pair, step);
  };
  // With few products a step, the compiler would load more steps ahead than there are registers for.
  constexpr i32 unrolled = column_blocks > 2 ? steps : 4;
  load(0);
#pragma unroll unrolled
  for (i32 step = 0; step < steps; ++step) {
    if (step + 1 < steps) load(step + 1);
#pragma unroll
    for (i32 n = 0; n < column_blocks; ++n)
      multiply_block<false>(accumulator[0][n], a[step % 2], b[step % 2][n / 2][n % 2]);
  }
  mma_finish();
}

}  // namespace flashgen
