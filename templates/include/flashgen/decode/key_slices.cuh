// Bringing keys and values to shared memory. Each warp copies its slice of a tile: some keys, and their
// values.
#pragma once
#include "flashgen/decode/rows.cuh"

namespace flashgen {

// Where a key of a slice lies.
template <bool paged>
struct alignas(8) KeyLocation {
  // The page (without pages: 0), and the key's row in it. A negative page stands for a key that does not
  // exist: it is never read, nor is its entry of the page table.
  i32 page;
  i32 row;

  template <class Params>
  FLASHGEN_DEVICE static KeyLocation of(const Params& p, const CachedSequence& cached, Range keys, i32 key) {
    const i32 place = cached.first_key + key;
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
    // Not negative: 64 bits then need no sign.
    const u32 own_page = static_cast<u32>(larger(page, 0)), own_row = static_cast<u32>(row);
    return paged ? own_page * page_stride + own_row * row_stride : own_row * row_stride;
  }
  // The location that another lane knows.
  FLASHGEN_DEVICE KeyLocation of_lane(i32 lane) const { return {shuffle(page, lane), shuffle(row, lane)}; }
};

// The pages of a sequence. What the loop over keys needs of them is in registers, and a multiplication takes
// the place of divisions by the keys of a page.
struct SequencePages {
  const i32* table;
  i32 first_key;
  u32 page_keys;
  u32 inverse;

  // Without pages there is nothing to know.
  template <bool paged, class Params>
  FLASHGEN_DEVICE static SequencePages of(const Params& p, const CachedSequence& cached) {
    if constexpr (paged) {
      const u32 keys = static_cast<u32>(p.page_size);
      return {p.block_table + cached.row * p.table_row, cached.first_key, keys, 0xffffffffu / keys};
    } else {
      return {};
    }
  }

  // Which page of the sequence a key lies in, and which row there.
  FLASHGEN_DEVICE KeyLocation<true> index_of(i32 key) const {
    const u32 place = static_cast<u32>(first_key + key);
    // The page, or the one before it: the inverse is rounded down.
    const u32 page = static_cast<u32>(static_cast<u64>(place) * inverse >> 32),
              row = place - page * page_keys;
    const bool is_next = row >= page_keys;
    return {static_cast<i32>(is_next ? page + 1 : page), static_cast<i32>(is_next ? row - page_keys : row)};
  }
};

// Where the keys of a later slice lie, in shared memory. Page numbers arrive by asynchronous copies, as keys
// do. A plain load would stall the warp: ptxas waits for outstanding loads before a loop whose trip count it
// does not know, such as the loop over slices.
struct RequestedLocations {
  KeyLocation<true>* locations;

  // Starts the copies of page numbers, one for each key. `keys`: those that exist.
  template <i32 slice_keys>
  FLASHGEN_DEVICE void request(const SequencePages& pages, Range keys, i32 first_key, Thread thread) const {
    static_assert(slice_keys <= kWarpSize, "a lane requests one location");
    const i32 key = first_key + thread.lane;
    if (thread.lane >= slice_keys) return;
    KeyLocation<true>& location = locations[thread.lane];
    if (!keys.has(key)) {
      location = {-1, 0};
      return;
    }
    const KeyLocation<true> index = pages.index_of(key);
    location.row = index.row;
    cp_async_4(shared_address(&location.page), pages.table + index.page, static_cast<u32>(sizeof(i32)));
  }
};

// Which rows of a slice a lane copies. Lanes that share a row copy neighboring chunks of it: four make whole
// sectors of memory, and eight a line. Sharing rows also leaves each lane few addresses.
template <i32 slice_rows, i32 lanes = 4>
struct LaneShare {
  static constexpr i32 lanes_of_row = larger(lanes, kWarpSize / slice_rows);
  // The lane's rows lie this far apart.
  static constexpr i32 row_step = kWarpSize / lanes_of_row;
  static constexpr i32 rows = slice_rows / row_step;
  static_assert(rows * row_step == slice_rows, "all lanes copy as many rows");
};

// Where the lane's rows lie.
template <bool paged, class Share>
struct LaneLocations {
  KeyLocation<paged> rows[Share::rows];

  // Each lane knows the location of one key of the slice.
  FLASHGEN_DEVICE static LaneLocations of(const KeyLocation<paged>& own, Thread thread) {
    const i32 row = thread.lane / Share::lanes_of_row;
    LaneLocations found;
#pragma unroll
    for (i32 h = 0; h < Share::rows; ++h) found.rows[h] = own.of_lane(row + h * Share::row_step);
    return found;
  }
  // Without pages, where nothing is to be looked up. `keys`: those that exist.
  template <class Params>
  FLASHGEN_DEVICE static LaneLocations of(const Params& p, const CachedSequence& cached, Range keys,
                                          i32 first_key, Thread thread) {
    static_assert(!paged, "page numbers are requested ahead");
    const i32 first = first_key + thread.lane / Share::lanes_of_row;
    LaneLocations found;
#pragma unroll
    for (i32 h = 0; h < Share::rows; ++h)
      found.rows[h] = KeyLocation<paged>::of(p, cached, keys, first + h * Share::row_step);
    return found;
  }
  // Of locations whose page numbers have arrived.
  FLASHGEN_DEVICE static LaneLocations of(const RequestedLocations& requested, Thread thread) {
    const i32 row = thread.lane / Share::lanes_of_row;
    LaneLocations found;
#pragma unroll
    for (i32 h = 0; h < Share::rows; ++h) found.rows[h] = requested.locations[row + h * Share::row_step];
    return found;
  }
};

// Copies a slice of rows of one head of K or V into a tile.
template <i32 head_dim, i32 access_bytes, class Tile, class Share>
struct SliceCopies {
  using T = typename Tile::Element;

  // The lane's first chunk of a row, and where it lies in a tile.
  i32 chunk;
  Cursor<Tile> place;
  // That chunk of the row at offset 0.
  const T* data;

  // The slice begins at row `first_row` of the tile.
  FLASHGEN_DEVICE SliceCopies(const T* head, i32 first_row, Thread thread)
      : chunk(thread.lane % Share::lanes_of_row),
        place(0, first_row + thread.lane / Share::lanes_of_row, chunk),
        data(head + chunk * Tile::chunk_elements) {}

  // Starts the copies of a slice. Keys and columns that do not exist arrive as zeros.
  template <bool paged>
  FLASHGEN_DEVICE void start(Tile tile, i64 page_stride, i64 row_stride,
                             const LaneLocations<paged, Share>& locations) const {
    constexpr i32 step = Share::lanes_of_row * Tile::chunk_elements;
    const u32 start = shared_address(tile.data);
#pragma unroll
    for (i32 h = 0; h < Share::rows; ++h) {
      const KeyLocation<paged>& row = locations.rows[h];
      const T* const from = data + row.offset(page_stride, row_stride);
      const i32 columns = row.exists() ? head_dim - chunk * Tile::chunk_elements : 0;
      // Rows that lie less than eight apart are swizzled in different ways.
      const i32 swizzle = Tile::Layout::of_row(h * Share::row_step);
#pragma unroll
      for (i32 i = 0; i < ceil_div(Tile::chunks, Share::lanes_of_row); ++i) {
        const i32 left = Tile::chunks - i * Share::lanes_of_row;
        if (left >= Share::lanes_of_row || chunk < left)
          copy_chunk_async<T, access_bytes>(
              start + place.template offset<true>(h * Share::row_step, i * Share::lanes_of_row ^ swizzle),
              from + i * step, columns - i * step);
      }
    }
  }
};

}  // namespace flashgen
