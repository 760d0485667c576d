// Where a tile of keys lies, and the queries that attend to it: the Sequence policy of the backward kernels
// that keep keys. A tile is what the producer announces to the other warps.
#pragma once
#include "flashgen/band.cuh"
#include "flashgen/panel.cuh"
#include "flashgen/sm90/sections.cuh"

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

  template <class Params>
  FLASHGEN_DEVICE static i32 len_q(const Params& p) {
    return p.len_q;
  }
  template <class Params>
  FLASHGEN_DEVICE static i32 len_kv(const Params& p) {
    return p.len_kv;
  }
  template <class Params>
  FLASHGEN_DEVICE i32 query_head(const Params& p, i32 member) const {
    return head * p.group + member;
  }
  // The first head of queries of the group, counted over all sequences.
  template <class Params>
  FLASHGEN_DEVICE i32 first_head(const Params& p) const {
    return sequence * p.heads_q + head * p.group;
  }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p, i32 member) const {
    return Mask::of(p, sequence, query_head(p, member));
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
  template <class Params>
  FLASHGEN_DEVICE void load_statistics(u32 rows, const Params& p, u32 barrier, QueryStep step,
                                       i32 part) const {
    const i32 number = (sequence * p.heads_q + query_head(p, step.member)) * p.q_tiles + step.block;
    tma_load_4d(rows, &p.row_stats_map, barrier, 0, 2 * number + part, 0, 0);
  }
  // Rows of dK and dV. TMA clips rows beyond the last key.
  template <class Rows>
  FLASHGEN_DEVICE void store(Rows rows, const TensorMap& map, i32 row) const {
    rows.store(map, row, head, sequence);
  }
};

// Which tile of keys a persistent block computes next: blocks draw numbers from a counter, so that none waits
// while another has tiles left. Consecutive numbers are tiles of a few heads, a section, whose operands then
// stay in the L2 cache. Within a section the tile varies slowest, from the first one: a causal mask makes
// that the longest.
//
// Blocks draw their first tile, too. So a tile never waits for one that no running block has drawn.
template <i32 tile_kv, i32 section_heads, class Params>
struct KeyTileScheduler {
  const Params& p;

  FLASHGEN_DEVICE i32 draw() const { return static_cast<i32>(atomic_add(p.counter, 1u)); }

  // Tile `number`. It does not exist if there are not so many.
  FLASHGEN_DEVICE DenseKeyTile tile(i32 number) const {
    if (number >= p.tiles) return {};
    const SectionTile place = section_tile<section_heads>(number, p.tiles, p.kv_tiles);
    return {place.turn * tile_kv, place.head % p.heads_kv, place.head / p.heads_kv, true, true};
  }

  // Each block calls this once, after its last draw. The last block resets the counters for the next launch.
  FLASHGEN_DEVICE void leave() const { leave_counters(p); }
};

}  // namespace flashgen
