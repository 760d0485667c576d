// What the forward kernel for Hopper is made of.
#pragma once
#include "flashgen/anchored_softmax.cuh"
#include "flashgen/contain.cuh"
#include "flashgen/issue_in_fours.cuh"
#include "flashgen/listed.cuh"
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
  i32 q_rows;
  i32 q_slots;
  i32 tile_slots;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  i32 section_heads;
  bool longest_first;
  bool running_maximum;
  bool keeps_scores;
  bool foresees;
  bool holds_waits;
  bool ends_alone;
  bool keys_lead;
  bool draws_late;
  bool has_lower;
  bool has_upper;
};

template <ForwardSm90Config cfg, class T>
struct ForwardSm90Shape {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 rows of queries");
  // What a slot for queries holds: a tile of them, or each consumer's part by itself.
  using QTile = PanelTile<T, cfg.q_rows, cfg.head_dim>;
  static constexpr i32 q_parts = cfg.tile_q / cfg.q_rows;
  // How many are begun when a tile is told of; the others come behind the tile's first keys. With one slot it
  // is told of late, when the slot is about to be free.
  static constexpr i32 q_parts_ahead = cfg.q_slots == 1 ? 1 : smaller(q_parts, cfg.q_slots - q_parts);
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using OTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using Scores = Strip<cfg.tile_kv>;
  using Probabilities = Rounded<cfg.tile_kv>;
  using Output = Strip<cfg.head_dim_v>;
  static constexpr Regrowth regrowth = cfg.running_maximum ? Regrowth::never
                                       : cfg.foresees
                                           ? (cfg.keeps_scores ? Regrowth::checked : Regrowth::foreseen)
                                       : cfg.keeps_scores ? Regrowth::keeps_scores
                                                          : Regrowth::retakes_scores;
  using Softmax = AnchoredSoftmax<T, cfg.tile_kv, regrowth, cfg.holds_waits>;
  // With three consumers registers are short.
  using Finished = FinishedRows<(cfg.consumers > 2)>;
  // Arrivals that empty a slot: one of each warp that reads it.
  static constexpr u32 consumer_warps = 4 * cfg.consumers;
  static constexpr u32 q_readers = consumer_warps / q_parts;
};

// What the mask makes of a tile of keys. For consumer i and after these for the whole tile of queries: every
// pair is allowed (bit i); none is (bit kNone + i). And whether its values are looked through where it is
// cut.
struct TileFacts {
  static constexpr i32 kLooksThrough = 7, kNone = 8;
  u32 bits;

  FLASHGEN_DEVICE static TileFacts of_empty() { return {~0u << kNone}; }
  FLASHGEN_DEVICE TileFacts with(bool looks_through) const {
    return {bits | static_cast<u32>(looks_through) << kLooksThrough};
  }
  FLASHGEN_DEVICE bool is_full(i32 part) const { return (bits >> part & 1u) != 0; }
  FLASHGEN_DEVICE bool is_empty(i32 part) const { return (bits >> (kNone + part) & 1u) != 0; }
  FLASHGEN_DEVICE bool looks_through() const { return (bits >> kLooksThrough & 1u) != 0; }
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
  // Where tiles of keys are listed.
  TileFacts facts;
  // Whether one before it in the same tile of queries has been added to O.
  i32 continues;

  FLASHGEN_DEVICE static Step none() { return {{}, 0, -1, {}, 0}; }
  FLASHGEN_DEVICE bool exists() const { return rows.exists != 0; }
  FLASHGEN_DEVICE bool is_last() const { return key_tile == last_key_tile; }
};

// Where the keys of a tile of queries lie, as the producer tells one consumer: the tiles of keys that the
// whole tile attends to; those of this consumer, and of them those that all of its queries attend to. And
// whether values of tiles that the mask cuts through are looked through.
struct alignas(16) Reach {
  Range tile_keys;
  Range keys;
  Range full_keys;
  i32 looks_through;
};

// ---- The output

template <i32 count>
FLASHGEN_DEVICE void scale_rows(float (&out)[count], const float (&factor)[2]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) out[i] *= factor[i / 2 % 2];
}

// ---- Bad values, see contain.cuh; here warps that have nothing else to do look through V while others
// compute.

// Takes NaN and infinities out of every `step`-th chunk of a tile, from `first` on; whether there were any.
template <class Tile>
FLASHGEN_DEVICE bool take_out_bad_values(u8* tile, i32 first, i32 step) {
  using T = typename Tile::Element;
  constexpr i32 chunks = Tile::bytes / kChunkBytes;
  bool found = false;
#pragma unroll 3
  for (i32 i = first; i < chunks; i += step) {
    Vec16& place = *reinterpret_cast<Vec16*>(tile + i * kChunkBytes);
    Vec16 chunk = place;
    u32 bad = 0;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      const u32 signs = signs_of_bad<T>(chunk.words[w]);
      bad |= signs;
      chunk.words[w] &= ~((signs >> 15) * 0xffffu);
    }
    if (bad == 0) continue;
    place = chunk;
    found = true;
  }
  return found;
}

// Puts NaN into those of a warp's 16 results, of queries from `first_q` on, that attend to a bad value in a
// tile that the mask cuts through. `is_cut(key_tile)` tells which those are.
template <i32 columns, i32 tile_kv, class T, class Mask, class IsCut>
FLASHGEN_DEVICE void mark_bad_rows(GlobalRows<T> results, i32 first_q, GlobalRows<const T> source, Range keys,
                                   const Mask& mask, const IsCut& is_cut, Thread thread) {
  constexpr i32 row_count = 16, chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  // A lane has a chunk of the columns, of one of so many keys at a time.
  constexpr i32 chunks = columns / chunk_elements, together = kWarpSize / chunks;
  const i32 chunk = thread.lane % chunks, mine = thread.lane / chunks;
  const i32 end_q = smaller(first_q + row_count, mask.len_q);
  // Rows that attend to a bad value: of each two columns of a word a bit for each row.
  u32 rows[4] = {};
#pragma unroll 1
  for (i32 tile = keys.begin; tile < keys.end; ++tile) {
    if (!is_cut(tile)) continue;
    const i32 end = smaller((tile + 1) * tile_kv, source.row_count);
#pragma unroll 2
    for (i32 key = tile * tile_kv; key < end; key += together) {
      Vec16 values = {};
      if (mine < together && key + mine < end)
        values = *reinterpret_cast<const Vec16*>(source.at(key + mine, chunk * chunk_elements));
      // Half of the lanes ask for all rows whether they attend to one key, half for the next.
      u32 attends = 0;
#pragma unroll
      for (i32 i = 0; i < together; i += 2) {
        const i32 asked = key + i + thread.lane / row_count, row = first_q + thread.lane % row_count;
        // Asked for all alike, of what exists.
        const bool allowed = mask.allows(smaller(row, end_q - 1), smaller(asked, end - 1));
        const u32 answers = warp_ballot((row < end_q) & (asked < end) & allowed);
        if (mine / 2 == i / 2) attends = answers >> (mine % 2 * row_count);
      }
      attends = (attends & 0xffffu) * 0x10001u;
#pragma unroll
      for (i32 w = 0; w < 4; ++w) rows[w] |= (signs_of_bad<T>(values.words[w]) >> 15) * 0xffffu & attends;
    }
  }
  // All lanes of a chunk share what they found, and its rows.
#pragma unroll
  for (i32 w = 0; w < 4; ++w) {
    u32 all = 0;
#pragma unroll
    for (i32 i = 0; i < together; ++i)
      all |= static_cast<u32>(shuffle(static_cast<i32>(rows[w]), chunk + i * chunks));
    rows[w] = all;
  }
#pragma unroll 1
  for (i32 row = mine < together ? mine : row_count; row < row_count; row += together) {
    if (((rows[0] | rows[1] | rows[2] | rows[3]) >> row & 0x10001u) == 0) continue;
    Vec16& place = *reinterpret_cast<Vec16*>(results.at(first_q + row, chunk * chunk_elements));
    Vec16 result = place;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) result.words[w] |= (rows[w] >> row & 0x10001u) * not_a_number<T>().bits;
    place = result;
  }
}

}  // namespace flashgen
