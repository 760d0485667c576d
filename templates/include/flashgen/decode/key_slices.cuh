// Bringing keys and values to shared memory. Each warp copies 16 keys of a tile, its slice, and their values.
#pragma once
#include "flashgen/decode/rows.cuh"

namespace flashgen {

// Where the keys of the warp's next slice lie, one key for each lane of half a warp. Page numbers are read
// here, one step before the copies that need them.
template <bool paged>
struct SlicePlaces {
  // The page (without pages: 0), and the key's place in it. A negative page stands for a key that does not
  // exist: it is never read, nor is its entry of the page table.
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
      return {0, place};
    }
  }

  FLASHGEN_DEVICE bool exists() const { return page >= 0; }
  // In a tensor with these strides, in elements. Without pages, from the sequence's first row on.
  FLASHGEN_DEVICE i64 offset(i64 page_stride, i64 row_stride) const {
    if (!exists()) return 0;
    return paged ? page * page_stride + row * row_stride : row * row_stride;
  }
  // The place that another lane knows.
  FLASHGEN_DEVICE SlicePlaces of_lane(i32 lane) const { return {shuffle(page, lane), shuffle(row, lane)}; }
};

// Each lane copies parts of two rows of a slice, 8 apart. Four lanes copy neighboring chunks of a row, which
// are whole sectors of memory. So a lane needs two addresses, however wide the heads are.
constexpr i32 kLanesOfRow = 4;

// The places of the lane's two rows.
template <bool paged>
struct LanePlaces {
  SlicePlaces<paged> rows[2];

  FLASHGEN_DEVICE static LanePlaces of(const SlicePlaces<paged>& places, Thread thread) {
    const i32 row = thread.lane / kLanesOfRow;
    return {{places.of_lane(row), places.of_lane(row + 8)}};
  }
};

// Copies slices of one head of K or V.
template <i32 head_dim, i32 access_bytes, class Slice>
struct SliceCopies {
  using T = typename Slice::Element;
  static_assert(Slice::rows == 2 * kWarpSize / kLanesOfRow, "a lane has two rows");

  // The lane's first chunk of a row, and where it lies in a slice.
  i32 chunk;
  Cursor<Slice> place;
  // That chunk of the row at offset 0.
  const T* data;

  FLASHGEN_DEVICE SliceCopies(const T* head, Thread thread)
      : chunk(thread.lane % kLanesOfRow),
        place(0, thread.lane / kLanesOfRow, chunk),
        data(head + chunk * Slice::chunk_elements) {}

  // Starts the copies of a slice. Keys and columns that do not exist arrive as zeros.
  template <bool paged>
  FLASHGEN_DEVICE void start(Slice slice, i64 page_stride, i64 row_stride,
                             const LanePlaces<paged>& places) const {
    constexpr i32 step = kLanesOfRow * Slice::chunk_elements;
    const u32 start = shared_address(slice.data);
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const SlicePlaces<paged>& row = places.rows[h];
      const T* const from = data + row.offset(page_stride, row_stride);
      const i32 columns = row.exists() ? head_dim - chunk * Slice::chunk_elements : 0;
#pragma unroll
      for (i32 i = 0; i < ceil_div(Slice::chunks, kLanesOfRow); ++i) {
        const i32 left = Slice::chunks - i * kLanesOfRow;
        if (left >= kLanesOfRow || chunk < left)
          copy_chunk_async<T, access_bytes>(start + place.template offset<true>(8 * h, i * kLanesOfRow),
                                            from + i * step, columns - i * step);
      }
    }
  }
};

}  // namespace flashgen
