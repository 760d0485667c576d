// A tile of queries, as the producer announces it to the consumers: where its rows, keys and values lie. This is the
// Tile policy of the mainloop.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/sequence.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

// What consumers do with an announced tile.
enum class TileKind : i32 {
  // There is no further tile.
  end,
  // No further tile is known. One to repeat may follow once all results are checked.
  pause,
  normal,
  // A tile to repeat, because its first results cannot be trusted (tile_checks.cuh).
  careful,
};

// All sequences have the same lengths: tensors of (batch, length, heads, head_dim).
struct alignas(16) DenseTile {
  i32 first_q;
  i32 head;
  i32 sequence;
  TileKind kind;

  // Whether the rows of a sequence end where the tensor ends, so that TMA does not load or store others.
  static constexpr bool ends_with_tensor = true;

  // How many queries and keys the sequence has, and how many rows of results.
  template <class Params>
  FLASHGEN_DEVICE static i32 len_q(const Params& p) {
    return p.len_q;
  }
  template <class Params>
  FLASHGEN_DEVICE static i32 len_kv(const Params& p) {
    return p.len_kv;
  }
  template <class Params>
  FLASHGEN_DEVICE static i32 result_rows(const Params& p) {
    return p.len_q;
  }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p) const {
    return Mask::of(p, sequence, head);
  }
  template <class Score, class Params>
  FLASHGEN_DEVICE Score score(const Params& p) const {
    return {p, sequence, head};
  }

  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_q(Panels q, const Params& p, u32 barrier) const {
    q.load(p.q_map, barrier, first_q, head, sequence);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_k(Panels k, const Params& p, u32 barrier, i32 first_key) const {
    k.load(p.k_map, barrier, first_key, head / p.group, sequence);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_v(Panels v, const Params& p, u32 barrier, i32 first_key) const {
    v.load(p.v_map, barrier, first_key, head / p.group, sequence);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void store_o(Panels o, const Params& p, i32 q) const {
    o.store(p.o_map, q, head, sequence);
  }
  // The sequence's rows of the head in O, and in the log-sum-exp.
  template <class Params>
  FLASHGEN_DEVICE auto o_rows(const Params& p) const {
    return GlobalRows{p.o + sequence * p.o_batch + head * p.o_head, p.o_row, p.len_q};
  }
  template <class Params>
  FLASHGEN_DEVICE float* lse_rows(const Params& p) const {
    return p.lse + (static_cast<i64>(sequence) * p.heads_q + head) * p.len_q;
  }
};

// Sequences of different lengths, packed: tensors of (total length, heads, head_dim).
struct alignas(16) PackedTile {
  i32 first_q;
  i32 head;
  i32 sequence;
  TileKind kind;
  PackedSequence rows;

  static constexpr bool ends_with_tensor = false;

  template <class Params>
  FLASHGEN_DEVICE i32 len_q(const Params&) const {
    return rows.len_q;
  }
  template <class Params>
  FLASHGEN_DEVICE i32 len_kv(const Params&) const {
    return rows.len_kv;
  }
  template <class Params>
  FLASHGEN_DEVICE i32 result_rows(const Params&) const {
    return rows.rows_q;
  }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p) const {
    if constexpr (requires { Mask::of(p, rows, sequence, head); }) {
      return Mask::of(p, rows, sequence, head);
    } else {
      return band_of<Mask>(p, rows);
    }
  }
  template <class Score, class Params>
  FLASHGEN_DEVICE Score score(const Params& p) const {
    return {p, sequence, head, rows.len_q, rows.len_kv};
  }

  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_q(Panels q, const Params& p, u32 barrier) const {
    q.load(p.q_map, barrier, rows.first_q + first_q, head, 0);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_k(Panels k, const Params& p, u32 barrier, i32 first_key) const {
    k.load(p.k_map, barrier, rows.first_key + first_key, head / p.group, 0);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_v(Panels v, const Params& p, u32 barrier, i32 first_key) const {
    v.load(p.v_map, barrier, rows.first_key + first_key, head / p.group, 0);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void store_o(Panels o, const Params& p, i32 q) const {
    o.store(p.o_map, rows.first_q + q, head, 0);
  }
  template <class Params>
  FLASHGEN_DEVICE auto o_rows(const Params& p) const {
    return GlobalRows{p.o + rows.first_q * p.o_row + head * p.o_head, p.o_row, rows.rows_q};
  }
  template <class Params>
  FLASHGEN_DEVICE float* lse_rows(const Params& p) const {
    return p.lse + static_cast<i64>(head) * p.total_q + rows.first_q;
  }
};

}  // namespace flashgen
