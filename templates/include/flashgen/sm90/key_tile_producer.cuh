// What the backward kernels that keep tiles of keys share: operands in shared memory, and the producer that
// loads them.
#pragma once
#include "flashgen/ring.cuh"
#include "flashgen/sm90/query_blocks.cuh"

namespace flashgen {

// Slots of the ring that announces tiles of keys.
constexpr i32 kTileStages = 2;

template <auto cfg, class T, class Smem, class Tile, class Queries>
struct KeyTileShared {
  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using DOTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using KRing = Ring<1>;
  using VRing = Ring<1>;
  using QRing = Ring<cfg.q_stages>;
  using DORing = Ring<cfg.do_stages>;
  using TileRing = Ring<kTileStages>;
  using Message = typename Queries::Message;
  // Bytes of L, or of D, of a block of queries.
  static constexpr i32 statistics_bytes = cfg.tile_q * 4;

  u8* base;
  u32 start;

  FLASHGEN_DEVICE KTile k() const { return {start + Smem::kK}; }
  FLASHGEN_DEVICE VTile v() const { return {start + Smem::kV}; }
  FLASHGEN_DEVICE QTile q(typename QRing::State at) const { return QTile{start + Smem::kQ}.slot(at.slot()); }
  FLASHGEN_DEVICE DOTile dout(typename DORing::State at) const {
    return DOTile{start + Smem::kDo}.slot(at.slot());
  }
  FLASHGEN_DEVICE KRing k_ring() const { return {start + Smem::kKBarriers}; }
  FLASHGEN_DEVICE VRing v_ring() const { return {start + Smem::kVBarriers}; }
  FLASHGEN_DEVICE QRing q_ring() const { return {start + Smem::kQBarriers}; }
  FLASHGEN_DEVICE DORing do_ring() const { return {start + Smem::kDoBarriers}; }
  FLASHGEN_DEVICE TileRing tile_ring() const { return {start + Smem::kTileBarriers}; }
  // Of a block of queries, -L in units of S and -D. They come with Q and with dO.
  FLASHGEN_DEVICE float* lse(typename QRing::State at) const {
    return reinterpret_cast<float*>(base + Smem::kLse + at.slot() * statistics_bytes);
  }
  FLASHGEN_DEVICE float* dsum(typename DORing::State at) const {
    return reinterpret_cast<float*>(base + Smem::kDsum + at.slot() * statistics_bytes);
  }
  // What the slots of tile_ring and, if the producer sends messages, of q_ring hold.
  FLASHGEN_DEVICE Tile& tile(typename TileRing::State at) const {
    return reinterpret_cast<Tile*>(base + Smem::kTiles)[at.slot()];
  }
  FLASHGEN_DEVICE Message& message(typename QRing::State at) const
    requires Queries::sends_messages
  {
    return reinterpret_cast<Message*>(base + Smem::kMessages)[at.slot()];
  }
  // One lane reads a message for its warp, and another warp's lane may then overwrite it.
  FLASHGEN_DEVICE Message read_message(typename QRing::State at, Thread thread) const {
    if constexpr (Queries::sends_messages) {
      Message read = {};
      if (thread.lane == 0) read = message(at);
      return {shuffle(read.block, 0), static_cast<u32>(shuffle(static_cast<i32>(read.facts), 0))};
    } else {
      return {};
    }
  }
};

// One warp that draws tiles of keys, and copies K and V, and for each step Q and dO with L and D, by TMA.
// Only one lane waits and copies: another lane that came late to a barrier could miss a phase. The tile stays
// in shared memory, because the producer has few registers.
template <auto cfg, class Params, class Shared, class Tile, class Queries>
struct KeyTileProducer {
  using Message = typename Queries::Message;

  const Params& p;
  Shared shared;
  Thread thread;
  bool elected;
  typename Shared::KRing::State kv_at;
  typename Shared::QRing::State q_at;
  typename Shared::DORing::State do_at;
  typename Shared::TileRing::State tile_at;

  // Line 6: load K_j, V_j.
  FLASHGEN_DEVICE void load_keys(const Tile& tile) {
    if (elected) {
      shared.k_ring().wait_empty(kv_at);
      mbarrier_arrive_expect_tx(shared.k_ring().full(kv_at), Shared::KTile::bytes);
      tile.load_k(shared.k(), p, shared.k_ring().full(kv_at));
      shared.v_ring().wait_empty(kv_at);
      mbarrier_arrive_expect_tx(shared.v_ring().full(kv_at), Shared::VTile::bytes);
      tile.load_v(shared.v(), p, shared.v_ring().full(kv_at));
    }
    kv_at.advance();
  }
  // Line 9: load Q_i, dO_i, L_i, D_i.
  FLASHGEN_DEVICE void load_queries(const Tile& tile, QueryStep step, const Message& message) {
    if (elected) {
      const u32 full = shared.q_ring().full(q_at);
      shared.q_ring().wait_empty(q_at);
      if constexpr (Queries::sends_messages) shared.message(q_at) = message;
      mbarrier_arrive_expect_tx(full, Shared::QTile::bytes + Shared::statistics_bytes);
      tile.load_q(shared.q(q_at), p, full, step);
      tile.template load_statistics<cfg.tile_q>(shared_address(shared.lse(q_at)), p, full, step, 0);
    }
    q_at.advance();
    if (elected) {
      const u32 full = shared.do_ring().full(do_at);
      shared.do_ring().wait_empty(do_at);
      mbarrier_arrive_expect_tx(full, Shared::DOTile::bytes + Shared::statistics_bytes);
      tile.load_dout(shared.dout(do_at), p, full, step);
      tile.template load_statistics<cfg.tile_q>(shared_address(shared.dsum(do_at)), p, full, step, 1);
    }
    do_at.advance();
  }

  FLASHGEN_DEVICE void run() {
    KeyTileScheduler<cfg.tile_kv, cfg.section_heads, Params, Tile> scheduler{{p}};
    if (elected) {
      prefetch_tensormap(&p.q_map);
      prefetch_tensormap(&p.k_map);
      prefetch_tensormap(&p.v_map);
      prefetch_tensormap(&p.dout_map);
      prefetch_tensormap(&p.row_stats_map);
    }
    for (bool goes_on = true; goes_on;) {
      // Consumers are steps behind, which hides the latency of the draw.
      const Tile drawn = scheduler.tile(shuffle(elected ? scheduler.draw() : 0, 0), thread);
      Tile& tile = shared.tile(tile_at);
      if (elected) {
        shared.tile_ring().wait_empty(tile_at);
        tile = drawn;
      }
      warp_sync();
      const auto announce = [&](bool is_attended) {
        if (elected) {
          tile.is_attended = is_attended;
          mbarrier_arrive(shared.tile_ring().full(tile_at));
        }
        tile_at.advance();
      };
      goes_on = drawn.exists;
      if (goes_on) {
        bool is_first = true;
        Queries::for_each(p, tile, thread, announce, [&](QueryStep step, const auto& message_of) {
          // The other lanes have nothing to wait for. Alone they would run through all steps first, and
          // meanwhile the elected lane would stand still.
          warp_sync();
          load_queries(tile, step, message_of());
          // The first queries may be loaded while the previous tile still uses its keys.
          if (is_first) load_keys(tile);
          is_first = false;
        });
      } else {
        announce(false);
      }
    }
    if (elected) scheduler.leave();
  }
};

}  // namespace flashgen
