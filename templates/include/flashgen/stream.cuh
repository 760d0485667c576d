// Streaming tiles between global and shared memory.
#pragma once
#include "flashgen/tile.cuh"

namespace flashgen {

// `row_count` rows of `cols` elements in global memory, row r at source + r * stride.
template <class T>
struct GlobalRows {
  T* data;
  i64 stride;
  i32 row_count;

  FLASHGEN_DEVICE T* at(i32 row, i32 col) const { return data + row * stride + col; }
};

// One 16-byte chunk read with the widest accesses that its alignment allows; elements past `valid` are zero.
template <class T, i32 access_bytes>
FLASHGEN_DEVICE Vec16 read_chunk(const T* source, i32 valid) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  Vec16 chunk = {{0, 0, 0, 0}};
  if constexpr (access_bytes == 16) {
    if (valid > 0) chunk = *reinterpret_cast<const Vec16*>(source);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) chunk.words[i] = bits_of(source[i]);
    }
  } else {
    constexpr i32 bits = 8 * static_cast<i32>(sizeof(T)), word_elements = 32 / bits;
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) {
        chunk.words[i / word_elements] |= static_cast<u32>(source[i].bits) << (bits * (i % word_elements));
      }
    }
  }
  return chunk;
}

template <class T, i32 access_bytes>
FLASHGEN_DEVICE void write_chunk(T* destination, const Vec16& chunk, i32 valid) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  if constexpr (access_bytes == 16) {
    if (valid > 0) *reinterpret_cast<Vec16*>(destination) = chunk;
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) destination[i] = float_of(chunk.words[i]);
    }
  } else {
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) destination[i].bits = static_cast<u16>(chunk.words[i / 2] >> (16 * (i % 2)));
    }
  }
}

// Asynchronous copy of one chunk, in pieces of access_bytes.
template <class T, i32 access_bytes>
FLASHGEN_DEVICE void copy_chunk_async(u32 destination, const T* source, i32 valid) {
  constexpr i32 pieces = kChunkBytes / access_bytes;
  constexpr i32 piece_elements = access_bytes / static_cast<i32>(sizeof(T));
#pragma unroll
  for (i32 i = 0; i < pieces; ++i) {
    const u32 bytes = i * piece_elements < valid ? access_bytes : 0;
    const T* from = source + (bytes != 0 ? i * piece_elements : 0);
    if constexpr (access_bytes == 16) cp_async_16(destination, from, bytes);
    if constexpr (access_bytes == 8) cp_async_8(destination + 8 * i, from, bytes);
    if constexpr (access_bytes == 4) cp_async_4(destination + 4 * i, from, bytes);
  }
}

// Brings one tile of rows after another from global to shared memory, all threads of the block together. With
// asynchronous copies the data goes straight to shared memory; without, fetch() reads into registers and
// land() writes them, so that the trip to global memory overlaps whatever is computed in between. Rows and
// columns that do not exist arrive as zeros.
template <class Tile, i32 threads, i32 head_dim, i32 access_bytes, bool async_copy>
struct TileStream {
  using T = typename Tile::Element;
  static constexpr i32 count = Tile::rows * Tile::chunks;
  static constexpr i32 per_thread = ceil_div(count, threads);
  static_assert(!async_copy || access_bytes >= 4, "asynchronous copies move at least 4 bytes");
  // Where a thread's chunks lie below one another, the swizzle the same for all, one address serves them all.
  static constexpr i32 rows_apart = threads / Tile::chunks;
  static constexpr bool stacked = threads % Tile::chunks == 0 && rows_apart % 8 == 0 && count % threads == 0;

  i64 stride;
  // The next tile: its first row (stacked: this thread's first chunk of it), and how many rows there are from
  // there on.
  const T* next;
  i32 rows_left;
  Vec16 staged[async_copy ? 1 : per_thread];

  FLASHGEN_DEVICE TileStream(GlobalRows<const T> source, i32 first_row, Thread thread)
      : stride(source.stride) {
    seek(source, first_row, thread);
  }

  FLASHGEN_DEVICE void seek(GlobalRows<const T> source, i32 first_row, Thread thread) {
    if constexpr (stacked) {
      const i32 row = first_row + thread.index() / Tile::chunks;
      next = source.at(row, thread.index() % Tile::chunks * Tile::chunk_elements);
      rows_left = source.row_count - row;
    } else {
      next = source.at(first_row, 0);
      rows_left = source.row_count - first_row;
    }
  }

  // Leaves out the next `tiles` tiles.
  FLASHGEN_DEVICE void skip(i32 tiles) {
    next += static_cast<i64>(tiles) * Tile::rows * stride;
    rows_left -= tiles * Tile::rows;
  }

  // Starts the next tile's way into `tile`.
  FLASHGEN_DEVICE void fetch(Tile tile, Thread thread) {
    if constexpr (stacked) {
      const i32 chunk = thread.index() % Tile::chunks;
      const i32 columns = head_dim - chunk * Tile::chunk_elements;
      u8* const to = tile.chunk_at(thread.index() / Tile::chunks, chunk);
#pragma unroll
      for (i32 i = 0; i < per_thread; ++i) {
        fetch_one(i, to + i * rows_apart * Tile::row_bytes, next, i * rows_apart < rows_left ? columns : 0);
        next += rows_apart * stride;
      }
    } else {
#pragma unroll
      for (i32 i = 0; i < per_thread; ++i) {
        const i32 index = thread.index() + i * threads, row = index / Tile::chunks,
                  chunk = index % Tile::chunks;
        if (index >= count) break;
        const i32 columns = row < rows_left ? head_dim - chunk * Tile::chunk_elements : 0;
        fetch_one(i, tile.chunk_at(row, chunk), next + row * stride + chunk * Tile::chunk_elements, columns);
      }
      next += Tile::rows * stride;
    }
    rows_left -= Tile::rows;
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

 private:
  // A chunk without columns reads nothing: where `from` then points does not matter.
  FLASHGEN_DEVICE void fetch_one(i32 i, u8* to, const T* from, i32 columns) {
    if constexpr (async_copy) {
      copy_chunk_async<T, access_bytes>(shared_address(to), from, columns);
    } else {
      staged[i] = read_chunk<T, access_bytes>(from, columns);
    }
  }
};

// Marks the copies issued so far as one group, and waits until at most `pending` groups are under way.
template <bool async_copy>
FLASHGEN_DEVICE void commit_copies() {
  if constexpr (async_copy) cp_async_commit();
}
template <bool async_copy, i32 pending>
FLASHGEN_DEVICE void wait_for_copies() {
  if constexpr (async_copy) cp_async_wait<pending>();
}

// Writes accumulators, times `factor(m, h)` for each row, as 16-bit or float elements into a tile.
template <class Tile, i32 row_blocks, i32 column_blocks, class Factor>
FLASHGEN_DEVICE void store_accumulator(Tile tile, i32 first_row, i32 first_column,
                                       const float (&values)[row_blocks][column_blocks][4], Thread thread,
                                       const Factor& factor) {
  using T = typename Tile::Element;
  const i32 row = first_row + thread.row(), column = first_column + thread.column();
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float scale = factor(m, h);
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
        *reinterpret_cast<Pair<T>*>(tile.element_at(row + 16 * m + 8 * h, column + 8 * n)) =
            Pair<T>::from(values[m][n][2 * h] * scale, values[m][n][2 * h + 1] * scale);
      }
    }
  }
}

// Writes the rows of a tile that exist to global memory.
template <class Tile, i32 threads, i32 head_dim, i32 access_bytes>
FLASHGEN_DEVICE void store_rows(Tile tile, GlobalRows<typename Tile::Element> destination, i32 first_row,
                                Thread thread) {
#pragma unroll 4
  for (i32 index = thread.index(); index < Tile::rows * Tile::chunks; index += threads) {
    const i32 row = index / Tile::chunks, chunk = index % Tile::chunks;
    const i32 valid = head_dim - chunk * Tile::chunk_elements;
    if (first_row + row < destination.row_count && valid > 0) {
      write_chunk<typename Tile::Element, access_bytes>(
          destination.at(first_row + row, chunk * Tile::chunk_elements), tile.vector_at(row, chunk), valid);
    }
  }
}

}  // namespace flashgen
