// Where a tile of keys lies, and the queries that attend to it: the Sequence policy of the backward kernels
// that keep keys. A tile is what the producer announces to the other warps.
#pragma once
#include "flashgen/band.cuh"
#include "flashgen/panel.cuh"
#include "flashgen/sequence.cuh"
#include "flashgen/sm90/packed_window.cuh"
#include "flashgen/sm90/sections.cuh"
#include "flashgen/sm90/sequence_search.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

// A step of the loop over queries: a block of queries of one head of the group that shares the keys.
struct QueryStep {
  i32 member;
  i32 block;
};

// All sequences have the same lengths: tensors of (batch, length, heads, head_dim).
struct alignas(16) DenseKeyTile {
  i32 first_key;
  // Of keys and values.
  i32 head;
  i32 sequence;
  // False for the tile after the last one.
  bool exists;
  // Whether some query attends to some key of it.
  bool is_attended;

  // The rows of dK and dV.
  FLASHGEN_DEVICE static i32 result_rows(const auto& p) { return p.len_kv; }
  FLASHGEN_DEVICE i32 query_head(const auto& p, i32 member) const { return head * p.group + member; }
  // The first head of queries of the group, counted over all sequences.
  FLASHGEN_DEVICE i32 first_head(const auto& p) const { return sequence * p.heads_q + head * p.group; }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p, i32 member) const {
    return Mask::of(p, sequence, query_head(p, member));
  }
  template <class Score, class Params>
  FLASHGEN_DEVICE Score score(const Params& p, i32 member) const {
    return {p, sequence, query_head(p, member)};
  }

  // The numbers under which workspaces hold what belongs to a tile of queries, its sum of dQ
  // (dq_sums_any_order.cuh) and the flag of this tile of keys.
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE i32 query_tile(const Params& p, QueryStep step) const {
    return (sequence * p.heads_q + query_head(p, step.member)) * p.q_tiles + step.block;
  }
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE i32 first_sum(const Params& p) const {
    return first_head(p) % p.sum_heads * p.q_tiles;
  }
  FLASHGEN_DEVICE static i32 sum(const auto& p, i32 first_sum, QueryStep step) {
    return first_sum + step.member * p.q_tiles + step.block;
  }
  // The sum of a tile of queries whose number is given, and whether another head will use it.
  FLASHGEN_DEVICE static i32 sum_of(const auto& p, i32 head, i32 query_tile) {
    return query_tile - (head - head % p.sum_heads) * p.q_tiles;
  }
  FLASHGEN_DEVICE static bool is_sum_needed_again(const auto& p, i32 head) {
    return head + p.sum_heads < p.tiles / p.kv_tiles * p.group;
  }
  template <i32 tile_kv, class Params>
  FLASHGEN_DEVICE i32 key_tile(const Params& p) const {
    return (sequence * p.heads_kv + head) * p.kv_tiles + first_key / tile_kv;
  }

  template <class KTile, class Params>
  FLASHGEN_DEVICE void load_k(KTile k, const Params& p, u32 barrier) const {
    k.load(p.k_map, barrier, first_key, head, sequence);
  }
  template <class VTile, class Params>
  FLASHGEN_DEVICE void load_v(VTile v, const Params& p, u32 barrier) const {
    v.load(p.v_map, barrier, first_key, head, sequence);
  }
  template <class QTile, class Params>
  FLASHGEN_DEVICE void load_q(QTile q, const Params& p, u32 barrier, QueryStep step) const {
    q.load(p.q_map, barrier, step.block * QTile::rows, query_head(p, step.member), sequence);
  }
  template <class DOTile, class Params>
  FLASHGEN_DEVICE void load_dout(DOTile dout, const Params& p, u32 barrier, QueryStep step) const {
    dout.load(p.dout_map, barrier, step.block * DOTile::rows, query_head(p, step.member), sequence);
  }
  // L (part 0) or D (part 1) of a block of queries.
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE void load_statistics(u32 rows, const Params& p, u32 barrier, QueryStep step,
                                       i32 part) const {
    tma_load_4d(rows, &p.row_stats_map, barrier, 0, 2 * query_tile<tile_q>(p, step) + part, 0, 0);
  }
  // Rows of dK and dV. TMA clips rows beyond the last key.
  template <class Rows, class Params>
  FLASHGEN_DEVICE void store(Rows rows, const Params&, const TensorMap& map, i32 row) const {
    rows.store(map, row, head, sequence);
  }
  FLASHGEN_DEVICE auto dk_rows(const auto& p) const {
    return GlobalRows{p.dk + sequence * p.dk_batch + head * p.dk_head, p.dk_row, p.len_kv};
  }
  FLASHGEN_DEVICE auto dv_rows(const auto& p) const {
    return GlobalRows{p.dv + sequence * p.dv_batch + head * p.dv_head, p.dv_row, p.len_kv};
  }
};

// Packed sequences: tensors of (total length, heads, head_dim). Maps are windows (packed_window.cuh).
struct alignas(16) PackedKeyTile {
  i32 first_key;
  i32 head;
  i32 sequence;
  bool exists;
  bool is_attended;
  PackedSequence rows;

  FLASHGEN_DEVICE i32 result_rows(const auto&) const { return rows.rows_kv; }
  FLASHGEN_DEVICE i32 query_head(const auto& p, i32 member) const { return head * p.group + member; }
  FLASHGEN_DEVICE i32 first_head(const auto& p) const { return sequence * p.heads_q + head * p.group; }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p, i32 member) const {
    return sequence_mask<Mask>(p, rows, sequence, query_head(p, member));
  }
  template <class Score, class Params>
  FLASHGEN_DEVICE Score score(const Params& p, i32 member) const {
    return {p, sequence, query_head(p, member), rows.len_q, rows.len_kv};
  }

  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE i32 query_tile(const Params& p, QueryStep step) const {
    return sum(p, first_sum<tile_q>(p), step);
  }
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE i32 first_sum(const Params& p) const {
    return first_tile_of(rows.first_q, sequence, tile_q) * p.heads_q + head * p.group;
  }
  FLASHGEN_DEVICE static i32 sum(const auto& p, i32 first_sum, QueryStep step) {
    return first_sum + step.block * p.heads_q + step.member;
  }
  // All tiles have a sum of their own: a ring of heads of the longest sequence would hold few short ones.
  FLASHGEN_DEVICE static i32 sum_of(const auto&, i32 /*head*/, i32 query_tile) { return query_tile; }
  FLASHGEN_DEVICE static bool is_sum_needed_again(const auto&, i32 /*head*/) { return false; }
  template <i32 tile_kv, class Params>
  FLASHGEN_DEVICE i32 key_tile(const Params& p) const {
    return (first_tile_of(rows.first_key, sequence, tile_kv) + first_key / tile_kv) * p.heads_kv + head;
  }

  template <class KTile, class Params>
  FLASHGEN_DEVICE void load_k(KTile k, const Params& p, u32 barrier) const {
    PackedWindow::of(rows.first_key, rows.len_kv, p.len_kv).load(k, p.k_map, barrier, first_key, head);
  }
  template <class VTile, class Params>
  FLASHGEN_DEVICE void load_v(VTile v, const Params& p, u32 barrier) const {
    PackedWindow::of(rows.first_key, rows.len_kv, p.len_kv).load(v, p.v_map, barrier, first_key, head);
  }
  template <class QTile, class Params>
  FLASHGEN_DEVICE void load_q(QTile q, const Params& p, u32 barrier, QueryStep step) const {
    PackedWindow::of(rows.first_q, rows.len_q, p.len_q)
        .load(q, p.q_map, barrier, step.block * QTile::rows, query_head(p, step.member));
  }
  template <class DOTile, class Params>
  FLASHGEN_DEVICE void load_dout(DOTile dout, const Params& p, u32 barrier, QueryStep step) const {
    PackedWindow::of(rows.first_q, rows.len_q, p.len_q)
        .load(dout, p.dout_map, barrier, step.block * DOTile::rows, query_head(p, step.member));
  }
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE void load_statistics(u32 to, const Params& p, u32 barrier, QueryStep step, i32 part) const {
    tma_load_4d(to, &p.row_stats_map, barrier, 0, 2 * query_tile<tile_q>(p, step) + part, 0, 0);
  }
  // Rows that are not used have gradients, too: 0.
  template <class Rows, class Params>
  FLASHGEN_DEVICE void store(Rows to, const Params& p, const TensorMap& map, i32 row) const {
    PackedWindow::of(rows.first_key, rows.rows_kv, p.len_kv).store(to, map, row, head);
  }
  FLASHGEN_DEVICE auto dk_rows(const auto& p) const {
    return GlobalRows{p.dk + rows.first_key * p.dk_row + head * p.dk_head, p.dk_row, rows.rows_kv};
  }
  FLASHGEN_DEVICE auto dv_rows(const auto& p) const {
    return GlobalRows{p.dv + rows.first_key * p.dv_row + head * p.dv_head, p.dv_row, rows.rows_kv};
  }
};

// Which tile of keys a persistent block computes next: blocks draw numbers from a counter, so that none waits
// while another has tiles left. Consecutive numbers are tiles of a few heads, a section, whose operands then
// stay in the L2 cache. Within a section the tile varies slowest, from the first one: a causal mask makes
// that the longest.
//
// Blocks draw their first tile, too. So a tile never waits for one that no running block has drawn.
template <class Params>
struct KeyTileCounter {
  const Params& p;

  FLASHGEN_DEVICE i32 draw() const { return static_cast<i32>(atomic_add(p.counter, 1u)); }
  // Each block calls this once, after its last draw. The last block resets the counters for the next launch.
  FLASHGEN_DEVICE void leave() const { leave_counters(p); }
};

template <i32 tile_kv, i32 section_heads, class Params, class Tile>
struct KeyTileScheduler : KeyTileCounter<Params> {
  // Tile `number`. It does not exist if there are not so many.
  FLASHGEN_DEVICE DenseKeyTile tile(i32 number, Thread) const {
    const Params& p = this->p;
    if (number >= p.tiles) return {};
    const SectionTile place = section_tile<section_heads>(number, p.tiles, p.kv_tiles);
    return {place.turn * tile_kv, place.head % p.heads_kv, place.head / p.heads_kv, true, true};
  }
};

// Of packed sequences, the tiles of one after another, those of long sequences first. All lanes of a warp
// call.
template <i32 tile_kv, i32 section_heads, class Params>
struct KeyTileScheduler<tile_kv, section_heads, Params, PackedKeyTile> : KeyTileCounter<Params> {
  SequenceSearch search = {};

  FLASHGEN_DEVICE PackedKeyTile tile(i32 number, Thread thread) {
    const Params& p = this->p;
    const auto found =
        search.find(number, p.batch, p.heads_kv, ceil_div(p.len_kv, tile_kv), thread,
                    [&](i32 sequence) { return ceil_div(PackedSequence::of(p, sequence).rows_kv, tile_kv); });
    if (!found.exists) return {};
    const SectionTile place =
        section_tile<section_heads>(found.number, p.heads_kv * found.tiles_of_head, found.tiles_of_head);
    PackedKeyTile tile = {
        place.turn * tile_kv, place.head, found.sequence, true, true, PackedSequence::of(p, found.sequence)};
    // No query attends to a tile without keys that are used.
    if (tile.first_key >= tile.rows.len_kv) tile.rows.len_q = 0;
    return tile;
  }
};

}  // namespace flashgen
