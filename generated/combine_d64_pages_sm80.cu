// combine_d64_pages_sm80: FlashAttention-2, after a forward pass: O and the log-sum-exp of each row from
// those of its splits.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"forward","deterministic":false,"cache":"paged"}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --forward-only --cache paged --arch sm_80
// for      sm_80 (A100)
// plan     warps 4, 128 threads
// grid     one block for every 4 query rows of every query head and batch entry
//
// contents  19  Instructions, one per function: types, device, math.
//           87  Element types.
//          124  Single elements from floats.
//          136  The log-sum-exps of the splits of a row.
//          168  The kernel: its configuration, parameters and text.

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
FLASHGEN_DEVICE float shuffle_xor(float value, i32 lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
FLASHGEN_DEVICE float shuffle(float value, i32 source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
}
FLASHGEN_DEVICE i32 shuffle(i32 value, i32 source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
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
  FLASHGEN_DEVICE i32 column() const { return 2 * (lane % 4); }
};

constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

// Which tile of which head of which sequence a block works on.
struct Place {
  i32 tile;
  i32 head;
  i32 sequence;

  FLASHGEN_DEVICE static Place current() { return {block_idx_x(), block_idx_y(), block_idx_z()}; }
};

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

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

// ---- flashgen/combine.cuh
// The log-sum-exps of the splits of a row: the maximum, and the sum of exponentials. The lanes of a warp take
// splits in turns, and all get the same.

struct CombineConfig {
  i32 head_dim_v;
  i32 rows;
  i32 warps;
};

FLASHGEN_DEVICE float splits_maximum(const float* lse, i64 rows, i32 splits, Thread thread) {
  float most = -kInfinity;
  for (i32 split = thread.lane; split < splits; split += kWarpSize) most = maximum(most, lse[split * rows]);
#pragma unroll
  for (i32 mask = kWarpSize / 2; mask > 0; mask /= 2) most = maximum(most, shuffle_xor(most, mask));
  return most;
}

// A split's weight is exp(L_s - m); that of one without keys is 0.
FLASHGEN_DEVICE float weight_of(float lse, float shift) { return exp2_approx((lse - shift) * kLog2E); }

FLASHGEN_DEVICE float splits_total(const float* lse, i64 rows, i32 splits, float shift, Thread thread) {
  float total = 0.0f;
  for (i32 split = thread.lane; split < splits; split += kWarpSize)
    total += weight_of(lse[split * rows], shift);
#pragma unroll
  for (i32 mask = kWarpSize / 2; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
  return total;
}

}  // namespace flashgen

// ---- kernels/combine.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr CombineConfig kConfig{
    .head_dim_v = 64,
    .rows = 4,
    .warps = 4,
};

struct Params {
  element_t* o;
  const float* o_partial;      // O of each split of the keys, (splits, batch, heads_q, len_q, head_dim_v)
  const float* lse_partial;    // log-sum-exp of each split, (splits, batch, heads_q, len_q)
  float* lse;                  // log-sum-exp, (batch, heads_q, len_q)
  i64 o_batch, o_row, o_head;  // strides are in elements
  i32 batch;
  i32 heads_q;
  i32 len_q;
  i32 splits;
};
static_assert(sizeof(Params) == 72, "the launcher packs Params into 72 bytes");

FLASHGEN_KERNEL(128, 1) combine_d64_pages_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  const Thread thread = Thread::current();
  const Place place = Place::current();

  // Each warp combines one query of one head of one sequence.
  const i32 q = place.tile * kConfig.rows + thread.warp;
  if (q >= p.len_q) return;
  const i64 rows = static_cast<i64>(p.batch) * p.heads_q * p.len_q;
  const i64 row = (static_cast<i64>(place.sequence) * p.heads_q + place.head) * p.len_q + q;

  // m = max_s L_s and l = sum_s exp(L_s - m).
  const float most = splits_maximum(p.lse_partial + row, rows, p.splits, thread);
  const float shift = most == -kInfinity ? 0.0f : most;
  const float total = splits_total(p.lse_partial + row, rows, p.splits, shift, thread);
  if (thread.lane == 0) p.lse[row] = total == 0.0f ? -kInfinity : shift + log2_approx(total) * kLn2;

  // O = sum_s exp(L_s - m) O_s / l, each lane columns of its own.
  constexpr i32 columns = ceil_div(kConfig.head_dim_v, kWarpSize);
  float out[columns] = {};
  for (i32 split = 0; split < p.splits; ++split) {
    const i64 at = split * rows + row;
    const float weight = weight_of(p.lse_partial[at], shift);
#pragma unroll
    for (i32 i = 0; i < columns; ++i) {
      const i32 column = thread.lane + i * kWarpSize;
      if (column < kConfig.head_dim_v) out[i] += weight * p.o_partial[at * kConfig.head_dim_v + column];
    }
  }
  const float normalizer = total == 0.0f ? 0.0f : 1.0f / total;
  element_t* const o = p.o + place.sequence * p.o_batch + q * p.o_row + place.head * p.o_head;
#pragma unroll
  for (i32 i = 0; i < columns; ++i) {
    const i32 column = thread.lane + i * kWarpSize;
    if (column < kConfig.head_dim_v) o[column] = element_from<element_t>(out[i] * normalizer);
  }
}
