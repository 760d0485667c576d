// forward_d64_causal_grid1d_sm80: 1-D grid, forward pass: O and the log-sum-exp of each row.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"forward","deterministic":false}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --forward-only --algorithm grid1d --arch sm_80
// for      sm_80 (A100)
// plan     tile_q 64, tile_kv 64, 256 threads
// grid     one block for every 64 query rows of every query head and batch entry
// smem     66560 bytes
// because  each thread computes 4 x 4 scores, and reads 8 numbers for 16 products
//
// contents  23  Instructions, one per function: types, device, math.
//           94  Element types.
//          122  Banded masks.
//          167  Single elements from floats.
//          179  What a softmax takes exponentials of.
//          192  The exponentials of a softmax that subtracts the maximum of each row.
//          209  Products of float tiles in shared memory, without tensor cores.
//          313  The kernel: its configuration, parameters and text.

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
};

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

FLASHGEN_DEVICE float to_float(bfloat16_t x) { return float_of(static_cast<u32>(x.bits) << 16); }
FLASHGEN_DEVICE float to_float(float x) { return x; }

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

}  // namespace flashgen

// ---- kernels/lineage/grid1d.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

struct GridConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  bool has_lower;
  bool has_upper;
};

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
  float* lse;                  // log-sum-exp, (batch, heads_q, len_q)
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
static_assert(sizeof(Params) == 168, "the launcher packs Params into 168 bytes");

namespace smem {
constexpr u32 kQ = 0;      // Q_i
constexpr u32 kK = 16640;  // K_j
constexpr u32 kV = 33280;  // V_j
constexpr u32 kP = 49920;  // P_ij

}  // namespace smem

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using QTile = FloatTile<kConfig.tile_q, kConfig.head_dim>;
using KTile = FloatTile<kConfig.tile_kv, kConfig.head_dim>;
using VTile = FloatTile<kConfig.tile_kv, kConfig.head_dim_v>;
using PTile = FloatTile<kConfig.tile_q, kConfig.tile_kv>;

FLASHGEN_KERNEL(256, 1) forward_d64_causal_grid1d_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Square here = Square::current();
  const Place place = Place::current();

  // This block computes O_i, and every other block of the grid another tile of queries.
  const i32 first_q = place.tile * kConfig.tile_q;
  const i32 head_kv = place.head / p.group;
  const Mask mask = Mask::of(p, place.sequence, place.head);
  const element_t* const k = p.k + place.sequence * p.k_batch + head_kv * p.k_head;
  const element_t* const v = p.v + place.sequence * p.v_batch + head_kv * p.v_head;

  const QTile q_tile{reinterpret_cast<float*>(shared + smem::kQ)};
  const KTile k_tile{reinterpret_cast<float*>(shared + smem::kK)};
  const VTile v_tile{reinterpret_cast<float*>(shared + smem::kV)};
  const PTile p_tile{reinterpret_cast<float*>(shared + smem::kP)};
  q_tile.load(p.q + place.sequence * p.q_batch + place.head * p.q_head, p.q_row, first_q, p.len_q);

  // O_i = 0, l_i = 0, m_i = -inf. The 16 threads of a row all keep its m and l.
  constexpr i32 rows = kConfig.tile_q / kSide;
  Patch<kConfig.tile_q, kConfig.head_dim_v> out = {};
  float m[rows], l[rows];
#pragma unroll
  for (i32 i = 0; i < rows; ++i) {
    m[i] = -kInfinity;
    l[i] = 0.0f;
  }

  // Phases: K_j and V_j pass through shared memory one tile after another.
  const Range keys = mask.key_tiles(first_q, smaller(first_q + kConfig.tile_q, p.len_q), kConfig.tile_kv);
  for (i32 j = keys.begin; j < keys.end; ++j) {
    const i32 first_key = j * kConfig.tile_kv;
    // Everyone is done with the tiles before, which K_j and V_j replace.
    block_sync();
    k_tile.load(k, p.k_row, first_key, p.len_kv);
    v_tile.load(v, p.v_row, first_key, p.len_kv);
    block_sync();

    // S_ij = scale * Q_i K_j^T.
    Patch<kConfig.tile_q, kConfig.tile_kv> scores;
    masked_scores(scores, q_tile, k_tile, p.scale, mask, first_q, first_key);

    // m_i = max(m_i, rowmax(S_ij)), P_ij = exp(S_ij - m_i), l_i and O_i rescaled to the new maximum.
#pragma unroll
    for (i32 i = 0; i < rows; ++i) {
      float tile_maximum = -kInfinity, tile_sum = 0.0f;
#pragma unroll
      for (i32 c = 0; c < kConfig.tile_kv / kSide; ++c) tile_maximum = maximum(tile_maximum, scores[i][c]);
      const float m_new = maximum(m[i], row_maximum(tile_maximum));
#pragma unroll
      for (i32 c = 0; c < kConfig.tile_kv / kSide; ++c) {
        const float probability = exponential(scores[i][c], shift_of(m_new));
        p_tile.at(kSide * i + here.row, kSide * c + here.column) = probability;
        tile_sum += probability;
      }
      const float rescale = exponential(m[i], shift_of(m_new));
      l[i] = l[i] * rescale + row_sum(tile_sum);
      m[i] = m_new;
#pragma unroll
      for (i32 c = 0; c < ceil_div(kConfig.head_dim_v, kSide); ++c) out[i][c] *= rescale;
    }
    block_sync();

    // O_i += P_ij V_j.
    add_products(out, p_tile, v_tile, mask, first_q, first_key);
  }

  // O_i = diag(l_i)^-1 O_i, L_i = m_i + log(l_i).
#pragma unroll
  for (i32 i = 0; i < rows; ++i) {
    const i32 q = first_q + kSide * i + here.row;
    if (q >= p.len_q) continue;
    const float normalizer = l[i] == 0.0f ? 0.0f : 1.0f / l[i];
    element_t* const o = p.o + place.sequence * p.o_batch + q * p.o_row + place.head * p.o_head;
#pragma unroll
    for (i32 c = 0; c < ceil_div(kConfig.head_dim_v, kSide); ++c) {
      const i32 column = kSide * c + here.column;
      if (column < kConfig.head_dim_v) o[column] = element_from<element_t>(out[i][c] * normalizer);
    }
    const i64 row = (static_cast<i64>(place.sequence) * p.heads_q + place.head) * p.len_q + q;
    if (here.column == 0) p.lse[row] = log_sum_exp(m[i], l[i]);
  }
}
