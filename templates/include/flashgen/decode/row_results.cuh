// The results of rows: from parts to O and L.
#pragma once
#include "flashgen/decode/partials.cuh"
#include "flashgen/decode/scores.cuh"

namespace flashgen {

// The rows of one item. All threads that compute call its functions.
template <DecodeConfig cfg, class T, class Params, class Score, class CacheElement>
struct RowResults {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 out_blocks = CacheElement::dim_v / 8;
  using Logits = typename Score::Logits;

  const Params& p;
  const DecodeItem& item;
  // In shared memory: the totals of the tile's rows.
  RowTotal (&totals)[cfg.tile_q];
  Thread thread;

  // Leaves the totals of a part in its slot.
  FLASHGEN_DEVICE void store_totals(const Partials<out_blocks>& partials, i32 slot) const {
    for (i32 row = thread.index(); row < item.rows; row += threads) partials.total(slot, row) = totals[row];
  }

  // Merges the parts of an item, in the order of its keys.
  FLASHGEN_DEVICE void merge(const PartSlots& slots) const {
    const auto partials = Partials<out_blocks>::of(p);
    const Logits logits = Score::logits(p);
    // The lanes of a warp take the parts of a row in turns.
    for (i32 row = thread.warp; row < item.rows; row += cfg.warps) {
      float most = -kInfinity, total = 0.0f;
      for (i32 part = thread.lane; part < slots.count; part += kWarpSize)
        most = maximum(most, partials.total(slots(part), row).reference_max);
#pragma unroll
      for (i32 bit = kWarpSize / 2; bit > 0; bit /= 2) most = maximum(most, shuffle_xor(most, bit));
      for (i32 part = thread.lane; part < slots.count; part += kWarpSize) {
        const RowTotal own = partials.total(slots(part), row);
        total += own.sum * weight_of_part(logits, own.reference_max, most);
      }
#pragma unroll
      for (i32 bit = kWarpSize / 2; bit > 0; bit /= 2) total += shuffle_xor(total, bit);
      if (thread.lane == 0) totals[row] = {most, total};
    }
    consumers_sync<cfg>();
    // Each warp takes blocks of columns of its own. Many loads are under way at a time, because a few warps
    // wait for all parts.
    constexpr i32 own_blocks = ceil_div(out_blocks, cfg.warps), parts_at_once = larger(1, 32 / own_blocks);
#pragma unroll 1
    for (i32 row = thread.row(); row < item.rows; row += 8) {
      const RowTotal total = totals[row];
      FloatPair sums[own_blocks] = {};
#pragma unroll parts_at_once
      for (i32 part = 0; part < slots.count; ++part) {
        const i32 slot = slots(part);
        const float weight =
            weight_of_part(logits, partials.total(slot, row).reference_max, total.reference_max);
#pragma unroll
        for (i32 i = 0; i < own_blocks; ++i) {
          const i32 n = thread.warp + i * cfg.warps;
          if (n >= out_blocks) break;
          const FloatPair pair =
              *reinterpret_cast<const FloatPair*>(partials.pair(slot, n, row, thread.column()));
#pragma unroll
          for (i32 c = 0; c < 2; ++c)
            sums[i].values[c] = fused_multiply_add(weight, pair.values[c], sums[i].values[c]);
        }
      }
      const Finished finished = with_sink(row, total);
#pragma unroll
      for (i32 i = 0; i < own_blocks; ++i) {
        const i32 n = thread.warp + i * cfg.warps;
        if (n < out_blocks) store_result(row, n, sums[i], finished);
      }
    }
  }

  // A row's total with the sink, which takes part in the softmax like a key without a value.
  struct Finished {
    RowTotal total;
    // What O is multiplied by.
    float factor;
  };
  FLASHGEN_DEVICE Finished with_sink(i32 row, RowTotal total) const {
    const Logits logits = Score::logits(p);
    const float sink = Logits::as_reference_max(Score::sink(p, item, RowPlace::of(p, item, row).head));
    const float most = maximum(total.reference_max, sink),
                weight = weight_of_part(logits, total.reference_max, most);
    const float sum = total.sum * weight + weight_of_part(logits, sink, most);
    return {{most, sum}, sum == 0.0f ? 0.0f : weight / sum};
  }

  // Writes two columns of O and, with the first ones, L.
  FLASHGEN_DEVICE void store_result(i32 row, i32 n, const FloatPair& pair, const Finished& finished) const {
    const RowPlace place = RowPlace::of(p, item, row);
    const i64 q = item.cached.first_q + place.q;
    const i32 column = CacheElement::column(n, thread);
    if (column < cfg.head_dim_v) {
      T* const o = p.o + item.sequence * p.o_batch + q * p.o_row + place.head * p.o_head + column;
      *reinterpret_cast<Pair<T>*>(o) =
          Pair<T>::from(pair.values[0] * finished.factor, pair.values[1] * finished.factor);
    }
    if (column == 0) {
      const RowTotal total = finished.total;
      p.lse[item.sequence * p.lse_batch + place.head * p.lse_head + q] =
          total.sum == 0.0f ? -kInfinity : Logits::natural_log(total.reference_max, log2_approx(total.sum));
    }
  }
};

}  // namespace flashgen
