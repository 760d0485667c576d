// forward_softmax_d64_causal_standard_sm80: standard attention, forward pass, second: P = softmax(S) and the
// log-sum-exp of each row.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --algorithm standard --arch sm_80
// for      sm_80 (A100)
// plan     warps 4, 128 threads
// grid     one block for every query row of every query head and batch entry
// smem     32 bytes
//
// contents  23  Instructions, one per function: types, device, math.
//          106  Element types.
//          141  What a softmax takes exponentials of.
//          154  The exponentials of a softmax that subtracts the maximum of each row.
//          166  Banded masks.
//          188  The matrix products of standard attention, C = A B^T, A B or A^T B.
//          219  Maxima and sums over the values of a block's threads.
//          247  The kernel: its configuration, parameters and text.

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
constexpr i32 kWarpSize = 32;

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
};

// Which tile of which head of which sequence a block works on.
struct Place {
  i32 tile;
  i32 head;
  i32 sequence;

  FLASHGEN_DEVICE static Place current() { return {block_idx_x(), block_idx_y(), block_idx_z()}; }
};

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

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

// ---- flashgen/lineage/product.cuh
// The matrix products of standard attention, C = A B^T, A B or A^T B: a block computes one tile of C and
// brings tiles of A and B to shared memory in a ring of stages.

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

template <class T>
FLASHGEN_DEVICE void write_four(T* to, const float (&x)[4]) {
  if constexpr (kIsFloat<T>) {
    *reinterpret_cast<Vec16*>(to) = Vec16{{bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])}};
  } else {
    *reinterpret_cast<u64*>(to) = pack(T{}, x[0], x[1]) | static_cast<u64>(pack(T{}, x[2], x[3])) << 32;
  }
}

// ---- flashgen/lineage/row_reduction.cuh
// Maxima and sums over the values of a block's threads. All threads of the block call them and get the
// result; `shared` has room for one float for each warp, which no other call may use.

template <i32 warps, class Combine>
FLASHGEN_DEVICE float block_reduction(float x, float* shared, Thread thread, const Combine& combine) {
#pragma unroll
  for (i32 distance = kWarpSize / 2; distance > 0; distance /= 2) x = combine(x, shuffle_xor(x, distance));
  if (thread.lane == 0) shared[thread.warp] = x;
  block_sync();
  x = shared[0];
#pragma unroll
  for (i32 warp = 1; warp < warps; ++warp) x = combine(x, shared[warp]);
  return x;
}

template <i32 warps>
FLASHGEN_DEVICE float block_maximum(float x, float* shared, Thread thread) {
  return block_reduction<warps>(x, shared, thread, [](float a, float b) { return maximum(a, b); });
}

template <i32 warps>
FLASHGEN_DEVICE float block_total(float x, float* shared, Thread thread) {
  return block_reduction<warps>(x, shared, thread, [](float a, float b) { return a + b; });
}

}  // namespace flashgen

// ---- kernels/lineage/standard_softmax.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

struct SoftmaxConfig {
  i32 warps;
  i32 held;
  bool has_lower;
  bool has_upper;
};

constexpr SoftmaxConfig kConfig{
    .warps = 4,
    .held = 8,           // rows of up to 4096 scores are read once
    .has_lower = false,  // the mask ends on the left
    .has_upper = true,   // the mask ends on the right
};

struct Params {
  const float* scores;       // S, (batch, heads_q, len_q, score_pitch)
  float* lse;                // log-sum-exp, (batch, heads_q, len_q)
  element_t* probabilities;  // P, of the shape of S
  i32 heads_q;
  i32 len_q, len_kv;
  i32 score_pitch;             // elements from one row of S, P or dS to the next, a multiple of 8
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // key k is allowed for query q when band_lower <= k - q <= band_upper
};
static_assert(sizeof(Params) == 56, "the launcher packs Params into 56 bytes");

namespace smem {
constexpr u32 kReductions = 0;  // a maximum and a sum of each warp

}  // namespace smem

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

// Four neighbors of a row.
struct Four {
  float values[4];
};

FLASHGEN_KERNEL(128, 1) forward_softmax_d64_causal_standard_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Thread thread = Thread::current();
  constexpr i32 threads = kConfig.warps * kWarpSize;

  // This block turns one row of S into one row of P, four neighbors by each thread at a time.
  const Place place = Place::current();
  const i32 q = place.tile;
  const Mask mask = Mask::of(p, place.sequence, place.head);
  const Matrix<const float> scores = scores_of(p.scores, p, place.sequence, place.head);
  const Matrix<element_t> probabilities = scores_of(p.probabilities, p, place.sequence, place.head);
  const i32 fours = scores.column_count / 4;
  const auto read = [&](i32 i) {
    const Vec16 chunk = *reinterpret_cast<const Vec16*>(scores.at(q, 4 * i));
    Four four;
#pragma unroll
    for (i32 e = 0; e < 4; ++e) four.values[e] = mask.allows(q, 4 * i + e) ? float_of(chunk.words[e]) : -kInfinity;
    return four;
  };

  // m = max(S). The beginning of a row stays in registers ...
  Four held[kConfig.held];
  float largest = -kInfinity;
#pragma unroll
  for (i32 i = 0; i < kConfig.held; ++i) {
    const i32 index = thread.index() + i * threads;
    held[i] = index < fours ? read(index) : Four{-kInfinity, -kInfinity, -kInfinity, -kInfinity};
#pragma unroll
    for (i32 e = 0; e < 4; ++e) largest = maximum(largest, held[i].values[e]);
  }
  // ... and of what does not fit each thread keeps a maximum and a sum relative to it: it is read again below.
  float largest_beyond = -kInfinity, sum_beyond = 0.0f;
#pragma unroll 1
  for (i32 i = thread.index() + kConfig.held * threads; i < fours; i += threads) {
    const Four four = read(i);
    float now = largest_beyond;
#pragma unroll
    for (i32 e = 0; e < 4; ++e) now = maximum(now, four.values[e]);
    sum_beyond *= exponential(largest_beyond, shift_of(now));
    largest_beyond = now;
#pragma unroll
    for (i32 e = 0; e < 4; ++e) sum_beyond += exponential(four.values[e], shift_of(now));
  }
  float* const reductions = reinterpret_cast<float*>(shared + smem::kReductions);
  const float row_maximum = block_maximum<kConfig.warps>(maximum(largest, largest_beyond), reductions, thread);
  const float shift = shift_of(row_maximum);

  // l = rowsum(exp(S - m)).
  float sum = sum_beyond * exponential(largest_beyond, shift);
#pragma unroll
  for (i32 i = 0; i < kConfig.held; ++i) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      held[i].values[e] = exponential(held[i].values[e], shift);
      sum += held[i].values[e];
    }
  }
  const float total = block_total<kConfig.warps>(sum, reductions + kConfig.warps, thread);

  // P = exp(S - m) / l. The mask is asked again: if l is NaN, 0 / l is NaN, and forbidden pairs must stay 0.
  const float normalizer = total == 0.0f ? 0.0f : 1.0f / total;
  const auto write_probabilities = [&](i32 i, Four four) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) four.values[e] = mask.allows(q, 4 * i + e) ? four.values[e] * normalizer : 0.0f;
    write_four(probabilities.at(q, 4 * i), four.values);
  };
#pragma unroll
  for (i32 i = 0; i < kConfig.held; ++i) {
    const i32 index = thread.index() + i * threads;
    if (index < fours) write_probabilities(index, held[i]);
  }
#pragma unroll 1
  for (i32 i = thread.index() + kConfig.held * threads; i < fours; i += threads) {
    Four four = read(i);
#pragma unroll
    for (i32 e = 0; e < 4; ++e) four.values[e] = exponential(four.values[e], shift);
    write_probabilities(i, four);
  }

  // L = m + log(l). A backward pass that computes P again has L already, and passes none.
  if (thread.index() == 0 && p.lse != nullptr) {
    const i64 row = (static_cast<i64>(place.sequence) * p.heads_q + place.head) * p.len_q + q;
    p.lse[row] = total == 0.0f ? -kInfinity : row_maximum + log2_approx(total) * kLn2;
  }
}
