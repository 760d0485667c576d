// From the results of warps to those of a block, and from parts to O and L.
#pragma once
#include "flashgen/decode/partials.cuh"
#include "flashgen/decode/scores.cuh"
#include "flashgen/fragments.cuh"

namespace flashgen {

// In shared memory: the totals of each warp's rows, and of the rows of the tile.
template <DecodeConfig cfg>
struct RowTotals {
  RowTotal of_warps[cfg.warps][kRowBlock];
  RowTotal of_rows[cfg.tile_q];
};

// The results of one item. All threads that compute call its functions.
template <DecodeConfig cfg, class T, class Params, class Score, class CacheElement>
struct DecodeResults {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 dim_v = CacheElement::dim_v;
  static constexpr i32 out_blocks = dim_v / 8;
  // Where producers fill the ring meanwhile, results have no room but their own. So half of the warps add
  // theirs to those of the others.
  static constexpr i32 slots = cfg.producers == 0 ? cfg.warps : cfg.warps / 2;
  static constexpr i32 bytes = slots * kRowBlock * dim_v * static_cast<i32>(sizeof(float));
  using Output = Accumulator<1, out_blocks>;
  using Logits = typename Score::Logits;
  using Softmax = OnlineSoftmax<1, Logits>;

  const Params& p;
  const DecodeItem& item;
  // `slots` results of 16 rows, in the layout of a warp's lanes.
  float* out_of_slots;
  RowTotals<cfg>& totals;
  // How many warps have different rows.
  i32 row_warps;
  Thread thread;

  // Brings the warps' results to common reference maxima, and puts them into shared memory.
  FLASHGEN_DEVICE void share(Output& out, const Softmax& softmax) const {
    RowTotal(&of_warps)[cfg.warps][kRowBlock] = totals.of_warps;
    // No warp needs the ring any more.
    consumers_sync<cfg>();
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      if (thread.column() == 0)
        of_warps[thread.warp][thread.row() + 8 * h] = {softmax.reference_max[0][h], softmax.sum[0][h]};
    }
    consumers_sync<cfg>();
    const Logits logits = Score::logits(p);
    const i32 row_block = thread.warp % row_warps;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = thread.row() + 8 * h;
      float most = -kInfinity, total = 0.0f;
      for (i32 w = row_block; w < cfg.warps; w += row_warps)
        most = maximum(most, of_warps[w][row].reference_max);
      for (i32 w = row_block; w < cfg.warps; w += row_warps)
        total += of_warps[w][row].sum * weight_of_part(logits, of_warps[w][row].reference_max, most);
      const float factor = weight_of_part(logits, softmax.reference_max[0][h], most);
#pragma unroll
      for (i32 n = 0; n < out_blocks; ++n) {
        out[0][n][2 * h] *= factor;
        out[0][n][2 * h + 1] *= factor;
      }
      if (thread.warp < row_warps && thread.column() == 0)
        totals.of_rows[row_block * kRowBlock + row] = {most, total};
    }
    float flat[4 * out_blocks];
#pragma unroll
    for (i32 i = 0; i < 4 * out_blocks; ++i) flat[i] = out[0][i / 4][i % 4];
    if constexpr (slots < cfg.warps) {
      const bool has_rows = row_block < item.row_blocks();
      if (has_rows && thread.warp >= slots) write_fragments(slot_out(thread.warp - slots), flat, thread);
      consumers_sync<cfg>();
      if (has_rows && thread.warp < slots) add_fragments(slot_out(thread.warp), flat, thread);
    } else {
      write_fragments(slot_out(thread.warp), flat, thread);
    }
    consumers_sync<cfg>();
  }

  // Leaves a part's results in its slot.
  FLASHGEN_DEVICE void store_part(i32 slot) const {
    const auto partials = Partials<out_blocks>::of(p);
    for (i32 row = thread.index(); row < item.rows; row += threads)
      partials.total(slot, row) = totals.of_rows[row];
    for_each_result([&](i32 row, i32 n, const FloatPair& pair) {
      *reinterpret_cast<FloatPair*>(partials.pair(slot, n, row, thread.column())) = pair;
    });
  }

  // Writes O and L of the whole item.
  FLASHGEN_DEVICE void store_whole() const {
    for_each_result([&](i32 row, i32 n, const FloatPair& pair) {
      store_result(row, n, pair, with_sink(row, totals.of_rows[row]));
    });
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
      if (thread.lane == 0) totals.of_rows[row] = {most, total};
    }
    consumers_sync<cfg>();
    // Each warp takes blocks of columns of its own. Many loads are under way at a time, because a few warps
    // wait for all parts.
    constexpr i32 own_blocks = ceil_div(out_blocks, cfg.warps), parts_at_once = larger(1, 32 / own_blocks);
#pragma unroll 1
    for (i32 row = thread.row(); row < item.rows; row += 8) {
      const RowTotal total = totals.of_rows[row];
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

 private:
  FLASHGEN_DEVICE float* slot_out(i32 slot) const { return out_of_slots + slot * kRowBlock * dim_v; }

  // Calls visit(row, n, pair) for each pair of neighboring results: row of the tile, and block of eight
  // columns. Each warp takes blocks of its own, and adds up the slots.
  template <class Visit>
  FLASHGEN_DEVICE void for_each_result(const Visit& visit) const {
#pragma unroll 1
    for (i32 i = thread.warp; i < item.row_blocks() * out_blocks; i += cfg.warps) {
      const i32 row_block = i / out_blocks, n = i - row_block * out_blocks;
      float sums[4] = {};
      for (i32 slot = row_block; slot < slots; slot += row_warps) {
        float own[4];
        read_fragments(own, slot_out(slot) + n * 4 * kWarpSize, thread);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) sums[e] += own[e];
      }
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i32 row = row_block * kRowBlock + thread.row() + 8 * h;
        if (row < item.rows) visit(row, n, FloatPair{{sums[2 * h], sums[2 * h + 1]}});
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
