// combine_d64_pages_sm80: FlashAttention-2, after a forward pass: O and the log-sum-exp of each row from
// those of its splits.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"causal","direction":"forward","deterministic":false,"cache":"paged"}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --causal --forward-only --cache paged --arch sm_80
// for      sm_80 (A100)
// plan     warps 4, 128 threads
// grid     one block for every 4 query rows of every query head and batch entry

// The one door to the hardware: PTX on a GPU, the emulator's functions on a CPU, under the same names.

#if defined(FLASHGEN_EMULATOR)
#include "flashgen/emu/primitives.h"
#else
#line 2 "flashgen/ptx/types.cuh"
// Integer and 16-bit element types, without any CUDA header.

namespace flashgen {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// IEEE binary16 and bfloat16 as bits; arithmetic happens in float or on tensor cores.
struct half_t {
  u16 bits;
};
struct bfloat16_t {
  u16 bits;
};
// 8-bit floats: sign, then 4 bits of exponent and 3 of mantissa, or 5 and 2.
struct e4m3_t {
  u8 bits;
};
struct e5m2_t {
  u8 bits;
};

struct alignas(16) Vec16 {
  u32 words[4];
};

}  // namespace flashgen

#line 3 "flashgen/ptx/device.cuh"
// What the CUDA language itself provides, under names that the emulator can give a host meaning.

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
FLASHGEN_DEVICE bool block_any(bool condition) { return __syncthreads_or(condition) != 0; }
FLASHGEN_DEVICE void warp_sync() { __syncwarp(); }
FLASHGEN_DEVICE bool warp_any(bool condition) { return __any_sync(0xffffffffu, condition) != 0; }
// Bit l is lane l's condition.
FLASHGEN_DEVICE u32 warp_ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }
FLASHGEN_DEVICE i32 lowest_bit(u32 bits) { return __ffs(static_cast<int>(bits)) - 1; }
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

// The same value, but nothing that the compiler knows of it.
FLASHGEN_DEVICE i32 opaque(i32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The 32-bit address of a pointer into shared memory, as the instructions below take it.
FLASHGEN_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

}  // namespace flashgen

#line 3 "flashgen/ptx/copy.cuh"
// Moving data: asynchronous global-to-shared copies and reductions to global memory.

namespace flashgen {

// Copies the first valid_bytes of 16 (8, 4) and zeroes the rest; done when waited for. Past L1 for 16.
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

// Waits until at most `pending` groups are under way.
template <int pending>
FLASHGEN_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

FLASHGEN_DEVICE void reduce_add(float* address, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// Signed numbers too: in two's complement they add up alike.
FLASHGEN_DEVICE void reduce_add(u64* address, u64 value) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Four neighbouring floats at a 16-byte aligned address (sm_90 and later).
FLASHGEN_DEVICE void reduce_add_x4(float* address, const float (&value)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(value[0]), "f"(value[1]),
               "f"(value[2]), "f"(value[3])
               : "memory");
}

}  // namespace flashgen

#line 3 "flashgen/ptx/math.cuh"
// Scalar arithmetic, one instruction each.

namespace flashgen {

// 2^x; 2 ulp, subnormal results flushed to zero.
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

// 1 / x; 1 ulp, subnormal operands and results flushed to zero.
FLASHGEN_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two; a NaN loses to a number.
FLASHGEN_DEVICE float maximum(float a, float b) {
  float c;
  asm("max.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// The smaller of two, or NaN if one of them is; from sm_80 on.
FLASHGEN_DEVICE float minimum_or_nan(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

FLASHGEN_DEVICE float fused_multiply_add(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// The same clipped to [0, 1]; of a NaN comes 0.
FLASHGEN_DEVICE float fused_multiply_add_clipped(float a, float b, float c) {
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// Two floats rounded to 16 bits and packed, the first in the low half.
FLASHGEN_DEVICE u32 pack(bfloat16_t, float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

FLASHGEN_DEVICE u16 to_half_bits(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

FLASHGEN_DEVICE u32 pack(half_t, float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return static_cast<u32>(to_half_bits(low)) | static_cast<u32>(to_half_bits(high)) << 16;
#endif
}

FLASHGEN_DEVICE float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

}  // namespace flashgen

#line 3 "flashgen/ptx/matrix.cuh"
// Warp-wide matrix instructions: ldmatrix, stmatrix and mma.sync.

namespace flashgen {

// Four 8x8 matrices of 16-bit elements; lane 8i+r gives the address of row r of matrix i.
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

FLASHGEN_DEVICE void ldmatrix_x1(u32 (&r)[1], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
}

FLASHGEN_DEVICE void ldmatrix_x1_trans(u32 (&r)[1], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(address)
               : "memory");
}

// The way back (sm_90 and later).
FLASHGEN_DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

FLASHGEN_DEVICE void stmatrix_x4_trans(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

FLASHGEN_DEVICE void stmatrix_x2(u32 address, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1])
               : "memory");
}

FLASHGEN_DEVICE void stmatrix_x2_trans(u32 address, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]),
               "r"(r[1])
               : "memory");
}

FLASHGEN_DEVICE void stmatrix_x1(u32 address, const u32 (&r)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0]) : "memory");
}

FLASHGEN_DEVICE void stmatrix_x1_trans(u32 address, const u32 (&r)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0])
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

FLASHGEN_DEVICE void mma_m16n8k16(half_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Turing's shape: half the depth.
FLASHGEN_DEVICE void mma_m16n8k8(half_t, float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// The same, of which nobody reads d before mma_finish(). The hardware waits for its results by itself; the
// emulator carries out all products of a batch at one meeting of the lanes.
FLASHGEN_DEVICE void mma_m16n8k16_batched(bfloat16_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16(bfloat16_t{}, d, a, b);
}

FLASHGEN_DEVICE void mma_m16n8k16_batched(half_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16(half_t{}, d, a, b);
}

FLASHGEN_DEVICE void mma_m16n8k8_batched(half_t, float (&d)[4], u32 a0, u32 a1, u32 b) {
  mma_m16n8k8(half_t{}, d, a0, a1, b);
}

FLASHGEN_DEVICE void mma_finish() {}

// Of bits: how many of a row's 128 a column has as well (sm_80 and later). A lane's word is 32 of them.
FLASHGEN_DEVICE void mma_m16n8k128_bits(i32 (&d)[4], const u32 (&a)[2], u32 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// 8-bit elements: twice the depth (sm_89 and later).
FLASHGEN_DEVICE void mma_m16n8k32(e4m3_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

FLASHGEN_DEVICE void mma_m16n8k32(e5m2_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace flashgen

#endif
#line 3 "flashgen/element.cuh"
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
  // The same thread, in a way that the compiler cannot see through: addresses made from it inside a loop are
  // then computed there, instead of all being kept in registers from before the loop.
  FLASHGEN_DEVICE Thread again() const { return {opaque(lane), opaque(warp)}; }
  FLASHGEN_DEVICE i32 index() const { return warp * kWarpSize + lane; }
  // Where the lane's accumulators lie in a block of 16 x 8: rows row() and row() + 8, columns column() and
  // + 1.
  FLASHGEN_DEVICE i32 row() const { return lane / 4; }
  FLASHGEN_DEVICE i32 column() const { return 2 * (lane % 4); }
};

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
  // Its number when all tiles of all heads of all sequences are counted through.
  FLASHGEN_DEVICE i64 number(i32 tiles, i32 heads) const {
    return (static_cast<i64>(sequence) * heads + head) * tiles + tile;
  }
};

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

// Elements of the summed dimension that one multiply step consumes.
template <class T>
constexpr i32 kStepDepth = kIsFloat<T> ? 8 : 16;

FLASHGEN_DEVICE float to_float(bfloat16_t x) { return float_of(static_cast<u32>(x.bits) << 16); }
FLASHGEN_DEVICE float to_float(half_t x) { return half_to_float(x.bits); }
FLASHGEN_DEVICE float to_float(float x) { return x; }

FLASHGEN_DEVICE bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

// Two neighbouring elements, written with one store.
template <class T>
struct alignas(4) Pair {
  u32 bits;
  FLASHGEN_DEVICE static Pair from(float first, float second) { return {pack(T{}, first, second)}; }
};
template <>
struct alignas(8) Pair<float> {
  float first, second;
  FLASHGEN_DEVICE static Pair from(float a, float b) { return {a, b}; }
};

}  // namespace flashgen

#line 3 "flashgen/convert.cuh"
// Single elements from floats.

namespace flashgen {

template <class T>
FLASHGEN_DEVICE T element_from(float value) {
  if constexpr (kIsFloat<T>) {
    return value;
  } else {
    return T{static_cast<u16>(pack(T{}, value, 0.0f))};
  }
}

}  // namespace flashgen

#line 3 "flashgen/combine.cuh"
// The log-sum-exps of the splits of a row: the maximum, and the sum of exponentials. The lanes of a warp take
// splits in turns, and all get the same.

namespace flashgen {

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

#line 6 "kernels/combine.cu.j2"
using namespace flashgen;

using element_t = bfloat16_t;

constexpr CombineConfig kConfig{
    .head_dim_v = 64,
    .rows = 4,
    .warps = 4,
};

struct Params {
  element_t* o;
  const float* o_partial;    // of each split O of its keys alone, (splits, batch, heads_q, len_q, head_dim_v)
  const float* lse_partial;  // and its log-sum-exp, (splits, batch, heads_q, len_q)
  float* lse;                // log-sum-exp, (batch, heads_q, len_q)
  i64 o_batch;               // strides are in elements
  i64 o_row;
  i64 o_head;
  i32 batch;
  i32 heads_q;
  i32 len_q;
  i32 splits;
};
static_assert(sizeof(Params) == 72, "the launcher packs Params into 72 bytes");

#line 14
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
