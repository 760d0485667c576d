// forward_d64_causal_dropout_sm80: FlashAttention-2, forward pass: O and the log-sum-exp of each row.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false,"dropout":true}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --dropout --arch sm_80
// for      sm_80 (A100)
// plan     tile_q 64, tile_kv 64, stages 2, warps 4, 128 threads
// grid     one block for every 64 query rows of every query head and batch entry
// smem     40960 bytes
// because  16 rows per warp leave registers for the dropout mask
//
// contents   32  Instructions, one per function: types, device, copy, math, matrix.
//           193  Element types.
//           255  Finding NaN and infinity.
//           272  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//           342  Operands of warp-level matrix products.
//           438  Warp-level matrix products.
//           509  Banded masks.
//           581  Walking over the tiles that a mask does not rule out.
//           616  Streaming tiles between global and shared memory.
//           767  Keeping NaN and infinity where they belong.
//           838  What a softmax takes exponentials of.
//           864  What an online softmax keeps of each row from one tile of keys to the next.
//           877  The online softmax.
//          1029  What the forward kernel is made of.
//          1086  Philox 4x32-10.
//          1117  Dropout.
//          1221  The kernel: its configuration, parameters and text.

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
FLASHGEN_DEVICE bool warp_any(bool condition) { return __any_sync(0xffffffffu, condition) != 0; }
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
  FLASHGEN_DEVICE bool has(i32 i) const { return begin <= i && i < end; }
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

  // Tiles of keys that some query of [q_begin, q_end) may attend to.
  FLASHGEN_DEVICE Range key_tiles(i32 q_begin, i32 q_end, i32 tile) const {
    i32 begin = 0, end = len_kv;
    end = smaller(end, q_end + upper);
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

  // Leaves out the next `tiles` tiles.
  FLASHGEN_DEVICE void skip(i32 tiles) {
    next += static_cast<i64>(tiles) * Tile::rows * stride;
    rows_left -= tiles * Tile::rows;
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

// Puts NaN into the results of queries that attend to a non-finite value in a tile that the mask cuts
// through. `results` are the tile of queries from first_q on, `source` the keys' rows that were multiplied;
// every thread takes columns of its own.
template <i32 threads, i32 head_dim, i32 tile_kv, class Tile, class Mask, class T = typename Tile::Element>
FLASHGEN_DEVICE void mark_non_finite_results(Tile results, i32 first_q, GlobalRows<const T> source,
                                             Range keys, const Mask& mask, Thread thread) {
  const i32 end_q = smaller(first_q + Tile::rows, mask.len_q);
#pragma unroll 1
  for (i32 column = thread.index(); column < head_dim; column += threads) {
#pragma unroll 1
    for (i32 key = keys.begin * tile_kv; key < smaller(keys.end * tile_kv, source.row_count); ++key) {
      const i32 first_key = key / tile_kv * tile_kv;
      if (mask.is_full(first_q, end_q, first_key, first_key + tile_kv) ||
          !is_non_finite(*source.at(key, column)))
        continue;
#pragma unroll 1
      for (i32 q = first_q; q < end_q; ++q) {
        if (mask.allows(q, key))
          *results.element_at(q - first_q, column) = not_a_number<typename Tile::Element>();
      }
    }
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

// Products that a scale turns into logits. Reference maxima are in powers of two, so that an exponent is one
// instruction. For logits beyond 2^30 its rounding error is many powers of two.
struct ScaledProducts {
  float scale_log2;

  FLASHGEN_DEVICE float logit(float s, i32 /*row*/) const { return s * scale_log2; }
  FLASHGEN_DEVICE float relative(float s, float shift, i32 /*row*/) const {
    return fused_multiply_add(s, scale_log2, -shift);
  }
  FLASHGEN_DEVICE static float powers(float x) { return x; }
  FLASHGEN_DEVICE static float distance(float x) { return x; }
  FLASHGEN_DEVICE static float natural_log(float reference_max, float x) {
    return (reference_max + x) * kLn2;
  }
};

// ---- flashgen/row_statistics.cuh
// What an online softmax keeps of each row from one tile of keys to the next.

// The four lanes that share a row of accumulators combine their values.
FLASHGEN_DEVICE float row_maximum(float x) {
  x = maximum(x, shuffle_xor(x, 1));
  return maximum(x, shuffle_xor(x, 2));
}
FLASHGEN_DEVICE float row_total(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// ---- flashgen/softmax.cuh
// The online softmax: running row maxima and sums, and the rescaling that keeps them consistent.

// A row's maximum may lag behind by this many powers of two before the row is rescaled: the result is the
// same (numerator and denominator share the factor), and most tiles then need no rescaling at all.
constexpr float kMaximumLag = 8.0f;

// The power of two of the largest exponential of a row.
template <class Logits>
constexpr float headroom_of() {
  if constexpr (requires { Logits::kHeadroom; }) {
    return Logits::kHeadroom;
  } else {
    return 0.0f;
  }
}

// The reference maximum of a row whose largest logit is `logit`. Without headroom it is that logit: 16-bit
// kernels do not subtract.
template <class Logits>
FLASHGEN_DEVICE float reference_below(float logit) {
  if constexpr (headroom_of<Logits>() == 0.0f) {
    return logit;
  } else {
    return logit - Logits::distance(headroom_of<Logits>());
  }
}

// What exponentials add to a row's sum: all of them count alike.
struct EqualWeights {
  FLASHGEN_DEVICE float weighted_sum(float a, float b, i32 /*n*/) const { return a + b; }
};

// Statistics of 16 * row_blocks rows; element [m][h] is that of the lane's row l/4 + 8h of block m.
template <i32 row_blocks, class Logits>
struct OnlineSoftmax {
  // The running maximum of the row's logits less the headroom, a reference maximum: the factor taken out of
  // the row.
  float reference_max[row_blocks][2];
  // This lane's share of the row's sum of exponentials.
  float sum[row_blocks][2];

  FLASHGEN_DEVICE void reset() {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        reference_max[m][h] = -kInfinity;
        sum[m][h] = 0.0f;
      }
    }
  }

  // Takes in a tile of scores, which become exponentials, and rescales what was accumulated before.
  template <i32 columns, i32 out_columns, class Weights = EqualWeights>
  FLASHGEN_DEVICE void update(Accumulator<row_blocks, columns>& scores,
                              Accumulator<row_blocks, out_columns>& out, const Logits& logits,
                              const Weights& weights = {}) {
    // Each lane looks at its own columns: as long as no lane sees a score far above its row's maximum, which
    // is the rule, the lanes of a row need not even agree on one.
    float highest[row_blocks][2];
    bool lagging = false;
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) highest[m][h] = maximum(scores[m][0][2 * h], scores[m][0][2 * h + 1]);
    }
#pragma unroll
    for (i32 n = 1; n < columns; ++n) {
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          highest[m][h] = maximum(highest[m][h], maximum(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
        }
      }
    }
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        highest[m][h] = logits.logit(highest[m][h], h);
        lagging |= highest[m][h] > reference_max[m][h] + Logits::distance(kMaximumLag);
      }
    }
    if (warp_any(lagging)) rescale(highest, out);

    // A row with no allowed key so far subtracts 0, so that exp2(-inf - 0) is 0 and not NaN.
    float shift[row_blocks][2];
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h)
        shift[m][h] = reference_max[m][h] == -kInfinity ? 0.0f : reference_max[m][h];
    }
#pragma unroll
    for (i32 n = 0; n < columns; ++n) {
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) {
          scores[m][n][e] = exp2_approx(logits.relative(scores[m][n][e], shift[m][e / 2], e / 2));
        }
#pragma unroll
        for (i32 h = 0; h < 2; ++h)
          sum[m][h] += weights.weighted_sum(scores[m][n][2 * h], scores[m][n][2 * h + 1], n);
      }
    }
  }

  // Adds up the lanes' shares; afterwards every lane of a row has the row's sum.
  FLASHGEN_DEVICE void finish() {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) sum[m][h] = row_total(sum[m][h]);
    }
  }

  // 1 / sum, and 0 for a row that attended to nothing.
  FLASHGEN_DEVICE float normalizer(i32 m, i32 h) const { return sum[m][h] == 0.0f ? 0.0f : 1.0f / sum[m][h]; }

  // Natural log of the sum of exponentials; -inf for a row that attended to nothing.
  FLASHGEN_DEVICE float log_sum_exp(i32 m, i32 h) const {
    return sum[m][h] == 0.0f ? -kInfinity : Logits::natural_log(reference_max[m][h], log2_approx(sum[m][h]));
  }

 private:
  // Each row decides for itself, so no row's result depends on its neighbors.
  template <i32 out_columns>
  FLASHGEN_DEVICE void rescale(const float (&highest)[row_blocks][2],
                               Accumulator<row_blocks, out_columns>& out) {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const float tile_maximum = row_maximum(highest[m][h]);
        const bool lags = tile_maximum > reference_max[m][h] + Logits::distance(kMaximumLag);
        const float raised = reference_below<Logits>(tile_maximum);
        const float factor = lags ? exp2_approx(Logits::powers(reference_max[m][h] - raised)) : 1.0f;
        if (lags) reference_max[m][h] = raised;
        sum[m][h] *= factor;
#pragma unroll
        for (i32 n = 0; n < out_columns; ++n) {
          out[m][n][2 * h] *= factor;
          out[m][n][2 * h + 1] *= factor;
        }
      }
    }
  }
};

// ---- flashgen/forward.cuh
// What the forward kernel is made of.

struct ForwardConfig {
  i32 head_dim, head_dim_v;
  i32 tile_q, tile_kv;
  i32 stages, warps;
  bool split_k;
  bool has_lower, has_upper;
  bool q_in_registers;
  i32 access_bytes;
  bool async_copy;
  bool turing;
};

// Shapes that follow from the config. O has elements of type O.
template <ForwardConfig cfg, class T, class O = T>
struct ForwardShape {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  // Rows of tiles are whole pairs of chunks.
  static constexpr i32 tile_columns = sizeof(T) == 1 ? 2 * kChunkBytes : 16;
  static constexpr i32 dim = round_up(cfg.head_dim, tile_columns);
  static constexpr i32 dim_v = round_up(cfg.head_dim_v, 16);
  // A warp's share of a tile of scores.
  static constexpr i32 warp_rows = cfg.split_k ? cfg.tile_q : cfg.tile_q / cfg.warps;
  static constexpr i32 warp_keys = cfg.split_k ? cfg.tile_kv / cfg.warps : cfg.tile_kv;
  static_assert(warp_rows % 16 == 0 && warp_rows > 0, "each warp must own a multiple of 16 query rows");
  static_assert(warp_keys % 16 == 0 && warp_keys > 0, "each warp must own a multiple of 16 keys");
  static constexpr i32 row_blocks = warp_rows / 16;
  static constexpr i32 key_blocks = warp_keys / 8;
  static constexpr i32 out_blocks = dim_v / 8;

  using QTile = SharedTile<T, cfg.tile_q, dim>;
  using KTile = SharedTile<T, cfg.tile_kv, dim>;
  using VTile = SharedTile<T, cfg.tile_kv, round_up(cfg.head_dim_v, tile_columns)>;
  using OTile = SharedTile<O, cfg.tile_q, dim_v>;
  using QStream = TileStream<QTile, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using KStream = TileStream<KTile, threads, cfg.head_dim, cfg.access_bytes, cfg.async_copy>;
  using VStream = TileStream<VTile, threads, cfg.head_dim_v, cfg.access_bytes, cfg.async_copy>;
  using Scores = Accumulator<row_blocks, key_blocks>;
  using Output = Accumulator<row_blocks, out_blocks>;
  using Probabilities = LeftRegisters<T, row_blocks, key_blocks>;
};

// Calls visit(row, log_sum_exp) once for each row of the warp, from one lane.
template <i32 row_blocks, class Logits, class Visit>
FLASHGEN_DEVICE void for_each_row(const OnlineSoftmax<row_blocks, Logits>& softmax, Thread thread,
                                  const Visit& visit) {
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      if (thread.column() == 0) visit(16 * m + 8 * h + thread.row(), softmax.log_sum_exp(m, h));
    }
  }
}

// ---- flashgen/philox.cuh
// Philox 4x32-10: numbers that look drawn at random, as a function of a counter and a key (Salmon, Moraes,
// Dror and Shaw 2011). Each step of the counter, in any of its words, gives four others.

struct alignas(8) TwoWords {
  u32 low, high;
};

struct FourWords {
  u32 words[4];
};

FLASHGEN_DEVICE FourWords philox(const FourWords& counter, u64 key) {
  constexpr u64 kFirstFactor = 0xd2511f53u, kSecondFactor = 0xcd9e8d57u;
  constexpr u32 kFirstStep = 0x9e3779b9u, kSecondStep = 0xbb67ae85u;
  u32 first_key = static_cast<u32>(key), second_key = static_cast<u32>(key >> 32);
  u32 a = counter.words[0], b = counter.words[1], c = counter.words[2], d = counter.words[3];
#pragma unroll
  for (i32 round = 0; round < 10; ++round) {
    const TwoWords first = __builtin_bit_cast(TwoWords, kFirstFactor * a);
    const TwoWords second = __builtin_bit_cast(TwoWords, kSecondFactor * c);
    a = second.high ^ b ^ first_key;
    b = second.low;
    c = first.high ^ d ^ second_key;
    d = first.low;
    first_key += kFirstStep;
    second_key += kSecondStep;
  }
  return {{a, b, c, d}};
}

// ---- flashgen/dropout.cuh
// Dropout: which pairs of a query and a key are left out of the product with V.
//
// Whether a pair is kept is a function of the seed, the offset, the sequence, the head, the query and the
// key, and of nothing else. One drawing serves what a lane holds of a block of 16 x 16 pairs: queries q and q
// + 8, keys k, k + 1, k + 8 and k + 9, with 15 bits for each, which leaves a bit to see a comparison's result
// in: two pairs are compared at once. A pair is left out if its number is below p * 2^15.

struct Dropout {
  u64 key;
  u32 offset;
  u32 place;
  u32 dropped_below;

  // The seed and the offset come by value or, for graphs that are launched again and again, from memory.
  template <class Params>
  FLASHGEN_DEVICE static Dropout of(const Params& p, i32 sequence, i32 head) {
    const bool in_memory = p.dropout_state != nullptr;
    const u64 seed = in_memory ? p.dropout_state[0] : p.dropout_seed;
    const u64 offset = in_memory ? p.dropout_state[1] : p.dropout_offset;
    return {seed ^ (offset >> 32 << 32), static_cast<u32>(offset),
            static_cast<u32>(sequence) << 16 | static_cast<u32>(head), p.dropout_below};
  }

  // The numbers of the block that pair (q, k) lies in, for the lane that holds the pair: those of row q are
  // the first and the third, two keys each, the even one in the low half.
  FLASHGEN_DEVICE FourWords draw(u32 q, u32 k) const {
    const u32 row = q / 16 * 8 + q % 8, column = k / 16 * 4 + k % 8 / 2;
    return philox({{row, column, place, offset}}, key);
  }

  // Bits 15 and 31: whether the pairs of the low and of the high half are kept. Others mean nothing.
  FLASHGEN_DEVICE u32 kept(u32 two) const { return (two | 0x80008000u) - dropped_below * 0x00010001u; }
};

// Which of a lane's pairs are kept, a bit for each: of even keys in the low half of a word, of odd ones
// above.
template <i32 row_blocks, i32 column_blocks>
struct KeptPairs {
  // Blocks of eight columns are drawn in twos. A warp that owns an odd number of them draws for each by
  // itself.
  static constexpr i32 together = column_blocks % 2 == 0 ? 2 : 1;
  static constexpr i32 width = 2 * together;
  static constexpr i32 draws = column_blocks / together;
  static constexpr i32 draws_per_word = 16 / width;
  static constexpr i32 words = ceil_div(draws, draws_per_word);
  u32 bits[row_blocks][words];

  // The warp's block begins at (first_q, first_key), multiples of 16 and of 8 times `together`. Loops stay
  // loops: drawn all at once, the numbers would take more registers than there are.
  FLASHGEN_DEVICE KeptPairs(const Dropout& dropout, i32 first_q, i32 first_key, Thread thread) {
    const u32 q = static_cast<u32>(first_q + thread.row());
    u32 key = static_cast<u32>(first_key + thread.column());
#pragma unroll
    for (i32 w = 0; w < words; ++w) {
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) bits[m][w] = 0;
#pragma unroll 1
      for (i32 i = 0; i < count(w); ++i, key += 8 * together) {
#pragma unroll
        for (i32 m = 0; m < row_blocks; ++m)
          bits[m][w] = bits[m][w] >> width | drawn(dropout, q + 16 * m, key);
      }
    }
  }

  FLASHGEN_DEVICE bool has(i32 m, i32 n, i32 e) const {
    const i32 draw = n / together, w = draw / draws_per_word;
    const i32 later = count(w) - 1 - draw % draws_per_word;
    const i32 place = 15 - (n % together * 2 + e / 2) - later * width;
    return (bits[m][w] >> (16 * (e % 2) + place) & 1u) != 0;
  }

  // Puts 0 for what is left out, and `factor` times what is kept.
  FLASHGEN_DEVICE void keep(Accumulator<row_blocks, column_blocks>& values, float factor) const {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) values[m][n][e] = has(m, n, e) ? values[m][n][e] * factor : 0.0f;
      }
    }
  }

 private:
  static constexpr i32 count(i32 w) { return smaller(draws_per_word, draws - w * draws_per_word); }

  // The bits of one drawing, in the upper ends of both halves.
  FLASHGEN_DEVICE static u32 drawn(const Dropout& dropout, u32 q, u32 key) {
    const FourWords numbers = dropout.draw(q, key);
    const bool right = together == 1 && key / 8 % 2 != 0;
    u32 found = 0;
#pragma unroll
    for (i32 i = 0; i < width; ++i) {
      const u32 two = right ? numbers.words[2 + i % 2] : numbers.words[i];
      found |= dropout.kept(two) >> i & 0x80008000u >> i;
    }
    return found;
  }
};

}  // namespace flashgen

// ---- kernels/forward.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr ForwardConfig kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
    .tile_q = 64,   // B_r: query rows per block
    .tile_kv = 64,  // B_c: keys per step
    .stages = 2,    // slots for K and V
    .warps = 4,
    .split_k = false,    // each warp owns keys, not query rows
    .has_lower = false,  // the band has a lower bound on k - q
    .has_upper = true,   // the band has an upper bound on k - q
    .q_in_registers = false,
    .access_bytes = 16,  // alignment of rows in global memory
    .async_copy = true,
    .turing = false,  // mma.m16n8k8, as Turing has no k16
};

struct Params {
  const element_t* q;
  const element_t* k;
  const element_t* v;
  element_t* o;
  float* lse;                // log-sum-exp, (batch, heads_q, len_q)
  const u64* dropout_state;  // seed and offset in memory; null: the two below
  u64 dropout_seed, dropout_offset;
  i64 q_batch, q_row, q_head;  // strides are in elements
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 o_batch, o_row, o_head;
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  u32 dropout_below;           // a pair is dropped if its 15-bit number is below this
  float scale_log2;            // scale * log2(e)
  float dropout_factor;        // 1 / (1 - p)
};
static_assert(sizeof(Params) == 200, "the launcher packs Params into 200 bytes");

namespace smem {
constexpr u32 kQ = 0;      // Q_i
constexpr u32 kK = 8192;   // K_j, 2 slots
constexpr u32 kV = 24576;  // V_j, 2 slots
constexpr u32 kO = 0;      // O_i, once the loop is over

}  // namespace smem

using Shape = ForwardShape<kConfig, element_t>;
using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

FLASHGEN_KERNEL(128, 1) forward_d64_causal_dropout_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Thread thread = Thread::current();

  // This block computes O_i: one tile of queries of one head of one sequence. The last tiles, which a causal
  // mask makes the longest, go first.
  const i32 q_tiles = ceil_div(p.len_q, kConfig.tile_q);
  const Place place = Place::current();
  const i32 head_kv = place.head / p.group;
  const i32 first_q = (q_tiles - 1 - place.tile) * kConfig.tile_q;

  const Mask mask = Mask::of(p, place.sequence, place.head);
  const i32 end_q = smaller(first_q + kConfig.tile_q, p.len_q);
  const Range keys = mask.key_tiles(first_q, end_q, kConfig.tile_kv);
  const auto visited = [&](i32 tile) {
    return !mask.is_empty(first_q, end_q, tile * kConfig.tile_kv, (tile + 1) * kConfig.tile_kv);
  };
  Walk<Mask::has_holes> ahead(keys);

  // The part of a tile of scores that this warp owns (FlashAttention-2: query rows).
  const i32 warp_row = kConfig.split_k ? 0 : thread.warp * Shape::warp_rows;
  const i32 warp_key = kConfig.split_k ? thread.warp * Shape::warp_keys : 0;

  const Shape::QTile q_tile{shared + smem::kQ};
  const Shape::KTile k_ring{shared + smem::kK};
  const Shape::VTile v_ring{shared + smem::kV};
  Shape::QStream q_stream({p.q + place.sequence * p.q_batch + place.head * p.q_head, p.q_row, p.len_q}, first_q, thread);
  Shape::KStream k_stream({p.k + place.sequence * p.k_batch + head_kv * p.k_head, p.k_row, p.len_kv}, keys.begin * kConfig.tile_kv, thread);
  Shape::VStream v_stream({p.v + place.sequence * p.v_batch + head_kv * p.v_head, p.v_row, p.len_kv}, keys.begin * kConfig.tile_kv, thread);

  // Line 4: load Q_i from global to shared memory (and start on the first keys and values).
  q_stream.fetch(q_tile, thread);
  q_stream.land(q_tile, thread);
  // The next tile into a slot of the ring; its number is kept until it is its turn.
  const auto fetch_next = [&](i32 slot, Thread thread) {
    const i32 left_out = ahead.advance(thread, visited);
    if (!ahead.over()) {
      k_stream.skip(left_out);
      v_stream.skip(left_out);
      k_stream.fetch(k_ring.slot(slot), thread);
      v_stream.fetch(v_ring.slot(slot), thread);
    }
    commit_copies<kConfig.async_copy>();
    return ahead.tile;
  };
  i32 under_way[kConfig.stages - 1];
#pragma unroll
  for (i32 slot = 0; slot < kConfig.stages - 1; ++slot) under_way[slot] = fetch_next(slot, thread);

  // Line 5: O_i = 0, l_i = 0, m_i = -inf.
  Shape::Output out;
  clear(out);
  OnlineSoftmax<Shape::row_blocks, ScaledProducts> softmax;
  softmax.reset();
  bool has_non_finite = false;

  // Line 6: for each tile of keys that some query of this tile may attend to.
  for (i32 step = 0; under_way[0] < keys.end; ++step) {
    const i32 j = under_way[0];
    const Thread here = thread.recomputed();
    // Floats leave no registers to keep the addresses of operands from one tile to the next.
    const Thread reader = kIsFloat<element_t> ? here : thread;
    const i32 first_key = j * kConfig.tile_kv;
    // Line 7: K_j and V_j have arrived, and no warp needs the slot that the next copies overwrite.
    wait_for_copies<kConfig.async_copy, kConfig.stages - 2>();
    block_sync();
#pragma unroll
    for (i32 i = 0; i + 2 < kConfig.stages; ++i) under_way[i] = under_way[i + 1];
    under_way[kConfig.stages - 2] = fetch_next((step + kConfig.stages - 1) % kConfig.stages, here);
    const Shape::KTile k_tile = k_ring.slot(step % kConfig.stages);
    const Shape::VTile v_tile = v_ring.slot(step % kConfig.stages);

    // A warp none of whose pairs is allowed sits this tile out.
    const i32 row = first_q + warp_row, key = first_key + warp_key;
    const i32 row_end = smaller(row + Shape::warp_rows, p.len_q);
    const bool idle = row >= row_end || mask.is_empty(row, row_end, key, key + Shape::warp_keys);
    Shape::Scores scores;
    // Which pairs are kept is drawn now, while registers are free.
    const KeptPairs<Shape::row_blocks, Shape::key_blocks> kept(Dropout::of(p, place.sequence, place.head), row, key, here);
    if (!idle) {
      // Line 8: S_ij = Q_i K_j^T.
      clear(scores);
      multiply<element_t, kConfig.turing, Shape::dim / kStepDepth<element_t>>(
          scores, LeftRows(q_tile, warp_row, reader), RightTransposed(k_tile, warp_key, reader));
    }

    // Only a tile that the mask (or the end of the keys) cuts through is masked pair by pair.
    if (!mask.is_full(first_q, end_q, first_key, first_key + kConfig.tile_kv)) {
      // A non-finite value of V must not reach queries that do not attend to its key.
      if (holds_non_finite<Shape::threads>(v_tile, here)) {
        clear_non_finite<Shape::threads>(v_tile, here);
        has_non_finite = true;
      }
      if (!idle) mask_pairs(scores, -kInfinity, mask, row, key, reader);
    }

    if (!idle) {
      // Lines 9 and 10: m_i, P_ij = exp(S_ij - m_i), l_i; O_i is rescaled only if m_i moved far.
      softmax.update(scores, out, {p.scale_log2});
      kept.keep(scores, 1.0f);

      // Line 10: O_i += P_ij V_j.
      multiply<element_t, kConfig.turing, Shape::warp_keys / kStepDepth<element_t>>(
          out, Shape::Probabilities(scores, reader), RightRows<Shape::VTile, true>(v_tile.from_row(warp_key), 0, reader));
    }
  }

  softmax.finish();
  // No copy is under way any more (without any keys, Q's would be), and no warp needs the tiles: O takes their place.
  wait_for_copies<kConfig.async_copy, 0>();
  block_sync();
  constexpr bool writes = true;

  // Lines 12, 13 and 15: O_i = diag(l_i)^-1 O_i / (1 - p), L_i = m_i + log(l_i).
  const Shape::OTile o_tile{shared + smem::kO};
  if (writes) {
    store_accumulator(o_tile, warp_row, 0, out, thread, [&](i32 m, i32 h) { return softmax.normalizer(m, h) * p.dropout_factor; });
    float* const lse = p.lse + (static_cast<i64>(place.sequence) * p.heads_q + place.head) * p.len_q + first_q + warp_row;
    for_each_row(softmax, thread, [&](i32 row, float log_sum_exp) {
      if (first_q + warp_row + row < p.len_q) lse[row] = log_sum_exp;
    });
  }

  if (has_non_finite) {
    block_sync();
    mark_non_finite_results<Shape::threads, kConfig.head_dim_v, kConfig.tile_kv>(
        o_tile, first_q, GlobalRows<const element_t>{p.v + place.sequence * p.v_batch + head_kv * p.v_head, p.v_row, p.len_kv}, keys, mask, thread);
  }

  // Line 14: write O_i to global memory.
  block_sync();
  store_rows<Shape::OTile, Shape::threads, kConfig.head_dim_v, kConfig.access_bytes>(
      o_tile, {p.o + place.sequence * p.o_batch + place.head * p.o_head, p.o_row, p.len_q}, first_q, thread);
}
