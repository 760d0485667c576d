// Boxes of packed rows that end where their sequence ends.
//
// TMA clips a box where a dimension of its tensor ends. But packed rows of one sequence are followed by those
// of the next. So the map of packed rows has as many rows as the longest sequence, a window, and a fourth
// dimension that moves the window from row to row. A sequence lies at the end of its window. What a box would
// load beyond the sequence is 0, and what it would store there is left out.
#pragma once
#include "flashgen/panel.cuh"

namespace flashgen {

struct PackedWindow {
  // What the row of a sequence is in the window, relative to the first one, and where the window is.
  i32 offset;
  i32 place;

  // `longest` rows are a window.
  FLASHGEN_DEVICE static PackedWindow of(i32 first, i32 rows, i32 longest) {
    return {longest - rows, first + rows};
  }
  template <class Panels>
  FLASHGEN_DEVICE void load(Panels panels, const TensorMap& map, u32 barrier, i32 row, i32 head) const {
    panels.load(map, barrier, offset + row, head, place);
  }
  template <class Panels>
  FLASHGEN_DEVICE void store(Panels panels, const TensorMap& map, i32 row, i32 head) const {
    panels.store(map, offset + row, head, place);
  }
};

}  // namespace flashgen
