// The forward pass on Hopper: O = softmax(Q K^T) V.
//
// The kernel is warp-specialized, as FlashAttention-3 is. One warp, the scheduler, draws tiles of queries and
// announces them. Another, the producer, copies their Q, K and V to shared memory by TMA. Warpgroups of
// consumers own 64 query rows each: they multiply by wgmma and take exponentials in between. Line numbers in
// comments are those of Algorithm 1 of the FlashAttention-2 paper.
//
// All tiles of a block are one stream of steps, a step being one block of keys for one tile of queries. A
// consumer issues the products Q K^T of the next step together with P V of the current one, also where the
// next step begins another tile. So tensor cores do not drain between tiles:
//
//     tensor cores   | Q K(1)         | P V(0), Q K(2)      | P V(1), Q K(3)      |
//     other units              | softmax(1)       | softmax(2)          |
//
// Policies: Tile says where rows lie (query_tile.cuh), Mask and Blocks which keys a row may attend to
// (key_blocks.cuh), Score what becomes of the products (scores.cuh), Dropout which probabilities are dropped
// (dropping.cuh). Smem holds the offsets of the shared-memory map.
#pragma once
#include "flashgen/issue_in_fours.cuh"
#include "flashgen/ring.cuh"
#include "flashgen/sm90/careful_product.cuh"
#include "flashgen/sm90/dropping.cuh"
#include "flashgen/sm90/key_blocks.cuh"
#include "flashgen/sm90/row_softmax.cuh"
#include "flashgen/sm90/scores.cuh"
#include "flashgen/sm90/tile_checks.cuh"
#include "flashgen/sm90/tile_scheduler.cuh"
#include "flashgen/sm90/write_rows.cuh"
#include "flashgen/strip.cuh"

namespace flashgen {

template <ForwardSm90Config cfg, class T, class Params, class Smem, class Tile, class Mask, class Blocks,
          class Score, class Dropping>
struct ForwardMainloop {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 rows of queries");
  static constexpr u32 kConsumerWarps = 4 * cfg.consumers;
  // The named barrier at which the scheduler waits until the producer asks for a tile. Waiting there takes no
  // instructions from the consumers, as polling an mbarrier does. Those before it are the consumers'.
  static constexpr i32 kRequestBarrier = 1 + cfg.consumers;
  // The producer asks for a tile when so many blocks of the current one follow.
  static constexpr i32 kBlocksAfterRequest = 4;

  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using OTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using QRing = Ring<cfg.q_stages>;
  using KRing = Ring<cfg.k_stages>;
  using VRing = Ring<cfg.v_stages>;
  using TileRing = Ring<kForwardTileStages>;
  using Checks = TileChecks<kConsumerWarps>;
  using Logits = typename Score::Logits;
  using Softmax = RowSoftmax<T, cfg.tile_kv, cfg.anchored, Logits>;
  using Pairs = typename Score::template Pairs<cfg.tile_kv>;
  using Kept = typename Dropping::template Kept<cfg.tile_kv>;
  using Probabilities = Rounded<cfg.tile_kv>;
  using Message = typename Blocks::Message;
  // Whether V may hold values for keys that a row must not attend to.
  static constexpr bool kForbidsValues = Blocks::has_mask || !Tile::ends_with_tensor;

  // ---- What the warps of a block share

  struct Shared {
    u8* base;
    u32 start;

    FLASHGEN_DEVICE QTile q(typename QRing::Where at) const {
      return QTile{start + Smem::kQ}.slot(at.slot());
    }
    FLASHGEN_DEVICE KTile k(typename KRing::Where at) const {
      return KTile{start + Smem::kK}.slot(at.slot());
    }
    FLASHGEN_DEVICE VTile v(typename VRing::Where at) const {
      return VTile{start + Smem::kV}.slot(at.slot());
    }
    FLASHGEN_DEVICE QRing q_ring() const { return {start + Smem::kQBarriers}; }
    FLASHGEN_DEVICE KRing k_ring() const { return {start + Smem::kKBarriers}; }
    FLASHGEN_DEVICE VRing v_ring() const { return {start + Smem::kVBarriers}; }
    FLASHGEN_DEVICE TileRing tile_ring() const { return {start + Smem::kTileBarriers}; }
    // What the slots of tile_ring and, if the producer sends messages, of k_ring hold.
    FLASHGEN_DEVICE Tile& tile(typename TileRing::Where at) const {
      return reinterpret_cast<Tile*>(base + Smem::kTiles)[at.slot()];
    }
    FLASHGEN_DEVICE Message& message(typename KRing::Where at) const
      requires Blocks::sends_messages
    {
      return reinterpret_cast<Message*>(base + Smem::kMessages)[at.slot()];
    }
    FLASHGEN_DEVICE Checks& checks() const { return *reinterpret_cast<Checks*>(base + Smem::kChecks); }
    static_assert(Smem::kChecks + sizeof(Checks) <= Smem::kBytes, "the plan leaves room for the checks");

    FLASHGEN_DEVICE void init() const {
      q_ring().init(1, kConsumerWarps);
      k_ring().init(1, kConsumerWarps);
      v_ring().init(1, kConsumerWarps);
      // The producer reads announcements, too.
      tile_ring().init(1, kConsumerWarps + 1);
      checks().init();
      fence_mbarrier_init();
    }
  };

  // ---- The scheduler: one warp that announces tiles to the producer and the consumers

  struct Scheduler {
    const Params& p;
    Shared shared;
    Thread thread;
    typename TileRing::Where tile_at;

    // Writes the announcement into its slot, which is empty.
    FLASHGEN_DEVICE void announce(const Tile& tile) {
      if (thread.lane == 0) {
        shared.tile(tile_at) = tile;
        mbarrier_arrive(shared.tile_ring().full(tile_at));
      }
      warp_sync();
      tile_at.advance();
    }
    // Checks the tiles whose slots were not filled again.
    FLASHGEN_DEVICE void check_last(u32 tiles) {
      shared.checks().wait_settled(thread);
#pragma unroll 1
      for (u32 i = tiles < kForwardTileStages ? 0 : tiles - kForwardTileStages + 1; i < tiles; ++i)
        shared.checks().check(i, thread);
    }

    FLASHGEN_DEVICE void run() {
      TileScheduler<cfg, Params, Tile> tiles{p};
      Checks& checks = shared.checks();
      bool is_paused = false;
      for (i32 number = tiles.first();;) {
        const u32 index = tile_at.count;
        if (thread.lane == 0) shared.tile_ring().wait_empty(tile_at);
        warp_sync();
        if (!is_paused && index >= kForwardTileStages) checks.check(index - kForwardTileStages, thread);
        Tile tile = tiles.tile(number, thread);
        if (tile.kind == TileKind::end) {
          if (is_paused) break;
          is_paused = true;
          tile.kind = TileKind::pause;
          announce(tile);
          check_last(index);
        } else {
          if (thread.lane == 0) {
            if (!is_paused) checks.note(index, number);
            if (checks.any_failed()) tile.kind = TileKind::careful;
          }
          announce(tile);
        }
        // The next tile is drawn when the producer asks for it. Drawn earlier, it would wait here while other
        // blocks have nothing left.
        named_barrier_sync(kRequestBarrier, 2 * kWarpSize);
        i32 next = 0;
        if (thread.lane == 0) {
          next = is_paused ? checks.next_failed() : tiles.draw();
        }
        number = shuffle(next, 0);
      }
      Tile end = {};
      end.kind = TileKind::end;
      announce(end);
      if (thread.lane == 0) tiles.leave();
    }
  };

  // ---- The producer: one warp that loads Q, K and V

  // Only one lane waits for empty slots and copies: another lane that came late to a barrier could miss a
  // phase.
  struct Producer {
    const Params& p;
    Shared shared;
    Thread thread;
    bool elected;
    typename QRing::Where q_at;
    typename KRing::Where k_at;
    typename VRing::Where v_at;
    typename TileRing::Where tile_at;
    // The first tile whose queries are not loaded yet.
    typename TileRing::Where queries_at;
    // The last block whose values are not loaded yet, if any, and the announcement of its tile.
    i32 values_block = -1;
    typename TileRing::Where values_at;

    // Whether this lane loads keys and values. If all do, they follow the one that has waited.
    FLASHGEN_DEVICE bool may_load() const {
      if constexpr (Tile::warp_loads) warp_sync();
      return Tile::warp_loads || elected;
    }
    // Loads the queries of tile `queries_at`, unless there is no such tile.
    FLASHGEN_DEVICE void load_queries() {
      shared.tile_ring().wait_full(queries_at);
      const Tile tile = shared.tile(queries_at);
      if (tile.kind < TileKind::normal) return;
      if (elected) {
        shared.q_ring().wait_empty(q_at);
        mbarrier_arrive_expect_tx(shared.q_ring().full(q_at), QTile::bytes);
        tile.load_q(shared.q(q_at), p, shared.q_ring().full(q_at));
      }
      q_at.advance();
      queries_at.advance();
    }
    FLASHGEN_DEVICE void load_keys(const Tile& tile, i32 block, const Message& message) {
      if (elected) {
        shared.k_ring().wait_empty(k_at);
        if constexpr (Blocks::sends_messages) shared.message(k_at) = message;
        mbarrier_arrive_expect_tx(shared.k_ring().full(k_at), KTile::bytes);
      }
      if (may_load()) tile.load_k(shared.k(k_at), p, shared.k_ring().full(k_at), block * cfg.tile_kv, thread);
      k_at.advance();
    }
    // Values are loaded after the keys of the next step, because consumers need them later.
    FLASHGEN_DEVICE void load_last_values() {
      if (values_block < 0) return;
      const Tile tile = shared.tile(values_at);
      if (elected) {
        shared.v_ring().wait_empty(v_at);
        mbarrier_arrive_expect_tx(shared.v_ring().full(v_at), VTile::bytes);
      }
      if (may_load())
        tile.load_v(shared.v(v_at), p, shared.v_ring().full(v_at), values_block * cfg.tile_kv, thread);
      v_at.advance();
      if (values_at.count != tile_at.count) shared.tile_ring().release(values_at, thread);
      values_block = -1;
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
          load_last_values();
          shared.tile_ring().release(tile_at, thread);
          if (tile.kind == TileKind::end) return;
          request_tile();
          queries_at.advance();
          continue;
        }
        bool has_requested = false;
        Blocks::for_each(p, tile, thread, [&](i32 block, i32 left, const Message& message) {
          // The other lanes have nothing to wait for. Alone they would run through all blocks first, and
          // meanwhile the elected lane would stand still.
          warp_sync();
          // Late, so that a tile does not wait here while other blocks have nothing left, but so early that
          // its queries arrive in time.
          if (!has_requested && left <= kBlocksAfterRequest) {
            request_tile();
            has_requested = true;
          }
          load_keys(tile, block, message);
          load_last_values();
          if (queries_at.count == tile_at.count) load_queries();
          if (cfg.q_stages > 1 && left < kBlocksAfterRequest && queries_at.count == tile_at.count + 1)
            load_queries();
          values_block = block;
          values_at = tile_at;
        });
      }
    }
  };

  // ---- A consumer: a warpgroup that computes 64 rows of a tile

  // A block of keys for a tile of queries. Its members are words: flags would not stay in uniform registers.
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

  struct Consumer {
    const Params& p;
    Shared shared;
    Thread thread;
    // Which consumer this is.
    i32 number;
    typename QRing::Where q_at;
    typename KRing::Where k_at;
    typename VRing::Where v_at;
    typename TileRing::Where tile_at;
    // Of the step that was begun last.
    Tile tile;
    typename Blocks::Own own;
    Softmax softmax;
    Strip<cfg.tile_kv> scores;
    Strip<cfg.head_dim_v> out;

    FLASHGEN_DEVICE i32 warp_row() const { return number * kWarpgroupRows + thread.warp % 4 * kWarpRows; }

    // ---- The stream of steps

    FLASHGEN_DEVICE Message read_message() {
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
        own = Blocks::own_of(p, tile, number);
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
    // Whether the step that was begun last concerns this consumer. The last one of a tile always does,
    // because results follow it.
    FLASHGEN_DEVICE bool is_own(const Step& step) const {
      return step.is_last() || !step.blocks.is_empty(own);
    }
    // Whether the mask forbids some pair of the consumer's rows and that step.
    FLASHGEN_DEVICE bool is_cut(const Step& step) const { return step.blocks.needs_mask(own); }

    // ---- The warp scheduler barriers of FlashAttention-3: consumers issue products in turn, so that one
    // multiplies while another takes exponentials.

    FLASHGEN_DEVICE void warp_scheduler_barrier_sync() { named_barrier_sync(1 + number, 2 * kWarpgroupSize); }
    FLASHGEN_DEVICE void warp_scheduler_barrier_arrive() {
      named_barrier_arrive(1 + (number + 1) % cfg.consumers, 2 * kWarpgroupSize);
    }

    // ---- The parts of a step

    // Line 8: S = Q K^T.
    FLASHGEN_DEVICE void issue_scores_of() {
      // With one stage the descriptors of Q are the same in every step. Opaque, so that they take no
      // registers.
      const i32 row = number * kWarpgroupRows, own_row = cfg.q_stages > 1 ? row : opaque(row);
      issue_scores(scores, shared.q(q_at).from_row(own_row), shared.k(k_at));
    }
    // Line 10: O += P V.
    FLASHGEN_DEVICE void issue_output_of(const Step& step, const Probabilities& probabilities) {
      issue_output_in_fours(out, probabilities, shared.v(v_at), step.accumulates != 0);
      warp_scheduler_barrier_arrive();
    }
    FLASHGEN_DEVICE void release_keys(const Step& step) {
      shared.k_ring().release(k_at, thread);
      k_at.advance();
      if (step.is_last()) {
        shared.q_ring().release(q_at, thread);
        q_at.advance();
      }
    }
    FLASHGEN_DEVICE void release_values() {
      shared.v_ring().release(v_at, thread);
      v_at.advance();
    }
    FLASHGEN_DEVICE i32 first_q() const { return tile.first_q + warp_row(); }
    FLASHGEN_DEVICE Kept draw_kept(const Step& step) const {
      return Dropping::template draw<cfg.tile_kv>(p, tile, first_q(), step.first_key(), thread);
    }
    FLASHGEN_DEVICE Pairs load_pairs(const Step& step) const {
      return Score::template load<cfg.tile_kv>(p, tile, first_q(), step.first_key(), thread);
    }
    // Whether the step may need a mask or move a reference maximum. In most steps neither holds, so one
    // branch tests both. It is computed while products are under way, as what comes after them delays every
    // step.
    FLASHGEN_DEVICE bool needs_check(const Step& step) const {
      return opaque(is_cut(step) || softmax.may_move() || step.is_careful()) != 0;
    }
    // S has come. Line 9: exponentials take its place. Returns whether O must be multiplied by
    // softmax.factor.
    FLASHGEN_DEVICE bool take_exponentials(const Step& step, const Pairs& pairs, const Kept& kept,
                                           bool checks) {
      wgmma_pin(scores);
      release_keys(step);
      const Logits logits = Score::logits(p);
      Score::template apply<cfg.tile_kv>(scores, pairs, p, tile, first_q(), step.first_key(), thread);
      bool rescales = false;
      if (checks) {
        if (is_cut(step))
          mask_keys(blocks_of(scores), -kInfinity, tile.template mask<Mask>(p), first_q(), step.first_key(),
                    thread);
        rescales = softmax.move(scores, logits, !cfg.anchored || step.is_careful());
      }
      softmax.exponentiate(scores, logits);
      Dropping::template apply<cfg.tile_kv>(scores, kept);
      return rescales;
    }

    // ---- Results

    // The announcement of the tile whose results are not stored yet. The one after it has been read, too.
    FLASHGEN_DEVICE typename TileRing::Where stored_at() const { return {tile_at.count - 2}; }

    // Lines 12 to 15: O = O / l, L = m + log l, and both to global memory.
    FLASHGEN_DEVICE void store(RowStatistics rows) {
      const Tile tile = shared.tile(stored_at());
      // Addresses are computed here, rather than kept in registers throughout.
      const Thread thread = this->thread.again();
      const i32 warp_row = number * kWarpgroupRows + thread.warp % 4 * kWarpRows,
                row = tile.first_q + warp_row;
      const Logits logits = Score::logits(p);
      const i32 used = tile.len_q(p) - row;
      if constexpr (!Tile::ends_with_tensor) clear_unused(rows, used, thread);
      // Written so that NaN is suspect. NaN or infinity in V shows in every row that is multiplied by it, so
      // one of the lane's rows suffices.
      bool is_suspect = !(rows.sum[0] < kLargestSum<T>) || !(rows.sum[1] < kLargestSum<T>);
      if constexpr (kForbidsValues) is_suspect = is_suspect || !is_finite_row(out);
      float scale[2];
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        scale[h] = 1.0f;
        if constexpr (Score::has_sink) {
          const float sink = logits.as_reference_max(Score::sink(p, tile));
          const float reference = maximum(rows.reference_max[h], sink);
          const bool is_used = Tile::ends_with_tensor || 8 * h + thread.row() < used;
          if (sink > -kInfinity && is_used) {
            scale[h] = exp2_approx(logits.powers(rows.reference_max[h] - reference));
            rows.sum[h] = rows.sum[h] * scale[h] + exp2_approx(logits.powers(sink - reference));
            rows.reference_max[h] = reference;
          }
        }
        scale[h] *= rows.normalizer(h) * Dropping::factor(p);
      }
      shared.checks().record(stored_at().count, thread.warp - 4,
                             warp_any(is_suspect && tile.kind != TileKind::careful), thread);
      const i32 end = tile.result_rows(p);
      // TMA stores whole warps' rows where others follow in memory.
      const bool by_tma = cfg.stores_by_tma && (Tile::ends_with_tensor || row + kWarpRows <= end);
      if (by_tma) {
        store_by_tma(tile, scale, warp_row, row, end, thread);
      } else {
        write_rows<cfg.stored_columns>(tile.o_rows(p), row, out, scale, thread);
      }
      if (thread.column() == 0) {
        float* const lse = tile.lse_rows(p) + row;
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          const i32 own = 8 * h + thread.row();
          if (row + own < end) lse[own] = rows.log_sum_exp(h, logits);
        }
      }
      shared.tile_ring().release(stored_at(), thread);
    }

    // Each warp stores its own 16 rows. The previous ones must have left shared memory; and if this tile is
    // repeated, its first results must have reached global memory.
    FLASHGEN_DEVICE void store_by_tma(const Tile& tile, const float (&scale)[2], i32 warp_row, i32 row,
                                      i32 end, Thread thread) {
      if constexpr (cfg.stores_by_tma) {
        const OTile o{shared.start + Smem::kO};
        if (thread.lane == 0) {
          if (tile.kind == TileKind::careful) {
            bulk_wait<0>();
          } else {
            bulk_wait_read<0>();
          }
        }
        warp_sync();
        store_strip(o, warp_row, out, scale, thread);
        fence_proxy_async_shared();
        warp_sync();
        if (thread.lane == 0 && row < end) {
          tile.store_o(o.from_row(warp_row), p, row);
          bulk_commit();
        }
      }
    }

    // Queries beyond the warp's first `used` rows attend to nothing, whatever they hold.
    FLASHGEN_DEVICE void clear_unused(RowStatistics& rows, i32 used, Thread thread) {
      if (used >= kWarpRows) return;
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const bool is_used = 8 * h + thread.row() < used;
        rows.sum[h] = is_used ? rows.sum[h] : 0.0f;
#pragma unroll
        for (i32 i = 0; i < cfg.head_dim_v / 4; ++i) {
          float& o = out[4 * (i / 2) + 2 * h + i % 2];
          o = is_used ? o : 0.0f;
        }
      }
    }

    // ---- The mainloop

    FLASHGEN_DEVICE void run() {
      clear(out);
      softmax.reset();
      // The first consumer may issue products at once.
      if (number == cfg.consumers - 1) warp_scheduler_barrier_arrive();
      Step next = next_tile();
      for (;;) {
        while (next.exists()) {
          next = skip_to_own(next);
          // Nothing overlaps the first scores.
          Step step = next;
          Probabilities probabilities;
          first_step(step, probabilities);
          next = after(step);
          if (!step.is_careful()) overlap_steps(step, next, probabilities);
          last_step(step, probabilities);
        }
        if (next.kind == TileKind::end) break;
        // The pause. A tile that is announced after it may repeat one.
        shared.tile_ring().release({tile_at.count - 1}, thread);
        shared.checks().settle(thread);
        next = next_tile();
      }
      // Every arrival needs a sync: the first consumer completes the last one.
      if (number == 0) warp_scheduler_barrier_sync();
      if (cfg.stores_by_tma && thread.lane == 0) bulk_wait<0>();
    }

    // Passes by steps that do not concern this consumer.
    FLASHGEN_DEVICE Step skip_to_own(Step step) {
      while (!is_own(step)) {
        shared.k_ring().wait_full(k_at);
        release_keys(step);
        shared.v_ring().wait_full(v_at);
        warp_scheduler_barrier_sync();
        warp_scheduler_barrier_arrive();
        release_values();
        const i32 accumulates = step.accumulates;
        step = after(step);
        step.accumulates = accumulates;
      }
      return step;
    }
    // From `step`, whose probabilities are known, to the last step before a careful one, before one that does
    // not concern this consumer, or before the end.
    FLASHGEN_DEVICE void overlap_steps(Step& step, Step& next, Probabilities& probabilities) {
      const auto overlap = [&](const Probabilities& from, Probabilities& to) {
        overlapped_step(step, next, from, to);
        step = next;
        next = after(step);
      };
      const auto continues = [&]() { return next.kind == TileKind::normal && is_own(next); };
      if constexpr (cfg.overlaps_own_products) {
        // Two steps in the loop's body, so that one reads the registers that the other writes.
        Probabilities others;
        while (continues()) {
          overlap(probabilities, others);
          if (!continues()) {
            take_over(probabilities, others, p.len_q);
            break;
          }
          overlap(others, probabilities);
        }
      } else {
        while (continues()) overlap(probabilities, probabilities);
      }
    }
    FLASHGEN_DEVICE void wait_operands(const Step& step, bool is_first) {
      if (is_first) shared.q_ring().wait_full(q_at);
      shared.k_ring().wait_full(k_at);
    }
    // S and P of a step by itself.
    FLASHGEN_DEVICE void first_step(const Step& step, Probabilities& probabilities) {
      const Pairs pairs = load_pairs(step);
      wait_operands(step, true);
      issue_scores_of();
      const Kept kept = draw_kept(step);
      const bool checks = needs_check(step);
      wgmma_wait<0>();
      if (take_exponentials(step, pairs, kept, checks)) scale_rows(out, softmax.factor);
      round_to<T, cfg.tile_kv>(probabilities, scores);
    }
    // P V of a step together with S and P of the next one.
    FLASHGEN_DEVICE void overlapped_step(const Step& step, const Step& next,
                                         const Probabilities& probabilities,
                                         Probabilities& next_probabilities) {
      const Pairs pairs = load_pairs(next);
      wait_operands(next, step.is_last());
      warp_scheduler_barrier_sync();
      issue_scores_of();
      shared.v_ring().wait_full(v_at);
      issue_output_of(step, probabilities);
      RowStatistics finished = {};
      if (step.is_last()) {
        softmax.rows.finish();
        finished = softmax.rows;
        softmax.reset();
      }
      const Kept kept = draw_kept(next);
      const bool checks = needs_check(next);
      bool rescales;
      if constexpr (cfg.overlaps_own_products) {
        wgmma_wait<1>();
        rescales = take_exponentials(next, pairs, kept, checks);
        round_to<T, cfg.tile_kv>(next_probabilities, scores);
        wgmma_compute_before_wait(next_probabilities, softmax.rows.sum[0] + softmax.rows.sum[1],
                                  shared.start);
        wgmma_wait<0>();
        wgmma_pin(out);
        release_values();
      } else {
        wgmma_wait<0>();
        wgmma_pin(out);
        release_values();
        rescales = take_exponentials(next, pairs, kept, checks);
        round_to<T, cfg.tile_kv>(next_probabilities, scores);
      }
      if (step.is_last()) {
        store(finished);
      } else if (!cfg.anchored && rescales) {
        scale_rows(out, softmax.factor);
      }
    }
    // The announcement of a step's tile.
    FLASHGEN_DEVICE const Tile& tile_of(const Step& step) const {
      return shared.tile(step.is_last() ? stored_at() : typename TileRing::Where{tile_at.count - 1});
    }
    // Whether V holds what must not reach some row.
    FLASHGEN_DEVICE bool leaves_out_values(const Step& step) {
      if constexpr (!kForbidsValues) return false;
      return step.is_careful() && step.blocks.needs_mask(Blocks::own_of(p, tile_of(step), number)) &&
             holds_non_finite(shared.v(v_at), shared.base, thread);
    }
    // P V of a step by itself.
    FLASHGEN_DEVICE void last_step(const Step& step, const Probabilities& probabilities) {
      shared.v_ring().wait_full(v_at);
      warp_scheduler_barrier_sync();
      if (leaves_out_values(step)) {
        if (step.accumulates == 0) clear(out);
        u32 allowed[2];
        const Tile own = tile_of(step);
        find_allowed<cfg.tile_kv / 8>(allowed, own.template mask<Mask>(p), own.first_q + warp_row(),
                                      step.first_key(), thread);
        multiply_careful(out, probabilities, shared.v(v_at), allowed, thread);
        warp_scheduler_barrier_arrive();
      } else {
        issue_output_of(step, probabilities);
        wgmma_wait<0>();
        wgmma_pin(out);
      }
      release_values();
      if (step.is_last()) {
        softmax.rows.finish();
        store(softmax.rows);
        softmax.reset();
      }
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
    // The previous grids may run until here, and the next one may start from here on.
    griddep_wait();
    griddep_launch_dependents();
    // Registers that the first warpgroup does not need go to the consumers.
    if (thread.warp >= 4) {
      setmaxnreg_inc<cfg.consumer_registers>();
      Consumer{p, shared, thread, thread.warp / 4 - 1}.run();
    } else {
      setmaxnreg_dec<cfg.producer_registers>();
      if (thread.warp == 0) Producer{p, shared, thread, thread.lane == 0}.run();
      if (thread.warp == 1) Scheduler{p, shared, thread}.run();
    }
  }
};

}  // namespace flashgen
