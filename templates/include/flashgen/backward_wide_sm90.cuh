// Parts of the two backward kernels for wide heads on Hopper, where dK or dV of 64 keys fills a consumer's
// registers. One kernel keeps keys and computes dK and dV, the other one keeps queries and computes dQ.
#pragma once
#include "flashgen/backward_step_sm90.cuh"
#include "flashgen/contain.cuh"
#include "flashgen/fragments.cuh"
#include "flashgen/ring.cuh"
#include "flashgen/row_tile.cuh"

namespace flashgen {

// ---- dK and dV. Scores are transposed, and both consumers work on all keys of the tile. One computes P and
// dV, and passes P on. The other one computes dS and dK.

struct BackwardKeysConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 q_slots;
  i32 do_slots;
  i32 p_slots;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  i32 section_heads;
  bool sums_first;
  bool has_lower;
  bool has_upper;
};

template <BackwardKeysConfig cfg, class T>
struct BackwardKeysShape {
  static_assert(cfg.tile_kv == kWarpgroupRows && cfg.consumers == 2, "two consumers share 64 keys");
  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using DOTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using Scores = Strip<cfg.tile_q>;
  using RoundedScores = Rounded<cfg.tile_q>;

  static constexpr i32 row_bytes = cfg.tile_q * 4;
  // Bytes of P: of a warp's keys, and of all.
  static constexpr i32 part_bytes = kWarpRows * cfg.tile_q * 4;
  static constexpr i32 p_bytes = 4 * part_bytes;
  static constexpr u32 warps_each = 4;
};

// dS = P (dP - D), where D has already been subtracted from dP, and P comes from `write_fragments`. With
// `has_forbidden`, forbidden pairs get 0, even if dP is NaN.
template <u32 forbidden, i32 count>
FLASHGEN_DEVICE void multiply_by_fragments(float (&dp)[count], const float* part, bool has_forbidden,
                                           Thread thread) {
  float p[count];
  read_fragments(p, part, thread);
  if (has_forbidden) {
    multiply_where_allowed<forbidden>(dp, p);
  } else {
    multiply_strips(dp, p);
  }
}

// ---- dQ. The rows of scores are queries, 64 per consumer. Each step takes a tile of keys.

struct BackwardQueryConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 k_slots;
  i32 v_slots;
  i32 stats_rows;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  i32 section_heads;
  bool longest_first;
  bool has_lower;
  bool has_upper;
};

template <BackwardQueryConfig cfg, class T>
struct BackwardQueryShape {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 queries");
  static_assert((cfg.k_slots & (cfg.k_slots - 1)) == 0 && (cfg.v_slots & (cfg.v_slots - 1)) == 0,
                "K and V share a slot counter");
  static_assert(cfg.stats_rows == kWarpgroupRows, "a row of statistics holds one consumer's queries");
  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using DOTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using Scores = Strip<cfg.tile_kv>;
  using RoundedScores = Rounded<cfg.tile_kv>;
  using DQ = Strip<cfg.head_dim>;

  // L and D of a consumer's queries.
  static constexpr i32 stats_bytes = 2 * kWarpgroupRows * 4;
  static constexpr u32 consumer_warps = 4 * cfg.consumers;
};

// A tile of queries as the producer announces it.
struct QueryTile {
  RowTile rows;
  // Whether some query of it attends to some key.
  i32 attends;
};

// Initializes each row of a strip with one value.
template <i32 count>
FLASHGEN_DEVICE void spread_rows(float (&strip)[count], const float (&rows)[2]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] = rows[i / 2 % 2];
}

// P = exp(score - L) times the slope of the score, if rows are queries.
template <class Score, i32 count>
FLASHGEN_DEVICE void score_slopes(float (&products)[count], const Score& score, float scale,
                                  const float (&negated_lse_log2)[2], i32 first_q, i32 first_key,
                                  Thread thread) {
  const typename Score::First first = score.first_at(first_q + thread.row(), first_key + thread.column());
#pragma unroll
  for (i32 i = 0; i < count; ++i) {
    const i32 h = i / 2 % 2;
    const ScoreAndSlope of = score.value_and_slope(products[i] * scale, first, 8 * h, 8 * (i / 4) + i % 2);
    products[i] = exp2_approx(fused_multiply_add(of.value, kLog2E, negated_lse_log2[h])) * of.slope;
  }
}

// ---- Non-finite values, see contain.cuh. Several warps share a tile: each has every `warps`-th chunk of a
// row's 16 bytes, so that a column's values are one warp's.

template <class T, i32 warps>
FLASHGEN_DEVICE bool is_column_of_warp(i32 column, i32 warp) {
  constexpr i32 elements = kChunkBytes / static_cast<i32>(sizeof(T));
  return column / elements % warps == warp;
}

// Calls `visit(chunk)` for those of the warp's chunks that are the lane's, in shared memory from `base` on.
template <i32 warps, class Tile, class Visit>
FLASHGEN_DEVICE void for_chunks_of_warp(u8* base, Tile tile, i32 warp, Thread thread, const Visit& visit) {
#pragma unroll 1
  for (i32 chunk = warp; chunk < 8 * Tile::panels; chunk += warps) {
#pragma unroll 2
    for (i32 row = thread.lane; row < Tile::rows; row += kWarpSize)
      visit(*reinterpret_cast<Vec16*>(base + (tile.chunk_at(row, chunk) - shared_address(base))));
  }
}

// Whether a lane's chunks hold NaN or infinities.
template <i32 warps, class Tile>
FLASHGEN_DEVICE bool holds_non_finite_values(u8* base, Tile tile, i32 warp, Thread thread) {
  u32 signs = 0;
  for_chunks_of_warp<warps>(base, tile, warp, thread, [&](const Vec16& chunk) {
    const Vec16 read = chunk;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Tile::Element>(read.words[w]);
  });
  return signs != 0;
}

// Replaces them by 0.
template <i32 warps, class Tile>
FLASHGEN_DEVICE void clear_non_finite_values(u8* base, Tile tile, i32 warp, Thread thread) {
  for_chunks_of_warp<warps>(base, tile, warp, thread, [&](Vec16& chunk) {
#pragma unroll 1
    for (i32 w = 0; w < 4; ++w) {
      u32& word = chunk.words[w];
      word &= ~((non_finite_signs<typename Tile::Element>(word) >> 15) * 0xffffu);
    }
  });
}

}  // namespace flashgen
