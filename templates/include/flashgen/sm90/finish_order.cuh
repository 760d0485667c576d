// Tiles of queries whose dQ is summed in global memory, and the order in which thread blocks finish them:
// scale, round and store the sums.
#pragma once
#include "flashgen/sm90/key_tile.cuh"

namespace flashgen {

// A tile of queries: a block of queries of a head.
struct DenseDqTile {
  bool exists;
  i32 block;
  i32 head;
  i32 sequence;

  // The tile's number among all tiles.
  template <class Params>
  FLASHGEN_DEVICE i32 number(const Params& p, i32 /*tile_q*/) const {
    return (sequence * p.heads_q + head) * p.q_tiles + block;
  }
  // Where its rows begin in the map of dQ.
  template <class Params>
  FLASHGEN_DEVICE i32 first_row(const Params&, i32 tile_q) const {
    return block * tile_q;
  }
  // The last coordinate in the map of dQ.
  FLASHGEN_DEVICE i32 place() const { return sequence; }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p) const {
    return Mask::of(p, sequence, head);
  }
  // The number of tiles of keys of a head, and of those with keys that are used.
  FLASHGEN_DEVICE i32 key_tiles(const auto& p, i32 /*tile_kv*/) const { return p.kv_tiles; }
  FLASHGEN_DEVICE i32 attended_key_tiles(const auto& p, i32 tile_kv) const { return key_tiles(p, tile_kv); }
};

struct PackedDqTile {
  bool exists;
  i32 block;
  i32 head;
  i32 sequence;
  PackedSequence rows;

  template <class Params>
  FLASHGEN_DEVICE i32 number(const Params& p, i32 tile_q) const {
    return (first_tile_of(rows.first_q, sequence, tile_q) + block) * p.heads_q + head;
  }
  // Rows that seqused_q leaves out get gradients, too: zeros.
  template <class Params>
  FLASHGEN_DEVICE i32 first_row(const Params& p, i32 tile_q) const {
    return PackedWindow::of(rows.first_q, rows.rows_q, p.len_q).offset + block * tile_q;
  }
  FLASHGEN_DEVICE i32 place() const { return PackedWindow::of(rows.first_q, rows.rows_q, 0).place; }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p) const {
    return sequence_mask<Mask>(p, rows, sequence, head);
  }
  FLASHGEN_DEVICE i32 key_tiles(const auto&, i32 tile_kv) const { return ceil_div(rows.rows_kv, tile_kv); }
  FLASHGEN_DEVICE i32 attended_key_tiles(const auto&, i32 tile_kv) const {
    return ceil_div(rows.len_kv, tile_kv);
  }
};

// by_heads(number): head after head. by_sections<descending>(number): in sections of heads, as tiles of keys
// are drawn; within a head from the first block of queries to the last one, or the other way round.
template <auto cfg, class Params, class Tile>
struct FinishOrder {
  // Whether all lanes of a warp call.
  static constexpr bool by_warp = false;
  const Params& p;

  FLASHGEN_DEVICE DenseDqTile by_heads(i32 number, Thread) const {
    const i32 heads = p.tiles / p.kv_tiles * p.group;
    if (number >= heads * p.q_tiles) return {};
    const i32 head = number / p.q_tiles, sequence = head / p.heads_q;
    return {true, number - head * p.q_tiles, head - sequence * p.heads_q, sequence};
  }
  template <bool descending>
  FLASHGEN_DEVICE DenseDqTile by_sections(i32 number, Thread) const {
    const i32 blocks_of_head = p.group * p.q_tiles, blocks = blocks_of_head * (opaque(p.tiles) / p.kv_tiles);
    if (number >= blocks) return {};
    const SectionTile place = section_tile<cfg.section_heads>(number, blocks, blocks_of_head);
    const i32 sequence = place.head / p.heads_kv, head_kv = place.head - sequence * p.heads_kv;
    const i32 turn = place.turn / p.group;
    return {true, descending ? p.q_tiles - 1 - turn : turn, head_kv * p.group + place.turn % p.group,
            sequence};
  }
};

// For packed sequences: one sequence after another, long ones first. Both orders are the same.
template <auto cfg, class Params>
struct FinishOrder<cfg, Params, PackedKeyTile> {
  static constexpr bool by_warp = true;
  const Params& p;
  SequenceSearch search = {};

  FLASHGEN_DEVICE PackedDqTile by_heads(i32 number, Thread thread) {
    return by_sections<false>(number, thread);
  }
  template <bool descending>
  FLASHGEN_DEVICE PackedDqTile by_sections(i32 number, Thread thread) {
    const auto found = search.find(
        number, p.batch, p.heads_q, ceil_div(p.len_q, cfg.tile_q), thread,
        [&](i32 sequence) { return ceil_div(PackedSequence::of(p, sequence).rows_q, cfg.tile_q); });
    if (!found.exists) return {};
    const i32 tiles = found.tiles_of_head;
    const SectionTile place =
        section_tile<cfg.section_heads>(found.number, p.heads_q * tiles, p.group * tiles);
    const i32 turn = place.turn / p.group;
    return {true, descending ? tiles - 1 - turn : turn, place.head * p.group + place.turn % p.group,
            found.sequence, PackedSequence::of(p, found.sequence)};
  }
};

}  // namespace flashgen
