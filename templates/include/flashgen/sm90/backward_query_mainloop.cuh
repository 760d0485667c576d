// The backward pass on Hopper, for heads wider than 128: dQ. backward_keys_mainloop.cuh computes dK and dV.
//
// A block keeps 128 queries, and each of two warpgroups owns 64 of them. The kernel loops over blocks of
// keys, like the forward kernel, whose tiles, scheduler and blocks it shares. Rows of scores are queries, so
// dS in registers is the left operand of dQ += dS K. Line numbers in comments are those of Algorithm 2 of the
// FlashAttention-2 paper.
//
//     tensor cores   | dQ(i-1), S(i) = Q K^T | dP(i) = dO V^T      |
//     other units    |                       | P(i) = exp(S - L)   | dS(i) = P (dP - D), round
#pragma once
#include "flashgen/ring.cuh"
#include "flashgen/sm90/backward_products.cuh"
#include "flashgen/sm90/failed_tiles.cuh"
#include "flashgen/sm90/gradient_tile.cuh"
#include "flashgen/sm90/key_blocks.cuh"
#include "flashgen/sm90/tile_scheduler.cuh"

namespace flashgen {

struct BackwardQueryConfig {
  i32 head_dim, head_dim_v;
  i32 stored_columns;  // of dQ
  i32 tile_q, tile_kv;
  i32 k_stages, v_stages;
  i32 stats_rows;  // queries per row of row_stats
  i32 consumers;
  i32 producer_registers, consumer_registers;
  i32 section_heads;  // heads whose operands stay in the L2 cache
  bool has_lower, has_upper;
};

// The same tiles as the forward kernel's config has them, for its scheduler and its blocks of keys.
template <BackwardQueryConfig cfg>
constexpr ForwardSm90Config kQueryTiles = {.tile_q = cfg.tile_q,
                                           .tile_kv = cfg.tile_kv,
                                           .consumers = cfg.consumers,
                                           .section_heads = cfg.section_heads};

template <BackwardQueryConfig cfg, class T, class Params, class Smem, class Tile, class Mask, class Blocks,
          class Score, class Dropping>
struct BackwardQueryMainloop {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 queries");
  static_assert((cfg.k_stages & (cfg.k_stages - 1)) == 0 && (cfg.v_stages & (cfg.v_stages - 1)) == 0,
                "one counter gives the slots of K and V, because each counter takes uniform registers");
  static_assert(cfg.stats_rows == kWarpgroupRows, "a row of statistics holds one consumer's queries");
  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using DOTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using QRing = Ring<1>;
  using DORing = Ring<1>;
  using KRing = Ring<cfg.k_stages>;
  using VRing = Ring<cfg.v_stages>;
  using TileRing = Ring<2>;
  using Message = typename Blocks::Message;
  using Scores = Strip<cfg.tile_kv>;
  static constexpr u32 consumer_warps = 4 * cfg.consumers;
  // L and D of a consumer's queries.
  static constexpr i32 statistics_bytes = 2 * kWarpgroupRows * 4;

  struct Shared {
    u8* base;
    u32 start;

    FLASHGEN_DEVICE QTile q() const { return {start + Smem::kQ}; }
    FLASHGEN_DEVICE DOTile dout() const { return {start + Smem::kDo}; }
    FLASHGEN_DEVICE KTile k(typename KRing::State at) const {
      return KTile{start + Smem::kK}.slot(at.slot());
    }
    FLASHGEN_DEVICE VTile v(typename VRing::State at) const {
      return VTile{start + Smem::kV}.slot(at.slot());
    }
    FLASHGEN_DEVICE QRing q_ring() const { return {start + Smem::kQBarriers}; }
    FLASHGEN_DEVICE DORing do_ring() const { return {start + Smem::kDoBarriers}; }
    FLASHGEN_DEVICE KRing k_ring() const { return {start + Smem::kKBarriers}; }
    FLASHGEN_DEVICE VRing v_ring() const { return {start + Smem::kVBarriers}; }
    FLASHGEN_DEVICE TileRing tile_ring() const { return {start + Smem::kTileBarriers}; }
    FLASHGEN_DEVICE float* statistics(i32 consumer) const {
      return reinterpret_cast<float*>(base + Smem::kStats + consumer * statistics_bytes);
    }
    // What the slots of tile_ring and, if the producer sends messages, of k_ring hold.
    FLASHGEN_DEVICE Tile& tile(typename TileRing::State at) const {
      return reinterpret_cast<Tile*>(base + Smem::kTiles)[at.slot()];
    }
    FLASHGEN_DEVICE Message& message(typename KRing::State at) const
      requires Blocks::sends_messages
    {
      return reinterpret_cast<Message*>(base + Smem::kMessages)[at.slot()];
    }
    FLASHGEN_DEVICE void init() const {
      // All lanes read statistics and what is announced, and each gives them back.
      q_ring().init(1, kWarpSize * consumer_warps);
      do_ring().init(1, consumer_warps);
      k_ring().init(1, consumer_warps);
      v_ring().init(1, consumer_warps);
      tile_ring().init(1, kWarpSize * consumer_warps);
      fence_mbarrier_init();
    }
  };

  // ---- The producer. Only one lane waits and copies: another lane that came late to a barrier could miss a
  // phase.

  struct Producer {
    const Params& p;
    Shared shared;
    Thread thread;
    bool elected;
    typename QRing::State q_at;
    typename KRing::State k_at;
    typename VRing::State v_at;
    typename TileRing::State tile_at;

    // Line 3: load Q_i, L_i, D_i.
    FLASHGEN_DEVICE void load_queries(const Tile& tile) {
      const u32 full = shared.q_ring().full(q_at);
      shared.q_ring().wait_empty(q_at);
      mbarrier_arrive_expect_tx(full, QTile::bytes + cfg.consumers * statistics_bytes);
      tile.load_q(shared.q(), p, full);
      for (i32 consumer = 0; consumer < cfg.consumers; ++consumer)
        tile.template load_statistics<cfg.stats_rows>(shared_address(shared.statistics(consumer)), p, full,
                                                      consumer);
    }
    FLASHGEN_DEVICE void load_gradients(const Tile& tile) {
      shared.do_ring().wait_empty(q_at);
      mbarrier_arrive_expect_tx(shared.do_ring().full(q_at), DOTile::bytes);
      tile.load_dout(shared.dout(), p, shared.do_ring().full(q_at));
    }
    // Line 6: load K_j, V_j; and dO_i before the first V_j.
    FLASHGEN_DEVICE void load_block(const Tile& tile, i32 block, const Message& message, bool is_first) {
      if (elected) {
        shared.k_ring().wait_empty(k_at);
        if constexpr (Blocks::sends_messages) shared.message(k_at) = message;
        mbarrier_arrive_expect_tx(shared.k_ring().full(k_at), KTile::bytes);
        tile.load_k(shared.k(k_at), p, shared.k_ring().full(k_at), block * cfg.tile_kv);
        if (is_first) load_gradients(tile);
        shared.v_ring().wait_empty(v_at);
        mbarrier_arrive_expect_tx(shared.v_ring().full(v_at), VTile::bytes);
        tile.load_v(shared.v(v_at), p, shared.v_ring().full(v_at), block * cfg.tile_kv);
      }
      k_at.advance();
      v_at.advance();
    }

    FLASHGEN_DEVICE void run() {
      typename Tile::template Scheduler<kQueryTiles<cfg>, Params> scheduler{{p}};
      if (elected) {
        prefetch_tensormap(&p.q_map);
        prefetch_tensormap(&p.k_map);
        prefetch_tensormap(&p.v_map);
        prefetch_tensormap(&p.dout_map);
      }
      for (i32 number = scheduler.first();;) {
        const Tile tile = {scheduler.tile(number, thread)};
        if (elected) {
          shared.tile_ring().wait_empty(tile_at);
          shared.tile(tile_at) = tile;
          mbarrier_arrive(shared.tile_ring().full(tile_at));
        }
        tile_at.advance();
        if (tile.kind == TileKind::end) break;
        if (elected) load_queries(tile);
        bool is_first = true;
        Blocks::for_each(p, tile, thread, [&](i32 block, i32, const Message& message) {
          // The other lanes have nothing to wait for. Alone they would run through all blocks first, and
          // meanwhile the elected lane would stand still.
          warp_sync();
          load_block(tile, block, message, is_first);
          is_first = false;
        });
        q_at.advance();
        number = shuffle(elected ? scheduler.draw() : 0, 0);
      }
      if (elected) scheduler.leave();
    }
  };

  // ---- A consumer

  struct Consumer {
    const Params& p;
    Shared shared;
    Thread thread;
    // Which consumer this is.
    i32 number;
    typename QRing::State q_at;
    // The position in the rings of K and V. dQ is one step behind.
    typename KRing::State k_at;
    typename TileRing::State tile_at;
    Blocks blocks;
    // L and D of the lane's two rows.
    float lse[2];
    float dsum[2];
    Strip<cfg.head_dim> dq;
    Rounded<cfg.tile_kv> ds;

    FLASHGEN_DEVICE typename VRing::State v_at() const { return {k_at.count}; }
    FLASHGEN_DEVICE Message read_message() {
      if constexpr (Blocks::sends_messages) {
        shared.k_ring().wait_full(k_at);
        // One lane reads for all, and the release of the slot by one lane is enough.
        Message read = {};
        if (thread.lane == 0) read = shared.message(k_at);
        return {shuffle(read.block, 0), static_cast<u32>(shuffle(static_cast<i32>(read.flags), 0))};
      } else {
        return {};
      }
    }
    FLASHGEN_DEVICE void read_statistics() {
      const float* const rows = shared.statistics(number) + thread.warp % 4 * kWarpRows + thread.row();
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        lse[h] = rows[8 * h];
        dsum[h] = rows[kWarpgroupRows + 8 * h];
      }
    }

    // ---- The parts of a step

    // Line 7: S_ij = Q_i K_j^T - L_i.
    FLASHGEN_DEVICE void issue_scores(Scores& scores) {
      shared.k_ring().wait_full(k_at);
      if constexpr (Score::presets_lse) {
        preset_rows(scores, lse);
      } else {
        preset_zero(scores);
      }
      issue_over_columns(scores, shared.q().from_row(number * kWarpgroupRows), shared.k(k_at));
    }
    // Line 9: dP_ij = dO_i V_j^T - D_i.
    FLASHGEN_DEVICE void issue_dp(Scores& dp) {
      shared.v_ring().wait_full(v_at());
      preset_rows(dp, dsum);
      issue_over_columns(dp, shared.dout().from_row(number * kWarpgroupRows), shared.v(v_at()));
    }
    // Line 11: dQ_i += dS_ij K_j, of the previous step.
    FLASHGEN_DEVICE void issue_dq() { issue_output(dq, ds, shared.k(k_at.before())); }
    FLASHGEN_DEVICE void take_dq() {
      wgmma_pin(dq);
      shared.k_ring().release(k_at.before(), thread);
    }
    // Which pairs are kept.
    FLASHGEN_DEVICE auto draw(const Tile& tile) const {
      const Thread here = thread.recomputed();
      return Dropping::template draw<cfg.tile_kv>(p, tile, tile.first_q + (here.warp - 4) * kWarpRows,
                                                  blocks.block * cfg.tile_kv, here);
    }
    // Line 8: P_ij = exp(S_ij - L_i), times the slope of the score.
    FLASHGEN_DEVICE void take_scores(Scores& scores, const Tile& tile) {
      wgmma_pin(scores);
      // Addresses are computed in each step, to save registers.
      const Thread here = thread.recomputed();
      if (blocks.is_last()) mbarrier_arrive(shared.q_ring().empty(q_at));
      const i32 first_q = tile.first_q + (here.warp - 4) * kWarpRows, first_key = blocks.block * cfg.tile_kv;
      Score::template take_factors<cfg.tile_kv>(scores, p, tile, lse, first_q, first_key, here);
      // Not of `number`: ptxas would no longer keep it in a uniform register for the descriptors of products.
      if (blocks.needs_mask(p, tile, here.warp / 4 - 1))
        mask_keys(blocks_of(scores), 0.0f, tile.template mask<Mask>(p), first_q, first_key, here);
    }
    // Line 10: dS_ij = P_ij (dP_ij - D_i).
    FLASHGEN_DEVICE void take_dp(Scores& dp, const Scores& factors, const auto& kept) {
      wgmma_pin(dp);
      shared.v_ring().release(v_at(), thread);
      k_at.advance();
      if (blocks.is_last()) shared.do_ring().release(q_at, thread);
      Dropping::drop_gradients(dp, kept, dsum);
#pragma unroll
      for (i32 i = 0; i < cfg.tile_kv / 4; ++i)
        ds[i / 4][i % 4] = pack(T{}, dp[2 * i] * factors[2 * i], dp[2 * i + 1] * factors[2 * i + 1]);
    }

    // ---- The mainloop

    FLASHGEN_DEVICE void run() {
      while (true) {
        shared.tile_ring().wait_full(tile_at);
        const Tile& tile = shared.tile(tile_at);
        if (tile.kind == TileKind::end) break;
        const auto read = [&] { return read_message(); };
        blocks.begin(p, tile, read);
        shared.q_ring().wait_full(q_at);
        read_statistics();
        // Line 4: dQ_i = 0.
        preset_zero(dq);
        {
          const auto kept = draw(tile);
          Scores scores, dp;
          issue_scores(scores);
          shared.do_ring().wait_full(q_at);
          issue_dp(dp);
          wgmma_wait<1>();
          take_scores(scores, tile);
          wgmma_wait<0>();
          take_dp(dp, scores, kept);
        }
        while (!blocks.is_last()) {
          blocks.advance(read);
          // The products queue, so that the wait for dQ overlaps the scores: its operands' registers and slot
          // are soon free. Pairs are drawn before scores and dP take registers.
          issue_dq();
          const auto kept = draw(tile);
          Scores scores, dp;
          issue_scores(scores);
          wgmma_wait<1>();
          take_dq();
          issue_dp(dp);
          wgmma_wait<1>();
          take_scores(scores, tile);
          wgmma_wait<0>();
          take_dp(dp, scores, kept);
        }
        issue_dq();
        wgmma_wait<0>();
        take_dq();
        q_at.advance();
        store(tile);
        mbarrier_arrive(shared.tile_ring().empty(tile_at));
        tile_at.advance();
      }
    }
    // Line 14: write dQ_i to global memory.
    FLASHGEN_DEVICE void store(const Tile& tile) {
      const Thread here = thread.recomputed();
      if (Blocks::has_mask && warp_any(first_row_times_zero(dq) != 0.0f) && here.lane == 0)
        flag_queries<Blocks::has_mask>(p, tile.template number<cfg.tile_q>(p));
      const float factor = p.scale * Dropping::factor(p), scale[2] = {factor, factor};
      write_strip<T, cfg.head_dim, cfg.stored_columns>(
          tile.dq_rows(p), tile.first_q + (here.warp - 4) * kWarpRows, dq, scale, here);
    }
  };

  // ---- The kernel

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Shared shared{base, shared_address(base)};
    if (Thread::current().index() == 0) shared.init();
    block_sync();
    // The previous grids may run until here, and the next one may start from here on.
    griddep_wait();
    griddep_launch_dependents();
    // Registers that the producer does not need go to the consumers.
    const Thread thread = Thread::current().recomputed();
    if (thread.warp >= 4) {
      setmaxnreg_inc<cfg.consumer_registers>();
      // Not of `thread`, because ptxas must see that it is the same for all lanes.
      Consumer{p, shared, thread, Thread::current().warp / 4 - 1}.run();
    } else {
      setmaxnreg_dec<cfg.producer_registers>();
      if (thread.warp == 0) Producer{p, shared, thread, thread.lane == 0}.run();
    }
  }
};

}  // namespace flashgen
