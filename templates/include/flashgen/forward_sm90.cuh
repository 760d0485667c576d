// What the forward kernel for Hopper is made of.
#pragma once
#include "flashgen/reference_max_softmax.cuh"
#include "flashgen/band.cuh"
#include "flashgen/issue_in_fours.cuh"
#include "flashgen/block_sparse_tile.cuh"
#include "flashgen/panel.cuh"
#include "flashgen/ring.cuh"
#include "flashgen/row_tile.cuh"
#include "flashgen/strip.cuh"

namespace flashgen {

struct ForwardSm90Config {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 stages;
  i32 k_slots;
  i32 non_finite_records;
  i32 q_rows;
  i32 q_slots;
  i32 tile_slots;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  i32 section_heads;
  i32 doubles_to;
  bool longest_first;
  bool running_maximum;
  bool keeps_scores;
  bool bounds_growth;
  bool computes_before_wait;
  bool packs_statistics;
  bool ends_alone;
  bool prefetches_next_k;
  bool draws_late;
  bool has_lower;
  bool has_upper;
};

template <ForwardSm90Config cfg, class T, class Logits>
struct ForwardSm90Shape {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 rows of queries");
  // What a slot for queries holds: a tile of them, or each consumer's part by itself.
  using QTile = PanelTile<T, cfg.q_rows, cfg.head_dim>;
  static constexpr i32 q_parts = cfg.tile_q / cfg.q_rows;
  // How many parts are loaded when a tile is announced. The others follow the tile's first keys. With one
  // slot the tile is announced late, when the slot is about to be free.
  static constexpr i32 q_parts_ahead = cfg.q_slots == 1 ? 1 : smaller(q_parts, cfg.q_slots - q_parts);
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using OTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using Scores = Strip<cfg.tile_kv>;
  using Probabilities = Rounded<cfg.tile_kv>;
  using Output = Strip<cfg.head_dim_v>;
  static constexpr Regrowth regrowth = cfg.running_maximum ? Regrowth::never
                                       : cfg.bounds_growth
                                           ? (cfg.keeps_scores ? Regrowth::checked : Regrowth::bounded)
                                       : cfg.keeps_scores ? Regrowth::keeps_scores
                                                          : Regrowth::recomputes_scores;
  using Softmax = ReferenceMaxSoftmax<T, cfg.tile_kv, regrowth, cfg.computes_before_wait, Logits>;
  using Finished = FinishedRows<cfg.packs_statistics>;
  // Arrivals that empty a slot: one of each warp that reads it.
  static constexpr u32 consumer_warps = 4 * cfg.consumers;
  static constexpr u32 q_readers = consumer_warps / q_parts;
};

// What the mask makes of a tile of keys. For consumer i and after these for the whole tile of queries: every
// pair is allowed (bit i); none is (bit kNone + i).
struct TileFacts {
  static constexpr i32 kNone = 8;
  u32 bits;

  FLASHGEN_DEVICE static TileFacts of_empty() { return {~0u << kNone}; }
  FLASHGEN_DEVICE bool is_full(i32 part) const { return (bits >> part & 1u) != 0; }
  FLASHGEN_DEVICE bool is_empty(i32 part) const { return (bits >> (kNone + part) & 1u) != 0; }
  FLASHGEN_DEVICE void add(i32 part, bool is_full, bool is_empty) {
    bits |= static_cast<u32>(is_full) << part | static_cast<u32>(is_empty) << (kNone + part);
  }
  FLASHGEN_DEVICE TileFacts of_lane(i32 lane) const {
    return {static_cast<u32>(shuffle(static_cast<i32>(bits), lane))};
  }
};

// One tile of keys for one tile of queries.
struct Step {
  RowTile rows;
  i32 key_tile;
  // The last one of its tile of queries.
  i32 last_key_tile;
  // Only with a block-sparse mask.
  TileFacts facts;
  // Whether one before it in the same tile of queries has been added to O.
  i32 continues;

  FLASHGEN_DEVICE static Step none() { return {{}, 0, -1, {}, 0}; }
  FLASHGEN_DEVICE bool exists() const { return rows.exists != 0; }
  FLASHGEN_DEVICE bool is_last() const { return key_tile == last_key_tile; }
};

// The key tiles of a tile of queries, as the producer announces them to one consumer: those that the whole
// tile attends to, those that this consumer attends to, and those that all of its queries attend to.
struct alignas(16) KeyBlockRange {
  Range tile_keys;
  Range keys;
  Range full_keys;
};

// How a tile of queries, if it exists, uses V. A scrubbed tile uses scrubbed values where the mask cuts: once
// non-finite values have been found, and in some kernels in a block's first tile. A plain tile uses values as
// loaded. So does a scrubbed one after the last step that the mask cuts (kSeenTile).
constexpr i32 kScrubbedTile = 1, kPlainTile = 2, kSeenTile = 3;

// ---- The output

template <i32 count>
FLASHGEN_DEVICE void scale_rows(float (&out)[count], const float (&factor)[2]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) out[i] *= factor[i / 2 % 2];
}

}  // namespace flashgen
