// What the forward kernel needs for 8-bit queries, keys and values: operands, scales, and O of another type.
#pragma once
#include "flashgen/forward.cuh"
#include "flashgen/scales.cuh"
#include "flashgen/primitives_eight_bits.cuh"
#include "flashgen/sequence.cuh"

namespace flashgen {

// Exponentials of a row's largest score become 2^8, as far from the smallest e4m3 numbers as the largest one
// allows, so that more of the small ones are normal.
template <class Logits>
struct EightBitRange : Logits {
  static constexpr float kHeadroom = 8.0f;
};

template <bool turing>
FLASHGEN_DEVICE void multiply_block(float (&d)[4], const LeftFragment<e4m3_t>& a,
                                    const RightFragment<e4m3_t>& b) {
  mma_m16n8k32_batched(e4m3_t{}, d, a.words, b.words);
}

// Left operand made from accumulators. A lane packs numbers of its own: place 4t + 2b + e of sixteen is key
// 8b + 2t + e. The rows of the right operand change places likewise.
template <i32 row_blocks, i32 column_blocks>
struct LeftRegisters<e4m3_t, row_blocks, column_blocks> {
  static constexpr bool in_registers = true;
  static_assert(column_blocks % 4 == 0, "four blocks of eight columns make one step of 32");
  LeftFragment<e4m3_t> fragments[row_blocks][column_blocks / 4];

  FLASHGEN_DEVICE LeftRegisters(const float (&values)[row_blocks][column_blocks][4], Thread) {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 n = 0; n < column_blocks; n += 2) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          fragments[m][n / 4].words[n % 4 + h] =
              pack_four(e4m3_t{}, values[m][n][2 * h], values[m][n][2 * h + 1], values[m][n + 1][2 * h],
                        values[m][n + 1][2 * h + 1]);
        }
      }
    }
  }
  FLASHGEN_DEVICE void load(LeftFragment<e4m3_t>& fragment, i32 block, i32 step) const {
    fragment = fragments[block][step];
  }
};

// Right operand stored row by row. ldmatrix transposes pairs of bytes: a lane gets two neighboring columns of
// four rows, in two words. A pair of blocks is the even and the odd columns of sixteen.
template <class Tile, bool aligned>
struct RightRows<Tile, aligned, e4m3_t> {
  Cursor<Tile> cursor;

  FLASHGEN_DEVICE RightRows(Tile tile, i32 first_column, Thread thread)
      : cursor(origin_of(tile), thread.lane, first_column / 16) {}
  FLASHGEN_DEVICE void load_pair(RightFragment<e4m3_t> (&pair)[2], i32 block, i32 step) const {
    u32 words[4];
    ldmatrix_x4_trans(words, cursor.template offset<aligned>(32 * step, block / 2));
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      pair[0].words[i] = select_bytes(words[2 * i], words[2 * i + 1], 0x6420);
      pair[1].words[i] = select_bytes(words[2 * i], words[2 * i + 1], 0x7531);
    }
  }
};

// sum += factor * left * right. 8-bit products are accumulated with few bits. So the product of each tile is
// a sum of its own, which is added to those of the other tiles in float32.
template <class T, i32 steps, class Left, class Right, i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void add_product(Accumulator<row_blocks, column_blocks>& sum, const Left& left,
                                 const Right& right, float factor) {
#pragma unroll
  for (i32 n = 0; n < column_blocks; n += 2) {
    Accumulator<row_blocks, 2> product;
    clear(product);
#pragma unroll
    for (i32 step = 0; step < steps; ++step) {
      RightFragment<T> b[2];
      right.load_pair(b, n, step);
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) {
        LeftFragment<T> a;
        left.load(a, m, step);
        multiply_block<false>(product[m][0], a, b[0]);
        multiply_block<false>(product[m][1], a, b[1]);
      }
    }
    mma_finish();
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
#pragma unroll
        for (i32 e = 0; e < 4; ++e)
          sum[m][n + i][e] = fused_multiply_add(product[m][i][e], factor, sum[m][n + i][e]);
      }
    }
  }
}

// Rounds accumulators into a tile. Pairs of their blocks hold the even and the odd columns of sixteen.
template <class Tile, i32 row_blocks, i32 column_blocks, class Factor>
FLASHGEN_DEVICE void store_even_and_odd(Tile tile, i32 first_row,
                                        const float (&values)[row_blocks][column_blocks][4], Thread thread,
                                        const Factor& factor) {
  using Two = Pair<typename Tile::Element>;
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float scale = factor(m, h);
      const i32 row = first_row + 16 * m + 8 * h + thread.row();
#pragma unroll
      for (i32 n = 0; n < column_blocks; n += 2) {
        Two* const to = reinterpret_cast<Two*>(tile.element_at(row, 8 * n + 2 * thread.column()));
#pragma unroll
        for (i32 i = 0; i < 2; ++i)
          to[i] = Two::from(values[m][n][2 * h + i] * scale, values[m][n + 1][2 * h + i] * scale);
      }
    }
  }
}

// What the rows of a head are multiplied by: `block` neighboring rows share a number, or with 0 all of them.
template <i32 block>
struct RowScales {
  const float* scales;  // null: 1

  FLASHGEN_DEVICE explicit RowScales(const float* scales_) : scales(scales_) {}
  FLASHGEN_DEVICE float at(i32 row) const { return input_scale(scales, row / block); }
};
template <>
struct RowScales<0> {
  float scale;

  FLASHGEN_DEVICE explicit RowScales(const float* scales) : scale(input_scale(scales, 0)) {}
  FLASHGEN_DEVICE float at(i32 /*row*/) const { return scale; }
};

// Those of the queries, keys and values of one head.
template <i32 block>
struct OperandScales {
  RowScales<block> q, k, v;

  // `first_q`, `first_key`: the blocks with the first rows.
  template <class Params>
  FLASHGEN_DEVICE static OperandScales of(const Params& p, Place place, i32 head_kv, i32 first_q = 0,
                                          i32 first_key = 0) {
    return {of_head(p.q_scale, place.sequence * p.q_scale_batch + place.head * p.q_scale_head + first_q),
            of_head(p.k_scale, place.sequence * p.k_scale_batch + head_kv * p.k_scale_head + first_key),
            of_head(p.v_scale, place.sequence * p.v_scale_batch + head_kv * p.v_scale_head + first_key)};
  }
  // Packed sequences begin blocks of their own.
  template <class Params>
  FLASHGEN_DEVICE static OperandScales of(const Params& p, Place place, i32 head_kv,
                                          const PackedSequence& packed) {
    if constexpr (block == 0) {
      return of(p, place, head_kv);
    } else {
      return of(p, place, head_kv, first_tile_of(packed.first_q, place.sequence, block),
                first_tile_of(packed.first_key, place.sequence, block));
    }
  }

  // The factor of products of queries and keys whose first rows these are.
  FLASHGEN_DEVICE float of_logits(i32 row, i32 key) const { return logit_factor(q.at(row), k.at(key)); }

 private:
  FLASHGEN_DEVICE static RowScales<block> of_head(const float* scales, i64 offset) {
    return RowScales<block>(scales == nullptr ? nullptr : scales + offset);
  }
};

}  // namespace flashgen
