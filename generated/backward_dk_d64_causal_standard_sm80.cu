// backward_dk_d64_causal_standard_sm80: standard attention, backward pass: dK = scale * dS^T Q.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --algorithm standard --arch sm_80
// for      sm_80 (A100)
// plan     tile_q 32, tile_kv 128, stages 4, warps 8, 256 threads, registers for 2 blocks per multiprocessor
// grid     one block for every 128 key rows of every key/value head and batch entry
// smem     49152 bytes
//
// contents  23  Instructions, one per function: types, device, copy, math, matrix.
//          168  Element types.
//          226  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//          294  Operands of warp-level matrix products.
//          381  Warp-level matrix products.
//          452  Streaming tiles between global and shared memory.
//          564  What the backward kernels are made of.
//          588  The matrix products of standard attention, C = A B^T, A B or A^T B.
//          777  The kernel: its configuration, parameters and text.

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

template <class T, i32 access_bytes>
FLASHGEN_DEVICE void write_chunk(T* destination, const Vec16& chunk, i32 valid) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  if constexpr (access_bytes == 16) {
    if (valid > 0) *reinterpret_cast<Vec16*>(destination) = chunk;
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) destination[i] = float_of(chunk.words[i]);
    }
  } else {
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) destination[i].bits = static_cast<u16>(chunk.words[i / 2] >> (16 * (i % 2)));
    }
  }
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

// ---- flashgen/backward.cuh
// What the backward kernels are made of.

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

// ---- flashgen/lineage/product.cuh
// The matrix products of standard attention, C = A B^T, A B or A^T B: a block computes one tile of C and
// brings tiles of A and B to shared memory in a ring of stages.

struct StandardConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 depth;
  i32 stages;
  i32 warps;
  bool has_lower;
  bool has_upper;
  i32 row_access_bytes;
  bool row_async_copy;
  bool turing;
};

// Rows of S, P and dS are padded to whole 16-byte chunks.
constexpr i32 kScoreAccessBytes = kChunkBytes;

// A matrix in device memory.
template <class T>
struct Matrix {
  T* data;
  i64 stride;
  i32 row_count;
  i32 column_count;

  FLASHGEN_DEVICE T* at(i32 row, i32 column) const { return data + row * stride + column; }
};

// The rows of S, P or dS that belong to a head.
template <class T, class Params>
FLASHGEN_DEVICE Matrix<T> scores_of(T* data, const Params& p, i32 sequence, i32 head) {
  const i64 first_row = (static_cast<i64>(sequence) * p.heads_q + head) * p.len_q;
  return {data + first_row * p.score_pitch, p.score_pitch, p.len_q, p.score_pitch};
}

// The dimension of an operand that the product sums over.
enum class Summed { rows, columns };

// An operand in device memory, from which tile after tile along the summed dimension goes to shared memory.
// Elements beyond the matrix arrive as zeros. Where rows are summed, `to_next` elements further on lies the
// matrix whose rows come after the last one.
template <class Tile, Summed summed, i32 threads, i32 access_bytes, bool asynchronous_>
struct Operand {
  using T = typename Tile::Element;
  static constexpr bool asynchronous = asynchronous_;
  static constexpr i32 count = Tile::rows * Tile::chunks;
  static constexpr i32 per_thread = ceil_div(count, threads);

  Matrix<const T> matrix;
  i32 row, column;
  i64 to_next;
  Vec16 staged[asynchronous ? 1 : per_thread];

  FLASHGEN_DEVICE Operand(Matrix<const T> matrix_, i32 row_, i32 column_, i64 to_next_ = 0)
      : matrix(matrix_), row(row_), column(column_), to_next(to_next_) {}

  // Starts the next tile's way into `tile`.
  FLASHGEN_DEVICE void fetch(Tile tile, Thread thread) {
#pragma unroll
    for (i32 i = 0; i < per_thread; ++i) {
      const i32 index = thread.index() + i * threads;
      if (count % threads != 0 && index >= count) break;
      const i32 r = index / Tile::chunks, chunk = index % Tile::chunks;
      const i32 first_column = column + chunk * Tile::chunk_elements;
      const i32 valid = row + r < matrix.row_count ? matrix.column_count - first_column : 0;
      const T* const from = matrix.at(row + r, first_column);
      if constexpr (asynchronous) {
        copy_chunk_async<T, access_bytes>(shared_address(tile.chunk_at(r, chunk)), from, valid);
      } else {
        staged[i] = read_chunk<T, access_bytes>(from, valid);
      }
    }
    if constexpr (summed == Summed::columns) {
      column += Tile::cols;
    } else {
      row += Tile::rows;
      if (row >= matrix.row_count) {
        row = 0;
        matrix.data += to_next;
      }
    }
  }

  // Without asynchronous copies the tile waits in registers until here.
  FLASHGEN_DEVICE void land(Tile tile, Thread thread) const {
    if constexpr (!asynchronous) {
#pragma unroll
      for (i32 i = 0; i < per_thread; ++i) {
        const i32 index = thread.index() + i * threads;
        if (count % threads == 0 || index < count)
          tile.vector_at(index / Tile::chunks, index % Tile::chunks) = staged[i];
      }
    }
  }
};

// What a product does with tiles that have arrived before it multiplies them: by default nothing.
struct AsTheyAre {
  template <class A, class B>
  FLASHGEN_DEVICE void operator()(A, B, i32) const {}
};

// A product whose blocks compute rows x columns elements of C, `depth` terms of each sum at a time.
template <class T, i32 rows, i32 columns, i32 depth, Summed left, Summed right, i32 warps, i32 stages,
          bool turing>
struct Product {
  static constexpr i32 threads = warps * kWarpSize;
  static constexpr i32 steps_of_tile = depth / kStepDepth<T>;
  using ATile = SharedTile<T, left == Summed::columns ? rows : depth, left == Summed::columns ? depth : rows>;
  using BTile =
      SharedTile<T, right == Summed::columns ? columns : depth, right == Summed::columns ? depth : columns>;
  template <i32 access_bytes, bool asynchronous>
  using A = Operand<ATile, left, threads, access_bytes, asynchronous>;
  template <i32 access_bytes, bool asynchronous>
  using B = Operand<BTile, right, threads, access_bytes, asynchronous>;
  // Two warps side by side, the others below them.
  using Share = WarpShare<rows, columns, warps, warps / 2>;
  using Sums = typename Share::Product;
  static constexpr i32 bytes = stages * (ATile::bytes + BTile::bytes);

  // sums += the products of `tiles` tiles of each operand; `shared` has room for the ring.
  template <class Left, class Right, class Prepare = AsTheyAre>
  FLASHGEN_DEVICE static void add(Sums& sums, Left& a, Right& b, i32 tiles, u8* shared, Thread thread,
                                  const Prepare& prepare = {}) {
    constexpr bool asynchronous = Left::asynchronous || Right::asynchronous;
    const ATile a_ring{shared};
    const BTile b_ring{shared + stages * ATile::bytes};
#pragma unroll
    for (i32 tile = 0; tile < stages - 1; ++tile) {
      if (tile < tiles) {
        a.fetch(a_ring.slot(tile), thread);
        b.fetch(b_ring.slot(tile), thread);
        a.land(a_ring.slot(tile), thread);
        b.land(b_ring.slot(tile), thread);
      }
      commit_copies<asynchronous>();
    }
#pragma unroll 1
    for (i32 tile = 0; tile < tiles; ++tile) {
      // This tile has arrived, and no warp reads the slot any more that the next copies overwrite.
      wait_for_copies<asynchronous, stages - 2>();
      block_sync();
      const Thread here = kIsFloat<T> ? thread.recomputed() : thread;
      const i32 slot = tile % stages, next = (tile + stages - 1) % stages;
      const bool has_next = tile + stages - 1 < tiles;
      if (has_next) {
        a.fetch(a_ring.slot(next), here);
        b.fetch(b_ring.slot(next), here);
      }
      commit_copies<asynchronous>();
      const ATile a_tile = a_ring.slot(slot);
      const BTile b_tile = b_ring.slot(slot);
      prepare(a_tile, b_tile, tile);
      multiply_tile(sums, a_tile, b_tile, here);
      if (has_next) {
        a.land(a_ring.slot(next), here);
        b.land(b_ring.slot(next), here);
      }
    }
    // Every warp is done with the ring: its memory may have another use.
    block_sync();
  }

 private:
  FLASHGEN_DEVICE static void multiply_tile(Sums& sums, ATile a, BTile b, Thread thread) {
    const i32 row = Share::row(thread.warp), column = Share::column(thread.warp);
    if constexpr (left == Summed::rows) {
      multiply_by(sums, LeftColumns(a, row, thread), b, column, thread);
    } else {
      multiply_by(sums, LeftRows(a, row, thread), b, column, thread);
    }
  }
  template <class Left>
  FLASHGEN_DEVICE static void multiply_by(Sums& sums, const Left& a, BTile b, i32 column, Thread thread) {
    if constexpr (right == Summed::rows) {
      multiply<T, turing, steps_of_tile>(sums, a, RightRows<BTile, Share::aligned>(b, column, thread));
    } else {
      multiply<T, turing, steps_of_tile>(sums, a, RightTransposed(b, column, thread));
    }
  }
};

}  // namespace flashgen

// ---- kernels/lineage/standard_columns.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr StandardConfig kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
    .tile_q = 32,  // summed over at once
    .tile_kv = 128,
    .stages = 4,  // tiles of each operand in shared memory
    .warps = 8,
    .has_lower = false,      // the mask ends on the left
    .has_upper = true,       // the mask ends on the right
    .row_access_bytes = 16,  // alignment of rows of Q, K, V, O
    .row_async_copy = true,
    .turing = false,  // half-depth tensor-core steps
};

struct Params {
  const element_t* q;
  element_t* dk;
  const element_t* dscores;    // dS, of the shape of S
  i64 q_batch, q_row, q_head;  // strides are in elements
  i64 dk_batch, dk_row, dk_head;
  i32 heads_q;
  i32 len_q, len_kv;
  i32 score_pitch;  // elements from one row of S, P or dS to the next, a multiple of 8
  i32 group;        // query heads per key/value head
  float scale;
};
static_assert(sizeof(Params) == 96, "the launcher packs Params into 96 bytes");

namespace smem {
constexpr u32 kRing = 0;  // tiles of both operands, then results

}  // namespace smem

// dK = dS^T Q: a tile of the left operand is tile_q x tile_kv, and queries are summed over.
constexpr i32 kDim = round_up(kConfig.head_dim, 16);
using ColumnProduct = Product<element_t, kConfig.tile_kv, kDim, kConfig.tile_q, Summed::rows, Summed::rows,
                              kConfig.warps, kConfig.stages, kConfig.turing>;
using Left = ColumnProduct::A<kScoreAccessBytes, !kConfig.turing>;
using Right = ColumnProduct::B<kConfig.row_access_bytes, kConfig.row_async_copy>;
using OutTile = SharedTile<element_t, kConfig.tile_kv, kDim>;

FLASHGEN_KERNEL(256, 2) backward_dk_d64_causal_standard_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Thread thread = Thread::current();

  // This block computes dK of one tile of keys, over the queries of all heads that share them, in order.
  const Place place = Place::current();
  const i32 first_key = place.tile * kConfig.tile_kv, first_head = place.head * p.group;
  const Matrix<const element_t> of_first_head = scores_of(p.dscores, p, place.sequence, first_head);
  Left a(of_first_head, 0, first_key, static_cast<i64>(p.len_q) * of_first_head.stride);
  Right b({p.q + place.sequence * p.q_batch + first_head * p.q_head, p.q_row, p.len_q, kConfig.head_dim}, 0, 0, p.q_head);
  const i32 tiles_of_head = ceil_div(p.len_q, kConfig.tile_q);

  ColumnProduct::Sums sums;
  clear(sums);
  ColumnProduct::add(sums, a, b, p.group * tiles_of_head, shared + smem::kRing, thread);

  using Share = ColumnProduct::Share;
  const OutTile out{shared + smem::kRing};
  store_accumulator(out, Share::row(thread.warp), Share::column(thread.warp), sums, thread, [&](i32, i32) { return p.scale; });
  block_sync();
  store_rows<OutTile, ColumnProduct::threads, kConfig.head_dim, kConfig.row_access_bytes>(
      out, {p.dk + place.sequence * p.dk_batch + place.head * p.dk_head, p.dk_row, p.len_kv}, first_key, thread);
}
