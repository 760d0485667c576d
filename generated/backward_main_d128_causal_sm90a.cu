// backward_main_d128_causal_sm90a: FlashAttention-3, backward pass: dK, dV and dQ.
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 128 --dtype bf16 --causal --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 64, tile_kv 128, q_slots 3, do_slots 2, 384 threads
// roles    of 1 warpgroup one warp brings tiles, and three finish dQ (24 registers a thread); 2 compute, 64
//          keys each (240)
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 128
//          key rows of a key/value head and batch entry
// smem     231840 bytes
//            k                   0 to  32768  K_j
//            v               32768 to  65536  V_j
//            q               65536 to 114688  Q_i, 3 slots
//            do             114688 to 147456  dO_i, 2 slots
//            ds             147456 to 180224  dS_ij, 2 slots
//            dq             180224 to 212992  dQ_i, and at the end dK_j and dV_j, on their way out
//            sums           212992 to 225280  rows of dQ_i to be finished, 3 slots
//            dq_rows        225280 to 227328  and when they are
//            zeros          227328 to 229376  what their sum is cleared with
//            lse            229376 to 230144  what rows subtract from their logits, 3 slots
//            dsum           230144 to 230656  -D_i, 2 slots
//            k_barriers     230656 to 230672  for each slot: it is full, it is empty
//            v_barriers     230784 to 230800
//            q_barriers     230912 to 230960
//            do_barriers    231040 to 231072
//            ds_barriers    231168 to 231200
//            sum_barriers   231296 to 231344
//            turn_barriers  231424 to 231440
//            sum_parts      231552 to 231648  which parts of dQ the slots hold
//            tile_barriers  231680 to 231712
//            tiles          231808 to 231840  which tiles of keys come next
// because  dK and dV take half of the registers, which leaves them for 64 queries

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

#line 3 "flashgen/tile.cuh"
// Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.

namespace flashgen {

constexpr i32 kChunkBytes = 16;

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
  FLASHGEN_DEVICE Vec16& vector_at(i32 row, i32 chunk) const {
    return *reinterpret_cast<Vec16*>(chunk_at(row, chunk));
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

}  // namespace flashgen

#line 3 "flashgen/operand.cuh"
// Operands of warp-level matrix products: which elements of a tile each lane holds, and how it fetches them.
//
// A product accumulates 16 x 8 blocks. Lane l of a warp holds of such a block, at any precision, rows l/4 and
// l/4 + 8, columns 2(l%4) and 2(l%4) + 1: the accumulator layout of mma.sync.

namespace flashgen {

template <class Tile>
FLASHGEN_DEVICE i32 origin_of(Tile tile) {
  return static_cast<i32>(shared_address(tile.data));
}

// Left operand of one step: 16 rows, one step deep.
template <class T>
struct LeftFragment {
  u32 words[4];
};
template <>
struct LeftFragment<float> {
  float values[2][8];
};

// Right operand of one step: one step deep, 8 columns.
template <class T>
struct RightFragment {
  u32 words[2];
};
template <>
struct RightFragment<float> {
  float values[8][2];
};

// ---------------------------------------------------------------------------------------------------------
// Left operand stored row by row: tile[row][depth].
template <class Tile, bool is_float = kIsFloat<typename Tile::Element>>
struct LeftRows {
  using T = typename Tile::Element;
  static constexpr bool in_registers = false;
  Cursor<Tile> cursor;

  FLASHGEN_DEVICE LeftRows(Tile tile, i32 first_row, Thread thread)
      : cursor(origin_of(tile), first_row + (thread.lane & 15), thread.lane >> 4) {}
  FLASHGEN_DEVICE void load(LeftFragment<T>& fragment, i32 block, i32 step) const {
    ldmatrix_x4(fragment.words, cursor.template offset<true>(16 * block, 2 * step));
  }
};

template <class Tile>
struct LeftRows<Tile, true> {
  static constexpr bool in_registers = false;
  Tile tile;
  Cursor<Tile> cursor;

  FLASHGEN_DEVICE LeftRows(Tile tile_, i32 first_row, Thread thread)
      : tile(tile_), cursor(0, first_row + thread.row(), 0) {}
  FLASHGEN_DEVICE void load(LeftFragment<float>& fragment, i32 block, i32 step) const {
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const i32 offset = cursor.template offset<true>(16 * block + 8 * half, 2 * step + c);
        const Vec16 chunk = *reinterpret_cast<const Vec16*>(tile.data + offset);
#pragma unroll
        for (i32 i = 0; i < 4; ++i) fragment.values[half][4 * c + i] = float_of(chunk.words[i]);
      }
    }
  }
};

// Left operand stored by columns: tile[depth][row].
template <class Tile, bool is_float = kIsFloat<typename Tile::Element>>
struct LeftColumns {
  using T = typename Tile::Element;
  static constexpr bool in_registers = false;
  Cursor<Tile> cursor;

  FLASHGEN_DEVICE LeftColumns(Tile tile, i32 first_row, Thread thread)
      : cursor(origin_of(tile), (thread.lane & 7) + (thread.lane >> 4) * 8,
               first_row / 8 + ((thread.lane >> 3) & 1)) {}
  FLASHGEN_DEVICE void load(LeftFragment<T>& fragment, i32 block, i32 step) const {
    ldmatrix_x4_trans(fragment.words, cursor.template offset<false>(16 * step, 2 * block));
  }
};

template <class Tile>
struct LeftColumns<Tile, true> {
  static constexpr bool in_registers = false;
  Tile tile;
  i32 row;

  FLASHGEN_DEVICE LeftColumns(Tile tile_, i32 first_row, Thread thread)
      : tile(tile_), row(first_row + thread.row()) {}
  FLASHGEN_DEVICE void load(LeftFragment<float>& fragment, i32 block, i32 step) const {
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
#pragma unroll
      for (i32 k = 0; k < 8; ++k)
        fragment.values[half][k] = *tile.element_at(8 * step + k, row + 16 * block + 8 * half);
    }
  }
};

// ---------------------------------------------------------------------------------------------------------
// Right operand stored by columns, i.e. the transpose of a tile: tile[column][depth].
template <class Tile, bool is_float = kIsFloat<typename Tile::Element>>
struct RightTransposed {
  using T = typename Tile::Element;
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

template <class Tile>
struct RightTransposed<Tile, true> {
  Tile tile;
  i32 column;

  FLASHGEN_DEVICE RightTransposed(Tile tile_, i32 first_column, Thread thread)
      : tile(tile_), column(first_column + thread.column()) {}
  FLASHGEN_DEVICE void load_one(RightFragment<float>& fragment, i32 block, i32 step) const {
#pragma unroll
    for (i32 n = 0; n < 2; ++n) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        const Vec16 chunk = tile.vector_at(column + 8 * block + n, 2 * step + c);
#pragma unroll
        for (i32 i = 0; i < 4; ++i) fragment.values[4 * c + i][n] = float_of(chunk.words[i]);
      }
    }
  }
  FLASHGEN_DEVICE void load_pair(RightFragment<float> (&pair)[2], i32 block, i32 step) const {
    load_one(pair[0], block, step);
    load_one(pair[1], block + 1, step);
  }
};

// Right operand stored row by row: tile[depth][column]. `aligned`: first_column is 0 or a multiple of a power
// of two that no column step of the warp reaches.
template <class Tile, bool aligned, bool is_float = kIsFloat<typename Tile::Element>>
struct RightRows {
  using T = typename Tile::Element;
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

template <class Tile, bool aligned>
struct RightRows<Tile, aligned, true> {
  struct alignas(8) Two {
    float values[2];
  };
  Tile tile;
  i32 column;

  FLASHGEN_DEVICE RightRows(Tile tile_, i32 first_column, Thread thread)
      : tile(tile_), column(first_column + thread.column()) {}
  FLASHGEN_DEVICE void load_one(RightFragment<float>& fragment, i32 block, i32 step) const {
#pragma unroll
    for (i32 k = 0; k < 8; ++k) {
      const Two two = *reinterpret_cast<const Two*>(tile.element_at(8 * step + k, column + 8 * block));
      fragment.values[k][0] = two.values[0];
      fragment.values[k][1] = two.values[1];
    }
  }
  FLASHGEN_DEVICE void load_pair(RightFragment<float> (&pair)[2], i32 block, i32 step) const {
    load_one(pair[0], block, step);
    load_one(pair[1], block + 1, step);
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

template <i32 row_blocks, i32 column_blocks>
struct LeftRegisters<float, row_blocks, column_blocks> {
  static constexpr bool in_registers = true;
  const float (&values)[row_blocks][column_blocks][4];
  i32 first_lane;

  FLASHGEN_DEVICE LeftRegisters(const float (&values_)[row_blocks][column_blocks][4], Thread thread)
      : values(values_), first_lane(thread.lane & ~3) {}
  FLASHGEN_DEVICE void load(LeftFragment<float>& fragment, i32 block, i32 step) const {
    // Column k of a block is held by lane k/2 of each group of four.
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
#pragma unroll
      for (i32 k = 0; k < 8; ++k)
        fragment.values[half][k] = shuffle(values[block][step][2 * half + k % 2], first_lane + k / 2);
    }
  }
};

// A left operand fetched once and held in registers, for a tile that every product uses.
template <class T, i32 row_blocks, i32 steps>
struct LeftHeld {
  static constexpr bool in_registers = true;
  LeftFragment<T> fragments[row_blocks][steps];

  template <class Left>
  FLASHGEN_DEVICE void take(const Left& left) {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 step = 0; step < steps; ++step) left.load(fragments[m][step], m, step);
    }
  }
  FLASHGEN_DEVICE void load(LeftFragment<T>& fragment, i32 block, i32 step) const {
    fragment = fragments[block][step];
  }
};

}  // namespace flashgen

#line 3 "flashgen/product.cuh"
// Warp-level matrix products: tensor cores for 16-bit elements, fused multiply-adds for float.

namespace flashgen {

// A warp's accumulators: row_blocks x column_blocks blocks of 16 x 8.
template <i32 row_blocks, i32 column_blocks>
using Accumulator = float[row_blocks][column_blocks][4];

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

template <bool turing>
FLASHGEN_DEVICE void multiply_block(float (&d)[4], const LeftFragment<float>& a,
                                    const RightFragment<float>& b) {
#pragma unroll
  for (i32 k = 0; k < 8; ++k) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) d[e] = fused_multiply_add(a.values[e / 2][k], b.values[k][e % 2], d[e]);
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
  constexpr i32 unrolled = kIsFloat<T> && !Left::in_registers && steps > 4 ? 1 : steps;
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

}  // namespace flashgen

#line 3 "flashgen/band.cuh"
// Banded masks: key k is allowed for query q when lower <= k - q <= upper and both exist.

namespace flashgen {

struct Range {
  i32 begin, end;
  FLASHGEN_DEVICE i32 size() const { return end - begin; }
  FLASHGEN_DEVICE bool has(i32 i) const { return begin <= i && i < end; }
};

// The tiles that rows (or columns) from `begin`, at least 0, to `end` lie in.
FLASHGEN_DEVICE Range tiles_of(i32 begin, i32 end, i32 tile) {
  return {begin / tile, larger(begin / tile, ceil_div(larger(end, 0), tile))};
}

// Which sides of the band exist is known when the kernel is generated; where they lie, at launch.
template <bool has_lower, bool has_upper>
struct Band {
  // Every tile between the first and the last that are visited is.
  static constexpr bool has_holes = false;
  i32 lower, upper;
  i32 len_q, len_kv;

  // The mask of one head of one sequence, from a kernel's parameters; a band is the same for all of them.
  template <class Params>
  FLASHGEN_DEVICE static Band of(const Params& p, i32 /*sequence*/, i32 /*head*/) {
    return {p.band_lower, p.band_upper, p.len_q, p.len_kv};
  }

  // Tiles of keys that some query of [q_begin, q_end) may attend to.
  FLASHGEN_DEVICE Range key_tiles(i32 q_begin, i32 q_end, i32 tile) const {
    i32 begin = 0, end = len_kv;
    if constexpr (has_lower) begin = larger(begin, q_begin + lower);
    if constexpr (has_upper) end = smaller(end, q_end + upper);
    return tiles_of(begin, end, tile);
  }

  // Tiles of keys every one of which all queries of [q_begin, q_end) may attend to, as far as it exists.
  FLASHGEN_DEVICE Range full_key_tiles(i32 q_begin, i32 q_end, i32 tile) const {
    i32 begin = 0, end = ceil_div(len_kv, tile);
    if constexpr (has_lower) begin = ceil_div(larger(0, q_end - 1 + lower), tile);
    if constexpr (has_upper) end = q_begin + upper + 1 < len_kv ? larger(0, q_begin + upper + 1) / tile : end;
    return {begin, end};
  }

  // Tiles of queries that may attend to some key of [k_begin, k_end).
  FLASHGEN_DEVICE Range query_tiles(i32 k_begin, i32 k_end, i32 tile) const {
    i32 begin = 0, end = len_q;
    if constexpr (has_upper) begin = larger(begin, k_begin - upper);
    if constexpr (has_lower) end = smaller(end, k_end - lower);
    return tiles_of(begin, end, tile);
  }

  // Whether no pair of the rectangle is allowed; the rectangle has at least one row and column.
  FLASHGEN_DEVICE bool is_empty(i32 q_begin, i32 q_end, i32 k_begin, i32 k_end) const {
    bool empty = k_begin >= len_kv;
    if constexpr (has_lower) empty |= k_end - 1 < q_begin + lower;
    if constexpr (has_upper) empty |= k_begin > q_end - 1 + upper;
    return empty;
  }

  // Whether every pair of the rectangle is allowed.
  FLASHGEN_DEVICE bool is_full(i32 q_begin, i32 q_end, i32 k_begin, i32 k_end) const {
    bool full = q_end <= len_q && k_end <= len_kv;
    if constexpr (has_lower) full &= k_begin >= q_end - 1 + lower;
    if constexpr (has_upper) full &= k_end - 1 <= q_begin + upper;
    return full;
  }

  FLASHGEN_DEVICE bool allows(i32 q, i32 k) const {
    bool allowed = q < len_q && k < len_kv;
    if constexpr (has_lower) allowed &= k - q >= lower;
    if constexpr (has_upper) allowed &= k - q <= upper;
    return allowed;
  }
};

// Puts `value` wherever the mask forbids the pair; the warp's block begins at (first_q, first_key).
template <class Mask, i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void mask_pairs(Accumulator<row_blocks, column_blocks>& values, float value, const Mask& mask,
                                i32 first_q, i32 first_key, Thread thread) {
  const i32 q = first_q + thread.row(), key = first_key + thread.column();
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        if (!mask.allows(q + 16 * m + 8 * (e / 2), key + 8 * n + e % 2)) values[m][n][e] = value;
      }
    }
  }
}

// Of the columns of which a lane has two of every eight, bit 2n + c for column 8n + c, those from `column`
// on.
FLASHGEN_DEVICE u32 bits_from(i32 column) {
  const u32 c = static_cast<u32>(smaller(larger(column, 0), 128));
  return static_cast<u32>(~u64{0} << (c / 8 * 2 + (c % 8 < 2 ? c % 8 : 2)));
}

// Which keys from `key` on, a lane's first one, a band allows for a query: two numbers, and made of these a
// bit for each.
template <bool has_lower, bool has_upper>
FLASHGEN_DEVICE u32 allowed_keys(const Band<has_lower, has_upper>& mask, i32 q, i32 key) {
  i32 end = mask.len_kv - key;
  if constexpr (has_upper) end = smaller(end, q + mask.upper - key + 1);
  u32 allowed = ~bits_from(end);
  if constexpr (has_lower) allowed &= bits_from(q + mask.lower - key);
  return allowed;
}

// The same for a band, for rows of queries that exist or whose results nobody looks at. Of bits assemblers
// test seven at once.
template <bool has_lower, bool has_upper, i32 column_blocks>
FLASHGEN_DEVICE void mask_keys(Accumulator<1, column_blocks>& values, float value,
                               const Band<has_lower, has_upper>& mask, i32 first_q, i32 first_key,
                               Thread thread) {
  static_assert(column_blocks <= 16, "a lane's share of a row has a bit for each column");
  const i32 q = first_q + thread.row(), key = first_key + thread.column();
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const u32 allowed = allowed_keys(mask, q + 8 * h, key);
#pragma unroll
    for (i32 i = 0; i < 2 * column_blocks; ++i) {
      if ((allowed & 1u << i) == 0) values[0][i / 2][2 * h + i % 2] = value;
    }
  }
}

// Bits of a warp's pairs that any mask forbids, for a lane's rows of queries that exist. What it asks of the
// order of keys is bits from the beginning. What it asks of keys besides is found for 32 of them at a time, a
// lane for each, and handed around; where it asks much of every pair in a loop, or, where registers are
// scarce, for 16 keys at a time: so much code would stand there otherwise, and so much of it at once, that
// nothing else found room.
template <i32 column_blocks, class Mask>
FLASHGEN_DEVICE void find_forbidden(u32 (&forbidden)[2], const Mask& mask, i32 first_q, i32 first_key,
                                    Thread thread) {
  static_assert(column_blocks <= 16, "a lane's share of a row has a bit for each column");
  constexpr i32 blocks_at_once = kWarpSize / 8;
  const typename Mask::Query queries[2] = {mask.query_at(first_q + thread.row()),
                                           mask.query_at(first_q + thread.row() + 8)};
  const i32 first_column = first_key + thread.column();
  const auto from = [&](i32 k) { return bits_from(larger(k, 0) - first_column); };
#pragma unroll
  for (i32 h = 0; h < 2; ++h) forbidden[h] = ~(mask.ordered_keys(queries[h], from) & ~from(mask.len_kv));
  if constexpr (Mask::asks_besides) {
#pragma unroll 1
    for (i32 first = 0; first < column_blocks; first += blocks_at_once) {
      const i32 key = first_key + 8 * first;
      const typename Mask::Key own = mask.key_at(key + thread.lane);
      // A lane's columns of 16 keys: those of 32 have addresses for which wide heads have no registers.
      constexpr i32 at_once = Mask::is_light ? 4 : 1;
      static_assert(column_blocks % 2 == 0, "tiles are of 16 keys");
      const i32 count = 2 * smaller(blocks_at_once, column_blocks - first);
#pragma unroll 1
      for (i32 begin = 0; begin < count; begin += at_once) {
#pragma unroll
        for (i32 i = begin; i < begin + at_once; ++i) {
          const i32 column = 8 * (i / 2) + thread.column() + i % 2;
          const typename Mask::Key of_column = own.of_lane(column, key + column);
#pragma unroll
          for (i32 h = 0; h < 2; ++h) {
            if (!mask.allows_besides(queries[h], of_column)) forbidden[h] |= 1u << (2 * first + i);
          }
        }
      }
    }
  }
}

// Puts `value` where the bits of a lane's two rows are set: of bits assemblers test seven at once.
template <i32 column_blocks>
FLASHGEN_DEVICE void put_where(Accumulator<1, column_blocks>& values, float value, const u32 (&bits)[2]) {
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
#pragma unroll
    for (i32 i = 0; i < 2 * column_blocks; ++i) {
      if ((bits[h] & 1u << i) != 0) values[0][i / 2][2 * h + i % 2] = value;
    }
  }
}

// Bits of those that it allows; of a band they are known by themselves.
template <i32 column_blocks, class Mask>
FLASHGEN_DEVICE void find_allowed(u32 (&allowed)[2], const Mask& mask, i32 first_q, i32 first_key,
                                  Thread thread) {
  find_forbidden<column_blocks>(allowed, mask, first_q, first_key, thread);
#pragma unroll
  for (i32 h = 0; h < 2; ++h) allowed[h] = ~allowed[h];
}
template <i32 column_blocks, bool has_lower, bool has_upper>
FLASHGEN_DEVICE void find_allowed(u32 (&allowed)[2], const Band<has_lower, has_upper>& mask, i32 first_q,
                                  i32 first_key, Thread thread) {
#pragma unroll
  for (i32 h = 0; h < 2; ++h)
    allowed[h] = allowed_keys(mask, first_q + thread.row() + 8 * h, first_key + thread.column());
}

// Whether a mask asks so little of keys besides their order, and nothing that takes long, that the answers
// need not be bits first. Else bits are worth keeping.
template <class Mask>
constexpr bool kIsDirect = Mask::is_light && Mask::is_quick && !Mask::in_groups;
template <class Mask>
constexpr bool kIsWorthKeeping = Mask::asks_besides && !kIsDirect<Mask>;

// The same for any mask.
template <class Mask, i32 column_blocks>
FLASHGEN_DEVICE void mask_keys(Accumulator<1, column_blocks>& values, float value, const Mask& mask,
                               i32 first_q, i32 first_key, Thread thread) {
  static_assert(column_blocks <= 16, "a lane's share of a row has a bit for each column");
  constexpr i32 blocks_at_once = kWarpSize / 8;
  if constexpr (Mask::asks_besides && kIsDirect<Mask>) {
    const typename Mask::Query queries[2] = {mask.query_at(first_q + thread.row()),
                                             mask.query_at(first_q + thread.row() + 8)};
    const i32 first_column = first_key + thread.column();
    const auto from = [&](i32 k) { return bits_from(larger(k, 0) - first_column); };
    const auto allowed_in_order = [&](i32 h) {
      return mask.ordered_keys(queries[h], from) & ~from(mask.len_kv);
    };
    // Bit 2n + c for column 8n + c.
    const u32 allowed[2] = {allowed_in_order(0), allowed_in_order(1)};
#pragma unroll
    for (i32 first = 0; first < column_blocks; first += blocks_at_once) {
      const i32 key = first_key + 8 * first;
      const typename Mask::Key own = mask.key_at(key + thread.lane);
#pragma unroll
      for (i32 i = 0; i < 2 * smaller(blocks_at_once, column_blocks - first); ++i) {
        const i32 column = 8 * (i / 2) + thread.column() + i % 2;
        const typename Mask::Key of_column = own.of_lane(column, key + column);
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          const bool in_order = (allowed[h] & 1u << (2 * first + i)) != 0;
          if (!(in_order & mask.allows_besides(queries[h], of_column)))
            values[0][first + i / 2][2 * h + i % 2] = value;
        }
      }
    }
  } else {
    u32 forbidden[2];
    find_forbidden<column_blocks>(forbidden, mask, first_q, first_key, thread);
    put_where(values, value, forbidden);
  }
}

}  // namespace flashgen

#line 3 "flashgen/allowed_pairs.cuh"
// Which pairs a mask allows, as bits: they are found once in a step, and asked for twice.

namespace flashgen {

// Of a lane's `count` elements of a strip whose rows are keys: bit 2n + c of rows[h] is for element 4n + 2h +
// c.
template <i32 count>
struct AllowedPairs {
  static_assert(count <= 64, "a lane's share of a row has a bit for each element");
  u32 rows[2] = {~0u, ~0u};

  FLASHGEN_DEVICE bool allows(i32 i) const { return (rows[i % 4 / 2] & 1u << (i / 4 * 2 + i % 2)) != 0; }

  // Puts `value` where a pair is not allowed.
  FLASHGEN_DEVICE void forbid(float (&strip)[count], float value) const {
#pragma unroll
    for (i32 i = 0; i < count; ++i) strip[i] = allows(i) ? strip[i] : value;
  }
  FLASHGEN_DEVICE void forbid(u32 (&rounded)[count / 8][4]) const {
#pragma unroll
    for (i32 i = 0; i < count; ++i) {
      if (!allows(i)) rounded[i / 8][i % 8 / 2] &= i % 2 == 0 ? 0xffff0000u : 0xffffu;
    }
  }
};

// Of a band, and of queries that exist. The warp's rows begin at first_key.
template <i32 count, bool has_lower, bool has_upper>
FLASHGEN_DEVICE AllowedPairs<count> allowed_pairs(const Band<has_lower, has_upper>& mask, i32 first_q,
                                                  i32 first_key, Thread thread) {
  const i32 q = first_q + thread.column();
  AllowedPairs<count> allowed;
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 key = first_key + thread.row() + 8 * h;
    // Queries from q + first to q + end.
    u32 bits = ~bits_from(mask.len_q - q);
    if constexpr (has_upper) bits &= bits_from(key - mask.upper - q);
    if constexpr (has_lower) bits &= ~bits_from(key - mask.lower - q + 1);
    allowed.rows[h] = key < mask.len_kv ? bits : 0;
  }
  return allowed;
}

// Of any mask, which never allows queries beyond the last. It is evaluated in a loop: so much code would
// stand there otherwise.
template <i32 count, class Mask>
FLASHGEN_DEVICE AllowedPairs<count> allowed_pairs(const Mask& mask, i32 first_q, i32 first_key,
                                                  Thread thread) {
  const i32 q = first_q + thread.column(), key = first_key + thread.row();
  AllowedPairs<count> allowed = {{0, 0}};
#pragma unroll 1
  for (i32 n = 0; n < count / 4; ++n) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      if (mask.allows(q + 8 * n + e % 2, key + 8 * (e / 2))) allowed.rows[e / 2] |= 1u << (2 * n + e % 2);
    }
  }
  return allowed;
}

}  // namespace flashgen

// The same door for arithmetic of numbers that lie in a word by twos.

#if !defined(FLASHGEN_EMULATOR)
#line 3 "flashgen/ptx/packed.cuh"
// Arithmetic of two 16-bit numbers in a word (sm_90).

namespace flashgen {

// Two products of packed numbers, rounded.
FLASHGEN_DEVICE u32 multiply_packed(bfloat16_t, u32 a, u32 b) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// The lower ones of two pairs of signed whole numbers.
FLASHGEN_DEVICE u32 minimum_packed(u32 a, u32 b) {
  u32 lower;
  asm("min.s16x2 %0, %1, %2;" : "=r"(lower) : "r"(a), "r"(b));
  return lower;
}

// All bits but the signs of those of two numbers that are infinite or NaN: times zero they are NaN of these
// bits, and all others zero.
FLASHGEN_DEVICE u32 not_finite_packed(bfloat16_t, u32 pair) {
  u32 bits;
  asm("fma.rn.bf16x2 %0, %1, %2, %2;" : "=r"(bits) : "r"(pair), "r"(0u));
  return bits;
}
FLASHGEN_DEVICE u32 not_finite_packed(half_t, u32 pair) {
  u32 bits;
  asm("fma.rn.f16x2 %0, %1, %2, %2;" : "=r"(bits) : "r"(pair), "r"(0u));
  return bits;
}

}  // namespace flashgen

#endif
// The same door for what Hopper adds: mbarriers, bulk copies, warpgroups, clusters, and grids that follow
// each other.

#if !defined(FLASHGEN_EMULATOR)
#line 3 "flashgen/ptx/barrier.cuh"
// Barriers that threads arrive at without waiting, or wait at without arriving (sm_90 and later, but for
// the named ones).

namespace flashgen {

// ---- Named barriers 1 to 15 of a block; 0 is block_sync's. Whole warps take part, `threads` in all.

FLASHGEN_DEVICE void named_barrier_sync(i32 barrier, i32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives and does not wait.
FLASHGEN_DEVICE void named_barrier_arrive(i32 barrier, i32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Waits, and tells whether the condition of any thread holds.
FLASHGEN_DEVICE bool named_barrier_any(i32 barrier, i32 threads, bool condition) {
  u32 any;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "barrier.cta.red.or.pred.aligned q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n}\n"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<u32>(condition))
      : "memory");
  return any != 0;
}

// ---- mbarriers: 8 bytes of shared memory. A phase ends when `count` threads have arrived and all the bytes
// that were announced have come; phases are told apart by their parity, that of the first one being 0.

FLASHGEN_DEVICE void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Its memory may hold something else from now on.
FLASHGEN_DEVICE void mbarrier_invalidate(u32 barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

FLASHGEN_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At a barrier of any block of the cluster, whose address is one of map_to_rank(). To release what was
// written is a fence for the whole GPU here: not for every step of a loop.
FLASHGEN_DEVICE void mbarrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Announces that `bytes` more will come in this phase.
FLASHGEN_DEVICE void mbarrier_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

FLASHGEN_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Whether the phase of this parity has ended; waits for a while before it says no.
FLASHGEN_DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 ended;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

// The same at once.
FLASHGEN_DEVICE bool mbarrier_test_wait(u32 barrier, u32 parity) {
  u32 ended;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

// Waiting for a while, and what threads of other blocks of the cluster did before they arrived is seen too.
FLASHGEN_DEVICE bool mbarrier_try_wait_cluster(u32 barrier, u32 parity) {
  u32 ended;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

FLASHGEN_DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

FLASHGEN_DEVICE void mbarrier_wait_cluster(u32 barrier, u32 parity) {
  while (!mbarrier_try_wait_cluster(barrier, parity)) {
  }
}

// ---- Fences

// Shows this thread's mbarrier_init to asynchronous copies and, after a barrier of the cluster, to its
// blocks.
FLASHGEN_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders ordinary accesses of this thread, and those it knows of, before later ones by bulk copies and wgmma.
FLASHGEN_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The same for shared memory alone.
FLASHGEN_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory alone, which is not waited for.
FLASHGEN_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace flashgen

#line 2 "flashgen/ptx/tensor_map.cuh"
// What bulk copies of boxes are told of a tensor.

namespace flashgen {

// A tensor in global memory and the box that is copied of it. The host makes it, and a kernel takes it in its
// __grid_constant__ parameters.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

}  // namespace flashgen

#line 4 "flashgen/ptx/bulk.cuh"
// Bulk copies: whole boxes and runs of bytes, moved by the copy engine (sm_90 and later). Loads end at an
// mbarrier, on which they count their bytes; stores and reductions in groups of the thread that issued them.
// Shared memory that they read must have been written before a fence_proxy_async of the writer.

namespace flashgen {

// ---- Boxes of tensors. Coordinates are elements, the first along the contiguous dimension, where
// a box begins at a multiple of 16 bytes: anywhere else is an illegal instruction. Boxes may
// reach out of the tensor on all sides, but one that is stored may not begin before it, and is
// clipped at whole 16 bytes: rows that are no multiple of that are written beyond their end.

FLASHGEN_DEVICE void tma_load_2d(u32 destination, const TensorMap* map, u32 barrier, i32 c0, i32 c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}

FLASHGEN_DEVICE void tma_load_3d(u32 destination, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

FLASHGEN_DEVICE void tma_load_4d(u32 destination, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2,
                                 i32 c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

FLASHGEN_DEVICE void tma_load_5d(u32 destination, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2,
                                 i32 c3, i32 c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Into the same place of every block of the cluster whose bit is set; each one's own barrier counts the
// bytes.

FLASHGEN_DEVICE void tma_load_2d_multicast(u32 destination, const TensorMap* map, u32 barrier, u16 blocks,
                                           i32 c0, i32 c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1)
      : "memory");
}

FLASHGEN_DEVICE void tma_load_3d_multicast(u32 destination, const TensorMap* map, u32 barrier, u16 blocks,
                                           i32 c0, i32 c1, i32 c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

FLASHGEN_DEVICE void tma_load_4d_multicast(u32 destination, const TensorMap* map, u32 barrier, u16 blocks,
                                           i32 c0, i32 c1, i32 c2, i32 c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

FLASHGEN_DEVICE void tma_load_5d_multicast(u32 destination, const TensorMap* map, u32 barrier, u16 blocks,
                                           i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// What lies outside of the tensor is not written.

FLASHGEN_DEVICE void tma_store_2d(const TensorMap* map, u32 source, i32 c0, i32 c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(source), "r"(c0), "r"(c1)
               : "memory");
}

FLASHGEN_DEVICE void tma_store_3d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(source), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

FLASHGEN_DEVICE void tma_store_4d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2, i32 c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

FLASHGEN_DEVICE void tma_store_5d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

FLASHGEN_DEVICE void tma_reduce_add_2d(const TensorMap* map, u32 source, i32 c0, i32 c1) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
          map),
      "r"(source), "r"(c0), "r"(c1)
      : "memory");
}

FLASHGEN_DEVICE void tma_reduce_add_3d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

FLASHGEN_DEVICE void tma_reduce_add_4d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2, i32 c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

FLASHGEN_DEVICE void tma_reduce_add_5d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2, i32 c3,
                                       i32 c4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];" ::"l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Brings the map itself closer.
FLASHGEN_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- Runs of bytes: a multiple of 16, between addresses that are.

FLASHGEN_DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

FLASHGEN_DEVICE void bulk_store(void* destination, u32 source, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source),
               "r"(bytes)
               : "memory");
}

FLASHGEN_DEVICE void bulk_reduce_add(float* destination, u32 source, u32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
      "r"(source), "r"(bytes)
      : "memory");
}

// ---- Groups of stores and reductions

FLASHGEN_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most `pending` groups are under way.
template <int pending>
FLASHGEN_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// Waits until all but `pending` groups have read shared memory; what they write may still be under way.
template <int pending>
FLASHGEN_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

}  // namespace flashgen

#line 3 "flashgen/ptx/cluster.cuh"
// Blocks of a cluster (sm_90 and later): who they are, their barrier, and each other's shared memory.

namespace flashgen {

FLASHGEN_DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

FLASHGEN_DEVICE u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Where the block of that rank has what this block has at `address` of its shared memory.
FLASHGEN_DEVICE u32 map_to_rank(u32 address, u32 rank) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// ---- The cluster's barrier. All threads arrive, then wait; those that have returned count as arrived. What
// a thread did before it arrived is done for whoever has waited.

FLASHGEN_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Orders nothing: tells only that this thread has come here.
FLASHGEN_DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

FLASHGEN_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- Shared memory of any block of the cluster, by addresses of map_to_rank

FLASHGEN_DEVICE u32 cluster_load(u32 address) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

FLASHGEN_DEVICE void cluster_load_x4(u32 (&values)[4], u32 address) {
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(address)
               : "memory");
}

FLASHGEN_DEVICE void cluster_store(u32 address, u32 value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

FLASHGEN_DEVICE void cluster_store_x4(u32 address, const u32 (&values)[4]) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values[0]),
               "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

}  // namespace flashgen

#line 3 "flashgen/ptx/grid.cuh"
// Blocks of a grid, and grids that follow each other: atomics and ordered accesses of global memory, and
// programmatic dependent launch.

namespace flashgen {

// ---- Atomic operations; additions give what was there before. They order nothing unless they say so.

FLASHGEN_DEVICE i32 atomic_add(i32* address, i32 value) {
  i32 before;
  asm volatile("atom.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

FLASHGEN_DEVICE u32 atomic_add(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

FLASHGEN_DEVICE float atomic_add(float* address, float value) {
  float before;
  asm volatile("atom.global.add.f32 %0, [%1], %2;" : "=f"(before) : "l"(address), "f"(value) : "memory");
  return before;
}

// The bits that are set stay set.
FLASHGEN_DEVICE void atomic_or(u32* address, u32 bits) {
  asm volatile("red.global.or.b32 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
}

// What this thread did before, or knows of by a barrier, is done for whoever acquires this value or a later
// one.
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

// No instruction: says that what follows waits for other blocks, so that all of them must be resident.
FLASHGEN_DEVICE void expect_cooperative_launch() {}

// ---- Programmatic dependent launch (sm_90 and later)

// Waits until the grids before this one are done and what they wrote can be read. Nothing of theirs may be
// touched earlier.
FLASHGEN_DEVICE void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next grid may start. It sees what this one writes, also afterwards, once it has waited.
FLASHGEN_DEVICE void griddep_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace flashgen

#line 3 "flashgen/ptx/warpgroup.cuh"
// Dividing the register file among warpgroups (sm_90a).

namespace flashgen {

// From now on each thread has `registers` of them, a multiple of 8 from 24 to 256. All warps of a warpgroup
// take part. An increase waits until other warpgroups have given up enough.
template <i32 registers>
FLASHGEN_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <i32 registers>
FLASHGEN_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace flashgen

#line 3 "flashgen/ptx/descriptor.cuh"
// How wgmma finds an operand in shared memory: a 64-bit descriptor, the same on a GPU and on a CPU.
//
// An operand is made of core matrices: eight rows of 16 bytes. A row is a line along the major dimension: K
// (the summed one) or MN. Swizzled by 32, 64 or 128 bytes, eight rows of that width lie one after another,
// and the hardware exchanges the 16-byte chunks of each line by its address. The two byte offsets then mean
//
//   swizzle    major   leading_bytes                       stride_bytes
//   none       k       next chunk of 16 bytes along K      next 8 rows along MN
//   none       mn      next 8 rows along K                 next chunk of 16 bytes along MN
//   32 to 128  k       not used (the chunks are adjacent)  next 8 rows along MN
//   32 to 128  mn      next line's width along MN          next 8 rows along K

namespace flashgen {

enum class Swizzle : u32 { none = 0, bytes_128 = 1, bytes_64 = 2, bytes_32 = 3 };

// The dimension along which elements are adjacent.
enum class Major : i32 { k = 0, mn = 1 };

struct MatrixDescriptor {
  u32 low;   // address and leading offset, in units of 16 bytes
  u32 high;  // stride offset, and the swizzle

  // The same operand `bytes` further on; the sum must stay within shared memory.
  constexpr MatrixDescriptor advanced(u32 bytes) const { return {low + (bytes >> 4), high}; }
  constexpr u64 bits() const { return static_cast<u64>(high) << 32 | low; }
};

// Within a cluster an address has the block's rank in its upper bits, which are not the descriptor's.
constexpr MatrixDescriptor encode_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes,
                                             Swizzle swizzle) {
  constexpr u32 mask = 0x3fff0;
  return {(address & mask) >> 4 | (leading_bytes & mask) << 12,
          (stride_bytes & mask) >> 4 | static_cast<u32>(swizzle) << 30};
}

}  // namespace flashgen

#line 4 "flashgen/ptx/wgmma.cuh"
// Matrix products of a warpgroup: four neighbouring warps, of which the first one's number is a multiple of 4
// (sm_90a).
//
// A product is issued, and its operands and accumulators are the hardware's until a wait completes the group
// that it was committed with. The left operand has 64 rows, the right one `n` columns; one product sums 32
// bytes of K. Thread t of the warpgroup holds in d[4j + 2h + c] row 16 (t / 32) + t % 32 / 4 + 8h, column
// 8j + 2 (t % 4) + c.

namespace flashgen {

// Orders what threads did to registers before what products do to them: needed before the first product, and
// again when accumulators or fragments of the left operand were touched.
FLASHGEN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

FLASHGEN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` groups are under way.
template <int pending>
FLASHGEN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// No instruction: what is done to the accumulators above stays above, what below stays below. Compilers do
// not know that a fence or a wait concerns these registers.
template <i32 count>
FLASHGEN_DEVICE void wgmma_pin(float (&d)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// What `value`, which is never negative, is made of is computed before the next wait. Assemblers let waits
// overtake arithmetic, which then no longer overlaps the products; they do not overtake stores, as this one
// would be, to `scratch` in shared memory, if the value were negative.
FLASHGEN_DEVICE void wgmma_compute_before_wait(float value, u32 scratch) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(value),
               "r"(scratch)
               : "memory");
}

FLASHGEN_DEVICE MatrixDescriptor matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes,
                                                   Swizzle swizzle) {
  return encode_descriptor(address, leading_bytes, stride_bytes, swizzle);
}

// The instruction's name from its depth on.
template <class T>
struct WgmmaType;
template <>
struct WgmmaType<half_t> {
  static constexpr char name[] = "k16.f32.f16.f16";
};
template <>
struct WgmmaType<bfloat16_t> {
  static constexpr char name[] = "k16.f32.bf16.bf16";
};
template <>
struct WgmmaType<e4m3_t> {
  static constexpr char name[] = "k32.f32.e4m3.e4m3";
};
template <>
struct WgmmaType<e5m2_t> {
  static constexpr char name[] = "k32.f32.e5m2.e5m2";
};

// What follows the operands: signs and, where the type allows a choice, which dimensions are adjacent.
template <bool has_majors, Major... majors>
struct WgmmaTail {
  static constexpr char text[] = ", 1, 1";
  static_assert(((majors == Major::k) && ...), "8-bit operands of wgmma must be K-major");
};
template <Major b>
struct WgmmaTail<true, b> {
  static constexpr char text[] = {',', '1', ',', '1', ',', '0' + static_cast<char>(b), 0};
};
template <Major a, Major b>
struct WgmmaTail<true, a, b> {
  static constexpr char text[] = {
      ',', '1', ',', '1', ',', '0' + static_cast<char>(a), ',', '0' + static_cast<char>(b), 0};
};
template <class T, Major... majors>
using WgmmaTailOf = WgmmaTail<sizeof(T) == 2, majors...>;

// An instruction must name each of its n / 2 accumulators, so there is one function for each n. The operands
// that follow the accumulators have the numbers from n / 2 on.
template <i32 n>
struct Wgmma {
  static_assert(n % 8 == 0 && n >= 8 && n <= 256, "wgmma has 8 to 256 columns, in steps of 8");
};

#define WGMMA_NAMES_8 "%0, %1, %2, %3"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %4, %5, %6, %7"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %8, %9, %10, %11"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", %12, %13, %14, %15"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %16, %17, %18, %19"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %20, %21, %22, %23"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %24, %25, %26, %27"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %28, %29, %30, %31"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %32, %33, %34, %35"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %36, %37, %38, %39"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %40, %41, %42, %43"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %44, %45, %46, %47"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", %48, %49, %50, %51"
#define WGMMA_NAMES_112 WGMMA_NAMES_104 ", %52, %53, %54, %55"
#define WGMMA_NAMES_120 WGMMA_NAMES_112 ", %56, %57, %58, %59"
#define WGMMA_NAMES_128 WGMMA_NAMES_120 ", %60, %61, %62, %63"
#define WGMMA_NAMES_136 WGMMA_NAMES_128 ", %64, %65, %66, %67"
#define WGMMA_NAMES_144 WGMMA_NAMES_136 ", %68, %69, %70, %71"
#define WGMMA_NAMES_152 WGMMA_NAMES_144 ", %72, %73, %74, %75"
#define WGMMA_NAMES_160 WGMMA_NAMES_152 ", %76, %77, %78, %79"
#define WGMMA_NAMES_168 WGMMA_NAMES_160 ", %80, %81, %82, %83"
#define WGMMA_NAMES_176 WGMMA_NAMES_168 ", %84, %85, %86, %87"
#define WGMMA_NAMES_184 WGMMA_NAMES_176 ", %88, %89, %90, %91"
#define WGMMA_NAMES_192 WGMMA_NAMES_184 ", %92, %93, %94, %95"
#define WGMMA_NAMES_200 WGMMA_NAMES_192 ", %96, %97, %98, %99"
#define WGMMA_NAMES_208 WGMMA_NAMES_200 ", %100, %101, %102, %103"
#define WGMMA_NAMES_216 WGMMA_NAMES_208 ", %104, %105, %106, %107"
#define WGMMA_NAMES_224 WGMMA_NAMES_216 ", %108, %109, %110, %111"
#define WGMMA_NAMES_232 WGMMA_NAMES_224 ", %112, %113, %114, %115"
#define WGMMA_NAMES_240 WGMMA_NAMES_232 ", %116, %117, %118, %119"
#define WGMMA_NAMES_248 WGMMA_NAMES_240 ", %120, %121, %122, %123"
#define WGMMA_NAMES_256 WGMMA_NAMES_248 ", %124, %125, %126, %127"

#define WGMMA_FOUR(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define WGMMA_REGISTERS_8(c) WGMMA_FOUR(c, 0)
#define WGMMA_REGISTERS_16(c) WGMMA_REGISTERS_8(c), WGMMA_FOUR(c, 4)
#define WGMMA_REGISTERS_24(c) WGMMA_REGISTERS_16(c), WGMMA_FOUR(c, 8)
#define WGMMA_REGISTERS_32(c) WGMMA_REGISTERS_24(c), WGMMA_FOUR(c, 12)
#define WGMMA_REGISTERS_40(c) WGMMA_REGISTERS_32(c), WGMMA_FOUR(c, 16)
#define WGMMA_REGISTERS_48(c) WGMMA_REGISTERS_40(c), WGMMA_FOUR(c, 20)
#define WGMMA_REGISTERS_56(c) WGMMA_REGISTERS_48(c), WGMMA_FOUR(c, 24)
#define WGMMA_REGISTERS_64(c) WGMMA_REGISTERS_56(c), WGMMA_FOUR(c, 28)
#define WGMMA_REGISTERS_72(c) WGMMA_REGISTERS_64(c), WGMMA_FOUR(c, 32)
#define WGMMA_REGISTERS_80(c) WGMMA_REGISTERS_72(c), WGMMA_FOUR(c, 36)
#define WGMMA_REGISTERS_88(c) WGMMA_REGISTERS_80(c), WGMMA_FOUR(c, 40)
#define WGMMA_REGISTERS_96(c) WGMMA_REGISTERS_88(c), WGMMA_FOUR(c, 44)
#define WGMMA_REGISTERS_104(c) WGMMA_REGISTERS_96(c), WGMMA_FOUR(c, 48)
#define WGMMA_REGISTERS_112(c) WGMMA_REGISTERS_104(c), WGMMA_FOUR(c, 52)
#define WGMMA_REGISTERS_120(c) WGMMA_REGISTERS_112(c), WGMMA_FOUR(c, 56)
#define WGMMA_REGISTERS_128(c) WGMMA_REGISTERS_120(c), WGMMA_FOUR(c, 60)
#define WGMMA_REGISTERS_136(c) WGMMA_REGISTERS_128(c), WGMMA_FOUR(c, 64)
#define WGMMA_REGISTERS_144(c) WGMMA_REGISTERS_136(c), WGMMA_FOUR(c, 68)
#define WGMMA_REGISTERS_152(c) WGMMA_REGISTERS_144(c), WGMMA_FOUR(c, 72)
#define WGMMA_REGISTERS_160(c) WGMMA_REGISTERS_152(c), WGMMA_FOUR(c, 76)
#define WGMMA_REGISTERS_168(c) WGMMA_REGISTERS_160(c), WGMMA_FOUR(c, 80)
#define WGMMA_REGISTERS_176(c) WGMMA_REGISTERS_168(c), WGMMA_FOUR(c, 84)
#define WGMMA_REGISTERS_184(c) WGMMA_REGISTERS_176(c), WGMMA_FOUR(c, 88)
#define WGMMA_REGISTERS_192(c) WGMMA_REGISTERS_184(c), WGMMA_FOUR(c, 92)
#define WGMMA_REGISTERS_200(c) WGMMA_REGISTERS_192(c), WGMMA_FOUR(c, 96)
#define WGMMA_REGISTERS_208(c) WGMMA_REGISTERS_200(c), WGMMA_FOUR(c, 100)
#define WGMMA_REGISTERS_216(c) WGMMA_REGISTERS_208(c), WGMMA_FOUR(c, 104)
#define WGMMA_REGISTERS_224(c) WGMMA_REGISTERS_216(c), WGMMA_FOUR(c, 108)
#define WGMMA_REGISTERS_232(c) WGMMA_REGISTERS_224(c), WGMMA_FOUR(c, 112)
#define WGMMA_REGISTERS_240(c) WGMMA_REGISTERS_232(c), WGMMA_FOUR(c, 116)
#define WGMMA_REGISTERS_248(c) WGMMA_REGISTERS_240(c), WGMMA_FOUR(c, 120)
#define WGMMA_REGISTERS_256(c) WGMMA_REGISTERS_248(c), WGMMA_FOUR(c, 124)

#define WGMMA_FROM_8 4, 5, 6, 7, WGMMA_FROM_16
#define WGMMA_FROM_16 8, 9, 10, 11, WGMMA_FROM_24
#define WGMMA_FROM_24 12, 13, 14, 15, WGMMA_FROM_32
#define WGMMA_FROM_32 16, 17, 18, 19, WGMMA_FROM_40
#define WGMMA_FROM_40 20, 21, 22, 23, WGMMA_FROM_48
#define WGMMA_FROM_48 24, 25, 26, 27, WGMMA_FROM_56
#define WGMMA_FROM_56 28, 29, 30, 31, WGMMA_FROM_64
#define WGMMA_FROM_64 32, 33, 34, 35, WGMMA_FROM_72
#define WGMMA_FROM_72 36, 37, 38, 39, WGMMA_FROM_80
#define WGMMA_FROM_80 40, 41, 42, 43, WGMMA_FROM_88
#define WGMMA_FROM_88 44, 45, 46, 47, WGMMA_FROM_96
#define WGMMA_FROM_96 48, 49, 50, 51, WGMMA_FROM_104
#define WGMMA_FROM_104 52, 53, 54, 55, WGMMA_FROM_112
#define WGMMA_FROM_112 56, 57, 58, 59, WGMMA_FROM_120
#define WGMMA_FROM_120 60, 61, 62, 63, WGMMA_FROM_128
#define WGMMA_FROM_128 64, 65, 66, 67, WGMMA_FROM_136
#define WGMMA_FROM_136 68, 69, 70, 71, WGMMA_FROM_144
#define WGMMA_FROM_144 72, 73, 74, 75, WGMMA_FROM_152
#define WGMMA_FROM_152 76, 77, 78, 79, WGMMA_FROM_160
#define WGMMA_FROM_160 80, 81, 82, 83, WGMMA_FROM_168
#define WGMMA_FROM_168 84, 85, 86, 87, WGMMA_FROM_176
#define WGMMA_FROM_176 88, 89, 90, 91, WGMMA_FROM_184
#define WGMMA_FROM_184 92, 93, 94, 95, WGMMA_FROM_192
#define WGMMA_FROM_192 96, 97, 98, 99, WGMMA_FROM_200
#define WGMMA_FROM_200 100, 101, 102, 103, WGMMA_FROM_208
#define WGMMA_FROM_208 104, 105, 106, 107, WGMMA_FROM_216
#define WGMMA_FROM_216 108, 109, 110, 111, WGMMA_FROM_224
#define WGMMA_FROM_224 112, 113, 114, 115, WGMMA_FROM_232
#define WGMMA_FROM_232 116, 117, 118, 119, WGMMA_FROM_240
#define WGMMA_FROM_240 120, 121, 122, 123, WGMMA_FROM_248
#define WGMMA_FROM_248 124, 125, 126, 127, WGMMA_FROM_256
#define WGMMA_FROM_256 128, 129, 130, 131, WGMMA_FROM_264
#define WGMMA_FROM_264 132, 133, 134, 135, WGMMA_FROM_272
#define WGMMA_FROM_272 136, 137, 138, 139, WGMMA_FROM_280
#define WGMMA_FROM_280 140, 141, 142, 143, WGMMA_FROM_288
#define WGMMA_FROM_288 144, 145, 146, 147, WGMMA_FROM_296
#define WGMMA_FROM_296 148, 149, 150, 151

#define WGMMA_TEXT(n, a, b, accumulate, type, tail)                                                       \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "%" #type \
  " {" WGMMA_NAMES_##n "}, " a ", %" #b ", p%" #tail ";\n}"

#define WGMMA_SS(function, c, n, i0, i1, i2, i3, i4)                                      \
  template <class Type, class Tail>                                                       \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], u64 a, u64 b, i32 accumulate) { \
    asm volatile(WGMMA_TEXT(n, "%" #i0, i1, i2, i3, i4)                                   \
                 : WGMMA_REGISTERS_##n(c)                                                 \
                 : "l"(a), "l"(b), "r"(accumulate), "C"(Type::name), "C"(Tail::text));    \
  }

#define WGMMA_RS(function, c, n, i0, i1, i2, i3, i4, i5, i6, i7)                                         \
  template <class Type, class Tail>                                                                      \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], const u32(&a)[4], u64 b, i32 accumulate) {     \
    asm volatile(WGMMA_TEXT(n, "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}", i4, i5, i6, i7)               \
                 : WGMMA_REGISTERS_##n(c)                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "C"(Type::name), \
                   "C"(Tail::text));                                                                     \
  }

#define WGMMA_SHAPE_AT(n, i0, i1, i2, i3, i4, i5, i6, i7, ...) \
  template <>                                                  \
  struct Wgmma<n> {                                            \
    WGMMA_SS(add_ss, "+f", n, i0, i1, i2, i3, i4)              \
    WGMMA_SS(set_ss, "=f", n, i0, i1, i2, i3, i4)              \
    WGMMA_RS(add_rs, "+f", n, i0, i1, i2, i3, i4, i5, i6, i7)  \
    WGMMA_RS(set_rs, "=f", n, i0, i1, i2, i3, i4, i5, i6, i7)  \
  };
#define WGMMA_EXPANDED(macro, ...) macro(__VA_ARGS__)
#define WGMMA_SHAPE(n) WGMMA_EXPANDED(WGMMA_SHAPE_AT, n, WGMMA_FROM_##n)

// A kernel may say which ones it uses, as compilers take some time for each.
#ifdef WGMMA_SHAPES
WGMMA_SHAPES(WGMMA_SHAPE)
#else
WGMMA_SHAPE(8)
WGMMA_SHAPE(16)
WGMMA_SHAPE(24)
WGMMA_SHAPE(32)
WGMMA_SHAPE(40)
WGMMA_SHAPE(48)
WGMMA_SHAPE(56)
WGMMA_SHAPE(64)
WGMMA_SHAPE(72)
WGMMA_SHAPE(80)
WGMMA_SHAPE(88)
WGMMA_SHAPE(96)
WGMMA_SHAPE(104)
WGMMA_SHAPE(112)
WGMMA_SHAPE(120)
WGMMA_SHAPE(128)
WGMMA_SHAPE(136)
WGMMA_SHAPE(144)
WGMMA_SHAPE(152)
WGMMA_SHAPE(160)
WGMMA_SHAPE(168)
WGMMA_SHAPE(176)
WGMMA_SHAPE(184)
WGMMA_SHAPE(192)
WGMMA_SHAPE(200)
WGMMA_SHAPE(208)
WGMMA_SHAPE(216)
WGMMA_SHAPE(224)
WGMMA_SHAPE(232)
WGMMA_SHAPE(240)
WGMMA_SHAPE(248)
WGMMA_SHAPE(256)
#endif
#line 268
// d = a * b, plus what d held if `accumulate`; both operands in shared memory.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b, bool accumulate) {
  Wgmma<n>::template add_ss<WgmmaType<T>, WgmmaTailOf<T, a_major, b_major>>(d, a.bits(), b.bits(),
                                                                            accumulate);
}

// d = a * b, where the compiler knows that nothing d held before matters.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_first(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b) {
  Wgmma<n>::template set_ss<WgmmaType<T>, WgmmaTailOf<T, a_major, b_major>>(d, a.bits(), b.bits(), 0);
}

// The same with the left operand in registers: those of mma_m16n8k16 (of mma_m16n8k32 for 8-bit types), each
// warp holding its 16 rows.
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs(float (&d)[n / 2], const u32 (&a)[4], MatrixDescriptor b, bool accumulate) {
  Wgmma<n>::template add_rs<WgmmaType<T>, WgmmaTailOf<T, b_major>>(d, a, b.bits(), accumulate);
}

template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs_first(float (&d)[n / 2], const u32 (&a)[4], MatrixDescriptor b) {
  Wgmma<n>::template set_rs<WgmmaType<T>, WgmmaTailOf<T, b_major>>(d, a, b.bits(), 0);
}

}  // namespace flashgen

#line 3 "flashgen/ptx/wgmma_fours.cuh"
// Four products of a warpgroup, one after another in the same accumulators, as one statement: compilers take
// more time for the accumulators that go into statements and come out of them than for all else about
// products. For kernels that say which shapes they use.

namespace flashgen {

template <i32 n>
struct WgmmaFours {
  static_assert(n == 0,
                "a kernel says which shapes it uses: #define WGMMA_SHAPES(shape) shape(64) shape(128)");
};

#define WGMMA_PRODUCT(n, a, b, type, tail) \
  "wgmma.mma_async.sync.aligned.m64n" #n "%" #type " {" WGMMA_NAMES_##n "}, " a ", %" #b ", p%" #tail ";\n"
#define WGMMA_BEGIN(accumulate) "{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate ", 0;\n"
// What follows adds to what was there.
#define WGMMA_ADD "setp.eq.b32 p, 0, 0;\n"
#define WGMMA_LEFT(i0, i1, i2, i3) "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}"
#define WGMMA_REGISTERS_OF(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

#define WGMMA_SS_FOUR(function, c, n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10)                           \
  template <class Type, class Tail>                                                                          \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], const u64(&a)[4], const u64(&b)[4],                \
                                       i32 accumulate) {                                                     \
    asm volatile(WGMMA_BEGIN(i8) WGMMA_PRODUCT(n, "%" #i0, i1, i9, i10)                                      \
                     WGMMA_ADD WGMMA_PRODUCT(n, "%" #i2, i3, i9, i10) WGMMA_PRODUCT(n, "%" #i4, i5, i9, i10) \
                         WGMMA_PRODUCT(n, "%" #i6, i7, i9, i10) "}"                                          \
                 : WGMMA_REGISTERS_##n(c)                                                                    \
                 : "l"(a[0]), "l"(b[0]), "l"(a[1]), "l"(b[1]), "l"(a[2]), "l"(b[2]), "l"(a[3]), "l"(b[3]),   \
                   "r"(accumulate), "C"(Type::name), "C"(Tail::text));                                       \
  }

#define WGMMA_RS_FOUR(function, c, n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i15, \
                      i16, i17, i18, i19, i20, i21, i22, ...)                                               \
  template <class Type, class Tail>                                                                         \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], const u32(&a)[4][4], const u64(&b)[4],            \
                                       i32 accumulate) {                                                    \
    asm volatile(WGMMA_BEGIN(i20) WGMMA_PRODUCT(n, WGMMA_LEFT(i0, i1, i2, i3), i16, i21, i22)               \
                     WGMMA_ADD WGMMA_PRODUCT(n, WGMMA_LEFT(i4, i5, i6, i7), i17, i21, i22)                  \
                         WGMMA_PRODUCT(n, WGMMA_LEFT(i8, i9, i10, i11), i18, i21, i22)                      \
                             WGMMA_PRODUCT(n, WGMMA_LEFT(i12, i13, i14, i15), i19, i21, i22) "}"            \
                 : WGMMA_REGISTERS_##n(c)                                                                   \
                 : WGMMA_REGISTERS_OF(a[3]), WGMMA_REGISTERS_OF(a[2]), WGMMA_REGISTERS_OF(a[1]),            \
                   WGMMA_REGISTERS_OF(a[0]), "l"(b[3]), "l"(b[2]), "l"(b[1]), "l"(b[0]), "r"(accumulate),   \
                   "C"(Type::name), "C"(Tail::text));                                                       \
  }

#define WGMMA_FOURS_AT(n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, ...)                  \
  template <>                                                                                \
  struct WgmmaFours<n> {                                                                     \
    WGMMA_SS_FOUR(add_ss, "+f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10)              \
    WGMMA_SS_FOUR(set_ss, "=f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10)              \
    WGMMA_RS_FOUR(add_rs, "+f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, __VA_ARGS__) \
  };
#define WGMMA_FOURS(n) WGMMA_EXPANDED(WGMMA_FOURS_AT, n, WGMMA_FROM_##n)

#ifdef WGMMA_SHAPES
WGMMA_SHAPES(WGMMA_FOURS)
#endif
#line 63
// d = the sum of four products a * b, plus what d held.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_four(float (&d)[n / 2], const MatrixDescriptor (&a)[4],
                                   const MatrixDescriptor (&b)[4]) {
  const u64 left[4] = {a[0].bits(), a[1].bits(), a[2].bits(), a[3].bits()};
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template add_ss<WgmmaType<T>, WgmmaTailOf<T, a_major, b_major>>(d, left, right, 1);
}

// The same where nothing d held before matters.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_first_four(float (&d)[n / 2], const MatrixDescriptor (&a)[4],
                                         const MatrixDescriptor (&b)[4]) {
  const u64 left[4] = {a[0].bits(), a[1].bits(), a[2].bits(), a[3].bits()};
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template set_ss<WgmmaType<T>, WgmmaTailOf<T, a_major, b_major>>(d, left, right, 0);
}

// With the left operands in registers, plus what d held if `accumulate`; the last product comes first.
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs_four(float (&d)[n / 2], const u32 (&a)[4][4], const MatrixDescriptor (&b)[4],
                                   bool accumulate) {
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template add_rs<WgmmaType<T>, WgmmaTailOf<T, b_major>>(d, a, right, accumulate);
}

}  // namespace flashgen

#endif
#line 4 "flashgen/panel.cuh"
// Tiles as the copy engine writes them and wgmma reads them: panels of 128-byte rows, one panel after
// another, each swizzled by 128 bytes (chunk c of row r lies at c ^ (r % 8)).

namespace flashgen {

constexpr i32 kWarpgroupSize = 128;
constexpr i32 kWarpgroupRows = 64;
// ... and of each of its warps.
constexpr i32 kWarpRows = 16;
constexpr i32 kPanelBytes = 128;
// Eight swizzled rows: what repeats, and what tiles are aligned to.
constexpr i32 kSwizzleBytes = 8 * kPanelBytes;

// rows x cols elements of T at `address`; the last panel may be wider than what is left of the columns.
template <class T, i32 rows_, i32 cols_>
struct PanelTile {
  using Element = T;
  static constexpr i32 rows = rows_;
  static constexpr i32 cols = cols_;
  static constexpr i32 panel_cols = kPanelBytes / static_cast<i32>(sizeof(T));
  static constexpr i32 panels = ceil_div(cols, panel_cols);
  // From one panel to the next; `rows` are all that there are, also in a part of a tile.
  static constexpr i32 panel_stride = rows * kPanelBytes;
  static constexpr i32 bytes = panels * panel_stride;
  // Steps of a product along the columns, 32 bytes each, and how many of them a panel holds.
  static constexpr i32 steps = cols * static_cast<i32>(sizeof(T)) / 32;
  static constexpr i32 panel_steps = 4;

  u32 address;

  FLASHGEN_DEVICE PanelTile slot(i32 index) const { return {address + static_cast<u32>(index * bytes)}; }
  // The rows from `row` on, a multiple of eight so that the swizzle stays in step.
  FLASHGEN_DEVICE PanelTile from_row(i32 row) const {
    return {address + static_cast<u32>(row * kPanelBytes)};
  }

  // A panel by itself, as an operand whose rows are summed over.
  FLASHGEN_DEVICE PanelTile panel(i32 index) const {
    return {address + static_cast<u32>(index * panel_stride)};
  }

  // The tile's rows from `row` on of one head of one sequence; `barrier` counts `bytes`.
  FLASHGEN_DEVICE void load(const TensorMap& map, u32 barrier, i32 row, i32 head, i32 sequence) const {
#pragma unroll
    for (i32 p = 0; p < panels; ++p)
      tma_load_4d(address + p * panel_stride, &map, barrier, p * panel_cols, row, head, sequence);
  }
  // Boxes of as many rows as the map says; what lies beyond the tensor is left out.
  FLASHGEN_DEVICE void store(const TensorMap& map, i32 row, i32 head, i32 sequence) const {
#pragma unroll
    for (i32 p = 0; p < panels; ++p)
      tma_store_4d(&map, address + p * panel_stride, p * panel_cols, row, head, sequence);
  }

  // As an operand whose columns are summed over: step s begins `along_columns(s)` bytes further on.
  FLASHGEN_DEVICE MatrixDescriptor by_columns() const {
    return matrix_descriptor(address, 16, kSwizzleBytes, Swizzle::bytes_128);
  }
  static constexpr u32 along_columns(i32 step) {
    return static_cast<u32>(step / panel_steps * panel_stride + step % panel_steps * 32);
  }
  // As an operand whose rows are summed over, sixteen at a step.
  FLASHGEN_DEVICE MatrixDescriptor by_rows() const {
    return matrix_descriptor(address, panel_stride, kSwizzleBytes, Swizzle::bytes_128);
  }
  static constexpr u32 along_rows(i32 step) { return static_cast<u32>(step * 16 * kPanelBytes); }

  // The 16-byte chunk of a row, for ldmatrix and stmatrix.
  FLASHGEN_DEVICE u32 chunk_at(i32 row, i32 chunk) const {
    return address + static_cast<u32>(chunk / 8 * panel_stride + row * kPanelBytes +
                                      (((chunk % 8) ^ (row % 8)) * kChunkBytes));
  }
  // Where a lane's chunk lies when a warp stores 16 rows from `row` on, a multiple of eight, two chunks of
  // each at a time; of the first two, and of two that are 2 n further on. Swizzling exchanges chunks by bits
  // of their number: one tells which of two is the lane's, the others which two they are. Signs would cost
  // instructions, and a lane's number has none.
  FLASHGEN_DEVICE u32 first_chunk(i32 row, Thread thread) const {
    const u32 lane = static_cast<u32>(thread.lane), r = lane % 16;
    return address + static_cast<u32>(row * kPanelBytes) + r * kPanelBytes +
           ((lane / 16 ^ r % 8) * kChunkBytes);
  }
  // The first of a lane's chunks of 16 rows from the first on, if these are columns of a right operand.
  FLASHGEN_DEVICE u32 first_transposed_chunk(Thread thread) const {
    const u32 lane = static_cast<u32>(thread.lane), r = lane % 8;
    return address + (r + lane / 16 * 8) * kPanelBytes + ((lane / 8 % 2 ^ r) * kChunkBytes);
  }
  static constexpr u32 chunk_after(u32 first, i32 n) {
    return (first ^ static_cast<u32>(2 * n % 8 * kChunkBytes)) + static_cast<u32>(n / 4 * panel_stride);
  }
};

// The same tile for ordinary accesses, where shared memory begins at `base`.
template <class Tile>
struct SharedPanels {
  using T = typename Tile::Element;
  u8* base;
  Tile tile;

  FLASHGEN_DEVICE Vec16 chunk(i32 row, i32 chunk) const {
    return *reinterpret_cast<const Vec16*>(at(row, chunk));
  }
  FLASHGEN_DEVICE T& at_element(i32 row, i32 column) const {
    constexpr i32 elements = kChunkBytes / static_cast<i32>(sizeof(T));
    return reinterpret_cast<T*>(at(row, column / elements))[column % elements];
  }
  FLASHGEN_DEVICE float element(i32 row, i32 column) const { return to_float(at_element(row, column)); }
  FLASHGEN_DEVICE void set_element(i32 row, i32 column, float value) const {
    at_element(row, column) = T{static_cast<u16>(pack(T{}, value, 0.0f))};
  }

 private:
  FLASHGEN_DEVICE u8* at(i32 row, i32 chunk) const {
    return base + (tile.chunk_at(row, chunk) - shared_address(base));
  }
};

// A warpgroup's share of a product with n columns: 64 rows, 16 of them each warp's.
template <i32 n>
using Strip = float[n / 2];
template <i32 n>
using StripBlocks = Accumulator<1, n / 8>;

// The same registers as one row of blocks of 16 x 8.
template <i32 count>
FLASHGEN_DEVICE StripBlocks<2 * count>& blocks_of(float (&strip)[count]) {
  return reinterpret_cast<StripBlocks<2 * count>&>(strip);
}

template <i32 count>
FLASHGEN_DEVICE void clear(float (&strip)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] = 0.0f;
}

// Rounded to T, in pairs, as the left operand of a product that sums over the n columns.
template <i32 n>
using Rounded = u32[n / 16][4];

// The operands of the next product take the place of those of one that has been waited for. Assemblers would
// write them to that place at once, while it is still being read, but for the sign of a number that is not
// negative, which they do not know.
template <i32 count>
FLASHGEN_DEVICE void take_over(u32 (&operands)[count][4], const u32 (&next)[count][4], i32 not_negative) {
  const u32 zero = static_cast<u32>(not_negative) & 0x80000000u;
#pragma unroll
  for (i32 i = 0; i < 4 * count; ++i) operands[i / 4][i % 4] = next[i / 4][i % 4] ^ zero;
}

// Issues sums += A B^T, of 64 rows of A: a sum over columns of both.
template <class A, class B>
FLASHGEN_DEVICE void issue_over_columns(Strip<B::rows>& sums, A a, B b) {
  using T = typename A::Element;
  const MatrixDescriptor left = a.by_columns(), right = b.by_columns();
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < A::steps; ++step) {
    wgmma_ss<T, B::rows>(sums, left.advanced(A::along_columns(step)), right.advanced(B::along_columns(step)),
                         true);
  }
  wgmma_commit();
}

// Issues sums = A^T B, of 64 columns of A and n columns of B, a panel of each: a sum over rows of both.
template <i32 n, class A, class B>
FLASHGEN_DEVICE void issue_over_rows(Strip<n>& sums, A a, B b) {
  using T = typename A::Element;
  static_assert(A::rows == B::rows, "rows of one meet rows of the other");
  const MatrixDescriptor left = a.by_rows(), right = b.by_rows();
  wgmma_fence();
  wgmma_ss_first<T, n, Major::mn, Major::mn>(sums, left, right);
#pragma unroll
  for (i32 step = 1; step < A::rows / 16; ++step) {
    wgmma_ss<T, n, Major::mn, Major::mn>(sums, left.advanced(A::along_rows(step)),
                                         right.advanced(B::along_rows(step)), true);
  }
  wgmma_commit();
}

// Issues out += P V, or out = P V where it is not to be `kept`, of 64 rows of P in registers.
template <class VTile>
FLASHGEN_DEVICE void issue_output(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities, VTile v,
                                  bool kept = true) {
  using T = typename VTile::Element;
  const MatrixDescriptor right = v.by_rows();
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < VTile::rows / 16; ++step) {
    wgmma_rs<T, VTile::cols, Major::mn>(out, probabilities[step], right.advanced(VTile::along_rows(step)),
                                        step > 0 || kept);
  }
  wgmma_commit();
}

}  // namespace flashgen

#line 3 "flashgen/stream.cuh"
// Streaming tiles between global and shared memory.

namespace flashgen {

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
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) chunk.words[i / 2] |= static_cast<u32>(source[i].bits) << (16 * (i % 2));
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

// Brings one tile of rows after another from global to shared memory, all threads of the block together. With
// asynchronous copies the data goes straight to shared memory; without, fetch() reads into registers and
// land() writes them, so that the trip to global memory overlaps whatever is computed in between. Rows and
// columns that do not exist arrive as zeros.
template <class Tile, i32 threads, i32 head_dim, i32 access_bytes, bool asynchronous>
struct TileStream {
  using T = typename Tile::Element;
  static constexpr i32 count = Tile::rows * Tile::chunks;
  static constexpr i32 per_thread = ceil_div(count, threads);
  static_assert(!asynchronous || access_bytes >= 4, "asynchronous copies move at least 4 bytes");
  // Where a thread's chunks lie below one another, the swizzle the same for all, one address serves them all.
  static constexpr i32 rows_apart = threads / Tile::chunks;
  static constexpr bool stacked = threads % Tile::chunks == 0 && rows_apart % 8 == 0 && count % threads == 0;

  i64 stride;
  // The next tile: its first row (stacked: this thread's first chunk of it), and how many rows there are from
  // there on.
  const T* next;
  i32 rows_left;
  Vec16 staged[asynchronous ? 1 : per_thread];

  FLASHGEN_DEVICE TileStream(GlobalRows<const T> source, i32 first_row, Thread thread)
      : stride(source.stride) {
    seek(source, first_row, thread);
  }

  FLASHGEN_DEVICE void seek(GlobalRows<const T> source, i32 first_row, Thread thread) {
    if constexpr (stacked) {
      const i32 row = first_row + thread.index() / Tile::chunks;
      next = source.at(row, thread.index() % Tile::chunks * Tile::chunk_elements);
      rows_left = source.row_count - row;
    } else {
      next = source.at(first_row, 0);
      rows_left = source.row_count - first_row;
    }
  }

  // Leaves out the next `tiles` tiles.
  FLASHGEN_DEVICE void skip(i32 tiles) {
    next += static_cast<i64>(tiles) * Tile::rows * stride;
    rows_left -= tiles * Tile::rows;
  }

  // Starts the next tile's way into `tile`.
  FLASHGEN_DEVICE void fetch(Tile tile, Thread thread) {
    if constexpr (stacked) {
      const i32 chunk = thread.index() % Tile::chunks;
      const i32 columns = head_dim - chunk * Tile::chunk_elements;
      u8* const to = tile.chunk_at(thread.index() / Tile::chunks, chunk);
#pragma unroll
      for (i32 i = 0; i < per_thread; ++i) {
        fetch_one(i, to + i * rows_apart * Tile::row_bytes, next, i * rows_apart < rows_left ? columns : 0);
        next += rows_apart * stride;
      }
    } else {
#pragma unroll
      for (i32 i = 0; i < per_thread; ++i) {
        const i32 index = thread.index() + i * threads, row = index / Tile::chunks,
                  chunk = index % Tile::chunks;
        if (index >= count) break;
        const i32 columns = row < rows_left ? head_dim - chunk * Tile::chunk_elements : 0;
        fetch_one(i, tile.chunk_at(row, chunk), next + row * stride + chunk * Tile::chunk_elements, columns);
      }
      next += Tile::rows * stride;
    }
    rows_left -= Tile::rows;
  }

  FLASHGEN_DEVICE void land(Tile tile, Thread thread) const {
    if constexpr (!asynchronous) {
#pragma unroll
      for (i32 i = 0; i < per_thread; ++i) {
        const i32 index = thread.index() + i * threads;
        if (index < count) tile.vector_at(index / Tile::chunks, index % Tile::chunks) = staged[i];
      }
    }
  }

 private:
  // A chunk without columns reads nothing: where `from` then points does not matter.
  FLASHGEN_DEVICE void fetch_one(i32 i, u8* to, const T* from, i32 columns) {
    if constexpr (asynchronous) {
      copy_chunk_async<T, access_bytes>(shared_address(to), from, columns);
    } else {
      staged[i] = read_chunk<T, access_bytes>(from, columns);
    }
  }
};

// Marks the copies issued so far as one group, and waits until at most `pending` groups are under way.
template <bool asynchronous>
FLASHGEN_DEVICE void commit_copies() {
  if constexpr (asynchronous) cp_async_commit();
}
template <bool asynchronous, i32 pending>
FLASHGEN_DEVICE void wait_for_copies() {
  if constexpr (asynchronous) cp_async_wait<pending>();
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

}  // namespace flashgen

#line 4 "flashgen/strip.cuh"
// Results of a warpgroup on their way to memory.

namespace flashgen {

// Puts a warp's 16 rows of a strip into the tile, from `row` on, multiplied by `scale`: rows row() and
// row() + 8 of the lanes have a factor each.
template <class Tile>
FLASHGEN_DEVICE void store_strip(Tile tile, i32 row, const Strip<Tile::cols>& strip, const float (&scale)[2],
                                 Thread thread) {
  using T = typename Tile::Element;
  const float low = scale[0], high = scale[1];
  const u32 first = tile.first_chunk(row, thread);
#pragma unroll
  for (i32 n = 0; n < Tile::cols / 16; ++n) {
    const float* const o = strip + 8 * n;
    const u32 words[4] = {pack(T{}, o[0] * low, o[1] * low), pack(T{}, o[2] * high, o[3] * high),
                          pack(T{}, o[4] * low, o[5] * low), pack(T{}, o[6] * high, o[7] * high)};
    stmatrix_x4(Tile::chunk_after(first, n), words);
  }
}

// The lanes of a quad hold word k of their own columns in words[k]; afterwards lane q of the quad holds all
// four words of what was everyone's words[q].
FLASHGEN_DEVICE void transpose_quad(u32 (&words)[4], Thread thread) {
#pragma unroll
  for (i32 bit = 1; bit < 4; bit *= 2) {
    const bool upper = thread.lane & bit;
#pragma unroll
    for (i32 pair = 0; pair < 2; ++pair) {
      const i32 i = bit == 1 ? 2 * pair : pair, j = i + bit;
      const u32 sent = upper ? words[i] : words[j];
      const u32 received = bits_of(shuffle_xor(float_of(sent), bit));
      words[i] = upper ? received : words[i];
      words[j] = upper ? words[j] : received;
    }
  }
}

// Writes a warp's 16 rows, from `row` on, to global memory.
template <class T, i32 columns>
FLASHGEN_DEVICE void write_strip(GlobalRows<T> rows_of, i32 row, const Strip<columns>& strip,
                                 const float (&scale)[2], Thread thread) {
  static_assert(columns % 32 == 0, "a quad of lanes writes 32 columns at once");
  // As many chunks at a time as registers surely allow.
  constexpr i32 chunks = columns / 32, together = chunks % 4 == 0   ? 4
                                                  : chunks % 3 == 0 ? 3
                                                  : chunks % 2 == 0 ? 2
                                                                    : 1;
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 mine = row + 8 * h + thread.row();
    Vec16* const target = reinterpret_cast<Vec16*>(rows_of.at(mine, 8 * (thread.lane % 4)));
#pragma unroll
    for (i32 first = 0; first < chunks; first += together) {
      Vec16 made[together];
#pragma unroll
      for (i32 g = 0; g < together; ++g) {
#pragma unroll
        for (i32 k = 0; k < 4; ++k) {
          const float* const o = strip + 4 * (4 * (first + g) + k) + 2 * h;
          made[g].words[k] = pack(T{}, o[0] * scale[h], o[1] * scale[h]);
        }
        transpose_quad(made[g].words, thread);
      }
      if (mine >= rows_of.row_count) continue;
#pragma unroll
      for (i32 g = 0; g < together; ++g) target[4 * (first + g)] = made[g];
    }
  }
}

}  // namespace flashgen

#line 4 "flashgen/backward_chunks.cuh"
// A step of the backward pass in chunks: 32 queries of what a warp computes are the left operand of one part
// of a product, which runs while the next chunk is computed.

namespace flashgen {

// Steps of a product that make a chunk, of 16 queries each.
constexpr i32 kChunkSteps = 2;
constexpr i32 chunks_of(i32 queries) { return queries / (16 * kChunkSteps); }

// Calls `compute(i)` for each of a lane's elements of a chunk.
template <class Compute>
FLASHGEN_DEVICE void for_chunk(i32 chunk, const Compute& compute) {
#pragma unroll
  for (i32 i = 8 * kChunkSteps * chunk; i < 8 * kChunkSteps * (chunk + 1); ++i) compute(i);
}

// Rounds pairs of neighbours along a row.
template <class T, i32 count>
FLASHGEN_DEVICE void round_chunk(u32 (&rounded)[count / 8][4], const float (&strip)[count], i32 chunk) {
#pragma unroll
  for (i32 i = 4 * kChunkSteps * chunk; i < 4 * kChunkSteps * (chunk + 1); ++i)
    rounded[i / 4][i % 4] = pack(T{}, strip[2 * i], strip[2 * i + 1]);
}

// dS = P (dP - D) of a chunk, of P rounded.
template <i32 count>
FLASHGEN_DEVICE void multiply_chunk(bfloat16_t, u32 (&ds)[count / 8][4], const float (&dp)[count],
                                    const u32 (&p)[count / 8][4], i32 chunk) {
#pragma unroll
  for (i32 i = 4 * kChunkSteps * chunk; i < 4 * kChunkSteps * (chunk + 1); ++i)
    ds[i / 4][i % 4] =
        multiply_packed(bfloat16_t{}, pack(bfloat16_t{}, dp[2 * i], dp[2 * i + 1]), p[i / 4][i % 4]);
}

// Issues the chunk's part of O += P V, which is a group of its own.
template <class VTile>
FLASHGEN_DEVICE void issue_chunk(Strip<VTile::cols>& out, const Rounded<VTile::rows>& left, VTile v,
                                 i32 chunk) {
  using T = typename VTile::Element;
  const MatrixDescriptor right = v.by_rows();
  wgmma_fence();
#pragma unroll
  for (i32 step = kChunkSteps * chunk; step < kChunkSteps * (chunk + 1); ++step)
    wgmma_rs<T, VTile::cols, Major::mn>(out, left[step], right.advanced(VTile::along_rows(step)), true);
  wgmma_commit();
}

// A warp's 16 rows of a tile, from `row` on, as a left operand in registers.
template <class Tile>
FLASHGEN_DEVICE void load_operand(u32 (&operand)[Tile::steps][4], Tile tile, i32 row, Thread thread) {
#pragma unroll
  for (i32 step = 0; step < Tile::steps; ++step)
    ldmatrix_x4(operand[step], tile.chunk_at(row + thread.lane % 16, 2 * step + thread.lane / 16));
}

// Issues sums += A B^T, of 64 rows of A in registers: a sum over columns of both.
template <class B>
FLASHGEN_DEVICE void issue_held(Strip<B::rows>& sums, const u32 (&a)[B::steps][4], B b) {
  using T = typename B::Element;
  const MatrixDescriptor right = b.by_columns();
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < B::steps; ++step)
    wgmma_rs<T, B::rows>(sums, a[step], right.advanced(B::along_columns(step)), true);
  wgmma_commit();
}

// Issues half of the steps of sums += A B^T, which is a group of its own.
template <class A, class B>
FLASHGEN_DEVICE void issue_half(Strip<B::rows>& sums, A a, B b, i32 half) {
  using T = typename A::Element;
  const MatrixDescriptor left = a.by_columns(), right = b.by_columns();
  wgmma_fence();
#pragma unroll
  for (i32 step = half * A::steps / 2; step < (half + 1) * A::steps / 2; ++step) {
    wgmma_ss<T, B::rows>(sums, left.advanced(A::along_columns(step)), right.advanced(B::along_columns(step)),
                         true);
  }
  wgmma_commit();
}

// Puts a chunk of dS of a warp's 16 keys, from `row` on, into the tile.
template <class DSTile>
FLASHGEN_DEVICE void store_chunk(DSTile tile, i32 row, const Rounded<DSTile::cols>& ds, i32 chunk,
                                 Thread thread) {
  const u32 first = tile.first_chunk(row, thread);
#pragma unroll
  for (i32 n = kChunkSteps * chunk; n < kChunkSteps * (chunk + 1); ++n)
    stmatrix_x4(DSTile::chunk_after(first, n), ds[n]);
}

}  // namespace flashgen

#line 4 "flashgen/listed.cuh"
// What the producer tells of a tile, where it chooses which ones come, and what the mask makes of it.

namespace flashgen {

// It lies beside a slot of a ring. Of each warp one lane reads it and hands it to the others, the one that
// gives the slot back: what many had read would be in order only by way of their warp, and then of that lane.
struct alignas(8) ListedTile {
  i32 tile;
  // Bit 0: whether it is the last one. What the others mean is the kernel's.
  u32 facts;

  FLASHGEN_DEVICE static ListedTile of(i32 tile, bool is_last, u32 facts) {
    return {tile, facts << 1 | static_cast<u32>(is_last)};
  }
  // All lanes of a warp call, and get the same.
  FLASHGEN_DEVICE static ListedTile read(const ListedTile& slot, Thread thread) {
    ListedTile read = {};
    if (thread.lane == 0) read = slot;
    return {shuffle(read.tile, 0), static_cast<u32>(shuffle(static_cast<i32>(read.facts), 0))};
  }

  FLASHGEN_DEVICE bool is_last() const { return (facts & 1u) != 0; }
  FLASHGEN_DEVICE u32 others() const { return facts >> 1; }
  FLASHGEN_DEVICE bool has(i32 fact) const { return (others() >> fact & 1u) != 0; }
};

}  // namespace flashgen

#line 3 "flashgen/walk.cuh"
// Walking over the tiles that a mask does not rule out.
//
// A mask says which pairs of a query and a key are allowed. Kernels ask it five things:
//
//     Mask::has_holes                       whether a tile within the ranges below may hold no allowed pair
//     key_tiles(q_begin, q_end, tile)       the tiles of keys that some query of the range may attend to
//     query_tiles(k_begin, k_end, tile)     the tiles of queries that may attend to some key of the range
//     is_empty(q_begin, q_end, k_begin, k_end), is_full(...)   whether no pair, every pair is allowed
//     allows(q, k)                          whether one pair is allowed

namespace flashgen {

// The tiles of a range, one after another; those for which `visited(tile)` is false are left out. A walk
// starts before its first tile. The lanes of a warp look at 32 tiles at once, some perhaps beyond the last:
// all of them call, and get the same.
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
  // The lane that has looked at the tile.
  FLASHGEN_DEVICE i32 lane() const { return (tile - group) % kWarpSize; }

  // Goes on to the next tile; returns how many tiles were left out before it.
  template <class Visited>
  FLASHGEN_DEVICE i32 advance(Thread thread, const Visited& visited) {
    if constexpr (has_holes) {
      const i32 before = tile;
      while (others == 0 && group + kWarpSize < end) {
        group += kWarpSize;
        const i32 candidate = group + thread.lane;
        const bool is_visited = visited(candidate);
        others = warp_ballot(candidate < end && is_visited);
      }
      tile = others != 0 ? group + lowest_bit(others) : end;
      others &= others - 1;
      return tile - before - 1;
    } else {
      ++tile;
      return 0;
    }
  }
};

}  // namespace flashgen

#line 3 "flashgen/query_walk.cuh"
// Walking over the tiles of queries of a group of heads, for kernels that keep a tile of keys.

namespace flashgen {

// A step of the loop over the query tiles of a group of heads: a tile of a member of the group.
struct Step {
  i32 member;
  i32 tile;
};

// Goes over the steps: for each member of the group, those tiles of queries of which some query may attend to
// a key of [k_begin, k_end). `mask_of(member)` is the mask of a head of the group.
template <class Mask, i32 tile_q>
struct QueryWalk {
  i32 k_begin, k_end;
  i32 members;
  i32 member;
  Walk<Mask::has_holes> tiles;

  FLASHGEN_DEVICE QueryWalk(i32 k_begin_, i32 k_end_, i32 members_)
      : k_begin(k_begin_), k_end(k_end_), members(members_), member(-1), tiles(Range{0, -1}) {}

  FLASHGEN_DEVICE bool over() const { return member >= members; }
  FLASHGEN_DEVICE Step step() const { return {member, tiles.tile}; }

  template <class MaskOf>
  FLASHGEN_DEVICE void start(Thread thread, const MaskOf& mask_of) {
    advance(thread, mask_of);
  }
  template <class MaskOf>
  FLASHGEN_DEVICE void advance(Thread thread, const MaskOf& mask_of) {
    // The question to the mask stands here once: it is long.
    while (true) {
      if (member >= 0) go_on(thread, mask_of);
      if (!tiles.over() || ++member >= members) return;
      tiles = Walk<Mask::has_holes>(mask_of(member).query_tiles(k_begin, k_end, tile_q));
    }
  }

 private:
  template <class MaskOf>
  FLASHGEN_DEVICE void go_on(Thread thread, const MaskOf& mask_of) {
    const Mask mask = mask_of(member);
    tiles.advance(thread, [&](i32 tile) {
      return !mask.is_empty(tile * tile_q, smaller((tile + 1) * tile_q, mask.len_q), k_begin, k_end);
    });
  }
};

// A band is the same for every head, and its tiles follow one another: this walk is two counters.
template <bool has_lower, bool has_upper, i32 tile_q>
struct QueryWalk<Band<has_lower, has_upper>, tile_q> {
  i32 k_begin, k_end;
  i32 left;
  i32 member;
  Range tiles;
  i32 tile;

  FLASHGEN_DEVICE QueryWalk(i32 k_begin_, i32 k_end_, i32 members_)
      : k_begin(k_begin_), k_end(k_end_), left(members_), member(0) {}

  FLASHGEN_DEVICE bool over() const { return left == 0; }
  FLASHGEN_DEVICE Step step() const { return {member, tile}; }

  template <class MaskOf>
  FLASHGEN_DEVICE void start(Thread /*thread*/, const MaskOf& mask_of) {
    tiles = mask_of(0).query_tiles(k_begin, k_end, tile_q);
    left *= tiles.size();
    tile = tiles.begin;
  }
  // Of a walk that has just started, one of several parts that are as long as one another, but for a step.
  FLASHGEN_DEVICE void take_part(i32 part, i32 parts) {
    const i32 first = left * part / parts;
    left = left * (part + 1) / parts - first;
    member = first / tiles.size();
    tile = tiles.begin + first - member * tiles.size();
  }
  template <class MaskOf>
  FLASHGEN_DEVICE void advance(Thread /*thread*/, const MaskOf& /*mask_of*/) {
    --left;
    if (++tile == tiles.end) {
      tile = tiles.begin;
      ++member;
    }
  }
};

}  // namespace flashgen

#line 3 "flashgen/score.cuh"
// Scores: what becomes of logits before the softmax.

namespace flashgen {

// Blocks of eight columns whose scores are computed together.
constexpr i32 kBlocksAtOnce = 4;

struct ScoreAndSlope {
  float value;
  float slope;
};

// A score is asked for pairs of which the first one is told in full, and others by how far they are from it:
//
//     Score::First                       a pair, with all that takes long to find out
//     first_at(q, k)                     it
//     value(s, first, row, column)       the score; of numbers that the compiler knows, row and column
//     value_and_slope(s, first, row, column)
//     Score::has_near                    whether it is cheaper for some logits, of which
//     is_near(square(s, first, row, column))
//                                        tells, also of the largest of some squares, whether they are, and
//     value<true>(...)                   then is the same number as value(...)

// Turns products Q K^T into scores; the warp's block begins at (first_q, first_key). `pairs`, if given, tells
// what a lane's pairs read of captured tensors. Where functions are cheaper near zero, they are so for groups
// of blocks of columns that are near it altogether.
template <class Score, i32 row_blocks, i32 column_blocks, class... Pairs>
FLASHGEN_DEVICE void change_scores(Accumulator<row_blocks, column_blocks>& products, const Score& score,
                                   float scale, i32 first_q, i32 first_key, Thread thread,
                                   const Pairs&... pairs) {
  constexpr i32 at_once = Score::has_near ? kBlocksAtOnce : column_blocks;
  const typename Score::First first = score.first_at(first_q + thread.row(), first_key + thread.column());
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 group = 0; group < column_blocks; group += at_once) {
      // Calls `use` with each logit and how its pair is told.
      const auto for_each = [&](const auto& use) {
#pragma unroll
        for (i32 n = group; n < smaller(group + at_once, column_blocks); ++n) {
#pragma unroll
          for (i32 e = 0; e < 4; ++e)
            use(products[m][n][e], 16 * m + 8 * (e / 2), 8 * n + e % 2, pairs.at(e / 2, n, e % 2)...);
        }
      };
      const auto compute = [&](float& s, i32 row, i32 column, const auto&... pair) {
        s = score.value(s * scale, first, row, column, pair...);
      };
      if constexpr (Score::has_near) {
        float square = 0.0f;
        for_each([&](float s, i32 row, i32 column, const auto&... pair) {
          square = maximum(square, score.square(s * scale, first, row, column, pair...));
        });
        if (warp_any(!score.is_near(square))) {
          for_each(compute);
        } else {
          for_each([&](float& s, i32 row, i32 column, const auto&... pair) {
            s = score.template value<true>(s * scale, first, row, column, pair...);
          });
        }
      } else {
        for_each(compute);
      }
    }
  }
}

// Turns products into probabilities P = exp(score - L), and dP into dS = P * (dP - D) * slope, the gradient
// of the scaled logits. L and D are those of the warp's rows.
template <class Score, i32 row_blocks, i32 column_blocks>
FLASHGEN_DEVICE void differentiate(Accumulator<row_blocks, column_blocks>& products,
                                   Accumulator<row_blocks, column_blocks>& dp, const Score& score,
                                   float scale, const float* lse, const float* dsum, i32 first_q,
                                   i32 first_key, Thread thread) {
  const typename Score::First first = score.first_at(first_q + thread.row(), first_key + thread.column());
#pragma unroll
  for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = 16 * m + 8 * h;
      const float lse_log2 = lse[row + thread.row()] * kLog2E, d = dsum[row + thread.row()];
#pragma unroll
      for (i32 n = 0; n < column_blocks; ++n) {
#pragma unroll
        for (i32 e = 2 * h; e < 2 * h + 2; ++e) {
          const ScoreAndSlope score_of =
              score.value_and_slope(products[m][n][e] * scale, first, row, 8 * n + e % 2);
          const float p = exp2_approx(fused_multiply_add(score_of.value, kLog2E, -lse_log2));
          products[m][n][e] = p;
          dp[m][n][e] = p * (dp[m][n][e] - d) * score_of.slope;
        }
      }
    }
  }
}

}  // namespace flashgen

#line 6 "flashgen/backward_step_sm90.cuh"
// Steps of the backward kernels for Hopper: which tile of queries comes, and what becomes of its scores.
// Where it matters, rows of these are keys, 64 of them for a warpgroup, and columns queries.

namespace flashgen {

// A tile of queries as the producer tells of it: which of the group's heads it is of, and for consumer i
// whether some pair is not allowed (fact i).
constexpr i32 kMemberFact = 8;
FLASHGEN_DEVICE ListedTile listed_queries(Step step, bool is_last, u32 cut) {
  constexpr u32 consumers = (1u << kMemberFact) - 1;
  return ListedTile::of(step.tile, is_last, static_cast<u32>(step.member) << kMemberFact | (cut & consumers));
}
FLASHGEN_DEVICE Step step_of(ListedTile queries) {
  return {static_cast<i32>(queries.others() >> kMemberFact), queries.tile};
}

// Every row of a strip becomes `columns`, which are one float for each column.
template <i32 count>
FLASHGEN_DEVICE void spread_columns(float (&strip)[count], const float* columns, Thread thread) {
#pragma unroll
  for (i32 n = 0; n < count / 4; ++n) {
    const float first = columns[8 * n + thread.column()], second = columns[8 * n + thread.column() + 1];
    strip[4 * n] = first;
    strip[4 * n + 1] = second;
    strip[4 * n + 2] = first;
    strip[4 * n + 3] = second;
  }
}

// Rounds pairs of neighbours along a row.
template <class T, i32 count>
FLASHGEN_DEVICE void round_strip(u32 (&rounded)[count / 8][4], const float (&strip)[count]) {
#pragma unroll
  for (i32 i = 0; i < count / 2; ++i) rounded[i / 4][i % 4] = pack(T{}, strip[2 * i], strip[2 * i + 1]);
}

// P = exp(S - L) of products that L has been taken off from.
template <i32 count>
FLASHGEN_DEVICE void exponentials(float (&scores)[count], float scale_log2) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) scores[i] = exp2_approx(scores[i] * scale_log2);
}

// The same for products that become scores before; `probabilities` are P rounded, and what takes the place of
// the products is P times the slope of the score, by which the gradient of a product is the greater. `pairs`,
// if given, tells what a lane's pairs read of captured tensors.
template <class T, class Score, i32 count, class... Pairs>
FLASHGEN_DEVICE void score_exponentials(float (&products)[count], u32 (&probabilities)[count / 8][4],
                                        const Score& score, float scale, const float* negated_lse_log2,
                                        i32 first_q, i32 first_key, Thread thread, const Pairs&... pairs) {
  const typename Score::First first = score.first_at(first_q + thread.column(), first_key + thread.row());
#pragma unroll
  for (i32 i = 0; i < count; i += 2) {
    float p[2];
#pragma unroll
    for (i32 c = 0; c < 2; ++c) {
      const i32 q = 2 * (i - i % 4) + c;
      const ScoreAndSlope of = score.value_and_slope(products[i + c] * scale, first, q, 8 * (i % 4 / 2),
                                                     pairs.at(i + c, thread)...);
      p[c] = exp2_approx(fused_multiply_add(of.value, kLog2E, negated_lse_log2[thread.column() + q]));
      products[i + c] = p[c] * of.slope;
    }
    probabilities[i / 8][i % 8 / 2] = pack(T{}, p[0], p[1]);
  }
}

// What stands for P, or for P times a slope, where the mask forbids the pair: no value that either can have.
// As P itself it has to be a zero.
constexpr u32 kForbidden = 0x80000000u;
constexpr u32 kForbiddenSlope = 0x7fc0dea1u;

// dS = P (dP - D), for dP that D has been taken off from. Where a pair is forbidden nothing of dP is to be
// seen, not even that it is not a number.
template <u32 forbidden, i32 count>
FLASHGEN_DEVICE void multiply_where_allowed(float (&dp)[count], const float (&p)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) dp[i] = bits_of(p[i]) == forbidden ? 0.0f : p[i] * dp[i];
}
template <i32 count>
FLASHGEN_DEVICE void multiply_strips(float (&dp)[count], const float (&p)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) dp[i] *= p[i];
}

// Calls `forbid(i)` for those of a lane's elements of a strip with `count` of them whose pairs a band does
// not allow, and for those of queries beyond the last. The warp's rows begin at first_key.
template <i32 count, bool has_lower, bool has_upper, class Forbid>
FLASHGEN_DEVICE void for_forbidden(const Band<has_lower, has_upper>& mask, i32 first_q, i32 first_key,
                                   Thread thread, const Forbid& forbid) {
  const i32 q = first_q + thread.column();
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 key = first_key + thread.row() + 8 * h;
    // Allowed are queries from q + first to q + last.
    i32 first = key < mask.len_kv ? -1 : 2 * count, last = mask.len_q - 1 - q;
    if constexpr (has_upper) first = larger(first, key - mask.upper - q);
    if constexpr (has_lower) last = smaller(last, key - mask.lower - q);
#pragma unroll
    for (i32 n = 0; n < count / 4; ++n) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        if (8 * n + c < first || 8 * n + c > last) forbid(4 * n + 2 * h + c);
      }
    }
  }
}

// The same for any mask, which never allows queries beyond the last. What it asks of the queries is found for
// 32 of them at a time, a lane for each, and handed around. Where it asks much of every pair it does so in a
// loop: so much code would stand there otherwise.
template <i32 count, class Mask, class Forbid>
FLASHGEN_DEVICE void for_forbidden(const Mask& mask, i32 first_q, i32 first_key, Thread thread,
                                   const Forbid& forbid) {
  constexpr i32 at_once = kWarpSize / 2;
  const i32 key = first_key + thread.row();
  const typename Mask::Key keys[2] = {mask.key_at(key), mask.key_at(key + 8)};
  const bool exists[2] = {key < mask.len_kv, key + 8 < mask.len_kv};
#pragma unroll
  for (i32 first = 0; first < count; first += at_once) {
    const i32 q = first_q + 2 * first;
    const typename Mask::Query own = mask.query_at(q + thread.lane);
    // Calls `use(h, is_allowed)` for both rows of column `i` of the lane's.
    const auto ask = [&](i32 i, const auto& use) {
      const i32 column = 8 * (i / 2) + thread.column() + i % 2;
      const typename Mask::Query of_column = own.of_lane(column, q + column);
      const bool is_query = of_column.q < mask.len_q;
#pragma unroll
      for (i32 h = 0; h < 2; ++h) use(h, is_query & exists[h] & mask.allows(of_column, keys[h]));
    };
    if constexpr (Mask::is_light) {
#pragma unroll
      for (i32 i = 0; i < at_once / 2; ++i) {
        ask(i, [&](i32 h, bool is_allowed) {
          if (!is_allowed) forbid(first + 4 * (i / 2) + 2 * h + i % 2);
        });
      }
    } else {
      u32 allowed = 0;
#pragma unroll 1
      for (i32 i = 0; i < at_once / 2; ++i) {
        ask(i, [&](i32 h, bool is_allowed) {
          if (is_allowed) allowed |= 1u << (2 * i + h);
        });
      }
#pragma unroll
      for (i32 i = 0; i < at_once; ++i) {
        if ((allowed >> i & 1u) == 0) forbid(first + 4 * (i / 4) + 2 * (i % 2) + i / 2 % 2);
      }
    }
  }
}

}  // namespace flashgen

#line 4 "flashgen/contain.cuh"
// Keeping NaN and infinity where they belong. A product with a probability of 0 is 0 * NaN = NaN, so a bad
// value in a key that a query may not attend to would reach the query through any tile that the mask cuts
// through. Such tiles are looked through first. If one holds a bad value, which is rare, the bad values are
// taken out before the product, and what they should have reached becomes NaN afterwards.

namespace flashgen {

// Adding this to the bits of a magnitude carries into the sign exactly when the exponent is all ones.
template <class T>
constexpr u32 kToInfinity = 0;
template <>
constexpr u32 kToInfinity<half_t> = 0x04000400u;
template <>
constexpr u32 kToInfinity<bfloat16_t> = 0x00800080u;
template <>
constexpr u32 kToInfinity<float> = 0x00800000u;
template <class T>
constexpr u32 kSigns = kIsFloat<T> ? 0x80000000u : 0x80008000u;

// The sign bits of those elements of a word that are not finite.
template <class T>
FLASHGEN_DEVICE u32 signs_of_bad(u32 word) {
  return ((word & ~kSigns<T>)+kToInfinity<T>)&kSigns<T>;
}

FLASHGEN_DEVICE bool is_bad(float x) { return signs_of_bad<float>(bits_of(x)) != 0; }
FLASHGEN_DEVICE bool is_bad(half_t x) { return signs_of_bad<half_t>(x.bits) != 0; }
FLASHGEN_DEVICE bool is_bad(bfloat16_t x) { return signs_of_bad<bfloat16_t>(x.bits) != 0; }

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
FLASHGEN_DEVICE bool holds_bad_value(Tile tile, Thread thread) {
  u32 bad = 0;
#pragma unroll 4
  for (i32 i = thread.index(); i < Tile::rows * Tile::chunks; i += threads) {
    const Vec16 chunk = *reinterpret_cast<const Vec16*>(tile.data + i * kChunkBytes);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) bad |= signs_of_bad<typename Tile::Element>(chunk.words[w]);
  }
  return block_any(bad != 0);
}

// Puts 0 for every element that is not finite.
template <i32 threads, class Tile>
FLASHGEN_DEVICE void take_out_bad_values(Tile tile, Thread thread) {
#pragma unroll 1
  for (i32 i = thread.index(); i < Tile::bytes / static_cast<i32>(sizeof(u32)); i += threads) {
    u32& word = reinterpret_cast<u32*>(tile.data)[i];
    const u32 signs = signs_of_bad<typename Tile::Element>(word);
    // From the sign bit of each bad element to all of its bits.
    word &= kIsFloat<typename Tile::Element> ? (signs != 0 ? 0u : ~0u) : ~((signs >> 15) * 0xffffu);
  }
  block_sync();
}

// Puts NaN into the results of queries that attend to a bad value in a tile that the mask cuts through.
// `results` are the tile of queries from first_q on, `source` the keys' rows that were multiplied; every
// thread takes columns of its own.
template <i32 threads, i32 head_dim, i32 tile_kv, class Tile, class Mask>
FLASHGEN_DEVICE void mark_bad_results(Tile results, i32 first_q,
                                      GlobalRows<const typename Tile::Element> source, Range keys,
                                      const Mask& mask, Thread thread) {
  const i32 end_q = smaller(first_q + Tile::rows, mask.len_q);
#pragma unroll 1
  for (i32 column = thread.index(); column < head_dim; column += threads) {
#pragma unroll 1
    for (i32 key = keys.begin * tile_kv; key < smaller(keys.end * tile_kv, source.row_count); ++key) {
      const i32 first_key = key / tile_kv * tile_kv;
      if (mask.is_full(first_q, end_q, first_key, first_key + tile_kv) || !is_bad(*source.at(key, column)))
        continue;
#pragma unroll 1
      for (i32 q = first_q; q < end_q; ++q) {
        if (mask.allows(q, key))
          *results.element_at(q - first_q, column) = not_a_number<typename Tile::Element>();
      }
    }
  }
}

}  // namespace flashgen

#line 4 "flashgen/fragments.cuh"
// A strip of accumulators in memory as its lanes hold it: four floats for each lane, block of 16 x 8 after
// block. What a lane writes the same lane of a warp reads, 16 bytes at a time.

namespace flashgen {

// The columns from `first` to `end`, ...
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
// ... or all of them.
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

}  // namespace flashgen

#line 4 "flashgen/ring.cuh"
// Rings of slots in shared memory, filled by one side and emptied by the other. Each slot has two mbarriers:
// one that ends a phase when the slot is full, one when it is empty again.

namespace flashgen {

// Where someone is in a ring: how many slots have gone by.
template <i32 slots>
struct RingPlace {
  u32 count = 0;

  FLASHGEN_DEVICE i32 slot() const { return static_cast<i32>(count % slots); }
  // Of the times round.
  FLASHGEN_DEVICE u32 parity() const { return count / slots % 2; }
  FLASHGEN_DEVICE void advance(i32 by = 1) { count += static_cast<u32>(by); }
  FLASHGEN_DEVICE RingPlace before() const { return {count - 1}; }
};

// Where dividing by the number of slots is no matter of a shift, slot and parity are counted.
template <i32 slots>
  requires((slots & (slots - 1)) != 0)
struct RingPlace<slots> {
  u32 count = 0;
  i32 at = 0;
  u32 round = 0;

  FLASHGEN_DEVICE i32 slot() const { return at; }
  FLASHGEN_DEVICE u32 parity() const { return round; }
  // By no more than there are slots.
  FLASHGEN_DEVICE void advance(i32 by = 1) {
    count += static_cast<u32>(by);
    const bool wraps = at >= slots - by;
    at += wraps ? by - slots : by;
    round ^= wraps ? 1u : 0u;
  }
};

template <i32 slots>
struct Ring {
  using Where = RingPlace<slots>;

  // Where its barriers lie: full ones, then empty ones.
  u32 barriers;

  FLASHGEN_DEVICE u32 full(Where at) const { return full_of(at.slot()); }
  FLASHGEN_DEVICE u32 full_of(i32 slot) const { return barriers + 8 * slot; }
  FLASHGEN_DEVICE u32 empty(Where at) const { return barriers + 8 * (slots + at.slot()); }

  // How many arrivals fill a slot, and how many empty it; one thread calls it, before any other use.
  FLASHGEN_DEVICE void init(u32 fillers, u32 emptiers) const {
#pragma unroll
    for (i32 i = 0; i < slots; ++i) {
      mbarrier_init(barriers + 8 * i, fillers);
      mbarrier_init(barriers + 8 * (slots + i), emptiers);
    }
  }
  // A ring begins empty: the wait before the first round is for a phase that counts as ended.
  FLASHGEN_DEVICE void wait_empty(Where at) const { mbarrier_wait(empty(at), at.parity() ^ 1); }
  FLASHGEN_DEVICE void wait_full(Where at) const { mbarrier_wait(full(at), at.parity()); }
  // One arrival for a warp, when all its lanes are done with the slot.
  FLASHGEN_DEVICE void release(Where at, Thread thread) const {
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(empty(at));
  }
};

}  // namespace flashgen

#line 4 "flashgen/row_tile.cuh"
// Which tiles of queries, or of keys, a block works on, one after another, when blocks stay and take the next
// tile.

namespace flashgen {

// A tile of queries of one head of one sequence; the one after the last does not exist.
struct alignas(16) RowTile {
  i32 first_q;
  i32 head;
  i32 sequence;
  i32 exists;
};

// A tile of keys of one head of keys and values of one sequence.
struct alignas(16) KeyTile {
  i32 first_key;
  i32 head;
  i32 sequence;
  // Neither for the one after the last; both but for tiles that no query attends to.
  bool exists;
  bool is_attended;
  // Which part of its steps this is, and how many parts there are.
  u8 part = 0;
  u8 parts = 1;

  // Steps of the part where the whole tile has `steps`.
  FLASHGEN_DEVICE i32 steps_of(i32 steps) const { return steps * (part + 1) / parts - steps * part / parts; }
};

// Tile `number` in the order in which tiles are given out: which one of its head's, and the head, counted
// over all sequences. Sections of `section_heads` heads, whose tiles stay in the cache, come one after
// another; within a section the tile changes slowest. The first section has what does not make a whole one:
// at the end a few heads by themselves would leave most blocks without work while their long tiles last.
struct SectionPlace {
  i32 turn;
  i32 head;
};
template <i32 section_heads>
FLASHGEN_DEVICE SectionPlace place_in_sections(i32 number, i32 tiles, i32 tiles_of_head) {
  // One head after another, and nothing left over.
  if constexpr (section_heads == 1) return {number % tiles_of_head, number / tiles_of_head};
  const i32 odd_heads = tiles / tiles_of_head % section_heads;
  const i32 even = number - odd_heads * tiles_of_head;
  if (even < 0) return {number / odd_heads, number % odd_heads};
  const i32 section = even / (section_heads * tiles_of_head);
  const i32 rest = even - section * (section_heads * tiles_of_head);
  return {rest / section_heads, odd_heads + section * section_heads + rest % section_heads};
}

// The same with `last_heads` in the last section, as far as there are so many: the more, the more nearly
// blocks end at the same time.
template <i32 section_heads>
FLASHGEN_DEVICE SectionPlace place_in_sections(i32 number, i32 tiles, i32 tiles_of_head, i32 last_heads) {
  const i32 heads = tiles / tiles_of_head, in_last = smaller(heads, last_heads), before = heads - in_last;
  const i32 of_last = number - before * tiles_of_head;
  if (of_last < 0) return place_in_sections<section_heads>(number, before * tiles_of_head, tiles_of_head);
  return {of_last / in_last, before + of_last % in_last};
}

// The tile of queries at a place. If `longest_first`, those of a head go from the last to the first, as a
// causal mask makes the last ones the longest.
template <i32 tile_q, bool longest_first, class Params>
FLASHGEN_DEVICE RowTile row_tile_at(const Params& p, SectionPlace place) {
  const i32 tile = longest_first ? p.q_tiles - 1 - place.turn : place.turn;
  const i32 sequence = place.head / p.heads_q;
  return {tile * tile_q, place.head - sequence * p.heads_q, sequence, 1};
}
template <i32 tile_q, i32 section_heads, bool longest_first, class Params>
FLASHGEN_DEVICE RowTile row_tile(const Params& p, i32 number) {
  if (number >= p.tiles) return {};
  return row_tile_at<tile_q, longest_first>(p, place_in_sections<section_heads>(number, p.tiles, p.q_tiles));
}

// Of tiles of keys a causal mask makes the first ones the longest, so they go from the first to the last.
template <i32 tile_kv, i32 section_heads, class Params>
FLASHGEN_DEVICE KeyTile key_tile(const Params& p, i32 number) {
  if (number >= p.tiles) return {};
  const SectionPlace place = place_in_sections<section_heads>(number, p.tiles, p.kv_tiles);
  const i32 sequence = place.head / p.heads_kv;
  return {place.turn * tile_kv, place.head - sequence * p.heads_kv, sequence, true, true};
}

// The same where the last tiles are cut into parts, which follow one another.
template <i32 tile_kv, i32 section_heads, class Params>
FLASHGEN_DEVICE KeyTile key_tile_or_part(const Params& p, i32 number) {
  const i32 beyond = number - p.whole_tiles;
  if (beyond < 0) return key_tile<tile_kv, section_heads>(p, number);
  const i32 cut = beyond / p.tile_parts;
  KeyTile keys = key_tile<tile_kv, section_heads>(p, p.whole_tiles + cut);
  keys.part = static_cast<u8>(beyond - cut * p.tile_parts);
  keys.parts = static_cast<u8>(p.tile_parts);
  return keys;
}

// The number of a further tile. The first ones are the blocks' own numbers.
template <class Params>
FLASHGEN_DEVICE i32 draw_tile(const Params& p) {
  return grid_dim_x() + static_cast<i32>(atomic_add(p.counter, 1u));
}

// Warns all blocks: the numbers that they draw from then on have this bit besides.
constexpr i32 kWarning = -0x7fffffff - 1;
template <class Params>
FLASHGEN_DEVICE void warn_all(const Params& p) {
  atomic_or(p.counter, static_cast<u32>(kWarning));
}

// To be called once by each block, after its last draw: the last block leaves the counters at 0 for the next
// launch.
template <class Params>
FLASHGEN_DEVICE void leave_counters(const Params& p) {
  if (atomic_add_release(p.counter + 1, 1u) + 1 == static_cast<u32>(grid_dim_x())) {
    store_release(p.counter, 0u);
    store_release(p.counter + 1, 0u);
  }
}

}  // namespace flashgen

#line 7 "flashgen/backward_sm90.cuh"
// What the backward kernel for Hopper is made of that makes dK, dV and dQ together. Scores are transposed:
// their rows are keys, 64 of them for a warpgroup, and their columns queries, so that P and dS are left
// operands of dV and dK as they are, in registers.

namespace flashgen {

constexpr i32 kPanelColumns = 64;

struct BackwardSm90Config {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 q_slots;
  i32 do_slots;
  i32 ds_slots;
  i32 sum_slots;
  i32 rounded_slots;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  i32 section_heads;
  // Of tiles of keys, see AddingOrder.
  i32 order_group = 0;
  bool has_lower;
  bool has_upper;
};

// Which part of dQ_i = sum over j of dS_ij K_j each consumer computes: 64 of the rows, or 64 of the columns
// (of the last ones as many as there are). Of a consumer's rows each warp has 16. The sum lies in global
// memory in the order in which warps hold it: warp after warp, and of each 16 rows x 8 columns four floats
// for each lane, so that all accesses are contiguous.
template <i32 tile_q, i32 head_dim, i32 consumers>
struct QueryGradientShare {
  static constexpr bool by_rows = tile_q == consumers * kWarpgroupRows;
  static_assert(by_rows ? head_dim == kPanelColumns
                        : tile_q == kWarpgroupRows && ceil_div(head_dim, kPanelColumns) == consumers,
                "each consumer owns 64 rows, or 64 columns, of a tile of dQ");
  static constexpr i32 tile_floats = tile_q * head_dim;

  FLASHGEN_DEVICE static i32 row(i32 consumer) { return by_rows ? consumer * kWarpgroupRows : 0; }
  FLASHGEN_DEVICE static i32 column(i32 consumer) { return by_rows ? 0 : consumer * kPanelColumns; }
  FLASHGEN_DEVICE static i32 columns(i32 consumer) {
    return smaller(kPanelColumns, head_dim - column(consumer));
  }
  // Where a warp's part of a tile begins, and how much it is; warps of all consumers are counted.
  FLASHGEN_DEVICE static i32 warp_begin(i32 warp) {
    const i32 consumer = warp / 4;
    return consumer * kWarpgroupRows * kPanelColumns + warp % 4 * warp_floats(consumer);
  }
  FLASHGEN_DEVICE static i32 warp_floats(i32 consumer) { return kWarpRows * columns(consumer); }
  // Where an element of the tile lies.
  FLASHGEN_DEVICE static i32 place(i32 row, i32 column) {
    const i32 consumer = by_rows ? row / kWarpgroupRows : column / kPanelColumns;
    const i32 warp = row % kWarpgroupRows / kWarpRows, block = column % kPanelColumns / 8;
    const i32 lane = row % 8 * 4 + column % 8 / 2, element = row % 16 / 8 * 2 + column % 2;
    return warp_begin(4 * consumer + warp) + (block * kWarpSize + lane) * 4 + element;
  }
};

template <BackwardSm90Config cfg, class T>
struct BackwardSm90Shape {
  static_assert(cfg.tile_kv == cfg.consumers * kWarpgroupRows, "each consumer owns 64 keys");
  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using DOTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  // Keys x queries.
  using DSTile = PanelTile<T, cfg.tile_kv, cfg.tile_q>;
  // A warp's rows of dK and dV.
  using DKRows = PanelTile<T, kWarpRows, cfg.head_dim>;
  using DVRows = PanelTile<T, kWarpRows, cfg.head_dim_v>;
  // A warp's share of dQ, when it is finished.
  using DQRows = PanelTile<T, kWarpRows, kPanelColumns>;
  using Share = QueryGradientShare<cfg.tile_q, cfg.head_dim, cfg.consumers>;

  using Scores = Strip<cfg.tile_q>;
  using RoundedScores = Rounded<cfg.tile_q>;
  using DK = Strip<cfg.head_dim>;
  using DV = Strip<cfg.head_dim_v>;
  // 64 queries x 64 columns, whatever the share.
  using DQ = Strip<kPanelColumns>;

  static constexpr i32 row_bytes = cfg.tile_q * 4;
  // What a warp writes out at a time: its share of dQ, or its rows of dK and dV.
  static constexpr i32 out_bytes = kWarpRows * kPanelColumns * 4;
  static_assert(DKRows::bytes <= out_bytes && DVRows::bytes <= out_bytes, "rows of dK go out as dQ does");
  static constexpr bool both_at_once = DKRows::bytes + DVRows::bytes <= out_bytes;
  static constexpr u32 consumer_warps = 4 * cfg.consumers;
};

// Rows of a tile of dQ with nothing more to be added to them: those of one of the warps that have added.
struct alignas(32) SumPart {
  // Where the results go.
  i32 column;
  i32 row;
  i32 head;
  i32 sequence;
  // Where the sum is in the workspace, and of how many boxes; of none if there are no more.
  i32 line;
  i32 boxes;
  // If another head is still to have its place.
  bool is_needed_again;
  // Of the tile's.
  bool is_last;
};

// Part of a sum in shared memory. The copy engine knows the workspace as lines, of which it takes two at a
// time.
struct SumLines {
  static constexpr i32 floats = 256;
  static constexpr u32 box_bytes = 2 * floats * 4;
  u32 address;

  FLASHGEN_DEVICE void load(const TensorMap& map, u32 barrier, i32 line, i32 boxes) const {
#pragma unroll 1
    for (i32 i = 0; i < boxes; ++i)
      tma_load_4d(address + static_cast<u32>(i) * box_bytes, &map, barrier, 0, line + 2 * i, 0, 0);
  }
  // The same bytes for each box.
  FLASHGEN_DEVICE void repeat(const TensorMap& map, i32 line, i32 boxes) const {
#pragma unroll 1
    for (i32 i = 0; i < boxes; ++i) tma_store_4d(&map, address, 0, line + 2 * i, 0, 0);
  }
};

// ---- The sum of dQ, see fragments.cuh

// Rounds 32 columns of a part's 16 rows into a tile in shared memory. A warp of its own does this beside
// those that compute, so that each instruction counts. `in_place`, the tile is the part's own first half: the
// columns' own place, or, of the last 32, that of what has been rounded before.
template <i32 box, bool in_place = false, class Tile>
FLASHGEN_DEVICE void finish_box(Tile rows, const float* part, float scale, Thread thread) {
  using T = typename Tile::Element;
  const Vec16* const fours = reinterpret_cast<const Vec16*>(part) + thread.lane;
  u32 words[2][4];
#pragma unroll
  for (i32 n = 0; n < 2; ++n) {
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      const Vec16 four = fours[(4 * box + 2 * n + i) * kWarpSize];
#pragma unroll
      for (i32 h = 0; h < 2; ++h)
        words[n][2 * i + h] =
            pack(T{}, float_of(four.words[2 * h]) * scale, float_of(four.words[2 * h + 1]) * scale);
    }
    if constexpr (in_place) {
      // Two at a time, as registers are few, and all before the first of them is overwritten.
      warp_sync();
    } else {
      stmatrix_x4(Tile::chunk_after(rows.first_chunk(0, thread), 2 * box + n), words[n]);
    }
  }
  if constexpr (in_place) {
#pragma unroll
    for (i32 n = 0; n < 2; ++n)
      stmatrix_x4(Tile::chunk_after(rows.first_chunk(0, thread), 2 * box + n), words[n]);
  }
}

// ---- Bad values, see contain.cuh

// Whether rows of a panelled tile, as many as a warp has, hold NaN or infinities where this lane of it looks.
template <class Tile>
FLASHGEN_DEVICE bool lane_finds_bad_value(SharedPanels<Tile> tile, i32 row, Thread thread) {
  u32 bad = 0;
  constexpr i32 chunks = Tile::panels * 8;
#pragma unroll 4
  for (i32 i = thread.lane; i < kWarpRows * chunks; i += kWarpSize) {
    const Vec16 chunk = tile.chunk(row + i / chunks, i % chunks);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) bad |= signs_of_bad<typename Tile::Element>(chunk.words[w]);
  }
  return bad != 0;
}

// The scalar product of a row of a tile and one in global memory.
template <class Tile>
FLASHGEN_DEVICE float dot_row(SharedPanels<Tile> tile, i32 row, const typename Tile::Element* other) {
  using T = typename Tile::Element;
  float total = 0.0f;
#pragma unroll 1
  for (i32 c = 0; c < Tile::cols / 8; ++c) {
    const Vec16 x = tile.chunk(row, c), y = reinterpret_cast<const Vec16*>(other)[c];
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        const T left{static_cast<u16>(x.words[w] >> (16 * half))};
        const T right{static_cast<u16>(y.words[w] >> (16 * half))};
        total = fused_multiply_add(to_float(left), to_float(right), total);
      }
    }
  }
  return total;
}

}  // namespace flashgen

#line 17 "kernels/backward_main_sm90.cu.j2"
using namespace flashgen;

using element_t = bfloat16_t;

constexpr BackwardSm90Config kConfig{
    .head_dim = 128,
    .head_dim_v = 128,
    .tile_q = 64,        // B_r: query rows per step
    .tile_kv = 128,      // B_c: keys per tile that a block works on
    .q_slots = 3,        // tiles of Q under way at once
    .do_slots = 2,       // tiles of dO under way at once
    .ds_slots = 2,       // tiles of dS that wait for dQ
    .sum_slots = 3,      // parts of dQ under way to be finished
    .rounded_slots = 1,  // of them that are rounded
    .consumers = 2,      // warpgroups that compute, 64 keys each
    .producer_registers = 24,
    .consumer_registers = 240,
    .section_heads = 16,  // heads that are worked on at the same time
    .has_lower = false,   // the mask ends on the left
    .has_upper = true,    // the mask ends on the right
};

struct Params {
  TensorMap q_map;  // what the copy engine knows of the tensor
  TensorMap k_map;
  TensorMap v_map;
  TensorMap dout_map;
  TensorMap row_stats_map;
  TensorMap dk_map;
  TensorMap dv_map;
  TensorMap dq_accum_map;
  TensorMap dq_map;
  const element_t* q;
  const element_t* dout;
  // of each tile of queries what its rows subtract from their logits, then their D, negated
  const float* row_stats;
  // workspace that dQ is summed in
  float* dq_accum;
  // tiles given out, then blocks that are done; 0 between launches
  u32* counter;
  // tiles of dQ given out to be finished; of each head, tiles of keys done; tiles of dQ finished
  u32* head_counts;
  // strides are in elements
  i64 q_batch;
  i64 q_row;
  i64 q_head;
  i64 dout_batch;
  i64 dout_row;
  i64 dout_head;
  i32 heads_q;
  i32 heads_kv;
  i32 len_q;
  i32 len_kv;
  i32 group;       // query heads per key/value head
  i32 band_lower;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  i32 band_upper;
  i32 q_tiles;    // tiles of queries of one head
  i32 kv_tiles;   // tiles of keys of one head
  i32 tiles;      // tiles of all heads of all sequences
  i32 sum_heads;  // heads that dq_accum has room for
  float scale;
  float scale_log2;  // scale * log2(e)
};
static_assert(sizeof(Params) == 1344, "the launcher packs Params into 1344 bytes");

namespace smem {
constexpr u32 kK = 0;               // K_j
constexpr u32 kV = 32768;           // V_j
constexpr u32 kQ = 65536;           // Q_i, 3 slots
constexpr u32 kDo = 114688;         // dO_i, 2 slots
constexpr u32 kDs = 147456;         // dS_ij, 2 slots
constexpr u32 kDq = 180224;         // dQ_i, and at the end dK_j and dV_j, on their way out
constexpr u32 kSums = 212992;       // rows of dQ_i to be finished, 3 slots
constexpr u32 kDqRows = 225280;     // and when they are
constexpr u32 kZeros = 227328;      // what their sum is cleared with
constexpr u32 kLse = 229376;        // what rows subtract from their logits, 3 slots
constexpr u32 kDsum = 230144;       // -D_i, 2 slots
constexpr u32 kKBarriers = 230656;  // for each slot: it is full, it is empty
constexpr u32 kVBarriers = 230784;
constexpr u32 kQBarriers = 230912;
constexpr u32 kDoBarriers = 231040;
constexpr u32 kDsBarriers = 231168;
constexpr u32 kSumBarriers = 231296;
constexpr u32 kTurnBarriers = 231424;
constexpr u32 kSumParts = 231552;  // which parts of dQ the slots hold
constexpr u32 kTileBarriers = 231680;
constexpr u32 kTiles = 231808;  // which tiles of keys come next
constexpr u32 kBytes = 231840;
}  // namespace smem

#line 27
using Shape = BackwardSm90Shape<kConfig, element_t>;
using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

#line 34
using KRing = Ring<1>;
using VRing = Ring<1>;
using QRing = Ring<kConfig.q_slots>;
using DORing = Ring<kConfig.do_slots>;
using DSRing = Ring<kConfig.ds_slots>;
using TileRing = Ring<2>;
#line 47
using SumRing = Ring<kConfig.sum_slots>;
// Of the dQ of a tile of queries: one for each warp that adds to it.
constexpr i32 parts_of_dq = 4 * kConfig.consumers;
#line 51
static_assert(kConfig.do_slots == 2 && kConfig.ds_slots == 2, "slots of dO and dS go by together");

// Everything that the warps of a block share.
struct Shared {
  u8* base;
  Shape::KTile k;
  Shape::VTile v;
  Shape::QTile q;
  Shape::DOTile dout;
  Shape::DSTile ds;
  KRing k_ring;
  VRing v_ring;
  QRing q_ring;
  DORing do_ring;
  DSRing ds_ring;
  TileRing tile_ring;
#line 71
  SumRing sum_ring;  // parts of dQ that are being finished
  SumPart* sum_parts;  // what its slots hold
  Shape::DQRows dq_rows;
#line 75
  KeyTile* tiles;  // what the slots of tile_ring hold

#line 80
  FLASHGEN_DEVICE static Shared at(u8* base) {
    const u32 start = shared_address(base);
    return {base,
            {start + smem::kK},
            {start + smem::kV},
            {start + smem::kQ},
            {start + smem::kDo},
            {start + smem::kDs},
            {start + smem::kKBarriers},
            {start + smem::kVBarriers},
            {start + smem::kQBarriers},
            {start + smem::kDoBarriers},
            {start + smem::kDsBarriers},
            {start + smem::kTileBarriers},
#line 98
            {start + smem::kSumBarriers},
            reinterpret_cast<SumPart*>(base + smem::kSumParts),
            {start + smem::kDqRows},
#line 102
            reinterpret_cast<KeyTile*>(base + smem::kTiles),
    };
  }
#line 108
  // Of a tile of queries: what its rows subtract from their logits, and -D.
  FLASHGEN_DEVICE float* lse(QRing::Where at) const {
    return reinterpret_cast<float*>(base + smem::kLse) + at.slot() * kConfig.tile_q;
  }
  FLASHGEN_DEVICE float* dsum(DORing::Where at) const {
    return reinterpret_cast<float*>(base + smem::kDsum) + at.slot() * kConfig.tile_q;
  }
#line 116
  // Once for each tile of keys: that all warps' shares of the tile before have been added to dQ, ...
  FLASHGEN_DEVICE u32 added() const { return shared_address(base) + smem::kTurnBarriers; }
  // ... and that theirs of this one may be.
  FLASHGEN_DEVICE u32 may_add() const { return added() + 8; }
  FLASHGEN_DEVICE u8* sum(SumRing::Where at) const { return base + smem::kSums + at.slot() * Shape::out_bytes; }
#line 125
  // What the warp, counted among those of consumers, writes out.
  FLASHGEN_DEVICE u8* out(i32 warp) const { return base + smem::kDq + warp * Shape::out_bytes; }
};

#line 135
FLASHGEN_DEVICE i32 end_key(const Params& p, const KeyTile& keys) {
  return smaller(keys.first_key + kConfig.tile_kv, p.len_kv);
}
// Products of queries beyond the last are 0, and L makes their probabilities 0; but a score makes of 0 what it
// likes, also what is not a number, so that such queries are masked.
constexpr bool kScoresEnd = false;
// Where a tile of queries ends as far as the mask is concerned.
FLASHGEN_DEVICE i32 end_query(const Params& p, i32 first_q) {
  const i32 end = first_q + kConfig.tile_q;
  return kScoresEnd ? end : smaller(end, p.len_q);
}
// The steps of a tile of keys: its tiles of queries, of each head of the group.
using Queries = QueryWalk<Mask, kConfig.tile_q>;
FLASHGEN_DEVICE Queries queries_of(const Params& p, const KeyTile& keys) {
#line 153
  return Queries(keys.first_key, end_key(p, keys), p.group);
}
#line 156
FLASHGEN_DEVICE Mask mask_of(const Params& p, const KeyTile& keys, i32 member) {
  return Mask::of(p, keys.sequence, keys.head * p.group + member);
}

// The first of the heads of queries that attend to the keys; heads of all sequences are counted.
FLASHGEN_DEVICE i32 first_head(const Params& p, const KeyTile& keys) {
  return keys.sequence * p.heads_q + keys.head * p.group;
}
#line 170
// How many tiles of keys have added all they have to the sums of a group, and how many tiles of a head's have been
// finished and cleared.
FLASHGEN_DEVICE u32* done_tiles(const Params& p, i32 first_head) { return p.head_counts + 1 + 2 * first_head; }
FLASHGEN_DEVICE u32* finished_tiles(const Params& p, i32 head) { return p.head_counts + 2 + 2 * head; }
// Which phase of the barriers that go by with tiles of keys is a tile's.
FLASHGEN_DEVICE u32 turn_of(TileRing::Where tile) { return tile.count % 2; }

#line 3 "kernels/backward_main_sm90/producer.j2"
// ---- The producer: one warp that draws tiles of keys and has the copy engine bring K and V, and for each of
// their steps Q, dO and the rows' statistics. One lane waits and copies: another that came late to a barrier
// could miss a whole round.
FLASHGEN_DEVICE void produce(const Params& p, u8* base, Thread self) {
  const Thread thread = self.again();
  const Shared shared = Shared::at(base);
  const bool elected = thread.lane == 0;
  KRing::Where kv_at;
  QRing::Where q_at;
  DORing::Where do_at;
  TileRing::Where tile_at;
  if (elected) {
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
    prefetch_tensormap(&p.dout_map);
    prefetch_tensormap(&p.row_stats_map);
  }

  // Line 6: load K_j, V_j. The tile is read again where it was written, as registers are few.
  const auto load_keys = [&]() {
    if (elected) {
      const KeyTile& keys = shared.tiles[tile_at.before().slot()];
      shared.k_ring.wait_empty(kv_at);
      mbarrier_arrive_expect_tx(shared.k_ring.full(kv_at), Shape::KTile::bytes);
      shared.k.load(p.k_map, shared.k_ring.full(kv_at), keys.first_key, keys.head, keys.sequence);
      shared.v_ring.wait_empty(kv_at);
      mbarrier_arrive_expect_tx(shared.v_ring.full(kv_at), Shape::VTile::bytes);
      shared.v.load(p.v_map, shared.v_ring.full(kv_at), keys.first_key, keys.head, keys.sequence);
    }
    kv_at.advance();
  };
  // Line 9: load Q_i, dO_i, L_i, D_i.
  const auto load_queries = [&](Step step) {
    const i32 first_q = step.tile * kConfig.tile_q;
#line 46
    const auto load = [&](const auto& tile, const TensorMap& map, float* rows, i32 part, u32 full) {
      const KeyTile& keys = shared.tiles[tile_at.before().slot()];
      const Place place = {step.tile, keys.head * p.group + step.member, keys.sequence};
      const i32 number = static_cast<i32>(place.number(p.q_tiles, p.heads_q));
      mbarrier_arrive_expect_tx(full, tile.bytes + Shape::row_bytes);
      tile.load(map, full, first_q, place.head, place.sequence);
      tma_load_4d(shared_address(rows), &p.row_stats_map, full, 0, 2 * number + part, 0, 0);
    };
    if (elected) {
      shared.q_ring.wait_empty(q_at);
#line 59
      load(shared.q.slot(q_at.slot()), p.q_map, shared.lse(q_at), 0, shared.q_ring.full(q_at));
    }
    q_at.advance();
    if (elected) {
      shared.do_ring.wait_empty(do_at);
      load(shared.dout.slot(do_at.slot()), p.dout_map, shared.dsum(do_at), 1, shared.do_ring.full(do_at));
    }
    do_at.advance();
  };

#line 71
  while (true) {
    // Even the first tile is drawn: so only blocks that run have tiles that others wait for. Consumers are steps
    // behind, so that nobody waits for a draw.
    const i32 number = shuffle(elected ? static_cast<i32>(atomic_add(p.counter, 1u)) : 0, 0);
#line 112
    KeyTile keys = key_tile<kConfig.tile_kv, kConfig.section_heads>(p, number);
#line 117
    Queries steps = queries_of(p, keys);
    const auto mask_of_member = [&](i32 member) { return mask_of(p, keys, member); };
    if (keys.exists) {
      steps.start(thread, mask_of_member);
#line 124
      keys.is_attended = !steps.over();
    }
    if (elected) {
      shared.tile_ring.wait_empty(tile_at);
      shared.tiles[tile_at.slot()] = keys;
      mbarrier_arrive(shared.tile_ring.full(tile_at));
    }
    tile_at.advance();
    if (!keys.exists) break;
    bool has_keys = false;
    while (!steps.over()) {
      const Step step = steps.step();
      steps.advance(thread, mask_of_member);
      load_queries(step);
      // The first queries may come before the keys of the tile before are no longer needed.
      if (!has_keys) load_keys();
      has_keys = true;
    }
  }
#line 148
  if (elected) leave_counters(p);
}

#line 2 "kernels/backward_main_sm90/contain.j2"
// ---- Tiles of keys with NaN or infinities. These must not reach queries that do not attend to their keys, and
// in a product 0 * NaN reaches all. Such tiles are rare: what they add to dQ is computed by ordinary instructions,
// pair by pair. In dK and dV a key's values reach nothing but its own rows, so they are computed as always.

// Whether there are any in K_j; all consumers look, each warp at its own keys.
FLASHGEN_DEVICE bool has_bad_keys(const Shared& shared, Thread self) {
  const Thread thread = self.again();
  const i32 warp_key = (thread.warp - 4) * kWarpRows;
  const bool found = lane_finds_bad_value(SharedPanels<Shape::KTile>{shared.base, shared.k}, warp_key, thread);
  // All lanes of a warp have the same, which the assembler knows of a vote only.
  return warp_any(named_barrier_any(1, kConfig.consumers * kWarpgroupSize, found));
}

// What a tile of keys adds to dQ, over pairs that the mask allows. Nothing of it is in the rings yet.
FLASHGEN_DEVICE void add_slowly(const Params& p, const Shared& shared, const KeyTile& keys, Thread self) {
  // All addresses are worked out here: what is rare must not take registers from what is not.
  const Thread thread = self.again();
  const i32 warp_key = (thread.warp - 4) * kWarpRows;
  const i32 index = thread.index() - kWarpgroupSize, threads = kConfig.consumers * kWarpgroupSize;
  const SharedPanels<Shape::KTile> k = {shared.base, shared.k};
  const SharedPanels<Shape::VTile> v = {shared.base, shared.v};
  const SharedPanels<Shape::DSTile> ds = {shared.base, shared.ds};
  for (i32 step = 0; step < p.group * p.q_tiles; ++step) {
    const i32 member = step / p.q_tiles, tile = step % p.q_tiles, head = keys.head * p.group + member;
    const i32 first_q = tile * kConfig.tile_q;
    const Mask mask = mask_of(p, keys, member);
#line 31
    if (mask.is_empty(first_q, smaller(first_q + kConfig.tile_q, p.len_q), keys.first_key, end_key(p, keys))) continue;
#line 33
    const Place place = {tile, head, keys.sequence};
    const float* const stats = p.row_stats + place.number(p.q_tiles, p.heads_q) * (2 * kConfig.tile_q);
    const element_t* const q = p.q + keys.sequence * p.q_batch + head * p.q_head + first_q * p.q_row;
    const element_t* const dout = p.dout + keys.sequence * p.dout_batch + head * p.dout_head + first_q * p.dout_row;
#line 40
    for (i32 i = thread.lane; i < kWarpRows * kConfig.tile_q; i += kWarpSize) {
      const i32 row = warp_key + i % kWarpRows, column = i / kWarpRows;
      float gradient = 0.0f;
      if (first_q + column < p.len_q && mask.allows(first_q + column, keys.first_key + row)) {
        const float product = dot_row(k, row, q + column * p.q_row), subtracted = stats[column];
#line 46
        const float probability = exp2_approx((product + subtracted) * p.scale_log2);
#line 52
        gradient = probability * (dot_row(v, row, dout + column * p.dout_row) + stats[kConfig.tile_q + column]);
      }
      ds.set_element(row, column, gradient);
    }
#line 61
    named_barrier_sync(1, threads);
    const i32 sum_head = (first_head(p, keys) + member) % p.sum_heads;
    float* const sum = p.dq_accum + static_cast<i64>(sum_head * p.q_tiles + tile) * Shape::Share::tile_floats;
    for (i32 i = index; i < kConfig.tile_q * kConfig.head_dim; i += threads) {
      const i32 row = i / kConfig.head_dim, column = i % kConfig.head_dim;
      float total = 0.0f;
      // Some at a time: left to itself the compiler takes conversions from fp16 for nothing and all keys at once, and
      // then the loop over tiles of queries, for which this is the rare case, lacks registers.
#pragma unroll 4
      for (i32 key = 0; key < kConfig.tile_kv; ++key) {
        if (mask.allows(first_q + row, keys.first_key + key))
          total = fused_multiply_add(ds.element(key, row), k.element(key, column), total);
      }
#line 82
      reduce_add(sum + Shape::Share::place(row, column), total);
    }
#line 85
    named_barrier_sync(1, threads);
  }
  // The sums are read by the copy engine.
  fence_proxy_async();
}

#line 7 "kernels/backward_main_sm90/consumer.j2"
// ---- A consumer: a warpgroup that owns 64 of the tile's keys.
FLASHGEN_DEVICE void consume(const Params& p, u8* base) {
  const Thread thread = Thread::current().again();
  const Shared shared = Shared::at(base);
  // Which consumer this is, and where its warps' keys begin within a tile.
  const i32 consumer = thread.warp / 4 - 1;
  const i32 strip_key = consumer * kWarpgroupRows;
  const i32 warp_key = strip_key + thread.warp % 4 * kWarpRows;
  const Shape::KTile strip_k = shared.k.from_row(strip_key);
  const Shape::VTile strip_v = shared.v.from_row(strip_key);
  using Share = Shape::Share;
  const i32 out_warp = thread.warp - 4;
#line 20
  const u32 out = shared_address(shared.out(out_warp));
#line 22
  KRing::Where kv_at;
  QRing::Where q_at;
  // Of the slots of dO and dS, which go by together; dS is read a step after it was written.
  DORing::Where at;
  TileRing::Where tile_at;
#line 28
  // Says that everything of the tile before has been added to dQ; its dK and dV, two groups, may be under way.
  const auto say_added = [&]() {
    if (thread.lane == 0) {
      bulk_wait<2>();
      mbarrier_arrive(shared.added());
    }
  };

#line 37
  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const KeyTile& keys = shared.tiles[tile_at.slot()];
    if (!keys.exists) break;
    const i32 first_key = keys.first_key;

    // Line 18: write dK_j, dV_j to global memory. By the copy engine, each warp its 16 rows.
    const auto write_keys = [&](const Shape::DK& dk, const Shape::DV& dv) {
      const Thread here = thread.again();
      const i32 first_row = keys.first_key + (here.warp - 4) * kWarpRows;
      const u32 rows = shared_address(shared.out(here.warp - 4));
      const float one[2] = {1.0f, 1.0f}, scale[2] = {p.scale, p.scale};
      const auto bring_out = [&](auto tile, const auto& strip, const float (&factor)[2], const TensorMap& map) {
        store_strip(tile, 0, strip, factor, here);
        fence_proxy_async_shared();
        warp_sync();
        if (here.lane == 0) {
          if (first_row < p.len_kv) tile.store(map, first_row, keys.head, keys.sequence);
          bulk_commit();
        }
      };
#line 70
      const auto wait_for_room = [&]() {
        if (here.lane == 0) bulk_wait_read<0>();
        warp_sync();
      };
      wait_for_room();
      bring_out(Shape::DVRows{rows}, dv, one, p.dv_map);
      if constexpr (!Shape::both_at_once) wait_for_room();
      bring_out(Shape::DKRows{rows + (Shape::both_at_once ? Shape::DVRows::bytes : 0)}, dk, scale, p.dk_map);
      mbarrier_arrive(shared.tile_ring.empty(tile_at));
      tile_at.advance();
    };
#line 91
    // Line 8: for each tile of queries that may attend to some key of this tile, of each head of the group.
    const auto mask_of_member = [&](i32 member) { return mask_of(p, keys, member); };
    Queries steps = queries_of(p, keys);
    steps.start(thread, mask_of_member);
#line 109
    bool goes_on = !steps.over();
    const auto take_step = [&]() {
      const Step step = steps.step();
      steps.advance(thread, mask_of_member);
      goes_on = !steps.over();
      return step;
    };
#line 117
    if (goes_on) shared.k_ring.wait_full(kv_at);
#line 119
    if (!goes_on) {
      say_added();
      // There is nothing to add, but one that went ahead could have the reporter miss a round.
      mbarrier_wait(shared.may_add(), turn_of(tile_at));
    }
#line 126
    // Where K_j has bad values, dQ is not left to the tensor cores.
    const bool is_bad = goes_on && has_bad_keys(shared, thread);
#line 131
    if (is_bad) {
#line 133
      say_added();
      mbarrier_wait(shared.may_add(), turn_of(tile_at));
#line 136
      shared.v_ring.wait_full(kv_at);
      add_slowly(p, shared, keys, thread);
    }
#line 140
    // Line 7: dK_j = 0, dV_j = 0.
    Shape::DK dk;
    Shape::DV dv;
    clear(dk);
    clear(dv);
    wgmma_pin(dk);
    wgmma_pin(dv);
    if (goes_on) {
#line 149
      // Tiles of queries are counted over all heads that there are sums for; those of this group begin here.
      const i32 first_number = first_head(p, keys) % p.sum_heads * p.q_tiles;
#line 152
      // Lines 10 and 11: S_ij = Q_i K_j^T, from which L_i has been taken off. Where accumulators are written while
      // other products run, they are pinned: else the assembler waits for those.
      const auto preset_scores = [&](Shape::Scores& scores, QRing::Where at) {
#line 156
        spread_columns(scores, shared.lse(at), thread);
#line 160
        wgmma_pin(scores);
      };
#line 170
      const auto multiply_keys = [&](Shape::Scores& scores, QRing::Where at) {
        issue_over_columns(scores, strip_k, shared.q.slot(at.slot()));
      };
#line 181
      const auto add_to_sum = [&](i32 number, Thread thread) {
        mbarrier_wait(shared.may_add(), turn_of(tile_at));
        fence_proxy_async_shared();
        warp_sync();
        if (thread.lane == 0 && !is_bad) {
          float* const sum = p.dq_accum + static_cast<i64>(number) * Share::tile_floats + Share::warp_begin(out_warp);
          bulk_reduce_add(sum, out, Share::warp_floats(consumer) * 4);
          bulk_commit();
        }
      };
#line 193
      // Line 15: dQ_i += dS_ij K_j, of the step before. A tile's first step has none: the slot was full long ago, K_j
      // stands for dS, and nobody looks at the product. A branch would have products wait for each other.
      const auto multiply_scores = [&](Shape::DQ& dq, DSRing::Where at, bool is_there) {
        shared.ds_ring.wait_full(at);
        const Shape::DSTile ds = {is_there ? shared.ds.slot(at.slot()).address : shared.k.address};
#line 204
        issue_over_rows<kPanelColumns>(dq, Share::by_rows ? ds.panel(consumer) : ds,
                                       Share::by_rows ? shared.k : shared.k.panel(consumer));
      };
      // From registers to shared memory, from where the copy engine adds it to the sum.
      const auto put_out = [&](Shape::DQ& dq, DSRing::Where at, bool is_there) {
        wgmma_pin(dq);
#line 211
        warp_sync();
        if (thread.lane == 0 && is_there) mbarrier_arrive(shared.ds_ring.empty(at));
#line 216
        if (thread.lane == 0) bulk_wait_read<0>();
        warp_sync();
#line 223
        write_fragments(reinterpret_cast<float*>(shared.out(out_warp)), dq, thread);
      };
#line 230
      // To which tile's sum the dQ of the step before belongs, which is multiplied in the middle of this step, and that
      // of the step before that, which has been put out.
      constexpr i32 kNone = -1, chunks = chunks_of(kConfig.tile_q);
      i32 number = kNone, number_out = kNone;
#line 2 "kernels/backward_main_sm90/skip.j2"
      // A causal mask may forbid the first tile of queries all of a consumer's keys: it has nothing to add there.
      if constexpr (kConfig.has_upper && kConfig.tile_q < kConfig.tile_kv) {
        const Step step = steps.step();
        const i32 first_q = step.tile * kConfig.tile_q, end_q = smaller(first_q + kConfig.tile_q, p.len_q);
        const i32 strip_first = first_key + strip_key;
        if (mask_of(p, keys, step.member).is_empty(first_q, end_q, strip_first, strip_first + kWarpgroupRows)) {
          take_step();
          shared.q_ring.wait_full(q_at);
          shared.q_ring.release(q_at, thread);
          if (!is_bad) say_added();
          const Shape::RoundedScores none = {};
          shared.ds_ring.wait_empty(at);
#pragma unroll
          for (i32 chunk = 0; chunk < chunks; ++chunk)
            store_chunk(shared.ds.slot(at.slot()), warp_key, none, chunk, thread.again());
          fence_proxy_async_shared();
          warp_sync();
          if (thread.lane == 0) mbarrier_arrive(shared.ds_ring.full(at));
          shared.do_ring.wait_full(at);
          shared.do_ring.release(at, thread);
          shared.v_ring.wait_full(kv_at);
          number = first_number + step.member * p.q_tiles + step.tile;
          q_at.advance();
          at.advance();
        }
      }
#line 237 "kernels/backward_main_sm90/consumer.j2"
      Shape::Scores scores;
      const auto start_scores = [&](QRing::Where at) {
        shared.q_ring.wait_full(at);
        preset_scores(scores, at);
      };
#line 245
      while (goes_on) {
#line 5 "kernels/backward_main_sm90/step.j2"
        // Nothing is under way, which the assembler does not know of a loop's beginning.
        wgmma_wait<0>();
#line 9
        start_scores(q_at);
#line 11
        const Step step = take_step();
        const i32 first_q = step.tile * kConfig.tile_q;
#line 15
        multiply_keys(scores, q_at);
#line 32
        if (number == kNone) shared.v_ring.wait_full(kv_at);
        // Addresses are worked out in the loop, and not kept in registers all the while.
        const Thread here = thread.again();
#line 43
        Shape::RoundedScores ds;
        {
          // Line 13: dP_ij = dO_i V_j^T, from which D_i has been taken off.
          Shape::Scores dp;
          shared.do_ring.wait_full(at);
          spread_columns(dp, shared.dsum(at), here);
          wgmma_pin(dp);
          issue_half(dp, strip_v, shared.dout.slot(at.slot()), 0);
#line 52
          if (number == kNone && !is_bad) say_added();
#line 55
          if (number_out != kNone) add_to_sum(number_out, here);

#line 58
          // Line 11: P_ij = exp(S_ij - L_i).
          wgmma_wait<1>();
          wgmma_pin(scores);
          Shape::RoundedScores probabilities;
#line 65
          const i32 strip_first = first_key + strip_key;
          const bool strip_is_cut =
              !mask_of(p, keys, step.member)
                   .is_full(first_q, end_query(p, first_q), strip_first, strip_first + kWarpgroupRows);
#line 73
          AllowedPairs<kConfig.tile_q / 2> allowed;
#line 75
          if (strip_is_cut) {
            const Mask mask = mask_of(p, keys, step.member);
#line 83
            allowed = allowed_pairs<kConfig.tile_q / 2>(mask, first_q, first_key + warp_key, thread);
#line 85
            allowed.forbid(scores, -kInfinity);
          }
#line 112
          // Line 12: dV_j += P_ij^T dO_i. Products of a chunk run while the next one's exponentials do.
#pragma unroll
          for (i32 chunk = 0; chunk < chunks; ++chunk) {
#line 116
            for_chunk(chunk, [&](i32 i) { scores[i] = exp2_approx(scores[i] * p.scale_log2); });
#line 120
            round_chunk<element_t>(probabilities, scores, chunk);
            if (chunk == 0) issue_half(dp, strip_v, shared.dout.slot(at.slot()), 1);
#line 123
            issue_chunk(dv, probabilities, shared.dout.slot(at.slot()), chunk);
          }

#line 127
          // While dS is made; and it goes out while dK is multiplied.
          Shape::DQ dq;
          multiply_scores(dq, at.before(), number != kNone);
#line 131
          // Line 14: dS_ij = P_ij * (dP_ij - D_i). Where a pair is forbidden nothing of dP is to be seen, not even
          // that it is not a number.
          wgmma_wait<chunks + 1>();
          wgmma_pin(dp);
          if (strip_is_cut) allowed.forbid(dp, 0.0f);
          shared.ds_ring.wait_empty(at);
          // Line 16: dK_j += dS_ij^T Q_i, of each chunk when the next one has been stored.
#pragma unroll
          for (i32 chunk = 0; chunk < chunks; ++chunk) {
#line 141
            multiply_chunk(element_t{}, ds, dp, probabilities, chunk);
#line 146
            store_chunk(shared.ds.slot(at.slot()), warp_key, ds, chunk, here);
            if (chunk > 0) issue_chunk(dk, ds, shared.q.slot(q_at.slot()), chunk - 1);
          }
          fence_proxy_async_shared();
          warp_sync();
          if (thread.lane == 0) mbarrier_arrive(shared.ds_ring.full(at));
          issue_chunk(dk, ds, shared.q.slot(q_at.slot()), chunks - 1);

          wgmma_wait<chunks + 1>();
          wgmma_pin(dv);
          shared.do_ring.release(at, thread);
#line 158
          wgmma_wait<chunks>();
          put_out(dq, at.before(), number != kNone);
#line 168
          wgmma_wait<0>();
          wgmma_pin(dk);
        }
#line 247 "kernels/backward_main_sm90/consumer.j2"
        number_out = number;
        number = first_number + step.member * p.q_tiles + step.tile;
        shared.q_ring.release(q_at, thread);
        q_at.advance();
        at.advance();
      }
      shared.v_ring.release(kv_at, thread);
      // dQ of the last step.
      const auto finish_dq = [&](DSRing::Where of, i32 number) {
        Shape::DQ dq;
        multiply_scores(dq, of, true);
        wgmma_wait<0>();
        put_out(dq, of, true);
        add_to_sum(number, thread);
      };
#line 263
      if (number_out != kNone) add_to_sum(number_out, thread);
#line 270
      finish_dq(at.before(), number);
      shared.k_ring.release(kv_at, thread);
      kv_at.advance();
    }

    write_keys(dk, dv);
  }
#line 278
  say_added();
#line 280
  if (thread.lane == 0) bulk_wait<0>();
}

#line 2 "kernels/backward_main_sm90/finisher.j2"
// ---- The reporter: a warp that tells all blocks which tiles of keys have added everything to dQ, and the
// consumers of its own when the sums of their heads are clear.
FLASHGEN_DEVICE void report(const Params& p, u8* base, Thread self) {
  const Thread thread = self.again();
  const Shared shared = Shared::at(base);
  TileRing::Where tile_at;
  i32 head_before = 0;
  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const KeyTile keys = shared.tiles[tile_at.slot()];
    mbarrier_arrive(shared.tile_ring.empty(tile_at));
    // Every warp's share of the tile before has arrived.
    mbarrier_wait(shared.added(), turn_of(tile_at));
    if (tile_at.count > 0 && thread.lane == 0) atomic_add_release(done_tiles(p, head_before), 1u);
    if (!keys.exists) break;
    const i32 head = first_head(p, keys);
    if (head >= p.sum_heads) {
      // Others had the sums before, and they are to be cleared.
      for (i32 member = thread.lane; member < p.group; member += kWarpSize) {
        while (load_acquire(finished_tiles(p, head - p.sum_heads + member)) != static_cast<u32>(p.q_tiles)) {
        }
      }
      // Another block's copy engine cleared the sums, and this block's adds to them.
      fence_proxy_async_global();
    }
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(shared.may_add());
    head_before = head;
#line 33
    tile_at.advance();
  }
}

// ---- The collector: one lane that has the copy engine bring the parts of dQ that no tile of keys will add to any
// more. Which tile of queries is next is drawn from a counter of all blocks, head after head, in the order in which
// heads are done with.
FLASHGEN_DEVICE void collect(const Params& p, u8* base, Thread self) {
  const Thread thread = self.again();
  const Shared shared = Shared::at(base);
  using Share = Shape::Share;
  const i32 heads = p.tiles / p.kv_tiles * p.group;
  SumRing::Where at;
  if (thread.lane != 0) return;
  const auto draw = [&]() { return static_cast<i32>(atomic_add(p.head_counts, 1u)); };
  i32 drawn = draw();
  while (true) {
    const i32 number = drawn, head = number / p.q_tiles, tile = number - head * p.q_tiles;
    if (head >= heads) break;
    const u32* const done = done_tiles(p, head - head % p.group);
    while (load_acquire(done) != static_cast<u32>(p.kv_tiles)) {
    }
    fence_proxy_async();
    // It comes while parts of this tile do.
    drawn = draw();
    const i32 place = head % p.sum_heads * p.q_tiles + tile;
    // Whether another head is still to have it.
    const bool are_needed_again = head + p.sum_heads < heads;
    const i32 sequence = head / p.heads_q;
    for (i32 warp = 0; warp < parts_of_dq; ++warp) {
      const i32 consumer = warp / 4;
      const SumPart part = {Share::column(consumer),
                            tile * kConfig.tile_q + Share::row(consumer) + warp % 4 * kWarpRows,
                            head - sequence * p.heads_q,
                            sequence,
                            place * (Share::tile_floats / SumLines::floats) + Share::warp_begin(warp) / SumLines::floats,
                            Share::warp_floats(consumer) / (2 * SumLines::floats),
                            are_needed_again,
                            warp == parts_of_dq - 1};
      shared.sum_ring.wait_empty(at);
      shared.sum_parts[at.slot()] = part;
      mbarrier_arrive_expect_tx(shared.sum_ring.full(at), static_cast<u32>(part.boxes) * SumLines::box_bytes);
      SumLines{shared_address(shared.sum(at))}.load(p.dq_accum_map, shared.sum_ring.full(at), part.line, part.boxes);
      // The sum may be cleared by who knows that it is being read.
      mbarrier_arrive(shared.sum_ring.full(at));
      at.advance();
    }
  }
  shared.sum_ring.wait_empty(at);
  shared.sum_parts[at.slot()] = {};
  mbarrier_arrive(shared.sum_ring.full(at));
  mbarrier_arrive(shared.sum_ring.full(at));
}

// ---- The finisher: a warp that brings these to their type, and clears the sum for the next head.
FLASHGEN_DEVICE void finish(const Params& p, u8* base, Thread self) {
  const Thread thread = self.again();
  const Shared shared = Shared::at(base);
  SumRing::Where at;
  while (true) {
    shared.sum_ring.wait_full(at);
    const SumPart& part = shared.sum_parts[at.slot()];
    const i32 boxes = part.boxes;
    if (boxes == 0) break;
    // dQ_i = scale * (sum over the tiles of keys), for rows of one warp.
    const Shape::DQRows rows = shared.dq_rows.slot(static_cast<i32>(at.count % kConfig.rounded_slots));
    if (thread.lane == 0) bulk_wait_read<kConfig.rounded_slots - 1>();
    warp_sync();
    const float* const sum = reinterpret_cast<const float*>(shared.sum(at));
    finish_box<0>(rows, sum, p.scale, thread);
    if (kConfig.head_dim % kPanelColumns == 0 || boxes == 2) finish_box<1>(rows, sum, p.scale, thread);
    fence_proxy_async_shared();
    warp_sync();
    if (thread.lane == 0) {
      const SumPart here = part;
      if (here.row < p.len_q) tma_store_4d(&p.dq_map, rows.address, here.column, here.row, here.head, here.sequence);
      if (here.is_needed_again) SumLines{shared_address(base + smem::kZeros)}.repeat(p.dq_accum_map, here.line, boxes);
      bulk_commit();
      if (here.is_needed_again && here.is_last) {
        bulk_wait<0>();
        atomic_add_release(finished_tiles(p, here.sequence * p.heads_q + here.head), 1u);
      }
    }
    mbarrier_arrive(shared.sum_ring.empty(at));
    at.advance();
  }
  if (thread.lane == 0) bulk_wait<0>();
}

#line 197 "kernels/backward_main_sm90.cu.j2"
FLASHGEN_KERNEL(384, 1) backward_main_d128_causal_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  const Thread thread = Thread::current();
  const Shared shared = Shared::at(base);
#line 202
  // What sums are cleared with.
  for (i32 i = thread.index(); i < static_cast<i32>(SumLines::box_bytes) / kChunkBytes; i += 384)
    reinterpret_cast<Vec16*>(base + smem::kZeros)[i] = Vec16{.words = {0, 0, 0, 0}};
  fence_proxy_async_shared();
#line 207
  if (thread.index() == 0) {
    constexpr u32 consumer_warps = Shape::consumer_warps;
    shared.k_ring.init(1, consumer_warps);
    shared.v_ring.init(1, consumer_warps);
    shared.q_ring.init(1, consumer_warps);
    shared.do_ring.init(1, consumer_warps);
    shared.ds_ring.init(consumer_warps, consumer_warps);
#line 219
    // What tells of a tile of keys, or of a part of dQ, is read by all lanes, and each gives it back for itself.
    // The reporter reads them, too.
    shared.tile_ring.init(1, kWarpSize * (consumer_warps + 1));
    shared.sum_ring.init(2, kWarpSize);
    mbarrier_init(shared.added(), consumer_warps);
    mbarrier_init(shared.may_add(), 1);
#line 226
    fence_mbarrier_init();
  }
  block_sync();

  // The registers that copying does not need go to those who compute. Each role finds out again who it is: so
  // few are left for copying that nothing else is to be kept.
  if (thread.warp < 4) {
    setmaxnreg_dec<kConfig.producer_registers>();
    if (thread.warp == 0) produce(p, base, thread);
#line 239
    else if (thread.warp == 1) report(p, base, thread);
    else if (thread.warp == 2) collect(p, base, thread);
    else finish(p, base, thread);
#line 243
  } else {
    setmaxnreg_inc<kConfig.consumer_registers>();
    consume(p, base);
  }
}
