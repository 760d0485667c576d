// The backward pass on Hopper, for heads wider than 128: dK and dV. backward_query_mainloop.cuh computes dQ.
//
// dK and dV of 64 keys fill the registers of a warpgroup each. So two warpgroups work on the same 64 keys,
// and loop over blocks of 64 queries. Scores are transposed, as in backward_mainloop.cuh. Line numbers in
// comments are those of Algorithm 2 of the FlashAttention-2 paper.
//
//     values   | S(i+1) = K Q^T  | dV += P(i)^T dO  | P(i+1) = exp(S - L), to shared memory
//     keys     | dP(i+1) = V dO^T| dK += dS(i)^T Q  | P(i+1) from shared memory, dS = P (dP - D)
//
// The warpgroup that sums dK runs behind the other one. While one takes exponentials, the other one
// multiplies. Results leave registers once, so they have the same bits in every run.
//
// A step's sum is issued before the next step's pairs, because that frees its slot early.
#pragma once
#include "flashgen/sm90/allowed_queries.cuh"
#include "flashgen/sm90/backward_products.cuh"
#include "flashgen/sm90/failed_tiles.cuh"
#include "flashgen/sm90/key_tile_producer.cuh"

namespace flashgen {

struct BackwardKeysConfig {
  i32 head_dim, head_dim_v;
  i32 stored_columns, stored_columns_v;  // of dK and of dV
  i32 tile_q, tile_kv;
  i32 q_stages, do_stages, p_stages;
  i32 consumers;
  i32 producer_registers, consumer_registers;
  i32 section_heads;  // heads whose operands stay in the L2 cache
  bool has_lower, has_upper;
};

template <BackwardKeysConfig cfg, class T, class Params, class Smem, class Tile, class Mask, class Queries,
          class Score, class Dropping>
struct BackwardKeysMainloop {
  static_assert(cfg.tile_kv == kWarpgroupRows && cfg.consumers == 2, "two consumers share 64 keys");
  using Factors = Rounded<cfg.tile_q>;
  using PRing = Ring<cfg.p_stages>;
  using PAt = typename PRing::State;
  static constexpr i32 chunks = chunks_of(cfg.tile_q);
  // Of a warpgroup.
  static constexpr u32 warps = 4;

  struct Shared : KeyTileShared<cfg, T, Smem, Tile, Queries> {
    using Base = KeyTileShared<cfg, T, Smem, Tile, Queries>;
    FLASHGEN_DEVICE PRing p_ring() const { return {Base::start + Smem::kPBarriers}; }
    // The factors of dS on their way from one consumer to the other. What a lane writes, the same lane of the
    // other warpgroup reads.
    FLASHGEN_DEVICE Vec16* factors(PAt at, Thread thread) const {
      constexpr i32 bytes = kWarpRows * cfg.tile_q * static_cast<i32>(sizeof(T));
      const i32 part = at.slot() * static_cast<i32>(warps) + thread.warp % static_cast<i32>(warps);
      return reinterpret_cast<Vec16*>(Base::base + Smem::kP + part * bytes) + thread.lane;
    }
    FLASHGEN_DEVICE void init() const {
      Base::k_ring().init(1, warps);
      Base::v_ring().init(1, warps);
      Base::q_ring().init(1, 2 * warps);
      Base::do_ring().init(1, 2 * warps);
      p_ring().init(warps * kWarpSize, warps * kWarpSize);
      Base::tile_ring().init(1, 2 * warps * kWarpSize);
      fence_mbarrier_init();
    }
  };
  using QRing = typename Shared::QRing;
  using DORing = typename Shared::DORing;

  // A step of a consumer: its block of queries, and whether the mask forbids some pair of it.
  struct Step {
    QueryStep queries;
    bool is_cut;
  };

  // Which pairs of a warp's keys are kept. Both consumers draw, because the factors of dS do not show it.
  FLASHGEN_DEVICE static auto draw(const Params& p, const Tile& tile, Step step, Thread thread) {
    return Dropping::template draw_queries<cfg.tile_q>(
        p, tile.sequence, tile.query_head(p, step.queries.member), step.queries.block * cfg.tile_q,
        tile.first_key + thread.warp % 4 * kWarpRows, thread);
  }

  // ---- The two consumers. Each multiplies its tile (K or V) by Q or dO of a step (its pairs), makes P or dS
  // of the result, and multiplies that by dO or Q (its sum: dV or dK).

  struct SumsValues {
    static constexpr i32 columns = cfg.head_dim_v, stored = cfg.stored_columns_v;
    using FirstRing = QRing;
    using SecondRing = DORing;
    FLASHGEN_DEVICE static auto kept_ring(const Shared& shared) { return shared.k_ring(); }
    FLASHGEN_DEVICE static QRing first_ring(const Shared& shared) { return shared.q_ring(); }
    FLASHGEN_DEVICE static DORing second_ring(const Shared& shared) { return shared.do_ring(); }

    // Lines 10 and 11: S_ij = Q_i K_j^T - L_i.
    FLASHGEN_DEVICE static void issue_pairs(Strip<cfg.tile_q>& scores, const Shared& shared,
                                            typename QRing::State at, Thread thread) {
      if constexpr (Score::presets_lse) {
        preset_columns(scores, shared.lse(at), thread);
      } else {
        preset_zero(scores);
      }
      issue_over_columns(scores, shared.k(), shared.q(at));
    }
    // Line 11: P_ij = exp(S_ij - L_i).
    FLASHGEN_DEVICE static void finish_pairs(Factors& probabilities, Strip<cfg.tile_q>& scores,
                                             const Params& p, const Shared& shared, const Tile& tile,
                                             Step step, typename QRing::State at, PAt p_at, Thread thread) {
      const i32 first_q = step.queries.block * cfg.tile_q,
                first_key = tile.first_key + thread.warp % 4 * kWarpRows;
      const auto pairs = Score::template load<cfg.tile_q>(p, tile, step.queries, first_q, first_key, thread);
      AllowedQueries<cfg.tile_q / 2> allowed;
      if (step.is_cut) {
        allowed = allowed_queries<cfg.tile_q / 2>(tile.template mask<Mask>(p, step.queries.member), first_q,
                                                  first_key, thread);
        if constexpr (!Score::masks_query_end) allowed.forbid(scores);
      }
      const auto kept = draw(p, tile, step, thread);
      Factors slopes;
#pragma unroll
      for (i32 chunk = 0; chunk < chunks; ++chunk) {
        Score::template exponentiate<T>(scores, probabilities, slopes, chunk, pairs, p, tile, step.queries,
                                        shared.lse(at), first_q, first_key, thread);
        if constexpr (Score::masks_query_end) {
          if (step.is_cut) {
            allowed.forbid(probabilities, chunk);
            if constexpr (Score::has_slope) allowed.forbid(slopes, chunk);
          }
        }
        Dropping::template drop<Score::has_slope>(probabilities, slopes, kept, chunk);
      }
      const Factors& factors = Score::has_slope || Dropping::drops ? slopes : probabilities;
      shared.p_ring().wait_empty(p_at);
#pragma unroll
      for (i32 i = 0; i < cfg.tile_q / 16; ++i)
        shared.factors(p_at, thread)[i * kWarpSize] =
            Vec16{{factors[i][0], factors[i][1], factors[i][2], factors[i][3]}};
      mbarrier_arrive(shared.p_ring().full(p_at));
    }
    // Line 12: dV_j += P_ij^T dO_i.
    FLASHGEN_DEVICE static void issue_sum(Strip<columns>& dv, const Factors& p, const Shared& shared,
                                          typename DORing::State at) {
      issue_output(dv, p, shared.dout(at));
    }
    FLASHGEN_DEVICE static auto rows(const Params& p, const Tile& tile) { return tile.dv_rows(p); }
    FLASHGEN_DEVICE static float scale(const Params& p) { return Dropping::factor(p); }
  };

  struct SumsKeys {
    static constexpr i32 columns = cfg.head_dim, stored = cfg.stored_columns;
    using FirstRing = DORing;
    using SecondRing = QRing;
    FLASHGEN_DEVICE static auto kept_ring(const Shared& shared) { return shared.v_ring(); }
    FLASHGEN_DEVICE static DORing first_ring(const Shared& shared) { return shared.do_ring(); }
    FLASHGEN_DEVICE static QRing second_ring(const Shared& shared) { return shared.q_ring(); }

    // Line 13: dP_ij = dO_i V_j^T - D_i.
    FLASHGEN_DEVICE static void issue_pairs(Strip<cfg.tile_q>& dp, const Shared& shared,
                                            typename DORing::State at, Thread thread) {
      preset_columns(dp, shared.dsum(at), thread);
      issue_over_columns(dp, shared.v(), shared.dout(at));
    }
    // Line 14: dS_ij = P_ij (dP_ij - D_i).
    FLASHGEN_DEVICE static void finish_pairs(Factors& ds, Strip<cfg.tile_q>& dp, const Params& p,
                                             const Shared& shared, const Tile& tile, Step step,
                                             typename DORing::State at, PAt p_at, Thread thread) {
      const auto kept = draw(p, tile, step, thread);
      shared.p_ring().wait_full(p_at);
      Factors factors;
#pragma unroll
      for (i32 i = 0; i < cfg.tile_q / 16; ++i) {
        const Vec16 four = shared.factors(p_at, thread)[i * kWarpSize];
#pragma unroll
        for (i32 w = 0; w < 4; ++w) factors[i][w] = four.words[w];
      }
      mbarrier_arrive(shared.p_ring().empty(p_at));
#pragma unroll
      for (i32 chunk = 0; chunk < chunks; ++chunk) {
        Dropping::drop_gradients(dp, kept, chunk, shared.dsum(at), thread);
        multiply_chunk(T{}, ds, dp, factors, chunk);
      }
    }
    // Line 16: dK_j += dS_ij^T Q_i.
    FLASHGEN_DEVICE static void issue_sum(Strip<columns>& dk, const Factors& ds, const Shared& shared,
                                          typename QRing::State at) {
      issue_output(dk, ds, shared.q(at));
    }
    FLASHGEN_DEVICE static auto rows(const Params& p, const Tile& tile) { return tile.dk_rows(p); }
    FLASHGEN_DEVICE static float scale(const Params& p) { return p.scale * Dropping::factor(p); }
  };

  // ---- A consumer

  template <class Role>
  struct Consumer {
    const Params& p;
    Shared shared;
    Thread thread;
    Ring<1>::State kept_at;
    typename Role::FirstRing::State first_at;
    typename Role::SecondRing::State second_at;
    // The next message. It comes with Q, which is the second operand of one consumer.
    typename QRing::State message_at;
    PAt p_at;
    typename Shared::TileRing::State tile_at;
    Queries queries;
    Strip<Role::columns> sum;
    // The left operand of the sum.
    Factors left;

    FLASHGEN_DEVICE void issue_pairs(Strip<cfg.tile_q>& pairs) {
      Role::first_ring(shared).wait_full(first_at);
      Role::issue_pairs(pairs, shared, first_at, thread);
    }
    FLASHGEN_DEVICE void take_pairs(Strip<cfg.tile_q>& pairs, const Tile& tile) {
      wgmma_pin(pairs);
      // Addresses are computed in each step, to save registers.
      const Thread here = thread.recomputed();
      const QueryStep taken = queries.take([&] {
        if constexpr (Queries::sends_messages) shared.q_ring().wait_full(message_at);
        return shared.read_message(message_at, thread);
      });
      if constexpr (Queries::sends_messages) message_at.advance();
      const Step step = {taken, queries.is_cut(p, tile, taken, 0)};
      Role::finish_pairs(left, pairs, p, shared, tile, step, first_at, p_at, here);
      p_at.advance();
      Role::first_ring(shared).release(first_at, here);
      first_at.advance();
    }
    FLASHGEN_DEVICE void issue_sum() {
      Role::second_ring(shared).wait_full(second_at);
      Role::issue_sum(sum, left, shared, second_at);
    }
    FLASHGEN_DEVICE void take_sum() {
      wgmma_pin(sum);
      Role::second_ring(shared).release(second_at, thread);
      second_at.advance();
    }

    FLASHGEN_DEVICE void run() {
      while (true) {
        shared.tile_ring().wait_full(tile_at);
        const Tile& tile = shared.tile(tile_at);
        if (!tile.exists) break;
        queries.begin(p, tile);
        // Line 7: dK_j = 0, dV_j = 0.
        preset_zero(sum);
        // Line 8: for each block of queries that may attend to some key of this tile, of each head of the
        // group.
        if (!queries.over()) {
          Role::kept_ring(shared).wait_full(kept_at);
          {
            Strip<cfg.tile_q> pairs;
            issue_pairs(pairs);
            wgmma_wait<0>();
            take_pairs(pairs, tile);
          }
          // A step's sum, and the pairs of the next step.
          while (!queries.over()) {
            Strip<cfg.tile_q> pairs;
            issue_sum();
            issue_pairs(pairs);
            wgmma_wait<1>();
            take_sum();
            wgmma_wait<0>();
            take_pairs(pairs, tile);
          }
          Role::kept_ring(shared).release(kept_at, thread);
          kept_at.advance();
          issue_sum();
          wgmma_wait<0>();
          take_sum();
        }
        store(tile);
        mbarrier_arrive(shared.tile_ring().empty(tile_at));
        tile_at.advance();
      }
    }
    // Line 18: write dK_j, dV_j to global memory.
    FLASHGEN_DEVICE void store(const Tile& tile) {
      const Thread here = thread.recomputed();
      if (Queries::has_mask && warp_any(first_row_times_zero(sum) != 0.0f) && here.lane == 0)
        flag_keys<Queries::has_mask>(p, tile.template key_tile<cfg.tile_kv>(p));
      const float scale[2] = {Role::scale(p), Role::scale(p)};
      write_strip<T, Role::columns, Role::stored>(
          Role::rows(p, tile), tile.first_key + here.warp % 4 * kWarpRows, sum, scale, here);
    }
  };

  // ---- The kernel

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Shared shared{{base, shared_address(base)}};
    if (Thread::current().index() == 0) shared.init();
    block_sync();
    // The previous grids may run until here, and the next one may start from here on.
    griddep_wait();
    griddep_launch_dependents();
    // Registers that the producer does not need go to the consumers.
    const Thread thread = Thread::current().recomputed();
    if (thread.warp >= 4) {
      setmaxnreg_inc<cfg.consumer_registers>();
      if (thread.warp < 8) {
        Consumer<SumsValues>{p, shared, thread}.run();
      } else {
        Consumer<SumsKeys>{p, shared, thread}.run();
      }
    } else {
      setmaxnreg_dec<cfg.producer_registers>();
      if (thread.warp == 0)
        KeyTileProducer<cfg, Params, Shared, Tile, Queries>{p, shared, thread, thread.lane == 0}.run();
    }
  }
};

}  // namespace flashgen
