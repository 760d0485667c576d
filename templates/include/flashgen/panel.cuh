// Tiles as TMA writes them and wgmma reads them: panels of 128-byte rows, one panel after
// another, each swizzled by 128 bytes (chunk c of row r lies at c ^ (r % 8)).
#pragma once
#include "flashgen/product.cuh"
#include "flashgen/primitives_sm90.cuh"

namespace flashgen {

constexpr i32 kWarpgroupSize = 128;
constexpr i32 kWarpgroupRows = 64;
constexpr i32 kWarpRows = 16;
constexpr i32 kPanelBytes = 128;
// Eight rows: the period of the swizzle, and the alignment of tiles.
constexpr i32 kSwizzleBytes = 8 * kPanelBytes;

// rows x cols elements of T at `address`; the last panel may be wider than what is left of the columns.
template <class T, i32 rows_, i32 cols_>
struct PanelTile {
  using Element = T;
  static constexpr i32 rows = rows_;
  static constexpr i32 cols = cols_;
  static constexpr i32 panel_cols = kPanelBytes / static_cast<i32>(sizeof(T));
  static constexpr i32 panels = ceil_div(cols, panel_cols);
  // Bytes from one panel to the next. `rows` are those of the whole tile, also for a part of it.
  static constexpr i32 panel_stride = rows * kPanelBytes;
  static constexpr i32 bytes = panels * panel_stride;
  // k-steps of a product along the columns, 32 bytes each, in all and per panel.
  static constexpr i32 steps = cols * static_cast<i32>(sizeof(T)) / 32;
  static constexpr i32 panel_steps = 4;

  u32 address;

  FLASHGEN_DEVICE PanelTile slot(i32 index) const { return {address + static_cast<u32>(index * bytes)}; }
  // The rows from `row` on, a multiple of eight, the swizzle's period.
  FLASHGEN_DEVICE PanelTile from_row(i32 row) const {
    return {address + static_cast<u32>(row * kPanelBytes)};
  }

  // A panel by itself, as an operand whose rows are summed over.
  FLASHGEN_DEVICE PanelTile panel(i32 index) const {
    return {address + static_cast<u32>(index * panel_stride)};
  }

  // The tile's rows from `row` on of one head of one sequence, from column `column` on; `barrier` counts
  // `bytes`.
  FLASHGEN_DEVICE void load(const TensorMap& map, u32 barrier, i32 row, i32 head, i32 sequence,
                            i32 column = 0) const {
#pragma unroll
    for (i32 p = 0; p < panels; ++p)
      tma_load_4d(address + p * panel_stride, &map, barrier, column + p * panel_cols, row, head, sequence);
  }
  // Stores boxes of as many rows as the map has. TMA clips them to the tensor.
  FLASHGEN_DEVICE void store(const TensorMap& map, i32 row, i32 head, i32 sequence) const {
#pragma unroll
    for (i32 p = 0; p < panels; ++p)
      tma_store_4d(&map, address + p * panel_stride, p * panel_cols, row, head, sequence);
  }

  // As an operand whose columns are summed over: step s begins `along_columns(s)` bytes further on.
  FLASHGEN_DEVICE MatrixDescriptor by_columns() const {
    return matrix_descriptor(address, 16, kSwizzleBytes, Swizzle::bytes_128);
  }
  static constexpr u32 along_columns(i32 step) {
    return static_cast<u32>(step / panel_steps * panel_stride + step % panel_steps * 32);
  }
  // As an operand whose rows are summed over, sixteen at a step.
  FLASHGEN_DEVICE MatrixDescriptor by_rows() const {
    return matrix_descriptor(address, panel_stride, kSwizzleBytes, Swizzle::bytes_128);
  }
  static constexpr u32 along_rows(i32 step) { return static_cast<u32>(step * 16 * kPanelBytes); }

  // The 16-byte chunk of a row, for ldmatrix and stmatrix.
  FLASHGEN_DEVICE u32 chunk_at(i32 row, i32 chunk) const {
    return address + static_cast<u32>(chunk / 8 * panel_stride + row * kPanelBytes +
                                      (((chunk % 8) ^ (row % 8)) * kChunkBytes));
  }
  // A lane's address for stmatrix when a warp stores 16 rows from `row` on (a multiple of eight), two chunks
  // of each row at a time: for the first two chunks. chunk_after gives the address 2 n chunks further on. The
  // swizzle is an XOR, so the lane's bit and the bits of n do not interfere. Unsigned, to save instructions.
  FLASHGEN_DEVICE u32 first_chunk(i32 row, Thread thread) const {
    const u32 lane = static_cast<u32>(thread.lane), r = lane % 16;
    return address + static_cast<u32>(row * kPanelBytes) + r * kPanelBytes +
           ((lane / 16 ^ r % 8) * kChunkBytes);
  }
  static constexpr u32 chunk_after(u32 first, i32 n) {
    return (first ^ static_cast<u32>(2 * n % 8 * kChunkBytes)) + static_cast<u32>(n / 4 * panel_stride);
  }
};

// A warpgroup's share of a product with n columns: 64 rows, 16 of them each warp's.
template <i32 n>
using Strip = float[n / 2];
template <i32 n>
using StripBlocks = Accumulator<1, n / 8>;

// The same registers as one row of blocks of 16 x 8.
template <i32 count>
FLASHGEN_DEVICE StripBlocks<2 * count>& blocks_of(float (&strip)[count]) {
  return reinterpret_cast<StripBlocks<2 * count>&>(strip);
}

template <i32 count>
FLASHGEN_DEVICE void clear_strip(float (&strip)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] = 0.0f;
}

// An accumulator rounded to T, in pairs, as the left operand (A in registers) of the next product.
template <i32 n>
using Rounded = u32[n / 16][4];

// Issues sums += A B^T, for 64 rows of A.
template <class A, class B>
FLASHGEN_DEVICE void issue_over_columns(Strip<B::rows>& sums, A a, B b) {
  using T = typename A::Element;
  const MatrixDescriptor left = a.by_columns(), right = b.by_columns();
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < A::steps; ++step) {
    wgmma_ss<T, B::rows>(sums, left.advanced(A::along_columns(step)), right.advanced(B::along_columns(step)),
                         true);
  }
  wgmma_commit();
}

// Issues sums = A^T B, for 64 columns of A and n columns of B, one panel each.
template <i32 n, class A, class B>
FLASHGEN_DEVICE void issue_over_rows(Strip<n>& sums, A a, B b) {
  using T = typename A::Element;
  static_assert(A::rows == B::rows, "rows of one meet rows of the other");
  const MatrixDescriptor left = a.by_rows(), right = b.by_rows();
  wgmma_fence();
  wgmma_ss_first<T, n, Major::mn, Major::mn>(sums, left, right);
#pragma unroll
  for (i32 step = 1; step < A::rows / 16; ++step) {
    wgmma_ss<T, n, Major::mn, Major::mn>(sums, left.advanced(A::along_rows(step)),
                                         right.advanced(B::along_rows(step)), true);
  }
  wgmma_commit();
}

// Issues out += P V, or out = P V unless `kept`, for 64 rows of P in registers.
template <class VTile>
FLASHGEN_DEVICE void issue_output(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities, VTile v,
                                  bool kept = true) {
  using T = typename VTile::Element;
  const MatrixDescriptor right = v.by_rows();
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < VTile::rows / 16; ++step) {
    wgmma_rs<T, VTile::cols, Major::mn>(out, probabilities[step], right.advanced(VTile::along_rows(step)),
                                        step > 0 || kept);
  }
  wgmma_commit();
}

}  // namespace flashgen
