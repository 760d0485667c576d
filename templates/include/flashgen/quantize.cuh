// 16-bit rows of a head to e4m3, one block of rows at a time: rotated, divided by a shared scale, rounded.
#pragma once
#include "flashgen/eight_bits.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

struct QuantizeConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 block;
  i32 warps;
};

// A thread holds so many neighboring elements of the block.
constexpr i32 kSegment = 64;
constexpr float kLargestE4m3 = 448.0f;
// A block of smaller numbers has the scale of this one, so that its inverse is finite.
constexpr float kLeastMaximum = 0x1p-100f;

// So many elements of a head are rotated together: the largest power of two that divides it.
constexpr i32 rotated_together(i32 head_dim) { return head_dim & -head_dim; }

// 1 / sqrt(n) of a power of two.
constexpr float inverse_root(i32 n) {
  float root = 1.0f;
  for (; n >= 4; n /= 4) root *= 0.5f;
  return n == 2 ? root * 0x1.6a09e6p-1f : root;
}

// The signs that a rotation begins with, of eight neighboring columns: bit i is set where column i changes
// its sign. Without them a row of equal elements would become one outlier.
FLASHGEN_DEVICE u32 rotation_signs(i32 chunk) { return 0x9e3779b1u * static_cast<u32>(chunk + 1) >> 24; }

// The smallest value of all threads, or NaN if there is one. `scratch` has a float for each warp.
template <i32 warps>
FLASHGEN_DEVICE float block_minimum(float value, float* scratch, Thread thread) {
#pragma unroll
  for (i32 apart = kWarpSize / 2; apart > 0; apart /= 2) {
    value = minimum_or_nan(value, shuffle_xor(value, apart));
  }
  if (thread.lane == 0) scratch[thread.warp] = value;
  block_sync();
  float least = scratch[0];
#pragma unroll
  for (i32 warp = 1; warp < warps; ++warp) least = minimum_or_nan(least, scratch[warp]);
  return least;
}

// A block of rows, shared among the threads: each has one segment of `kSegment` elements in registers. Lanes
// that hold parts of the same group are `lanes_apart` apart, so that eight neighboring lanes read different
// rows, which lie in different banks.
template <class T, i32 head_dim, i32 block, i32 warps>
struct RowBlock {
  using Tile = SharedTile<T, block, head_dim>;
  static constexpr i32 threads = warps * kWarpSize;
  static constexpr i32 group = rotated_together(head_dim);
  static constexpr i32 parts = larger(group / kSegment, 1);
  static constexpr i32 lanes_apart = kWarpSize / parts;
  static constexpr i32 segments = block * head_dim / kSegment;
  static constexpr i32 segment_chunks = kSegment / Tile::chunk_elements;
  static_assert(head_dim % 16 == 0, "rows of codes are whole 16-byte chunks");
  static_assert(segments <= threads, "each thread has at most one segment");

  float x[kSegment];

  FLASHGEN_DEVICE static i32 segment(Thread thread) {
    return (thread.warp * lanes_apart + thread.lane % lanes_apart) * parts + thread.lane / lanes_apart;
  }

  // Brings the rows into shared memory. Those that do not exist become zeros.
  FLASHGEN_DEVICE static void load(Tile tile, GlobalRows<const T> rows, bool is_aligned, Thread thread) {
    if (is_aligned) {
#pragma unroll 4
      for (i32 i = thread.index(); i < block * Tile::chunks; i += threads) {
        const i32 row = i / Tile::chunks, chunk = i % Tile::chunks;
        const T* const from = rows.at(row, chunk * Tile::chunk_elements);
        const i32 valid = row < rows.row_count ? Tile::chunk_elements : 0;
        copy_chunk_async<T, kChunkBytes>(shared_address(tile.chunk_at(row, chunk)), from, valid);
      }
      commit_copies<true>();
      wait_for_copies<true, 0>();
    } else {
#pragma unroll 1
      for (i32 i = thread.index(); i < block * Tile::chunks; i += threads) {
        const i32 row = i / Tile::chunks, chunk = i % Tile::chunks;
        const T* const from = rows.at(row, chunk * Tile::chunk_elements);
        const i32 valid = row < rows.row_count ? Tile::chunk_elements : 0;
        tile.vector_at(row, chunk) = read_chunk<T, sizeof(T)>(from, valid);
      }
    }
  }

  FLASHGEN_DEVICE void read(Tile tile, bool rotates, Thread thread) {
    const i32 first = segment(thread) * segment_chunks;
    const bool exists = segment(thread) < segments;
#pragma unroll
    for (i32 j = 0; j < segment_chunks; ++j) {
      const i32 row = (first + j) / Tile::chunks, chunk = (first + j) % Tile::chunks;
      Vec16 words = {.words = {0, 0, 0, 0}};
      if (exists) words = tile.vector_at(row, chunk);
      const u32 signs = rotates ? rotation_signs(chunk) : 0;
#pragma unroll
      for (i32 i = 0; i < Tile::chunk_elements; ++i) {
        const T element{static_cast<u16>(words.words[i / 2] >> (16 * (i % 2)))};
        x[j * Tile::chunk_elements + i] =
            float_of(bits_of(to_float(element)) ^ (signs << (31 - i) & 0x80000000u));
      }
    }
  }

  // The Hadamard transform of each group, sqrt(group) times too large. Differences are taken between
  // elements 1 apart, then 2, 4 ..., the largest ones between lanes.
  FLASHGEN_DEVICE void rotate(Thread thread) {
#pragma unroll
    for (i32 apart = 1; apart < smaller(group, kSegment); apart *= 2) {
#pragma unroll
      for (i32 i = 0; i < kSegment; ++i) {
        if ((i & apart) != 0) continue;
        const float a = x[i], b = x[i + apart];
        x[i] = a + b;
        x[i + apart] = a - b;
      }
    }
#pragma unroll
    for (i32 apart = lanes_apart; apart < kWarpSize; apart *= 2) {
      const float sign = (thread.lane & apart) == 0 ? 1.0f : -1.0f;
#pragma unroll
      for (i32 i = 0; i < kSegment; ++i) x[i] = fused_multiply_add(x[i], sign, shuffle_xor(x[i], apart));
    }
  }

  // The negative of the largest magnitude; minus infinity or NaN if an element is not finite.
  FLASHGEN_DEVICE float bound() const {
    float least = 0.0f;
#pragma unroll
    for (i32 i = 0; i < kSegment; ++i) least = minimum_or_nan(least, negative(x[i]));
    return least;
  }

  // The same of the finite elements alone.
  FLASHGEN_DEVICE float bound_of_finite() const {
    float least = 0.0f;
#pragma unroll
    for (i32 i = 0; i < kSegment; ++i) {
      if (negative(x[i]) > -kInfinity) least = minimum_or_nan(least, negative(x[i]));
    }
    return least;
  }

  // The codes of x times a factor. They take the place of the tile. e4m3 has no infinity: it becomes NaN.
  template <bool all_finite>
  FLASHGEN_DEVICE void round(u8* codes, float factor, Thread thread) const {
    const auto number = [&](i32 i) {
      const float y = x[i] * factor;
      return all_finite ? y : y + (y - y);
    };
    if (segment(thread) >= segments) return;
#pragma unroll
    for (i32 j = 0; j < kSegment / kChunkBytes; ++j) {
      Vec16 chunk;
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 k = j * kChunkBytes + 4 * i;
        chunk.words[i] = pack_four(e4m3_t{}, number(k), number(k + 1), number(k + 2), number(k + 3));
      }
      code_chunk(codes, segment(thread) * (kSegment / kChunkBytes) + j) = chunk;
    }
  }

  FLASHGEN_DEVICE static void store(const u8* codes, GlobalRows<e4m3_t> to, Thread thread) {
    constexpr i32 chunks = head_dim / kChunkBytes;
    const i32 count = smaller(block, to.row_count) * chunks;
#pragma unroll 4
    for (i32 i = thread.index(); i < count; i += threads) {
      *reinterpret_cast<Vec16*>(to.at(i / chunks, i % chunks * kChunkBytes)) = code_chunk(codes, i);
    }
  }

 private:
  FLASHGEN_DEVICE static float negative(float value) { return float_of(bits_of(value) | 0x80000000u); }

  // Chunks of codes are swizzled so that neighboring segments of four lie in different banks.
  template <class Byte>
  FLASHGEN_DEVICE static auto& code_chunk(Byte* codes, i32 i) {
    const i32 place = (i & ~3) | ((i ^ (i >> 3)) & 3);
    if constexpr (requires(Byte byte) { *codes = byte; }) {
      return *reinterpret_cast<Vec16*>(codes + place * kChunkBytes);
    } else {
      return *reinterpret_cast<const Vec16*>(codes + place * kChunkBytes);
    }
  }
};

// Shared memory: room for a block of rows, and two floats for each warp.
struct Scratch {
  u8* rows;
  float* bounds;
};

// Quantizes one block of rows. `rows` and `codes` begin with it.
template <QuantizeConfig config, i32 head_dim, class T>
FLASHGEN_DEVICE void quantize_block(GlobalRows<const T> rows, GlobalRows<e4m3_t> codes, float* scale,
                                    bool rotates, bool is_aligned, Scratch scratch, Thread thread) {
  using Rows = RowBlock<T, head_dim, config.block, config.warps>;
  const typename Rows::Tile tile{scratch.rows};
  Rows::load(tile, rows, is_aligned, thread);
  block_sync();

  Rows held;
  held.read(tile, rotates, thread);
  if (rotates) held.rotate(thread);

  float bound = block_minimum<config.warps>(held.bound(), scratch.bounds, thread);
  const bool all_finite = bound > -kInfinity;
  if (!all_finite) {
    bound = block_minimum<config.warps>(held.bound_of_finite(), scratch.bounds + config.warps, thread);
  }
  const float largest = maximum(-bound, kLeastMaximum), factor = kLargestE4m3 / largest;
  if (all_finite) {
    held.template round<true>(scratch.rows, factor, thread);
  } else {
    held.template round<false>(scratch.rows, factor, thread);
  }
  if (thread.index() == 0) {
    *scale = largest * (rotates ? inverse_root(Rows::group) : 1.0f) / kLargestE4m3;
  }
  block_sync();
  Rows::store(scratch.rows, codes, thread);
}

}  // namespace flashgen
