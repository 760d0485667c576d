// The operands of the forward kernel in shared memory, and the producers that load them.
#pragma once
#include "flashgen/ring.cuh"
#include "flashgen/sm90/key_blocks.cuh"
#include "flashgen/sm90/query_tile.cuh"
#include "flashgen/sm90/tile_checks.cuh"

namespace flashgen {

// What the warps of a thread block share. Smem holds the offsets in shared memory, which the plan computes.
template <ForwardSm90Config cfg, class T, class Smem, class Tile, class Blocks, class Values>
struct ForwardShared {
  static constexpr u32 kConsumerWarps = 4 * cfg.consumers;

  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using LoadedVTile = typename Values::Loaded;
  using VTile = typename Values::Operand;
  using Checks = TileChecks<kConsumerWarps>;
  using Message = typename Blocks::Message;
  static constexpr bool transposes = Values::transposes;
  using VRing = Ring<cfg.stages>;

  u8* base;
  u32 start;

  FLASHGEN_DEVICE QTile q(auto at) const { return QTile{start + Smem::kQ}.slot(at.slot()); }
  FLASHGEN_DEVICE KTile k(auto at) const { return KTile{start + Smem::kK}.slot(at.slot()); }
  FLASHGEN_DEVICE LoadedVTile loaded_v(auto at) const {
    return LoadedVTile{start + Smem::kV}.slot(at.slot());
  }
  FLASHGEN_DEVICE VTile v(auto at) const {
    if constexpr (Values::transposes) {
      return VTile{start + Smem::kTransposedV}.slot(at.slot());
    } else {
      return loaded_v(at);
    }
  }
  FLASHGEN_DEVICE Ring<cfg.q_stages> q_ring() const { return {start + Smem::kQBarriers}; }
  FLASHGEN_DEVICE Ring<cfg.stages> k_ring() const { return {start + Smem::kKBarriers}; }
  FLASHGEN_DEVICE Ring<cfg.stages> loaded_v_ring() const { return {start + Smem::kVBarriers}; }
  FLASHGEN_DEVICE Ring<cfg.stages> v_ring() const {
    if constexpr (Values::transposes) {
      return {start + Smem::kTransposedVBarriers};
    } else {
      return loaded_v_ring();
    }
  }
  // Whether a slot of loaded_v_ring ends the transposers' work instead of holding V.
  FLASHGEN_DEVICE i32& is_end(i32 slot) const { return reinterpret_cast<i32*>(base + Smem::kEndsOfV)[slot]; }
  FLASHGEN_DEVICE Ring<kForwardTileStages> tile_ring() const { return {start + Smem::kTileBarriers}; }
  // Each slot of tile_ring holds a tile. Each slot of k_ring holds a message, if the producer sends any.
  FLASHGEN_DEVICE Tile& tile(auto at) const {
    return reinterpret_cast<Tile*>(base + Smem::kTiles)[at.slot()];
  }
  FLASHGEN_DEVICE Message& message(auto at) const {
    return reinterpret_cast<Message*>(base + Smem::kMessages)[at.slot()];
  }
  FLASHGEN_DEVICE Checks& checks() const { return *reinterpret_cast<Checks*>(base + Smem::kChecks); }
  static_assert(Smem::kChecks + sizeof(Checks) <= Smem::kBytes, "the plan leaves room for the checks");

  FLASHGEN_DEVICE void init() const {
    q_ring().init(1, kConsumerWarps);
    k_ring().init(1, kConsumerWarps);
    if constexpr (Values::transposes) {
      loaded_v_ring().init(1, Values::transposers);
      v_ring().init(Values::transposers, kConsumerWarps);
      for (i32 slot = 0; slot < cfg.stages; ++slot) is_end(slot) = 0;
    } else {
      v_ring().init(1, kConsumerWarps);
    }
    // Producers read announcements, too.
    tile_ring().init(1, kConsumerWarps + (Tile::in_pages && !transposes ? 2 : 1));
    checks().init();
    fence_mbarrier_init();
  }
};

// The producer: a warp that loads Q, K and V. Only the elected lane waits for empty slots: another lane could
// arrive so late that it misses a phase. The elected lane also starts all copies, except those of pages,
// which all lanes start.
template <ForwardSm90Config cfg, class Params, class Tile, class Blocks, class Shared>
struct ForwardProducer {
  // It requests the next tile when at most this many blocks of the current one follow.
  static constexpr i32 kBlocksAfterRequest = 4;
  // Whether run() loads V. A block of keys in pages is many boxes, and a warp issues them one after another.
  // So two warps load them: run() then loads Q and K, and run_values() V. Where warps transpose V, none is
  // left for that.
  static constexpr bool kLoadsValues = !Tile::in_pages || Shared::transposes;
  using Message = typename Blocks::Message;
  using TileState = RingState<kForwardTileStages>;

  const Params& p;
  Shared shared;
  Thread thread;
  bool elected;
  RingState<cfg.q_stages> q_at;
  RingState<cfg.stages> k_at, v_at;
  // This tile, and the first one whose Q is not loaded yet.
  TileState tile_at, q_tile_at;
  // The block whose V is not loaded yet, or -1, and the slot of its tile.
  i32 pending_block = -1;
  TileState pending_tile_at;

  // Loads Q of the tile at q_tile_at, unless there is no such tile.
  FLASHGEN_DEVICE void load_q() {
    shared.tile_ring().wait_full(q_tile_at);
    const Tile tile = shared.tile(q_tile_at);
    if (tile.kind < TileKind::normal) return;
    if (elected) {
      shared.q_ring().wait_empty(q_at);
      mbarrier_arrive_expect_tx(shared.q_ring().full(q_at), Shared::QTile::bytes);
      tile.load_q(shared.q(q_at), p, shared.q_ring().full(q_at));
    }
    q_at.advance();
    q_tile_at.advance();
  }
  FLASHGEN_DEVICE void load_k(const Tile& tile, i32 block, const Message& message) {
    if constexpr (Tile::in_pages) {
      const auto pages = tile.template find_pages<cfg.tile_kv>(p, block * cfg.tile_kv, thread);
      if (elected) {
        shared.k_ring().wait_empty(k_at);
        if constexpr (Blocks::sends_messages) shared.message(k_at) = message;
        mbarrier_arrive_expect_tx(shared.k_ring().full(k_at), Shared::KTile::bytes);
      }
      // All lanes load pages, once the elected one has seen the empty slot.
      warp_sync();
      tile.load_k(shared.k(k_at), p, shared.k_ring().full(k_at), block * cfg.tile_kv, pages);
    } else if (elected) {
      shared.k_ring().wait_empty(k_at);
      if constexpr (Blocks::sends_messages) shared.message(k_at) = message;
      mbarrier_arrive_expect_tx(shared.k_ring().full(k_at), Shared::KTile::bytes);
      tile.load_k(shared.k(k_at), p, shared.k_ring().full(k_at), block * cfg.tile_kv);
    }
    k_at.advance();
  }
  FLASHGEN_DEVICE void load_v(const Tile& tile, i32 block) {
    if constexpr (Tile::in_pages) {
      const auto pages = tile.template find_pages<cfg.tile_kv>(p, block * cfg.tile_kv, thread);
      if (elected) {
        shared.loaded_v_ring().wait_empty(v_at);
        mbarrier_arrive_expect_tx(shared.loaded_v_ring().full(v_at), Shared::LoadedVTile::bytes);
      }
      warp_sync();
      tile.load_v(shared.loaded_v(v_at), p, shared.loaded_v_ring().full(v_at), block * cfg.tile_kv, pages);
    } else if (elected) {
      shared.loaded_v_ring().wait_empty(v_at);
      mbarrier_arrive_expect_tx(shared.loaded_v_ring().full(v_at), Shared::LoadedVTile::bytes);
      tile.load_v(shared.loaded_v(v_at), p, shared.loaded_v_ring().full(v_at), block * cfg.tile_kv);
    }
    v_at.advance();
  }
  // V of a step is loaded after K of the next one, because consumers need it later.
  FLASHGEN_DEVICE void load_pending_v() {
    if (pending_block < 0) return;
    const Tile tile = shared.tile(pending_tile_at);
    load_v(tile, pending_block);
    // That was the last V of its tile, so the announcement of the tile is no longer needed.
    if (pending_tile_at.count != tile_at.count) shared.tile_ring().release(pending_tile_at, thread);
    pending_block = -1;
  }
  // Ends the work of the warps that transpose V.
  FLASHGEN_DEVICE void end_values() {
    if (!elected) return;
    shared.loaded_v_ring().wait_empty(v_at);
    shared.is_end(v_at.slot()) = 1;
    mbarrier_arrive(shared.loaded_v_ring().full(v_at));
  }
  FLASHGEN_DEVICE void request_tile() {
    warp_sync();
    named_barrier_arrive(kRequestBarrier, 2 * kWarpSize);
  }

  FLASHGEN_DEVICE void run() {
    for (;; tile_at.advance()) {
      shared.tile_ring().wait_full(tile_at);
      const Tile tile = shared.tile(tile_at);
      if (tile.kind < TileKind::normal) {
        load_pending_v();
        shared.tile_ring().release(tile_at, thread);
        if (tile.kind == TileKind::end) break;
        request_tile();
        q_tile_at.advance();
        continue;
      }
      bool has_requested = false;
      Blocks::for_each(p, tile, thread, [&](i32 block, i32 left, const Message& message) {
        // Keeps the lanes together. Only the elected one waits for empty slots. Without this the others
        // could run through all blocks first, and the elected lane would stand still meanwhile.
        warp_sync();
        // Late, so that the next tile does not wait here while other thread blocks are idle. Early enough
        // that its Q arrives in time.
        if (!has_requested && left <= kBlocksAfterRequest) {
          request_tile();
          has_requested = true;
        }
        load_k(tile, block, message);
        load_pending_v();
        if (q_tile_at.count == tile_at.count) load_q();
        if (cfg.q_stages > 1 && left < kBlocksAfterRequest && q_tile_at.count == tile_at.count + 1) load_q();
        if constexpr (kLoadsValues) {
          pending_block = block;
          pending_tile_at = tile_at;
        }
      });
      if constexpr (!kLoadsValues) shared.tile_ring().release(tile_at, thread);
    }
    if constexpr (Shared::transposes) end_values();
  }

  FLASHGEN_DEVICE void run_values() {
    for (;; tile_at.advance()) {
      shared.tile_ring().wait_full(tile_at);
      const Tile tile = shared.tile(tile_at);
      if (tile.kind >= TileKind::normal) {
        Blocks::for_each(p, tile, thread, [&](i32 block, i32, const Message&) {
          // Keeps the lanes together, as in run().
          warp_sync();
          load_v(tile, block);
        });
      }
      shared.tile_ring().release(tile_at, thread);
      if (tile.kind == TileKind::end) return;
    }
  }
};

}  // namespace flashgen
