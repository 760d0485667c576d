// The boxes by which TMA copies a tile of keys or values from a cache.
#pragma once
#include "flashgen/cache.cuh"
#include "flashgen/product.cuh"

namespace flashgen {

// The rows of a TMA box in a paged cache: the largest power of two that divides both the page size and the
// tile. So no box crosses a page boundary.
template <i32 tile_rows>
FLASHGEN_DEVICE i32 page_box_rows(i32 page_size) {
  return smaller(page_size & -page_size, tile_rows & -tile_rows);
}

// Where a box comes from and goes: its first row in the tile, its page, and its first row in the page.
// Without pages, `page` is the row of a contiguous cache.
struct BoxCoordinates {
  i32 tile_row;
  i32 page;
  i32 page_row;
};

// How tiles of keys are cut into boxes. Where keys lie in pages, a box is a part of one.
template <i32 tile, bool paged>
struct KeyBoxes {
  static_assert(paged || (tile & (tile - 1)) == 0, "without pages a tile is one box");

  // A box has 1 << shift rows. `existing` are the boxes that hold a readable key; without pages it is unused.
  i32 shift;
  Range existing;

  // `keys` are those that may be read.
  template <class Params>
  FLASHGEN_DEVICE static KeyBoxes of(const Params& p, Range keys) {
    if constexpr (paged) {
      const i32 shift = lowest_bit(static_cast<u32>(page_box_rows<tile>(p.page_size)));
      return {shift, {keys.begin >> shift, keys.size() > 0 ? (keys.end - 1 >> shift) + 1 : 0}};
    } else {
      return {lowest_bit(static_cast<u32>(tile)), keys};
    }
  }
  FLASHGEN_DEVICE i32 count() const { return tile >> shift; }

  // Box `index` of the tile from `first_key` on. Reads the table of pages.
  template <class Params>
  FLASHGEN_DEVICE BoxCoordinates at(const Params& p, const CachedSequence& rows, i32 first_key,
                                    i32 index) const {
    if constexpr (paged) {
      // Boxes outside the readable range become the nearest readable one. Masks forbid their keys.
      const i32 box = (first_key >> shift) + index;
      const i32 key = larger(existing.begin, smaller(box, existing.end - 1)) << shift;
      const i32 page = key / p.page_size;
      const i32 number = existing.size() > 0 ? p.block_table[rows.row * p.table_row + page] : 0;
      return {index << shift, number, key - page * p.page_size};
    } else {
      return {0, static_cast<i32>(rows.row), rows.first_key + first_key};
    }
  }
};

}  // namespace flashgen
