// What FlashAttention-1's forward kernel is made of: a block's warps split the keys of a tile, so each strip
// of rows needs all of them, and they meet in shared memory.
#pragma once
#include "flashgen/contain.cuh"
#include "flashgen/convert.cuh"
#include "flashgen/lineage/exponential.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

struct Fa1Config {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 strip;
  i32 stages;
  i32 warps;
  bool has_lower;
  bool has_upper;
  i32 access_bytes;
  bool async_copy;
  bool turing;
};

template <Fa1Config cfg, class T>
struct Fa1Shape {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 dim = round_up(cfg.head_dim, 16);
  static constexpr i32 dim_v = round_up(cfg.head_dim_v, 16);
  static constexpr i32 warp_keys = cfg.tile_kv / cfg.warps;
  // Wide outputs are computed in two halves, as each warp holds all columns of its product.
  static constexpr i32 columns = dim_v <= 64 ? dim_v : kIsFloat<T> && dim_v == 128 ? 32 : dim_v / 2;
  static constexpr i32 row_blocks = cfg.strip / 16;
  static constexpr i32 key_blocks = warp_keys / 8;
  static_assert(warp_keys % 16 == 0 && cfg.tile_q % cfg.strip == 0 && cfg.strip % 16 == 0,
                "warps multiply blocks of 16 x 16");

  using QTile = SharedTile<T, cfg.tile_q, dim>;
  using KTile = SharedTile<T, cfg.tile_kv, dim>;
  using VTile = SharedTile<T, cfg.tile_kv, dim_v>;
  // Keys and values arrive in parts, as copies by way of registers have no room for all of them.
  using KPart = SharedTile<T, 16, dim>;
  using VPart = SharedTile<T, 16, dim_v>;
  using QStream = TileStream<QTile, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using KStream = TileStream<KPart, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using VStream = TileStream<VPart, threads, cfg.head_dim_v, cfg.access_bytes, cfg.async_copy>;
  using Scores = Accumulator<row_blocks, key_blocks>;
  using Output = Accumulator<row_blocks, columns / 8>;
  using Probabilities = LeftRegisters<T, row_blocks, key_blocks>;

  // What the warps tell each other of a strip: [warp][row], and P V as [warp][row][column].
  struct Exchange {
    float maxima[cfg.warps][cfg.strip];
    float sums[cfg.warps][cfg.strip];
    // What O_i so far and the tile's product count in the new O_i.
    float old_share[cfg.strip];
    float new_share[cfg.strip];
    float outputs[cfg.warps][cfg.strip][dim_v];
  };
};

// Calls visit(m, h, row) for each of a lane's rows.
template <i32 row_blocks, class Visit>
FLASHGEN_DEVICE void for_rows(Thread thread, const Visit& visit) {
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) visit(m, h, 16 * m + 8 * h + thread.row());
  }
}

// The maximum or the sum of a warp's scores in one row, which four lanes share.
template <i32 columns, class Combine>
FLASHGEN_DEVICE float row_of(const float (&scores)[columns][4], i32 h, const Combine& combine) {
  float x = combine(scores[0][2 * h], scores[0][2 * h + 1]);
#pragma unroll
  for (i32 n = 1; n < columns; ++n) x = combine(x, combine(scores[n][2 * h], scores[n][2 * h + 1]));
  x = combine(x, shuffle_xor(x, 1));
  return combine(x, shuffle_xor(x, 2));
}

}  // namespace flashgen
