// The type of the cache's elements: the CacheElement policy of the decode mainloop. It says how rows of K and
// V lie in shared memory, how tensor cores get them and the queries, and how scores and results are scaled.
//
//     fetch_scales(slot, keys, thread)     starts copies of the scales of a slice of keys
//     slice_scales(slot, thread)           the scales of a slice's keys:
//       apply_qk_scales(scores, queries)     multiplies products by the scales of K and Q
//       add_log_v_scales(logits)             adds logarithms, so that exponentials include the scales of V
//       weighted_sum(a, b, n)                what two exponentials of block n add to the row's sum
//     scale_and_reorder(out)               makes O of accumulators: the last scale, and the order of columns
//     column(n, thread)                    the first of the two columns of O that a lane holds of block n
#pragma once
#include "flashgen/decode/key_slices.cuh"

namespace flashgen {

// Elements of the queries' type, without scales.
template <DecodeConfig cfg, class T>
struct SameElement {
  // What memory holds, and what tensor cores multiply.
  using Stored = T;
  using Operand = T;
  static constexpr i32 dim = round_up(cfg.head_dim, 16);
  static constexpr i32 dim_v = round_up(cfg.head_dim_v, 16);
  using KSlice = SharedTile<T, cfg.slice_keys(), dim>;
  using VSlice = SharedTile<T, cfg.slice_keys(), dim_v>;
  using Keys = RightTransposed<KSlice>;
  using Values = RightRows<VSlice, true>;
  using Queries = WarpQueries<cfg, T, cfg.holds_queries>;

  struct SliceScales {
    template <class Scores>
    FLASHGEN_DEVICE void apply_qk_scales(Scores&, const Queries&) const {}
    template <class Scores>
    FLASHGEN_DEVICE void add_log_v_scales(Scores&) const {}
    FLASHGEN_DEVICE float weighted_sum(float a, float b, i32 /*n*/) const { return a + b; }
  };

  template <class Params>
  FLASHGEN_DEVICE static SameElement of(const Params&, const DecodeItem&, u8*) {
    return {};
  }
  FLASHGEN_DEVICE void fetch_scales(i32, const RequestedLocations&, Thread) const {}
  FLASHGEN_DEVICE SliceScales slice_scales(i32, Thread) const { return {}; }
  template <class Output>
  FLASHGEN_DEVICE void scale_and_reorder(Output&) const {}
  FLASHGEN_DEVICE static i32 column(i32 n, Thread thread) { return 8 * n + thread.column(); }
};

}  // namespace flashgen
