// What the backward kernels for Hopper begin with: the statistics L and D of the query rows, and workspaces
// without anything in them.
#pragma once
#include "flashgen/logits.cuh"
#include "flashgen/sequence.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

struct PrepareConfig {
  i32 head_dim_v;
  i32 tile_q;
  i32 workspace_floats;
  i32 access_bytes;
};

// ---- Where the rows of a block's tile of queries lie: the Tile policy

struct DensePreparedTile {
  Place place;

  template <class Params>
  FLASHGEN_DEVICE static DensePreparedTile of(const Params&, Place place) {
    return {place};
  }
  // Whether its sequence has so many rows, and how many are used.
  FLASHGEN_DEVICE static bool exists(i32 /*tile_q*/) { return true; }
  FLASHGEN_DEVICE static i32 len_q(const auto& p) { return p.len_q; }
  // From the first row of a tensor, or of row statistics, to that of the sequence.
  FLASHGEN_DEVICE i64 rows(i64 batch, i64 /*row*/) const { return place.sequence * batch; }
  FLASHGEN_DEVICE i64 statistics(const auto& p) const {
    return (static_cast<i64>(place.sequence) * p.heads_q + place.head) * p.len_q;
  }
  // The number under which workspaces hold what belongs to it.
  template <class Params>
  FLASHGEN_DEVICE i64 number(const Params& p, i32 tile_q) const {
    return place.number(ceil_div(p.len_q, tile_q), p.heads_q);
  }
};

struct PackedPreparedTile {
  Place place;
  PackedSequence packed;

  template <class Params>
  FLASHGEN_DEVICE static PackedPreparedTile of(const Params& p, Place place) {
    return {place, PackedSequence::of(p, place.sequence)};
  }
  FLASHGEN_DEVICE bool exists(i32 tile_q) const { return place.tile * tile_q < packed.rows_q; }
  FLASHGEN_DEVICE i32 len_q(const auto&) const { return packed.len_q; }
  FLASHGEN_DEVICE i64 rows(i64 /*batch*/, i64 row) const { return packed.first_q * row; }
  FLASHGEN_DEVICE i64 statistics(const auto& p) const { return place.head * p.total_q + packed.first_q; }
  template <class Params>
  FLASHGEN_DEVICE i64 number(const Params& p, i32 tile_q) const {
    return static_cast<i64>(first_tile_of(packed.first_q, place.sequence, tile_q) + place.tile) * p.heads_q +
           place.head;
  }
};

// ---- The kernel

// How dQ is summed: in a ring of sums that are cleared, in sums whose first addition stores, or in registers.
enum class DqSums { ring, in_order, registers };

// `scales`: accumulators of S start at -L / scale. `has_mask`: tiles may have to be repaired. `drops`:
// accumulators of dP start at -D (1 - p).
template <PrepareConfig cfg, class T, class Params, i32 threads, class Tile, DqSums sums, bool scales,
          bool has_mask, bool drops>
struct BackwardPrepare {
  static constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  static constexpr i32 chunks = ceil_div(cfg.head_dim_v, chunk_elements);
  // Lanes that share a row: a power of two, one chunk each. At least 8: a tile has rows for all threads.
  static constexpr i32 lanes_for(i32 chunks) {
    i32 lanes = 8;
    while (lanes < chunks && lanes < kWarpSize) lanes *= 2;
    return lanes;
  }
  static constexpr i32 lanes = lanes_for(chunks), rows_at_once = threads / lanes;
  // All chunks of a lane are read before the first is summed, and lane t looks after the row of turn t.
  static constexpr i32 turns = cfg.tile_q / rows_at_once;
  static_assert(chunks <= lanes && turns <= lanes && cfg.tile_q % rows_at_once == 0);

  FLASHGEN_DEVICE static float element_of(const Vec16& chunk, i32 i) {
    return to_float(T{static_cast<u16>(chunk.words[i / 2] >> (16 * (i % 2)))});
  }

  // No tile of gradients has failed.
  FLASHGEN_DEVICE static void clear_flags(const Params& p, Place place) {
    if (place.sequence != 0) return;
    for (i32 i = (place.head * grid_dim_x() + place.tile) * threads + thread_idx(); i < p.flags;
         i += p.heads_q * grid_dim_x() * threads)
      p.failed_tiles[i] = 0;
  }
  // Nothing has been given out to be finished, nothing added to this head's dQ, nothing of it finished.
  FLASHGEN_DEVICE static void clear_counts(const Params& p, Place place) {
    if (thread_idx() != 0 || place.tile != 0) return;
    const i32 head = place.sequence * p.heads_q + place.head;
    if (head == 0) p.head_counts[0] = 0;
    p.head_counts[1 + 2 * head] = 0;
    p.head_counts[2 + 2 * head] = 0;
  }
  // The sum of dQ of this tile starts at zero.
  FLASHGEN_DEVICE static void clear_sum(const Params& p, const Tile& tile) {
    if (tile.place.sequence * p.heads_q + tile.place.head >= p.sum_heads) return;
    Vec16* const sum =
        reinterpret_cast<Vec16*>(p.dq_accum + tile.number(p, cfg.tile_q) * cfg.workspace_floats);
    for (i32 i = thread_idx(); i < cfg.workspace_floats / 4; i += threads)
      sum[i] = Vec16{.words = {0, 0, 0, 0}};
  }

  // D = rowsum(dO * O), minus the gradient of L where there is one: dS = P (dP - D + dL).
  FLASHGEN_DEVICE static void write_statistics(const Params& p, const Tile& tile) {
    const T* const out = p.o + tile.rows(p.o_batch, p.o_row) + tile.place.head * p.o_head;
    const T* const dout = p.dout + tile.rows(p.dout_batch, p.dout_row) + tile.place.head * p.dout_head;
    const i32 lane = thread_idx() % lanes, first_row = thread_idx() / lanes;
    const i32 first_q = tile.place.tile * cfg.tile_q, row = first_row + lane * rows_at_once;
    const bool is_there = lane < turns, exists = is_there && first_q + row < tile.len_q(p);
    const i64 number = tile.statistics(p) + first_q + row;
    const float lse = exists ? p.lse[number] : -kInfinity;
    const float dlse = exists && p.dlse != nullptr ? p.dlse[number] : 0.0f;
    Vec16 a[turns], b[turns];
#pragma unroll
    for (i32 turn = 0; turn < turns; ++turn) {
      const i64 q = first_q + first_row + turn * rows_at_once;
      const i32 column = lane * chunk_elements, valid = q < tile.len_q(p) ? cfg.head_dim_v - column : 0;
      a[turn] = read_chunk<T, cfg.access_bytes>(out + q * p.o_row + column, valid);
      b[turn] = read_chunk<T, cfg.access_bytes>(dout + q * p.dout_row + column, valid);
    }
    float total = 0.0f;
#pragma unroll
    for (i32 turn = 0; turn < turns; ++turn) {
      float sum = 0.0f;
#pragma unroll
      for (i32 i = 0; i < chunk_elements; ++i)
        sum = fused_multiply_add(element_of(a[turn], i), element_of(b[turn], i), sum);
#pragma unroll
      for (i32 distance = lanes / 2; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
      if (lane == turn) total = sum;
    }
    total -= dlse;
    if (exists) p.dsum[number] = total;
    if (!is_there) return;
    // The probabilities of rows that do not exist, or attend to nothing, are to be 0.
    float* const stats = p.row_stats + tile.number(p, cfg.tile_q) * (2 * cfg.tile_q);
    if constexpr (scales) {
      stats[row] = lse == -kInfinity ? lse : -lse / p.scale;
    } else {
      stats[row] = negate_lse(lse);
    }
    if constexpr (drops) total /= p.dropout_factor;
    stats[cfg.tile_q + row] = exists ? -total : 0.0f;
  }

  FLASHGEN_DEVICE static void run(const Params& p) {
    const Place place = Place::current();
    if constexpr (has_mask) clear_flags(p, place);
    if constexpr (sums == DqSums::ring) clear_counts(p, place);
    const Tile tile = Tile::of(p, place);
    if (!tile.exists(cfg.tile_q)) return;
    write_statistics(p, tile);
    if constexpr (sums == DqSums::ring) clear_sum(p, tile);
    // The first tile of keys that adds to it may do so.
    if constexpr (sums == DqSums::in_order) {
      if (thread_idx() == 0) p.dq_semaphore[tile.number(p, cfg.tile_q)] = 0;
    }
  }
};

}  // namespace flashgen
