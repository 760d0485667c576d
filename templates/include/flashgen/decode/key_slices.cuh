// Bringing keys and values to shared memory. Each warp copies 16 keys of a tile, its slice, and their values.
#pragma once
#include "flashgen/decode/rows.cuh"

namespace flashgen {

// Where the keys of the warp's next slice lie, one key for each lane of half a warp. Page numbers are read
// here, one step before the copies that need them.
template <bool paged>
struct SlicePlaces {
  // The page (without pages: the row of the cache), and the key's place in it. A negative page stands for a
  // key that does not exist: it is never read, nor is its entry of the page table.
  i32 page;
  i32 row;

  template <class Params>
  FLASHGEN_DEVICE static SlicePlaces of(const Params& p, const CachedSequence& cached, Range keys,
                                        i32 first_key, Thread thread) {
    const i32 key = first_key + thread.lane % kSliceKeys, place = cached.first_key + key;
    if (!keys.has(key)) return {-1, 0};
    if constexpr (paged) {
      const i32 index = place / p.page_size;
      return {p.block_table[cached.row * p.table_row + index], place - index * p.page_size};
    } else {
      return {static_cast<i32>(cached.row), place};
    }
  }

  FLASHGEN_DEVICE bool exists() const { return page >= 0; }
  // In a tensor with these strides, in elements.
  FLASHGEN_DEVICE i64 offset(i64 page_stride, i64 row_stride) const {
    return exists() ? page * page_stride + row * row_stride : 0;
  }
};

FLASHGEN_DEVICE i64 shuffle(i64 value, i32 lane) {
  const u32 low = static_cast<u32>(shuffle(static_cast<i32>(value), lane));
  return static_cast<i64>(shuffle(static_cast<i32>(value >> 32), lane)) << 32 | low;
}

// Which chunks of a slice a lane copies: chunk `chunk` of row `row` in turn i.
template <class Slice>
struct LaneChunk {
  static constexpr i32 count = Slice::rows * Slice::chunks / kWarpSize;
  static_assert(Slice::rows * Slice::chunks % kWarpSize == 0, "all lanes copy as many chunks");
  i32 row;
  i32 chunk;
  u32 address;

  FLASHGEN_DEVICE static LaneChunk of(Slice slice, i32 i, Thread thread) {
    if constexpr (kWarpSize % Slice::chunks == 0 && Slice::Layout::span == 8) {
      // The lane's chunk is always the same, and the rows of a turn differ in other bits than those of a
      // warp.
      constexpr i32 rows_at_once = kWarpSize / Slice::chunks;
      const i32 first = thread.lane / Slice::chunks, own = thread.lane % Slice::chunks,
                step = i * rows_at_once;
      const u32 of_first = shared_address(slice.chunk_at(first, own));
      return {first + step, own,
              (of_first ^ static_cast<u32>(step % 8 * kChunkBytes)) + step * Slice::row_bytes};
    } else {
      const i32 index = i * kWarpSize + thread.lane, own = index / Slice::chunks;
      return {own, index % Slice::chunks, shared_address(slice.chunk_at(own, index % Slice::chunks))};
    }
  }
};

// Starts the copies of a slice from `data`. `offset` is that of the lane's key, and the bits of `existing`
// tell which lanes' keys exist. Keys and columns that do not exist arrive as zeros.
template <i32 head_dim, i32 access_bytes, class Slice>
FLASHGEN_DEVICE void copy_slice(Slice slice, const typename Slice::Element* data, i64 offset, u32 existing,
                                Thread thread) {
  using T = typename Slice::Element;
  // With more turns at a time, the addresses of wide heads lack registers.
#pragma unroll 8
  for (i32 i = 0; i < LaneChunk<Slice>::count; ++i) {
    const LaneChunk<Slice> own = LaneChunk<Slice>::of(slice, i, thread);
    const i32 column = own.chunk * Slice::chunk_elements;
    const i64 from = shuffle(offset, own.row) + column;
    const i32 columns = (existing >> own.row & 1u) != 0 ? head_dim - column : 0;
    copy_chunk_async<T, access_bytes>(own.address, data + from, columns);
  }
}

}  // namespace flashgen
