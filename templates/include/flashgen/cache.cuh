// Keys and values in a cache: where those of a sequence lie, and the tiles of keys that one of several blocks
// goes over.
#pragma once
#include "flashgen/band.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

// The row of a cache, or of a table of pages, that belongs to a sequence, which of its keys are there, and
// where its queries begin among those of all, if they are packed.
struct CachedSequence {
  i64 row;
  i32 first_key;
  i32 first_q;
  i32 len_q, len_kv;

  FLASHGEN_DEVICE i32 result_rows() const { return len_q; }

  // What an array says is never taken for more than there is room for.
  template <class Params>
  FLASHGEN_DEVICE static CachedSequence of(const Params& p, i32 sequence) {
    const i32 end = smaller(keys_of(p, sequence) + p.appended, p.len_kv);
    const i32 first = p.cache_leftpad == nullptr ? 0 : larger(0, smaller(p.cache_leftpad[sequence], end));
    const Range queries = queries_of(p, sequence);
    return {row_of(p, sequence), first, queries.begin, queries.size(), end - first};
  }

  // No more than the longest sequence may have.
  FLASHGEN_DEVICE static Range queries_of(const auto& p, i32 sequence) {
    if (p.cu_seqlens_q == nullptr) return {0, p.len_q};
    const i32 first = p.cu_seqlens_q[sequence];
    return {first, larger(first, smaller(p.cu_seqlens_q[sequence + 1], first + p.len_q))};
  }

  FLASHGEN_DEVICE static i64 row_of(const auto& p, i32 sequence) {
    return p.cache_batch_idx == nullptr ? sequence : p.cache_batch_idx[sequence];
  }

  // How many keys there are without those that were appended.
  FLASHGEN_DEVICE static i32 before(const auto& p, i32 sequence) {
    return p.cache_seqlens == nullptr ? p.len_kv : larger(0, smaller(p.cache_seqlens[sequence], p.len_kv));
  }

  // The same where an array may say how many keys all sequences before this one have.
  FLASHGEN_DEVICE static i32 keys_of(const auto& p, i32 sequence) {
    if (p.cu_seqlens_k == nullptr) return before(p, sequence);
    return larger(0, smaller(p.cu_seqlens_k[sequence + 1] - p.cu_seqlens_k[sequence], p.len_kv));
  }
};

// The band of one sequence: what is aligned at the bottom right moves with its length.
template <class Mask, class Params>
FLASHGEN_DEVICE Mask band_of(const Params& p, const CachedSequence& cached) {
  const i32 corner = cached.len_kv - cached.len_q;
  return {larger(p.band_lower + corner, p.corner_lower), smaller(p.band_upper + corner, p.corner_upper),
          cached.len_q, cached.len_kv};
}

// Part `part` of `parts` of a range of tiles; the last ones may be empty.
FLASHGEN_DEVICE Range part_of(Range tiles, i32 part, i32 parts) {
  const i32 each = ceil_div(tiles.size(), parts);
  const i32 begin = smaller(tiles.end, tiles.begin + part * each);
  return {begin, smaller(tiles.end, begin + each)};
}

// Rows of keys or values in pages: row r is number first + r of those that the table of pages counts. The
// table is read for rows that exist, and for no others.
template <class T>
struct PagedRows {
  T* data;
  i64 page_stride;
  i64 row_stride;
  const i32* pages;
  i32 page_size;
  i32 first;
  i32 row_count;

  FLASHGEN_DEVICE T* at(i32 row, i32 col) const {
    const i32 place = first + row, page = place / page_size;
    return data + pages[page] * page_stride + (place - page * page_size) * row_stride + col;
  }
};

// Brings one tile of rows in pages after another to shared memory; see TileStream.
template <class Stream>
struct PagedStream;
template <class Tile, i32 threads, i32 head_dim, i32 access_bytes, bool async_copy>
struct PagedStream<TileStream<Tile, threads, head_dim, access_bytes, async_copy>> {
  using T = typename Tile::Element;
  static constexpr i32 count = Tile::rows * Tile::chunks;
  static constexpr i32 per_thread = ceil_div(count, threads);

  PagedRows<const T> source;
  i32 first_row;
  Vec16 staged[async_copy ? 1 : per_thread];

  FLASHGEN_DEVICE PagedStream(PagedRows<const T> source_, i32 first_row_, Thread)
      : source(source_), first_row(first_row_) {}

  FLASHGEN_DEVICE void skip(i32 tiles) { first_row += tiles * Tile::rows; }

  FLASHGEN_DEVICE void fetch(Tile tile, Thread thread) {
#pragma unroll
    for (i32 i = 0; i < per_thread; ++i) {
      const i32 index = thread.index() + i * threads, row = index / Tile::chunks,
                chunk = index % Tile::chunks;
      if (index >= count) break;
      const i32 column = chunk * Tile::chunk_elements;
      const bool exists = first_row + row < source.row_count && column < head_dim;
      const T* const from = exists ? source.at(first_row + row, column) : source.data;
      const i32 columns = exists ? head_dim - column : 0;
      if constexpr (async_copy) {
        copy_chunk_async<T, access_bytes>(shared_address(tile.chunk_at(row, chunk)), from, columns);
      } else {
        staged[i] = read_chunk<T, access_bytes>(from, columns);
      }
    }
    first_row += Tile::rows;
  }

  FLASHGEN_DEVICE void land(Tile tile, Thread thread) const {
    if constexpr (!async_copy) {
#pragma unroll
      for (i32 i = 0; i < per_thread; ++i) {
        const i32 index = thread.index() + i * threads;
        if (index < count) tile.vector_at(index / Tile::chunks, index % Tile::chunks) = staged[i];
      }
    }
  }
};

}  // namespace flashgen
