// What the warps of a block of the fused backward kernel share.
#pragma once
#include "flashgen/fragments.cuh"
#include "flashgen/sm90/backward_config.cuh"
#include "flashgen/sm90/failed_tiles.cuh"
#include "flashgen/sm90/finish_order.cuh"
#include "flashgen/sm90/key_tile_producer.cuh"

namespace flashgen {

template <BackwardSm90Config cfg, class T, class Smem, class Tile, class Queries>
struct BackwardShared : KeyTileShared<cfg, T, Smem, Tile, Queries> {
  using Base = KeyTileShared<cfg, T, Smem, Tile, Queries>;
  using Base::base, Base::start;
  static_assert(cfg.tile_kv == cfg.consumers * kWarpgroupRows, "each consumer owns 64 keys");
  static_assert(cfg.do_stages == 2 && cfg.ds_stages == 2, "slots of dO and dS go by together");
  static constexpr u32 consumer_warps = 4 * cfg.consumers;

  using Share = DqShare<cfg.tile_q, cfg.head_dim, cfg.consumers>;
  // Keys x queries.
  using DSTile = PanelTile<T, cfg.tile_kv, cfg.tile_q>;
  using DSRing = Ring<cfg.ds_stages>;
  // A warp's rows of dK and dV, and its share of dQ, rounded.
  using DKRows = PanelTile<T, kWarpRows, cfg.head_dim>;
  using DVRows = PanelTile<T, kWarpRows, cfg.head_dim_v>;
  using DQRows = PanelTile<T, kWarpRows, kPanelColumns>;
  // The staging buffer of a warp: its share of dQ, or its rows of dK and dV.
  static constexpr i32 out_bytes = kWarpRows * kPanelColumns * 4;
  static_assert(DKRows::bytes <= out_bytes && DVRows::bytes <= out_bytes,
                "dK and dV fit in the staging buffer of dQ");

  FLASHGEN_DEVICE DSTile ds(typename DSRing::State at) const {
    return DSTile{start + Smem::kDs}.slot(at.slot());
  }
  FLASHGEN_DEVICE DSRing ds_ring() const { return {start + Smem::kDsBarriers}; }
  // Warps are counted over all consumers.
  FLASHGEN_DEVICE u32 out(i32 warp) const { return start + Smem::kDq + static_cast<u32>(warp * out_bytes); }

  FLASHGEN_DEVICE void init(u32 tile_readers) const {
    Base::k_ring().init(1, consumer_warps);
    Base::v_ring().init(1, consumer_warps);
    Base::q_ring().init(1, consumer_warps);
    Base::do_ring().init(1, consumer_warps);
    ds_ring().init(consumer_warps, consumer_warps);
    // All lanes read what is announced, and each gives it back.
    Base::tile_ring().init(1, kWarpSize * (consumer_warps + tile_readers));
  }
};

// A warp's share of a tile of dQ, to be scaled, rounded and stored.
struct alignas(32) DqPart {
  // Where it goes in the map of dQ.
  i32 column;
  i32 row;
  i32 head;
  i32 place;
  // The number of its tile, among all.
  i32 tile;
  // Where its sum lies in the workspace, in lines, and its size in boxes: 0 after the last part.
  i32 line;
  i32 boxes;
  // Whether another head will use its slot of the workspace.
  bool is_needed_again;
  // Whether it is the last part of its tile.
  bool is_last;
};

// Scales and rounds 32 columns of a part's 16 rows into a tile in shared memory. The finisher warp competes
// with consumers for issue slots, so each instruction counts. With `in_place` the tile overlays the first
// half of the part, which has been read by then.
template <i32 box, bool in_place, class Tile>
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

// Whether the first row of a part's 16, or an element of another row, is not finite. That is enough, see
// failed_tiles.cuh. All lanes call.
template <bool checks>
FLASHGEN_DEVICE bool has_failed(const float* part, i32 columns, Thread thread) {
  if constexpr (!checks) return false;
  // Two columns of the first row for each lane, those of lane l % 4 in block l / 4; and one of its own two
  // rows.
  const float* const two = part + (thread.lane / 4 * kWarpSize + thread.lane % 4) * 4;
  const float* const own = part + thread.lane * 4;
  const bool has_two = 2 * thread.lane < columns;
  return warp_any((has_two && (two[0] + two[1]) * 0.0f != 0.0f) || (own[0] + own[2]) * 0.0f != 0.0f);
}

}  // namespace flashgen
