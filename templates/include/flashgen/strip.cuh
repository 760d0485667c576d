// Writing a warpgroup's results to shared and global memory.
#pragma once
#include "flashgen/panel.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

// Puts a warp's 16 rows of a strip into the tile, from `row` on, multiplied by `scale`: rows row() and
// row() + 8 of the lanes have a factor each.
template <class Tile>
FLASHGEN_DEVICE void store_strip(Tile tile, i32 row, const Strip<Tile::cols>& strip, const float (&scale)[2],
                                 Thread thread) {
  using T = typename Tile::Element;
  const float low = scale[0], high = scale[1];
  const u32 first = tile.first_chunk(row, thread);
#pragma unroll
  for (i32 n = 0; n < Tile::cols / 16; ++n) {
    const float* const o = strip + 8 * n;
    const u32 words[4] = {pack(T{}, o[0] * low, o[1] * low), pack(T{}, o[2] * high, o[3] * high),
                          pack(T{}, o[4] * low, o[5] * low), pack(T{}, o[6] * high, o[7] * high)};
    stmatrix_x4(Tile::chunk_after(first, n), words);
  }
}

// The lanes of a quad hold word k of their own columns in words[k]; afterwards lane q of the quad holds all
// four words of what was everyone's words[q].
FLASHGEN_DEVICE void transpose_quad(u32 (&words)[4], Thread thread) {
#pragma unroll
  for (i32 bit = 1; bit < 4; bit *= 2) {
    const bool upper = thread.lane & bit;
#pragma unroll
    for (i32 pair = 0; pair < 2; ++pair) {
      const i32 i = bit == 1 ? 2 * pair : pair, j = i + bit;
      const u32 sent = upper ? words[i] : words[j];
      const u32 received = bits_of(shuffle_xor(float_of(sent), bit));
      words[i] = upper ? received : words[i];
      words[j] = upper ? words[j] : received;
    }
  }
}

// Writes a warp's 16 rows, from `row` on, to global memory: the first `stored` columns of them.
template <class T, i32 columns, i32 stored>
FLASHGEN_DEVICE void write_strip(GlobalRows<T> rows_of, i32 row, const Strip<columns>& strip,
                                 const float (&scale)[2], Thread thread) {
  static_assert(columns % 32 == 0 && stored % 8 == 0, "a quad of lanes writes 32 columns, each lane 8");
  // As many chunks at a time as registers surely allow.
  constexpr i32 chunks = columns / 32, together = chunks % 4 == 0   ? 4
                                                  : chunks % 3 == 0 ? 3
                                                  : chunks % 2 == 0 ? 2
                                                                    : 1;
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 mine = row + 8 * h + thread.row();
    const i32 own_column = 8 * (thread.lane % 4);
    Vec16* const target = reinterpret_cast<Vec16*>(rows_of.at(mine, own_column));
#pragma unroll
    for (i32 first = 0; first < chunks; first += together) {
      Vec16 made[together];
#pragma unroll
      for (i32 g = 0; g < together; ++g) {
#pragma unroll
        for (i32 k = 0; k < 4; ++k) {
          const float* const o = strip + 4 * (4 * (first + g) + k) + 2 * h;
          made[g].words[k] = pack(T{}, o[0] * scale[h], o[1] * scale[h]);
        }
        transpose_quad(made[g].words, thread);
      }
      if (mine >= rows_of.row_count) continue;
#pragma unroll
      for (i32 g = 0; g < together; ++g) {
        if (stored == columns || own_column + 32 * (first + g) < stored) target[4 * (first + g)] = made[g];
      }
    }
  }
}

}  // namespace flashgen
