// Sequences of different lengths, packed: the rows of one lie behind those of the one before.
#pragma once
#include "flashgen/band.cuh"

namespace flashgen {

// Where the rows of a sequence begin, how many there are, and how many of them are used: a row that is not
// attends to nothing, and nothing attends to it.
struct PackedSequence {
  i32 first_q, first_key;
  i32 rows_q, rows_kv;
  i32 len_q, len_kv;

  FLASHGEN_DEVICE i32 result_rows() const { return rows_q; }

  // A sequence ends where the longest one would, at the latest: there is no room for more.
  template <class Params>
  FLASHGEN_DEVICE static PackedSequence of(const Params& p, i32 sequence) {
    const i32 first_q = p.cu_seqlens_q[sequence], first_key = p.cu_seqlens_k[sequence];
    const i32 rows_q = larger(0, smaller(p.cu_seqlens_q[sequence + 1] - first_q, p.len_q));
    const i32 rows_kv = larger(0, smaller(p.cu_seqlens_k[sequence + 1] - first_key, p.len_kv));
    return {first_q,
            first_key,
            rows_q,
            rows_kv,
            used(p.seqused_q, sequence, rows_q),
            used(p.seqused_k, sequence, rows_kv)};
  }

 private:
  FLASHGEN_DEVICE static i32 used(const i32* counts, i32 sequence, i32 rows) {
    return counts == nullptr ? rows : larger(0, smaller(counts[sequence], rows));
  }
};

// Tiles of the packed rows of all sequences have numbers, under which workspaces hold them. Each sequence
// begins with a new number, so there are at most total / tile + batch of them.
FLASHGEN_DEVICE i32 first_tile_of(i32 first_row, i32 sequence, i32 tile_rows) {
  return first_row / tile_rows + sequence;
}

// The band of one sequence: what is aligned at the bottom right moves with its lengths.
template <class Mask, class Params>
FLASHGEN_DEVICE Mask band_of(const Params& p, const PackedSequence& packed) {
  const i32 corner = packed.len_kv - packed.len_q;
  return {larger(p.band_lower + corner, p.corner_lower), smaller(p.band_upper + corner, p.corner_upper),
          packed.len_q, packed.len_kv};
}

// The mask of one sequence. Only a mask that is no band depends on the sequence and the head.
template <class Mask, class Params, class Rows>
FLASHGEN_DEVICE Mask sequence_mask(const Params& p, const Rows& rows, i32 sequence, i32 head) {
  if constexpr (requires { Mask::of(p, rows, sequence, head); }) {
    return Mask::of(p, rows, sequence, head);
  } else {
    return band_of<Mask>(p, rows);
  }
}

// Zeros into the rows of a tile from `first` to `end`, as far as it has them.
template <i32 threads, class Tile>
FLASHGEN_DEVICE void clear_rows(Tile tile, i32 first, i32 end, Thread thread) {
  const i32 begin = larger(0, first), count = (smaller(end, Tile::rows) - begin) * Tile::chunks;
#pragma unroll 1
  for (i32 i = thread.index(); i < count; i += threads) {
    tile.vector_at(begin + i / Tile::chunks, i % Tile::chunks) = Vec16{.words = {0, 0, 0, 0}};
  }
}

}  // namespace flashgen
