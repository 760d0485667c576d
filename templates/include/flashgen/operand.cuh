// Operands of warp-level matrix products: which elements of a tile each lane holds, and how it fetches them.
//
// A product accumulates 16 x 8 blocks. Lane l of a warp holds of such a block, at any precision, rows l/4 and
// l/4 + 8, columns 2(l%4) and 2(l%4) + 1: the accumulator layout of mma.sync.
#pragma once
#include "flashgen/tile.cuh"

namespace flashgen {

FLASHGEN_DEVICE i32 origin_of(auto tile) { return static_cast<i32>(shared_address(tile.data)); }

// Left operand of one step: 16 rows, one step deep.
template <class T>
struct LeftFragment {
  u32 words[4];
};
template <>
struct LeftFragment<float32_t> {
  float values[2][8];
};

// Right operand of one step: one step deep, 8 columns.
template <class T>
struct RightFragment {
  u32 words[2];
};
template <>
struct RightFragment<float32_t> {
  float values[8][2];
};

// ---------------------------------------------------------------------------------------------------------
// Left operand stored row by row: tile[row][depth].
template <class Tile, class T = typename Tile::Element>
struct LeftRows {
  static constexpr bool in_registers = false;
  Cursor<Tile> cursor;

  FLASHGEN_DEVICE LeftRows(Tile tile, i32 first_row, Thread thread)
      : cursor(origin_of(tile), first_row + (thread.lane & 15), thread.lane >> 4) {}
  FLASHGEN_DEVICE void load(LeftFragment<T>& fragment, i32 block, i32 step) const {
    ldmatrix_x4(fragment.words, cursor.template offset<true>(16 * block, 2 * step));
  }
};

template <class Tile>
struct LeftRows<Tile, float32_t> {
  static constexpr bool in_registers = false;
  Tile tile;
  Cursor<Tile> cursor;

  FLASHGEN_DEVICE LeftRows(Tile tile_, i32 first_row, Thread thread)
      : tile(tile_), cursor(0, first_row + thread.row(), 0) {}
  FLASHGEN_DEVICE void load(LeftFragment<float32_t>& fragment, i32 block, i32 step) const {
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const i32 offset = cursor.template offset<true>(16 * block + 8 * half, 2 * step + c);
        const Vec16 chunk = *reinterpret_cast<const Vec16*>(tile.data + offset);
#pragma unroll
        for (i32 i = 0; i < 4; ++i) fragment.values[half][4 * c + i] = float_of(chunk.words[i]);
      }
    }
  }
};

// Left operand stored by columns: tile[depth][row].
template <class Tile, class T = typename Tile::Element>
struct LeftColumns {
  static constexpr bool in_registers = false;
  Cursor<Tile> cursor;

  FLASHGEN_DEVICE LeftColumns(Tile tile, i32 first_row, Thread thread)
      : cursor(origin_of(tile), (thread.lane & 7) + (thread.lane >> 4) * 8,
               first_row / 8 + ((thread.lane >> 3) & 1)) {}
  FLASHGEN_DEVICE void load(LeftFragment<T>& fragment, i32 block, i32 step) const {
    ldmatrix_x4_trans(fragment.words, cursor.template offset<false>(16 * step, 2 * block));
  }
};

template <class Tile>
struct LeftColumns<Tile, float32_t> {
  static constexpr bool in_registers = false;
  Tile tile;
  i32 row;

  FLASHGEN_DEVICE LeftColumns(Tile tile_, i32 first_row, Thread thread)
      : tile(tile_), row(first_row + thread.row()) {}
  FLASHGEN_DEVICE void load(LeftFragment<float32_t>& fragment, i32 block, i32 step) const {
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
#pragma unroll
      for (i32 k = 0; k < 8; ++k)
        fragment.values[half][k] = *tile.element_at(8 * step + k, row + 16 * block + 8 * half);
    }
  }
};

// ---------------------------------------------------------------------------------------------------------
// Right operand stored by columns, i.e. the transpose of a tile: tile[column][depth].
template <class Tile, class T = typename Tile::Element>
struct RightTransposed {
  Cursor<Tile> cursor;

  FLASHGEN_DEVICE RightTransposed(Tile tile, i32 first_column, Thread thread)
      : cursor(origin_of(tile), first_column + (thread.lane & 7) + (thread.lane >> 4) * 8,
               (thread.lane >> 3) & 1) {}
  FLASHGEN_DEVICE void load_pair(RightFragment<T> (&pair)[2], i32 block, i32 step) const {
    u32 words[4];
    ldmatrix_x4(words, cursor.template offset<true>(8 * block, 2 * step));
    pair[0] = {{words[0], words[1]}};
    pair[1] = {{words[2], words[3]}};
  }
  FLASHGEN_DEVICE void load_one(RightFragment<T>& fragment, i32 block, i32 step) const {
    ldmatrix_x2(fragment.words, cursor.template offset<true>(8 * block, 2 * step));
  }
};

template <class Tile>
struct RightTransposed<Tile, float32_t> {
  Tile tile;
  i32 column;

  FLASHGEN_DEVICE RightTransposed(Tile tile_, i32 first_column, Thread thread)
      : tile(tile_), column(first_column + thread.column()) {}
  FLASHGEN_DEVICE void load_one(RightFragment<float32_t>& fragment, i32 block, i32 step) const {
#pragma unroll
    for (i32 n = 0; n < 2; ++n) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const Vec16 chunk = tile.vector_at(column + 8 * block + n, 2 * step + c);
#pragma unroll
        for (i32 i = 0; i < 4; ++i) fragment.values[4 * c + i][n] = float_of(chunk.words[i]);
      }
    }
  }
  FLASHGEN_DEVICE void load_pair(RightFragment<float32_t> (&pair)[2], i32 block, i32 step) const {
    load_one(pair[0], block, step);
    load_one(pair[1], block + 1, step);
  }
};

// Right operand stored row by row: tile[depth][column]. `aligned`: first_column is 0 or a multiple of a power
// of two that no column step of the warp reaches.
template <class Tile, bool aligned, class T = typename Tile::Element>
struct RightRows {
  Cursor<Tile> cursor;

  FLASHGEN_DEVICE RightRows(Tile tile, i32 first_column, Thread thread)
      : cursor(origin_of(tile), thread.lane & 15, first_column / 8 + (thread.lane >> 4)) {}
  FLASHGEN_DEVICE void load_pair(RightFragment<T> (&pair)[2], i32 block, i32 step) const {
    u32 words[4];
    ldmatrix_x4_trans(words, cursor.template offset<aligned>(16 * step, block));
    pair[0] = {{words[0], words[1]}};
    pair[1] = {{words[2], words[3]}};
  }
  FLASHGEN_DEVICE void load_one(RightFragment<T>& fragment, i32 block, i32 step) const {
    ldmatrix_x2_trans(fragment.words, cursor.template offset<aligned>(16 * step, block));
  }
};

template <class Tile, bool aligned>
struct RightRows<Tile, aligned, float32_t> {
  struct alignas(8) Two {
    float values[2];
  };
  Tile tile;
  i32 column;

  FLASHGEN_DEVICE RightRows(Tile tile_, i32 first_column, Thread thread)
      : tile(tile_), column(first_column + thread.column()) {}
  FLASHGEN_DEVICE void load_one(RightFragment<float32_t>& fragment, i32 block, i32 step) const {
#pragma unroll
    for (i32 k = 0; k < 8; ++k) {
      const Two two = *reinterpret_cast<const Two*>(tile.element_at(8 * step + k, column + 8 * block));
      fragment.values[k][0] = two.values[0];
      fragment.values[k][1] = two.values[1];
    }
  }
  FLASHGEN_DEVICE void load_pair(RightFragment<float32_t> (&pair)[2], i32 block, i32 step) const {
    load_one(pair[0], block, step);
    load_one(pair[1], block + 1, step);
  }
};

// ---------------------------------------------------------------------------------------------------------
// Left operand made from accumulators: the columns of one product are the depth of the next.
template <class T, i32 row_blocks, i32 column_blocks>
struct LeftRegisters {
  static constexpr bool in_registers = true;
  static_assert(column_blocks % 2 == 0, "two blocks of eight columns make one step of sixteen");
  LeftFragment<T> fragments[row_blocks][column_blocks / 2];

  FLASHGEN_DEVICE LeftRegisters(const float (&values)[row_blocks][column_blocks][4], Thread) {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
        fragments[m][n / 2].words[2 * (n % 2)] = pack(T{}, values[m][n][0], values[m][n][1]);
        fragments[m][n / 2].words[2 * (n % 2) + 1] = pack(T{}, values[m][n][2], values[m][n][3]);
      }
    }
  }
  FLASHGEN_DEVICE void load(LeftFragment<T>& fragment, i32 block, i32 step) const {
    fragment = fragments[block][step];
  }
};

template <i32 row_blocks, i32 column_blocks>
struct LeftRegisters<float32_t, row_blocks, column_blocks> {
  static constexpr bool in_registers = true;
  const float (&values)[row_blocks][column_blocks][4];
  i32 first_lane;

  FLASHGEN_DEVICE LeftRegisters(const float (&values_)[row_blocks][column_blocks][4], Thread thread)
      : values(values_), first_lane(thread.lane & ~3) {}
  FLASHGEN_DEVICE void load(LeftFragment<float32_t>& fragment, i32 block, i32 step) const {
    // Column k of a block is held by lane k/2 of each group of four.
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
#pragma unroll
      for (i32 k = 0; k < 8; ++k)
        fragment.values[half][k] = shuffle(values[block][step][2 * half + k % 2], first_lane + k / 2);
    }
  }
};

// A left operand fetched once and held in registers, for a tile that every product uses.
template <class T, i32 row_blocks, i32 steps>
struct LeftHeld {
  static constexpr bool in_registers = true;
  LeftFragment<T> fragments[row_blocks][steps];

  FLASHGEN_DEVICE void take(const auto& left) {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 step = 0; step < steps; ++step) left.load(fragments[m][step], m, step);
    }
  }
  FLASHGEN_DEVICE void load(LeftFragment<T>& fragment, i32 block, i32 step) const {
    fragment = fragments[block][step];
  }
};

}  // namespace flashgen
