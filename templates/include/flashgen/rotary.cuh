// Rotary position embedding, and rows of a head copied with it.
#pragma once
#include "flashgen/convert.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

struct AppendConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 rows;
  i32 warps;
};

// Stores an element in a row of the same type, which has no scale. For 8-bit caches see
// append_eight_bits.cuh.
template <class T>
FLASHGEN_DEVICE void put(T& to, T x, float /*scale*/) {
  to = x;
}
struct NoScale {
  FLASHGEN_DEVICE float at(i32 /*row*/) const { return 1.0f; }
};

// Which elements of a head are turned together, and by which angles. Pairs of elements are counted through:
// those that are turned come first, and behind them neighbors that are not.
template <class T>
struct Rotary {
  GlobalRows<const T> cos;
  GlobalRows<const T> sin;
  i32 pairs;
  bool interleaved;

  FLASHGEN_DEVICE i32 first_of(i32 pair) const { return pair < pairs && !interleaved ? pair : 2 * pair; }
  FLASHGEN_DEVICE i32 second_of(i32 pair) const {
    return first_of(pair) + (pair < pairs && !interleaved ? pairs : 1);
  }

  // Copies one pair of a head of `head_dim` elements, turned as its position says.
  template <class Stored>
  FLASHGEN_DEVICE void copy(Stored* to, const T* from, i32 pair, i32 head_dim, i32 position,
                            float scale) const {
    const i32 first = first_of(pair), second = second_of(pair);
    if (pair >= pairs) {
      put(to[first], from[first], scale);
      if (second < head_dim) put(to[second], from[second], scale);
      return;
    }
    const i32 row = larger(0, smaller(position, cos.row_count - 1));
    const float c = to_float(*cos.at(row, pair)), s = to_float(*sin.at(row, pair));
    const float x = to_float(from[first]), y = to_float(from[second]);
    put(to[first], element_from<T>(x * c - y * s), scale);
    put(to[second], element_from<T>(x * s + y * c), scale);
  }
};

}  // namespace flashgen
