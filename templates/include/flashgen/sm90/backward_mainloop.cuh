// The backward pass on Hopper, for heads up to 128 wide: dQ, dK and dV in one kernel.
//
// The kernel is warp-specialized, as FlashAttention-3 is. A thread block keeps a tile of 128 keys and loops
// over blocks of queries. One warp, the producer, copies tiles to shared memory by TMA. Two warpgroups, the
// consumers, own 64 of the keys each. Line numbers in comments are those of Algorithm 2 of the
// FlashAttention-2 paper.
//
// Scores are transposed: rows are keys. So P^T and dS^T in registers are the left operands of dV += P^T dO
// and dK += dS^T Q. Only dQ = dS K needs the dS of both consumers, which therefore also goes to shared
// memory.
//
// wgmma adds to its accumulators. So S starts at -L, and dP starts at -D.
//
// dQ is one step behind, so that no consumer waits for the other one's dS:
//
//     tensor cores | S(i)             | dP(i)       | dV(i)          | dQ(i-1)              | dK(i)
//     others       | TMA adds dQ(i-2) | P = exp(S)  | dS = P (dP - D), to shared memory     | store dQ(i-1)
//
// P and dS come in chunks of 32 queries. The tensor cores multiply one chunk while the next one is computed.
//
// Policies: Tile says where rows lie (key_tile.cuh), Queries which blocks of queries there are
// (query_blocks.cuh), Score how P follows from products (backward_scores.cuh), Dropping which pairs are
// dropped (backward_dropping.cuh), Sums how dQ is summed and finished (dq_sums_*.cuh).
#pragma once
#include "flashgen/sm90/allowed_queries.cuh"
#include "flashgen/sm90/backward_products.cuh"
#include "flashgen/sm90/backward_shared.cuh"

namespace flashgen {

template <BackwardSm90Config cfg, class T, class Params, class Smem, class Tile, class Mask, class Queries,
          class Score, class Dropping, class Sums>
struct BackwardMainloop {
  using Shared = BackwardShared<cfg, T, Smem, Tile, Queries>;
  using Producer = KeyTileProducer<cfg, Params, Shared, Tile, Queries>;
  using Share = typename Shared::Share;
  using Pairs = typename Score::template Pairs<cfg.tile_q>;
  static constexpr i32 chunks = chunks_of(cfg.tile_q);
  // Whether dS = P (dP - D) has other factors than the P that is multiplied with dO.
  static constexpr bool has_factors = Score::has_slope || Dropping::drops;
  static constexpr i32 none = -1;

  struct Consumer {
    const Params& p;
    Shared shared;
    Thread thread;
    // Which consumer this is.
    i32 number;
    typename Shared::KRing::State kv_at;
    typename Shared::QRing::State q_at;
    // The position in the rings of dO and dS.
    typename Shared::DORing::State do_at;
    typename Shared::TileRing::State tile_at;
    Queries queries;
    typename Sums::Adder sums;
    // Numbers of tiles of queries: that of the previous step, and that whose dQ is in shared memory.
    i32 previous;
    i32 in_buffer;
    Strip<cfg.head_dim> dk;
    Strip<cfg.head_dim_v> dv;
    Strip<cfg.tile_q> scores;

    // ---- The parts of a step

    // Lines 10 and 11: S_ij = Q_i K_j^T - L_i. First the accumulators,
    FLASHGEN_DEVICE void preset_scores(typename Shared::QRing::State q_at) {
      shared.q_ring().wait_full(q_at);
      if constexpr (Score::presets_lse) {
        preset_columns(scores, shared.lse(q_at), thread);
      } else {
        preset_zero(scores);
      }
    }
    // then the product.
    FLASHGEN_DEVICE void issue_scores() {
      issue_over_columns(scores, shared.k().from_row(number * kWarpgroupRows), shared.q(q_at));
    }
    // Line 13: dP_ij = dO_i V_j^T - D_i, half of it.
    FLASHGEN_DEVICE void issue_half_of_dp(Strip<cfg.tile_q>& dp, i32 half) {
      issue_half(dp, shared.v().from_row(number * kWarpgroupRows), shared.dout(do_at), half);
    }
    // Line 15: dQ_i += dS_ij K_j of the step at `ds_at`. The first step of a tile has none before it: it
    // multiplies K_j instead of dS, and the product is not used. A branch would serialize the products.
    FLASHGEN_DEVICE void issue_dq(Strip<kPanelColumns>& dq, typename Shared::DSRing::State ds_at,
                                  bool exists) {
      shared.ds_ring().wait_full(ds_at);
      const typename Shared::DSTile ds = {exists ? shared.ds(ds_at).address : shared.k().address};
      issue_over_rows<kPanelColumns>(dq, Share::by_rows ? ds.panel(number) : ds,
                                     Share::by_rows ? shared.k() : shared.k().panel(number));
    }
    // Writes dQ to shared memory. In the next step TMA adds it to global memory.
    FLASHGEN_DEVICE void store_dq(Strip<kPanelColumns>& dq, typename Shared::DSRing::State ds_at,
                                  bool exists) {
      wgmma_pin(dq);
      warp_sync();
      if (thread.lane == 0) {
        if (exists) mbarrier_arrive(shared.ds_ring().empty(ds_at));
        bulk_wait_read<0>();
      }
      warp_sync();
      sums.wait_buffer(ds_at);
      const i32 offset = static_cast<i32>(shared.out(thread.warp - 4) - shared.start);
      write_fragments(reinterpret_cast<float*>(shared.base + offset), dq, thread);
    }
    // TMA adds the dQ that is in shared memory.
    FLASHGEN_DEVICE void add_dq() {
      if (in_buffer != none) sums.add(in_buffer, do_at.before().before(), tile_at, thread);
    }

    // ---- A step: a block of queries

    FLASHGEN_DEVICE void step(const Tile& tile) {
      // No product is in flight, but ptxas does not know that at the head of a loop.
      wgmma_wait<0>();
      if (!cfg.presets_ahead) preset_scores(q_at);
      const QueryStep step = queries.take([&] { return shared.read_message(q_at, thread); });
      const i32 first_q = step.block * cfg.tile_q;
      const bool is_first = previous == none;
      issue_scores();
      // The mask is evaluated while S is multiplied, and before dP takes registers. `number` does not appear
      // here: ptxas would no longer keep it in a uniform register for the descriptors of products.
      const bool is_cut = queries.is_cut(p, tile, step, thread.recomputed().warp / 4 - 1);
      AllowedQueries<cfg.tile_q / 2> allowed;
      if (is_cut) {
        const Thread own = thread.recomputed();
        const i32 first_key = tile.first_key + (own.warp - 4) * kWarpRows;
        allowed = allowed_queries<cfg.tile_q / 2>(tile.template mask<Mask>(p, step.member), first_q,
                                                  first_key, own);
      }
      if (is_first) shared.v_ring().wait_full(kv_at);
      // Addresses are computed in each step, to save registers.
      const Thread here = thread.recomputed();
      const i32 warp_key = (here.warp - 4) * kWarpRows;
      const Pairs pairs =
          Score::template load<cfg.tile_q>(p, tile, step, first_q, tile.first_key + warp_key, here);
      const auto kept = Dropping::template draw_queries<cfg.tile_q>(
          p, tile.sequence, tile.query_head(p, step.member), first_q, tile.first_key + warp_key, here);

      Strip<cfg.tile_q> dp;
      shared.do_ring().wait_full(do_at);
      preset_columns(dp, shared.dsum(do_at), here);
      issue_half_of_dp(dp, 0);
      if (is_first) sums.report(thread);
      // Earlier, products would wait for its fence. Later, the buffer would be needed again.
      add_dq();

      // Line 11: P_ij = exp(S_ij - L_i). Line 12: dV_j += P_ij^T dO_i.
      wgmma_wait<1>();
      wgmma_pin(scores);
      if constexpr (!Score::masks_query_end) {
        if (is_cut) allowed.forbid(scores);
      }
      Rounded<cfg.tile_q> probabilities, factors;
#pragma unroll
      for (i32 chunk = 0; chunk < chunks; ++chunk) {
        Score::template exponentiate<T>(scores, probabilities, factors, chunk, pairs, p, tile, step,
                                        shared.lse(q_at), first_q, tile.first_key + warp_key, here);
        if constexpr (Score::masks_query_end) {
          if (is_cut) {
            allowed.forbid(probabilities, chunk);
            if constexpr (Score::has_slope) allowed.forbid(factors, chunk);
          }
        }
        Dropping::template drop<Score::has_slope>(probabilities, factors, kept, chunk);
        if (chunk == 0) issue_half_of_dp(dp, 1);
        issue_chunk(dv, probabilities, shared.dout(do_at), chunk);
      }
      const Rounded<cfg.tile_q>& factor = has_factors ? factors : probabilities;

      Strip<kPanelColumns> dq;
      if constexpr (!cfg.dq_last) issue_dq(dq, do_at.before(), !is_first);
      // Line 14: dS_ij = P_ij (dP_ij - D_i). Line 16: dK_j += dS_ij^T Q_i. A chunk is issued once the next is
      // stored.
      wgmma_wait<chunks + (cfg.dq_last ? 0 : 1)>();
      wgmma_pin(dp);
      Rounded<cfg.tile_q> ds;
      shared.ds_ring().wait_empty(do_at);
#pragma unroll
      for (i32 chunk = 0; chunk < chunks; ++chunk) {
        Dropping::drop_gradients(dp, kept, chunk, shared.dsum(do_at), here);
        multiply_chunk(T{}, ds, dp, factor, chunk);
        store_chunk(shared.ds(do_at), warp_key, ds, chunk, here);
        if (chunk > 0) issue_chunk(dk, ds, shared.q(q_at), chunk - 1);
      }
      fence_proxy_async_shared();
      warp_sync();
      if (thread.lane == 0) mbarrier_arrive(shared.ds_ring().full(do_at));
      issue_chunk(dk, ds, shared.q(q_at), chunks - 1);
      if constexpr (cfg.dq_last) issue_dq(dq, do_at.before(), !is_first);

      wgmma_wait<chunks + 1>();
      wgmma_pin(dv);
      shared.do_ring().release(do_at, thread);
      wgmma_wait<cfg.dq_last ? 0 : chunks>();
      store_dq(dq, do_at.before(), !is_first);
      if constexpr (cfg.presets_ahead) {
        // After the last step this repeats the same scores, because a branch would wait for the products.
        auto next = q_at;
        if (!queries.over()) next.advance();
        preset_scores(next);
      }
      wgmma_wait<0>();
      wgmma_pin(dk);
      in_buffer = previous;
      previous = sums.number(tile, step);
      shared.q_ring().release(q_at, thread);
      q_at.advance();
      do_at.advance();
    }

    // ---- Results

    // Line 18: write dK_j, dV_j to global memory. Each warp stores its 16 rows by TMA.
    FLASHGEN_DEVICE void store(const Tile& tile) {
      const Thread here = thread.recomputed();
      const i32 first_row = tile.first_key + (here.warp - 4) * kWarpRows;
      const u32 rows = shared.out(here.warp - 4);
      const float kept = Dropping::factor(p), dv_scale[2] = {kept, kept};
      const float dk_scale[2] = {p.scale * kept, p.scale * kept};
      if (Queries::has_mask && warp_any(first_row_times_zero(dk) + first_row_times_zero(dv) != 0.0f) &&
          here.lane == 0)
        flag_keys<Queries::has_mask>(p, tile.template key_tile<cfg.tile_kv>(p));
      sums.wait_buffer(do_at);
      const auto store_rows = [&](auto to, const auto& strip, const float (&factor)[2],
                                  const TensorMap& map) {
        if (here.lane == 0) bulk_wait_read<0>();
        warp_sync();
        store_strip(to, 0, strip, factor, here);
        fence_proxy_async_shared();
        warp_sync();
        if (here.lane == 0) {
          if (first_row < tile.result_rows(p)) tile.store(to, p, map, first_row);
          bulk_commit();
        }
      };
      store_rows(typename Shared::DVRows{rows}, dv, dv_scale, p.dv_map);
      store_rows(typename Shared::DKRows{rows}, dk, dk_scale, p.dk_map);
    }

    // ---- The mainloop

    FLASHGEN_DEVICE void run() {
      while (true) {
        shared.tile_ring().wait_full(tile_at);
        // A reference, so that the tile stays in shared memory and takes no registers.
        const Tile& tile = shared.tile(tile_at);
        if (!tile.exists) break;
        queries.begin(p, tile);
        // Line 7: dK_j = 0, dV_j = 0.
        preset_zero(dk);
        preset_zero(dv);
        if (queries.over()) {
          sums.pass(tile_at, thread);
        } else {
          shared.k_ring().wait_full(kv_at);
          sums.begin(tile);
          previous = in_buffer = none;
          if constexpr (cfg.presets_ahead) preset_scores(q_at);
          // Line 8: for each tile of queries that may attend to some key of this tile, of each head of the
          // group.
          while (!queries.over()) step(tile);
          shared.v_ring().release(kv_at, thread);
          add_dq();
          last_dq();
          shared.k_ring().release(kv_at, thread);
          kv_at.advance();
        }
        store(tile);
        mbarrier_arrive(shared.tile_ring().empty(tile_at));
        tile_at.advance();
      }
      sums.leave(thread);
      if (thread.lane == 0) bulk_wait<0>();
    }
    // dQ of the last step.
    FLASHGEN_DEVICE void last_dq() {
      Strip<kPanelColumns> dq;
      issue_dq(dq, do_at.before(), true);
      wgmma_wait<0>();
      store_dq(dq, do_at.before(), true);
      sums.add(previous, do_at.before(), tile_at, thread);
    }
  };

  // ---- The kernel

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Thread thread = Thread::current();
    const Shared shared{{base, shared_address(base)}};
    Sums::clear_shared(shared, thread);
    if (thread.index() == 0) {
      shared.init(Sums::tile_readers);
      Sums::init(shared);
      fence_mbarrier_init();
    }
    block_sync();
    // Programmatic dependent launch: waits for the previous grids, and lets the next one start.
    griddep_wait();
    griddep_launch_dependents();
    // Registers that the producer does not need go to the consumers. Each role reads its thread index again,
    // because the producer has no register to keep it in.
    if (thread.warp >= 4) {
      setmaxnreg_inc<cfg.consumer_registers>();
      const Thread own = Thread::current().recomputed();
      const i32 number = own.warp / 4 - 1;
      Consumer{p, shared, own, number, {}, {}, {}, {}, {}, {p, shared, number}}.run();
    } else {
      setmaxnreg_dec<cfg.producer_registers>();
      const Thread own = Thread::current().recomputed();
      if (own.warp == 0) {
        Producer{p, shared, own, own.lane == 0}.run();
      } else {
        Sums::run_helper(p, shared, own);
      }
    }
  }
};

}  // namespace flashgen
