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
  // Blocks of eight columns that a warp merges.
  static constexpr i32 own_blocks = ceil_div(out_blocks, cfg.warps);
  using Logits = typename Score::Logits;

  const Params& p;
  const DecodeItem& item;
  // In shared memory: the totals of the tile's rows.
  RowTotal (&totals)[cfg.tile_q];
  Thread thread;

  // Stores the totals of a part in the workspace.
  FLASHGEN_DEVICE void store_totals(const Partials<out_blocks>& partials, i32 index) const {
    for (i32 row = thread.index(); row < item.rows; row += threads) partials.total(index, row) = totals[row];
  }

  // Merges the parts of an item, in the order of its keys. Each lane loads the totals of its row and its own
  // columns of several parts at once, so it waits for memory once for all of these.
  FLASHGEN_DEVICE void merge(const PartialIndices& indices) const {
    const Logits logits = Score::logits(p);
#pragma unroll 1
    for (i32 row = thread.row(); row < item.rows; row += kMergedRows) {
      RowTotal total = {-kInfinity, 0.0f};
      FloatPair sums[own_blocks] = {};
#pragma unroll 1
      for (i32 first = 0; first < indices.count; first += LoadedParts::count) {
        const LoadedParts parts = load_parts(indices, first, row);
        float row_max = total.reference_max;
#pragma unroll
        for (const RowTotal& part : parts.totals) row_max = maximum(row_max, part.reference_max);
        const float kept = weight_of_part(logits, total.reference_max, row_max);
        total = {row_max, total.sum * kept};
#pragma unroll
        for (FloatPair& sum : sums) sum = {{sum.values[0] * kept, sum.values[1] * kept}};
#pragma unroll
        for (i32 i = 0; i < LoadedParts::count; ++i) {
          const float weight = weight_of_part(logits, parts.totals[i].reference_max, row_max);
          total.sum += parts.totals[i].sum * weight;
#pragma unroll
          for (i32 b = 0; b < own_blocks; ++b) {
#pragma unroll
            for (i32 c = 0; c < 2; ++c)
              sums[b].values[c] = fused_multiply_add(weight, parts.pairs[i][b].values[c], sums[b].values[c]);
          }
        }
      }
      const OutputRow to = output_row(row, block_of(0), with_sink(row, total));
#pragma unroll
      for (i32 b = 0; b < own_blocks; ++b) {
        if (has_block(b)) store_pair(to, block_of(b), sums[b]);
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
    const float row_max = maximum(total.reference_max, sink),
                weight = weight_of_part(logits, total.reference_max, row_max);
    const float sum = total.sum * weight + weight_of_part(logits, sink, row_max);
    return {{row_max, sum}, sum == 0.0f ? 0.0f : weight / sum};
  }

  // A row of O in memory, and what O is multiplied by.
  struct OutputRow {
    T* data;
    float factor;
  };
  // Where a row's results go. `n` is the first block that this thread stores. With the first columns it
  // writes L.
  FLASHGEN_DEVICE OutputRow output_row(i32 row, i32 n, const Finished& finished) const {
    const RowPlace place = RowPlace::of(p, item, row);
    const i64 q = item.cached.first_q + place.q;
    if (CacheElement::column(n, thread) == 0) {
      const RowTotal total = finished.total;
      p.lse[item.sequence * p.lse_batch + place.head * p.lse_head + q] =
          total.sum == 0.0f ? -kInfinity : Logits::natural_log(total.reference_max, log2_approx(total.sum));
    }
    return {p.o + item.sequence * p.o_batch + q * p.o_row + place.head * p.o_head, finished.factor};
  }
  // Writes two columns of O.
  FLASHGEN_DEVICE void store_pair(const OutputRow& to, i32 n, const FloatPair& pair) const {
    const i32 column = CacheElement::column(n, thread);
    if (column < cfg.head_dim_v) {
      *reinterpret_cast<Pair<T>*>(to.data + column) =
          Pair<T>::from(pair.values[0] * to.factor, pair.values[1] * to.factor);
    }
  }

 private:
  FLASHGEN_DEVICE i32 block_of(i32 b) const { return thread.warp + b * cfg.warps; }
  FLASHGEN_DEVICE bool has_block(i32 b) const {
    return out_blocks % cfg.warps == 0 || block_of(b) < out_blocks;
  }

  // A lane's row and columns of several parts. Those beyond the last part are empty.
  struct LoadedParts {
    // What registers hold, and no more than 17: where 132 thread blocks share eight heads, a head has at most
    // 17 parts.
    static constexpr i32 count = larger(1, smaller(17, 40 / own_blocks));
    RowTotal totals[count];
    FloatPair pairs[count][own_blocks];
  };

  // Starts all loads before the first of them has arrived. So no branch may come between them.
  FLASHGEN_DEVICE LoadedParts load_parts(const PartialIndices& indices, i32 first, i32 row) const {
    const auto partials = Partials<out_blocks>::of(p);
    LoadedParts parts;
    const i32 index = indices(first);
    const RowTotal* total = &partials.total(index, row);
    const float* pair = partials.pair(index, thread.warp, row, thread.column());
    const i64 between_blocks = partials.block_floats() * cfg.warps;
#pragma unroll
    for (i32 i = 0; i < LoadedParts::count; ++i) {
      const bool exists = first + i < indices.count;
      parts.totals[i] = exists ? *total : RowTotal{-kInfinity, 0.0f};
#pragma unroll
      for (i32 b = 0; b < own_blocks; ++b) {
        parts.pairs[i][b] = exists && has_block(b)
                                ? *reinterpret_cast<const FloatPair*>(pair + b * between_blocks)
                                : FloatPair{};
      }
      // Only the second part may lie at another distance.
      const i64 distance = i == 0 ? indices(first + 1) - index : indices.stride;
      total += distance * partials.rows;
      pair += distance * partials.partial_floats();
    }
    return parts;
  }
};

}  // namespace flashgen
