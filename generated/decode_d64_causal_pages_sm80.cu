// decode_d64_causal_pages_sm80: Flash-Decoding, forward pass of few new queries: O and the log-sum-exp of
// each row.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"forward","deterministic":false,"cache":"paged"}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --forward-only --cache paged --arch sm_80
// for      sm_80 (A100)
// plan     tile_q 64, tile_kv 64, stages 3, warps 4, 128 threads, registers for 3 blocks per multiprocessor
// grid     no more blocks than run at once, 3 on each multiprocessor; they take one tile after another: 64
//          key rows of a key/value head and batch entry
// smem     50880 bytes
// because  4 warps with 16 keys each and 3 stages keep 32 KiB of keys and values under way in each block, and
//          three blocks share a multiprocessor
//
// contents   49  Instructions, one per function: types, device, copy, math, matrix.
//           215  Element types.
//           265  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//           329  Operands of warp-level matrix products.
//           436  Warp-level matrix products.
//           512  Banded masks.
//           569  Streaming tiles between global and shared memory.
//           585  Keys and values in a cache.
//           641  Instructions, one per function: grid.
//           664  What a softmax takes exponentials of.
//           693  What an online softmax keeps of each row from one tile of keys to the next.
//           706  The online softmax.
//           850  The sizes of a decode kernel.
//           890  The rows of a tile.
//          1051  Bringing keys and values to shared memory.
//          1227  The type of the cache's elements.
//          1268  Finding NaN and infinity.
//          1285  Walking over the tiles that a mask does not rule out.
//          1320  Keeping NaN and infinity where they belong.
//          1336  P V of a slice that the mask cuts, where V may hold NaN or infinity for keys that a row must not attend to.
//          1402  Thread blocks that go over the same keys at the same time, each for different rows.
//          1437  Results of a part of the keys.
//          1512  What happens to products Q K^T before the softmax.
//          1529  The results of rows.
//          1673  Accumulators of a warp's 16 rows in memory, in the layout of its lanes.
//          1712  From the results of warps, each with keys of its own, to those of a thread block.
//          1835  Which tiles of keys a thread block works on.
//          2039  What a thread block computes of an item.
//          2103  Which keys, and which tiles of them, the rows of an item may attend to.
//          2146  Attention of few new tokens to a cache.
//          2391  The kernel: its configuration, parameters and text.

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
FLASHGEN_DEVICE i32 grid_dim_x() { return static_cast<i32>(gridDim.x); }
FLASHGEN_DEVICE void block_sync() { __syncthreads(); }
FLASHGEN_DEVICE void warp_sync() { __syncwarp(); }
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

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

// Two neighboring elements, written with one store.
template <class T>
struct alignas(4) Pair {
  u32 bits;
  FLASHGEN_DEVICE static Pair from(float first, float second) { return {pack(T{}, first, second)}; }
};

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

// A left operand fetched once and held in registers, for a tile that every product uses.
template <class T, i32 row_blocks, i32 steps>
struct LeftHeld {
  static constexpr bool in_registers = true;
  LeftFragment<T> fragments[row_blocks][steps];

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
  FLASHGEN_DEVICE static Range queries_of(const auto& p, i32 sequence) {
    if (p.cu_seqlens_q == nullptr) return {0, p.len_q};
    const i32 first = p.cu_seqlens_q[sequence];
    return {first, larger(first, smaller(p.cu_seqlens_q[sequence + 1], first + p.len_q))};
  }

  FLASHGEN_DEVICE static i64 row_of(const auto& p, i32 sequence) {
    return p.cache_batch_idx == nullptr ? sequence : p.cache_batch_idx[sequence];
  }

  // How many keys there are without those that were appended.
  FLASHGEN_DEVICE static i32 before(const auto& p, i32 sequence) {
    return p.cache_seqlens == nullptr ? p.len_kv : larger(0, smaller(p.cache_seqlens[sequence], p.len_kv));
  }

  // The same where an array may say how many keys all sequences before this one have.
  FLASHGEN_DEVICE static i32 keys_of(const auto& p, i32 sequence) {
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

// ---- flashgen/ptx/grid.cuh
// Communication between blocks and between grids: atomics, ordered accesses of global memory, and
// programmatic dependent launch.

namespace flashgen {

// ---- Atomic operations, relaxed unless their names say otherwise. Additions return the previous value.

// Adds 1, or sets 0 after `last`. This thread sees what those saw that incremented before it, and those after
// it see what this thread saw and wrote.
FLASHGEN_DEVICE u32 atomic_inc_acq_rel(u32* address, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(last)
               : "memory");
  return before;
}

// ---- Programmatic dependent launch (sm_90 and later)

}  // namespace flashgen
#endif
// ---- flashgen/logits.cuh
// What a softmax takes exponentials of. The exponentials of a row are relative to its reference maximum: the
// row's maximum so far, or a number near it. Each kind of logits has its own unit for reference maxima.
//
//     logit(s, row)            accumulator s as a reference maximum; as_reference_max(x): logit x as one
//     relative(s, shift, row)  how far s is above reference maximum `shift`, in powers of two
//     powers(x), distance(x)   from a difference of reference maxima to powers of two, and back
//     natural_log(m, x)        the natural logarithm of 2^x times the factor of reference maximum m
//     kNoMax                   the reference maximum of a row without an allowed key so far

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
  // Parts of eight rows that a block merges in the time of a tile of keys.
  i32 merged_parts;
  // The fixed cost of an item, in tiles of keys.
  i32 item_tiles;
  bool has_lower;
  bool has_upper;
  // Which tiles of keys hold allowed pairs depends on the query head.
  bool varies_by_head;
  i32 access_bytes;

  // Keys of a slice: those of a tile that a warp copies.
  constexpr i32 slice_keys() const { return tile_kv / warps; }
};

// Rows of one product by tensor cores.
constexpr i32 kRowBlock = 16;
// Rows that the lanes of a warp merge at a time.
constexpr i32 kMergedRows = 8;

// Waits for all warps that compute.
template <DecodeConfig cfg>
FLASHGEN_DEVICE void consumers_sync() { block_sync(); }

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

  FLASHGEN_DEVICE i32 row_blocks() const { return ceil_div(rows, kRowBlock); }
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

// A warp's rows of Q in registers, straight from global memory: each lane reads the elements that it
// multiplies.
template <DecodeConfig cfg, class T, bool in_registers>
struct WarpQueries {
  static constexpr i32 steps = round_up(cfg.head_dim, 16) / 16;
  LeftHeld<T, 1, steps> held;

  template <class Params>
  FLASHGEN_DEVICE static WarpQueries load(const Params& p, const DecodeItem& item, const LaneRows& rows, u8*,
                                          i32, Thread thread) {
    const auto source = QueryRows<T>::of(p, item);
    const T* const own[2] = {source.at(rows.places[0]) + thread.column(),
                             source.at(rows.places[1]) + thread.column()};
    WarpQueries queries;
#pragma unroll
    for (i32 step = 0; step < steps; ++step) {
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 first = 16 * step + 8 * (i / 2);
        const bool exists = first + 8 <= cfg.head_dim || first + thread.column() < cfg.head_dim;
        queries.held.fragments[0][step].words[i] =
            exists ? *reinterpret_cast<const u32*>(own[i % 2] + first) : 0;
      }
    }
    return queries;
  }
  FLASHGEN_DEVICE const LeftHeld<T, 1, steps>& left(Thread) const { return held; }
};

// In shared memory, a copy for each warp. They arrive with the first keys.
template <DecodeConfig cfg, class T>
struct WarpQueries<cfg, T, false> {
  using Tile = SharedTile<T, kRowBlock, round_up(cfg.head_dim, 16)>;
  Tile tile;

  template <class Params>
  FLASHGEN_DEVICE static WarpQueries load(const Params& p, const DecodeItem& item, const LaneRows&, u8* base,
                                          i32 row_block, Thread thread) {
    const auto source = QueryRows<T>::of(p, item);
    const Tile tile = Tile{base}.slot(thread.warp);
#pragma unroll 1
    for (i32 i = thread.lane; i < Tile::rows * Tile::chunks; i += kWarpSize) {
      const i32 row = i / Tile::chunks, chunk = i % Tile::chunks, column = chunk * Tile::chunk_elements;
      const T* const from = source.at(RowPlace::of(p, item, row_block * kRowBlock + row));
      const i32 columns = cfg.head_dim - column;
      copy_chunk_async<T, cfg.access_bytes>(shared_address(tile.chunk_at(row, chunk)),
                                            columns > 0 ? from + column : from, columns);
    }
    return {tile};
  }
  FLASHGEN_DEVICE LeftRows<Tile> left(Thread thread) const { return {tile, 0, thread}; }
};

// ---- flashgen/decode/key_slices.cuh
// Bringing keys and values to shared memory. Each warp copies its slice of a tile: some keys, and their
// values.

// Where a key of a slice lies.
template <bool paged>
struct alignas(8) KeyLocation {
  // The page (without pages: 0), and the key's row in it. A negative page stands for a key that does not
  // exist: it is never read, nor is its entry of the page table.
  i32 page;
  i32 row;

  template <class Params>
  FLASHGEN_DEVICE static KeyLocation of(const Params& p, const CachedSequence& cached, Range keys, i32 key) {
    const i32 place = cached.first_key + key;
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
    // Not negative: 64 bits then need no sign.
    const u32 own_page = static_cast<u32>(larger(page, 0)), own_row = static_cast<u32>(row);
    return paged ? own_page * page_stride + own_row * row_stride : own_row * row_stride;
  }
  // The location that another lane knows.
  FLASHGEN_DEVICE KeyLocation of_lane(i32 lane) const { return {shuffle(page, lane), shuffle(row, lane)}; }
};

// The pages of a sequence. What the loop over keys needs of them is in registers, and a multiplication takes
// the place of divisions by the keys of a page.
struct SequencePages {
  const i32* table;
  i32 first_key;
  u32 page_keys;
  u32 inverse;

  // Without pages there is nothing to know.
  template <bool paged, class Params>
  FLASHGEN_DEVICE static SequencePages of(const Params& p, const CachedSequence& cached) {
    if constexpr (paged) {
      const u32 keys = static_cast<u32>(p.page_size);
      return {p.block_table + cached.row * p.table_row, cached.first_key, keys, 0xffffffffu / keys};
    } else {
      return {};
    }
  }

  // Which page of the sequence a key lies in, and which row there.
  FLASHGEN_DEVICE KeyLocation<true> index_of(i32 key) const {
    const u32 place = static_cast<u32>(first_key + key);
    // The page, or the one before it: the inverse is rounded down.
    const u32 page = static_cast<u32>(static_cast<u64>(place) * inverse >> 32),
              row = place - page * page_keys;
    const bool is_next = row >= page_keys;
    return {static_cast<i32>(is_next ? page + 1 : page), static_cast<i32>(is_next ? row - page_keys : row)};
  }
};

// Where the keys of a later slice lie, in shared memory. Page numbers arrive by asynchronous copies, as keys
// do. A plain load would stall the warp: ptxas waits for outstanding loads before a loop whose trip count it
// does not know, such as the loop over slices.
struct RequestedLocations {
  KeyLocation<true>* locations;

  // Starts the copies of page numbers, one for each key. `keys`: those that exist.
  template <i32 slice_keys>
  FLASHGEN_DEVICE void request(const SequencePages& pages, Range keys, i32 first_key, Thread thread) const {
    static_assert(slice_keys <= kWarpSize, "a lane requests one location");
    const i32 key = first_key + thread.lane;
    if (thread.lane >= slice_keys) return;
    KeyLocation<true>& location = locations[thread.lane];
    if (!keys.has(key)) {
      location = {-1, 0};
      return;
    }
    const KeyLocation<true> index = pages.index_of(key);
    location.row = index.row;
    cp_async_4(shared_address(&location.page), pages.table + index.page, static_cast<u32>(sizeof(i32)));
  }
};

// Which rows of a slice a lane copies. Lanes that share a row copy neighboring chunks of it: four make whole
// sectors of memory, and eight a line. Sharing rows also leaves each lane few addresses.
template <i32 slice_rows, i32 lanes = 4>
struct LaneShare {
  static constexpr i32 lanes_of_row = larger(lanes, kWarpSize / slice_rows);
  // The lane's rows lie this far apart.
  static constexpr i32 row_step = kWarpSize / lanes_of_row;
  static constexpr i32 rows = slice_rows / row_step;
  static_assert(rows * row_step == slice_rows, "all lanes copy as many rows");
};

// Where the lane's rows lie.
template <bool paged, class Share>
struct LaneLocations {
  KeyLocation<paged> rows[Share::rows];

  // Each lane knows the location of one key of the slice.
  FLASHGEN_DEVICE static LaneLocations of(const KeyLocation<paged>& own, Thread thread) {
    const i32 row = thread.lane / Share::lanes_of_row;
    LaneLocations found;
#pragma unroll
    for (i32 h = 0; h < Share::rows; ++h) found.rows[h] = own.of_lane(row + h * Share::row_step);
    return found;
  }
  // Without pages, where nothing is to be looked up. `keys`: those that exist.
  template <class Params>
  FLASHGEN_DEVICE static LaneLocations of(const Params& p, const CachedSequence& cached, Range keys,
                                          i32 first_key, Thread thread) {
    static_assert(!paged, "page numbers are requested ahead");
    const i32 first = first_key + thread.lane / Share::lanes_of_row;
    LaneLocations found;
#pragma unroll
    for (i32 h = 0; h < Share::rows; ++h)
      found.rows[h] = KeyLocation<paged>::of(p, cached, keys, first + h * Share::row_step);
    return found;
  }
  // Of locations whose page numbers have arrived.
  FLASHGEN_DEVICE static LaneLocations of(const RequestedLocations& requested, Thread thread) {
    const i32 row = thread.lane / Share::lanes_of_row;
    LaneLocations found;
#pragma unroll
    for (i32 h = 0; h < Share::rows; ++h) found.rows[h] = requested.locations[row + h * Share::row_step];
    return found;
  }
};

// Copies a slice of rows of one head of K or V into a tile.
template <i32 head_dim, i32 access_bytes, class Tile, class Share>
struct SliceCopies {
  using T = typename Tile::Element;

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
                             const LaneLocations<paged, Share>& locations) const {
    constexpr i32 step = Share::lanes_of_row * Tile::chunk_elements;
    const u32 start = shared_address(tile.data);
#pragma unroll
    for (i32 h = 0; h < Share::rows; ++h) {
      const KeyLocation<paged>& row = locations.rows[h];
      const T* const from = data + row.offset(page_stride, row_stride);
      const i32 columns = row.exists() ? head_dim - chunk * Tile::chunk_elements : 0;
      // Rows that lie less than eight apart are swizzled in different ways.
      const i32 swizzle = Tile::Layout::of_row(h * Share::row_step);
#pragma unroll
      for (i32 i = 0; i < ceil_div(Tile::chunks, Share::lanes_of_row); ++i) {
        const i32 left = Tile::chunks - i * Share::lanes_of_row;
        if (left >= Share::lanes_of_row || chunk < left)
          copy_chunk_async<T, access_bytes>(
              start + place.template offset<true>(h * Share::row_step, i * Share::lanes_of_row ^ swizzle),
              from + i * step, columns - i * step);
      }
    }
  }
};

// ---- flashgen/decode/cache_element.cuh
// The type of the cache's elements: the CacheElement policy of the decode mainloop. It says how rows of K and
// V lie in shared memory, how tensor cores get them and the queries, and how scores and results are scaled.
//
//     fetch_scales(slot, keys, thread)     starts copies of the scales of a slice of keys
//     slice_scales(slot, thread)           the scales of a slice's keys:
//       apply_qk_scales(scores, queries)     multiplies products by the scales of K and Q
//       add_log_v_scales(logits)             adds logarithms, so that exponentials include the scales of V
//       weighted_sum(a, b, n)                what two exponentials of block n add to the row's sum
//     scale_and_reorder(out)               makes O of accumulators: the last scale, and the order of columns
//     column(n, thread)                    the first of the two columns of O that a lane holds of block n

// Elements of the queries' type, without scales.
template <DecodeConfig cfg, class T>
struct SameElement {
  using Operand = T;
  static constexpr i32 dim = round_up(cfg.head_dim, 16);
  static constexpr i32 dim_v = round_up(cfg.head_dim_v, 16);
  using KSlice = SharedTile<T, cfg.slice_keys(), dim>;
  using VSlice = SharedTile<T, cfg.slice_keys(), dim_v>;
  using Keys = RightTransposed<KSlice>;
  using Values = RightRows<VSlice, true>;
  using Queries = WarpQueries<cfg, T, cfg.holds_queries>;

  struct SliceScales {
    template <class Scores>
    FLASHGEN_DEVICE void apply_qk_scales(Scores&, const Queries&) const {}
    template <class Scores>
    FLASHGEN_DEVICE void add_log_v_scales(Scores&) const {}
    FLASHGEN_DEVICE float weighted_sum(float a, float b, i32 /*n*/) const { return a + b; }
  };

  template <class Params>
  FLASHGEN_DEVICE static SameElement of(const Params&, const DecodeItem&, u8*) { return {}; }
  FLASHGEN_DEVICE void fetch_scales(i32, const RequestedLocations&, Thread) const {}
  FLASHGEN_DEVICE SliceScales slice_scales(i32, Thread) const { return {}; }
  template <class Output>
  FLASHGEN_DEVICE void scale_and_reorder(Output&) const {}
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
constexpr u32 kSigns = kIsFloat<T>      ? 0x80000000u
                       : sizeof(T) == 2 ? 0x80008000u
                                        : 0x80808080u;

// The sign bits of those elements of a word that are not finite.
template <class T>
FLASHGEN_DEVICE u32 non_finite_signs(u32 word) { return ((word & ~kSigns<T>)+kToInfinity<T>)&kSigns<T>; }

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

// ---- flashgen/decode/careful_product.cuh
// P V of a slice that the mask cuts, where V may hold NaN or infinity for keys that a row must not attend to:
// the row's probability is 0, but 0 * NaN is NaN.

// Whether some element of a slice is not finite. All lanes of a warp call, and get the same.
template <class Slice>
FLASHGEN_DEVICE bool slice_holds_non_finite(Slice slice, Thread thread) {
  u32 signs = 0;
#pragma unroll 1
  for (i32 i = thread.lane; i < Slice::rows * Slice::chunks; i += kWarpSize) {
    const Vec16 chunk = *reinterpret_cast<const Vec16*>(slice.data + i * kChunkBytes);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Slice::Element>(chunk.words[w]);
  }
  return warp_any(signs != 0);
}

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

// The same for O in registers, and P and `allowed` as numbers. `values_of(step)` are those of 16 keys.
template <class T, i32 blocks, i32 score_blocks, class ValuesOf>
FLASHGEN_DEVICE void multiply_careful(Accumulator<1, blocks>& out,
                                      const Accumulator<1, score_blocks>& probabilities,
                                      const Accumulator<1, score_blocks>& allowed, Thread thread,
                                      const ValuesOf& values_of) {
  const LeftRegisters<T, 1, score_blocks> left(probabilities, thread), pairs(allowed, thread);
  Accumulator<1, blocks> sums;
#pragma unroll
  for (i32 i = 0; i < 4 * blocks; ++i) sums[0][i / 4][i % 4] = out[0][i / 4][i % 4];
#pragma unroll
  for (i32 step = 0; step < score_blocks / 2; ++step)
    add_careful<T>(sums[0], left.fragments[0][step], pairs.fragments[0][step], values_of(step));
#pragma unroll
  for (i32 i = 0; i < 4 * blocks; ++i) out[0][i / 4][i % 4] = sums[0][i / 4][i % 4];
}

// ---- flashgen/decode/team.cuh
// Thread blocks that go over the same keys at the same time, each for different rows. One of them reads a key
// from device memory, and the others find it in L2.

struct Team {
  i32 size;
  // This thread block's number in its team.
  i32 rank;

  // The host chooses the size. Kernels without a `team` parameter have teams of one thread block.
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
  // This thread block's team, and how many there are. Thread blocks that are left over get no work.
  FLASHGEN_DEVICE i32 index() const { return block_idx_x() / size; }
  FLASHGEN_DEVICE i32 count() const { return grid_dim_x() / size; }
  // The thread block or tile number `index` of this thread block, where the thread blocks of a team take
  // turns.
  FLASHGEN_DEVICE i32 strided(i32 index) const { return index * size + rank; }
};

// ---- flashgen/decode/partials.cuh
// Results of a part of the keys: O without its normalizer, and for each row the reference maximum and the sum
// of exponentials. They are merged exactly, whatever the size of the logits.

// The factor taken out of a row's exponentials, and their sum.
struct alignas(8) RowTotal {
  float reference_max;
  float sum;
};

// The weight of a part of a row whose parts have the common reference maximum `row_max`.
template <class Logits>
FLASHGEN_DEVICE float weight_of_part(const Logits& logits, float reference_max, float row_max) {
  return exp2_approx(logits.powers(reference_max - (row_max == -kInfinity ? 0.0f : row_max)));
}

// Partial results in the workspace, those of one part of an item after another: for each eight columns a
// small matrix of the item's rows, so that the lanes of a warp access neighboring addresses and rows that do
// not exist take no room.
template <i32 blocks>
struct Partials {
  float* out;
  RowTotal* totals;
  i32 rows;

  template <class Params>
  FLASHGEN_DEVICE static Partials of(const Params& p) {
    return {p.o_partial, reinterpret_cast<RowTotal*>(p.row_partial), p.partial_rows};
  }
  // Two columns of block `n`, from `column` on.
  FLASHGEN_DEVICE float* pair(i32 index, i32 n, i32 row, i32 column) const {
    return out + index * partial_floats() + n * block_floats() + row * 8 + column;
  }
  // From each part to the next, and from each block of columns to the next.
  FLASHGEN_DEVICE i64 partial_floats() const { return blocks * block_floats(); }
  FLASHGEN_DEVICE i64 block_floats() const { return i64{8} * rows; }
  FLASHGEN_DEVICE RowTotal& total(i32 index, i32 row) const {
    return totals[static_cast<i64>(index) * rows + row];
  }
};

struct alignas(8) FloatPair {
  float values[2];
};

// Where an item's parts lie among all in the workspace, in the order of its keys.
struct PartialIndices {
  i32 count;
  i32 first;
  // Of the second part, and from each part to the next one.
  i32 second;
  i32 stride;

  // Parts of fixed sizes, of an item whose first unit is number `first_unit` of all.
  FLASHGEN_DEVICE static PartialIndices fixed(Team team, i32 first_unit, i32 units) {
    return {units, team.strided(first_unit), team.strided(first_unit + 1), team.size};
  }
  // One part of each thread block from `first_block` on. The workspace has room for two parts of a thread
  // block: of an item that a thread block before it has begun, and of one that it begins itself.
  FLASHGEN_DEVICE static PartialIndices of_blocks(Team team, i32 first_block, i32 blocks) {
    return {blocks, team.strided(2 * first_block + 1), team.strided(2 * (first_block + 1)), 2 * team.size};
  }
  FLASHGEN_DEVICE i32 operator()(i32 part) const { return part == 0 ? first : second + (part - 1) * stride; }
};

// Whether this thread block is the last of `blocks` to arrive at a counter, which is 0 again after that. All
// threads that compute call, after a barrier of theirs. Those of the last thread block see what all thread
// blocks wrote before they arrived.
template <DecodeConfig cfg>
FLASHGEN_DEVICE bool arrives_last(u32* counter, u32 blocks, u32& shared, Thread thread) {
  if (thread.index() == 0) shared = atomic_inc_acq_rel(counter, blocks - 1) == blocks - 1;
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
  FLASHGEN_DEVICE static Logits logits(const Params& p) { return {p.scale_log2}; }
  template <i32 blocks, class Params>
  FLASHGEN_DEVICE static void apply(Accumulator<1, blocks>&, const Params&, const DecodeItem&,
                                    const LaneRows&, i32, Thread) {}
  template <class Params>
  FLASHGEN_DEVICE static float sink(const Params&, const DecodeItem&, i32) { return -kInfinity; }
};

// ---- flashgen/decode/row_results.cuh
// The results of rows: from parts to O and L.

// The rows of one item. All threads that compute call its functions.
template <DecodeConfig cfg, class T, class Params, class Score, class CacheElement>
struct RowResults {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 out_blocks = CacheElement::dim_v / 8;
  // Blocks of eight columns that a warp merges.
  static constexpr i32 own_blocks = ceil_div(out_blocks, cfg.warps);
  using Logits = typename Score::Logits;

  const Params& p;
  const DecodeItem& item;
  // In shared memory: the totals of the tile's rows.
  RowTotal (&totals)[cfg.tile_q];
  Thread thread;

  // Stores the totals of a part in the workspace.
  FLASHGEN_DEVICE void store_totals(const Partials<out_blocks>& partials, i32 index) const {
    for (i32 row = thread.index(); row < item.rows; row += threads) partials.total(index, row) = totals[row];
  }

  // Merges the parts of an item, in the order of its keys. Each lane loads the totals of its row and its own
  // columns of several parts at once, so it waits for memory once for all of these.
  FLASHGEN_DEVICE void merge(const PartialIndices& indices) const {
    const Logits logits = Score::logits(p);
#pragma unroll 1
    for (i32 row = thread.row(); row < item.rows; row += kMergedRows) {
      RowTotal total = {-kInfinity, 0.0f};
      FloatPair sums[own_blocks] = {};
#pragma unroll 1
      for (i32 first = 0; first < indices.count; first += LoadedParts::count) {
        const LoadedParts parts = load_parts(indices, first, row);
        float row_max = total.reference_max;
#pragma unroll
        for (const RowTotal& part : parts.totals) row_max = maximum(row_max, part.reference_max);
        const float kept = weight_of_part(logits, total.reference_max, row_max);
        total = {row_max, total.sum * kept};
#pragma unroll
        for (FloatPair& sum : sums) sum = {{sum.values[0] * kept, sum.values[1] * kept}};
#pragma unroll
        for (i32 i = 0; i < LoadedParts::count; ++i) {
          const float weight = weight_of_part(logits, parts.totals[i].reference_max, row_max);
          total.sum += parts.totals[i].sum * weight;
#pragma unroll
          for (i32 b = 0; b < own_blocks; ++b) {
#pragma unroll
            for (i32 c = 0; c < 2; ++c)
              sums[b].values[c] = fused_multiply_add(weight, parts.pairs[i][b].values[c], sums[b].values[c]);
          }
        }
      }
      const OutputRow to = output_row(row, block_of(0), with_sink(row, total));
#pragma unroll
      for (i32 b = 0; b < own_blocks; ++b) {
        if (has_block(b)) store_pair(to, block_of(b), sums[b]);
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
    const float row_max = maximum(total.reference_max, sink),
                weight = weight_of_part(logits, total.reference_max, row_max);
    const float sum = total.sum * weight + weight_of_part(logits, sink, row_max);
    return {{row_max, sum}, sum == 0.0f ? 0.0f : weight / sum};
  }

  // A row of O in memory, and what O is multiplied by.
  struct OutputRow {
    T* data;
    float factor;
  };
  // Where a row's results go. `n` is the first block that this thread stores. With the first columns it
  // writes L.
  FLASHGEN_DEVICE OutputRow output_row(i32 row, i32 n, const Finished& finished) const {
    const RowPlace place = RowPlace::of(p, item, row);
    const i64 q = item.cached.first_q + place.q;
    if (CacheElement::column(n, thread) == 0) {
      const RowTotal total = finished.total;
      p.lse[item.sequence * p.lse_batch + place.head * p.lse_head + q] =
          total.sum == 0.0f ? -kInfinity : Logits::natural_log(total.reference_max, log2_approx(total.sum));
    }
    return {p.o + item.sequence * p.o_batch + q * p.o_row + place.head * p.o_head, finished.factor};
  }
  // Writes two columns of O.
  FLASHGEN_DEVICE void store_pair(const OutputRow& to, i32 n, const FloatPair& pair) const {
    const i32 column = CacheElement::column(n, thread);
    if (column < cfg.head_dim_v) {
      *reinterpret_cast<Pair<T>*>(to.data + column) =
          Pair<T>::from(pair.values[0] * to.factor, pair.values[1] * to.factor);
    }
  }

 private:
  FLASHGEN_DEVICE i32 block_of(i32 b) const { return thread.warp + b * cfg.warps; }
  FLASHGEN_DEVICE bool has_block(i32 b) const {
    return out_blocks % cfg.warps == 0 || block_of(b) < out_blocks;
  }

  // A lane's row and columns of several parts. Those beyond the last part are empty.
  struct LoadedParts {
    // What registers hold, and no more than 17: where 132 thread blocks share eight heads, a head has at most
    // 17 parts.
    static constexpr i32 count = larger(1, smaller(17, 40 / own_blocks));
    RowTotal totals[count];
    FloatPair pairs[count][own_blocks];
  };

  // Starts all loads before the first of them has arrived. So no branch may come between them.
  FLASHGEN_DEVICE LoadedParts load_parts(const PartialIndices& indices, i32 first, i32 row) const {
    const auto partials = Partials<out_blocks>::of(p);
    LoadedParts parts;
    const i32 index = indices(first);
    const RowTotal* total = &partials.total(index, row);
    const float* pair = partials.pair(index, thread.warp, row, thread.column());
    const i64 between_blocks = partials.block_floats() * cfg.warps;
#pragma unroll
    for (i32 i = 0; i < LoadedParts::count; ++i) {
      const bool exists = first + i < indices.count;
      parts.totals[i] = exists ? *total : RowTotal{-kInfinity, 0.0f};
#pragma unroll
      for (i32 b = 0; b < own_blocks; ++b) {
        parts.pairs[i][b] = exists && has_block(b)
                                ? *reinterpret_cast<const FloatPair*>(pair + b * between_blocks)
                                : FloatPair{};
      }
      // Only the second part may lie at another distance.
      const i64 distance = i == 0 ? indices(first + 1) - index : indices.stride;
      total += distance * partials.rows;
      pair += distance * partials.partial_floats();
    }
    return parts;
  }
};

// ---- flashgen/fragments.cuh
// Accumulators of a warp's 16 rows in memory, in the layout of its lanes: for each block of 16 x 8, four
// floats per lane. Each lane reads what the same lane of a warp wrote, 16 bytes at a time.

// Writes the columns from `first` to `end`.
template <i32 count>
FLASHGEN_DEVICE void write_columns(float* part, const float (&strip)[count], i32 first, i32 end,
                                   Thread thread) {
#pragma unroll
  for (i32 n = first / 8; n < end / 8; ++n) {
    const float* const four = strip + 4 * n;
    reinterpret_cast<Vec16*>(part)[(n - first / 8) * kWarpSize + thread.lane] =
        Vec16{{bits_of(four[0]), bits_of(four[1]), bits_of(four[2]), bits_of(four[3])}};
  }
}
// Writes all columns.
template <i32 count>
FLASHGEN_DEVICE void write_fragments(float* part, const float (&strip)[count], Thread thread) {
  write_columns(part, strip, 0, 2 * count, thread);
}
template <i32 count>
FLASHGEN_DEVICE void read_fragments(float (&strip)[count], const float* part, Thread thread) {
#pragma unroll
  for (i32 n = 0; n < count / 4; ++n) {
    const Vec16 four = reinterpret_cast<const Vec16*>(part)[n * kWarpSize + thread.lane];
#pragma unroll
    for (i32 e = 0; e < 4; ++e) strip[4 * n + e] = float_of(four.words[e]);
  }
}
// Adds a strip to the fragments of one before it.
template <i32 count>
FLASHGEN_DEVICE void add_fragments(float* part, float (&strip)[count], Thread thread) {
  float before[count];
  read_fragments(before, part, thread);
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] += before[i];
  write_fragments(part, strip, thread);
}

// ---- flashgen/decode/results.cuh
// From the results of warps, each with keys of its own, to those of a thread block.

// In shared memory: the totals of each warp's rows, and of the rows of the tile.
template <DecodeConfig cfg>
struct RowTotals {
  RowTotal of_warps[cfg.warps][kRowBlock];
  RowTotal of_rows[cfg.tile_q];
};

// The results of one item. All threads that compute call its functions.
template <DecodeConfig cfg, class T, class Params, class Score, class CacheElement>
struct DecodeResults {
  static constexpr i32 dim_v = CacheElement::dim_v;
  static constexpr i32 out_blocks = dim_v / 8;
  // With producers, the ring already fills for the next item, so results need a buffer of their own. To halve
  // it, the upper half of the warps add their O to that of the lower half.
  static constexpr i32 buffers = cfg.producers == 0 ? cfg.warps : cfg.warps / 2;
  static constexpr i32 bytes = buffers * kRowBlock * dim_v * static_cast<i32>(sizeof(float));
  using Output = Accumulator<1, out_blocks>;
  using Logits = typename Score::Logits;
  using Softmax = OnlineSoftmax<1, Logits>;
  using Rows = RowResults<cfg, T, Params, Score, CacheElement>;

  Rows rows;
  // `buffers` results of 16 rows, in the layout of a warp's lanes.
  float* out_buffers;
  RowTotal (&totals_of_warps)[cfg.warps][kRowBlock];
  // How many warps have different rows.
  i32 row_warps;

  // Brings the warps' results to common reference maxima, and puts them into shared memory.
  FLASHGEN_DEVICE void reduce_warps(Output& out, const Softmax& softmax) const {
    const Thread thread = rows.thread;
    RowTotal(&of_warps)[cfg.warps][kRowBlock] = totals_of_warps;
    // No warp needs the ring any more.
    consumers_sync<cfg>();
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      if (thread.column() == 0)
        of_warps[thread.warp][thread.row() + 8 * h] = {softmax.reference_max[0][h], softmax.sum[0][h]};
    }
    consumers_sync<cfg>();
    const Logits logits = Score::logits(rows.p);
    const i32 row_block = thread.warp % row_warps;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = thread.row() + 8 * h;
      float row_max = -kInfinity, total = 0.0f;
      for (i32 w = row_block; w < cfg.warps; w += row_warps)
        row_max = maximum(row_max, of_warps[w][row].reference_max);
      for (i32 w = row_block; w < cfg.warps; w += row_warps)
        total += of_warps[w][row].sum * weight_of_part(logits, of_warps[w][row].reference_max, row_max);
      const float factor = weight_of_part(logits, softmax.reference_max[0][h], row_max);
#pragma unroll
      for (i32 n = 0; n < out_blocks; ++n) {
        out[0][n][2 * h] *= factor;
        out[0][n][2 * h + 1] *= factor;
      }
      if (thread.warp < row_warps && thread.column() == 0)
        rows.totals[row_block * kRowBlock + row] = {row_max, total};
    }
    float flat[4 * out_blocks];
#pragma unroll
    for (i32 i = 0; i < 4 * out_blocks; ++i) flat[i] = out[0][i / 4][i % 4];
    if constexpr (buffers < cfg.warps) {
      const bool has_rows = row_block < rows.item.row_blocks();
      if (has_rows && thread.warp >= buffers)
        write_fragments(out_buffer(thread.warp - buffers), flat, thread);
      consumers_sync<cfg>();
      if (has_rows && thread.warp < buffers) add_fragments(out_buffer(thread.warp), flat, thread);
    } else {
      write_fragments(out_buffer(thread.warp), flat, thread);
    }
    consumers_sync<cfg>();
  }

  // Stores a part's results in the workspace.
  FLASHGEN_DEVICE void store_part(i32 index) const {
    const auto partials = Partials<out_blocks>::of(rows.p);
    rows.store_totals(partials, index);
    for_each_result([&](i32 row, i32 n, const FloatPair& pair) {
      *reinterpret_cast<FloatPair*>(partials.pair(index, n, row, rows.thread.column())) = pair;
    });
  }

  // Writes O and L of the whole item.
  FLASHGEN_DEVICE void store_whole() const {
    for_each_result([&](i32 row, i32 n, const FloatPair& pair) {
      rows.store_pair(rows.output_row(row, n, rows.with_sink(row, rows.totals[row])), n, pair);
    });
  }

  FLASHGEN_DEVICE void merge(const PartialIndices& indices) const { rows.merge(indices); }

 private:
  FLASHGEN_DEVICE float* out_buffer(i32 buffer) const { return out_buffers + buffer * kRowBlock * dim_v; }

  // Calls visit(row, n, pair) for each pair of neighboring results: row of the tile, and block of eight
  // columns. Each warp takes blocks of its own, and adds up the buffers.
  template <class Visit>
  FLASHGEN_DEVICE void for_each_result(const Visit& visit) const {
    const DecodeItem& item = rows.item;
    const Thread thread = rows.thread;
#pragma unroll 1
    for (i32 i = thread.warp; i < item.row_blocks() * out_blocks; i += cfg.warps) {
      const i32 row_block = i / out_blocks, n = i - row_block * out_blocks;
      float sums[4] = {};
      for (i32 buffer = row_block; buffer < buffers; buffer += row_warps) {
        float own[4];
        read_fragments(own, out_buffer(buffer) + n * 4 * kWarpSize, thread);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) sums[e] += own[e];
      }
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i32 row = row_block * kRowBlock + thread.row() + 8 * h;
        if (row < item.rows) visit(row, n, FloatPair{{sums[2 * h], sums[2 * h + 1]}});
      }
    }
  }
};

// ---- flashgen/decode/scheduler.cuh
// Which tiles of keys a thread block works on. The host fixes only the number of thread blocks. On the device
// each thread block counts the work of all sequences from their real lengths, and takes an equal share of it:
// a run of consecutive units, of one item after another. So ragged batches balance, and a graph can be
// replayed with other lengths.
//
// A unit is a tile of keys, or, with `part_tiles`, that many. Then an item is always cut at the same keys,
// whatever else is in the batch, and its result has the same bits.
//
// Units are ordered by key/value head, then by sequence, so one thread block does not get all heads of a
// short sequence. Each item also has a fixed cost: loading Q, and storing or merging results. It counts as
// `item_tiles` extra units.
//
// Units are shared out to teams of thread blocks (team.cuh). The thread blocks of a team have the same units,
// for other tiles of rows. "Thread block" below is a team where there are any.

// Extra units that stand for an item's fixed cost.
template <DecodeConfig cfg, class Params>
FLASHGEN_DEVICE i32 extra_units(const Params& p) { return p.part_tiles == 0 ? cfg.item_tiles : 0; }

// How many units a thread block gets at least, where an item has `rows` rows and `tiles` tiles of keys. Parts
// of n tiles take n to compute side by side, and tiles / n parts are merged one after another. The sum is
// least where both take equally long. If an item cut so takes no less than a whole one, it stays whole.
template <DecodeConfig cfg>
FLASHGEN_DEVICE i32 min_units(i32 tiles, i32 rows) {
  const i32 row_groups = ceil_div(rows, kMergedRows);
  i32 part = 1;
  while (part * part * cfg.merged_parts < tiles * row_groups) ++part;
  const i32 merge = tiles * row_groups / (part * cfg.merged_parts);
  return part + merge + cfg.item_tiles < tiles ? part : larger(tiles, 1) + cfg.item_tiles;
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
    const i32 first_row = Team::of(p).strided(row_tile) * cfg.tile_q;
    return {cached, sequence, head_kv, first_row, smaller(cfg.tile_q, cached.len_q * p.group - first_row),
            tiles};
  }
};

// How the units of all items are shared out.
struct alignas(16) WorkPartition {
  i64 units;
  i64 blocks;

  FLASHGEN_DEVICE i32 begin(i32 block) const {
    return static_cast<i32>(smaller_of(block, blocks) * units / blocks);
  }
  // The thread block that owns a unit.
  FLASHGEN_DEVICE i32 owner(i32 unit) const {
    return static_cast<i32>(((unit + i64{1}) * blocks - 1) / units);
  }

 private:
  FLASHGEN_DEVICE static i64 smaller_of(i64 a, i64 b) { return a < b ? a : b; }
};

// What a thread block computes next: the units from `begin` to `end` of an item. Among those of all items,
// the item's first unit is number `first_unit`.
struct alignas(16) Assignment {
  bool exists;
  DecodeItem item;
  i32 units;
  i32 begin;
  i32 end;
  i32 first_unit;
};

// Where a thread block is in its work. `at` and `end` are numbers of units of all items. The other fields
// name the same place: `unit` counts those of one head of one sequence.
struct WorkCursor {
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
      // Only extra units of this item are left, so the next thread block starts the item.
      if (begin + count <= extra) continue;
      next = {true,
              work.item<cfg>(p, sequence, head_kv, row_tile),
              work.units,
              larger(begin - extra, 0),
              begin + count - extra,
              first_unit};
      // The last tiles of rows may be fewer than the thread blocks of a team.
      if constexpr (requires { p.team; }) {
        if (next.item.rows <= 0) continue;
      }
      return;
    }
    next.exists = false;
  }
};

// The scheduler of a thread block. It lives in shared memory, because no registers are left for it, and one
// thread runs it.
template <DecodeConfig cfg, class Mask>
struct DecodeScheduler {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  i32 warp_units[cfg.warps];
  WorkPartition work;
  // The first is for the warps that compute. Each producer has its own, because it may be at a later item.
  WorkCursor cursors[1 + cfg.producers];
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
    const i32 rows = p.len_q * p.group, row_tiles = Team::rounds(p, ceil_div(rows, cfg.tile_q));
    const i32 tiles = all / (p.batch * p.heads_kv * row_tiles) - cfg.item_tiles;
    const i32 block_units = p.part_tiles == 0 ? min_units<cfg>(tiles, smaller(rows, cfg.tile_q)) : 1;
    const Team team = Team::of(p);
    const WorkPartition partition = {larger(all, 1), larger(1, smaller(all / block_units, team.count()))};
    const i32 begin = partition.begin(team.index());
    const i32 head_kv = begin / larger(of_head, 1), begin_of_head = begin - head_kv * of_head;
    if (thread.index() == 0) {
      work = partition;
      for (WorkCursor& cursor : cursors) {
        cursor.at = begin;
        cursor.end = smaller(all, partition.begin(team.index() + 1));
      }
    }
    if (before <= begin_of_head && begin_of_head < before + own) {
      // The thread block's work begins among this thread's sequences.
      for (WorkCursor& cursor : cursors) {
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

// ---- flashgen/decode/assignment.cuh
// What a thread block computes of an item: its parts one after another, and the merge of all parts by the
// last thread block.

// Which thread blocks compute an item, and where its parts go. The loop over keys leaves no registers for it,
// so it is found after that loop.
struct ItemParts {
  PartialIndices indices;
  Team team;
  i32 first_block;
  // How many thread blocks share the item.
  i32 blocks;

  template <class Params>
  FLASHGEN_DEVICE static ItemParts of(const Params& p, const Assignment& assigned,
                                      const WorkPartition& work) {
    const Team team = Team::of(p);
    const i32 first_block = work.owner(assigned.first_unit);
    const i32 blocks = work.owner(assigned.first_unit + assigned.units - 1) - first_block + 1;
    return {p.part_tiles != 0 ? PartialIndices::fixed(team, assigned.first_unit, assigned.units)
                              : PartialIndices::of_blocks(team, first_block, blocks),
            team, first_block, blocks};
  }
};

// Calls visit(part, tiles) for the parts of an assignment: those of fixed size one by one
// (batch_invariant, num_splits), or all tiles at once.
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
FLASHGEN_DEVICE void compute_parts(const Params& p, const Assignment& assigned, const WorkPartition& work,
                                   u32& is_last, Thread thread, const Results& results,
                                   const Attend& attend) {
  ItemParts parts;
  for_each_part(p, assigned, [&](i32 unit, Range tiles) {
    attend(tiles);
    parts = ItemParts::of(p, assigned, work);
    if (parts.indices.count == 1) {
      results.store_whole();
    } else {
      results.store_part(parts.indices(p.part_tiles != 0 ? unit : parts.team.index() - parts.first_block));
    }
    // The next copies overwrite these results, where results take the place of the ring. A thread block
    // arrives once all its threads have stored theirs.
    consumers_sync<cfg>();
  });
  if (parts.indices.count == 1) return;
  u32* const counter = p.counter + parts.team.strided(parts.first_block);
  if (parts.blocks == 1 || arrives_last<cfg>(counter, static_cast<u32>(parts.blocks), is_last, thread))
    results.merge(parts.indices);
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

  // The queries of an item's rows.
  FLASHGEN_DEVICE Range queries_of(const DecodeItem& item) const {
    return {RowPlace::of(p, item, 0).q, RowPlace::of(p, item, item.rows - 1).q + 1};
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

// ---- flashgen/decode/mainloop.cuh
// Attention of few new tokens to a cache: O = softmax(Q K^T) V. Reading K and V takes most of the time, so
// each is read once for all query heads that share it.
//
// An item is a tile of query rows of one key/value head of one sequence (rows.cuh). The warps of a thread
// block split the keys of a tile between them. If the rows fill more than one block of 16, the warps split
// the rows, too: `row_warps` of them take different rows of the same keys. Each warp copies its own slice of
// every tile through a ring of stages. So if no warp reads another's keys (row_warps == 1), the loop has no
// barrier.
//
//     wait for the slice     copies of a later slice start     S = Q K^T, softmax, O += P V
//
// Page numbers come by the same way: their copies start `lead` steps before those of their keys.
//
// At the end of an item the thread block merges its warps' results through shared memory. Thread blocks that
// share an item write their parts to a workspace, and the last of them to finish merges these.
//
// Policies: Mask says which keys a row may attend to, Score (scores.cuh) how logits follow from products,
// CacheElement (cache_element.cuh) what the cache holds, `paged` where keys lie. Smem holds the offsets in
// shared memory, which the plan computes.

template <DecodeConfig cfg, class T, class Params, class Smem, class Mask, class Score, bool paged,
          class CacheElement>
struct DecodeMainloop {
  static constexpr i32 slice_keys = cfg.slice_keys();
  static_assert(cfg.tile_q == kRowBlock * cfg.warps && cfg.tile_kv == slice_keys * cfg.warps,
                "each warp has 16 rows and a slice of a tile");
  static constexpr i32 score_blocks = slice_keys / 8;
  // Steps of 16 keys in P V.
  static constexpr i32 value_steps = slice_keys / 16;

  using Operand = typename CacheElement::Operand;
  using KSlice = typename CacheElement::KSlice;
  using VSlice = typename CacheElement::VSlice;
  using Keys = typename CacheElement::Keys;
  using Values = typename CacheElement::Values;
  using Queries = typename CacheElement::Queries;
  // A warp copies its slice 16 keys at a time, so that registers hold the addresses. Where rows have 128
  // bytes or more, eight lanes copy a line of them.
  static constexpr i32 copied_keys = 16;
  using Share = LaneShare<copied_keys, smaller(KSlice::chunks, VSlice::chunks) < 8 ? 4 : 8>;
  using Scores = Accumulator<1, score_blocks>;
  using Output = Accumulator<1, CacheElement::dim_v / 8>;
  using Logits = typename Score::Logits;
  using Softmax = OnlineSoftmax<1, Logits>;
  using Results = DecodeResults<cfg, T, Params, Score, CacheElement>;

  // ---- Shared memory

  // Locations until the loop over keys is over, then totals.
  union Exchanged {
    KeyLocation<true> locations[paged ? cfg.stages * cfg.warps : 1][slice_keys];
    RowTotals<cfg> totals;
  };
  struct Shared {
    DecodeScheduler<cfg, Mask> scheduler;
    u32 is_last;
    Exchanged exchanged;
  };
  static_assert(Smem::kMerge + Results::bytes <= Smem::kShared, "results take the place of the ring");

  const Params& p;
  u8* base;
  Thread thread;

  FLASHGEN_DEVICE Shared& shared() const { return *reinterpret_cast<Shared*>(base + Smem::kShared); }
  FLASHGEN_DEVICE KSlice k_slice(i32 stage, i32 slice) const {
    return KSlice{base + Smem::kK}.slot(stage * cfg.warps + slice);
  }
  FLASHGEN_DEVICE VSlice v_slice(i32 stage, i32 slice) const {
    return VSlice{base + Smem::kV}.slot(stage * cfg.warps + slice);
  }
  FLASHGEN_DEVICE RequestedLocations requested_locations(i32 stage, i32 slice) const {
    return {paged ? shared().exchanged.locations[stage * cfg.warps + slice] : nullptr};
  }

  // ---- How the warps share a tile

  // How many warps take different rows of the same keys: a power of two.
  FLASHGEN_DEVICE static i32 row_warps_of(const DecodeItem& item) {
    i32 warps = 1;
    while (warps < item.row_blocks()) warps *= 2;
    return warps;
  }

  // ---- The loop over tiles of keys

  // The copies of page numbers start so many steps before the copies of their keys.
  static constexpr i32 lead = paged ? cfg.stages - 1 : 0;

  FLASHGEN_DEVICE static i32 next_stage(i32 stage) { return stage + 1 < cfg.stages ? stage + 1 : 0; }
  FLASHGEN_DEVICE static i32 stage_before(i32 stage) { return (stage == 0 ? cfg.stages : stage) - 1; }

  // Computes O and the softmax of a warp's rows over its keys of some tiles.
  FLASHGEN_DEVICE void attend(Output& out, Softmax& softmax, const DecodeItem& item, Range tiles,
                              i32 row_warps) const {
    const i32 row_block = thread.warp & (row_warps - 1);
    // A shift in place of divisions by row_warps.
    i32 shift = 0;
    while (1 << shift < row_warps) ++shift;
    const LaneRows rows = LaneRows::of(p, item, row_block, thread);
    const auto masks = LaneMasks<Mask>::of(p, item, rows);
    const Logits logits = Score::logits(p);

    const auto queries = Queries::load(p, item, rows, base + Smem::kQ, row_block, thread);
    const CacheElement cache = CacheElement::of(p, item, base);
    const i64 row = paged ? 0 : item.cached.row;
    const SliceCopies<cfg.head_dim, cfg.access_bytes, KSlice, Share> keys(
        p.k + row * p.k_batch + item.head_kv * p.k_head, 0, thread);
    const SliceCopies<cfg.head_dim_v, cfg.access_bytes, VSlice, Share> values(
        p.v + row * p.v_batch + item.head_kv * p.v_head, 0, thread);
    // No key outside this range is read: its page may belong to another sequence by now.
    const VisitedTiles<cfg, Mask, Params> visits{p};
    const Range existing = visits.existing_keys(item);
    const auto visited = visits.visited_by(item);
    Walk<Mask::has_holes> requests(tiles), ahead(tiles);
    const auto pages = SequencePages::of<paged>(p, item.cached);
    // Requests the locations of the keys of a tile.
    const auto request_next = [&](i32 stage, Thread thread) {
      if constexpr (paged) {
        requests.advance(thread, visited);
        if (!requests.over())
          requested_locations(stage, thread.warp)
              .template request<slice_keys>(pages, existing,
                                            requests.tile * cfg.tile_kv + thread.warp * slice_keys, thread);
      }
    };
    // Starts the copies of the next tile, and returns its number.
    const auto fetch_next = [&](i32 stage, Thread thread) {
      ahead.advance(thread, visited);
      if (!ahead.over()) {
        const i32 first_key = ahead.tile * cfg.tile_kv + thread.warp * slice_keys;
        const RequestedLocations requested = requested_locations(stage, thread.warp);
#pragma unroll
        for (i32 first = 0; first < slice_keys; first += copied_keys) {
          LaneLocations<paged, Share> own;
          if constexpr (paged) {
            own = LaneLocations<paged, Share>::of(RequestedLocations{requested.locations + first}, thread);
          } else {
            own = LaneLocations<paged, Share>::of(p, item.cached, existing, first_key + first, thread);
          }
          keys.start(k_slice(stage, thread.warp).from_row(first), p.k_batch, p.k_row, own);
          values.start(v_slice(stage, thread.warp).from_row(first), p.v_batch, p.v_row, own);
        }
        cache.fetch_scales(stage * cfg.warps + thread.warp, requested, thread);
      }
      return ahead.tile;
    };
    clear(out);
    softmax.reset();

    // The numbers of the tiles whose copies are in flight. The first steps only start copies.
    i32 in_flight[cfg.stages - 1] = {};
    i32 stage = 0, filled_stage = (cfg.stages - lead) % cfg.stages;
#pragma unroll 1
    for (i32 step = 1 - cfg.stages - lead; step < 0 || in_flight[0] < tiles.end; ++step) {
      const Thread here = thread.recomputed();
      const i32 first_key = in_flight[0] * cfg.tile_kv;
      // The oldest copies have arrived, and no warp still reads what the next ones overwrite.
      cp_async_wait<cfg.stages - 2>();
      if (row_warps == 1) {
        warp_sync();
      } else {
        block_sync();
      }
      if (step >= 1 - cfg.stages) {
#pragma unroll
        for (i32 i = 0; i + 2 < cfg.stages; ++i) in_flight[i] = in_flight[i + 1];
        in_flight[cfg.stages - 2] = fetch_next(filled_stage, here);
      }
      request_next(stage_before(filled_stage), here);
      cp_async_commit();
      filled_stage = next_stage(filled_stage);
      if (step < 0) continue;

#pragma unroll 1
      for (i32 slice = thread.warp >> shift; slice < cfg.warps; slice += cfg.warps >> shift) {
        const i32 key = first_key + slice * slice_keys;
        const bool is_cut = warp_any(!masks.is_full(key, key + slice_keys));
        if (is_cut && !warp_any(!masks.is_empty(key, key + slice_keys))) continue;
        Scores scores;
        clear(scores);
        multiply<Operand, false, CacheElement::dim / 16>(scores, queries.left(here),
                                                         Keys(k_slice(stage, slice), 0, here));
        const auto scales = cache.slice_scales(stage * cfg.warps + slice, here);
        scales.apply_qk_scales(scores, queries);
        Score::apply(scores, p, item, rows, key, thread);
        scales.add_log_v_scales(scores);
        if (is_cut) {
          for_each_score(scores, [&](float& s, i32 h, i32 column) {
            if (!masks.allows(h, key + thread.column() + column)) s = -kInfinity;
          });
        }
        softmax.update(scores, out, logits, scales);
        const VSlice v = v_slice(stage, slice);
        // Values beyond the sequence arrive as zeros, so only a mask can forbid some that are not finite.
        if (Mask::is_bounded && is_cut && slice_holds_non_finite(v, thread)) {
          Scores allowed;
          clear(allowed);
          for_each_score(allowed, [&](float& a, i32 h, i32 column) {
            a = masks.allows(h, key + thread.column() + column) ? 1.0f : 0.0f;
          });
          multiply_careful<Operand>(out, scores, allowed, thread,
                                    [&](i32 step) { return Values(v.from_row(16 * step), 0, thread); });
        } else {
          multiply<Operand, false, value_steps>(out, LeftRegisters<Operand, 1, score_blocks>(scores, thread),
                                                Values(v, 0, here));
        }
      }
      stage = next_stage(stage);
    }
    softmax.finish();
    cache.scale_and_reorder(out);
    cp_async_wait<0>();
  }

  // ---- What the thread block computes of an item

  FLASHGEN_DEVICE void compute(const Assignment& assigned, const WorkPartition& work) const {
    const DecodeItem& item = assigned.item;
    const i32 row_warps = row_warps_of(item);
    const Results results{{p, item, shared().exchanged.totals.of_rows, thread},
                          reinterpret_cast<float*>(base + Smem::kMerge),
                          shared().exchanged.totals.of_warps,
                          row_warps};
    compute_parts<cfg>(p, assigned, work, shared().is_last, thread, results, [&](Range tiles) {
      Output out;
      Softmax softmax;
      attend(out, softmax, item, tiles, row_warps);
      results.reduce_warps(out, softmax);
    });
  }

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Thread thread = Thread::current();
    const DecodeMainloop self{p, base, thread};
    DecodeScheduler<cfg, Mask>& scheduler = self.shared().scheduler;
    scheduler.init(p, thread);
#pragma unroll 1
    while (scheduler.next(p, thread).exists) self.compute(scheduler.assignments[0], scheduler.work);
  }
};

}  // namespace flashgen

// ---- kernels/decode/forward.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr DecodeConfig kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
    .tile_q = 64,   // rows of a tile: new tokens times query heads that share a key/value head
    .tile_kv = 64,  // keys of a tile
    .stages = 3,
    .warps = 4,
    .producers = 0,  // warps that only copy
    .producer_registers = 0,
    .consumer_registers = 0,
    .holds_queries = true,    // each warp keeps its rows of Q in registers
    .merged_parts = 43,       // parts of eight rows that a block merges in the time of a tile
    .item_tiles = 3,          // fixed cost of an item, in tiles
    .has_lower = false,       // the band has a lower bound on k - q
    .has_upper = true,        // the band has an upper bound on k - q
    .varies_by_head = false,  // which tiles hold allowed pairs depends on the head
    .access_bytes = 16,       // alignment of rows in global memory
};

struct Params {
  const element_t* q;
  const element_t* k;
  const element_t* v;
  element_t* o;
  float* lse;                  // log-sum-exp, (batch, heads_q, len_q)
  float* o_partial;            // O of each split of the keys, (splits, batch, heads_q, len_q, head_dim_v)
  float* row_partial;          // of each row of a part: the reference maximum, and the sum of exponentials
  u32* counter;                // tiles drawn, then blocks done; 0 between launches
  const i32* cache_seqlens;    // keys of each sequence, without appended ones; null: the capacity
  const i32* cache_batch_idx;  // row of the cache of each sequence; null: the sequence's index
  const i32* cache_leftpad;    // first keys of each sequence to skip; null: none
  const i32* block_table;      // the pages of each sequence; entries beyond its length are ignored
  const i32* cu_seqlens_q;     // first query of each packed sequence; null: queries are a batch
  const i32* cu_seqlens_k;  // prefix sums of the sequences' keys, in place of cache_seqlens; null: use that
  i64 q_batch, q_row, q_head;  // strides are in elements
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 o_batch, o_row, o_head;
  i64 table_row;            // stride between rows of the table
  i64 lse_batch, lse_head;  // strides between sequences and heads; the first is 0 if queries are packed
  i64 lse_rows;             // stride between splits
  i32 heads_q, heads_kv;
  i32 len_q;
  i32 len_kv;                  // capacity in keys of each sequence
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // relative to the diagonal through the last query and the last key
  i32 part_tiles;              // tiles of keys of a part; 0: blocks share all tiles equally
  i32 partial_rows;            // rows of a part in o_partial
  i32 page_size;               // keys per page
  i32 batch;                   // sequences
  i32 appended;                // keys of each sequence after those in cache_seqlens
  i32 corner_lower;  // the band of terms aligned top-left; band_... is for those aligned bottom-right
  i32 corner_upper;
  float scale;
  float scale_log2;  // scale * log2(e)
};
static_assert(sizeof(Params) == 304, "the launcher packs Params into 304 bytes");

struct Smem {
  static constexpr u32 kQ = 0;           // Q, a copy of its rows for each warp
  static constexpr u32 kK = 0;           // K_j, 3 stages of 16 keys for each warp
  static constexpr u32 kV = 24576;       // V_j, 3 stages of 16 keys for each warp
  static constexpr u32 kShared = 49152;  // what the threads exchange
  static constexpr u32 kMerge = 0;       // O of each warp, once the loop is over
};

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using Scoring = NoRowScore;
using CacheElement = SameElement<kConfig, element_t>;

FLASHGEN_KERNEL(128, 3) decode_d64_causal_pages_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  DecodeMainloop<kConfig, bfloat16_t, Params, Smem, Mask, Scoring, true, CacheElement>::run(p, base);
}
