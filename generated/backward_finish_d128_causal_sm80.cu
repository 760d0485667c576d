// backward_finish_d128_causal_sm80: FlashAttention-2, backward pass, last: dQ from the workspace.
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 128 --dtype bf16 --causal --arch sm_80
// for      sm_80 (A100)
// plan     tile_q 64, tile_kv 128, stages 2, warps 8, 256 threads
// grid     one block for every 64 query rows of every query head and batch entry
// smem     16384 bytes
//
// contents  20  Instructions, one per function: types, device, math.
//           76  Element types.
//          128  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//          167  Streaming tiles between global and shared memory.
//          222  What the backward kernels are made of.
//          288  The kernel: its configuration, parameters and text.

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
FLASHGEN_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// ---- flashgen/ptx/math.cuh
// Scalar arithmetic, one instruction each.

// Two floats rounded to 16 bits and packed, the first in the low half.
FLASHGEN_DEVICE u32 pack(bfloat16_t, float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

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
  // Its number when all tiles of all heads of all sequences are counted through.
  FLASHGEN_DEVICE i64 number(i32 tiles, i32 heads) const {
    return (static_cast<i64>(sequence) * heads + head) * tiles + tile;
  }
};

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
  using Product = Accumulator<row_blocks, column_blocks>;

  FLASHGEN_DEVICE static i32 row(i32 warp) { return warp / beside * warp_rows; }
  FLASHGEN_DEVICE static i32 column(i32 warp) { return warp % beside * warp_columns; }
};

template <BackwardConfig cfg, class T>
struct BackwardShape {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 dim = round_up(cfg.head_dim, 16);

  using QTile = SharedTile<T, cfg.tile_q, dim>;

  using DQShare = WarpShare<cfg.tile_q, dim, cfg.warps, cfg.dq_warps>;
};

template <bool vectors, class Share>
FLASHGEN_DEVICE void read_workspace(const float* tile, Thread thread, typename Share::Product& values) {
#pragma unroll
  for (i32 m = 0; m < Share::row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < Share::column_blocks; ++n) {
      const float* const block =
          tile + ((thread.warp * Share::row_blocks + m) * Share::column_blocks + n) * 128;
      if constexpr (vectors) {
        const Vec16 four = *reinterpret_cast<const Vec16*>(block + 4 * thread.lane);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) values[m][n][e] = float_of(four.words[e]);
      } else {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) values[m][n][e] = block[32 * e + thread.lane];
      }
    }
  }
}

}  // namespace flashgen

// ---- kernels/backward_finish.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr BackwardConfig kConfig{
    .head_dim = 128,
    .head_dim_v = 128,
    .tile_q = 64,    // B_r: query rows per step
    .tile_kv = 128,  // B_c: keys per block
    .stages = 2,     // slots for Q and dO
    .warps = 8,
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
  element_t* dq;
  const float* dq_accum;          // workspace that dQ is summed in
  i64 dq_batch, dq_row, dq_head;  // strides are in elements
  i32 heads_q;
  i32 len_q;
  float scale;
};
static_assert(sizeof(Params) == 56, "the launcher packs Params into 56 bytes");

namespace smem {
constexpr u32 kQ = 0;  // dQ_i

}  // namespace smem

using Shape = BackwardShape<kConfig, element_t>;
using Share = Shape::DQShare;

FLASHGEN_KERNEL(256, 1) backward_finish_d128_causal_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Thread thread = Thread::current();
  const Place place = Place::current();
  const i32 first_q = place.tile * kConfig.tile_q;

  // dQ_i = scale * (sum over the tiles of keys).
  Share::Product dq;
  const i32 warp = thread.warp;
  read_workspace<kConfig.vector_reduction, Share>(
      p.dq_accum + place.number(ceil_div(p.len_q, kConfig.tile_q), p.heads_q) * (kConfig.tile_q * Shape::dim), thread, dq);
  const Shape::QTile dq_tile{shared + smem::kQ};
  store_accumulator(dq_tile, Share::row(warp), Share::column(warp), dq, thread, [&](i32, i32) { return p.scale; });
  block_sync();
  store_rows<Shape::QTile, Shape::threads, kConfig.head_dim, kConfig.access_bytes>(
      dq_tile, {p.dq + place.sequence * p.dq_batch + place.head * p.dq_head, p.dq_row, p.len_q}, first_q, thread);
}
