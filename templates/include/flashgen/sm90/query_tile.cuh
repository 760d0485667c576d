// A tile of queries, as the scheduler announces it: where its rows, keys and values lie. The Tile policy of
// the mainloop.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/sequence.cuh"
#include "flashgen/sm90/key_boxes.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

// What a lane knows of the pages of a tile of keys.
template <i32 tile_kv>
struct LanePages {
  KeyBoxes<tile_kv, true> boxes;
  // The lane, and the box that it loads first.
  i32 lane;
  BoxCoordinates first;
};

// What consumers do with an announced tile.
enum class TileKind : i32 {
  end,    // there is no further tile
  drain,  // no further tile is known; failed ones may follow once all results are checked (tile_checks.cuh)
  normal,
  careful,  // announced after some tile of the thread block has failed
};

// All sequences have the same lengths: tensors of (batch, length, heads, head_dim).
struct alignas(16) DenseTile {
  i32 first_q;
  // Of Q, and of K and V. The second follows from the first, but by a division in each load.
  i32 head, head_kv;
  i32 sequence;
  TileKind kind;

  // Whether the rows of a sequence end where the tensor ends, so that TMA clips them.
  static constexpr bool ends_with_tensor = true;
  // Whether keys and values lie in pages, which all lanes of a producer load.
  static constexpr bool in_pages = false;

  // How many queries and keys the sequence has, and how many rows of results.
  FLASHGEN_DEVICE static i32 len_q(const auto& p) { return p.len_q; }
  FLASHGEN_DEVICE static i32 len_kv(const auto& p) { return p.len_kv; }
  FLASHGEN_DEVICE static i32 result_rows(const auto& p) { return p.len_q; }
  template <class Mask>
  FLASHGEN_DEVICE Mask mask(const auto& p) const {
    return Mask::of(p, sequence, head);
  }
  template <class Score>
  FLASHGEN_DEVICE Score score(const auto& p) const {
    return {p, sequence, head};
  }

  FLASHGEN_DEVICE void load_q(auto q, const auto& p, u32 barrier) const {
    q.load(p.q_map, barrier, first_q, head, sequence);
  }
  FLASHGEN_DEVICE void load_k(auto k, const auto& p, u32 barrier, i32 first_key) const {
    k.load(p.k_map, barrier, first_key, head_kv, sequence);
  }
  FLASHGEN_DEVICE void load_v(auto v, const auto& p, u32 barrier, i32 first_key) const {
    v.load(p.v_map, barrier, first_key, head_kv, sequence);
  }
  FLASHGEN_DEVICE void store_o(auto o, const auto& p, i32 q) const { o.store(p.o_map, q, head, sequence); }
  // The sequence's rows of the head in O, and in the log-sum-exp.
  FLASHGEN_DEVICE auto o_rows(const auto& p) const {
    return GlobalRows{p.o + sequence * p.o_batch + head * p.o_head, p.o_row, p.len_q};
  }
  FLASHGEN_DEVICE float* lse_rows(const auto& p) const {
    return p.lse + (static_cast<i64>(sequence) * p.heads_q + head) * p.len_q;
  }
};

// What tiles of sequences with their own lengths have in common. `Rows` says where the rows of one sequence
// lie.
template <class Rows_>
struct alignas(16) OwnLengthsTile {
  using Rows = Rows_;

  i32 first_q;
  // Of Q, and of K and V. The second follows from the first, but by a division in each load.
  i32 head, head_kv;
  i32 sequence;
  TileKind kind;
  Rows rows;

  static constexpr bool ends_with_tensor = false;

  FLASHGEN_DEVICE i32 len_q(const auto&) const { return rows.len_q; }
  FLASHGEN_DEVICE i32 len_kv(const auto&) const { return rows.len_kv; }
  FLASHGEN_DEVICE i32 result_rows(const auto&) const { return rows.result_rows(); }
  template <class Mask>
  FLASHGEN_DEVICE Mask mask(const auto& p) const {
    return sequence_mask<Mask>(p, rows, sequence, head);
  }
  template <class Score>
  FLASHGEN_DEVICE Score score(const auto& p) const {
    return {p, sequence, head, rows.len_q, rows.len_kv};
  }
};

// Packed sequences: tensors of (total length, heads, head_dim).
struct PackedTile : OwnLengthsTile<PackedSequence> {
  static constexpr bool in_pages = false;

  FLASHGEN_DEVICE void load_q(auto q, const auto& p, u32 barrier) const {
    q.load(p.q_map, barrier, rows.first_q + first_q, head, 0);
  }
  FLASHGEN_DEVICE void load_k(auto k, const auto& p, u32 barrier, i32 first_key) const {
    k.load(p.k_map, barrier, rows.first_key + first_key, head_kv, 0);
  }
  FLASHGEN_DEVICE void load_v(auto v, const auto& p, u32 barrier, i32 first_key) const {
    v.load(p.v_map, barrier, rows.first_key + first_key, head_kv, 0);
  }
  FLASHGEN_DEVICE void store_o(auto o, const auto& p, i32 q) const {
    o.store(p.o_map, rows.first_q + q, head, 0);
  }
  FLASHGEN_DEVICE auto o_rows(const auto& p) const {
    return GlobalRows{p.o + rows.first_q * p.o_row + head * p.o_head, p.o_row, rows.rows_q};
  }
  FLASHGEN_DEVICE float* lse_rows(const auto& p) const {
    return p.lse + static_cast<i64>(head) * p.total_q + rows.first_q;
  }
};

// Keys and values in a cache of (rows, capacity, heads, head_dim), or of (pages, page size, heads, head_dim)
// with a table of each sequence's pages. Queries are a batch or packed.
template <bool paged>
struct CachedTile : OwnLengthsTile<CachedSequence> {
  static constexpr bool in_pages = paged;

  FLASHGEN_DEVICE i32 batch_of_queries(const auto& p) const {
    return p.cu_seqlens_q == nullptr ? sequence : 0;
  }
  FLASHGEN_DEVICE void load_q(auto q, const auto& p, u32 barrier) const {
    q.load(p.q_map, barrier, rows.first_q + first_q, head, batch_of_queries(p));
  }
  // Looks pages up, which takes long. So a producer calls this before a slot is empty.
  template <i32 tile_kv>
  FLASHGEN_DEVICE auto find_pages(const auto& p, i32 first_key, Thread thread) const {
    const auto boxes = KeyBoxes<tile_kv, true>::of(p, {0, rows.len_kv});
    return LanePages<tile_kv>{boxes, thread.lane, boxes.at(p, rows, first_key, thread.lane)};
  }
  FLASHGEN_DEVICE void load_k(auto k, const auto& p, u32 barrier, i32 first_key, const auto&... pages) const {
    load_rows(k, p, p.k_map, barrier, first_key, pages...);
  }
  FLASHGEN_DEVICE void load_v(auto v, const auto& p, u32 barrier, i32 first_key, const auto&... pages) const {
    load_rows(v, p, p.v_map, barrier, first_key, pages...);
  }
  FLASHGEN_DEVICE void store_o(auto o, const auto& p, i32 q) const {
    o.store(p.o_map, rows.first_q + q, head, batch_of_queries(p));
  }
  FLASHGEN_DEVICE auto o_rows(const auto& p) const {
    return GlobalRows{p.o + sequence * p.o_batch + rows.first_q * p.o_row + head * p.o_head, p.o_row,
                      rows.len_q};
  }
  FLASHGEN_DEVICE float* lse_rows(const auto& p) const {
    return p.lse + sequence * p.lse_batch + head * p.lse_head + rows.first_q;
  }

 private:
  FLASHGEN_DEVICE void load_rows(auto panels, const auto&, const TensorMap& map, u32 barrier,
                                 i32 first_key) const {
    panels.load(map, barrier, rows.first_key + first_key, head_kv, static_cast<i32>(rows.row));
  }
  template <i32 tile_kv>
  FLASHGEN_DEVICE void load_rows(auto panels, const auto& p, const TensorMap& map, u32 barrier, i32 first_key,
                                 const LanePages<tile_kv>& pages) const {
    const auto& boxes = pages.boxes;
    BoxCoordinates box = pages.first;
    // There may be more boxes than lanes.
#pragma unroll 1
    for (i32 i = pages.lane; i < boxes.count();) {
      panels.from_row(box.tile_row).load(map, barrier, box.page_row, head_kv, box.page);
      i += kWarpSize;
      if (i < boxes.count()) box = boxes.at(p, rows, first_key, i);
    }
  }
};

}  // namespace flashgen
