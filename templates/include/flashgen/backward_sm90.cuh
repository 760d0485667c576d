// The parts of the backward kernel for Hopper that computes dK, dV and dQ together. Scores are transposed:
// their rows are keys, 64 for each warpgroup, and their columns are queries. So P and dS in registers are the
// left operands of dV and dK without a transposition.
#pragma once
#include "flashgen/backward_step_sm90.cuh"
#include "flashgen/contain.cuh"
#include "flashgen/fragments.cuh"
#include "flashgen/ring.cuh"
#include "flashgen/row_tile.cuh"

namespace flashgen {

constexpr i32 kPanelColumns = 64;

struct BackwardSm90Config {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 q_slots;
  i32 do_slots;
  i32 ds_slots;
  i32 sum_slots;
  i32 rounded_slots;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  i32 section_heads;
  // In tiles of keys, see AddingOrder.
  i32 order_group = 0;
  bool has_lower;
  bool has_upper;
};

// Which part of dQ_i = sum over j of dS_ij K_j each consumer computes: 64 rows, or 64 columns (or those that
// are left). Each warp has 16 rows of it. The float32 sum in global memory has the layout of the
// accumulators: warp after warp, then blocks of 16 rows x 8 columns, then four floats per lane. So all
// accesses are contiguous.
template <i32 tile_q, i32 head_dim, i32 consumers>
struct QueryGradientShare {
  static constexpr bool by_rows = tile_q == consumers * kWarpgroupRows;
  static_assert(by_rows ? head_dim == kPanelColumns
                        : tile_q == kWarpgroupRows && ceil_div(head_dim, kPanelColumns) == consumers,
                "each consumer owns 64 rows, or 64 columns, of a tile of dQ");
  static constexpr i32 tile_floats = tile_q * head_dim;

  FLASHGEN_DEVICE static i32 row(i32 consumer) { return by_rows ? consumer * kWarpgroupRows : 0; }
  FLASHGEN_DEVICE static i32 column(i32 consumer) { return by_rows ? 0 : consumer * kPanelColumns; }
  FLASHGEN_DEVICE static i32 columns(i32 consumer) {
    return smaller(kPanelColumns, head_dim - column(consumer));
  }
  // The offset and the size of a warp's part of a tile. Warps are counted over all consumers.
  FLASHGEN_DEVICE static i32 warp_begin(i32 warp) {
    const i32 consumer = warp / 4;
    return consumer * kWarpgroupRows * kPanelColumns + warp % 4 * warp_floats(consumer);
  }
  FLASHGEN_DEVICE static i32 warp_floats(i32 consumer) { return kWarpRows * columns(consumer); }
  // The offset of an element of the tile.
  FLASHGEN_DEVICE static i32 place(i32 row, i32 column) {
    const i32 consumer = by_rows ? row / kWarpgroupRows : column / kPanelColumns;
    const i32 warp = row % kWarpgroupRows / kWarpRows, block = column % kPanelColumns / 8;
    const i32 lane = row % 8 * 4 + column % 8 / 2, element = row % 16 / 8 * 2 + column % 2;
    return warp_begin(4 * consumer + warp) + (block * kWarpSize + lane) * 4 + element;
  }
};

template <BackwardSm90Config cfg, class T>
struct BackwardSm90Shape {
  static_assert(cfg.tile_kv == cfg.consumers * kWarpgroupRows, "each consumer owns 64 keys");
  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using DOTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  // Keys x queries.
  using DSTile = PanelTile<T, cfg.tile_kv, cfg.tile_q>;
  // A warp's rows of dK and dV.
  using DKRows = PanelTile<T, kWarpRows, cfg.head_dim>;
  using DVRows = PanelTile<T, kWarpRows, cfg.head_dim_v>;
  // A warp's share of dQ, rounded.
  using DQRows = PanelTile<T, kWarpRows, kPanelColumns>;
  using Share = QueryGradientShare<cfg.tile_q, cfg.head_dim, cfg.consumers>;

  using Scores = Strip<cfg.tile_q>;
  using RoundedScores = Rounded<cfg.tile_q>;
  using DK = Strip<cfg.head_dim>;
  using DV = Strip<cfg.head_dim_v>;
  // 64 queries x 64 columns, whatever the share.
  using DQ = Strip<kPanelColumns>;

  static constexpr i32 row_bytes = cfg.tile_q * 4;
  // The staging buffer of a warp: its share of dQ, or its rows of dK and dV.
  static constexpr i32 out_bytes = kWarpRows * kPanelColumns * 4;
  static_assert(DKRows::bytes <= out_bytes && DVRows::bytes <= out_bytes,
                "dK and dV fit in the staging buffer of dQ");
  static constexpr bool both_at_once = DKRows::bytes + DVRows::bytes <= out_bytes;
  static constexpr u32 consumer_warps = 4 * cfg.consumers;
};

// A warp's rows of a tile of dQ, to be scaled, rounded and stored.
struct alignas(32) SumPart {
  // Where the results go.
  i32 column;
  i32 row;
  i32 head;
  i32 sequence;
  // The place of the sum in the workspace, and its number of boxes: 0 after the last sum.
  i32 line;
  i32 boxes;
  // Whether another head will use its slot of the ring.
  bool is_needed_again;
  // Whether it is the last part of its tile.
  bool is_last;
};

// Part of a sum in shared memory. The TMA map of the workspace is an array of lines; a box is two of them.
struct SumLines {
  static constexpr i32 floats = 256;
  static constexpr u32 box_bytes = 2 * floats * 4;
  u32 address;

  FLASHGEN_DEVICE void load(const TensorMap& map, u32 barrier, i32 line, i32 boxes) const {
#pragma unroll 1
    for (i32 i = 0; i < boxes; ++i)
      tma_load_4d(address + static_cast<u32>(i) * box_bytes, &map, barrier, 0, line + 2 * i, 0, 0);
  }
  // Stores the same bytes to each box.
  FLASHGEN_DEVICE void repeat(const TensorMap& map, i32 line, i32 boxes) const {
#pragma unroll 1
    for (i32 i = 0; i < boxes; ++i) tma_store_4d(&map, address, 0, line + 2 * i, 0, 0);
  }
};

// ---- The sum of dQ, see fragments.cuh

// Scales and rounds 32 columns of a part's 16 rows into a tile in shared memory. The finisher warp competes
// with consumers for issue slots, so each instruction counts. With `in_place` the tile overlays the first
// half of the part, which has been read by then.
template <i32 box, bool in_place = false, class Tile>
FLASHGEN_DEVICE void finish_box(Tile rows, const float* part, float scale, Thread thread) {
  using T = typename Tile::Element;
  const Vec16* const fours = reinterpret_cast<const Vec16*>(part) + thread.lane;
  u32 words[2][4];
#pragma unroll
  for (i32 n = 0; n < 2; ++n) {
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      const Vec16 four = fours[(4 * box + 2 * n + i) * kWarpSize];
#pragma unroll
      for (i32 h = 0; h < 2; ++h)
        words[n][2 * i + h] =
            pack(T{}, float_of(four.words[2 * h]) * scale, float_of(four.words[2 * h + 1]) * scale);
    }
    if constexpr (in_place) {
      // Everything is read before the first element is overwritten. Two at a time, to save registers.
      warp_sync();
    } else {
      stmatrix_x4(Tile::chunk_after(rows.first_chunk(0, thread), 2 * box + n), words[n]);
    }
  }
  if constexpr (in_place) {
#pragma unroll
    for (i32 n = 0; n < 2; ++n)
      stmatrix_x4(Tile::chunk_after(rows.first_chunk(0, thread), 2 * box + n), words[n]);
  }
}

// ---- Non-finite values, see contain.cuh

// Whether this lane's elements of a warp's rows of a panelled tile hold NaN or infinities.
template <class Tile>
FLASHGEN_DEVICE bool lane_finds_non_finite(SharedPanels<Tile> tile, i32 row, Thread thread) {
  u32 signs = 0;
  constexpr i32 chunks = Tile::panels * 8;
#pragma unroll 4
  for (i32 i = thread.lane; i < kWarpRows * chunks; i += kWarpSize) {
    const Vec16 chunk = tile.chunk(row + i / chunks, i % chunks);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Tile::Element>(chunk.words[w]);
  }
  return signs != 0;
}

// The scalar product of a row of a tile and one in global memory.
template <class Tile>
FLASHGEN_DEVICE float dot_row(SharedPanels<Tile> tile, i32 row, const typename Tile::Element* other) {
  using T = typename Tile::Element;
  float total = 0.0f;
#pragma unroll 1
  for (i32 c = 0; c < Tile::cols / 8; ++c) {
    const Vec16 x = tile.chunk(row, c), y = reinterpret_cast<const Vec16*>(other)[c];
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        const T left{static_cast<u16>(x.words[w] >> (16 * half))};
        const T right{static_cast<u16>(y.words[w] >> (16 * half))};
        total = fused_multiply_add(to_float(left), to_float(right), total);
      }
    }
  }
  return total;
}

}  // namespace flashgen
