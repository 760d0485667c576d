// backward_main_d64_causal_varlen_sm80: FlashAttention-2, backward pass: dK and dV, and dQ where it is summed
// with atomics.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false,"varlen":true}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --varlen --arch sm_80
// for      sm_80 (A100)
// plan     tile_q 128, tile_kv 64, stages 1, warps 4, 128 threads
// grid     one block for every 64 key rows of every key/value head and batch entry
// smem     82944 bytes
// because  64 x 32 scores per warp; two blocks share a multiprocessor
//
// contents   30  Instructions, one per function: types, device, copy, math, matrix.
//           197  Element types.
//           265  Finding NaN and infinity.
//           282  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//           350  Operands of warp-level matrix products.
//           437  Warp-level matrix products.
//           508  Banded masks.
//           580  Walking over the tiles that a mask does not rule out.
//           615  Streaming tiles between global and shared memory.
//           760  Keeping NaN and infinity where they belong.
//           780  The loop over the tiles of queries of a group of heads, for kernels whose block keeps one tile of keys.
//           854  What the backward kernels are made of.
//          1016  Sequences of different lengths, packed.
//          1056  The kernel: its configuration, parameters and text.

#if defined(FLASHGEN_EMULATOR)
#include "flashgen/emu/primitives.h"
#else
// ---- flashgen/ptx/types.cuh
// Integer and element types, without any CUDA header.

namespace flashgen {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct bfloat16_t {
  u16 bits;
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
FLASHGEN_DEVICE bool block_any(bool condition) { return __syncthreads_or(condition) != 0; }
FLASHGEN_DEVICE float shuffle(float value, i32 source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
}
FLASHGEN_DEVICE i32 shuffle(i32 value, i32 source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
}
FLASHGEN_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// The same value, hidden from the compiler's analysis.
FLASHGEN_DEVICE i32 opaque(i32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

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

FLASHGEN_DEVICE void cp_async_4(u32 destination, const void* source, u32 valid_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

FLASHGEN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` groups are in flight.
template <int pending>
FLASHGEN_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

FLASHGEN_DEVICE void reduce_add(float* address, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// This works for signed numbers too, in two's complement.
FLASHGEN_DEVICE void reduce_add(u64* address, u64 value) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Four adjacent floats at a 16-byte aligned address (sm_90 and later).
FLASHGEN_DEVICE void reduce_add_x4(float* address, const float (&value)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(value[0]), "f"(value[1]),
               "f"(value[2]), "f"(value[3])
               : "memory");
}

// ---- flashgen/ptx/math.cuh
// Scalar arithmetic, one instruction each.

// 2^x within 2 ulp. Subnormal results are flushed to zero.
FLASHGEN_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLASHGEN_DEVICE float fused_multiply_add(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
// Two floats rounded to 16 bits and packed, the first in the low half.
FLASHGEN_DEVICE u32 pack(bfloat16_t, float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// ---- flashgen/ptx/matrix.cuh
// Warp-wide matrix instructions: ldmatrix, stmatrix and mma.sync.

// Four 8x8 matrices of 16-bit elements. Lane 8i+r passes the address of row r of matrix i.
FLASHGEN_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

FLASHGEN_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

FLASHGEN_DEVICE void ldmatrix_x2(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

FLASHGEN_DEVICE void ldmatrix_x2_trans(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

// d += a * b, fp32 accumulation.
FLASHGEN_DEVICE void mma_m16n8k16(bfloat16_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same, but d must not be read before mma_finish(). The hardware needs no such call. The emulator then
// computes all products of a batch at once, after a single rendezvous of the lanes.
FLASHGEN_DEVICE void mma_m16n8k16_batched(bfloat16_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16(bfloat16_t{}, d, a, b);
}

FLASHGEN_DEVICE void mma_finish() {}

}  // namespace flashgen
#endif
// ---- flashgen/element.cuh
// Element types: conversions, and how deep one matrix instruction reaches.

namespace flashgen {

constexpr float kLog2E = 0x1.715476p+0f;
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
  // The same thread, in a way that the compiler cannot see through: addresses made from it inside a loop are
  // then computed there, instead of all being kept in registers from before the loop.
  FLASHGEN_DEVICE Thread recomputed() const { return {opaque(lane), opaque(warp)}; }
  FLASHGEN_DEVICE i32 index() const { return warp * kWarpSize + lane; }
  // The lane's accumulators in a block of 16 x 8 are in rows row() and + 8, and in columns column() and + 1.
  FLASHGEN_DEVICE i32 row() const { return lane / 4; }
  FLASHGEN_DEVICE i32 column() const { return 2 * (lane % 4); }
};

// A warp's accumulators: row_blocks x column_blocks blocks of 16 x 8.
template <i32 row_blocks, i32 column_blocks>
using Accumulator = float[row_blocks][column_blocks][4];

constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }
constexpr i32 round_up(i32 a, i32 b) { return ceil_div(a, b) * b; }
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

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

// Elements of the summed dimension that one multiply step consumes: two chunks, except floats.
template <class T>
constexpr i32 kStepDepth = kIsFloat<T> ? 8 : 2 * kChunkBytes / static_cast<i32>(sizeof(T));

FLASHGEN_DEVICE float to_float(bfloat16_t x) { return float_of(static_cast<u32>(x.bits) << 16); }
FLASHGEN_DEVICE float to_float(float x) { return x; }

// Two neighboring elements, written with one store.
template <class T>
struct alignas(4) Pair {
  u32 bits;
  FLASHGEN_DEVICE static Pair from(float first, float second) { return {pack(T{}, first, second)}; }
};

// ---- flashgen/non_finite.cuh
// Finding NaN and infinity.

// Adding this to the bits of a magnitude carries into the sign exactly when the exponent is all ones.
template <class T>
constexpr u32 kToInfinity = 0;
template <>
constexpr u32 kToInfinity<bfloat16_t> = 0x00800080u;
template <class T>
constexpr u32 kSigns = kIsFloat<T>      ? 0x80000000u
                       : sizeof(T) == 2 ? 0x80008000u
                                        : 0x80808080u;

// The sign bits of those elements of a word that are not finite.
template <class T>
FLASHGEN_DEVICE u32 non_finite_signs(u32 word) { return ((word & ~kSigns<T>)+kToInfinity<T>)&kSigns<T>; }

// ---- flashgen/tile.cuh
// Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.

// How rows of `chunks` 16-byte chunks are swizzled: chunk c of row r lies at c ^ ((r >> shift) & mask). Eight
// neighboring rows then put the same chunk into eight different bank groups, for any even number of chunks.
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
  using Element = T;
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
  FLASHGEN_DEVICE T* element_at(i32 row, i32 col) const {
    return reinterpret_cast<T*>(chunk_at(row, col / chunk_elements)) + col % chunk_elements;
  }
  FLASHGEN_DEVICE Vec16& vector_at(i32 row, i32 chunk) const {
    return *reinterpret_cast<Vec16*>(chunk_at(row, chunk));
  }
  FLASHGEN_DEVICE SharedTile slot(i32 index) const { return {data + index * bytes}; }
};

// A lane's place in a tile. Rows advance in eights, so the swizzle of the lane's row never changes and a step
// is one addition along rows, one xor along columns. A caller that advances by less adds the change of the
// swizzle to its step along columns.
template <class Tile>
struct Cursor {
  i32 row_offset;
  i32 chunk;
  i32 swizzle;

  // `origin`: where the tile starts, a multiple of 128, or 0 for offsets from its start.
  FLASHGEN_DEVICE Cursor(i32 origin, i32 row, i32 chunk_)
      : row_offset(origin + row * Tile::row_bytes), chunk(chunk_), swizzle(Tile::Layout::of_row(row)) {}

  // `aligned`: the lane's own chunk shares no bit with any step, so the sum is an xor that folds into one.
  template <bool aligned>
  FLASHGEN_DEVICE i32 offset(i32 row_step, i32 chunk_step) const {
    constexpr i32 mask = Tile::Layout::mask;
    if constexpr (aligned) {
      const i32 base = row_offset + ((chunk ^ swizzle) * kChunkBytes);
      return (base ^ ((chunk_step & mask) * kChunkBytes)) + (chunk_step & ~mask) * kChunkBytes +
             row_step * Tile::row_bytes;
    } else {
      return row_offset + (((chunk + chunk_step) ^ swizzle) * kChunkBytes) + row_step * Tile::row_bytes;
    }
  }
};

// ---- flashgen/operand.cuh
// Operands of warp-level matrix products: which elements of a tile each lane holds, and how it fetches them.
//
// A product accumulates 16 x 8 blocks. Lane l of a warp holds of such a block, at any precision, rows l/4 and
// l/4 + 8, columns 2(l%4) and 2(l%4) + 1: the accumulator layout of mma.sync.

FLASHGEN_DEVICE i32 origin_of(auto tile) { return static_cast<i32>(shared_address(tile.data)); }

// Left operand of one step: 16 rows, one step deep.
template <class T>
struct LeftFragment {
  u32 words[4];
};

// Right operand of one step: one step deep, 8 columns.
template <class T>
struct RightFragment {
  u32 words[2];
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

// ---- flashgen/product.cuh
// Warp-level matrix products: tensor cores for 16-bit elements, fused multiply-adds for float.

template <i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void clear(Accumulator<row_blocks, column_blocks>& accumulator) {
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
      for (i32 e = 0; e < 4; ++e) accumulator[m][n][e] = 0.0f;
    }
  }
}

template <bool turing, class T>
FLASHGEN_DEVICE void multiply_block(float (&d)[4], const LeftFragment<T>& a, const RightFragment<T>& b) {
  mma_m16n8k16_batched(T{}, d, a.words, b.words);
}

// The right operand's fragments of blocks n and n + 1 (only n where the columns end there).
template <i32 column_blocks, class Right, class T>
FLASHGEN_DEVICE void load_right(RightFragment<T> (&pair)[2], const Right& right, i32 n, i32 step) {
  if (n + 1 < column_blocks) {
    right.load_pair(pair, n, step);
  } else {
    right.load_one(pair[0], n, step);
  }
}

// accumulator += left * right over `steps` steps of the summed dimension. Fragments of the right operand are
// fetched one product ahead, so that tensor cores need not wait for shared memory; floats, whose fragments
// take four times the registers, are multiplied slowly enough to do without.
template <class T, bool turing, i32 steps, class Left, class Right, i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void multiply(Accumulator<row_blocks, column_blocks>& accumulator, const Left& left,
                              const Right& right) {
  constexpr i32 pairs = ceil_div(column_blocks, 2);
  constexpr bool ahead = !kIsFloat<T>;
  LeftFragment<T> a[row_blocks];
  RightFragment<T> b[2][2];
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) left.load(a[m], m, 0);
  load_right<column_blocks>(b[0], right, 0, 0);
  // Unrolled, a long loop over floats makes the assembler load fragments so early that it spills.
  constexpr bool rolled = kIsFloat<T> && !Left::in_registers && steps > 4;
  // Not `steps`: if there is one step, NVRTC 13.0 drops that loop and applies its bound to the inner one.
  constexpr i32 unrolled = rolled ? 1 : steps * pairs;
#pragma unroll unrolled
  for (i32 step = 0; step < steps; ++step) {
#pragma unroll
    for (i32 pair = 0; pair < pairs; ++pair) {
      const i32 n = 2 * pair, now = ahead ? (step * pairs + pair) % 2 : 0;
      if (!ahead) {
        if (step + pair > 0) load_right<column_blocks>(b[0], right, n, step);
      } else if (pair + 1 < pairs) {
        load_right<column_blocks>(b[1 - now], right, n + 2, step);
      } else if (step + 1 < steps) {
        load_right<column_blocks>(b[1 - now], right, 0, step + 1);
      }
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) {
        multiply_block<turing>(accumulator[m][n], a[m], b[now][0]);
        if (n + 1 < column_blocks) multiply_block<turing>(accumulator[m][n + 1], a[m], b[now][1]);
        // This was the step's last use of a[m]: the next step's takes its registers at once.
        if (pair + 1 == pairs && step + 1 < steps) left.load(a[m], m, step + 1);
      }
    }
  }
  if constexpr (!kIsFloat<T>) mma_finish();
}

// ---- flashgen/band.cuh
// Banded masks: key k is allowed for query q when lower <= k - q <= upper and both exist.

struct Range {
  i32 begin, end;
  FLASHGEN_DEVICE i32 size() const { return end - begin; }
};

// The tiles that contain rows (or columns) from `begin`, which is not negative, to `end`.
FLASHGEN_DEVICE Range tiles_of(i32 begin, i32 end, i32 tile) {
  return {begin / tile, larger(begin / tile, ceil_div(larger(end, 0), tile))};
}

// The plan says which bounds exist. Their values are kernel parameters.
template <bool has_lower, bool has_upper>
struct Band {
  // The tiles that hold allowed pairs are consecutive.
  static constexpr bool has_holes = false;
  i32 lower, upper;
  i32 len_q, len_kv;

  // All heads and sequences have the same band.
  template <class Params>
  FLASHGEN_DEVICE static Band of(const Params& p, i32 /*sequence*/, i32 /*head*/) {
    return {p.band_lower, p.band_upper, p.len_q, p.len_kv};
  }

  // Tiles of queries that may attend to some key of [k_begin, k_end).
  FLASHGEN_DEVICE Range query_tiles(i32 k_begin, i32 k_end, i32 tile) const {
    i32 begin = 0, end = len_q;
    begin = larger(begin, k_begin - upper);
    return tiles_of(begin, end, tile);
  }

  // Whether no pair of the rectangle is allowed; the rectangle has at least one row and column.
  FLASHGEN_DEVICE bool is_empty(i32 q_begin, i32 q_end, i32 k_begin, i32 k_end) const {
    bool empty = k_begin >= len_kv;
    empty |= k_begin > q_end - 1 + upper;
    return empty;
  }

  // Whether every pair of the rectangle is allowed.
  FLASHGEN_DEVICE bool is_full(i32 q_begin, i32 q_end, i32 k_begin, i32 k_end) const {
    bool full = q_end <= len_q && k_end <= len_kv;
    full &= k_end - 1 <= q_begin + upper;
    return full;
  }

  FLASHGEN_DEVICE bool allows(i32 q, i32 k) const {
    bool allowed = q < len_q && k < len_kv;
    allowed &= k - q <= upper;
    return allowed;
  }
};

// Puts `value` wherever the mask forbids the pair; the warp's block begins at (first_q, first_key).
template <class Mask, i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void mask_pairs(Accumulator<row_blocks, column_blocks>& values, float value, const Mask& mask,
                                i32 first_q, i32 first_key, Thread thread) {
  const i32 q = first_q + thread.row(), key = first_key + thread.column();
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        if (!mask.allows(q + 16 * m + 8 * (e / 2), key + 8 * n + e % 2)) values[m][n][e] = value;
      }
    }
  }
}

// ---- flashgen/walk.cuh
// Walking over the tiles that a mask does not rule out.
//
// A mask says which pairs of a query and a key are allowed. Kernels use five functions of it:
//
//     Mask::has_holes                       whether a tile within the ranges below may hold no allowed pair
//     key_tiles(q_begin, q_end, tile)       the tiles of keys that some query of the range may attend to
//     query_tiles(k_begin, k_end, tile)     the tiles of queries that may attend to some key of the range
//     is_empty(q_begin, q_end, k_begin, k_end), is_full(...)   whether no pair, every pair is allowed
//     allows(q, k)                          whether one pair is allowed

// Iterates over the tiles of a range, without those for which `visited(tile)` is false. A walk starts before
// its first tile. The lanes of a warp test 32 tiles at once, some perhaps beyond the last. All lanes call,
// and get the same result.
template <bool has_holes>
struct Walk {
  i32 tile;
  i32 end;
  // Tiles after `tile` that are visited: bit l is tile `group` + l.
  i32 group;
  u32 others;

  FLASHGEN_DEVICE explicit Walk(Range tiles)
      : tile(tiles.begin - 1), end(tiles.end), group(tiles.begin - kWarpSize), others(0) {}

  FLASHGEN_DEVICE bool over() const { return tile >= end; }

  // Advances to the next tile. Returns how many tiles were skipped before it.
  template <class Visited>
  FLASHGEN_DEVICE i32 advance(Thread thread, const Visited& visited) {
    ++tile;
    return 0;
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

template <class T, i32 access_bytes>
FLASHGEN_DEVICE void write_chunk(T* destination, const Vec16& chunk, i32 valid) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  if (valid > 0) *reinterpret_cast<Vec16*>(destination) = chunk;
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
    cp_async_16(destination, from, bytes);
  }
}

// Brings one tile of rows after another from global to shared memory, all threads of the block together. With
// asynchronous copies the data goes straight to shared memory; without, fetch() reads into registers and
// land() writes them, so that the trip to global memory overlaps whatever is computed in between. Rows and
// columns that do not exist arrive as zeros.
template <class Tile, i32 threads, i32 head_dim, i32 access_bytes, bool async_copy>
struct TileStream {
  using T = typename Tile::Element;
  static constexpr i32 count = Tile::rows * Tile::chunks;
  static constexpr i32 per_thread = ceil_div(count, threads);
  static_assert(!async_copy || access_bytes >= 4, "asynchronous copies move at least 4 bytes");
  // Where a thread's chunks lie below one another, the swizzle the same for all, one address serves them all.
  static constexpr i32 rows_apart = threads / Tile::chunks;
  static constexpr bool stacked = threads % Tile::chunks == 0 && rows_apart % 8 == 0 && count % threads == 0;

  i64 stride;
  // The next tile: its first row (stacked: this thread's first chunk of it), and how many rows there are from
  // there on.
  const T* next;
  i32 rows_left;
  Vec16 staged[async_copy ? 1 : per_thread];

  FLASHGEN_DEVICE TileStream(GlobalRows<const T> source, i32 first_row, Thread thread)
      : stride(source.stride) {
    seek(source, first_row, thread);
  }

  FLASHGEN_DEVICE void seek(GlobalRows<const T> source, i32 first_row, Thread thread) {
    if constexpr (stacked) {
      const i32 row = first_row + thread.index() / Tile::chunks;
      next = source.at(row, thread.index() % Tile::chunks * Tile::chunk_elements);
      rows_left = source.row_count - row;
    } else {
      next = source.at(first_row, 0);
      rows_left = source.row_count - first_row;
    }
  }

  // Starts the next tile's way into `tile`.
  FLASHGEN_DEVICE void fetch(Tile tile, Thread thread) {
    if constexpr (stacked) {
      const i32 chunk = thread.index() % Tile::chunks;
      const i32 columns = head_dim - chunk * Tile::chunk_elements;
      u8* const to = tile.chunk_at(thread.index() / Tile::chunks, chunk);
#pragma unroll
      for (i32 i = 0; i < per_thread; ++i) {
        fetch_one(i, to + i * rows_apart * Tile::row_bytes, next, i * rows_apart < rows_left ? columns : 0);
        next += rows_apart * stride;
      }
    } else {
#pragma unroll
      for (i32 i = 0; i < per_thread; ++i) {
        const i32 index = thread.index() + i * threads, row = index / Tile::chunks,
                  chunk = index % Tile::chunks;
        if (index >= count) break;
        const i32 columns = row < rows_left ? head_dim - chunk * Tile::chunk_elements : 0;
        fetch_one(i, tile.chunk_at(row, chunk), next + row * stride + chunk * Tile::chunk_elements, columns);
      }
      next += Tile::rows * stride;
    }
    rows_left -= Tile::rows;
  }

  FLASHGEN_DEVICE void land(Tile tile, Thread thread) const {}

 private:
  // A chunk without columns reads nothing: where `from` then points does not matter.
  FLASHGEN_DEVICE void fetch_one(i32 i, u8* to, const T* from, i32 columns) {
    copy_chunk_async<T, access_bytes>(shared_address(to), from, columns);
  }
};

// Marks the copies issued so far as one group, and waits until at most `pending` groups are under way.
template <bool async_copy>
FLASHGEN_DEVICE void commit_copies() { cp_async_commit(); }
template <bool async_copy, i32 pending>
FLASHGEN_DEVICE void wait_for_copies() { cp_async_wait<pending>(); }

// Writes accumulators, times `factor(m, h)` for each row, as 16-bit or float elements into a tile.
template <class Tile, i32 row_blocks, i32 column_blocks, class Factor>
FLASHGEN_DEVICE void store_accumulator(Tile tile, i32 first_row, i32 first_column,
                                       const float (&values)[row_blocks][column_blocks][4], Thread thread,
                                       const Factor& factor) {
  using T = typename Tile::Element;
  const i32 row = first_row + thread.row(), column = first_column + thread.column();
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float scale = factor(m, h);
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
        *reinterpret_cast<Pair<T>*>(tile.element_at(row + 16 * m + 8 * h, column + 8 * n)) =
            Pair<T>::from(values[m][n][2 * h] * scale, values[m][n][2 * h + 1] * scale);
      }
    }
  }
}

// Writes the rows of a tile that exist to global memory.
template <class Tile, i32 threads, i32 head_dim, i32 access_bytes>
FLASHGEN_DEVICE void store_rows(Tile tile, GlobalRows<typename Tile::Element> destination, i32 first_row,
                                Thread thread) {
#pragma unroll 4
  for (i32 index = thread.index(); index < Tile::rows * Tile::chunks; index += threads) {
    const i32 row = index / Tile::chunks, chunk = index % Tile::chunks;
    const i32 valid = head_dim - chunk * Tile::chunk_elements;
    if (first_row + row < destination.row_count && valid > 0) {
      write_chunk<typename Tile::Element, access_bytes>(
          destination.at(first_row + row, chunk * Tile::chunk_elements), tile.vector_at(row, chunk), valid);
    }
  }
}

// ---- flashgen/contain.cuh
// Keeping NaN and infinity where they belong. A product with a probability of 0 is 0 * NaN = NaN, so a
// non-finite value in a key that a query may not attend to would reach the query through any tile that the
// mask cuts through. Such tiles are searched first. If one holds a non-finite value, which is rare, the
// non-finite values are cleared before the product, and the results they should have reached become NaN
// afterwards.

// Whether some element of the tile is not finite; all threads of the block call it and get the same answer.
template <i32 threads, class Tile>
FLASHGEN_DEVICE bool holds_non_finite(Tile tile, Thread thread) {
  u32 signs = 0;
#pragma unroll 4
  for (i32 i = thread.index(); i < Tile::rows * Tile::chunks; i += threads) {
    const Vec16 chunk = *reinterpret_cast<const Vec16*>(tile.data + i * kChunkBytes);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Tile::Element>(chunk.words[w]);
  }
  return block_any(signs != 0);
}

// ---- flashgen/query_walk.cuh
// The loop over the tiles of queries of a group of heads, for kernels whose block keeps one tile of keys.

// A step of the loop: a tile of queries of one head of the group.
struct Step {
  i32 member;
  i32 tile;
};

// Visits, for each head of the group, the tiles with a query that may attend to a key of [k_begin, k_end).
// `mask_of(member)` is the mask of a head of the group.
template <class Mask, i32 tile_q>
struct QueryWalk {
  i32 k_begin, k_end;
  i32 members;
  i32 member;
  Walk<Mask::has_holes> tiles;

  FLASHGEN_DEVICE QueryWalk(i32 k_begin_, i32 k_end_, i32 members_)
      : k_begin(k_begin_), k_end(k_end_), members(members_), member(-1), tiles(Range{0, -1}) {}

  FLASHGEN_DEVICE bool over() const { return member >= members; }
  FLASHGEN_DEVICE Step step() const { return {member, tiles.tile}; }

  FLASHGEN_DEVICE void start(Thread thread, const auto& mask_of) { advance(thread, mask_of); }
  template <class MaskOf>
  FLASHGEN_DEVICE void advance(Thread thread, const MaskOf& mask_of) {
    // A loop, so that the code that evaluates the mask is inlined only once.
    while (true) {
      if (member >= 0) advance_within_head(thread, mask_of);
      if (!tiles.over() || ++member >= members) return;
      tiles = Walk<Mask::has_holes>(mask_of(member).query_tiles(k_begin, k_end, tile_q));
    }
  }

 private:
  FLASHGEN_DEVICE void advance_within_head(Thread thread, const auto& mask_of) {
    const Mask mask = mask_of(member);
    tiles.advance(thread, [&](i32 tile) {
      return !mask.is_empty(tile * tile_q, smaller((tile + 1) * tile_q, mask.len_q), k_begin, k_end);
    });
  }
};

// A band is the same for every head, and its tiles are consecutive, so two counters suffice.
template <bool has_lower, bool has_upper, i32 tile_q>
struct QueryWalk<Band<has_lower, has_upper>, tile_q> {
  i32 k_begin, k_end;
  i32 left;
  i32 member;
  Range tiles;
  i32 tile;

  FLASHGEN_DEVICE QueryWalk(i32 k_begin_, i32 k_end_, i32 members_)
      : k_begin(k_begin_), k_end(k_end_), left(members_), member(0) {}

  FLASHGEN_DEVICE bool over() const { return left == 0; }
  FLASHGEN_DEVICE Step step() const { return {member, tile}; }

  FLASHGEN_DEVICE void start(Thread /*thread*/, const auto& mask_of) {
    tiles = mask_of(0).query_tiles(k_begin, k_end, tile_q);
    left *= tiles.size();
    tile = tiles.begin;
  }
  template <class MaskOf>
  FLASHGEN_DEVICE void advance(Thread /*thread*/, const MaskOf& /*mask_of*/) {
    --left;
    if (++tile == tiles.end) {
      tile = tiles.begin;
      ++member;
    }
  }
};

// ---- flashgen/backward.cuh
// What the backward kernels are made of.

struct BackwardConfig {
  i32 head_dim, head_dim_v;
  i32 tile_q, tile_kv;
  i32 stages, warps;
  // How many warps stand above one another on each product; the others stand side by side.
  i32 score_warps, dk_warps, dv_warps, dq_warps;
  bool has_lower, has_upper;
  bool vector_reduction;
  i32 access_bytes;
  bool async_copy;
  bool turing;
};

// A warp's place on a product of rows x columns shared by `warps` warps, `above` of them above one another.
template <i32 rows, i32 columns, i32 warps, i32 above>
struct WarpShare {
  static constexpr i32 beside = warps / above;
  static constexpr i32 warp_rows = rows / above;
  static constexpr i32 warp_columns = columns / beside;
  static_assert(warp_rows % 16 == 0 && warp_rows > 0,
                "each warp must own a multiple of 16 rows of a product");
  static_assert(warp_columns % 8 == 0 && warp_columns > 0,
                "each warp must own a multiple of 8 columns of a product");
  static constexpr i32 row_blocks = warp_rows / 16;
  static constexpr i32 column_blocks = warp_columns / 8;
  // No column step of a warp shares a bit with where its columns begin.
  static constexpr bool aligned =
      beside == 1 || (column_blocks & (column_blocks - 1)) == 0 || column_blocks % 8 == 0;
  using Product = Accumulator<row_blocks, column_blocks>;

  FLASHGEN_DEVICE static i32 row(i32 warp) { return warp / beside * warp_rows; }
  FLASHGEN_DEVICE static i32 column(i32 warp) { return warp % beside * warp_columns; }
};

template <BackwardConfig cfg, class T>
struct BackwardShape {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 dim = round_up(cfg.head_dim, 16);
  static constexpr i32 dim_v = round_up(cfg.head_dim_v, 16);
  static constexpr i32 depth = kStepDepth<T>;

  using QTile = SharedTile<T, cfg.tile_q, dim>;
  using DOTile = SharedTile<T, cfg.tile_q, dim_v>;
  using KTile = SharedTile<T, cfg.tile_kv, dim>;
  using VTile = SharedTile<T, cfg.tile_kv, dim_v>;
  using ScoreTile = SharedTile<T, cfg.tile_q, cfg.tile_kv>;
  using QStream = TileStream<QTile, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using DOStream = TileStream<DOTile, threads, cfg.head_dim_v, cfg.access_bytes, cfg.async_copy>;
  using KStream = TileStream<KTile, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using VStream = TileStream<VTile, threads, cfg.head_dim_v, cfg.access_bytes, cfg.async_copy>;

  using ScoreShare = WarpShare<cfg.tile_q, cfg.tile_kv, cfg.warps, cfg.score_warps>;
  using DKShare = WarpShare<cfg.tile_kv, dim, cfg.warps, cfg.dk_warps>;
  using DVShare = WarpShare<cfg.tile_kv, dim_v, cfg.warps, cfg.dv_warps>;
  using DQShare = WarpShare<cfg.tile_q, dim, cfg.warps, cfg.dq_warps>;
};

// Streams one float per row: L and D of a tile of queries. Rows that do not exist arrive as 0.
template <i32 rows, i32 threads, bool async_copy>
struct RowStream {
  const float* source;
  i32 row_count;
  float staged[async_copy ? 1 : ceil_div(rows, threads)];

  FLASHGEN_DEVICE void fetch(float* shared, i32 first_row, Thread thread) {
#pragma unroll
    for (i32 i = 0; i < ceil_div(rows, threads); ++i) {
      const i32 row = thread.index() + i * threads;
      const bool exists = row < rows && first_row + row < row_count;
      if (row < rows)
        cp_async_4(shared_address(shared + row), exists ? source + first_row + row : source,
                   exists ? 4 : 0);
    }
  }
  FLASHGEN_DEVICE void land(float* shared, Thread thread) const {}
};

// Turns scores S into probabilities P = exp(S - L), with L of the warp's rows.
template <i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void probabilities(Accumulator<row_blocks, column_blocks>& scores, const float* lse,
                                   float scale_log2, Thread thread) {
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float lse_log2 = lse[16 * m + 8 * h + thread.row()] * kLog2E;
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) {
          scores[m][n][e] = exp2_approx(fused_multiply_add(scores[m][n][e], scale_log2, -lse_log2));
        }
      }
    }
  }
}

// Turns dP into dS = P * (dP - D), with D of the warp's rows.
template <i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void score_gradients(Accumulator<row_blocks, column_blocks>& dp,
                                     const Accumulator<row_blocks, column_blocks>& p, const float* dsum,
                                     Thread thread) {
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float d = dsum[16 * m + 8 * h + thread.row()];
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) dp[m][n][e] = p[m][n][e] * (dp[m][n][e] - d);
      }
    }
  }
}

// The dQ workspace holds each tile in the order in which the warps hold it, so that both the additions and
// the final reading are contiguous: per warp and block, four floats for each lane (or four rows of 32 floats
// where reductions are one float wide).
template <bool vectors, class Share>
FLASHGEN_DEVICE void add_to_workspace(float* tile, Thread thread, const typename Share::Product& values) {
#pragma unroll
  for (i32 m = 0; m < Share::row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < Share::column_blocks; ++n) {
      float* const block = tile + ((thread.warp * Share::row_blocks + m) * Share::column_blocks + n) * 128;
      if constexpr (vectors) {
        reduce_add_x4(block + 4 * thread.lane, values[m][n]);
      } else {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) reduce_add(block + 32 * e + thread.lane, values[m][n][e]);
      }
    }
  }
}

// The same for one element after another and only for pairs that the mask allows, without tensor cores: the
// slow way, for the rare tile where the mask cuts through and a key is not finite.
template <bool vectors, i32 threads, class Share, class ScoreTile, class KTile, class Mask>
FLASHGEN_DEVICE void add_allowed_pairs(float* tile, ScoreTile ds, KTile keys, const Mask& mask, i32 first_q,
                                       i32 first_key, Thread thread) {
#pragma unroll 1
  for (i32 i = thread.index(); i < ScoreTile::rows * KTile::cols; i += threads) {
    const i32 row = i / KTile::cols, column = i % KTile::cols;
    float total = 0.0f;
#pragma unroll 1
    for (i32 key = 0; key < KTile::rows; ++key) {
      if (!mask.allows(first_q + row, first_key + key)) continue;
      total = fused_multiply_add(to_float(*ds.element_at(row, key)), to_float(*keys.element_at(key, column)),
                                 total);
    }
    const i32 warp = row / Share::warp_rows * Share::beside + column / Share::warp_columns;
    const i32 m = row % Share::warp_rows / 16, n = column % Share::warp_columns / 8;
    const i32 lane = row % 8 * 4 + column % 8 / 2, element = row % 16 / 8 * 2 + column % 2;
    float* const block = tile + ((warp * Share::row_blocks + m) * Share::column_blocks + n) * 128;
    reduce_add(block + (vectors ? 4 * lane + element : 32 * element + lane), total);
  }
}

// ---- flashgen/sequence.cuh
// Sequences of different lengths, packed: the rows of one lie behind those of the one before.

// Where the rows of a sequence begin, how many there are, and how many of them are used: a row that is not
// attends to nothing, and nothing attends to it.
struct PackedSequence {
  i32 first_q, first_key;
  i32 rows_q, rows_kv;
  i32 len_q, len_kv;

  // A sequence ends where the longest one would, at the latest: there is no room for more.
  template <class Params>
  FLASHGEN_DEVICE static PackedSequence of(const Params& p, i32 sequence) {
    const i32 first_q = p.cu_seqlens_q[sequence], first_key = p.cu_seqlens_k[sequence];
    const i32 rows_q = larger(0, smaller(p.cu_seqlens_q[sequence + 1] - first_q, p.len_q));
    const i32 rows_kv = larger(0, smaller(p.cu_seqlens_k[sequence + 1] - first_key, p.len_kv));
    return {first_q,
            first_key,
            rows_q,
            rows_kv,
            used(p.seqused_q, sequence, rows_q),
            used(p.seqused_k, sequence, rows_kv)};
  }

 private:
  FLASHGEN_DEVICE static i32 used(const i32* counts, i32 sequence, i32 rows) {
    return counts == nullptr ? rows : larger(0, smaller(counts[sequence], rows));
  }
};

// The band of one sequence: what is aligned at the bottom right moves with its lengths.
template <class Mask, class Params>
FLASHGEN_DEVICE Mask band_of(const Params& p, const PackedSequence& packed) {
  const i32 corner = packed.len_kv - packed.len_q;
  return {larger(p.band_lower + corner, p.corner_lower), smaller(p.band_upper + corner, p.corner_upper),
          packed.len_q, packed.len_kv};
}

}  // namespace flashgen

// ---- kernels/backward_main.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr BackwardConfig kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
    .tile_q = 128,  // B_r: query rows per step
    .tile_kv = 64,  // B_c: keys per block
    .stages = 1,    // slots for Q and dO
    .warps = 4,
    .score_warps = 2,           // warps along the rows of S, dP
    .dk_warps = 2,              // on dK
    .dv_warps = 2,              // on dV
    .dq_warps = 2,              // on dQ
    .has_lower = false,         // the band has a lower bound on k - q
    .has_upper = true,          // the band has an upper bound on k - q
    .vector_reduction = false,  // four-wide additions to global memory
    .access_bytes = 16,         // alignment of rows in global memory
    .async_copy = true,
    .turing = false,  // mma.m16n8k8, as Turing has no k16
};

struct Params {
  const element_t* q;
  const element_t* k;
  const element_t* v;
  const element_t* dout;
  element_t* dk;
  element_t* dv;
  const float* lse;         // log-sum-exp, (heads_q, total_q)
  const float* dsum;        // D = rowsum(dO * O), (heads_q, total_q)
  float* dq_accum;          // workspace that dQ is summed in
  const i32* cu_seqlens_q;  // where the queries of each sequence begin, and where the last one's end
  const i32* cu_seqlens_k;
  const i32* seqused_q;  // how many of them are used; null: all
  const i32* seqused_k;
  i64 q_batch, q_row, q_head;  // strides are in elements
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 dout_batch, dout_row, dout_head;
  i64 dk_batch, dk_row, dk_head;
  i64 dv_batch, dv_row, dv_head;
  i64 total_q;  // queries of all sequences
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;           // of the longest sequence
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // relative to the diagonal through the last query and the last key
  i32 corner_lower;  // the band of terms aligned top-left; band_... is for those aligned bottom-right
  i32 corner_upper;
  float scale;
  float scale_log2;  // scale * log2(e)
};
static_assert(sizeof(Params) == 304, "the launcher packs Params into 304 bytes");

namespace smem {
constexpr u32 kK = 0;         // K_j, and dK_j at the end
constexpr u32 kV = 8192;      // V_j, and dV_j at the end
constexpr u32 kQ = 16384;     // Q_i
constexpr u32 kDo = 32768;    // dO_i
constexpr u32 kP = 49152;     // P_ij
constexpr u32 kDs = 65536;    // dS_ij
constexpr u32 kLse = 81920;   // L_i
constexpr u32 kDsum = 82432;  // D_i

}  // namespace smem

using Shape = BackwardShape<kConfig, element_t>;
using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

FLASHGEN_KERNEL(128, 1) backward_main_d64_causal_varlen_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Thread thread = Thread::current();

  // This block computes dK_j and dV_j: one tile of keys of one head of one sequence. The first tiles, which a
  // causal mask makes the longest, go first.
  const Place place = Place::current();
  const PackedSequence packed = PackedSequence::of(p, place.sequence);
  if (place.tile * kConfig.tile_kv >= packed.rows_kv) return;
  const i32 first_key = place.tile * kConfig.tile_kv;

  // With grouped queries the loop below runs over every head of the group, so dK and dV sum over it by themselves.
  const i32 first_head = place.head * p.group;
  const auto mask_of = [&](i32 member) { return band_of<Mask>(p, packed); };
  QueryWalk<Mask, kConfig.tile_q> ahead(first_key, smaller(first_key + kConfig.tile_kv, packed.len_kv), p.group);

  const Shape::KTile k_tile{shared + smem::kK};
  const Shape::VTile v_tile{shared + smem::kV};
  const Shape::QTile q_ring{shared + smem::kQ};
  const Shape::DOTile do_ring{shared + smem::kDo};
  const Shape::ScoreTile p_tile{shared + smem::kP};
  const Shape::ScoreTile ds_tile{shared + smem::kDs};
  float* const lse_ring = reinterpret_cast<float*>(shared + smem::kLse);
  float* const dsum_ring = reinterpret_cast<float*>(shared + smem::kDsum);

  // Line 6: load K_j, V_j from global to shared memory.
  {
    Shape::KStream k_stream({p.k + packed.first_key * p.k_row + place.head * p.k_head, p.k_row, packed.len_kv}, first_key, thread);
    Shape::VStream v_stream({p.v + packed.first_key * p.v_row + place.head * p.v_head, p.v_row, packed.len_kv}, first_key, thread);
    k_stream.fetch(k_tile, thread);
    k_stream.land(k_tile, thread);
    v_stream.fetch(v_tile, thread);
    v_stream.land(v_tile, thread);
  }

  // Q_i, dO_i, L_i and D_i of an iteration, into its slot of the ring.
  Shape::QStream q_stream({p.q, p.q_row, packed.len_q}, 0, thread);
  Shape::DOStream do_stream({p.dout, p.dout_row, packed.len_q}, 0, thread);
  RowStream<kConfig.tile_q, Shape::threads, kConfig.async_copy> lse_stream{p.lse, packed.len_q};
  RowStream<kConfig.tile_q, Shape::threads, kConfig.async_copy> dsum_stream{p.dsum, packed.len_q};
  const auto fetch = [&](i32 slot, Thread thread) {
    const Step step = ahead.step();
    const i32 head = first_head + step.member;
    const i32 first_q = step.tile * kConfig.tile_q;
    const i64 rows = static_cast<i64>(head) * p.total_q + packed.first_q;
    q_stream.seek({p.q + packed.first_q * p.q_row + head * p.q_head, p.q_row, packed.len_q}, first_q, thread);
    do_stream.seek({p.dout + packed.first_q * p.dout_row + head * p.dout_head, p.dout_row, packed.len_q}, first_q, thread);
    lse_stream.source = p.lse + rows;
    dsum_stream.source = p.dsum + rows;
    q_stream.fetch(q_ring.slot(slot), thread);
    do_stream.fetch(do_ring.slot(slot), thread);
    lse_stream.fetch(lse_ring + slot * kConfig.tile_q, first_q, thread);
    dsum_stream.fetch(dsum_ring + slot * kConfig.tile_q, first_q, thread);
  };
  const auto land = [&](i32 slot, Thread thread) {
    q_stream.land(q_ring.slot(slot), thread);
    do_stream.land(do_ring.slot(slot), thread);
    lse_stream.land(lse_ring + slot * kConfig.tile_q, thread);
    dsum_stream.land(dsum_ring + slot * kConfig.tile_q, thread);
  };
  ahead.start(thread, mask_of);
  if (!ahead.over()) {
    fetch(0, thread);
    land(0, thread);
  }
  commit_copies<kConfig.async_copy>();

  // Line 7: dK_j = 0, dV_j = 0.
  const i32 warp = thread.warp;
  using Scores = Shape::ScoreShare;
  Shape::DKShare::Product dk;
  Shape::DVShare::Product dv;
  clear(dk);
  clear(dv);

  // Line 8: for each tile of queries that may attend to some key of this tile, of each head of the group.
  wait_for_copies<kConfig.async_copy, 0>();
  block_sync();
  const bool has_non_finite_keys = holds_non_finite<Shape::threads>(k_tile, thread);
  i32 slot = 0;
  for (; !ahead.over(); slot = (slot + 1) % kConfig.stages) {
    const Thread here = thread.recomputed();
    const Step step = ahead.step();
    const i32 first_q = step.tile * kConfig.tile_q;
    // Line 9: Q_i, dO_i, L_i, D_i have arrived, and no warp needs P and dS of the iteration before.
    wait_for_copies<kConfig.async_copy, 0>();
    block_sync();
    const Shape::QTile q_tile = q_ring.slot(slot);
    const Shape::DOTile do_tile = do_ring.slot(slot);
    const i32 row = Scores::row(here.warp), column = Scores::column(here.warp);
    const Mask mask = mask_of(step.member);
    const bool whole = mask.is_full(first_q + row, first_q + row + Scores::warp_rows, first_key + column,
                                    first_key + column + Scores::warp_columns);

    // Lines 10 and 11: S_ij = Q_i K_j^T, P_ij = exp(S_ij - L_i).
    Scores::Product scores;
    clear(scores);
    multiply<element_t, kConfig.turing, Shape::dim / Shape::depth>(scores, LeftRows(q_tile, row, here),
                                                                   RightTransposed(k_tile, column, here));
    probabilities(scores, lse_ring + slot * kConfig.tile_q + row, p.scale_log2, here);
    if (!whole) mask_pairs(scores, 0.0f, mask, first_q + row, first_key + column, here);
    store_accumulator(p_tile, row, column, scores, here, [](i32, i32) { return 1.0f; });

    // Lines 13 and 14: dP_ij = dO_i V_j^T, dS_ij = P_ij * (dP_ij - D_i).
    Scores::Product ds;
    clear(ds);
    multiply<element_t, kConfig.turing, Shape::dim_v / Shape::depth>(ds, LeftRows(do_tile, row, here),
                                                                     RightTransposed(v_tile, column, here));
    score_gradients(ds, scores, dsum_ring + slot * kConfig.tile_q + row, here);
    if (!whole) mask_pairs(ds, 0.0f, mask, first_q + row, first_key + column, here);
    store_accumulator(ds_tile, row, column, ds, here, [](i32, i32) { return 1.0f; });
    block_sync();

    const Thread there = here.recomputed();
    // Line 12: dV_j += P_ij^T dO_i.
    multiply<element_t, kConfig.turing, kConfig.tile_q / Shape::depth>(
        dv, LeftColumns(p_tile, Shape::DVShare::row(there.warp), there),
        RightRows<Shape::DOTile, Shape::DVShare::aligned>(do_tile, Shape::DVShare::column(there.warp), there));

    // Line 16: dK_j += dS_ij^T Q_i.
    multiply<element_t, kConfig.turing, kConfig.tile_q / Shape::depth>(
        dk, LeftColumns(ds_tile, Shape::DKShare::row(there.warp), there),
        RightRows<Shape::QTile, Shape::DKShare::aligned>(q_tile, Shape::DKShare::column(there.warp), there));

    // Line 15: dQ_i += dS_ij K_j, in global memory.
    using DQ = Shape::DQShare;
    DQ::Product dq;
    clear(dq);
    multiply<element_t, kConfig.turing, kConfig.tile_kv / Shape::depth>(
        dq, LeftRows(ds_tile, DQ::row(there.warp), there),
        RightRows<Shape::KTile, DQ::aligned>(k_tile, DQ::column(there.warp), there));
    const Place queried{first_q / kConfig.tile_q, first_head + step.member, place.sequence};
    float* const workspace =
        p.dq_accum + queried.number(ceil_div(p.len_q, kConfig.tile_q), p.heads_q) * (kConfig.tile_q * Shape::dim);
    // Where the mask cuts through, a non-finite value of K must not reach queries that do not attend to its key.
    if (has_non_finite_keys && !mask.is_full(first_q, first_q + kConfig.tile_q, first_key, first_key + kConfig.tile_kv)) {
      add_allowed_pairs<kConfig.vector_reduction, Shape::threads, DQ>(workspace, ds_tile, k_tile, mask, first_q,
                                                                           first_key, there);
    } else {
      add_to_workspace<kConfig.vector_reduction, DQ>(workspace, there, dq);
    }

    // No warp needs this slot any more: the next Q_i, dO_i, L_i, D_i take it.
    block_sync();
    ahead.advance(there, mask_of);
    if (!ahead.over()) {
      fetch(0, there);
      land(0, there);
    }
    commit_copies<kConfig.async_copy>();
  }

  // Line 18: write dK_j, dV_j to global memory.
  wait_for_copies<kConfig.async_copy, 0>();
  block_sync();
  store_accumulator(k_tile, Shape::DKShare::row(warp), Shape::DKShare::column(warp), dk,
                    thread, [&](i32, i32) { return p.scale; });
  store_accumulator(v_tile, Shape::DVShare::row(warp), Shape::DVShare::column(warp), dv,
                    thread, [](i32, i32) { return 1.0f; });
  block_sync();
  store_rows<Shape::KTile, Shape::threads, kConfig.head_dim, kConfig.access_bytes>(
      k_tile, {p.dk + packed.first_key * p.dk_row + place.head * p.dk_head, p.dk_row, packed.rows_kv}, first_key, thread);
  store_rows<Shape::VTile, Shape::threads, kConfig.head_dim_v, kConfig.access_bytes>(
      v_tile, {p.dv + packed.first_key * p.dv_row + place.head * p.dv_head, p.dv_row, packed.rows_kv}, first_key, thread);
}
