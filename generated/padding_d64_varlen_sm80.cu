// padding_d64_varlen_sm80: FlashAttention-2, after either pass: zeros in rows of packed arrays that belong to
// no sequence.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"full","direction":"forward","deterministic":false,"varlen":true}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --forward-only --varlen --arch sm_80
// for      sm_80 (A100)
// plan     warps 4, 128 threads
// grid     one block for every 32 rows of all heads

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

#line 4 "flashgen/padding.cuh"
// Rows of packed arrays that belong to no sequence.

namespace flashgen {

struct PaddingConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 rows;
  i32 warps;
  i32 access_bytes;
};

// Where the sequences of packed rows begin, as the other kernels read it: none is longer than `longest`.
struct PackedRows {
  const i32* starts;
  i32 sequences;
  i32 longest;
  i64 total;

  // Gap g lies before sequence g, and the last one behind all sequences. Gaps and sequences together form a
  // path from row 0 to row `total`, so they cover every row, whatever numbers `starts` holds.
  FLASHGEN_DEVICE i64 gap_begin(i32 gap) const {
    if (gap == 0) return 0;
    const i64 first = starts[gap - 1], length = starts[gap] - first;
    return first + (length < 0 ? 0 : length < longest ? length : longest);
  }
  FLASHGEN_DEVICE i64 gap_end(i32 gap) const { return gap < sequences ? starts[gap] : total; }
};

FLASHGEN_DEVICE i32 clamp_row(i64 row, Range rows) {
  return static_cast<i32>(row < rows.begin ? rows.begin : row > rows.end ? rows.end : row);
}

// Calls `visit` with each stretch of `rows` that lies in a gap. Lane l looks at gaps l, l + 32 ...
template <class Visit>
FLASHGEN_DEVICE void for_each_gap(const PackedRows& packed, Range rows, Thread thread, const Visit& visit) {
#pragma unroll 1
  for (i32 first = 0; first <= packed.sequences; first += kWarpSize) {
    const i32 gap = first + thread.lane;
    const bool exists = gap <= packed.sequences;
    const Range own{exists ? clamp_row(packed.gap_begin(gap), rows) : 0,
                    exists ? clamp_row(packed.gap_end(gap), rows) : 0};
    for (u32 left = warp_ballot(own.size() > 0); left != 0; left &= left - 1) {
      const i32 lane = lowest_bit(left);
      visit(Range{shuffle(own.begin, lane), shuffle(own.end, lane)});
    }
  }
}

// Zeros into whole rows of a contiguous (rows, heads, head_dim) array, by one warp. A null array is none.
template <i32 access_bytes, class T>
FLASHGEN_DEVICE void clear_whole_rows(T* data, Range rows, i64 row_elements, Thread thread) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  if (data == nullptr) return;
  const i64 end = rows.end * row_elements;
  for (i64 i = rows.begin * row_elements + thread.lane * chunk_elements; i < end;
       i += kWarpSize * chunk_elements) {
    const i32 valid = end - i < chunk_elements ? static_cast<i32>(end - i) : chunk_elements;
    write_chunk<T, access_bytes>(data + i, Vec16{.words = {0, 0, 0, 0}}, valid);
  }
}

// Minus infinity into rows of a contiguous (heads, total) array.
FLASHGEN_DEVICE void clear_log_sums(float* lse, Range rows, i32 heads, i64 total, Thread thread) {
  if (lse == nullptr) return;
  for (i32 head = 0; head < heads; ++head) {
    for (i32 row = rows.begin + thread.lane; row < rows.end; row += kWarpSize)
      lse[head * total + row] = -kInfinity;
  }
}

}  // namespace flashgen

#line 6 "kernels/padding.cu.j2"
using namespace flashgen;

using element_t = bfloat16_t;

constexpr PaddingConfig kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
    .rows = 32,
    .warps = 4,
    .access_bytes = 16,
};

struct Params {
  const i32* cu_seqlens_q;  // where the queries of each sequence begin
  const i32* cu_seqlens_k;
  element_t* o;  // results of a pass; null: of the other one
  float* lse;
  element_t* dq;
  element_t* dk;
  element_t* dv;
  i64 total_q;  // rows of queries
  i64 total_kv;
  i32 batch;  // sequences
  i32 heads_q;
  i32 heads_kv;
  i32 len_q;  // of the longest sequence
  i32 len_kv;
};
static_assert(sizeof(Params) == 96, "the launcher packs Params into 96 bytes");

#line 14
FLASHGEN_KERNEL(128, 1) padding_d64_varlen_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  const Thread thread = Thread::current();

  // Each warp looks for gaps in rows of its own: rows of queries, then as many rows of keys.
  constexpr i32 rows_of_warp = kConfig.rows / kConfig.warps;
  const i64 first_row = static_cast<i64>(block_idx_x()) * kConfig.rows + thread.warp * rows_of_warp;
  const auto rows_below = [&](i64 total) {
    const Range all{0, static_cast<i32>(total)};
    return Range{clamp_row(first_row, all), clamp_row(first_row + rows_of_warp, all)};
  };

  const PackedRows queries{p.cu_seqlens_q, p.batch, p.len_q, p.total_q};
  for_each_gap(queries, rows_below(p.total_q), thread, [&](Range rows) {
    clear_whole_rows<kConfig.access_bytes>(p.o, rows, static_cast<i64>(p.heads_q) * kConfig.head_dim_v, thread);
    clear_log_sums(p.lse, rows, p.heads_q, p.total_q, thread);
    clear_whole_rows<kConfig.access_bytes>(p.dq, rows, static_cast<i64>(p.heads_q) * kConfig.head_dim, thread);
  });

  // A forward pass writes no rows of keys.
  if (p.dk == nullptr) return;
  const PackedRows keys{p.cu_seqlens_k, p.batch, p.len_kv, p.total_kv};
  for_each_gap(keys, rows_below(p.total_kv), thread, [&](Range rows) {
    clear_whole_rows<kConfig.access_bytes>(p.dk, rows, static_cast<i64>(p.heads_kv) * kConfig.head_dim, thread);
    clear_whole_rows<kConfig.access_bytes>(p.dv, rows, static_cast<i64>(p.heads_kv) * kConfig.head_dim_v, thread);
  });
}
