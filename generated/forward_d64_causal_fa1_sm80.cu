// forward_d64_causal_fa1_sm80: FlashAttention-1, forward pass: O and the log-sum-exp of each row.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --algorithm fa1 --arch sm_80
// for      sm_80 (A100)
// plan     tile_q 64, tile_kv 256, stages 2, warps 8, 256 threads
// grid     one block for every query head and batch entry
// smem     149760 bytes
// because  B_c = ceil(M / 4d) = 326 and B_r = min(B_c, d) = 64, but at most 256 and multiples of 16
//
// contents   29  Instructions, one per function: types, device, copy, math, matrix.
//           188  Element types.
//           244  Finding NaN and infinity.
//           261  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//           325  Operands of warp-level matrix products.
//           421  Warp-level matrix products.
//           492  Banded masks.
//           554  Streaming tiles between global and shared memory.
//           657  Keeping NaN and infinity where they belong.
//           704  Single elements from floats.
//           716  What a softmax takes exponentials of.
//           729  The exponentials of a softmax that subtracts the maximum of each row.
//           746  What FlashAttention-1's forward kernel is made of.
//           824  The kernel: its configuration, parameters and text.

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

FLASHGEN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` groups are in flight.
template <int pending>
FLASHGEN_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// ---- flashgen/ptx/math.cuh
// Scalar arithmetic, one instruction each.

// 2^x within 2 ulp. Subnormal results are flushed to zero.
FLASHGEN_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLASHGEN_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The larger of two. If one is NaN, the result is the other.
FLASHGEN_DEVICE float maximum(float a, float b) {
  float c;
  asm("max.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
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

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2 = 0x1.62e430p-1f;
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
};

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

// Elements of the summed dimension that one multiply step consumes: two chunks, except floats.
template <class T>
constexpr i32 kStepDepth = kIsFloat<T> ? 8 : 2 * kChunkBytes / static_cast<i32>(sizeof(T));

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
  // The tile's rows from `row` on, a multiple of eight so that the swizzle stays in step.
  FLASHGEN_DEVICE SharedTile from_row(i32 row) const { return {data + row * row_bytes}; }
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
};

// The tiles that contain rows (or columns) from `begin`, which is not negative, to `end`.
FLASHGEN_DEVICE Range tiles_of(i32 begin, i32 end, i32 tile) {
  return {begin / tile, larger(begin / tile, ceil_div(larger(end, 0), tile))};
}

// The plan says which bounds exist. Their values are kernel parameters.
template <bool has_lower, bool has_upper>
struct Band {
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

// ---- flashgen/contain.cuh
// Keeping NaN and infinity where they belong. A product with a probability of 0 is 0 * NaN = NaN, so a
// non-finite value in a key that a query may not attend to would reach the query through any tile that the
// mask cuts through. Such tiles are searched first. If one holds a non-finite value, which is rare, the
// non-finite values are cleared before the product, and the results they should have reached become NaN
// afterwards.

FLASHGEN_DEVICE bool is_non_finite(float x) { return non_finite_signs<float>(bits_of(x)) != 0; }
FLASHGEN_DEVICE bool is_non_finite(bfloat16_t x) { return non_finite_signs<bfloat16_t>(x.bits) != 0; }

template <class T>
FLASHGEN_DEVICE T not_a_number() {
  if constexpr (kIsFloat<T>) {
    return float_of(0x7fffffffu);
  } else {
    return T{0x7fff};
  }
}

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

// Replaces every element that is not finite by 0.
template <i32 threads, class Tile>
FLASHGEN_DEVICE void clear_non_finite(Tile tile, Thread thread) {
  using T = typename Tile::Element;
  constexpr i32 bits = 8 * static_cast<i32>(sizeof(T));
#pragma unroll 1
  for (i32 i = thread.index(); i < Tile::bytes / static_cast<i32>(sizeof(u32)); i += threads) {
    u32& word = reinterpret_cast<u32*>(tile.data)[i];
    const u32 signs = non_finite_signs<T>(word);
    // From the sign bit of each non-finite element to all of its bits.
    word &= kIsFloat<T> ? (signs != 0 ? 0u : ~0u) : ~((signs >> (bits - 1)) * ((1u << bits % 32) - 1u));
  }
  block_sync();
}

// ---- flashgen/convert.cuh
// Single elements from floats.

template <class T>
FLASHGEN_DEVICE T element_from(float value) {
  if constexpr (kIsFloat<T>) {
    return value;
  } else {
    return T{static_cast<u16>(pack(T{}, value, 0.0f))};
  }
}

// ---- flashgen/logits.cuh
// What a softmax takes exponentials of. The exponentials of a row are relative to its reference maximum: the
// row's maximum so far, or a number near it. Each kind of logits has its own unit for reference maxima.
//
//     logit(s, row)            accumulator s as a reference maximum; as_reference_max(x): logit x as one
//     relative(s, shift, row)  how far s is above reference maximum `shift`, in powers of two
//     powers(x), distance(x)   from a difference of reference maxima to powers of two, and back
//     natural_log(m, x)        the natural logarithm of 2^x times the factor of reference maximum m
//     kNoMax                   the reference maximum of a row without an allowed key so far

// a - b, where the compiler must not fuse a product that yields a: it was rounded when the maximum was found.
FLASHGEN_DEVICE float rounded_difference(float a, float b) { return fused_multiply_add(a, 1.0f, -b); }

// ---- flashgen/lineage/exponential.cuh
// The exponentials of a softmax that subtracts the maximum of each row.

// The maximum to subtract. A row without allowed keys subtracts 0, because -inf - (-inf) is NaN.
FLASHGEN_DEVICE float shift_of(float maximum) { return maximum == -kInfinity ? 0.0f : maximum; }

// exp(s - shift). The difference is rounded by itself: fused with the product that gave s, it would differ
// from the maximum's by the rounding of s, which is 0.03 for scores of a million.
FLASHGEN_DEVICE float exponential(float s, float shift) {
  return exp2_approx(rounded_difference(s, shift) * kLog2E);
}

// log(sum of exp(s)) of a row from its maximum and its sum of exp(s - maximum).
FLASHGEN_DEVICE float log_sum_exp(float maximum, float sum) {
  return sum == 0.0f ? -kInfinity : maximum + log2_approx(sum) * kLn2;
}

// ---- flashgen/lineage/fa1.cuh
// What FlashAttention-1's forward kernel is made of: a block's warps split the keys of a tile, so each strip
// of rows needs all of them, and they meet in shared memory.

struct Fa1Config {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 strip;
  i32 stages;
  i32 warps;
  bool has_lower;
  bool has_upper;
  i32 access_bytes;
  bool async_copy;
  bool turing;
};

template <Fa1Config cfg, class T>
struct Fa1Shape {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 dim = round_up(cfg.head_dim, 16);
  static constexpr i32 dim_v = round_up(cfg.head_dim_v, 16);
  static constexpr i32 warp_keys = cfg.tile_kv / cfg.warps;
  // Wide outputs are computed in two halves, as each warp holds all columns of its product.
  static constexpr i32 columns = dim_v <= 64 ? dim_v : kIsFloat<T> && dim_v == 128 ? 32 : dim_v / 2;
  static constexpr i32 row_blocks = cfg.strip / 16;
  static constexpr i32 key_blocks = warp_keys / 8;
  static_assert(warp_keys % 16 == 0 && cfg.tile_q % cfg.strip == 0 && cfg.strip % 16 == 0,
                "warps multiply blocks of 16 x 16");

  using QTile = SharedTile<T, cfg.tile_q, dim>;
  using KTile = SharedTile<T, cfg.tile_kv, dim>;
  using VTile = SharedTile<T, cfg.tile_kv, dim_v>;
  // Keys and values arrive in parts, as copies by way of registers have no room for all of them.
  using KPart = SharedTile<T, 16, dim>;
  using VPart = SharedTile<T, 16, dim_v>;
  using QStream = TileStream<QTile, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using KStream = TileStream<KPart, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using VStream = TileStream<VPart, threads, cfg.head_dim_v, cfg.access_bytes, cfg.async_copy>;
  using Scores = Accumulator<row_blocks, key_blocks>;
  using Output = Accumulator<row_blocks, columns / 8>;
  using Probabilities = LeftRegisters<T, row_blocks, key_blocks>;

  // What the warps tell each other of a strip: [warp][row], and P V as [warp][row][column].
  struct Exchange {
    float maxima[cfg.warps][cfg.strip];
    float sums[cfg.warps][cfg.strip];
    // What O_i so far and the tile's product count in the new O_i.
    float old_share[cfg.strip];
    float new_share[cfg.strip];
    float outputs[cfg.warps][cfg.strip][dim_v];
  };
};

// Calls visit(m, h, row) for each of a lane's rows.
template <i32 row_blocks, class Visit>
FLASHGEN_DEVICE void for_rows(Thread thread, const Visit& visit) {
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) visit(m, h, 16 * m + 8 * h + thread.row());
  }
}

// The maximum or the sum of a warp's scores in one row, which four lanes share.
template <i32 columns, class Combine>
FLASHGEN_DEVICE float row_of(const float (&scores)[columns][4], i32 h, const Combine& combine) {
  float x = combine(scores[0][2 * h], scores[0][2 * h + 1]);
#pragma unroll
  for (i32 n = 1; n < columns; ++n) x = combine(x, combine(scores[n][2 * h], scores[n][2 * h + 1]));
  x = combine(x, shuffle_xor(x, 1));
  return combine(x, shuffle_xor(x, 2));
}

}  // namespace flashgen

// ---- kernels/lineage/fa1.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr Fa1Config kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
    .tile_q = 64,    // B_r: query rows per step
    .tile_kv = 256,  // B_c: keys per tile
    .strip = 32,     // query rows that warps compute at once
    .stages = 2,     // tiles of queries in flight
    .warps = 8,
    .has_lower = false,  // the mask ends on the left
    .has_upper = true,   // the mask ends on the right
    .access_bytes = 16,  // alignment of rows in global memory
    .async_copy = true,
    .turing = false,  // half-depth tensor-core steps
};

struct Params {
  const element_t* q;
  const element_t* k;
  const element_t* v;
  element_t* o;
  float* lse;                  // log-sum-exp, (batch, heads_q, len_q)
  float* o_accum;              // O so far, divided by l, (batch, heads_q, len_q, head_dim_v rounded up to 16)
  float* row_sums;             // l so far, (batch, heads_q, len_q)
  float* row_maxima;           // m so far, (batch, heads_q, len_q)
  i64 q_batch, q_row, q_head;  // strides are in elements
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 o_batch, o_row, o_head;
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  float scale;
};
static_assert(sizeof(Params) == 192, "the launcher packs Params into 192 bytes");

namespace smem {
constexpr u32 kQ = 0;             // Q_i, 2 slots
constexpr u32 kK = 16384;         // K_j
constexpr u32 kV = 49152;         // V_j
constexpr u32 kExchange = 81920;  // row maxima, row sums and P V of each warp

}  // namespace smem

using Shape = Fa1Shape<kConfig, element_t>;
using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

FLASHGEN_KERNEL(256, 1) forward_d64_causal_fa1_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Thread thread = Thread::current();

  // This block computes O of one head of one sequence. Line numbers are those of Algorithm 1 of FlashAttention-1.
  const Place place = Place::current();
  const i32 head_kv = place.head / p.group;
  const Mask mask = Mask::of(p, place.sequence, place.head);
  const i64 first_row = (static_cast<i64>(place.sequence) * p.heads_q + place.head) * p.len_q;
  float* const o_accum = p.o_accum + first_row * Shape::dim_v;
  float* const row_sums = p.row_sums + first_row;
  float* const row_maxima = p.row_maxima + first_row;

  const Shape::QTile q_ring{shared + smem::kQ};
  const Shape::KTile k_tile{shared + smem::kK};
  const Shape::VTile v_tile{shared + smem::kV};
  auto& exchange = *reinterpret_cast<Shape::Exchange*>(shared + smem::kExchange);
  Shape::QStream q_stream({p.q + place.sequence * p.q_batch + place.head * p.q_head, p.q_row, p.len_q}, 0, thread);

  Shape::KStream k_stream({p.k + place.sequence * p.k_batch + head_kv * p.k_head, p.k_row, p.len_kv}, 0, thread);
  Shape::VStream v_stream({p.v + place.sequence * p.v_batch + head_kv * p.v_head, p.v_row, p.len_kv}, 0, thread);

  // Line 2: O = 0, l = 0, m = -inf in device memory.
  const i64 elements = static_cast<i64>(p.len_q) * Shape::dim_v;
  for (i64 i = thread.index(); i < elements; i += Shape::threads) o_accum[i] = 0.0f;
  for (i32 q = thread.index(); q < p.len_q; q += Shape::threads) {
    row_sums[q] = 0.0f;
    row_maxima[q] = -kInfinity;
  }

  // Line 5: the outer loop goes over tiles of keys.
  bool has_non_finite = false;
  const i32 kv_tiles = ceil_div(p.len_kv, kConfig.tile_kv);
  for (i32 j = 0; j < kv_tiles; ++j) {
    const i32 first_key = j * kConfig.tile_kv;
    const Range queries = mask.query_tiles(first_key, smaller(first_key + kConfig.tile_kv, p.len_kv), kConfig.tile_q);

    // Line 6: load K_j, V_j from device to shared memory, and Q_i of the first step. No warp needs the tiles before them.
#pragma unroll 1
    for (i32 row = 0; row < kConfig.tile_kv; row += Shape::KPart::rows) {
      const Shape::KPart k_part{k_tile.from_row(row).data};
      const Shape::VPart v_part{v_tile.from_row(row).data};
      k_stream.fetch(k_part, thread);
      k_stream.land(k_part, thread);
      v_stream.fetch(v_part, thread);
      v_stream.land(v_part, thread);
    }
    q_stream.seek({p.q + place.sequence * p.q_batch + place.head * p.q_head, p.q_row, p.len_q}, queries.begin * kConfig.tile_q, thread);
    q_stream.fetch(q_ring, thread);
    q_stream.land(q_ring, thread);
    commit_copies<kConfig.async_copy>();
    wait_for_copies<kConfig.async_copy, 0>();
    block_sync();
    // A non-finite value of V must not reach queries that do not attend to its key.
    if (holds_non_finite<Shape::threads>(v_tile, thread)) {
      clear_non_finite<Shape::threads>(v_tile, thread);
      has_non_finite = true;
    }

    // Line 7: the inner loop goes over tiles of queries.
    for (i32 i = queries.begin; i < queries.end; ++i) {
      // Line 8: Q_i has arrived, and Q_{i+1} is fetched meanwhile where there is a second slot.
      const i32 slot = (i - queries.begin) % kConfig.stages;
      wait_for_copies<kConfig.async_copy, 0>();
      block_sync();
      if (kConfig.stages > 1 && i + 1 < queries.end) {
        q_stream.fetch(q_ring.slot((slot + 1) % kConfig.stages), thread);
        commit_copies<kConfig.async_copy>();
      }
      const Shape::QTile q_tile = q_ring.slot(slot);

#pragma unroll 1
      for (i32 strip = 0; strip < kConfig.tile_q; strip += kConfig.strip) {
        // Addresses are computed again for each strip: there are no registers to keep them in.
        const Thread here = thread.recomputed();
        const i32 first_q = i * kConfig.tile_q + strip;
        const i32 warp_key = here.warp * Shape::warp_keys;
        const i32 end_q = smaller(first_q + kConfig.strip, p.len_q);
        if (first_q >= end_q) break;

        // Line 9: S_ij = scale * Q_i K_j^T. Each warp owns columns, i.e. keys.
        Shape::Scores scores;
        clear(scores);
        multiply<element_t, kConfig.turing, Shape::dim / kStepDepth<element_t>>(
            scores, LeftRows(q_tile, strip, here), RightTransposed(k_tile, warp_key, here));
        for_rows<Shape::row_blocks>(here, [&](i32 m, i32 h, i32) {
#pragma unroll
          for (i32 n = 0; n < Shape::key_blocks; ++n) {
            scores[m][n][2 * h] *= p.scale;
            scores[m][n][2 * h + 1] *= p.scale;
          }
        });
        const i32 key = first_key + warp_key;
        if (!mask.is_full(first_q, first_q + kConfig.strip, key, key + Shape::warp_keys)) {
          mask_pairs(scores, -kInfinity, mask, first_q, key, here);
        }

        // Line 10: m~_ij = rowmax(S_ij), for which the warps have to meet, ...
        for_rows<Shape::row_blocks>(here, [&](i32 m, i32 h, i32 row) {
          const float largest = row_of(scores[m], h, [](float a, float b) { return maximum(a, b); });
          if (here.column() == 0) exchange.maxima[here.warp][row] = largest;
        });
        block_sync();
        // ... P~_ij = exp(S_ij - m~_ij), and l~_ij = rowsum(P~_ij).
        for_rows<Shape::row_blocks>(here, [&](i32 m, i32 h, i32 row) {
          float largest = exchange.maxima[0][row];
#pragma unroll
          for (i32 w = 1; w < kConfig.warps; ++w) largest = maximum(largest, exchange.maxima[w][row]);
#pragma unroll
          for (i32 n = 0; n < Shape::key_blocks; ++n) {
            scores[m][n][2 * h] = exponential(scores[m][n][2 * h], shift_of(largest));
            scores[m][n][2 * h + 1] = exponential(scores[m][n][2 * h + 1], shift_of(largest));
          }
          const float sum = row_of(scores[m], h, [](float a, float b) { return a + b; });
          if (here.column() == 0) exchange.sums[here.warp][row] = sum;
        });

        // Line 12, first half: P~_ij V_j of each warp's keys, which is added up through shared memory.
        const Shape::Probabilities probabilities(scores, here);
#pragma unroll 1
        for (i32 first = 0; first < Shape::dim_v; first += Shape::columns) {
          const Thread there = here.recomputed();
          Shape::Output out;
          clear(out);
          multiply<element_t, kConfig.turing, Shape::warp_keys / kStepDepth<element_t>>(
              out, probabilities, RightRows<Shape::VTile, Shape::columns == Shape::dim_v>(v_tile.from_row(warp_key), first, there));
          for_rows<Shape::row_blocks>(there, [&](i32 m, i32 h, i32 row) {
#pragma unroll
            for (i32 n = 0; n < Shape::columns / 8; ++n) {
              float* const to = &exchange.outputs[there.warp][row][first + 8 * n + there.column()];
              to[0] = out[m][n][2 * h];
              to[1] = out[m][n][2 * h + 1];
            }
          });
        }
        block_sync();

        // Lines 11 and 13: m_i^new and l_i^new, back to device memory.
        for (i32 row = here.index(); row < end_q - first_q; row += Shape::threads) {
          float tile_maximum = -kInfinity, tile_sum = 0.0f;
#pragma unroll
          for (i32 w = 0; w < kConfig.warps; ++w) {
            tile_maximum = maximum(tile_maximum, exchange.maxima[w][row]);
            tile_sum += exchange.sums[w][row];
          }
          const float m = row_maxima[first_q + row], m_new = maximum(m, tile_maximum);
          const float before = row_sums[first_q + row] * exponential(m, shift_of(m_new));
          const float now = exponential(tile_maximum, shift_of(m_new));
          const float l_new = before + tile_sum * now;
          row_maxima[first_q + row] = m_new;
          row_sums[first_q + row] = l_new;
          exchange.old_share[row] = l_new == 0.0f ? 0.0f : before / l_new;
          exchange.new_share[row] = l_new == 0.0f ? 0.0f : now / l_new;
        }
        block_sync();

        // Line 12: O_i, which is kept divided by l_i, to device memory and back.
        constexpr i32 fours = Shape::dim_v / 4;
        float* const o_strip = o_accum + static_cast<i64>(first_q) * Shape::dim_v;
#pragma unroll
        for (i32 step = 0; step < ceil_div(kConfig.strip * fours, Shape::threads); ++step) {
          const i32 n = here.index() + step * Shape::threads, row = n / fours, column = n % fours * 4;
          if (row >= end_q - first_q) continue;
          float product[4] = {};
#pragma unroll
          for (i32 w = 0; w < kConfig.warps; ++w) {
            const Vec16 part = *reinterpret_cast<const Vec16*>(&exchange.outputs[w][row][column]);
#pragma unroll
            for (i32 e = 0; e < 4; ++e) product[e] += float_of(part.words[e]);
          }
          const float old_share = exchange.old_share[row], new_share = exchange.new_share[row];
          Vec16& o = *reinterpret_cast<Vec16*>(o_strip + 4 * n);
          Vec16 sum = o;
#pragma unroll
          for (i32 e = 0; e < 4; ++e) sum.words[e] = bits_of(old_share * float_of(sum.words[e]) + new_share * product[e]);
          o = sum;
        }
      }
      if (kConfig.stages == 1 && i + 1 < queries.end) {
        q_stream.fetch(q_ring, thread);
        q_stream.land(q_ring, thread);
        commit_copies<kConfig.async_copy>();
      }
    }
  }
  block_sync();

  // Line 16: O in the dtype of the inputs, and L = m + log(l).
  for (i64 i = thread.index(); i < elements; i += Shape::threads) {
    const i32 q = static_cast<i32>(i / Shape::dim_v), column = static_cast<i32>(i % Shape::dim_v);
    if (column >= kConfig.head_dim_v) continue;
    element_t value = element_from<element_t>(o_accum[i]);
    if (has_non_finite) {
      for (i32 key = 0; key < p.len_kv; ++key) {
        const element_t* const v = p.v + place.sequence * p.v_batch + head_kv * p.v_head + key * p.v_row;
        if (mask.allows(q, key) && is_non_finite(v[column])) value = not_a_number<element_t>();
      }
    }
    p.o[place.sequence * p.o_batch + q * p.o_row + place.head * p.o_head + column] = value;
  }
  for (i32 q = thread.index(); q < p.len_q; q += Shape::threads) {
    p.lse[first_row + q] = log_sum_exp(row_maxima[q], row_sums[q]);
  }
}
