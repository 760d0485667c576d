// decode_d64x512_causal_pages_qv_sm90a: Flash-Decoding of latent attention, forward pass of few new queries:
// O and the log-sum-exp of each row.
//
// spec     {"head_dim":64,"head_dim_v":512,"dtype":"bf16","mask":"causal","direction":"forward","deterministic":false,"cache":"paged","qv":true}
// rebuild  flashgen build --head-dim 64 --head-dim-v 512 --dtype bf16 --causal --forward-only --cache paged --qv --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 64, tile_kv 64, stages 2, warps 8, 256 threads
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 64
//          key rows of a key/value head and batch entry
// smem     230976 bytes
// because  O of 64 rows takes 128 registers of each thread where 8 warps split its columns; they exchange S
//          through shared memory
//          each key is read once for 64 rows, and 2 stages hold 64 keys each
//          this kernel alone takes qv, also for long prompts
//
// contents   52  Instructions, one per function: types, device, copy, math, matrix.
//           212  Element types.
//           263  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//           329  Operands of warp-level matrix products.
//           428  Warp-level matrix products.
//           504  Banded masks.
//           561  Streaming tiles between global and shared memory.
//           577  Keys and values in a cache.
//           639  Instructions, one per function: grid.
//           668  What a softmax takes exponentials of.
//           698  What an online softmax keeps of each row from one tile of keys to the next.
//           711  The online softmax.
//           718  The sizes of a decode kernel.
//           756  The rows of a tile.
//           862  The type of the cache's elements.
//           888  Finding NaN and infinity.
//           905  Walking over the tiles that a mask does not rule out.
//           940  Keeping NaN and infinity where they belong.
//           969  P V of a slice that the mask cuts, where V may hold NaN or infinity for keys that a row must not attend to.
//          1005  Blocks that go over the same keys at the same time, each for different rows.
//          1039  Results of a part of the keys.
//          1116  What happens to products Q K^T before the softmax.
//          1137  The results of rows.
//          1243  Results of the latent kernel, from the registers of warps that have some columns of all rows each.
//          1300  The online softmax of a tile whose rows warps share.
//          1442  Bringing keys and values to shared memory.
//          1544  Tiles of the latent kernel in shared memory.
//          1587  Which tiles of keys a block works on.
//          1787  A block's share of an item.
//          1847  Which keys, and which tiles of them, the rows of an item may attend to.
//          1885  Attention of few new tokens to a cache of latent vectors, which are keys and values at once (multi-head latent attention, absorbed).
//          2132  The kernel: its configuration, parameters and text.

#if defined(FLASHGEN_EMULATOR)
#include "flashgen/emu/primitives.h"
#else
// ---- flashgen/ptx/types.cuh
// Integer and 16-bit element types, without any CUDA header.

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
FLASHGEN_DEVICE i32 grid_dim_x() { return static_cast<i32>(gridDim.x); }
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
FLASHGEN_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

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
  // Where the lane's accumulators lie in a block of 16 x 8: rows row() and row() + 8, columns column() and
  // + 1.
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

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

// Two neighbouring elements, written with one store.
template <class T>
struct alignas(4) Pair {
  u32 bits;
  FLASHGEN_DEVICE static Pair from(float first, float second) { return {pack(T{}, first, second)}; }
};

// ---- flashgen/tile.cuh
// Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.

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
  // The tile's rows from `row` on, a multiple of eight so that the swizzle stays in step.
  FLASHGEN_DEVICE SharedTile from_row(i32 row) const { return {data + row * row_bytes}; }
  FLASHGEN_DEVICE SharedTile slot(i32 index) const { return {data + index * bytes}; }
};

// A lane's place in a tile. Rows advance in eights, so the swizzle of the lane's row never changes and a step
// is one addition along rows, one xor along columns.
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

template <class Tile>
FLASHGEN_DEVICE i32 origin_of(Tile tile) {
  return static_cast<i32>(shared_address(tile.data));
}

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
  if constexpr (turing) {
    mma_m16n8k8_batched(T{}, d, a.words[0], a.words[1], b.words[0]);
    mma_m16n8k8_batched(T{}, d, a.words[2], a.words[3], b.words[1]);
  } else {
    mma_m16n8k16_batched(T{}, d, a.words, b.words);
  }
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
  FLASHGEN_DEVICE bool has(i32 i) const { return begin <= i && i < end; }
};

// The tiles that contain rows (or columns) from `begin`, which is not negative, to `end`.
FLASHGEN_DEVICE Range tiles_of(i32 begin, i32 end, i32 tile) {
  return {begin / tile, larger(begin / tile, ceil_div(larger(end, 0), tile))};
}

// The plan says which bounds exist. Their values are kernel parameters.
template <bool has_lower, bool has_upper>
struct Band {
  static constexpr bool is_bounded = has_lower || has_upper;
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

// ---- flashgen/stream.cuh
// Streaming tiles between global and shared memory.

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

// ---- flashgen/cache.cuh
// Keys and values in a cache: where those of a sequence lie, and the tiles of keys that one of several blocks
// goes over.

// The row of a cache, or of a table of pages, that belongs to a sequence, which of its keys are there, and
// where its queries begin among those of all, if they are packed.
struct CachedSequence {
  i64 row;
  i32 first_key;
  i32 first_q;
  i32 len_q, len_kv;

  // What an array says is never taken for more than there is room for.
  template <class Params>
  FLASHGEN_DEVICE static CachedSequence of(const Params& p, i32 sequence) {
    const i32 end = smaller(keys_of(p, sequence) + p.appended, p.len_kv);
    const i32 first = p.cache_leftpad == nullptr ? 0 : larger(0, smaller(p.cache_leftpad[sequence], end));
    const Range queries = queries_of(p, sequence);
    return {row_of(p, sequence), first, queries.begin, queries.size(), end - first};
  }

  // No more than the longest sequence may have.
  template <class Params>
  FLASHGEN_DEVICE static Range queries_of(const Params& p, i32 sequence) {
    if (p.cu_seqlens_q == nullptr) return {0, p.len_q};
    const i32 first = p.cu_seqlens_q[sequence];
    return {first, larger(first, smaller(p.cu_seqlens_q[sequence + 1], first + p.len_q))};
  }

  template <class Params>
  FLASHGEN_DEVICE static i64 row_of(const Params& p, i32 sequence) {
    return p.cache_batch_idx == nullptr ? sequence : p.cache_batch_idx[sequence];
  }

  // How many keys there are without those that were appended.
  template <class Params>
  FLASHGEN_DEVICE static i32 before(const Params& p, i32 sequence) {
    return p.cache_seqlens == nullptr ? p.len_kv : larger(0, smaller(p.cache_seqlens[sequence], p.len_kv));
  }

  // The same where an array may say how many keys all sequences before this one have.
  template <class Params>
  FLASHGEN_DEVICE static i32 keys_of(const Params& p, i32 sequence) {
    if (p.cu_seqlens_k == nullptr) return before(p, sequence);
    return larger(0, smaller(p.cu_seqlens_k[sequence + 1] - p.cu_seqlens_k[sequence], p.len_kv));
  }
};

// The band of one sequence: what is aligned at the bottom right moves with its length.
template <class Mask, class Params>
FLASHGEN_DEVICE Mask band_of(const Params& p, const CachedSequence& cached) {
  const i32 corner = cached.len_kv - cached.len_q;
  return {larger(p.band_lower + corner, p.corner_lower), smaller(p.band_upper + corner, p.corner_upper),
          cached.len_q, cached.len_kv};
}

}  // namespace flashgen

#if !defined(FLASHGEN_EMULATOR)

namespace flashgen {

// ---- flashgen/ptx/grid.cuh
// Communication between blocks and between grids: atomics, ordered accesses of global memory, and
// programmatic dependent launch.

// ---- Atomic operations, relaxed unless their names say otherwise. Additions return the previous value.

// A thread that acquires this value or a later one sees what this thread wrote before, and what a barrier
// ordered before that.
FLASHGEN_DEVICE u32 atomic_add_release(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}
FLASHGEN_DEVICE void store_release(u32* address, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
FLASHGEN_DEVICE u32 load_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ---- Programmatic dependent launch (sm_90 and later)

}  // namespace flashgen
#endif
// ---- flashgen/logits.cuh
// What a softmax takes exponentials of. The exponentials of a row are relative to its reference maximum: the
// row's maximum so far, or a number near it. Each kind of logits has its own unit for reference maxima.
//
//     logit(s, row)           accumulator s as a reference maximum
//     relative(s, shift, row) how far s is above reference maximum `shift`, in powers of two
//     powers(x), distance(x)  from a difference of reference maxima to powers of two, and back
//     as_reference_max(x)     logit x as a reference maximum
//     natural_log(m, x)       the natural logarithm of 2^x times the factor of reference maximum m
//     kNoMax                  the reference maximum of a row without an allowed key so far

namespace flashgen {

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
  FLASHGEN_DEVICE static float as_reference_max(float logit) { return logit * kLog2E; }
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

// ---- flashgen/decode/config.cuh
// The sizes of a decode kernel. The plan chooses them.

struct DecodeConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;   // rows of a tile: new tokens times query heads per key/value head
  i32 tile_kv;  // keys of a tile
  i32 stages;
  i32 warps;  // that compute
  // Warps that only start copies. Without any, each warp copies what it multiplies.
  i32 producers;
  // Registers of a thread of either kind, where there are both.
  i32 producer_registers;
  i32 consumer_registers;
  // Each warp keeps its rows of Q in registers. Otherwise they stay in shared memory.
  bool holds_queries;
  // A block gets no fewer tiles than this for each 16 rows, as long as others have work.
  i32 least_tiles;
  // The fixed cost of an item, in tiles of keys.
  i32 item_tiles;
  bool has_lower;
  bool has_upper;
  // Which tiles of keys hold allowed pairs depends on the query head.
  bool varies_by_head;
  i32 access_bytes;
};

// Rows and keys of one product by tensor cores.
constexpr i32 kRowBlock = 16;
constexpr i32 kSliceKeys = 16;

// Waits for all warps that compute.
template <DecodeConfig cfg>
FLASHGEN_DEVICE void consumers_sync() {
  block_sync();
}

// ---- flashgen/decode/rows.cuh
// The rows of a tile. Query heads that share a key/value head read the same keys, so their rows lie in one
// tile:
//
//     row = token * group + query head of the group
//
// The tensor cores thus have up to 16 useful rows for one new token, and each key is read once for the whole
// group.

// What blocks compute: a tile of rows of one key/value head of one sequence.
struct alignas(16) DecodeItem {
  CachedSequence cached;
  i32 sequence;
  i32 head_kv;
  // The first row of the tile, and how many rows it has.
  i32 first_row;
  i32 rows;
  // Tiles of keys that some row of the sequence may attend to; at least one, because rows without keys also
  // have results.
  Range tiles;
};

// The token and the query head of a row of the tile.
struct RowPlace {
  i32 q;
  i32 head;

  // Rows beyond the last repeat it. They read no other memory, and are not stored.
  template <class Params>
  FLASHGEN_DEVICE static RowPlace of(const Params& p, const DecodeItem& item, i32 row) {
    const i32 own = item.first_row + smaller(row, item.rows - 1), q = own / p.group;
    return {q, item.head_kv * p.group + own - q * p.group};
  }
};

// The mask of a query head of the sequence.
template <class Mask, class Params>
FLASHGEN_DEVICE Mask mask_of(const Params& p, const CachedSequence& cached, i32 sequence, i32 head) {
  if constexpr (requires { Mask::of(p, cached, sequence, head); }) {
    return Mask::of(p, cached, sequence, head);
  } else {
    return band_of<Mask>(p, cached);
  }
}

// The two rows that a lane holds of a block of 16.
struct LaneRows {
  RowPlace places[2];

  template <class Params>
  FLASHGEN_DEVICE static LaneRows of(const Params& p, const DecodeItem& item, i32 row_block, Thread thread) {
    const i32 row = row_block * kRowBlock + thread.row();
    return {{RowPlace::of(p, item, row), RowPlace::of(p, item, row + 8)}};
  }
};

// Their masks.
template <class Mask>
struct LaneMasks {
  Mask masks[2];
  i32 q[2];

  template <class Params>
  FLASHGEN_DEVICE static LaneMasks of(const Params& p, const DecodeItem& item, const LaneRows& rows) {
    const RowPlace first = rows.places[0], second = rows.places[1];
    return {{mask_of<Mask>(p, item.cached, item.sequence, first.head),
             mask_of<Mask>(p, item.cached, item.sequence, second.head)},
            {first.q, second.q}};
  }
  FLASHGEN_DEVICE bool is_full(i32 k_begin, i32 k_end) const {
    return masks[0].is_full(q[0], q[0] + 1, k_begin, k_end) &&
           masks[1].is_full(q[1], q[1] + 1, k_begin, k_end);
  }
  FLASHGEN_DEVICE bool is_empty(i32 k_begin, i32 k_end) const {
    return masks[0].is_empty(q[0], q[0] + 1, k_begin, k_end) &&
           masks[1].is_empty(q[1], q[1] + 1, k_begin, k_end);
  }
  FLASHGEN_DEVICE bool allows(i32 h, i32 k) const { return masks[h].allows(q[h], k); }
};

// Calls visit(value, h, column) for each of a lane's scores.
template <i32 blocks, class Visit>
FLASHGEN_DEVICE void for_each_score(Accumulator<1, blocks>& scores, const Visit& visit) {
#pragma unroll
  for (i32 n = 0; n < blocks; ++n) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) visit(scores[0][n][e], e / 2, 8 * n + e % 2);
  }
}

// The rows of Q of a head, by token.
template <class T>
struct QueryRows {
  const T* data;
  i64 row_stride;
  i64 head_stride;

  template <class Params>
  FLASHGEN_DEVICE static QueryRows of(const Params& p, const DecodeItem& item) {
    return {p.q + item.sequence * p.q_batch + item.cached.first_q * p.q_row, p.q_row, p.q_head};
  }
  FLASHGEN_DEVICE const T* at(RowPlace place) const {
    return data + place.q * row_stride + place.head * head_stride;
  }
};

// ---- flashgen/decode/cache_element.cuh
// The type of the cache's elements: the CacheElement policy of the decode mainloop. It says how rows of K and
// V lie in shared memory, how tensor cores get them and the queries, and how scores and results are scaled.
//
//     fetch_scales(slot, page, thread)     starts copies of the scales of a slice of keys
//     slice_scales(slot, thread)           the scales of a slice's keys:
//       apply_qk_scales(scores, queries)     multiplies products by the scales of K and Q
//       add_log_v_scales(logits)             adds logarithms, so that exponentials include the scales of V
//       weighted_sum(a, b, n)                what two exponentials of block n add to the row's sum
//     scale_and_reorder(out)               makes O of accumulators: the last scale, and the order of columns
//     column(n, thread)                    the first of the two columns of O that a lane holds of block n

// Elements of the queries' type, without scales.
template <DecodeConfig cfg, class T>
struct SameElement {
  static constexpr i32 dim_v = round_up(cfg.head_dim_v, 16);
  using VSlice = SharedTile<T, kSliceKeys, dim_v>;
  using Values = RightRows<VSlice, true>;

  template <class Params>
  FLASHGEN_DEVICE static SameElement of(const Params&, const DecodeItem&, u8*) {
    return {};
  }
  FLASHGEN_DEVICE static i32 column(i32 n, Thread thread) { return 8 * n + thread.column(); }
};

// ---- flashgen/non_finite.cuh
// Finding NaN and infinity.

// Adding this to the bits of a magnitude carries into the sign exactly when the exponent is all ones.
template <class T>
constexpr u32 kToInfinity = 0;
template <>
constexpr u32 kToInfinity<bfloat16_t> = 0x00800080u;
template <class T>
constexpr u32 kSigns = kIsFloat<T> ? 0x80000000u : 0x80008000u;

// The sign bits of those elements of a word that are not finite.
template <class T>
FLASHGEN_DEVICE u32 non_finite_signs(u32 word) {
  return ((word & ~kSigns<T>)+kToInfinity<T>)&kSigns<T>;
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

// ---- flashgen/contain.cuh
// Keeping NaN and infinity where they belong. A product with a probability of 0 is 0 * NaN = NaN, so a
// non-finite value in a key that a query may not attend to would reach the query through any tile that the
// mask cuts through. Such tiles are searched first. If one holds a non-finite value, which is rare, the
// non-finite values are cleared before the product, and the results they should have reached become NaN
// afterwards.

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

// ---- flashgen/decode/careful_product.cuh
// P V of a slice that the mask cuts, where V may hold NaN or infinity for keys that a row must not attend to:
// the row's probability is 0, but 0 * NaN is NaN.

// sums += P V of 16 keys without the elements of V that are not finite. Results that an allowed pair brings
// such an element become NaN. `pairs` is 1 for allowed pairs and 0 for others. A loop keeps this rare code
// short, so `sums` lies in local memory.
template <class T, i32 blocks, class Values>
FLASHGEN_DEVICE void add_careful(float (&sums)[blocks][4], const LeftFragment<T>& left,
                                 const LeftFragment<T>& pairs, const Values& values) {
  const u32 ones = pack(T{}, 1.0f, 1.0f);
#pragma unroll 1
  for (i32 n = 0; n < blocks; n += 2) {
    RightFragment<T> finite[2];
    values.load_pair(finite, n, 0);
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      // Ones in place of what is not finite count the allowed pairs with such an element.
      RightFragment<T> bad;
#pragma unroll
      for (i32 w = 0; w < 2; ++w) {
        const u32 lost = (non_finite_signs<T>(finite[i].words[w]) >> 15) * 0xffffu;
        finite[i].words[w] &= ~lost;
        bad.words[w] = lost & ones;
      }
      float (&sum)[4] = sums[n + i];
      float reached[4] = {};
      multiply_block<false>(sum, left, finite[i]);
      multiply_block<false>(reached, pairs, bad);
      mma_finish();
#pragma unroll
      for (i32 e = 0; e < 4; ++e) sum[e] = reached[e] > 0.0f ? not_a_number<float>() : sum[e];
    }
  }
}

// ---- flashgen/decode/team.cuh
// Blocks that go over the same keys at the same time, each for different rows. One of them reads a key from
// device memory, and the others find it in L2.

struct Team {
  i32 size;
  // This block's number in its team.
  i32 rank;

  // The host chooses the size. Kernels without a `team` parameter have teams of one block.
  template <class Params>
  FLASHGEN_DEVICE static Team of(const Params& p) {
    if constexpr (requires { p.team; }) {
      return {p.team, block_idx_x() % p.team};
    } else {
      return {1, 0};
    }
  }
  // Rounds that a team needs for `tiles` tiles of rows.
  template <class Params>
  FLASHGEN_DEVICE static i32 rounds(const Params& p, i32 tiles) {
    if constexpr (requires { p.team; }) {
      return ceil_div(tiles, p.team);
    } else {
      return tiles;
    }
  }
  // This block's team, and how many there are. Blocks that are left over get no work.
  FLASHGEN_DEVICE i32 index() const { return block_idx_x() / size; }
  FLASHGEN_DEVICE i32 count() const { return grid_dim_x() / size; }
  // The member of team `index` that has the same rows as this block.
  FLASHGEN_DEVICE i32 member(i32 index) const { return index * size + rank; }
};

// ---- flashgen/decode/partials.cuh
// Results of a part of the keys: O without its normalizer, and for each row the reference maximum and the sum
// of exponentials. They are merged exactly, whatever the size of the logits.

// The factor taken out of a row's exponentials, and their sum.
struct RowTotal {
  float reference_max;
  float sum;
};

// The weight of a part of a row whose parts have the common reference maximum `most`.
template <class Logits>
FLASHGEN_DEVICE float weight_of_part(const Logits& logits, float reference_max, float most) {
  return exp2_approx(logits.powers(reference_max - (most == -kInfinity ? 0.0f : most)));
}

// Partial results in the workspace. A slot holds those of one part of an item: for each eight columns a small
// matrix of the item's rows, so that the lanes of a warp access neighboring addresses and rows that do not
// exist take no room.
template <i32 blocks>
struct Partials {
  float* out;
  RowTotal* totals;
  i32 rows;

  template <class Params>
  FLASHGEN_DEVICE static Partials of(const Params& p) {
    return {p.o_partial, reinterpret_cast<RowTotal*>(p.row_partial), p.slot_rows};
  }
  // Two columns of block `n`, from `column` on.
  FLASHGEN_DEVICE float* pair(i32 slot, i32 n, i32 row, i32 column) const {
    return out + ((static_cast<i64>(slot) * blocks + n) * rows + row) * 8 + column;
  }
  FLASHGEN_DEVICE RowTotal& total(i32 slot, i32 row) const {
    return totals[static_cast<i64>(slot) * rows + row];
  }
};

struct alignas(8) FloatPair {
  float values[2];
};

// The slots of an item's parts, in the order of its keys. With parts of fixed sizes each has a slot of its
// own. Otherwise each block has two: for an item that a block before it has begun, and for one that it begins
// itself.
struct PartSlots {
  Team team;
  bool is_fixed;
  i32 count;
  // The item's first unit among those of all items, and the block that begins it.
  i32 first_unit;
  i32 first_block;

  FLASHGEN_DEVICE i32 operator()(i32 part) const {
    if (is_fixed) return team.member(first_unit + part);
    return team.member(part == 0 ? 2 * first_block + 1 : 2 * (first_block + part));
  }
};

// Whether this block is the last of `blocks` to arrive at a counter, which it then resets for the next
// launch. All threads that compute call. Those of the last block see what all blocks wrote before they
// arrived.
template <DecodeConfig cfg>
FLASHGEN_DEVICE bool arrives_last(u32* counter, u32 blocks, u32& shared, Thread thread) {
  consumers_sync<cfg>();
  if (thread.index() == 0) {
    const bool is_last = atomic_add_release(counter, 1u) + 1 == blocks;
    if (is_last) {
      load_acquire(counter);
      store_release(counter, 0u);
    }
    shared = is_last;
  }
  consumers_sync<cfg>();
  return shared != 0;
}

// ---- flashgen/decode/scores.cuh
// What happens to products Q K^T before the softmax: the Score policy of the decode mainloop. Rows have their
// own query and head.

// Logits are the products, scaled.
struct NoRowScore {
  using Logits = ScaledProducts;

  template <class Params>
  FLASHGEN_DEVICE static Logits logits(const Params& p) {
    return {p.scale_log2};
  }
  template <i32 blocks, class Params>
  FLASHGEN_DEVICE static void apply(Accumulator<1, blocks>&, const Params&, const DecodeItem&,
                                    const LaneRows&, i32, Thread) {}
  template <class Params>
  FLASHGEN_DEVICE static float sink(const Params&, const DecodeItem&, i32) {
    return -kInfinity;
  }
};

// ---- flashgen/decode/row_results.cuh
// The results of rows: from parts to O and L.

// The rows of one item. All threads that compute call its functions.
template <DecodeConfig cfg, class T, class Params, class Score, class CacheElement>
struct RowResults {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 out_blocks = CacheElement::dim_v / 8;
  using Logits = typename Score::Logits;

  const Params& p;
  const DecodeItem& item;
  // In shared memory: the totals of the tile's rows.
  RowTotal (&totals)[cfg.tile_q];
  Thread thread;

  // Leaves the totals of a part in its slot.
  FLASHGEN_DEVICE void store_totals(const Partials<out_blocks>& partials, i32 slot) const {
    for (i32 row = thread.index(); row < item.rows; row += threads) partials.total(slot, row) = totals[row];
  }

  // Merges the parts of an item, in the order of its keys.
  FLASHGEN_DEVICE void merge(const PartSlots& slots) const {
    const auto partials = Partials<out_blocks>::of(p);
    const Logits logits = Score::logits(p);
    // The lanes of a warp take the parts of a row in turns.
    for (i32 row = thread.warp; row < item.rows; row += cfg.warps) {
      float most = -kInfinity, total = 0.0f;
      for (i32 part = thread.lane; part < slots.count; part += kWarpSize)
        most = maximum(most, partials.total(slots(part), row).reference_max);
#pragma unroll
      for (i32 bit = kWarpSize / 2; bit > 0; bit /= 2) most = maximum(most, shuffle_xor(most, bit));
      for (i32 part = thread.lane; part < slots.count; part += kWarpSize) {
        const RowTotal own = partials.total(slots(part), row);
        total += own.sum * weight_of_part(logits, own.reference_max, most);
      }
#pragma unroll
      for (i32 bit = kWarpSize / 2; bit > 0; bit /= 2) total += shuffle_xor(total, bit);
      if (thread.lane == 0) totals[row] = {most, total};
    }
    consumers_sync<cfg>();
    // Each warp takes blocks of columns of its own. Many loads are under way at a time, because a few warps
    // wait for all parts.
    constexpr i32 own_blocks = ceil_div(out_blocks, cfg.warps), parts_at_once = larger(1, 32 / own_blocks);
#pragma unroll 1
    for (i32 row = thread.row(); row < item.rows; row += 8) {
      const RowTotal total = totals[row];
      FloatPair sums[own_blocks] = {};
#pragma unroll parts_at_once
      for (i32 part = 0; part < slots.count; ++part) {
        const i32 slot = slots(part);
        const float weight =
            weight_of_part(logits, partials.total(slot, row).reference_max, total.reference_max);
#pragma unroll
        for (i32 i = 0; i < own_blocks; ++i) {
          const i32 n = thread.warp + i * cfg.warps;
          if (n >= out_blocks) break;
          const FloatPair pair =
              *reinterpret_cast<const FloatPair*>(partials.pair(slot, n, row, thread.column()));
#pragma unroll
          for (i32 c = 0; c < 2; ++c)
            sums[i].values[c] = fused_multiply_add(weight, pair.values[c], sums[i].values[c]);
        }
      }
      const Finished finished = with_sink(row, total);
#pragma unroll
      for (i32 i = 0; i < own_blocks; ++i) {
        const i32 n = thread.warp + i * cfg.warps;
        if (n < out_blocks) store_result(row, n, sums[i], finished);
      }
    }
  }

  // A row's total with the sink, which takes part in the softmax like a key without a value.
  struct Finished {
    RowTotal total;
    // What O is multiplied by.
    float factor;
  };
  FLASHGEN_DEVICE Finished with_sink(i32 row, RowTotal total) const {
    const Logits logits = Score::logits(p);
    const float sink = Logits::as_reference_max(Score::sink(p, item, RowPlace::of(p, item, row).head));
    const float most = maximum(total.reference_max, sink),
                weight = weight_of_part(logits, total.reference_max, most);
    const float sum = total.sum * weight + weight_of_part(logits, sink, most);
    return {{most, sum}, sum == 0.0f ? 0.0f : weight / sum};
  }

  // Writes two columns of O and, with the first ones, L.
  FLASHGEN_DEVICE void store_result(i32 row, i32 n, const FloatPair& pair, const Finished& finished) const {
    const RowPlace place = RowPlace::of(p, item, row);
    const i64 q = item.cached.first_q + place.q;
    const i32 column = CacheElement::column(n, thread);
    if (column < cfg.head_dim_v) {
      T* const o = p.o + item.sequence * p.o_batch + q * p.o_row + place.head * p.o_head + column;
      *reinterpret_cast<Pair<T>*>(o) =
          Pair<T>::from(pair.values[0] * finished.factor, pair.values[1] * finished.factor);
    }
    if (column == 0) {
      const RowTotal total = finished.total;
      p.lse[item.sequence * p.lse_batch + place.head * p.lse_head + q] =
          total.sum == 0.0f ? -kInfinity : Logits::natural_log(total.reference_max, log2_approx(total.sum));
    }
  }
};

// ---- flashgen/decode/latent_results.cuh
// Results of the latent kernel, from the registers of warps that have some columns of all rows each.

template <DecodeConfig cfg, class T, class Params, class Score, class CacheElement>
struct LatentResults {
  using Rows = RowResults<cfg, T, Params, Score, CacheElement>;
  static constexpr i32 row_blocks = cfg.tile_q / kRowBlock;
  static constexpr i32 own_blocks = Rows::out_blocks / cfg.warps;
  using Output = Accumulator<row_blocks, own_blocks>;

  Rows rows;
  const Output& out;

  // Leaves a part's results in its slot.
  FLASHGEN_DEVICE void store_part(i32 slot) const {
    const auto partials = Partials<Rows::out_blocks>::of(rows.p);
    rows.store_totals(partials, slot);
    for_each_row([&](i32 row, i32 m, i32 h) {
#pragma unroll
      for (i32 n = 0; n < own_blocks; ++n)
        *reinterpret_cast<FloatPair*>(partials.pair(slot, first_block() + n, row, rows.thread.column())) =
            pair_of(m, n, h);
    });
  }

  // Writes O and L of the whole item.
  FLASHGEN_DEVICE void store_whole() const {
    for_each_row([&](i32 row, i32 m, i32 h) {
      const auto finished = rows.with_sink(row, rows.totals[row]);
#pragma unroll
      for (i32 n = 0; n < own_blocks; ++n)
        rows.store_result(row, first_block() + n, pair_of(m, n, h), finished);
    });
  }

  FLASHGEN_DEVICE void merge(const PartSlots& slots) const { rows.merge(slots); }

 private:
  FLASHGEN_DEVICE i32 first_block() const { return rows.thread.warp * own_blocks; }
  FLASHGEN_DEVICE FloatPair pair_of(i32 m, i32 n, i32 h) const {
    return {{out[m][n][2 * h], out[m][n][2 * h + 1]}};
  }

  // Calls visit(row, m, h) for each of the lane's rows of the tile that exist: row m * 16 + l/4 + 8 h.
  template <class Visit>
  FLASHGEN_DEVICE void for_each_row(const Visit& visit) const {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i32 row = m * kRowBlock + rows.thread.row() + 8 * h;
        if (row < rows.item.rows) visit(row, m, h);
      }
    }
  }
};

// ---- flashgen/decode/latent_softmax.cuh
// The online softmax of a tile whose rows warps share. The scores of 16 rows are spread over several warps,
// each with keys of its own. The columns of O are spread over all warps, each with all rows.

// What warps exchange in shared memory.
template <DecodeConfig cfg>
struct RowExchange {
  // Warps that have the scores of the same rows.
  static constexpr i32 key_warps = cfg.warps * kRowBlock / cfg.tile_q;
  // Of each of these warps and each row of the tile: the largest logit, and at the end the sum.
  float of_warps[key_warps][cfg.tile_q];
  // What the results of each row are multiplied by when its reference maximum rises.
  float factors[cfg.tile_q];
  // Whether the mask cuts through the keys of a warp.
  u32 is_cut[cfg.warps];
};

// Statistics of a warp's 16 rows, of which each lane has two. The warps that have the same rows agree on
// their reference maxima.
template <DecodeConfig cfg, class Logits>
struct LatentSoftmax {
  using Exchange = RowExchange<cfg>;
  static constexpr i32 row_blocks = cfg.tile_q / kRowBlock;

  float reference_max[2];
  // This lane's share of the row's sum of exponentials.
  float sum[2];

  FLASHGEN_DEVICE void reset() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      reference_max[h] = -kInfinity;
      sum[h] = 0.0f;
    }
  }

  // The largest logits among a lane's scores.
  template <i32 columns>
  FLASHGEN_DEVICE static void largest(float (&highest)[2], const Accumulator<1, columns>& scores,
                                      const Logits& logits) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      highest[h] = maximum(scores[0][0][2 * h], scores[0][0][2 * h + 1]);
#pragma unroll
      for (i32 n = 1; n < columns; ++n)
        highest[h] = maximum(highest[h], maximum(scores[0][n][2 * h], scores[0][n][2 * h + 1]));
      highest[h] = logits.logit(highest[h], h);
    }
  }

  // Whether a lane sees a score far above its row's reference maximum.
  FLASHGEN_DEVICE bool lags(const float (&highest)[2]) const {
    return highest[0] > reference_max[0] + Logits::distance(kMaximumLag) ||
           highest[1] > reference_max[1] + Logits::distance(kMaximumLag);
  }

  // Raises the reference maxima that lag, and rescales all results. Returns whether the mask cuts through the
  // tile. All threads of the block call. Each row decides for itself.
  template <i32 out_columns>
  FLASHGEN_DEVICE bool raise(const float (&highest)[2], Accumulator<row_blocks, out_columns>& out,
                             Exchange& exchange, bool is_cut, Thread thread) {
    const i32 first_row = thread.warp % row_blocks * kRowBlock + thread.row(),
              key_warp = thread.warp / row_blocks;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float of_warp = row_maximum(highest[h]);
      if (thread.column() == 0) exchange.of_warps[key_warp][first_row + 8 * h] = of_warp;
    }
    if (thread.lane == 0) exchange.is_cut[thread.warp] = is_cut ? 1 : 0;
    block_sync();
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      float most = exchange.of_warps[0][first_row + 8 * h];
#pragma unroll
      for (i32 w = 1; w < Exchange::key_warps; ++w)
        most = maximum(most, exchange.of_warps[w][first_row + 8 * h]);
      const bool rises = most > reference_max[h] + Logits::distance(kMaximumLag);
      const float factor = rises ? exp2_approx(Logits::powers(reference_max[h] - most)) : 1.0f;
      if (rises) reference_max[h] = most;
      sum[h] *= factor;
      if (key_warp == 0 && thread.column() == 0) exchange.factors[first_row + 8 * h] = factor;
    }
    u32 any_cut = 0;
#pragma unroll
    for (i32 w = 0; w < cfg.warps; ++w) any_cut |= exchange.is_cut[w];
    block_sync();
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const float factor = exchange.factors[m * kRowBlock + thread.row() + 8 * h];
#pragma unroll
        for (i32 n = 0; n < out_columns; ++n) {
          out[m][n][2 * h] *= factor;
          out[m][n][2 * h + 1] *= factor;
        }
      }
    }
    return any_cut != 0;
  }

  // Scores become exponentials, which add to the sums.
  template <i32 columns>
  FLASHGEN_DEVICE void exponentiate(Accumulator<1, columns>& scores, const Logits& logits) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      // A row with no allowed key so far subtracts 0, so that exp2(-inf - 0) is 0 and not NaN.
      const float shift = reference_max[h] == -kInfinity ? 0.0f : reference_max[h];
#pragma unroll
      for (i32 n = 0; n < columns; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) {
          scores[0][n][e] = exp2_approx(logits.relative(scores[0][n][e], shift, h));
          sum[h] += scores[0][n][e];
        }
      }
    }
  }

  // Adds up the sums of all warps. All threads of the block call.
  FLASHGEN_DEVICE void finish(RowTotal (&totals)[cfg.tile_q], Exchange& exchange, Thread thread) const {
    const i32 first_row = thread.warp % row_blocks * kRowBlock + thread.row(),
              key_warp = thread.warp / row_blocks;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float of_warp = row_total(sum[h]);
      if (thread.column() == 0) exchange.of_warps[key_warp][first_row + 8 * h] = of_warp;
    }
    block_sync();
    if (key_warp == 0 && thread.column() == 0) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        float total = 0.0f;
#pragma unroll
        for (i32 w = 0; w < Exchange::key_warps; ++w) total += exchange.of_warps[w][first_row + 8 * h];
        totals[first_row + 8 * h] = {reference_max[h], total};
      }
    }
    block_sync();
  }
};

// ---- flashgen/decode/key_slices.cuh
// Bringing keys and values to shared memory. Each warp copies 16 keys of a tile, its slice, and their values.

// Where the keys of the warp's next slice lie, one key for each lane of half a warp. Page numbers are read
// here, one step before the copies that need them.
template <bool paged>
struct SlicePlaces {
  // The page (without pages: 0), and the key's place in it. A negative page stands for a key that does not
  // exist: it is never read, nor is its entry of the page table.
  i32 page;
  i32 row;

  template <class Params>
  FLASHGEN_DEVICE static SlicePlaces of(const Params& p, const CachedSequence& cached, Range keys,
                                        i32 first_key, Thread thread) {
    const i32 key = first_key + thread.lane % kSliceKeys, place = cached.first_key + key;
    if (!keys.has(key)) return {-1, 0};
    if constexpr (paged) {
      const i32 index = place / p.page_size;
      return {p.block_table[cached.row * p.table_row + index], place - index * p.page_size};
    } else {
      return {0, place};
    }
  }

  FLASHGEN_DEVICE bool exists() const { return page >= 0; }
  // In a tensor with these strides, in elements. Without pages, from the sequence's first row on.
  FLASHGEN_DEVICE i64 offset(i64 page_stride, i64 row_stride) const {
    if (!exists()) return 0;
    return paged ? page * page_stride + row * row_stride : row * row_stride;
  }
  // The place that another lane knows.
  FLASHGEN_DEVICE SlicePlaces of_lane(i32 lane) const { return {shuffle(page, lane), shuffle(row, lane)}; }
};

// Which rows of a slice a lane copies. Lanes that share a row copy neighboring chunks of it, which are whole
// sectors of memory. So a lane needs few addresses, however wide the heads are.
template <i32 slice_rows>
struct LaneShare {
  static constexpr i32 lanes_of_row = larger(4, kWarpSize / slice_rows);
  // The lane's rows lie this far apart.
  static constexpr i32 row_step = kWarpSize / lanes_of_row;
  static constexpr i32 rows = slice_rows / row_step;
  static_assert(rows * row_step == slice_rows, "all lanes copy as many rows");
};

// The places of the lane's rows.
template <bool paged, i32 slice_rows>
struct LanePlaces {
  using Share = LaneShare<slice_rows>;
  SlicePlaces<paged> rows[Share::rows];

  FLASHGEN_DEVICE static LanePlaces of(const SlicePlaces<paged>& places, Thread thread) {
    const i32 row = thread.lane / Share::lanes_of_row;
    LanePlaces found;
#pragma unroll
    for (i32 h = 0; h < Share::rows; ++h) found.rows[h] = places.of_lane(row + h * Share::row_step);
    return found;
  }
};

// Copies `slice_rows` rows of one head of K or V into a tile.
template <i32 head_dim, i32 access_bytes, class Tile, i32 slice_rows = Tile::rows>
struct SliceCopies {
  using T = typename Tile::Element;
  using Share = LaneShare<slice_rows>;

  // The lane's first chunk of a row, and where it lies in a tile.
  i32 chunk;
  Cursor<Tile> place;
  // That chunk of the row at offset 0.
  const T* data;

  // The slice begins at row `first_row` of the tile.
  FLASHGEN_DEVICE SliceCopies(const T* head, i32 first_row, Thread thread)
      : chunk(thread.lane % Share::lanes_of_row),
        place(0, first_row + thread.lane / Share::lanes_of_row, chunk),
        data(head + chunk * Tile::chunk_elements) {}

  // Starts the copies of a slice. Keys and columns that do not exist arrive as zeros.
  template <bool paged>
  FLASHGEN_DEVICE void start(Tile tile, i64 page_stride, i64 row_stride,
                             const LanePlaces<paged, slice_rows>& places) const {
    constexpr i32 step = Share::lanes_of_row * Tile::chunk_elements;
    const u32 start = shared_address(tile.data);
#pragma unroll
    for (i32 h = 0; h < Share::rows; ++h) {
      const SlicePlaces<paged>& row = places.rows[h];
      const T* const from = data + row.offset(page_stride, row_stride);
      const i32 columns = row.exists() ? head_dim - chunk * Tile::chunk_elements : 0;
#pragma unroll
      for (i32 i = 0; i < ceil_div(Tile::chunks, Share::lanes_of_row); ++i) {
        const i32 left = Tile::chunks - i * Share::lanes_of_row;
        if (left >= Share::lanes_of_row || chunk < left)
          copy_chunk_async<T, access_bytes>(
              start + place.template offset<true>(h * Share::row_step, i * Share::lanes_of_row),
              from + i * step, columns - i * step);
      }
    }
  }
};

// ---- flashgen/decode/latent_tiles.cuh
// Tiles of the latent kernel in shared memory: copies of queries, and the product of streamed operands.

// Starts the copies of all rows of a tile of queries. Rows that do not exist repeat the last one.
template <i32 threads, i32 access_bytes, class Tile, class Params>
FLASHGEN_DEVICE void copy_queries(Tile tile, const QueryRows<typename Tile::Element>& source, const Params& p,
                                  const DecodeItem& item, Thread thread) {
  using T = typename Tile::Element;
#pragma unroll 1
  for (i32 i = thread.index(); i < Tile::rows * Tile::chunks; i += threads) {
    const i32 row = i / Tile::chunks, chunk = i % Tile::chunks;
    copy_chunk_async<T, access_bytes>(shared_address(tile.chunk_at(row, chunk)),
                                      source.at(RowPlace::of(p, item, row)) + chunk * Tile::chunk_elements,
                                      Tile::chunk_elements);
  }
}

// accumulator += left * right. Fragments of both operands are fetched one step ahead.
template <class T, i32 steps, class Left, class Right, i32 column_blocks>
FLASHGEN_DEVICE void multiply_streamed(Accumulator<1, column_blocks>& accumulator, const Left& left,
                                       const Right& right) {
  constexpr i32 pairs = ceil_div(column_blocks, 2);
  LeftFragment<T> a[2];
  RightFragment<T> b[2][pairs][2];
  const auto load = [&](i32 step) {
    left.load(a[step % 2], 0, step);
#pragma unroll
    for (i32 pair = 0; pair < pairs; ++pair)
      load_right<column_blocks>(b[step % 2][pair], right, 2 * pair, step);
  };
  // With few products a step, the compiler would load more steps ahead than there are registers for.
  constexpr i32 unrolled = column_blocks > 2 ? steps : 4;
  load(0);
#pragma unroll unrolled
  for (i32 step = 0; step < steps; ++step) {
    if (step + 1 < steps) load(step + 1);
#pragma unroll
    for (i32 n = 0; n < column_blocks; ++n)
      multiply_block<false>(accumulator[0][n], a[step % 2], b[step % 2][n / 2][n % 2]);
  }
  mma_finish();
}

// ---- flashgen/decode/scheduler.cuh
// Which tiles of keys a block works on. The host fixes only the number of blocks. On the device each block
// counts the work of all sequences from their real lengths, and takes an equal share of it: a run of
// consecutive units, of one item after another. So ragged batches balance, and a graph can be replayed with
// other lengths.
//
// A unit is a tile of keys, or, with `part_tiles`, that many. Then an item is always cut at the same keys,
// whatever else is in the batch, and its result has the same bits.
//
// Units are ordered by key/value head, then by sequence, so one block does not get all heads of a short
// sequence. Each item also has a fixed cost: loading Q, and storing or merging results. It counts as
// `item_tiles` extra units.
//
// Units are shared out to teams of blocks (team.cuh). The blocks of a team have the same units, for other
// tiles of rows. "Block" below is a team where there are any.

// Units that an item counts more than it has.
template <DecodeConfig cfg, class Params>
FLASHGEN_DEVICE i32 extra_units(const Params& p) {
  return p.part_tiles == 0 ? cfg.item_tiles : 0;
}

// The work of one sequence for each key/value head: items of equal length, one for each tile of rows.
struct SequenceWork {
  CachedSequence cached;
  Range tiles;
  // Units of an item, and what all items count as.
  i32 units;
  i32 all_units;

  template <DecodeConfig cfg, class Mask, class Params>
  FLASHGEN_DEVICE static SequenceWork of(const Params& p, i32 sequence) {
    const CachedSequence cached = CachedSequence::of(p, sequence);
    Range tiles = {0, ceil_div(cached.len_kv, cfg.tile_kv)};
    if constexpr (!cfg.varies_by_head)
      tiles = mask_of<Mask>(p, cached, sequence, 0).key_tiles(0, cached.len_q, cfg.tile_kv);
    tiles.end = larger(tiles.end, tiles.begin + 1);
    const i32 row_tiles = Team::rounds(p, ceil_div(cached.len_q * p.group, cfg.tile_q));
    const i32 units = p.part_tiles == 0 ? tiles.size() : ceil_div(tiles.size(), p.part_tiles);
    return {cached, tiles, units, (units + extra_units<cfg>(p)) * row_tiles};
  }

  template <DecodeConfig cfg, class Params>
  FLASHGEN_DEVICE DecodeItem item(const Params& p, i32 sequence, i32 head_kv, i32 row_tile) const {
    const i32 first_row = Team::of(p).member(row_tile) * cfg.tile_q;
    return {cached, sequence, head_kv, first_row, smaller(cfg.tile_q, cached.len_q * p.group - first_row),
            tiles};
  }
};

// How the units of all items are shared out.
struct alignas(16) Shares {
  i64 units;
  i64 blocks;

  FLASHGEN_DEVICE i32 begin(i32 block) const {
    return static_cast<i32>(smaller_of(block, blocks) * units / blocks);
  }
  // The block that owns a unit.
  FLASHGEN_DEVICE i32 owner(i32 unit) const {
    return static_cast<i32>(((unit + i64{1}) * blocks - 1) / units);
  }

 private:
  FLASHGEN_DEVICE static i64 smaller_of(i64 a, i64 b) { return a < b ? a : b; }
};

// What a block computes next: the units from `begin` to `end` of an item. Among those of all items, the
// item's first unit is number `first_unit`.
struct alignas(16) Assignment {
  bool exists;
  DecodeItem item;
  i32 units;
  i32 begin;
  i32 end;
  i32 first_unit;
};

// Where a block is in its share. `at` and `end` are numbers of units of all items. The other members name the
// same place: `unit` counts those of one head of one sequence.
struct ShareCursor {
  i32 at;
  i32 end;
  i32 head_kv;
  i32 sequence;
  i32 unit;

  // Assigns the next units.
  template <DecodeConfig cfg, class Mask, class Params>
  FLASHGEN_DEVICE void advance(const Params& p, Assignment& next) {
    const i32 extra = extra_units<cfg>(p);
    while (at < end) {
      SequenceWork work = SequenceWork::of<cfg, Mask>(p, sequence);
      while (unit >= work.all_units) {
        unit -= work.all_units;
        if (++sequence == p.batch) {
          sequence = 0;
          ++head_kv;
        }
        work = SequenceWork::of<cfg, Mask>(p, sequence);
      }
      const i32 of_item = extra + work.units, row_tile = unit / of_item, begin = unit - row_tile * of_item;
      const i32 count = smaller(of_item - begin, end - at), first_unit = at - begin + extra;
      at += count;
      unit += count;
      // Only extra units of this item are in the share, so the next block starts the item.
      if (begin + count <= extra) continue;
      next = {true,
              work.item<cfg>(p, sequence, head_kv, row_tile),
              work.units,
              larger(begin - extra, 0),
              begin + count - extra,
              first_unit};
      // The last tiles of rows may be fewer than the blocks of a team.
      if constexpr (requires { p.team; }) {
        if (next.item.rows <= 0) continue;
      }
      return;
    }
    next.exists = false;
  }
};

// The scheduler of a block. It lives in shared memory, because no registers are left for it, and one thread
// runs it.
template <DecodeConfig cfg, class Mask>
struct DecodeScheduler {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  i32 warp_units[cfg.warps];
  Shares shares;
  // The first is for the warps that compute. Each producer has its own, because it may be at a later item.
  ShareCursor cursors[1 + cfg.producers];
  // Where there are producers, the warps that compute use the first two in turns.
  Assignment assignments[cfg.producers == 0 ? 1 : 2 + cfg.producers];

  // All threads that compute call. Each counts the units of consecutive sequences.
  template <class Params>
  FLASHGEN_DEVICE void init(const Params& p, Thread thread) {
    const i32 each = ceil_div(p.batch, threads), first = smaller(thread.index() * each, p.batch);
    const i32 last = smaller(first + each, p.batch);
    i32 own = 0;
#pragma unroll 4
    for (i32 i = first; i < last; ++i) own += SequenceWork::of<cfg, Mask>(p, i).all_units;
    // A prefix sum over the threads.
    i32 before = own;
#pragma unroll
    for (i32 distance = 1; distance < kWarpSize; distance *= 2) {
      const i32 other = shuffle(before, (thread.lane - distance) & 31);
      if (thread.lane >= distance) before += other;
    }
    if (thread.lane == kWarpSize - 1) warp_units[thread.warp] = before;
    consumers_sync<cfg>();
    i32 of_head = 0;
#pragma unroll
    for (i32 w = 0; w < cfg.warps; ++w) {
      if (w < thread.warp) before += warp_units[w];
      of_head += warp_units[w];
    }
    before -= own;
    const i32 all = of_head * p.heads_kv;
    // Merging costs more with more rows, so a block needs more tiles.
    const i32 row_blocks = ceil_div(smaller(p.len_q * p.group, cfg.tile_q), kRowBlock);
    i32 least = p.part_tiles == 0 ? cfg.least_tiles * row_blocks : 1;
    if constexpr (requires { p.team; }) {
      // One block merges all parts of an item, and merging one takes about as long as a tile of keys.
      const i32 rounds = Team::rounds(p, ceil_div(p.len_q * p.group, cfg.tile_q));
      const i32 each = p.part_tiles == 0 ? all / (p.batch * p.heads_kv * rounds) - cfg.item_tiles : 0;
      while (least * least < each) ++least;
    }
    const Team team = Team::of(p);
    const Shares all_shares = {larger(all, 1), larger(1, smaller(all / least, team.count()))};
    const i32 begin = all_shares.begin(team.index());
    const i32 head_kv = begin / larger(of_head, 1), begin_of_head = begin - head_kv * of_head;
    if (thread.index() == 0) {
      shares = all_shares;
      for (ShareCursor& cursor : cursors) {
        cursor.at = begin;
        cursor.end = smaller(all, all_shares.begin(team.index() + 1));
      }
    }
    if (before <= begin_of_head && begin_of_head < before + own) {
      // The share begins among this thread's sequences.
      for (ShareCursor& cursor : cursors) {
        cursor.head_kv = head_kv;
        cursor.sequence = first;
        cursor.unit = begin_of_head - before;
      }
    }
  }

  // The next assignment. All threads that compute call this, once they are done with the current one.
  template <class Params>
  FLASHGEN_DEVICE const Assignment& next(const Params& p, Thread thread) {
    consumers_sync<cfg>();
    if (thread.index() == 0) cursors[0].template advance<cfg, Mask>(p, assignments[0]);
    consumers_sync<cfg>();
    return assignments[0];
  }
};

// ---- flashgen/decode/share.cuh
// A block's share of an item: its parts one after another, and the merge of all parts by the last block.

// Who computes an item, and where its parts go. The loop over keys leaves no registers for it, so it is found
// after that loop.
struct ItemParts {
  PartSlots slots;
  // How many blocks share the item.
  i32 blocks;

  template <class Params>
  FLASHGEN_DEVICE static ItemParts of(const Params& p, const Assignment& assigned, const Shares& shares) {
    const i32 first_block = shares.owner(assigned.first_unit);
    const i32 blocks = shares.owner(assigned.first_unit + assigned.units - 1) - first_block + 1;
    const bool is_fixed = p.part_tiles != 0;
    return {{Team::of(p), is_fixed, is_fixed ? assigned.units : blocks, assigned.first_unit, first_block},
            blocks};
  }
};

// Calls visit(part, tiles) for the parts of a share: those of fixed size one by one (batch_invariant), or all
// tiles at once.
template <class Params, class Visit>
FLASHGEN_DEVICE void for_each_part(const Params& p, const Assignment& assigned, const Visit& visit) {
  const i32 unit_tiles = p.part_tiles != 0 ? p.part_tiles : 1;
  const auto next = [&](i32 unit) { return p.part_tiles != 0 ? unit + 1 : assigned.end; };
#pragma unroll 1
  for (i32 unit = assigned.begin; unit < assigned.end; unit = next(unit)) {
    const Range tiles = assigned.item.tiles;
    visit(unit,
          Range{tiles.begin + unit * unit_tiles, smaller(tiles.end, tiles.begin + next(unit) * unit_tiles)});
  }
}

// `attend(tiles)` computes the results of some tiles. `results` stores them as those of the whole item or of
// a part, and merges parts. All threads that compute call.
template <DecodeConfig cfg, class Params, class Results, class Attend>
FLASHGEN_DEVICE void compute_share(const Params& p, const Assignment& assigned, const Shares& shares,
                                   u32& is_last, Thread thread, const Results& results,
                                   const Attend& attend) {
  ItemParts parts;
  for_each_part(p, assigned, [&](i32 unit, Range tiles) {
    attend(tiles);
    parts = ItemParts::of(p, assigned, shares);
    const PartSlots& slots = parts.slots;
    if (slots.count == 1) {
      results.store_whole();
    } else {
      results.store_part(slots(slots.is_fixed ? unit : slots.team.index() - slots.first_block));
    }
    // The next copies overwrite these results, where results take the place of the ring. A merge reads what
    // all threads have stored.
    consumers_sync<cfg>();
  });
  const auto& [slots, blocks] = parts;
  if (slots.count > 1 && (blocks == 1 || arrives_last<cfg>(p.counter + slots.team.member(slots.first_block),
                                                           static_cast<u32>(blocks), is_last, thread)))
    results.merge(slots);
}

// ---- flashgen/decode/visited_tiles.cuh
// Which keys, and which tiles of them, the rows of an item may attend to.

template <DecodeConfig cfg, class Mask, class Params>
struct VisitedTiles {
  const Params& p;

  // The keys that some row may attend to.
  FLASHGEN_DEVICE Range existing_keys(const DecodeItem& item) const {
    const Range keys = mask_of<Mask>(p, item.cached, item.sequence, 0).key_tiles(0, item.cached.len_q, 1);
    return {keys.begin, smaller(keys.end, item.cached.len_kv)};
  }

  // Narrows `tiles`, which serve the whole sequence, to those that the rows of this item may attend to.
  FLASHGEN_DEVICE Range tiles_of(const DecodeItem& item, Range tiles) const {
    const RowPlace first = RowPlace::of(p, item, 0), last = RowPlace::of(p, item, item.rows - 1);
    const Range own =
        mask_of<Mask>(p, item.cached, item.sequence, 0).key_tiles(first.q, last.q + 1, cfg.tile_kv);
    const i32 begin = larger(tiles.begin, own.begin);
    return {begin, larger(begin, smaller(tiles.end, own.end))};
  }

  // A function that tells whether a tile of keys holds allowed pairs.
  FLASHGEN_DEVICE auto visited_by(const DecodeItem& item) const {
    return [this, &item](i32 tile) {
      const RowPlace first = RowPlace::of(p, item, 0), last = RowPlace::of(p, item, item.rows - 1);
      const i32 heads = cfg.varies_by_head ? p.group : 1;
      bool is_visited = false;
#pragma unroll 1
      for (i32 i = 0; i < heads; ++i) {
        const Mask mask = mask_of<Mask>(p, item.cached, item.sequence, item.head_kv * p.group + i);
        is_visited |= !mask.is_empty(first.q, last.q + 1, tile * cfg.tile_kv, (tile + 1) * cfg.tile_kv);
      }
      return is_visited;
    };
  }
};

// ---- flashgen/decode/latent_mainloop.cuh
// Attention of few new tokens to a cache of latent vectors, which are keys and values at once (multi-head
// latent attention, absorbed): O = softmax(Q K^T + Qv V^T) V, where V is wide and one head of it serves many
// query heads.
//
// An item is a tile of query rows of one key/value head of one sequence (rows.cuh), up to 64 query heads.
// O is too wide for the registers of one warp, so the warps of a thread block split the columns of V between
// them. All warps need all of S for that. Each computes it for 16 rows and some keys, and they exchange it
// through shared memory:
//
//     wait for the tile     copies of a later tile start     S = Q K^T + Qv V^T     O += P V
//
// Each key is read from global memory once for all rows of a tile.
//
// Policies: as for the decode mainloop (mainloop.cuh).

template <DecodeConfig cfg, class T, class Params, class Smem, class Mask, class Score, bool paged>
struct LatentMainloop {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 row_blocks = cfg.tile_q / kRowBlock;
  // Keys of a warp's scores, keys that a warp copies, and columns of a warp's O.
  static constexpr i32 own_keys = cfg.tile_kv * row_blocks / cfg.warps;
  static constexpr i32 copied_keys = cfg.tile_kv / cfg.warps;
  static constexpr i32 own_columns = cfg.head_dim_v / cfg.warps;
  static_assert(copied_keys <= kSliceKeys, "a warp knows the places of as many keys");
  static_assert(cfg.warps % row_blocks == 0 && own_keys % 8 == 0 && cfg.tile_kv % cfg.warps == 0,
                "the warps share a tile of scores");
  static_assert(own_columns % 16 == 0 && cfg.head_dim % 16 == 0, "each warp has pairs of blocks of columns");
  // Whether a warp's first column shares no bit with its steps over columns.
  static constexpr bool is_aligned = (own_columns & (own_columns - 1)) == 0;

  using QTile = SharedTile<T, cfg.tile_q, cfg.head_dim>;
  using QvTile = SharedTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = SharedTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = SharedTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using PTile = SharedTile<T, cfg.tile_q, cfg.tile_kv>;
  using Values = RightRows<VTile, is_aligned>;
  using Scores = Accumulator<1, own_keys / 8>;
  using Output = Accumulator<row_blocks, own_columns / 8>;
  using Logits = typename Score::Logits;
  using Softmax = LatentSoftmax<cfg, Logits>;
  using Results = LatentResults<cfg, T, Params, Score, SameElement<cfg, T>>;

  // ---- Shared memory

  struct Shared {
    DecodeScheduler<cfg, Mask> scheduler;
    u32 is_last;
    RowTotal totals[cfg.tile_q];
    RowExchange<cfg> exchange;
  };

  const Params& p;
  u8* base;
  Thread thread;

  FLASHGEN_DEVICE Shared& shared() const { return *reinterpret_cast<Shared*>(base + Smem::kShared); }
  FLASHGEN_DEVICE QTile q_tile() const { return {base + Smem::kQ}; }
  FLASHGEN_DEVICE QvTile qv_tile() const { return {base + Smem::kQv}; }
  FLASHGEN_DEVICE PTile p_tile() const { return {base + Smem::kP}; }
  FLASHGEN_DEVICE KTile k_tile(i32 stage) const { return KTile{base + Smem::kK}.slot(stage); }
  FLASHGEN_DEVICE VTile v_tile(i32 stage) const { return VTile{base + Smem::kV}.slot(stage); }

  // ---- The steps of a tile of keys

  // Starts the copies of an item's queries. They arrive with the first keys.
  FLASHGEN_DEVICE void fetch_queries(const DecodeItem& item) const {
    copy_queries<threads, cfg.access_bytes>(q_tile(), QueryRows<T>::of(p, item), p, item, thread);
    const QueryRows<T> latent{p.qv + item.sequence * p.qv_batch + item.cached.first_q * p.qv_row, p.qv_row,
                              p.qv_head};
    copy_queries<threads, cfg.access_bytes>(qv_tile(), latent, p, item, thread);
  }

  // The products of 16 rows and the warp's keys, from row `first_key` of the tile on.
  FLASHGEN_DEVICE void score(Scores& scores, i32 stage, i32 row_block, i32 first_key, Thread thread) const {
    clear(scores);
    multiply_streamed<T, cfg.head_dim / 16>(scores, LeftRows<QTile>(q_tile(), row_block * kRowBlock, thread),
                                            RightTransposed<KTile>(k_tile(stage), first_key, thread));
    multiply_streamed<T, cfg.head_dim_v / 16>(scores,
                                              LeftRows<QvTile>(qv_tile(), row_block * kRowBlock, thread),
                                              RightTransposed<VTile>(v_tile(stage), first_key, thread));
  }

  // Leaves the warp's probabilities in shared memory.
  FLASHGEN_DEVICE void write_probabilities(const Scores& scores, i32 row_block, i32 first_key,
                                           Thread thread) const {
#pragma unroll
    for (i32 n = 0; n < own_keys / 8; ++n) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i32 row = row_block * kRowBlock + thread.row() + 8 * h;
        *reinterpret_cast<u32*>(p_tile().element_at(row, first_key + 8 * n + thread.column())) =
            pack(T{}, scores[0][n][2 * h], scores[0][n][2 * h + 1]);
      }
    }
  }

  // O += P V where V may hold NaN or infinity for keys that a row must not attend to.
  FLASHGEN_DEVICE void add_values_careful(Output& out, const DecodeItem& item, i32 stage,
                                          i32 first_key) const {
    Output sums;
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 i = 0; i < own_columns / 2; ++i) sums[m][i / 4][i % 4] = out[m][i / 4][i % 4];
    }
#pragma unroll 1
    for (i32 m = 0; m < row_blocks; ++m) {
      const auto masks = LaneMasks<Mask>::of(p, item, LaneRows::of(p, item, m, thread));
      const LeftRows<PTile> probabilities(p_tile(), m * kRowBlock, thread);
#pragma unroll 1
      for (i32 step = 0; step < cfg.tile_kv / 16; ++step) {
        Accumulator<1, 2> allowed;
        const i32 key = first_key + 16 * step + thread.column();
        for_each_score(allowed,
                       [&](float& a, i32 h, i32 column) { a = masks.allows(h, key + column) ? 1.0f : 0.0f; });
        LeftFragment<T> left;
        probabilities.load(left, 0, step);
        add_careful<T>(sums[m], left, LeftRegisters<T, 1, 2>(allowed, thread).fragments[0][0],
                       Values(v_tile(stage).from_row(16 * step), thread.warp * own_columns, thread));
      }
    }
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 i = 0; i < own_columns / 2; ++i) out[m][i / 4][i % 4] = sums[m][i / 4][i % 4];
    }
  }

  // ---- The loop over tiles of keys

  FLASHGEN_DEVICE static i32 next_stage(i32 stage) { return stage + 1 < cfg.stages ? stage + 1 : 0; }

  // Computes O of a warp's columns, and the totals of all rows, over some tiles of keys.
  FLASHGEN_DEVICE void attend(Output& out, const DecodeItem& item, Range assigned) const {
    const LaneRows rows = LaneRows::of(p, item, thread.warp % row_blocks, thread);
    const auto masks = LaneMasks<Mask>::of(p, item, rows);
    const Logits logits = Score::logits(p);

    fetch_queries(item);
    // No key outside this range is read: its page may belong to another sequence by now.
    const VisitedTiles<cfg, Mask, Params> visits{p};
    const Range tiles = visits.tiles_of(item, assigned);
    const Range existing = visits.existing_keys(item);
    const auto visited = visits.visited_by(item);
    Walk<Mask::has_holes> ahead(tiles);
    SlicePlaces<paged> places;
    const auto find_next = [&](Thread thread) {
      ahead.advance(thread, visited);
      if (!ahead.over())
        places = SlicePlaces<paged>::of(p, item.cached, existing,
                                        ahead.tile * cfg.tile_kv + thread.warp * copied_keys, thread);
    };
    // Starts the copies of the next tile, and returns its number.
    const auto fetch_next = [&](i32 stage, Thread thread) {
      const i32 tile = ahead.tile;
      if (!ahead.over()) {
        const auto own = LanePlaces<paged, copied_keys>::of(places, thread);
        // Made here, because O leaves no registers for what they hold.
        const i64 row = paged ? 0 : item.cached.row;
        const i32 first = thread.warp * copied_keys;
        SliceCopies<cfg.head_dim, cfg.access_bytes, KTile, copied_keys>(
            p.k + row * p.k_batch + item.head_kv * p.k_head, first, thread)
            .start(k_tile(stage), p.k_batch, p.k_row, own);
        SliceCopies<cfg.head_dim_v, cfg.access_bytes, VTile, copied_keys>(
            p.v + row * p.v_batch + item.head_kv * p.v_head, first, thread)
            .start(v_tile(stage), p.v_batch, p.v_row, own);
        find_next(thread);
      }
      cp_async_commit();
      return tile;
    };
    Softmax softmax;
    clear(out);
    softmax.reset();

    find_next(thread);
    // The numbers of the tiles whose copies are in flight. The first steps only start copies.
    i32 in_flight[cfg.stages - 1] = {};
    i32 stage = 0, filled_stage = 0;
#pragma unroll 1
    for (i32 step = 1 - cfg.stages; step < 0 || in_flight[0] < tiles.end; ++step) {
      const Thread here = thread.recomputed();
      const i32 row_block = here.warp % row_blocks, own_first = here.warp / row_blocks * own_keys;
      const i32 first_key = in_flight[0] * cfg.tile_kv, key = first_key + own_first;
      if (step >= 0) {
        // The tile has arrived, and no warp still reads the stage that the next copies overwrite.
        cp_async_wait<cfg.stages - 2>();
        block_sync();
      }
#pragma unroll
      for (i32 i = 0; i + 2 < cfg.stages; ++i) in_flight[i] = in_flight[i + 1];
      in_flight[cfg.stages - 2] = fetch_next(filled_stage, here);
      filled_stage = next_stage(filled_stage);
      if (step < 0) continue;

      Scores scores;
      score(scores, stage, row_block, own_first, here);
      Score::apply(scores, p, item, rows, key, here);
      const bool is_cut = warp_any(!masks.is_full(key, key + own_keys));
      if (is_cut) {
        for_each_score(scores, [&](float& s, i32 h, i32 column) {
          if (!masks.allows(h, key + here.column() + column)) s = -kInfinity;
        });
      }
      float highest[2];
      Softmax::largest(highest, scores, logits);
      bool tile_is_cut = false;
      if (block_any(softmax.lags(highest) || (Mask::is_bounded && is_cut)))
        tile_is_cut = softmax.raise(highest, out, shared().exchange, is_cut, here);
      softmax.exponentiate(scores, logits);
      write_probabilities(scores, row_block, own_first, here);
      block_sync();
      // Values beyond the sequence arrive as zeros, so only a mask can forbid some that are not finite.
      if (Mask::is_bounded && tile_is_cut && holds_non_finite<threads>(v_tile(stage), thread)) {
        add_values_careful(out, item, stage, first_key);
      } else {
        multiply<T, false, cfg.tile_kv / 16>(out, LeftRows<PTile>(p_tile(), 0, here),
                                             Values(v_tile(stage), here.warp * own_columns, here));
      }
      stage = next_stage(stage);
    }
    softmax.finish(shared().totals, shared().exchange, thread);
    cp_async_wait<0>();
  }

  // ---- The block's share of an item

  FLASHGEN_DEVICE void compute(const Assignment& assigned, const Shares& shares) const {
    Output out;
    const Results results{{p, assigned.item, shared().totals, thread}, out};
    compute_share<cfg>(p, assigned, shares, shared().is_last, thread, results,
                       [&](Range tiles) { attend(out, assigned.item, tiles); });
  }

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Thread thread = Thread::current();
    const LatentMainloop self{p, base, thread};
    DecodeScheduler<cfg, Mask>& scheduler = self.shared().scheduler;
    scheduler.init(p, thread);
#pragma unroll 1
    while (scheduler.next(p, thread).exists) self.compute(scheduler.assignments[0], scheduler.shares);
  }
};

}  // namespace flashgen

// ---- kernels/decode/latent.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr DecodeConfig kConfig{
    .head_dim = 64,
    .head_dim_v = 512,
    .tile_q = 64,   // new tokens times the query heads that share a key/value head
    .tile_kv = 64,  // keys per step
    .stages = 2,
    .warps = 8,  // which split the columns of O between them
    .producers = 0,
    .producer_registers = 0,
    .consumer_registers = 0,
    .holds_queries = false,   // Q stays in shared memory
    .least_tiles = 2,         // tiles of keys that a block gets at least, for each 16 rows
    .item_tiles = 2,          // fixed cost of an item, in tiles
    .has_lower = false,       // the band has a lower bound on k - q
    .has_upper = true,        // the band has an upper bound on k - q
    .varies_by_head = false,  // which tiles hold allowed pairs depends on the head
    .access_bytes = 16,       // alignment of rows in global memory
};

struct Params {
  const element_t* q;
  const element_t* k;
  const element_t* v;
  const element_t* qv;
  element_t* o;
  // log-sum-exp, (batch, heads_q, len_q)
  float* lse;
  // O of each split of the keys, (splits, batch, heads_q, len_q, head_dim_v)
  float* o_partial;
  // of each row of a part: the reference maximum, and the sum of exponentials
  float* row_partial;
  // tiles drawn, then blocks done; 0 between launches
  u32* counter;
  // keys of each sequence, without appended ones; null: the capacity
  const i32* cache_seqlens;
  // row of the cache of each sequence; null: the sequence's index
  const i32* cache_batch_idx;
  // first keys of each sequence to skip; null: none
  const i32* cache_leftpad;
  // the pages of each sequence; entries beyond its length are ignored
  const i32* block_table;
  // first query of each packed sequence; null: queries are a batch
  const i32* cu_seqlens_q;
  // prefix sums of the sequences' keys, in place of cache_seqlens; null: use that
  const i32* cu_seqlens_k;
  // strides are in elements
  i64 q_batch;
  i64 q_row;
  i64 q_head;
  i64 k_batch;
  i64 k_row;
  i64 k_head;
  i64 v_batch;
  i64 v_row;
  i64 v_head;
  i64 qv_batch;
  i64 qv_row;
  i64 qv_head;
  i64 o_batch;
  i64 o_row;
  i64 o_head;
  i64 table_row;  // stride between rows of the table
  i64 lse_batch;  // stride between sequences; 0 if queries are packed
  i64 lse_head;
  i64 lse_rows;  // stride between splits
  i32 heads_q;
  i32 heads_kv;
  i32 len_q;
  i32 len_kv;      // capacity in keys of each sequence
  i32 group;       // query heads per key/value head
  i32 band_lower;  // relative to the diagonal through the last query and the last key
  i32 band_upper;
  i32 part_tiles;    // tiles of keys of a part; 0: blocks share all tiles equally
  i32 slot_rows;     // rows of a part in o_partial
  i32 team;          // blocks that go over the same keys at the same time, each for other rows
  i32 page_size;     // keys per page
  i32 batch;         // sequences
  i32 appended;      // keys of each sequence after those in cache_seqlens
  i32 corner_lower;  // the band of terms aligned top-left; band_... is for those aligned bottom-right
  i32 corner_upper;
  float scale;
  float scale_log2;  // scale * log2(e)
};
static_assert(sizeof(Params) == 344, "the launcher packs Params into 344 bytes");

struct Smem {
  static constexpr u32 kQ = 0;            // Q
  static constexpr u32 kQv = 8192;        // Qv
  static constexpr u32 kK = 73728;        // K_j, 2 stages
  static constexpr u32 kV = 90112;        // V_j, 2 stages
  static constexpr u32 kP = 221184;       // P of the tile
  static constexpr u32 kShared = 229376;  // what the threads exchange
};

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using Scoring = NoRowScore;

FLASHGEN_KERNEL(256, 1) decode_d64x512_causal_pages_qv_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  LatentMainloop<kConfig, element_t, Params, Smem, Mask, Scoring, true>::run(p, base);
}
