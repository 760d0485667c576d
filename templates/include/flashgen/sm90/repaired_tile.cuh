// Where the rows of a flagged tile of gradients lie: the Tile policy of the repair kernel.
#pragma once
#include "flashgen/band.cuh"
#include "flashgen/sequence.cuh"

namespace flashgen {

// Tiles of queries or of keys. `number` counts those of all heads of all sequences.
struct DenseRepairedTile {
  i32 sequence;
  i32 head;
  i32 first_row;

  template <class Params>
  FLASHGEN_DEVICE static DenseRepairedTile of(const Params& p, bool is_query, i32 number, i32 tile_rows) {
    const i32 rows = is_query ? p.len_q : p.len_kv, heads = is_query ? p.heads_q : p.heads_kv;
    const i32 tiles = ceil_div(rows, tile_rows);
    return {number / tiles / heads, number / tiles % heads, number % tiles * tile_rows};
  }
  FLASHGEN_DEVICE static i32 len_q(const auto& p) { return p.len_q; }
  FLASHGEN_DEVICE static i32 len_kv(const auto& p) { return p.len_kv; }
  // The rows of results.
  FLASHGEN_DEVICE static i32 rows(const auto& p, bool is_query) { return is_query ? p.len_q : p.len_kv; }
  // From the first row of a tensor, or of row statistics, to that of the sequence.
  FLASHGEN_DEVICE i64 queries(i64 batch, i64 /*row*/) const { return sequence * batch; }
  FLASHGEN_DEVICE i64 keys(i64 batch, i64 /*row*/) const { return sequence * batch; }
  FLASHGEN_DEVICE i64 statistics(const auto& p, i32 of_head) const {
    return (static_cast<i64>(sequence) * p.heads_q + of_head) * p.len_q;
  }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p, i32 of_head) const {
    return Mask::of(p, sequence, of_head);
  }
  template <class Score, class Params>
  FLASHGEN_DEVICE Score score(const Params& p, i32 of_head) const {
    return {p, sequence, of_head};
  }
};

struct PackedRepairedTile {
  i32 sequence;
  i32 head;
  i32 first_row;
  PackedSequence packed;

  template <class Params>
  FLASHGEN_DEVICE static PackedRepairedTile of(const Params& p, bool is_query, i32 number, i32 tile_rows) {
    const i32 heads = is_query ? p.heads_q : p.heads_kv, tile = number / heads;
    const i32* const starts = is_query ? p.cu_seqlens_q : p.cu_seqlens_k;
    // The last sequence whose tiles do not begin behind this one.
    i32 low = 0, high = p.batch - 1;
    while (low < high) {
      const i32 middle = (low + high + 1) / 2;
      if (first_tile_of(starts[middle], middle, tile_rows) <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return {low, number % heads, (tile - first_tile_of(starts[low], low, tile_rows)) * tile_rows,
            PackedSequence::of(p, low)};
  }
  FLASHGEN_DEVICE i32 len_q(const auto&) const { return packed.len_q; }
  FLASHGEN_DEVICE i32 len_kv(const auto&) const { return packed.len_kv; }
  FLASHGEN_DEVICE i32 rows(const auto&, bool is_query) const {
    return is_query ? packed.rows_q : packed.rows_kv;
  }
  FLASHGEN_DEVICE i64 queries(i64 /*batch*/, i64 row) const { return packed.first_q * row; }
  FLASHGEN_DEVICE i64 keys(i64 /*batch*/, i64 row) const { return packed.first_key * row; }
  FLASHGEN_DEVICE i64 statistics(const auto& p, i32 of_head) const {
    return of_head * p.total_q + packed.first_q;
  }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p, i32 of_head) const {
    return sequence_mask<Mask>(p, packed, sequence, of_head);
  }
  template <class Score, class Params>
  FLASHGEN_DEVICE Score score(const Params& p, i32 of_head) const {
    return {p, sequence, of_head, packed.len_q, packed.len_kv};
  }
};

}  // namespace flashgen
