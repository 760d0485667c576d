// quantize_d128_e4m3_scales128_sm89: FlashAttention-2, before a forward pass: 16-bit queries, keys and values
// to e4m3, with a scale for each block of rows.
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"e4m3","mask":"full","direction":"forward","deterministic":false,"out_dtype":"bf16","scale_block":128}
// rebuild  flashgen build --head-dim 128 --dtype e4m3 --forward-only --out-dtype bf16 --scale-block 128 --arch sm_89
// for      sm_89 (L4, L40, RTX 40)
// plan     warps 8, 256 threads, registers for 3 blocks per multiprocessor
// grid     one block for every 128 rows of every head of queries, keys and values, and batch entry
// smem     32832 bytes
//
// contents  22  Instructions, one per function: types, device, copy, math.
//          130  Element types.
//          177  Instructions, one per function: eight_bits.
//          200  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//          238  Streaming tiles between global and shared memory.
//          296  16-bit rows of a head to e4m3, one block of rows at a time.
//          525  The kernel: its configuration, parameters and text.

#if defined(FLASHGEN_EMULATOR)
#include "flashgen/emu/primitives.h"
#else
// ---- flashgen/ptx/types.cuh
// Integer and element types, without any CUDA header.

namespace flashgen {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using i64 = long long;

struct bfloat16_t {
  u16 bits;
};
// 8-bit floats. After the sign, e4m3 has 4 exponent and 3 mantissa bits; e5m2 has 5 and 2.
struct e4m3_t {
  u8 bits;
};

struct alignas(16) Vec16 {
  u32 words[4];
};

}  // namespace flashgen

// ---- flashgen/ptx/device.cuh
// What the CUDA language itself provides, under names that the emulator implements on the host.

#define FLASHGEN_DEVICE __device__ __forceinline__
#define FLASHGEN_KERNEL(threads, min_blocks) extern "C" __global__ void __launch_bounds__(threads, min_blocks)
#define FLASHGEN_GRID_CONSTANT const __grid_constant__
#define FLASHGEN_SHARED_MEMORY(name) extern __shared__ __align__(1024) flashgen::u8 name[]

namespace flashgen {

FLASHGEN_DEVICE i32 thread_idx() { return static_cast<i32>(threadIdx.x); }
FLASHGEN_DEVICE i32 block_idx_x() { return static_cast<i32>(blockIdx.x); }
FLASHGEN_DEVICE i32 block_idx_y() { return static_cast<i32>(blockIdx.y); }
FLASHGEN_DEVICE i32 block_idx_z() { return static_cast<i32>(blockIdx.z); }
FLASHGEN_DEVICE void block_sync() { __syncthreads(); }
FLASHGEN_DEVICE float shuffle_xor(float value, i32 lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
FLASHGEN_DEVICE float shuffle(float value, i32 source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
}
FLASHGEN_DEVICE i32 shuffle(i32 value, i32 source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
}
FLASHGEN_DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
FLASHGEN_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// The 32-bit address of a pointer into shared memory, as instructions take it.
FLASHGEN_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- flashgen/ptx/copy.cuh
// Moving data: asynchronous global-to-shared copies and reductions to global memory.

// Copies the first `valid_bytes` of 16 (8, 4) bytes and zeroes the rest. Copies of 16 bytes bypass L1.
FLASHGEN_DEVICE void cp_async_16(u32 destination, const void* source, u32 valid_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

FLASHGEN_DEVICE void cp_async_8(u32 destination, const void* source, u32 valid_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

FLASHGEN_DEVICE void cp_async_4(u32 destination, const void* source, u32 valid_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

FLASHGEN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` groups are in flight.
template <int pending>
FLASHGEN_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// ---- flashgen/ptx/math.cuh
// Scalar arithmetic, one instruction each.

// The larger of two. If one is NaN, the result is the other.
FLASHGEN_DEVICE float maximum(float a, float b) {
  float c;
  asm("max.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
// The smaller of two, or NaN if one of them is NaN (sm_80 and later).
FLASHGEN_DEVICE float minimum_or_nan(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
FLASHGEN_DEVICE float fused_multiply_add(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

}  // namespace flashgen
#endif
// ---- flashgen/element.cuh
// Element types: conversions, and how deep one matrix instruction reaches.

namespace flashgen {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr i32 kWarpSize = 32;
// The widest access of a thread, and the unit of swizzles.
constexpr i32 kChunkBytes = 16;

// Who a thread is. The numbers pass through a shuffle: the compiler then knows that `warp` is the same for
// all lanes, and keeps `lane` in a register instead of reading the slow special register again in every loop.
struct Thread {
  i32 lane;
  i32 warp;

  FLASHGEN_DEVICE static Thread current() {
    return {shuffle(thread_idx() % kWarpSize, thread_idx() % kWarpSize),
            shuffle(thread_idx() / kWarpSize, 0)};
  }
  FLASHGEN_DEVICE i32 index() const { return warp * kWarpSize + lane; }
  // The lane's accumulators in a block of 16 x 8 are in rows row() and + 8, and in columns column() and + 1.
  FLASHGEN_DEVICE i32 row() const { return lane / 4; }
};

constexpr i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
constexpr i32 larger(i32 a, i32 b) { return a > b ? a : b; }

// Which tile of which head of which sequence a block works on.
struct Place {
  i32 tile;
  i32 head;
  i32 sequence;

  FLASHGEN_DEVICE static Place current() { return {block_idx_x(), block_idx_y(), block_idx_z()}; }
  // Its number when all tiles of all heads of all sequences are counted through.
  FLASHGEN_DEVICE i64 number(i32 tiles, i32 heads) const {
    return (static_cast<i64>(sequence) * heads + head) * tiles + tile;
  }
};

FLASHGEN_DEVICE float to_float(bfloat16_t x) { return float_of(static_cast<u32>(x.bits) << 16); }
FLASHGEN_DEVICE float to_float(float x) { return x; }

}  // namespace flashgen

#if !defined(FLASHGEN_EMULATOR)
// ---- flashgen/ptx/eight_bits.cuh
// Bytes of words, and conversions of 8-bit floats.

namespace flashgen {

// Four numbers of a word, each the nearest to a float, of two as near the even one. What is too large becomes
// the largest number, and NaN stays NaN (sm_89 and later).
FLASHGEN_DEVICE u32 pack_four(e4m3_t, float a, float b, float c, float d) {
  u32 word;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t"
      "}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

}  // namespace flashgen
#endif

// ---- flashgen/tile.cuh
// Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.

namespace flashgen {

// How rows of `chunks` 16-byte chunks are swizzled: chunk c of row r lies at c ^ ((r >> shift) & mask). Eight
// neighbouring rows then put the same chunk into eight different bank groups, for any even number of chunks.
template <i32 chunks>
struct TileSwizzle {
  static_assert(chunks % 2 == 0, "a tile row must be a whole number of 32-byte pairs of chunks");
  static constexpr i32 span = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;
  static constexpr i32 mask = span - 1;
  static constexpr i32 shift = span == 8 ? 0 : span == 4 ? 1 : 2;
  FLASHGEN_DEVICE static i32 of_row(i32 row) { return (row >> shift) & mask; }
};

// rows_ x cols_ elements of T at `data`, which is 128-byte aligned.
template <class T, i32 rows_, i32 cols_>
struct SharedTile {
  static constexpr i32 rows = rows_;
  static constexpr i32 cols = cols_;
  static constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  static constexpr i32 chunks = cols / chunk_elements;
  static constexpr i32 row_bytes = cols * static_cast<i32>(sizeof(T));
  static constexpr i32 bytes = rows * row_bytes;
  using Layout = TileSwizzle<chunks>;

  u8* data;

  FLASHGEN_DEVICE static i32 offset(i32 row, i32 chunk) {
    return row * row_bytes + ((chunk ^ Layout::of_row(row)) * kChunkBytes);
  }
  FLASHGEN_DEVICE u8* chunk_at(i32 row, i32 chunk) const { return data + offset(row, chunk); }
  FLASHGEN_DEVICE Vec16& vector_at(i32 row, i32 chunk) const {
    return *reinterpret_cast<Vec16*>(chunk_at(row, chunk));
  }
};

// ---- flashgen/stream.cuh
// Streaming tiles between global and shared memory.

// `row_count` rows of `cols` elements in global memory, row r at source + r * stride.
template <class T>
struct GlobalRows {
  T* data;
  i64 stride;
  i32 row_count;

  FLASHGEN_DEVICE T* at(i32 row, i32 col) const { return data + row * stride + col; }
};

// One 16-byte chunk read with the widest accesses that its alignment allows; elements past `valid` are zero.
template <class T, i32 access_bytes>
FLASHGEN_DEVICE Vec16 read_chunk(const T* source, i32 valid) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  Vec16 chunk = {{0, 0, 0, 0}};
  if constexpr (access_bytes == 16) {
    if (valid > 0) chunk = *reinterpret_cast<const Vec16*>(source);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) chunk.words[i] = bits_of(source[i]);
    }
  } else {
    constexpr i32 bits = 8 * static_cast<i32>(sizeof(T)), word_elements = 32 / bits;
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) {
        chunk.words[i / word_elements] |= static_cast<u32>(source[i].bits) << (bits * (i % word_elements));
      }
    }
  }
  return chunk;
}

// Asynchronous copy of one chunk, in pieces of access_bytes.
template <class T, i32 access_bytes>
FLASHGEN_DEVICE void copy_chunk_async(u32 destination, const T* source, i32 valid) {
  constexpr i32 pieces = kChunkBytes / access_bytes;
  constexpr i32 piece_elements = access_bytes / static_cast<i32>(sizeof(T));
#pragma unroll
  for (i32 i = 0; i < pieces; ++i) {
    const u32 bytes = i * piece_elements < valid ? access_bytes : 0;
    const T* from = source + (bytes != 0 ? i * piece_elements : 0);
    if constexpr (access_bytes == 16) cp_async_16(destination, from, bytes);
    if constexpr (access_bytes == 8) cp_async_8(destination + 8 * i, from, bytes);
    if constexpr (access_bytes == 4) cp_async_4(destination + 4 * i, from, bytes);
  }
}

// Marks the copies issued so far as one group, and waits until at most `pending` groups are under way.
template <bool async_copy>
FLASHGEN_DEVICE void commit_copies() { if constexpr (async_copy) cp_async_commit(); }
template <bool async_copy, i32 pending>
FLASHGEN_DEVICE void wait_for_copies() { if constexpr (async_copy) cp_async_wait<pending>(); }

// ---- flashgen/quantize.cuh
// 16-bit rows of a head to e4m3, one block of rows at a time: rotated, divided by a shared scale, rounded.

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

// ---- kernels/quantize.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr QuantizeConfig kConfig{
    .head_dim = 128,
    .head_dim_v = 128,
    .block = 128,  // rows that share a scale
    .warps = 8,
};

struct Params {
  const element_t* q;
  const element_t* k;
  const element_t* v;
  e4m3_t* q8;
  e4m3_t* k8;
  e4m3_t* v8;
  float* q_scale;  // what the codes of each block of rows are multiplied by
  float* k_scale;
  float* v_scale;
  i64 q_batch, q_row, q_head;  // strides are in elements
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 q8_batch, q8_row, q8_head;
  i64 k8_batch, k8_row, k8_head;
  i64 v8_batch, v8_row, v8_head;
  i64 q_scale_batch, q_scale_head;
  i64 k_scale_batch, k_scale_head;
  i64 v_scale_batch, v_scale_head;
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;
  i32 rotates;     // 1: queries and keys are rotated
  i32 is_aligned;  // 1: all rows begin at multiples of 16 bytes
};
static_assert(sizeof(Params) == 288, "the launcher packs Params into 288 bytes");

namespace smem {
constexpr u32 kRows = 0;         // then their codes
constexpr u32 kScratch = 32768;  // two numbers for each warp

}  // namespace smem

FLASHGEN_KERNEL(256, 3) quantize_d128_e4m3_scales128_sm89(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Thread thread = Thread::current();
  const Place place = Place::current();
  const i32 first_row = place.tile * kConfig.block;

  // Heads of queries come first, then those of keys, then those of values.
  const bool is_value = place.head >= p.heads_q + p.heads_kv;
  GlobalRows<const element_t> rows;
  GlobalRows<e4m3_t> codes;
  float* scale;
  if (place.head < p.heads_q) {
    const i32 head = place.head, row = first_row, count = p.len_q - first_row;
    if (count <= 0) return;
    rows = {p.q + place.sequence * p.q_batch + row * p.q_row + head * p.q_head, p.q_row, count};
    codes = {p.q8 + place.sequence * p.q8_batch + row * p.q8_row + head * p.q8_head, p.q8_row, count};
    scale = p.q_scale + place.sequence * p.q_scale_batch + head * p.q_scale_head + place.tile;

  } else if (!is_value) {
    const i32 head = place.head - p.heads_q, row = first_row, count = p.len_kv - first_row;
    if (count <= 0) return;
    rows = {p.k + place.sequence * p.k_batch + row * p.k_row + head * p.k_head, p.k_row, count};
    codes = {p.k8 + place.sequence * p.k8_batch + row * p.k8_row + head * p.k8_head, p.k8_row, count};
    scale = p.k_scale + place.sequence * p.k_scale_batch + head * p.k_scale_head + place.tile;

  } else {
    const i32 head = place.head - p.heads_q - p.heads_kv, row = first_row, count = p.len_kv - first_row;
    if (count <= 0) return;
    rows = {p.v + place.sequence * p.v_batch + row * p.v_row + head * p.v_head, p.v_row, count};
    codes = {p.v8 + place.sequence * p.v8_batch + row * p.v8_row + head * p.v8_head, p.v8_row, count};
    scale = p.v_scale + place.sequence * p.v_scale_batch + head * p.v_scale_head + place.tile;
  }

  // Queries and keys are rotated alike, which does not change their products. Values are not rotated.
  const bool rotates = p.rotates != 0 && !is_value;
  const Scratch scratch{shared + smem::kRows, reinterpret_cast<float*>(shared + smem::kScratch)};
  quantize_block<kConfig, kConfig.head_dim>(rows, codes, scale, rotates, p.is_aligned != 0, scratch, thread);
}
