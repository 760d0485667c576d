// Storing a warp's rows from registers.
#pragma once
#include "flashgen/strip.cuh"

namespace flashgen {

// Writes 16 rows of a strip from `row` on, as far as the tensor has them, and `valid` columns of each, a
// multiple of eight. The lanes of a quad exchange their columns, so that each writes 16 bytes at once.
template <i32 valid, class T, i32 columns>
FLASHGEN_DEVICE void write_rows(GlobalRows<T> rows, i32 row, const float (&strip)[columns],
                                const float (&scale)[2], Thread thread) {
  constexpr i32 blocks = columns / 4;  // of eight columns
  static_assert(valid <= 8 * blocks && valid % 8 == 0, "a lane writes eight columns at once");
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 own = row + 8 * h + thread.row();
#pragma unroll
    for (i32 first = 0; first < blocks; first += 4) {
      Vec16 eight;
#pragma unroll
      for (i32 k = 0; k < 4; ++k) {
        const i32 block = smaller(first + k, blocks - 1);
        const float* const o = strip + 4 * block + 2 * h;
        eight.words[k] = pack(T{}, o[0] * scale[h], o[1] * scale[h]);
      }
      transpose_quad(eight.words, thread);
      const i32 column = 8 * (first + thread.lane % 4);
      if (own < rows.row_count && column < valid) *reinterpret_cast<Vec16*>(rows.at(own, column)) = eight;
    }
  }
}

}  // namespace flashgen
