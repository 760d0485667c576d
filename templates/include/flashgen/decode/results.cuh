// From the results of warps, each with keys of its own, to those of a thread block.
#pragma once
#include "flashgen/decode/row_results.cuh"
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
  static constexpr i32 dim_v = CacheElement::dim_v;
  static constexpr i32 out_blocks = dim_v / 8;
  // With producers, the ring already fills for the next item, so results need a buffer of their own. To halve
  // it, the upper half of the warps add their O to that of the lower half.
  static constexpr i32 buffers = cfg.producers == 0 ? cfg.warps : cfg.warps / 2;
  static constexpr i32 bytes = buffers * kRowBlock * dim_v * static_cast<i32>(sizeof(float));
  using Output = Accumulator<1, out_blocks>;
  using Logits = typename Score::Logits;
  using Softmax = OnlineSoftmax<1, Logits>;
  using Rows = RowResults<cfg, T, Params, Score, CacheElement>;

  Rows rows;
  // `buffers` results of 16 rows, in the layout of a warp's lanes.
  float* out_buffers;
  RowTotal (&totals_of_warps)[cfg.warps][kRowBlock];
  // How many warps have different rows.
  i32 row_warps;

  // Brings the warps' results to common reference maxima, and puts them into shared memory.
  FLASHGEN_DEVICE void reduce_warps(Output& out, const Softmax& softmax) const {
    const Thread thread = rows.thread;
    RowTotal(&of_warps)[cfg.warps][kRowBlock] = totals_of_warps;
    // No warp needs the ring any more.
    consumers_sync<cfg>();
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      if (thread.column() == 0)
        of_warps[thread.warp][thread.row() + 8 * h] = {softmax.reference_max[0][h], softmax.sum[0][h]};
    }
    consumers_sync<cfg>();
    const Logits logits = Score::logits(rows.p);
    const i32 row_block = thread.warp % row_warps;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = thread.row() + 8 * h;
      float row_max = -kInfinity, total = 0.0f;
      for (i32 w = row_block; w < cfg.warps; w += row_warps)
        row_max = maximum(row_max, of_warps[w][row].reference_max);
      for (i32 w = row_block; w < cfg.warps; w += row_warps)
        total += of_warps[w][row].sum * weight_of_part(logits, of_warps[w][row].reference_max, row_max);
      const float factor = weight_of_part(logits, softmax.reference_max[0][h], row_max);
#pragma unroll
      for (i32 n = 0; n < out_blocks; ++n) {
        out[0][n][2 * h] *= factor;
        out[0][n][2 * h + 1] *= factor;
      }
      if (thread.warp < row_warps && thread.column() == 0)
        rows.totals[row_block * kRowBlock + row] = {row_max, total};
    }
    float flat[4 * out_blocks];
#pragma unroll
    for (i32 i = 0; i < 4 * out_blocks; ++i) flat[i] = out[0][i / 4][i % 4];
    if constexpr (buffers < cfg.warps) {
      const bool has_rows = row_block < rows.item.row_blocks();
      if (has_rows && thread.warp >= buffers)
        write_fragments(out_buffer(thread.warp - buffers), flat, thread);
      consumers_sync<cfg>();
      if (has_rows && thread.warp < buffers) add_fragments(out_buffer(thread.warp), flat, thread);
    } else {
      write_fragments(out_buffer(thread.warp), flat, thread);
    }
    consumers_sync<cfg>();
  }

  // Stores a part's results in the workspace.
  FLASHGEN_DEVICE void store_part(i32 index) const {
    const auto partials = Partials<out_blocks>::of(rows.p);
    rows.store_totals(partials, index);
    for_each_result([&](i32 row, i32 n, const FloatPair& pair) {
      *reinterpret_cast<FloatPair*>(partials.pair(index, n, row, rows.thread.column())) = pair;
    });
  }

  // Writes O and L of the whole item.
  FLASHGEN_DEVICE void store_whole() const {
    for_each_result([&](i32 row, i32 n, const FloatPair& pair) {
      rows.store_pair(rows.output_row(row, n, rows.with_sink(row, rows.totals[row])), n, pair);
    });
  }

  FLASHGEN_DEVICE void merge(const PartialIndices& indices) const { rows.merge(indices); }

 private:
  FLASHGEN_DEVICE float* out_buffer(i32 buffer) const { return out_buffers + buffer * kRowBlock * dim_v; }

  // Calls visit(row, n, pair) for each pair of neighboring results: row of the tile, and block of eight
  // columns. Each warp takes blocks of its own, and adds up the buffers.
  template <class Visit>
  FLASHGEN_DEVICE void for_each_result(const Visit& visit) const {
    const DecodeItem& item = rows.item;
    const Thread thread = rows.thread;
#pragma unroll 1
    for (i32 i = thread.warp; i < item.row_blocks() * out_blocks; i += cfg.warps) {
      const i32 row_block = i / out_blocks, n = i - row_block * out_blocks;
      float sums[4] = {};
      for (i32 buffer = row_block; buffer < buffers; buffer += row_warps) {
        float own[4];
        read_fragments(own, out_buffer(buffer) + n * 4 * kWarpSize, thread);
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
};

}  // namespace flashgen
