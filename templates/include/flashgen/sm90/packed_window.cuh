// Boxes of packed rows that end where their sequence ends.
//
// TMA clips a box where a dimension of its tensor ends. But the packed rows of one sequence are followed by
// those of the next. So the TMA map has a window of as many rows as the longest sequence, and a fourth
// dimension that moves the window by single rows. Each sequence uses the window that ends where the sequence
// ends. So TMA clips there: it loads zeros and stores nothing.
#pragma once
#include "flashgen/panel.cuh"

namespace flashgen {

struct PackedWindow {
  // The row of the window where the sequence begins, and the window's coordinate in the fourth dimension.
  i32 offset;
  i32 place;

  // Of the sequence with `rows` rows from `first` on. A window has `longest` rows.
  FLASHGEN_DEVICE static PackedWindow of(i32 first, i32 rows, i32 longest) {
    return {longest - rows, first + rows};
  }
  template <class Panels>
  FLASHGEN_DEVICE void load(Panels panels, const TensorMap& map, u32 barrier, i32 row, i32 head) const {
    panels.load(map, barrier, offset + row, head, place);
  }
  FLASHGEN_DEVICE void store(auto panels, const TensorMap& map, i32 row, i32 head) const {
    panels.store(map, offset + row, head, place);
  }
};

}  // namespace flashgen
