// A tile of queries, as the producer announces it to the consumers: where its rows, keys and values lie. This
// is the Tile policy of the mainloop.
#pragma once
#include "flashgen/cache.cuh"
#include "flashgen/panel.cuh"
#include "flashgen/sequence.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

// The rows of a box of a page that TMA copies: as many of a tile as no page boundary cuts.
template <i32 tile_rows>
FLASHGEN_DEVICE i32 page_box_rows(i32 page_size) {
  return smaller(page_size & -page_size, tile_rows & -tile_rows);
}

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
  // Whether all lanes of the producer load keys and values, not only one.
  static constexpr bool warp_loads = false;

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
  FLASHGEN_DEVICE void load_k(Panels k, const Params& p, u32 barrier, i32 first_key, Thread) const {
    k.load(p.k_map, barrier, first_key, head / p.group, sequence);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_v(Panels v, const Params& p, u32 barrier, i32 first_key, Thread) const {
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

// What tiles of sequences with their own lengths have in common. `Rows` says where the rows of one sequence
// lie.
template <class Rows_>
struct alignas(16) OwnLengthsTile {
  using Rows = Rows_;

  i32 first_q;
  i32 head;
  i32 sequence;
  TileKind kind;
  Rows rows;

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
    return rows.result_rows();
  }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p) const {
    return sequence_mask<Mask>(p, rows, sequence, head);
  }
  template <class Score, class Params>
  FLASHGEN_DEVICE Score score(const Params& p) const {
    return {p, sequence, head, rows.len_q, rows.len_kv};
  }
};

// Packed sequences: tensors of (total length, heads, head_dim).
struct PackedTile : OwnLengthsTile<PackedSequence> {
  static constexpr bool warp_loads = false;

  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_q(Panels q, const Params& p, u32 barrier) const {
    q.load(p.q_map, barrier, rows.first_q + first_q, head, 0);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_k(Panels k, const Params& p, u32 barrier, i32 first_key, Thread) const {
    k.load(p.k_map, barrier, rows.first_key + first_key, head / p.group, 0);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_v(Panels v, const Params& p, u32 barrier, i32 first_key, Thread) const {
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

// Keys and values in a cache of (rows, capacity, heads, head_dim), or of (pages, page size, heads, head_dim)
// with a table of each sequence's pages. Queries are a batch or packed.
template <bool paged>
struct CachedTile : OwnLengthsTile<CachedSequence> {
  // A block of keys may lie in several pages, which the lanes of a warp load.
  static constexpr bool warp_loads = paged;

  template <class Params>
  FLASHGEN_DEVICE i32 batch_of_queries(const Params& p) const {
    return p.cu_seqlens_q == nullptr ? sequence : 0;
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_q(Panels q, const Params& p, u32 barrier) const {
    q.load(p.q_map, barrier, rows.first_q + first_q, head, batch_of_queries(p));
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_k(Panels k, const Params& p, u32 barrier, i32 first_key, Thread thread) const {
    load_rows(k, p, p.k_map, barrier, first_key, thread);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_v(Panels v, const Params& p, u32 barrier, i32 first_key, Thread thread) const {
    load_rows(v, p, p.v_map, barrier, first_key, thread);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void store_o(Panels o, const Params& p, i32 q) const {
    o.store(p.o_map, rows.first_q + q, head, batch_of_queries(p));
  }
  template <class Params>
  FLASHGEN_DEVICE auto o_rows(const Params& p) const {
    return GlobalRows{p.o + sequence * p.o_batch + rows.first_q * p.o_row + head * p.o_head, p.o_row,
                      rows.len_q};
  }
  template <class Params>
  FLASHGEN_DEVICE float* lse_rows(const Params& p) const {
    return p.lse + sequence * p.lse_batch + head * p.lse_head + rows.first_q;
  }

 private:
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_rows(Panels panels, const Params& p, const TensorMap& map, u32 barrier,
                                 i32 first_key, Thread thread) const {
    if constexpr (!paged) {
      panels.load(map, barrier, rows.first_key + first_key, head / p.group, static_cast<i32>(rows.row));
    } else {
      // The rows of a box lie in one page. Beyond the last key a box is loaded again, because pages end with
      // it.
      const i32 box = page_box_rows<Panels::rows>(p.page_size);
      const i32 last_box = larger(rows.len_kv - 1, 0) / box * box;
      const i32* const pages = p.block_table + rows.row * p.table_row;
      for (i32 row = thread.lane * box; row < Panels::rows; row += kWarpSize * box) {
        const i32 key = smaller(first_key + row, last_box), page = key / p.page_size;
        panels.from_row(row).load(map, barrier, key - page * p.page_size, head / p.group,
                                  rows.len_kv > 0 ? pages[page] : 0);
      }
    }
  }
};

}  // namespace flashgen
