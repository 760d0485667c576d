// O += P V for e4m3 values: a Values policy of the mainloop.
//
// wgmma takes 8-bit operands only if the summed dimension is contiguous, so V is needed as V^T. Two warps of
// the first warpgroup transpose each block (transposer_warps.cuh). Within each group of sixteen keys they
// write key 8b + 2t + e to place 4t + 2b + e, for b, e < 2 and t < 4. Lane t of a row then has the
// probabilities of its places in registers of its own, so that packing them needs no shuffles.
//
// The tensor cores accumulate 8-bit products with about 14 bits. So the product of each block is a sum of its
// own, which is added to O in float32 and there multiplied by the block's scale. Where the registers do not
// suffice for all columns, it is computed in parts, which share accumulators.
//
// `part_columns`: columns of O that one product has. `overlaps`: whether S of the next step is computed
// meanwhile. If not, S and the product share registers.
#pragma once
#include "flashgen/non_finite.cuh"
#include "flashgen/sm90/eight_bit_softmax.cuh"
#include "flashgen/sm90/forward_config.cuh"
#include "flashgen/sm90/transposer_warps.cuh"

namespace flashgen {

template <ForwardSm90Config cfg, class T, i32 part_columns, bool overlaps>
struct EightBitValues {
  static_assert(cfg.tile_kv % 32 == 0, "a step of the product sums over 32 keys");
  static constexpr i32 steps = cfg.tile_kv / 32;
  static constexpr i32 parts = cfg.head_dim_v / part_columns;
  static_assert(cfg.head_dim_v % part_columns == 0, "parts have all columns");

  // V as TMA writes it, and V^T.
  using Loaded = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using Operand = PanelTile<T, cfg.head_dim_v, cfg.tile_kv>;
  static constexpr bool transposes = true;
  static constexpr i32 transposers = kTransposers;
  static_assert(parts == 1 || !overlaps, "the registers do not suffice for O, a part and S");
  static constexpr bool overlaps_steps = overlaps;
  static constexpr bool overlaps_own_products = cfg.consumers == 2;
  // Registers for S, P, a product and O, of the 232 of a thread. Addresses, masks and sums take the others.
  static constexpr i32 kOperandRegisters = 200;
  // Whether P of two steps have registers of their own, beside S, a product and O.
  static constexpr bool has_two_operands =
      overlaps && overlaps_own_products &&
      cfg.tile_kv / 2 + 2 * cfg.tile_kv / 8 + cfg.head_dim_v <= kOperandRegisters;
  // Whether exponentials may be too large to be rounded.
  static constexpr bool has_range = true;
  static constexpr bool takes_turns = false;
  static constexpr bool begins_with_zero = true;

  template <class Logits>
  using Softmax = EightBitSoftmax<cfg.tile_kv, cfg.anchored, Logits>;
  // The left operand: words 2j + h of a step are the keys of its j-th sixteen, for row h of the lane.
  using Probabilities = u32[steps][4];
  using Out = Strip<cfg.head_dim_v>;
  struct Product {
    Strip<part_columns> sums;
  };

  FLASHGEN_DEVICE static void run_transposer(const auto& shared, Thread thread) {
    flashgen::run_transposer(shared, thread);
  }

  // Returns whether some are the largest number, or NaN.
  FLASHGEN_DEVICE static bool round(Probabilities& probabilities, const Strip<cfg.tile_kv>& exponentials) {
    // A byte of at least 0x7e has its highest bit set if 2 is added.
    u32 largest = 0;
#pragma unroll
    for (i32 i = 0; i < 4 * steps; ++i) {
      const float* const low = exponentials + 8 * (i / 2) + 2 * (i % 2);
      const float* const high = low + 4;
      const u32 word = pack_four(T{}, low[0], low[1], high[0], high[1]);
      probabilities[i / 4][i % 4] = word;
      largest |= word + 2 * kBytes;
    }
    return (largest & 0x80u * kBytes) != 0;
  }

  FLASHGEN_DEVICE static void issue(Product& product, Out&, const Probabilities& probabilities, Operand v,
                                    bool /*accumulates*/) {
    issue_part(product, probabilities, v);
  }
  // Call it when the issued product is complete.
  FLASHGEN_DEVICE static void finish(Product& product, Out& out, const Probabilities& probabilities,
                                     Operand v, float factor) {
#pragma unroll
    for (i32 part = 0; part < parts; ++part) {
      if (part > 0) {
        issue_part(product, probabilities, v.from_row(part * part_columns));
        wgmma_wait<0>();
      }
      wgmma_pin(product.sums);
      add_part(product, out, part, factor);
    }
  }

  FLASHGEN_DEVICE static bool holds_non_finite(Operand v, u8* base, Thread thread) {
    constexpr i32 chunks = cfg.tile_kv / kChunkBytes;
    u32 signs = 0;
#pragma unroll 1
    for (i32 i = thread.lane; i < cfg.head_dim_v * chunks; i += kWarpSize) {
      const u32 at = v.chunk_at(i / chunks, i % chunks) - shared_address(base);
      const Vec16 chunk = *reinterpret_cast<const Vec16*>(base + at);
#pragma unroll
      for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<T>(chunk.words[w]);
    }
    return warp_any(signs != 0);
  }

  // out += factor * P V for a warp's 16 rows, as multiply_careful() in careful_product.cuh.
  FLASHGEN_DEVICE static void multiply_careful(Out& out, const Probabilities& probabilities, Operand v,
                                               const u32 (&allowed)[2], float factor, Thread thread) {
    float sums[cfg.head_dim_v / 8][4];
#pragma unroll
    for (i32 i = 0; i < cfg.head_dim_v / 2; ++i) sums[i / 4][i % 4] = out[i];
#pragma unroll 1
    for (i32 n = 0; n < cfg.head_dim_v / 16; ++n) {
      float product[2][4] = {}, reached[2][4] = {};
#pragma unroll
      for (i32 step = 0; step < steps; ++step) {
        // The left operand of a product that counts allowed pairs: four bits become four bytes.
        u32 pairs[4];
#pragma unroll
        for (i32 i = 0; i < 4; ++i)
          pairs[i] = ((allowed[i % 2] >> (8 * step + 4 * (i / 2)) & 15u) * 0x204081u & kBytes) * kOne;
        u32 words[4];
        ldmatrix_x4(words, v.chunk_at(16 * n + thread.lane / 16 * 8 + thread.lane % 8,
                                      2 * step + thread.lane / 8 % 2));
        u32 bad[4];
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
          const u32 lowest_bits = non_finite_signs<T>(words[i]) >> 7;
          words[i] &= ~(lowest_bits * 0xffu);
          bad[i] = lowest_bits * kOne;
        }
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
          const u32 right[2] = {words[2 * half], words[2 * half + 1]};
          mma_m16n8k32(T{}, product[half], probabilities[step], right);
          const u32 bad_right[2] = {bad[2 * half], bad[2 * half + 1]};
          mma_m16n8k32(T{}, reached[half], pairs, bad_right);
        }
      }
#pragma unroll
      for (i32 i = 0; i < 8; ++i) {
        float& sum = sums[2 * n + i / 4][i % 4];
        sum = reached[i / 4][i % 4] > 0.0f ? float_of(0x7fffffffu)
                                           : fused_multiply_add(product[i / 4][i % 4], factor, sum);
      }
    }
#pragma unroll
    for (i32 i = 0; i < cfg.head_dim_v / 2; ++i) out[i] = sums[i / 4][i % 4];
  }

 private:
  static constexpr u32 kBytes = 0x01010101u;
  static constexpr u32 kOne = 0x38u;

  FLASHGEN_DEVICE static void add_part(const Product& product, Out& out, i32 part, float factor) {
#pragma unroll
    for (i32 i = 0; i < part_columns / 2; ++i) {
      float& o = out[part * (part_columns / 2) + i];
      o = fused_multiply_add(product.sums[i], factor, o);
    }
  }

  // Issues P V for some columns of V. `v` is V^T from the row of the first of these columns on.
  FLASHGEN_DEVICE static void issue_part(Product& product, const Probabilities& probabilities, Operand v) {
    const MatrixDescriptor right = v.by_columns();
    const auto b = [&](i32 step) { return right.advanced(Operand::along_columns(step)); };
    wgmma_fence();
    if constexpr (steps == 4) {
      const MatrixDescriptor four_b[4] = {b(0), b(1), b(2), b(3)};
      wgmma_rs_first_four<T, part_columns>(product.sums, probabilities, four_b);
    } else {
      wgmma_rs_first<T, part_columns>(product.sums, probabilities[0], b(0));
#pragma unroll
      for (i32 step = 1; step < steps; ++step)
        wgmma_rs<T, part_columns>(product.sums, probabilities[step], b(step), true);
    }
    wgmma_commit();
  }
};

}  // namespace flashgen
