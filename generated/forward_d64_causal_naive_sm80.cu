// forward_d64_causal_naive_sm80: naive attention, forward pass: O and the log-sum-exp of each row.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"forward","deterministic":false}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --forward-only --algorithm naive --arch sm_80
// for      sm_80 (A100)
// plan     64 threads
// grid     one block for every query row of every query head and batch entry
//
// contents  20  Instructions, one per function: types, device, math.
//           85  Element types.
//          109  Banded masks.
//          131  Single elements from floats.
//          143  What a softmax takes exponentials of.
//          156  The exponentials of a softmax that subtracts the maximum of each row.
//          175  The kernel: its configuration, parameters and text.

#if defined(FLASHGEN_EMULATOR)
#include "flashgen/emu/primitives.h"
#else
// ---- flashgen/ptx/types.cuh
// Integer and element types, without any CUDA header.

namespace flashgen {

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

namespace flashgen {

FLASHGEN_DEVICE i32 thread_idx() { return static_cast<i32>(threadIdx.x); }
FLASHGEN_DEVICE i32 block_idx_x() { return static_cast<i32>(blockIdx.x); }
FLASHGEN_DEVICE i32 block_idx_y() { return static_cast<i32>(blockIdx.y); }
FLASHGEN_DEVICE i32 block_idx_z() { return static_cast<i32>(blockIdx.z); }
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

}  // namespace flashgen

// ---- kernels/lineage/naive.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

struct NaiveConfig {
  i32 head_dim;
  i32 head_dim_v;
  bool has_lower;
  bool has_upper;
};

constexpr NaiveConfig kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
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

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

FLASHGEN_KERNEL(64, 1) forward_d64_causal_naive_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  const Place place = Place::current();

  // This thread computes one element of O: one column of one query's row. Its neighbors compute the same
  // scores again.
  const i32 q = place.tile;
  const i32 column = thread_idx();
  if (column >= kConfig.head_dim_v) return;
  const i32 head_kv = place.head / p.group;
  const Mask mask = Mask::of(p, place.sequence, place.head);
  const element_t* const q_row = p.q + place.sequence * p.q_batch + q * p.q_row + place.head * p.q_head;
  const element_t* const k = p.k + place.sequence * p.k_batch + head_kv * p.k_head;
  const element_t* const v = p.v + place.sequence * p.v_batch + head_kv * p.v_head;

  float m = -kInfinity, total = 0.0f, out = 0.0f;
  for (i32 key = 0; key < p.len_kv; ++key) {
    if (!mask.allows(q, key)) continue;
    // s = scale * q k^T.
    const element_t* const k_row = k + key * p.k_row;
    float score = 0.0f;
    for (i32 d = 0; d < kConfig.head_dim; ++d) score = fused_multiply_add(to_float(q_row[d]), to_float(k_row[d]), score);
    score *= p.scale;

    // Online softmax: what was summed so far is rescaled when the maximum grows.
    const float m_new = maximum(m, score);
    const float shift = shift_of(m_new);
    const float rescale = exponential(m, shift);
    const float weight = exponential(score, shift);
    total = total * rescale + weight;
    out = out * rescale + weight * to_float(v[key * p.v_row + column]);
    m = m_new;
  }

  // O = out / l, and L = m + log(l).
  const float normalizer = total == 0.0f ? 0.0f : 1.0f / total;
  p.o[place.sequence * p.o_batch + q * p.o_row + place.head * p.o_head + column] = element_from<element_t>(out * normalizer);
  if (column == 0) {
    const i64 row = (static_cast<i64>(place.sequence) * p.heads_q + place.head) * p.len_q + q;
    p.lse[row] = log_sum_exp(m, total);
  }
}
