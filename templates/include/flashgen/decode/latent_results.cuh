// Results of the latent kernels, from the registers of warps that split the columns of O between them.
#pragma once
#include "flashgen/decode/row_results.cuh"

namespace flashgen {

// `row_warps` consecutive warps have the same columns of different rows.
template <DecodeConfig cfg, class T, class Params, class Score, class CacheElement, i32 row_warps>
struct LatentResults {
  using Rows = RowResults<cfg, T, Params, Score, CacheElement>;
  static constexpr i32 row_blocks = cfg.tile_q / kRowBlock / row_warps;
  static constexpr i32 own_blocks = Rows::out_blocks * row_warps / cfg.warps;
  using Output = Accumulator<row_blocks, own_blocks>;

  Rows rows;
  const Output& out;

  // Stores a part's results in the workspace.
  FLASHGEN_DEVICE void store_part(i32 index) const {
    const auto partials = Partials<Rows::out_blocks>::of(rows.p);
    rows.store_totals(partials, index);
    for_each_row([&](i32 row, i32 m, i32 h) {
#pragma unroll
      for (i32 n = 0; n < own_blocks; ++n)
        *reinterpret_cast<FloatPair*>(partials.pair(index, first_block() + n, row, rows.thread.column())) =
            pair_of(m, n, h);
    });
  }

  // Writes O and L of the whole item.
  FLASHGEN_DEVICE void store_whole() const {
    for_each_row([&](i32 row, i32 m, i32 h) {
      const auto to = rows.output_row(row, first_block(), rows.with_sink(row, rows.totals[row]));
#pragma unroll
      for (i32 n = 0; n < own_blocks; ++n) rows.store_pair(to, first_block() + n, pair_of(m, n, h));
    });
  }

  FLASHGEN_DEVICE void merge(const PartialIndices& indices) const { rows.merge(indices); }

 private:
  FLASHGEN_DEVICE i32 first_block() const { return rows.thread.warp / row_warps * own_blocks; }
  FLASHGEN_DEVICE FloatPair pair_of(i32 m, i32 n, i32 h) const {
    return {{out[m][n][2 * h], out[m][n][2 * h + 1]}};
  }

  // Calls visit(row, m, h) for each of the lane's rows of the tile that exist.
  template <class Visit>
  FLASHGEN_DEVICE void for_each_row(const Visit& visit) const {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i32 row =
            (m * row_warps + rows.thread.warp % row_warps) * kRowBlock + rows.thread.row() + 8 * h;
        if (row < rows.item.rows) visit(row, m, h);
      }
    }
  }
};

}  // namespace flashgen
