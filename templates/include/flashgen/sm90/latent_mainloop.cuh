// Attention of few new tokens to a cache of latent vectors, on Hopper: O = softmax(Q K^T + Qv V^T) V. Items,
// teams of blocks and parts are those of decode/latent_mainloop.cuh.
//
// O of 64 rows takes the registers of two warpgroups. Warpgroup w has half w of its columns. The warpgroups
// take turns at the tiles of keys: one computes S and P of a tile, and both add P times their half of V. P
// passes through shared memory. Exponentials of one warpgroup overlap products of the other:
//
//     warpgroup 0     S 0 | exp 0 | P V 0 | S 2, first part | P V 1 | S 2, rest | exp 2 | P V 2 |
//     warpgroup 1     S 1, first part     | P V 0 | S 1, rest | exp 1 | P V 1 | S 3, first part |
//
// Two tiles fit beside Q. To keep copies under way, a tile arrives in three parts, each with a ring of its
// own: K, and the halves of V. Half w is free as soon as warpgroup w has multiplied it: the other one has
// finished S by then, because P depends on it. So a warpgroup multiplies the other one's tile as soon as its
// P is there. Of its next S it issues before that only the products with K and with its own half of V, which
// do not wait for the other warpgroup.
#pragma once
#include "flashgen/decode/cache_element.cuh"
#include "flashgen/decode/lane_softmax.cuh"
#include "flashgen/decode/latent_results.cuh"
#include "flashgen/ring.cuh"
#include "flashgen/sm90/careful_product.cuh"
#include "flashgen/sm90/decode_boxes.cuh"
#include "flashgen/sm90/decode_roles.cuh"
#include "flashgen/sm90/latent_products.cuh"

namespace flashgen {

template <DecodeConfig cfg, class T, class Params, class Smem, class Mask, class Score, bool paged>
struct LatentSm90Mainloop {
  static_assert(kHasDecodeRoles<cfg>, "two warpgroups compute, and warps of a third copy");
  static_assert(cfg.stages == 2, "each stage belongs to one warpgroup while an item lasts");
  static constexpr i32 half_columns = cfg.head_dim_v / 2;

  using Element = SameElement<cfg, T>;
  using QTile = PanelTile<T, kWarpgroupRows, Element::dim>;
  using QvTile = PanelTile<T, kWarpgroupRows, cfg.head_dim_v>;
  using QvHalf = PanelTile<T, kWarpgroupRows, half_columns>;
  using KTile = PanelTile<T, cfg.tile_kv, Element::dim>;
  using VHalf = PanelTile<T, cfg.tile_kv, half_columns>;
  using PTile = PanelTile<T, kWarpgroupRows, cfg.tile_kv>;
  static_assert(half_columns % VHalf::panel_cols == 0, "each warpgroup has whole panels");
  using TileRing = Ring<cfg.stages>;
  using At = typename TileRing::State;
  using Logits = typename Score::Logits;
  using Softmax = LaneSoftmax<Logits>;
  using Output = Strip<half_columns>;
  using Results = LatentResults<cfg, T, Params, Score, Element, kWarpgroupWarps>;

  struct Shared {
    DecodeScheduler<cfg, Mask> scheduler;
    u32 is_last;
    RowTotal totals[kWarpgroupRows];
    // By slot of the ring: each row's reference maximum after that tile.
    float reference_max[cfg.stages][kWarpgroupRows];
    // By warpgroup.
    float sums[2][kWarpgroupRows];
  };
  static_assert(Smem::kShared + sizeof(Shared) <= Smem::kBytes,
                "the plan leaves room for what threads exchange");

  const Params& p;
  u8* base;
  u32 start;
  Thread thread;
  // The next tile of the rings.
  At at = {};

  FLASHGEN_DEVICE Shared& shared() const { return *reinterpret_cast<Shared*>(base + Smem::kShared); }
  FLASHGEN_DEVICE QTile q_tile() const { return {start + Smem::kQ}; }
  FLASHGEN_DEVICE QvTile qv_tile() const { return {start + Smem::kQv}; }
  FLASHGEN_DEVICE QvHalf qv_half(i32 half) const { return QvHalf{start + Smem::kQv}.slot(half); }
  FLASHGEN_DEVICE PTile p_tile() const { return {start + Smem::kP}; }
  FLASHGEN_DEVICE KTile k_tile(At at) const { return KTile{start + Smem::kK}.slot(at.slot()); }
  FLASHGEN_DEVICE VHalf v_half(At at, i32 half) const {
    return VHalf{start + Smem::kV}.slot(2 * at.slot() + half);
  }

  // ---- The rings

  FLASHGEN_DEVICE TileRing ring(i32 number) const {
    return {start + Smem::kBarriers + static_cast<u32>(number) * 16 * cfg.stages};
  }
  FLASHGEN_DEVICE TileRing k_ring() const { return ring(0); }
  FLASHGEN_DEVICE TileRing v_ring(i32 half) const { return ring(1 + half); }
  // Says when P of a tile is there. The warpgroups write it in turns, so nothing needs to say that it is
  // free.
  FLASHGEN_DEVICE TileRing p_ring() const { return ring(3); }

  // Two producer warps fill a slot of K, and one fills a half of V. One warpgroup empties each.
  FLASHGEN_DEVICE void init_rings() const {
    k_ring().init(2, kWarpgroupWarps);
    v_ring(0).init(1, kWarpgroupWarps);
    v_ring(1).init(1, kWarpgroupWarps);
    // Its empty barriers are not used.
    p_ring().init(kWarpgroupWarps, kWarpgroupWarps);
  }

  // ---- The producers

  FLASHGEN_DEVICE void load(i32 producer, const DecodeItem& item, Range tiles) {
    if (producer < 2) {
      const i32 half = producer;
      load_tiles<cfg, Mask, paged, 1>(p, item, tiles, 0, v_ring(half), at, VHalf::bytes / cfg.tile_kv, thread,
                                      [&](At to, const BoxCoordinates& box) {
                                        v_half(to, half)
                                            .from_row(box.tile_row)
                                            .load(p.v_map, v_ring(half).full(to), box.page_row, item.head_kv,
                                                  box.page, half * half_columns);
                                      });
    } else {
      load_tiles<cfg, Mask, paged, 2>(p, item, tiles, producer - 2, k_ring(), at, KTile::bytes / cfg.tile_kv,
                                      thread, [&](At to, const BoxCoordinates& box) {
                                        k_tile(to)
                                            .from_row(box.tile_row)
                                            .load(p.k_map, k_ring().full(to), box.page_row, item.head_kv,
                                                  box.page);
                                      });
    }
  }

  // ---- The warpgroups that compute

  // The other warpgroup's tile before this warpgroup's own.
  struct Other {
    bool exists;
    bool cut;
    i32 key;
    At at;
  };

  // A lane's rows of an item, and their masks. O leaves no registers to keep them in.
  FLASHGEN_DEVICE LaneRows lane_rows(const DecodeItem& item) const {
    return LaneRows::of(p, item, thread.warp % kWarpgroupWarps, thread);
  }
  FLASHGEN_DEVICE LaneMasks<Mask> lane_masks(const DecodeItem& item) const {
    return LaneMasks<Mask>::of(p, item, lane_rows(item));
  }
  // Products have 64 rows in any case. Only warps with rows of the item take exponentials.
  FLASHGEN_DEVICE bool has_rows(const DecodeItem& item) const {
    return thread.warp % kWarpgroupWarps < item.row_blocks();
  }

  FLASHGEN_DEVICE i32 warpgroup() const { return thread.warp / kWarpgroupWarps; }
  FLASHGEN_DEVICE i32 row(i32 h) const {
    return thread.warp % kWarpgroupWarps * kRowBlock + thread.row() + 8 * h;
  }

  // Issues S = Q K^T + Qv V^T in two steps. The other warpgroup frees its half of V last, so that half is for
  // the second one.
  FLASHGEN_DEVICE void issue_first_scores(Strip<cfg.tile_kv>& strip) const {
    // Otherwise ptxas keeps the descriptors of all steps, for which O leaves no registers.
    const i32 own = opaque(warpgroup());
    k_ring().wait_full(at);
    issue_scores(strip, q_tile(), k_tile(at));
    v_ring(own).wait_full(at);
    issue_over_columns(strip, qv_half(own), v_half(at, own));
  }
  FLASHGEN_DEVICE void issue_last_scores(Strip<cfg.tile_kv>& strip) const {
    const i32 other = opaque(warpgroup()) ^ 1;
    v_ring(other).wait_full(at);
    issue_over_columns(strip, qv_half(other), v_half(at, other));
  }

  // S becomes exponentials. Returns whether reference maxima rise, so that O must be multiplied by `factor`.
  FLASHGEN_DEVICE bool take_exponentials(Strip<cfg.tile_kv>& strip, float (&factor)[2], Softmax& softmax,
                                         const DecodeItem& item, i32 key, bool cut) const {
    Accumulator<1, cfg.tile_kv / 8>& scores = blocks_of(strip);
    const Logits logits = Score::logits(p);
    Score::apply(scores, p, item, lane_rows(item), key, thread);
    if (cut) {
      const auto masks = lane_masks(item);
      for_each_score(scores, [&](float& s, i32 h, i32 column) {
        if (!masks.allows(h, key + thread.column() + column)) s = -kInfinity;
      });
    }
    float highest[2];
    Softmax::largest(highest, scores, logits);
    const bool rises = warp_any(softmax.lags(highest));
    if (rises) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) factor[h] = softmax.raise_row(h, row_maximum(highest[h]));
    }
    softmax.exponentiate(scores, logits);
    return rises;
  }

  // Leaves P of the warp's rows, and their reference maxima, for the other warpgroup.
  FLASHGEN_DEVICE void publish(const Rounded<cfg.tile_kv>& probabilities, const Softmax& softmax) const {
    store_rounded(p_tile(), rows_before(), probabilities, thread);
    if (thread.column() == 0) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) shared().reference_max[at.slot()][row(h)] = softmax.reference_max[h];
    }
    fence_proxy_async_shared();
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(p_ring().full(at));
  }
  FLASHGEN_DEVICE i32 rows_before() const { return thread.warp % kWarpgroupWarps * kRowBlock; }

  // Takes over the reference maxima of the other warpgroup's tile. Returns whether O must be multiplied by
  // `factor`.
  FLASHGEN_DEVICE bool follow(float (&factor)[2], Softmax& softmax, const DecodeItem& item, At other) const {
    p_ring().wait_full(other);
    if (!has_rows(item)) return false;
    bool rises = false;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float reference = shared().reference_max[other.slot()][row(h)];
      rises |= reference > softmax.reference_max[h];
      factor[h] = softmax.follow_row(h, reference);
    }
    return warp_any(rises);
  }

  // O += P V where V may hold NaN or infinity for keys that a row must not attend to.
  FLASHGEN_DEVICE void add_careful(Output& out, const Rounded<cfg.tile_kv>& probabilities, VHalf v,
                                   const DecodeItem& item, i32 key) const {
    u32 allowed[2];
    find_allowed<cfg.tile_kv>(allowed, lane_masks(item), key + thread.column());
    multiply_careful(out, probabilities, v, allowed, thread);
  }

  // Waits for P and V of the other warpgroup's tile, and multiplies O by `factor` if its reference maxima are
  // higher. Returns V.
  FLASHGEN_DEVICE VHalf await_other(Output& out, float (&factor)[2], Softmax& softmax, const DecodeItem& item,
                                    At other) const {
    if (follow(factor, softmax, item, other)) scale_rows(out, factor);
    const VHalf v = v_half(other, warpgroup());
    v_ring(warpgroup()).wait_full(other);
    return v;
  }
  // O += P V of the other warpgroup's tile, and waits for all products.
  FLASHGEN_DEVICE void multiply_other(Output& out, VHalf v) const {
    issue_output_from_shared(out, p_tile(), v);
    wgmma_wait<0>();
    wgmma_pin(out);
  }

  // O += P V of the other warpgroup's tile. Called while no product is under way.
  FLASHGEN_DEVICE void add_other(Output& out, Softmax& softmax, const DecodeItem& item, Other other) const {
    float factor[2];
    const VHalf v = await_other(out, factor, softmax, item, other.at);
    if (other.cut && panels_hold_non_finite(v, base, thread)) {
      Rounded<cfg.tile_kv> probabilities;
      load_rounded(probabilities, p_tile(), rows_before(), thread);
      add_careful(out, probabilities, v, item, other.key);
    } else {
      multiply_other(out, v);
    }
    v_ring(warpgroup()).release(other.at, thread);
  }

  // The warpgroup's own tile: S, P, and O += P V. `overlaps`: the other warpgroup's tile is still to be
  // added, and the mask does not cut it. Then the first part of S overlaps the wait for its P. A template
  // parameter, because ptxas would serialize all products around a branch at run time.
  template <bool overlaps>
  FLASHGEN_DEVICE void take_turn(Output& out, Softmax& softmax, const DecodeItem& item, Other other, i32 key,
                                 bool cut) const {
    Strip<cfg.tile_kv> strip;
    issue_first_scores(strip);
    float factor[2];
    if constexpr (overlaps) {
      multiply_other(out, await_other(out, factor, softmax, item, other.at));
      wgmma_pin(strip);
      v_ring(warpgroup()).release(other.at, thread);
    }
    issue_last_scores(strip);
    wgmma_wait<0>();
    wgmma_pin(strip);
    k_ring().release(at, thread);
    if (has_rows(item) && take_exponentials(strip, factor, softmax, item, key, cut)) scale_rows(out, factor);
    Rounded<cfg.tile_kv> probabilities;
    round_to<T, cfg.tile_kv>(probabilities, strip);
    const VHalf v = v_half(at, warpgroup());
    if (cut && panels_hold_non_finite(v, base, thread)) {
      publish(probabilities, softmax);
      add_careful(out, probabilities, v, item, key);
    } else {
      issue_output_in_fours(out, probabilities, v, true);
      publish(probabilities, softmax);
      wgmma_wait<0>();
      wgmma_pin(out);
    }
    v_ring(warpgroup()).release(at, thread);
  }

  // O and the softmax of some tiles.
  FLASHGEN_DEVICE void attend(Output& out, Softmax& softmax, const DecodeItem& item, Range tiles) {
    const VisitedTiles<cfg, Mask, Params> visits{p};
    const auto visited = visits.visited_by(item);
    const Range queries = visits.queries_of(item);
    await_queries<cfg>();
    clear_strip(out);
    softmax.reset();
    Other other = {};
    Walk<Mask::has_holes> walk(tiles);
    walk.advance(thread, visited);
#pragma unroll 1
    for (i32 turn = 0; !walk.over(); walk.advance(thread, visited), at.advance(), turn ^= 1) {
      const i32 key = walk.tile * cfg.tile_kv;
      const bool cut = visits.is_cut(item, queries, key);
      if (turn == warpgroup()) {
        if (other.exists && !other.cut) {
          take_turn<true>(out, softmax, item, other, key, cut);
        } else {
          if (other.exists) add_other(out, softmax, item, other);
          take_turn<false>(out, softmax, item, other, key, cut);
        }
        other.exists = false;
      } else {
        other = {true, cut, key, at};
      }
    }
    if (other.exists) add_other(out, softmax, item, other);
  }

  // Adds up the sums of both warpgroups. Their reference maxima are the same, because each has followed the
  // other's last tile.
  FLASHGEN_DEVICE void share_totals(const Softmax& softmax) const {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float own = row_total(softmax.sum[h]);
      if (thread.column() == 0) shared().sums[warpgroup()][row(h)] = own;
    }
    consumers_sync<cfg>();
    if (warpgroup() == 0 && thread.column() == 0) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h)
        shared().totals[row(h)] = {softmax.reference_max[h],
                                   shared().sums[0][row(h)] + shared().sums[1][row(h)]};
    }
    consumers_sync<cfg>();
  }

  FLASHGEN_DEVICE void compute(DecodeScheduler<cfg, Mask>& scheduler, i32 turn) {
    const Assignment& assigned = scheduler.assignments[turn];
    const DecodeItem& item = assigned.item;
    Output out;
    const Results results{{p, item, shared().totals, thread}, blocks_of(out)};
    bool has_fetched = false;
    compute_parts<cfg>(p, assigned, scheduler.work, shared().is_last, thread, results, [&](Range tiles) {
      const QueryRows<T> latent{p.qv + item.sequence * p.qv_batch + item.cached.first_q * p.qv_row, p.qv_row,
                                p.qv_head};
      start_queries<cfg>(q_tile(), QueryRows<T>::of(p, item), p, item, cfg.head_dim, thread);
      start_queries<cfg>(qv_tile(), latent, p, item, cfg.head_dim_v, thread);
      // Meanwhile: the copies take longer than finding the next assignment.
      if (!has_fetched) scheduler.fetch(p, turn ^ 1, thread);
      has_fetched = true;
      Softmax softmax;
      attend(out, softmax, item, tiles);
      share_totals(softmax);
    });
  }

  // ---- The kernel

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    LatentSm90Mainloop self{p, base, shared_address(base), Thread::current()};
    run_decode_roles<cfg>(self);
  }
};

}  // namespace flashgen
