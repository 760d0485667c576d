// forward_d64_causal_grid2d_sm80: 2-D grid, forward pass: O and the log-sum-exp of each row.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"forward","deterministic":false}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --forward-only --algorithm grid2d --arch sm_80
// for      sm_80 (A100)
// plan     tile_q 64, tile_kv 64, 256 threads, registers for 2 blocks per multiprocessor
// grid     one block for every tile of pairs of every head of every batch entry; all run at the same time
// smem     66560 bytes
// because  each thread computes 4 x 4 scores, and reads 8 numbers for 16 products
//
// contents  26  Instructions, one per function: types, device, math.
//           98  Element types.
//          130  Banded masks.
//          176  Single elements from floats.
//          188  What a softmax takes exponentials of.
//          201  The exponentials of a softmax that subtracts the maximum of each row.
//          218  Products of float tiles in shared memory, without tensor cores.
//          320  One block for each tile of scores.
//          467  Instructions, one per function: grid.
//          500  A barrier of all blocks of a grid that was launched cooperatively.
//          529  The kernel: its configuration, parameters and text.

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
FLASHGEN_DEVICE i32 grid_dim_x() { return static_cast<i32>(gridDim.x); }
FLASHGEN_DEVICE void block_sync() { __syncthreads(); }
FLASHGEN_DEVICE float shuffle_xor(float value, i32 lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
FLASHGEN_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

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

}  // namespace flashgen
#endif
// ---- flashgen/element.cuh
// Element types: conversions, and how deep one matrix instruction reaches.

namespace flashgen {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2 = 0x1.62e430p-1f;

constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }
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

FLASHGEN_DEVICE float to_float(bfloat16_t x) { return float_of(static_cast<u32>(x.bits) << 16); }
FLASHGEN_DEVICE float to_float(float x) { return x; }

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

// ---- flashgen/lineage/patch.cuh
// Products of float tiles in shared memory, without tensor cores: 256 threads stand in a square of 16 x 16,
// and each computes every 16th row and column of a tile.

constexpr i32 kSide = 16;

// Where a thread stands in the square. The 16 threads of a row are half a warp.
struct Square {
  i32 row, column;
  FLASHGEN_DEVICE static Square current() { return {thread_idx() / kSide, thread_idx() % kSide}; }
};

// rows x cols floats in shared memory. One column of padding keeps 16 rows of a column in different banks.
template <i32 rows_, i32 cols_>
struct FloatTile {
  static constexpr i32 rows = rows_;
  static constexpr i32 cols = cols_;
  static constexpr i32 stride = cols + 1;

  float* data;

  FLASHGEN_DEVICE float& at(i32 row, i32 col) const { return data[row * stride + col]; }

  // Copies rows of global memory, as floats. Rows that do not exist become zeros.
  template <class T>
  FLASHGEN_DEVICE void load(const T* source, i64 row_stride, i32 first_row, i32 row_count) const {
    for (i32 i = thread_idx(); i < rows * cols; i += kSide * kSide) {
      const i32 row = i / cols, col = i % cols;
      at(row, col) =
          first_row + row < row_count ? to_float(source[(first_row + row) * row_stride + col]) : 0.0f;
    }
  }
};

// A thread's share of a tile: element (i, j) lies in row 16i + its own and in column 16j + its own.
template <i32 rows, i32 cols>
using Patch = float[rows / kSide][ceil_div(cols, kSide)];

// S = scale * Q K^T, and minus infinity where the mask forbids a pair.
template <class QTile, class KTile, class Mask>
FLASHGEN_DEVICE void masked_scores(Patch<QTile::rows, KTile::rows>& scores, QTile queries, KTile keys,
                                   float scale, const Mask& mask, i32 first_q, i32 first_key) {
  const Square here = Square::current();
#pragma unroll
  for (i32 i = 0; i < QTile::rows / kSide; ++i) {
#pragma unroll
    for (i32 j = 0; j < KTile::rows / kSide; ++j) scores[i][j] = 0.0f;
  }
  for (i32 d = 0; d < QTile::cols; ++d) {
#pragma unroll
    for (i32 i = 0; i < QTile::rows / kSide; ++i) {
      const float q = queries.at(kSide * i + here.row, d);
#pragma unroll
      for (i32 j = 0; j < KTile::rows / kSide; ++j) {
        scores[i][j] = fused_multiply_add(q, keys.at(kSide * j + here.column, d), scores[i][j]);
      }
    }
  }
#pragma unroll
  for (i32 i = 0; i < QTile::rows / kSide; ++i) {
#pragma unroll
    for (i32 j = 0; j < KTile::rows / kSide; ++j) {
      const bool allowed = mask.allows(first_q + kSide * i + here.row, first_key + kSide * j + here.column);
      scores[i][j] = allowed ? scores[i][j] * scale : -kInfinity;
    }
  }
}

// O += P V. A forbidden pair adds nothing, even if V is NaN or infinite there.
template <class PTile, class VTile, class Mask>
FLASHGEN_DEVICE void add_products(Patch<PTile::rows, VTile::cols>& out, PTile probabilities, VTile values,
                                  const Mask& mask, i32 first_q, i32 first_key) {
  const Square here = Square::current();
  const i32 end_q = smaller(first_q + PTile::rows, mask.len_q);
  const bool is_full = mask.is_full(first_q, end_q, first_key, first_key + PTile::cols);
  for (i32 key = 0; key < PTile::cols; ++key) {
#pragma unroll
    for (i32 i = 0; i < PTile::rows / kSide; ++i) {
      const i32 row = kSide * i + here.row;
      if (!is_full && !mask.allows(first_q + row, first_key + key)) continue;
      const float p = probabilities.at(row, key);
#pragma unroll
      for (i32 j = 0; j < ceil_div(VTile::cols, kSide); ++j) {
        const i32 column = kSide * j + here.column;
        if (column < VTile::cols) out[i][j] = fused_multiply_add(p, values.at(key, column), out[i][j]);
      }
    }
  }
}

// The maximum and the sum of a row of the square, of which each of its 16 threads has one value.
FLASHGEN_DEVICE float row_maximum(float value) {
#pragma unroll
  for (i32 apart = kSide / 2; apart > 0; apart /= 2) value = maximum(value, shuffle_xor(value, apart));
  return value;
}
FLASHGEN_DEVICE float row_sum(float value) {
#pragma unroll
  for (i32 apart = kSide / 2; apart > 0; apart /= 2) value += shuffle_xor(value, apart);
  return value;
}

// ---- flashgen/lineage/grid2d.cuh
// One block for each tile of scores: what it computes between the barriers of the grid.

struct GridConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  bool has_lower;
  bool has_upper;
};

// The block of tile (i, j) of one head. What blocks tell each other lies in device memory: of each tile of
// keys and each row a maximum, a sum and a part of O.
template <GridConfig cfg, class T, class Params>
struct TileOfScores {
  using Mask = Band<cfg.has_lower, cfg.has_upper>;
  static constexpr i32 rows = cfg.tile_q / kSide;

  const Params& p;
  Mask mask;
  i32 i, j;
  i32 head, sequence;
  i32 first_q, first_key;
  // Which tiles of keys have a part in O_i.
  Range keys;
  Square here;

  // Without any keys one block is left, to write zeros.
  FLASHGEN_DEVICE static i32 blocks_of_a_row(const Params& p) {
    return larger(1, ceil_div(p.len_kv, cfg.tile_kv));
  }

  FLASHGEN_DEVICE static TileOfScores current(const Params& p) {
    const i32 kv_tiles = blocks_of_a_row(p);
    const Place place = Place::current();
    const Mask mask = Mask::of(p, place.sequence, place.head);
    const i32 i = place.tile / kv_tiles, j = place.tile % kv_tiles;
    const i32 first_q = i * cfg.tile_q, end_q = smaller(first_q + cfg.tile_q, p.len_q);
    const Range keys = mask.key_tiles(first_q, end_q, cfg.tile_kv);
    return {p, mask, i, j, place.head, place.sequence, first_q, j * cfg.tile_kv, keys, Square::current()};
  }

  FLASHGEN_DEVICE bool is_visited() const { return keys.has(j); }
  FLASHGEN_DEVICE i32 q(i32 row) const { return first_q + kSide * row + here.row; }
  // A query's place among those of all heads, and among the parts that tile `tile` of keys has written.
  FLASHGEN_DEVICE i64 number(i32 query) const {
    return (static_cast<i64>(sequence) * p.heads_q + head) * p.len_q + query;
  }
  FLASHGEN_DEVICE i64 part(i32 tile, i32 query) const {
    const i64 kv_tiles = ceil_div(p.len_kv, cfg.tile_kv);
    return ((static_cast<i64>(sequence) * p.heads_q + head) * kv_tiles + tile) * p.len_q + query;
  }

  // S_ij = scale * Q_i K_j^T.
  FLASHGEN_DEVICE void compute_scores(Patch<cfg.tile_q, cfg.tile_kv>& scores, u8* q_place,
                                      u8* k_place) const {
    const FloatTile<cfg.tile_q, cfg.head_dim> q_tile{reinterpret_cast<float*>(q_place)};
    const FloatTile<cfg.tile_kv, cfg.head_dim> k_tile{reinterpret_cast<float*>(k_place)};
    q_tile.load(p.q + sequence * p.q_batch + head * p.q_head, p.q_row, first_q, p.len_q);
    k_tile.load(p.k + sequence * p.k_batch + head / p.group * p.k_head, p.k_row, first_key, p.len_kv);
    block_sync();
    masked_scores(scores, q_tile, k_tile, p.scale, mask, first_q, first_key);
  }

  // rowmax(S_ij), for all blocks of the same rows.
  FLASHGEN_DEVICE void publish_maxima(const Patch<cfg.tile_q, cfg.tile_kv>& scores) const {
#pragma unroll
    for (i32 r = 0; r < rows; ++r) {
      float largest = -kInfinity;
#pragma unroll
      for (i32 c = 0; c < cfg.tile_kv / kSide; ++c) largest = maximum(largest, scores[r][c]);
      largest = row_maximum(largest);
      if (here.column == 0 && q(r) < p.len_q) p.tile_maxima[part(j, q(r))] = largest;
    }
  }

  // m_i: the maximum over all tiles of keys.
  FLASHGEN_DEVICE float global_maximum(i32 query) const {
    float largest = -kInfinity;
    for (i32 tile = keys.begin + here.column; tile < keys.end; tile += kSide) {
      if (query < p.len_q) largest = maximum(largest, p.tile_maxima[part(tile, query)]);
    }
    return row_maximum(largest);
  }

  // P_ij = exp(S_ij - m_i), rowsum(P_ij) and P_ij V_j, for the blocks that add them up.
  FLASHGEN_DEVICE void publish_products(const Patch<cfg.tile_q, cfg.tile_kv>& scores, u8* v_place,
                                        u8* p_place) const {
    const FloatTile<cfg.tile_kv, cfg.head_dim_v> v_tile{reinterpret_cast<float*>(v_place)};
    const FloatTile<cfg.tile_q, cfg.tile_kv> p_tile{reinterpret_cast<float*>(p_place)};
    v_tile.load(p.v + sequence * p.v_batch + head / p.group * p.v_head, p.v_row, first_key, p.len_kv);
#pragma unroll
    for (i32 r = 0; r < rows; ++r) {
      const float m = global_maximum(q(r));
      float sum = 0.0f;
#pragma unroll
      for (i32 c = 0; c < cfg.tile_kv / kSide; ++c) {
        const float probability = exponential(scores[r][c], shift_of(m));
        p_tile.at(kSide * r + here.row, kSide * c + here.column) = probability;
        sum += probability;
      }
      sum = row_sum(sum);
      if (here.column == 0 && q(r) < p.len_q) p.tile_sums[part(j, q(r))] = sum;
    }
    block_sync();
    Patch<cfg.tile_q, cfg.head_dim_v> out = {};
    add_products(out, p_tile, v_tile, mask, first_q, first_key);
#pragma unroll
    for (i32 r = 0; r < rows; ++r) {
      if (q(r) >= p.len_q) continue;
      float* const to = p.tile_outputs + part(j, q(r)) * cfg.head_dim_v;
#pragma unroll
      for (i32 c = 0; c < ceil_div(cfg.head_dim_v, kSide); ++c) {
        const i32 column = kSide * c + here.column;
        if (column < cfg.head_dim_v) to[column] = out[r][c];
      }
    }
  }

  // O_i = diag(l_i)^-1 sum_j P_ij V_j, L_i = m_i + log(l_i). The blocks of the same rows share them.
  FLASHGEN_DEVICE void add_up() const {
    // Every row takes the 16 threads of a row of the square; tile j of keys begins with row 16j.
    for (i32 row = j * kSide + here.row; row < cfg.tile_q; row += blocks_of_a_row(p) * kSide) {
      const i32 query = first_q + row;
      const float m = global_maximum(query);
      if (query >= p.len_q) continue;
      float l = 0.0f;
      for (i32 tile = keys.begin; tile < keys.end; ++tile) l += p.tile_sums[part(tile, query)];
      const float normalizer = l == 0.0f ? 0.0f : 1.0f / l;
      T* const o = p.o + sequence * p.o_batch + query * p.o_row + head * p.o_head;
      for (i32 column = here.column; column < cfg.head_dim_v; column += kSide) {
        float sum = 0.0f;
        for (i32 tile = keys.begin; tile < keys.end; ++tile) {
          sum += p.tile_outputs[part(tile, query) * cfg.head_dim_v + column];
        }
        o[column] = element_from<T>(sum * normalizer);
      }
      if (here.column == 0) p.lse[number(query)] = log_sum_exp(m, l);
    }
  }
};

}  // namespace flashgen

#if !defined(FLASHGEN_EMULATOR)

// ---- flashgen/ptx/grid.cuh
// Communication between blocks and between grids: atomics, ordered accesses of global memory, and
// programmatic dependent launch.

namespace flashgen {

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
// No instruction. It tells the emulator that blocks wait for each other, so that all must be resident.
FLASHGEN_DEVICE void expect_cooperative_launch() {}

// ---- Programmatic dependent launch (sm_90 and later)

}  // namespace flashgen
#endif
// ---- flashgen/lineage/grid_barrier.cuh
// A barrier of all blocks of a grid that was launched cooperatively.

namespace flashgen {

// All threads of all `blocks` blocks call; what any of them wrote before, all of them can read afterwards.
// `counter` is zero before the kernel starts and counts arrivals: the one that fills a round ends it.
FLASHGEN_DEVICE void grid_sync(u32* counter, u32 blocks) {
  expect_cooperative_launch();
  block_sync();
  if (thread_idx() == 0) {
    const u32 before = atomic_add_release(counter, 1);
    const u32 target = (before / blocks + 1) * blocks;
    // The counter may wrap around, and others may have come further.
    while (static_cast<i32>(load_acquire(counter) - target) < 0) {}
  }
  block_sync();
}

// Every block calls this after its last barrier. The last one sets both counters to 0 for the next launch.
FLASHGEN_DEVICE void leave_grid(u32* counter, u32 blocks) {
  if (thread_idx() == 0 && atomic_add_release(counter + 1, 1u) + 1 == blocks) {
    store_release(counter, 0u);
    store_release(counter + 1, 0u);
  }
}

}  // namespace flashgen

// ---- kernels/lineage/grid2d.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr GridConfig kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
    .tile_q = 64,        // B_r: query rows per block
    .tile_kv = 64,       // B_c: keys per tile
    .has_lower = false,  // the mask ends on the left
    .has_upper = true,   // the mask ends on the right
};

struct Params {
  const element_t* q;
  const element_t* k;
  const element_t* v;
  element_t* o;
  float* lse;           // log-sum-exp, (batch, heads_q, len_q)
  float* tile_maxima;   // the largest score of each row and tile of keys, (batch, heads_q, kv_tiles, len_q)
  float* tile_sums;     // the sums of exponentials of each row and tile of keys
  float* tile_outputs;  // P V of each tile of keys, (batch, heads_q, kv_tiles, len_q, head_dim_v)
  u32* counter;         // tiles drawn, then blocks done; 0 between launches
  i64 q_batch, q_row, q_head;  // strides are in elements
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 o_batch, o_row, o_head;
  i32 batch;
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  float scale;
};
static_assert(sizeof(Params) == 208, "the launcher packs Params into 208 bytes");

namespace smem {
constexpr u32 kQ = 0;      // Q_i
constexpr u32 kK = 16640;  // K_j
constexpr u32 kV = 33280;  // V_j
constexpr u32 kP = 49920;  // P_ij

}  // namespace smem

FLASHGEN_KERNEL(256, 2) forward_d64_causal_grid2d_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  // This block computes S_ij, one tile of scores of one head.
  const auto tile = TileOfScores<kConfig, element_t, Params>::current(p);

  const u32 blocks = static_cast<u32>(grid_dim_x() * p.heads_q * p.batch);
  // Before the first barrier of the grid: how large the scores of each row are.
  Patch<kConfig.tile_q, kConfig.tile_kv> scores;
  if (tile.is_visited()) {
    tile.compute_scores(scores, shared + smem::kQ, shared + smem::kK);
    tile.publish_maxima(scores);
  }
  grid_sync(p.counter, blocks);

  // Before the second: P_ij V_j, relative to the maximum of the whole row. S_ij has stayed in registers.
  if (tile.is_visited()) tile.publish_products(scores, shared + smem::kV, shared + smem::kP);
  grid_sync(p.counter, blocks);

  tile.add_up();
  leave_grid(p.counter, blocks);
}
