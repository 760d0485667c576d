// New keys and values of an 8-bit cache: they are divided by a scale, and rounded.
#pragma once
#include "flashgen/cache.cuh"
#include "flashgen/eight_bits.cuh"

namespace flashgen {

template <class Stored, class T>
FLASHGEN_DEVICE void put(Stored& to, T x, float scale) {
  to = quantized<Stored>(to_float(x) / scale);
}

// The scale of a new row: that of its head, or of the page that it comes into.
struct HeadScale {
  float scale;

  FLASHGEN_DEVICE static HeadScale of(const float* scales, i64 row, i64 head, Place place) {
    return {scales == nullptr ? 1.0f : scales[place.sequence * row + place.head * head]};
  }
  FLASHGEN_DEVICE float at(i32 /*row*/) const { return scale; }
};
struct PageScale {
  PagedRows<const float> pages;

  FLASHGEN_DEVICE float at(i32 row) const { return *pages.at(row, 0); }
};

}  // namespace flashgen
