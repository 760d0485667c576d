// The rows of a tile. Query heads that share a key/value head read the same keys, so their rows lie in one
// tile:
//
//     row = token * group + query head of the group
//
// The tensor cores thus have up to 16 useful rows for one new token, and each key is read once for the whole
// group.
#pragma once
#include "flashgen/decode/config.cuh"

namespace flashgen {

// What blocks compute: a tile of rows of one key/value head of one sequence.
struct alignas(16) DecodeItem {
  CachedSequence cached;
  i32 sequence;
  i32 head_kv;
  // The first row of the tile, and how many rows it has.
  i32 first_row;
  i32 rows;
  // Tiles of keys that some row of the sequence may attend to; at least one, because rows without keys also
  // have results.
  Range tiles;

  FLASHGEN_DEVICE i32 row_blocks() const { return ceil_div(rows, kRowBlock); }
};

// The token and the query head of a row of the tile.
struct RowPlace {
  i32 q;
  i32 head;

  // Rows beyond the last repeat it. They read no other memory, and are not stored.
  template <class Params>
  FLASHGEN_DEVICE static RowPlace of(const Params& p, const DecodeItem& item, i32 row) {
    const i32 own = item.first_row + smaller(row, item.rows - 1), q = own / p.group;
    return {q, item.head_kv * p.group + own - q * p.group};
  }
};

// The mask of a query head of the sequence.
template <class Mask, class Params>
FLASHGEN_DEVICE Mask mask_of(const Params& p, const CachedSequence& cached, i32 sequence, i32 head) {
  if constexpr (requires { Mask::of(p, cached, sequence, head); }) {
    return Mask::of(p, cached, sequence, head);
  } else {
    return band_of<Mask>(p, cached);
  }
}

// The two rows that a lane holds of a block of 16.
struct LaneRows {
  RowPlace places[2];

  template <class Params>
  FLASHGEN_DEVICE static LaneRows of(const Params& p, const DecodeItem& item, i32 row_block, Thread thread) {
    const i32 row = row_block * kRowBlock + thread.row();
    return {{RowPlace::of(p, item, row), RowPlace::of(p, item, row + 8)}};
  }
};

// Their masks.
template <class Mask>
struct LaneMasks {
  Mask masks[2];
  i32 q[2];

  template <class Params>
  FLASHGEN_DEVICE static LaneMasks of(const Params& p, const DecodeItem& item, const LaneRows& rows) {
    const RowPlace first = rows.places[0], second = rows.places[1];
    return {{mask_of<Mask>(p, item.cached, item.sequence, first.head),
             mask_of<Mask>(p, item.cached, item.sequence, second.head)},
            {first.q, second.q}};
  }
  FLASHGEN_DEVICE bool is_full(i32 k_begin, i32 k_end) const {
    return masks[0].is_full(q[0], q[0] + 1, k_begin, k_end) &&
           masks[1].is_full(q[1], q[1] + 1, k_begin, k_end);
  }
  FLASHGEN_DEVICE bool is_empty(i32 k_begin, i32 k_end) const {
    return masks[0].is_empty(q[0], q[0] + 1, k_begin, k_end) &&
           masks[1].is_empty(q[1], q[1] + 1, k_begin, k_end);
  }
  FLASHGEN_DEVICE bool allows(i32 h, i32 k) const { return masks[h].allows(q[h], k); }
};

// Which pairs of a lane's rows and the keys of a tile are allowed: bit 2n + c of allowed[h] is for column 8n
// + c of row h. `first_key` is the key of the lane's first column.
template <i32 columns, class Mask>
FLASHGEN_DEVICE void find_allowed(u32 (&allowed)[2], const LaneMasks<Mask>& masks, i32 first_key) {
  allowed[0] = allowed[1] = 0;
#pragma unroll
  for (i32 n = 0; n < columns / 8; ++n) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      const bool is_allowed = masks.allows(e / 2, first_key + (8 * n + e % 2));
      allowed[e / 2] |= static_cast<u32>(is_allowed) << (2 * n + e % 2);
    }
  }
}

// Calls visit(value, h, column) for each of a lane's scores.
template <i32 blocks, class Visit>
FLASHGEN_DEVICE void for_each_score(Accumulator<1, blocks>& scores, const Visit& visit) {
#pragma unroll
  for (i32 n = 0; n < blocks; ++n) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) visit(scores[0][n][e], e / 2, 8 * n + e % 2);
  }
}

// The rows of Q of a head, by token.
template <class T>
struct QueryRows {
  const T* data;
  i64 row_stride;
  i64 head_stride;

  template <class Params>
  FLASHGEN_DEVICE static QueryRows of(const Params& p, const DecodeItem& item) {
    return {p.q + item.sequence * p.q_batch + item.cached.first_q * p.q_row, p.q_row, p.q_head};
  }
  FLASHGEN_DEVICE const T* at(RowPlace place) const {
    return data + place.q * row_stride + place.head * head_stride;
  }
};

// A warp's rows of Q in registers, straight from global memory: each lane reads the elements that it
// multiplies.
template <DecodeConfig cfg, class T, bool in_registers>
struct WarpQueries {
  static constexpr i32 steps = round_up(cfg.head_dim, 16) / 16;
  LeftHeld<T, 1, steps> held;

  template <class Params>
  FLASHGEN_DEVICE static WarpQueries load(const Params& p, const DecodeItem& item, const LaneRows& rows, u8*,
                                          i32, Thread thread) {
    const auto source = QueryRows<T>::of(p, item);
    const T* const own[2] = {source.at(rows.places[0]) + thread.column(),
                             source.at(rows.places[1]) + thread.column()};
    WarpQueries queries;
#pragma unroll
    for (i32 step = 0; step < steps; ++step) {
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 first = 16 * step + 8 * (i / 2);
        const bool exists = first + 8 <= cfg.head_dim || first + thread.column() < cfg.head_dim;
        queries.held.fragments[0][step].words[i] =
            exists ? *reinterpret_cast<const u32*>(own[i % 2] + first) : 0;
      }
    }
    return queries;
  }
  FLASHGEN_DEVICE const LeftHeld<T, 1, steps>& left(Thread) const { return held; }
};

// In shared memory, a copy for each warp. They arrive with the first keys.
template <DecodeConfig cfg, class T>
struct WarpQueries<cfg, T, false> {
  using Tile = SharedTile<T, kRowBlock, round_up(cfg.head_dim, 16)>;
  Tile tile;

  template <class Params>
  FLASHGEN_DEVICE static WarpQueries load(const Params& p, const DecodeItem& item, const LaneRows&, u8* base,
                                          i32 row_block, Thread thread) {
    const auto source = QueryRows<T>::of(p, item);
    const Tile tile = Tile{base}.slot(thread.warp);
#pragma unroll 1
    for (i32 i = thread.lane; i < Tile::rows * Tile::chunks; i += kWarpSize) {
      const i32 row = i / Tile::chunks, chunk = i % Tile::chunks, column = chunk * Tile::chunk_elements;
      const T* const from = source.at(RowPlace::of(p, item, row_block * kRowBlock + row));
      const i32 columns = cfg.head_dim - column;
      copy_chunk_async<T, cfg.access_bytes>(shared_address(tile.chunk_at(row, chunk)),
                                            columns > 0 ? from + column : from, columns);
    }
    return {tile};
  }
  FLASHGEN_DEVICE LeftRows<Tile> left(Thread thread) const { return {tile, 0, thread}; }
};

}  // namespace flashgen
