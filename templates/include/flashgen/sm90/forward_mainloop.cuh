// The forward pass on Hopper: O = softmax(Q K^T) V, warp-specialized as FlashAttention-3 is.
//
// One warp, the scheduler, draws tiles of queries and announces them. Another, the producer, copies their Q,
// K and V to shared memory by TMA. Each consumer, a warpgroup, owns 64 query rows of a tile. A step is one
// block of keys for one tile. All tiles of a thread block form one stream of steps. A consumer issues Q K^T
// of the next step together with P V of the current one, also across tiles, so that the tensor cores do not
// drain between tiles:
//
//     tensor cores   | Q K(1)         | P V(0), Q K(2)      | P V(1), Q K(3)      |
//     other units              | softmax(1)       | softmax(2)          |
//
// Line numbers in comments are those of Algorithm 1 of the FlashAttention-2 paper.
#pragma once
#include "flashgen/issue_in_fours.cuh"
#include "flashgen/sm90/dropping.cuh"
#include "flashgen/sm90/forward_epilogue.cuh"
#include "flashgen/sm90/forward_producer.cuh"
#include "flashgen/sm90/input_scales.cuh"
#include "flashgen/sm90/scheduler_warp.cuh"
#include "flashgen/sm90/scores.cuh"
#include "flashgen/sm90/values.cuh"

namespace flashgen {

template <ForwardSm90Config cfg, class T, class Params, class Smem, class TileScheduler, class Tile,
          class Mask, class Blocks, class Score, class DropoutPolicy, class Values, class Scales,
          class Epilogue>
struct ForwardMainloop {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 rows of queries");
  // Whether V may hold keys that a row must not attend to, by a mask or beyond the end of the sequence.
  static constexpr bool kForbidsValues = Blocks::has_mask || !Tile::ends_with_tensor;

  using Shared = ForwardShared<cfg, T, Smem, Tile, Blocks, Values>;
  using Logits = typename Score::Logits;
  using Probabilities = typename Values::Probabilities;
  using Softmax = typename Values::template Softmax<Logits>;
  using Factors = typename Scales::Factors;
  using TileState = RingState<kForwardTileStages>;

  // A block of keys for a tile of queries. Members are words: ptxas keeps no bool in a uniform register.
  struct Step {
    TileKind kind;
    Blocks blocks;
    // Whether O holds products of an earlier step of the tile.
    i32 accumulates;

    FLASHGEN_DEVICE bool is_last() const { return blocks.is_last(); }
    FLASHGEN_DEVICE i32 first_key() const { return blocks.block * cfg.tile_kv; }
    FLASHGEN_DEVICE bool exists() const { return kind >= TileKind::normal; }
    FLASHGEN_DEVICE bool is_careful() const { return kind == TileKind::careful; }
  };

  // A consumer: a warpgroup that computes 64 rows of a tile.
  struct Consumer {
    const Params& p;
    Shared shared;
    Thread thread;
    i32 number;
    RingState<cfg.q_stages> q_at;
    RingState<cfg.stages> k_at, v_at;
    TileState tile_at;
    // The tile of the newest step, and which of its blocks the mask empties or cuts for this consumer's rows.
    Tile tile;
    typename Blocks::ConsumerBlocks consumer_blocks;
    Softmax softmax;
    Strip<cfg.tile_kv> scores;
    typename Values::Product product;
    typename Values::Out out;
    // Of the step whose S was issued last. If they do not differ by block: of the newest tile.
    Factors factors;

    FLASHGEN_DEVICE i32 warp_row() const { return number * kWarpgroupRows + thread.warp % 4 * kWarpRows; }

    // ---- The stream of steps

    FLASHGEN_DEVICE typename Blocks::Message read_message() {
      if constexpr (Blocks::sends_messages) {
        shared.k_ring().wait_full(k_at);
        return shared.message(k_at);
      } else {
        return {};
      }
    }
    FLASHGEN_DEVICE Step next_tile() {
      shared.tile_ring().wait_full(tile_at);
      tile = shared.tile(tile_at);
      tile_at.advance();
      Step step = {tile.kind, {}, 0};
      if (step.exists()) {
        step.blocks.begin(p, tile, [&]() { return read_message(); });
        consumer_blocks = Blocks::consumer_blocks(p, tile, number);
        if constexpr (!Scales::differ_by_block) factors = Scales::of(p, tile, 0, 0);
      }
      return step;
    }
    FLASHGEN_DEVICE Step after(const Step& step) {
      if (step.is_last()) return next_tile();
      Step next = step;
      next.accumulates = 1;
      next.blocks.advance([&]() { return read_message(); });
      return next;
    }
    // Whether this consumer computes the newest step. It skips those without allowed pairs of its rows,
    // except the last step of a tile, after which it stores results.
    FLASHGEN_DEVICE bool computes(const Step& step) const {
      return step.is_last() || !step.blocks.forbids_all(consumer_blocks);
    }
    // Whether the mask forbids some pair of the newest step and this consumer's rows.
    FLASHGEN_DEVICE bool is_cut(const Step& step) const { return step.blocks.needs_mask(consumer_blocks); }

    // ---- The warp scheduler barriers of FlashAttention-3: consumers issue products in turn, so that one
    // multiplies while another takes exponentials. Where these take most of the time, turns only delay.

    FLASHGEN_DEVICE void warp_scheduler_barrier_sync() {
      if constexpr (Values::takes_turns) named_barrier_sync(1 + number, 2 * kWarpgroupSize);
    }
    FLASHGEN_DEVICE void warp_scheduler_barrier_arrive() {
      if constexpr (Values::takes_turns) {
        named_barrier_arrive(1 + (number + 1) % cfg.consumers, 2 * kWarpgroupSize);
      }
    }

    // ---- The parts of a step

    // Line 8: S = Q K^T.
    FLASHGEN_DEVICE void issue_qk() {
      // With one stage the descriptors of Q are the same in every step, and ptxas would keep them all in
      // registers. An opaque row has it compute them anew.
      const i32 row = number * kWarpgroupRows, own_row = cfg.q_stages > 1 ? row : opaque(row);
      issue_scores(scores, shared.q(q_at).from_row(own_row), shared.k(k_at));
    }
    // Line 10: O += P V.
    FLASHGEN_DEVICE void issue_pv(const Step& step, const Probabilities& probabilities) {
      Values::issue(product, out, probabilities, shared.v(v_at), step.accumulates != 0);
      warp_scheduler_barrier_arrive();
    }
    // The product that issue_pv() issued is complete: it is added to O.
    FLASHGEN_DEVICE void finish_pv(const Probabilities& probabilities, const Factors& of_step) {
      Values::finish(product, out, probabilities, shared.v(v_at), of_step.values);
    }
    // S is complete: K may be overwritten, and after a tile's last step Q, too.
    FLASHGEN_DEVICE void release_qk(const Step& step) {
      shared.k_ring().release(k_at, thread);
      k_at.advance();
      if (step.is_last()) {
        shared.q_ring().release(q_at, thread);
        q_at.advance();
      }
    }
    FLASHGEN_DEVICE void release_v() {
      shared.v_ring().release(v_at, thread);
      v_at.advance();
    }
    FLASHGEN_DEVICE void finish_and_release_v(const Probabilities& probabilities, const Factors& of_step) {
      finish_pv(probabilities, of_step);
      release_v();
    }
    FLASHGEN_DEVICE i32 first_q() const { return tile.first_q + warp_row(); }
    FLASHGEN_DEVICE auto draw_kept(const Step& step) const {
      return DropoutPolicy::template draw<cfg.tile_kv>(p, tile, first_q(), step.first_key(), thread);
    }
    FLASHGEN_DEVICE auto load_pairs(const Step& step) const {
      return Score::template load<cfg.tile_kv>(p, tile, first_q(), step.first_key(), thread);
    }
    FLASHGEN_DEVICE void load_factors(const Step& step) {
      factors = Scales::of(p, tile, first_q(), step.first_key());
    }
    // Whether the step may need a mask or a new reference maximum. Most steps need neither, so one branch
    // tests both. Computed while products run, because work after them delays every step.
    FLASHGEN_DEVICE bool needs_check(const Step& step) const {
      return opaque(is_cut(step) || softmax.needs_max() || step.is_careful()) != 0;
    }
    // S is complete. Line 9: exponentials replace it. Returns whether O must be multiplied by
    // softmax.scores_scale.
    FLASHGEN_DEVICE bool take_exponentials(const Step& step, const auto& pairs, const auto& kept,
                                           bool checks) {
      wgmma_pin(scores);
      release_qk(step);
      const Logits logits = Score::logits(p, factors.logits);
      Score::template apply<cfg.tile_kv>(scores, factors.logits, pairs, p, tile, first_q(), step.first_key(),
                                         thread);
      bool rescales = false;
      if (checks) {
        if (is_cut(step))
          mask_keys(blocks_of(scores), -kInfinity, tile.template mask<Mask>(p), first_q(), step.first_key(),
                    thread);
        rescales = softmax.update_max(scores, logits, !cfg.anchored || step.is_careful(), is_cut(step));
      }
      softmax.exponentiate(scores, logits);
      DropoutPolicy::template apply<cfg.tile_kv>(scores, kept);
      return rescales;
    }

    // Rounds exponentials to P, and scales them down before if they are too large. Returns whether O must be
    // multiplied by softmax.scores_scale: `rescales`, or true if it scaled any.
    FLASHGEN_DEVICE bool round(Probabilities& probabilities, bool rescales) {
      if constexpr (Values::has_range) {
        return softmax.round_in_range(scores, Score::logits(p, factors.logits), rescales,
                                      [&]() { return Values::round(probabilities, scores); });
      } else {
        Values::round(probabilities, scores);
        return rescales;
      }
    }

    // ---- Results

    // The slot of the tile whose results come next. It is two back, because the tile after it has been read.
    FLASHGEN_DEVICE TileState finished_tile_at() const { return {tile_at.count - 2}; }

    FLASHGEN_DEVICE void store(RowStatistics rows) {
      store_results<T, Score, DropoutPolicy, Scales, Epilogue, kForbidsValues>(*this, finished_tile_at(),
                                                                               rows);
      if constexpr (Values::begins_with_zero) clear_strip(out);
    }

    // ---- The mainloop

    FLASHGEN_DEVICE void run() {
      clear_strip(out);
      softmax.reset();
      // Consumer 0 issues products first.
      if (number == cfg.consumers - 1) warp_scheduler_barrier_arrive();
      Step next = next_tile();
      for (;;) {
        while (next.exists()) {
          next = skip_empty_steps(next);
          // Nothing overlaps the first scores.
          Step step = next;
          Probabilities probabilities;
          first_step(step, probabilities);
          next = after(step);
          if constexpr (Values::overlaps_steps) {
            if (!step.is_careful()) overlap_steps(step, next, probabilities);
          }
          last_step(step, probabilities);
        }
        if (next.kind == TileKind::end) break;
        // The kind is `drain`: all announced tiles are computed. Failed ones may be announced again now.
        shared.tile_ring().release({tile_at.count - 1}, thread);
        shared.checks().arrive_drained(thread);
        next = next_tile();
      }
      // Every arrival at a named barrier needs a sync. Consumer 0 completes the last one.
      if (number == 0) warp_scheduler_barrier_sync();
      Epilogue::wait(thread);
    }

    // Skips steps that this consumer does not compute. It still passes on its turn to issue products.
    FLASHGEN_DEVICE Step skip_empty_steps(Step step) {
      while (!computes(step)) {
        shared.k_ring().wait_full(k_at);
        release_qk(step);
        shared.v_ring().wait_full(v_at);
        warp_scheduler_barrier_sync();
        warp_scheduler_barrier_arrive();
        release_v();
        const i32 accumulates = step.accumulates;
        step = after(step);
        step.accumulates = accumulates;
      }
      return step;
    }
    // Begins with `step`, whose probabilities are known. Ends when the next step is careful, does not exist
    // or is one that this consumer skips.
    FLASHGEN_DEVICE void overlap_steps(Step& step, Step& next, Probabilities& probabilities) {
      const auto overlap = [&](const Probabilities& from, Probabilities& to) {
        overlapped_step(step, next, from, to);
        step = next;
        next = after(step);
      };
      const auto continues = [&]() { return next.kind == TileKind::normal && computes(next); };
      if constexpr (Values::has_two_operands) {
        // Two steps in the loop's body: P V of each reads the P whose registers the other one's softmax
        // writes.
        Probabilities others;
        while (continues()) {
          overlap(probabilities, others);
          if (!continues()) {
            copy_operands(probabilities, others, /*not_negative=*/p.len_q);
            break;
          }
          overlap(others, probabilities);
        }
      } else {
        while (continues()) overlap(probabilities, probabilities);
      }
    }
    // `may_begin_tile`: Q may not have arrived yet.
    FLASHGEN_DEVICE void wait_qk(bool may_begin_tile) {
      if (may_begin_tile) shared.q_ring().wait_full(q_at);
      shared.k_ring().wait_full(k_at);
    }
    // S and P of a step, overlapping nothing.
    FLASHGEN_DEVICE void first_step(const Step& step, Probabilities& probabilities) {
      const auto pairs = load_pairs(step);
      if constexpr (Scales::differ_by_block) load_factors(step);
      wait_qk(true);
      issue_qk();
      const auto kept = draw_kept(step);
      const bool checks = needs_check(step);
      wgmma_wait<0>();
      bool rescales = take_exponentials(step, pairs, kept, checks);
      // Before scale_rows() where rounding may change scores_scale.
      if constexpr (Values::has_range) rescales = round(probabilities, rescales);
      if (rescales) scale_rows(out, softmax.scores_scale);
      if constexpr (!Values::has_range) round(probabilities, rescales);
    }
    // P V of a step together with S and P of the next one.
    FLASHGEN_DEVICE void overlapped_step(const Step& step, const Step& next,
                                         const Probabilities& probabilities,
                                         Probabilities& next_probabilities) {
      const auto pairs = load_pairs(next);
      const Factors of_step = factors;
      if constexpr (Scales::differ_by_block) load_factors(next);
      wait_qk(step.is_last());
      warp_scheduler_barrier_sync();
      issue_qk();
      shared.v_ring().wait_full(v_at);
      issue_pv(step, probabilities);
      RowStatistics finished = {};
      if (step.is_last()) {
        softmax.rows.finish();
        finished = softmax.rows;
        softmax.reset();
      }
      const auto kept = draw_kept(next);
      const bool checks = needs_check(next);
      bool rescales;
      if constexpr (Values::has_two_operands) {
        wgmma_wait<1>();
        rescales = round(next_probabilities, take_exponentials(next, pairs, kept, checks));
        wgmma_compute_before_wait(next_probabilities,
                                  /*not_negative=*/softmax.rows.sum[0] + softmax.rows.sum[1], shared.start);
        wgmma_wait<0>();
        finish_and_release_v(probabilities, of_step);
      } else if constexpr (Values::overlaps_own_products) {
        wgmma_wait<1>();
        rescales = take_exponentials(next, pairs, kept, checks);
        const u32 sums[1][4] = {{bits_of(softmax.rows.sum[0]), bits_of(softmax.rows.sum[1]), 0, 0}};
        wgmma_compute_before_wait(sums, /*not_negative=*/softmax.rows.sum[0] + softmax.rows.sum[1],
                                  shared.start);
        // P V reads the registers that P is rounded to.
        wgmma_wait<0>();
        rescales = round(next_probabilities, rescales);
        finish_and_release_v(probabilities, of_step);
      } else {
        wgmma_wait<0>();
        finish_and_release_v(probabilities, of_step);
        rescales = round(next_probabilities, take_exponentials(next, pairs, kept, checks));
      }
      if (step.is_last()) {
        store(finished);
      } else if (Softmax::may_rescale && rescales) {
        scale_rows(out, softmax.scores_scale);
      }
    }
    // P V of a step, overlapping nothing.
    FLASHGEN_DEVICE void last_step(const Step& step, const Probabilities& probabilities) {
      shared.v_ring().wait_full(v_at);
      warp_scheduler_barrier_sync();
      if (leaves_out_values(step)) {
        if (step.accumulates == 0) clear_strip(out);
        u32 allowed[2];
        const Tile step_tile = tile_of(step);
        find_allowed<cfg.tile_kv / 8>(allowed, step_tile.template mask<Mask>(p),
                                      step_tile.first_q + warp_row(), step.first_key(), thread);
        Values::multiply_careful(out, probabilities, shared.v(v_at), allowed, factors.values, thread);
        warp_scheduler_barrier_arrive();
      } else {
        issue_pv(step, probabilities);
        wgmma_wait<0>();
        finish_pv(probabilities, factors);
      }
      release_v();
      if (step.is_last()) {
        softmax.rows.finish();
        store(softmax.rows);
        softmax.reset();
      }
    }
    // A step's tile. After a tile's last step, the tile that follows has been read, too.
    FLASHGEN_DEVICE const Tile& tile_of(const Step& step) const {
      return shared.tile(step.is_last() ? finished_tile_at() : TileState{tile_at.count - 1});
    }
    // Whether V of a careful step holds NaN or infinity that must not reach some row.
    FLASHGEN_DEVICE bool leaves_out_values(const Step& step) {
      if constexpr (!kForbidsValues) return false;
      return step.is_careful() && step.blocks.needs_mask(p, tile_of(step), number) &&
             Values::holds_non_finite(shared.v(v_at), shared.base, thread);
    }
  };

  // ---- The kernel

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Thread thread = Thread::current();
    const Shared shared{base, shared_address(base)};
    if (thread.index() == 0) shared.init();
    if (thread.index() == kWarpSize) {
      prefetch_tensormap(&p.q_map);
      prefetch_tensormap(&p.k_map);
      prefetch_tensormap(&p.v_map);
    }
    block_sync();
    // Programmatic dependent launch: waits for the previous grids, and lets the next one start.
    griddep_wait();
    griddep_launch_dependents();
    // Registers that the first warpgroup does not need go to the consumers.
    if (thread.warp >= 4) {
      setmaxnreg_inc<cfg.consumer_registers>();
      Consumer{p, shared, thread, thread.warp / 4 - 1}.run();
    } else {
      setmaxnreg_dec<cfg.producer_registers>();
      ForwardProducer<cfg, Params, Tile, Blocks, Shared> producer{p, shared, thread, thread.lane == 0};
      if (thread.warp == 0) producer.run();
      if (thread.warp == 1) SchedulerWarp<TileScheduler, Params, Tile, Shared>{p, shared, thread}.run();
      // The warps after the scheduler.
      if constexpr (Values::transposes) {
        if (thread.warp >= 2) Values::run_transposer(shared, thread);
      } else if constexpr (Tile::in_pages) {
        if (thread.warp == 2) producer.run_values();
      }
    }
  }
};

}  // namespace flashgen
