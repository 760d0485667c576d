// The arithmetic of wgmma: 64 rows by up to 256 columns, summed over 32 bytes of K.
#pragma once
#include "wgmma_operands.h"

namespace flashgen::emu {

// The place of a lane's registers 4j + 2h and 4j + 2h + 1: two columns of one row.
inline float* place_of(WarpgroupAccumulators& accumulators, i32 lane, i32 j, i32 h) {
  const i32 row = 16 * (lane / kWarpSize) + lane % kWarpSize / 4 + 8 * h;
  return &accumulators.values[row][8 * j + 2 * (lane % 4)];
}

inline void put_registers(WarpgroupAccumulators& accumulators, i32 lane, const float* d) {
  for (i32 pair = 0; pair < accumulators.columns / 4; ++pair)
    memcpy(place_of(accumulators, lane, pair / 2, pair % 2), d + 2 * pair, 8);
}
inline void get_registers(WarpgroupAccumulators& accumulators, i32 lane, float* d) {
  for (i32 pair = 0; pair < accumulators.columns / 4; ++pair)
    memcpy(d + 2 * pair, place_of(accumulators, lane, pair / 2, pair % 2), 8);
}

struct WarpgroupOperands {
  alignas(32) float a[kWarpgroupRows][kMaxDepth];
  alignas(32) float b[kMaxDepth][kMaxColumns];
};

// The left operand from the lanes' registers: register i of lane 4g + t is row g + 8 (i % 2), 32-bit word
// t + 4 (i / 2).
inline void gather_fragments(const WarpgroupProduct& product, WarpgroupOperands& operands) {
  u32 words[kWarpgroupRows][8];
  for (i32 lane = 0; lane < kWarpgroupSize; ++lane) {
    const i32 row = 16 * (lane / kWarpSize) + lane % kWarpSize / 4;
    for (i32 i = 0; i < 4; ++i) words[row + 8 * (i % 2)][lane % 4 + 4 * (i / 2)] = product.a[lane][i];
  }
  const i32 depth = depth_of(product.form.element);
  for (i32 row = 0; row < kWarpgroupRows; ++row) {
    const auto* bytes = reinterpret_cast<const u8*>(words[row]);
    decode(bytes, product.form.element, operands.a[row]);
    decode(bytes + kChunkBytes, product.form.element, operands.a[row] + depth / 2);
  }
}

// Four rows by 8 * `columns` columns. The loops are unrolled so that the sums stay in registers.
template <i32 columns>
inline void multiply_add_tile(const WarpgroupOperands& operands, WarpgroupAccumulators& accumulators,
                              i32 depth, i32 row, i32 column) {
  Floats sums[4][columns];
#pragma GCC unroll 8
  for (i32 r = 0; r < 4; ++r) memcpy(sums[r], &accumulators.values[row + r][column], sizeof sums[r]);
  for (i32 k = 0; k < depth; ++k) {
    Floats b[columns];
    memcpy(b, &operands.b[k][column], sizeof b);
#pragma GCC unroll 8
    for (i32 r = 0; r < 4; ++r) {
#pragma GCC unroll 8
      for (i32 c = 0; c < columns; ++c) sums[r][c] += operands.a[row + r][k] * b[c];
    }
  }
#pragma GCC unroll 8
  for (i32 r = 0; r < 4; ++r) memcpy(&accumulators.values[row + r][column], sums[r], sizeof sums[r]);
}

// Reads a product's operands in shared memory, and adds the product to its accumulators.
inline void carry_out(const u8* shared, const WarpgroupProduct& product,
                      WarpgroupAccumulators& accumulators) {
  static WarpgroupOperands operands;
  const FlashgenEmuWgmma& form = product.form;
  if (form.a != nullptr) {
    gather_fragments(product, operands);
  } else {
    read_operand(left_operand(form), form.element, shared,
                 [](u32 row, u32 k, float value) { operands.a[row][k] = value; });
  }
  read_operand(right_operand(form), form.element, shared,
               [](u32 column, u32 k, float value) { operands.b[k][column] = value; });
  if (!form.accumulate) memset(accumulators.values, 0, sizeof accumulators.values);
  const i32 depth = depth_of(form.element);
  for (i32 row = 0; row < kWarpgroupRows; row += 4) {
    i32 column = 0;
    for (; column + 16 <= form.columns; column += 16)
      multiply_add_tile<2>(operands, accumulators, depth, row, column);
    if (column < form.columns) multiply_add_tile<1>(operands, accumulators, depth, row, column);
  }
}

}  // namespace flashgen::emu
