// backward_query_d256_causal_sm90a: FlashAttention-3, backward pass: dQ, without atomics.
//
// spec     {"head_dim":256,"head_dim_v":256,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 256 --dtype bf16 --causal --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 128, tile_kv 64, k_stages 2, v_stages 1, 384 threads
// roles    of 1 warpgroup one warp brings tiles (24 registers a thread); 2 compute, 64 queries each (240)
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 128
//          query rows of a query head and batch entry; they start while the grid before them ends, and wait
//          for it
// smem     231104 bytes
// because  the widest tile of keys with two slots
//
// contents   44  Instructions, one per function: types, device, math.
//           134  Element types.
//           171  Instructions, one per function: barrier, bulk, grid, descriptor, wgmma.
//           492  Rings of slots in shared memory, filled by one side and emptied by the other.
//           540  Tiles as TMA writes them and wgmma reads them.
//           653  Dropout of probabilities.
//           663  Dropout of probabilities in the backward pass.
//           670  Banded masks.
//           744  The order in which persistent blocks draw tiles.
//           779  Streaming tiles between global and shared memory.
//           792  Where a tile of keys lies, and the queries that attend to it.
//           802  Probabilities P of transposed scores, and the factor of dS.
//           830  Writing a warpgroup's results to shared and global memory.
//           886  What the backward mainloops do with fragments.
//           904  Finding NaN and infinity.
//           918  Tiles of results that the mainloops could not compute, because an operand holds NaN or infinity.
//           933  The sizes of a forward kernel for Hopper.
//           948  A tile of queries, as the scheduler announces it.
//           984  Which tile of queries a persistent block computes next.
//          1017  A tile of queries in the kernel that computes dQ alone.
//          1047  Which blocks of keys a tile of queries visits, and which of them the mask cuts.
//          1111  The backward pass on Hopper, for heads wider than 128.
//          1438  The kernel: its configuration, parameters and text.

// The shapes of its products, by their columns.
#define WGMMA_SHAPES(shape) shape(64) shape(256)

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

// Describes a tensor in global memory and the box that one bulk copy moves. The host encodes it, and a kernel
// gets it in its __grid_constant__ parameters.
struct alignas(64) TensorMap {
  unsigned long long words[16];
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
FLASHGEN_DEVICE i32 grid_dim_x() { return static_cast<i32>(gridDim.x); }
FLASHGEN_DEVICE void block_sync() { __syncthreads(); }
FLASHGEN_DEVICE void warp_sync() { __syncwarp(); }
FLASHGEN_DEVICE bool warp_any(bool condition) { return __any_sync(0xffffffffu, condition) != 0; }
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

// The same value, hidden from the compiler's analysis.
FLASHGEN_DEVICE i32 opaque(i32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The 32-bit address of a pointer into shared memory, as instructions take it.
FLASHGEN_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- flashgen/ptx/math.cuh
// Scalar arithmetic, one instruction each.

// 2^x within 2 ulp. Subnormal results are flushed to zero.
FLASHGEN_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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
constexpr i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
constexpr i32 larger(i32 a, i32 b) { return a > b ? a : b; }

}  // namespace flashgen

#if !defined(FLASHGEN_EMULATOR)
// ---- flashgen/ptx/barrier.cuh
// Barriers at which threads may arrive without waiting, or wait without arriving. Named barriers exist on
// every GPU, mbarriers are for sm_90 and later.

namespace flashgen {

// ---- Named barriers 1 to 15 of a block: barrier 0 is block_sync's. `threads` counts those of whole warps.

// ---- mbarriers: 8 bytes of shared memory. A phase ends when `count` threads have arrived and all expected
// bytes have been copied. A wait names the parity of its phase; the first phase has parity 0.

FLASHGEN_DEVICE void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
FLASHGEN_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
FLASHGEN_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Whether the phase of this parity has ended. Waits for a while before it returns false.
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
FLASHGEN_DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {}
}

// ---- Fences

// Makes this thread's mbarrier_init visible to bulk copies and, after a barrier, to the cluster's other
// blocks.
FLASHGEN_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// ---- flashgen/ptx/bulk.cuh
// Bulk copies: TMA moves whole boxes and runs of bytes (sm_90 and later). An mbarrier counts the bytes of
// loads. The issuing thread waits for groups of stores and reductions. A fence comes before copies of what
// threads wrote.

// ---- Boxes of tensors. Coordinates count elements, the contiguous dimension first, where a box begins at a
// multiple of 16 bytes. Boxes may extend beyond the tensor, but a stored box must not begin before it. The
// hardware clips it at a multiple of 16 bytes, so it writes beyond the end of rows of any other length.

FLASHGEN_DEVICE void tma_load_4d(u32 destination, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2,
                                 i32 c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
FLASHGEN_DEVICE void tma_store_4d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2, i32 c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// Prefetches the map itself.
FLASHGEN_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Runs of bytes. Sizes and addresses are multiples of 16.
FLASHGEN_DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// ---- flashgen/ptx/grid.cuh
// Communication between blocks and between grids: atomics, ordered accesses of global memory, and
// programmatic dependent launch.

// ---- Atomic operations, relaxed unless their names say otherwise. Additions return the previous value.

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
FLASHGEN_DEVICE void atomic_or(u32* address, u32 bits) {
  asm volatile("red.global.or.b32 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
}
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

// ---- Programmatic dependent launch (sm_90 and later)

// Waits until the grids before this one are complete and their writes are visible.
FLASHGEN_DEVICE void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next grid start. After its griddep_wait, that grid sees all writes of this one, also later ones.
FLASHGEN_DEVICE void griddep_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- flashgen/ptx/descriptor.cuh
// The 64-bit descriptor of an operand of wgmma in shared memory.
//
// An operand is made of core matrices: eight rows of 16 bytes. A row is a line along the major dimension: K
// (the summed one) or MN. Swizzled by 32, 64 or 128 bytes, eight rows of that width lie one after another,
// and the hardware permutes the 16-byte chunks of each line by its address. The two byte offsets then mean
//
//   major   leading_bytes                                  stride_bytes
//   k       not used; unswizzled, the next 16 bytes of K   next 8 rows along MN
//   mn      next line's width along MN                     next 8 rows along K (unswizzled, the two swap)

enum class Swizzle : u32 { none = 0, bytes_128 = 1, bytes_64 = 2, bytes_32 = 3 };

// The dimension along which elements are adjacent.
enum class Major : i32 { k = 0, mn = 1 };

struct MatrixDescriptor {
  u32 low;   // address and leading offset, in units of 16 bytes
  u32 high;  // stride offset, and the swizzle

  // The operand `bytes` later. The sum must stay within shared memory.
  constexpr MatrixDescriptor advanced(u32 bytes) const { return {low + (bytes >> 4), high}; }
  constexpr u64 bits() const { return static_cast<u64>(high) << 32 | low; }
};

// Within a cluster the upper bits of an address are the block's rank. Descriptors do not contain them.
constexpr MatrixDescriptor encode_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes,
                                             Swizzle swizzle) {
  constexpr u32 mask = 0x3fff0;
  return {(address & mask) >> 4 | (leading_bytes & mask) << 12,
          (stride_bytes & mask) >> 4 | static_cast<u32>(swizzle) << 30};
}

// ---- flashgen/ptx/wgmma.cuh
// Matrix products of a warpgroup (sm_90a): four consecutive warps, the first a multiple of 4.
//
// Products are asynchronous. Do not touch operands and accumulators until a wait completes the group in which
// they were committed. The left operand has 64 rows, the right one `n` columns, and one product sums over 32
// bytes of K. Thread t of the warpgroup holds in d[4j + 2h + c] row 16 (t / 32) + t % 32 / 4 + 8h, column
// 8j + 2 (t % 4) + c.

// Sets the number of registers per thread, a multiple of 8 from 24 to 256. All warps of a warpgroup call it.
// An increase waits until other warpgroups have released enough.
template <i32 registers>
FLASHGEN_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <i32 registers>
FLASHGEN_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Orders accesses of registers before later products that use them: before the first one, and again after
// accumulators or fragments of the left operand were modified.
FLASHGEN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FLASHGEN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` groups are in flight.
template <int pending>
FLASHGEN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// No instruction. The compiler does not know that a fence or a wait concerns the accumulators; this keeps it
// from moving accesses of them across.
template <i32 count>
FLASHGEN_DEVICE void wgmma_pin(float (&d)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

FLASHGEN_DEVICE MatrixDescriptor matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes,
                                                   Swizzle swizzle) {
  return encode_descriptor(address, leading_bytes, stride_bytes, swizzle);
}

// The part of the instruction's name that begins with the depth.
template <class T>
struct WgmmaType;
template <>
struct WgmmaType<bfloat16_t> {
  static constexpr char name[] = "k16.f32.bf16.bf16";
};

// The immediates after the operands: signs and, for 16-bit types, the majors.
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

// An instruction names each of its n / 2 accumulators, so there is one function for each n. The operands
// after the accumulators have the numbers from n / 2 on.
template <i32 n>
struct Wgmma {
  static_assert(n % 8 == 0 && n >= 8 && n <= 256, "wgmma has 8 to 256 columns, in steps of 8");
};

// The names of a product's n / 2 accumulators, ten at a time: %30, %31, ...
#define WGMMA_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define WGMMA_NAMES_8 "%0, %1, %2, %3"
#define WGMMA_NAMES_64 WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31"
#define WGMMA_NAMES_80 \
  WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_160                         \
  WGMMA_NAMES_80 ", " WGMMA_TEN(4) WGMMA_TEN(5) \
      WGMMA_TEN(6) "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_240                          \
  WGMMA_NAMES_160 ", " WGMMA_TEN(8) WGMMA_TEN(9) \
      WGMMA_TEN(10) "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_NAMES_256 \
  WGMMA_NAMES_240       \
  ", "                  \
  "%120, %121, %122, %123, %124, %125, %126, %127"

// The accumulators as operands with the constraint c.
#define WGMMA_FLOATS_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define WGMMA_FLOATS_16(c, i) \
  WGMMA_FLOATS_4(c, i), WGMMA_FLOATS_4(c, i + 4), WGMMA_FLOATS_4(c, i + 8), WGMMA_FLOATS_4(c, i + 12)
#define WGMMA_FLOATS_64(c, i) \
  WGMMA_FLOATS_16(c, i), WGMMA_FLOATS_16(c, i + 16), WGMMA_FLOATS_16(c, i + 32), WGMMA_FLOATS_16(c, i + 48)
#define WGMMA_REGISTERS_8(c) WGMMA_FLOATS_4(c, 0)
#define WGMMA_REGISTERS_64(c) WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_16(c, 16)
#define WGMMA_REGISTERS_256(c) WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_64(c, 64)

// The numbers of the operands after the accumulators.
#define WGMMA_FROM_8 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26
#define WGMMA_FROM_64 \
  32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54
#define WGMMA_FROM_256                                                                                     \
  128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143, 144, 145, 146, 147, 148, \
      149, 150

// One product, and what goes before the first of some: p says whether it adds to the accumulators.
#define WGMMA_BEGIN(accumulate) "{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate ", 0;\n"
#define WGMMA_PRODUCT(n, a, b, type, tail) \
  "wgmma.mma_async.sync.aligned.m64n" #n "%" #type " {" WGMMA_NAMES_##n "}, " a ", %" #b ", p%" #tail ";\n"
#define WGMMA_LEFT(i0, i1, i2, i3) "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}"
#define WGMMA_LEFT_REGISTERS(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define WGMMA_FORM "C"(WgmmaType<T>::name), "C"(WgmmaTail<sizeof(T) == 2, majors...>::text)

#define WGMMA_SS(function, c, n, i0, i1, i2, i3, i4)                                                         \
  template <class T, Major... majors>                                                                        \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b, i32 add) { \
    asm volatile(WGMMA_BEGIN(i2) WGMMA_PRODUCT(n, "%" #i0, i1, i3, i4) "}"                                   \
                 : WGMMA_REGISTERS_##n(c)                                                                    \
                 : "l"(a.bits()), "l"(b.bits()), "r"(add), WGMMA_FORM);                                      \
  }
#define WGMMA_RS(function, c, n, i0, i1, i2, i3, i4, i5, i6, i7)                                           \
  template <class T, Major... majors>                                                                      \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], const u32(&a)[4], MatrixDescriptor b, i32 add) { \
    asm volatile(WGMMA_BEGIN(i5) WGMMA_PRODUCT(n, WGMMA_LEFT(i0, i1, i2, i3), i4, i6, i7) "}"              \
                 : WGMMA_REGISTERS_##n(c)                                                                  \
                 : WGMMA_LEFT_REGISTERS(a), "l"(b.bits()), "r"(add), WGMMA_FORM);                          \
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

// A kernel may define WGMMA_SHAPES to the shapes that it uses, because each takes some time to compile.
WGMMA_SHAPES(WGMMA_SHAPE)
// d = a * b, plus what d held if `accumulate`; both operands in shared memory.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b, bool accumulate) {
  Wgmma<n>::template add_ss<T, a_major, b_major>(d, a, b, accumulate);
}

// The same with the left operand in registers. Each warp holds its 16 rows in the layout of mma_m16n8k16, or
// of mma_m16n8k32 for 8-bit types.
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs(float (&d)[n / 2], const u32 (&a)[4], MatrixDescriptor b, bool accumulate) {
  Wgmma<n>::template add_rs<T, b_major>(d, a, b, accumulate);
}

}  // namespace flashgen
#endif
// ---- flashgen/ring.cuh
// Rings of slots in shared memory, filled by one side and emptied by the other. Each slot has two mbarriers:
// one that ends a phase when the slot is full, one when it is empty again.

namespace flashgen {

// A position in a ring, as CUTLASS's PipelineState: the number of slots passed so far.
template <i32 slots>
struct RingState {
  static_assert((slots & (slots - 1)) == 0, "include ring_any_size.cuh");
  u32 count = 0;

  FLASHGEN_DEVICE i32 slot() const { return static_cast<i32>(count % slots); }
  // The parity of the round.
  FLASHGEN_DEVICE u32 parity() const { return count / slots % 2; }
  FLASHGEN_DEVICE void advance(i32 by = 1) { count += static_cast<u32>(by); }
  FLASHGEN_DEVICE RingState before() const { return {count - 1}; }
};

template <i32 slots>
struct Ring {
  using State = RingState<slots>;

  // The address of its barriers: full ones, then empty ones.
  u32 barriers;

  FLASHGEN_DEVICE u32 full(State at) const { return full_of(at.slot()); }
  FLASHGEN_DEVICE u32 full_of(i32 slot) const { return barriers + 8 * slot; }
  FLASHGEN_DEVICE u32 empty(State at) const { return barriers + 8 * (slots + at.slot()); }

  // Sets how many arrivals fill a slot and how many empty it. One thread calls this before any other use.
  FLASHGEN_DEVICE void init(u32 fillers, u32 emptiers) const {
#pragma unroll
    for (i32 i = 0; i < slots; ++i) {
      mbarrier_init(barriers + 8 * i, fillers);
      mbarrier_init(barriers + 8 * (slots + i), emptiers);
    }
  }
  // A ring begins empty: waits of the first round are for a phase that counts as ended.
  FLASHGEN_DEVICE void wait_empty(State at) const { mbarrier_wait(empty(at), at.parity() ^ 1); }
  FLASHGEN_DEVICE void wait_full(State at) const { mbarrier_wait(full(at), at.parity()); }
  // One arrival per warp, once all its lanes are done with the slot.
  FLASHGEN_DEVICE void release(State at, Thread thread) const {
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(empty(at));
  }
};

// ---- flashgen/panel.cuh
// Tiles as TMA writes them and wgmma reads them: panels of 128-byte rows, one panel after
// another, each swizzled by 128 bytes (chunk c of row r lies at c ^ (r % 8)).

constexpr i32 kWarpgroupRows = 64;
constexpr i32 kWarpRows = 16;
constexpr i32 kPanelBytes = 128;
// Eight rows: the period of the swizzle, and the alignment of tiles.
constexpr i32 kSwizzleBytes = 8 * kPanelBytes;

// rows x cols elements of T at `address`; the last panel may be wider than what is left of the columns.
template <class T, i32 rows_, i32 cols_>
struct PanelTile {
  using Element = T;
  static constexpr i32 rows = rows_;
  static constexpr i32 cols = cols_;
  static constexpr i32 panel_cols = kPanelBytes / static_cast<i32>(sizeof(T));
  static constexpr i32 panels = ceil_div(cols, panel_cols);
  // Bytes from one panel to the next. `rows` are those of the whole tile, also for a part of it.
  static constexpr i32 panel_stride = rows * kPanelBytes;
  static constexpr i32 bytes = panels * panel_stride;
  // k-steps of a product along the columns, 32 bytes each, in all and per panel.
  static constexpr i32 steps = cols * static_cast<i32>(sizeof(T)) / 32;
  static constexpr i32 panel_steps = 4;

  u32 address;

  FLASHGEN_DEVICE PanelTile slot(i32 index) const { return {address + static_cast<u32>(index * bytes)}; }
  // The rows from `row` on, a multiple of eight, the swizzle's period.
  FLASHGEN_DEVICE PanelTile from_row(i32 row) const {
    return {address + static_cast<u32>(row * kPanelBytes)};
  }

  // The tile's rows from `row` on of one head of one sequence, from column `column` on; `barrier` counts
  // `bytes`.
  FLASHGEN_DEVICE void load(const TensorMap& map, u32 barrier, i32 row, i32 head, i32 sequence,
                            i32 column = 0) const {
#pragma unroll
    for (i32 p = 0; p < panels; ++p)
      tma_load_4d(address + p * panel_stride, &map, barrier, column + p * panel_cols, row, head, sequence);
  }
  // Stores boxes of as many rows as the map has. TMA clips them to the tensor.
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
FLASHGEN_DEVICE void clear_strip(float (&strip)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] = 0.0f;
}

// An accumulator rounded to T, in pairs, as the left operand (A in registers) of the next product.
template <i32 n>
using Rounded = u32[n / 16][4];

// Issues sums += A B^T, for 64 rows of A.
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

// Issues out += P V, or out = P V unless `kept`, for 64 rows of P in registers.
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

// ---- flashgen/sm90/dropping.cuh
// Dropout of probabilities: the Dropout policy of the mainloop.

// Keeps all pairs.
struct NoDropout {
  template <i32 columns>
  FLASHGEN_DEVICE static NoDropout draw(const auto&...) { return {}; }
  FLASHGEN_DEVICE static float factor(const auto&) { return 1.0f; }
};

// ---- flashgen/sm90/backward_dropping.cuh
// Dropout of probabilities in the backward pass: the Dropout policy of the backward mainloops.

struct NoBackwardDropout : NoDropout {
  FLASHGEN_DEVICE static void drop_gradients(const auto&...) {}
};

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
  static constexpr bool is_bounded = has_lower || has_upper;
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
};

// A lane has two of every eight columns. Bit 2n + c stands for column 8n + c; those from `column` on are set.
FLASHGEN_DEVICE u32 bits_from(i32 column) {
  const u32 c = static_cast<u32>(smaller(larger(column, 0), 128));
  return static_cast<u32>(~u64{0} << (c / 8 * 2 + (c % 8 < 2 ? c % 8 : 2)));
}

// The keys that a band allows for a query, as bits_from() counts them from `key`, the lane's first one.
template <bool has_lower, bool has_upper>
FLASHGEN_DEVICE u32 allowed_keys(const Band<has_lower, has_upper>& mask, i32 q, i32 key) {
  i32 end = mask.len_kv - key;
  end = smaller(end, q + mask.upper - key + 1);
  u32 allowed = ~bits_from(end);
  return allowed;
}

// Puts `value` wherever the mask forbids a pair of a warp's 16 rows. Rows beyond the last query may get any
// values. The assembler tests seven bits at once.
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

// ---- flashgen/sm90/sections.cuh
// The order in which persistent blocks draw tiles.
//
// Blocks draw numbers from a counter in global memory, so that none waits while another has tiles left.
// Consecutive numbers are tiles of a few heads, a section, whose operands then stay in the L2 cache.

// A tile's turn among those of its head, and the head, counted over all sequences. Turns vary slowest.
struct SectionTile {
  i32 turn;
  i32 head;
};

// Tile `number` of `tiles`.
template <i32 section_heads>
FLASHGEN_DEVICE SectionTile section_tile(i32 number, i32 tiles, i32 tiles_of_head) {
  // A partial section comes first: at the end its few long tiles would leave most blocks without work.
  const i32 partial = tiles / tiles_of_head % section_heads, rest = number - partial * tiles_of_head;
  i32 first_head = 0, section = partial;
  if (rest >= 0) {
    section = section_heads;
    first_head = partial + rest / (section * tiles_of_head) * section;
    number = rest % (section * tiles_of_head);
  }
  return {number / section, first_head + number % section};
}

// p.counter is two counters: of tiles drawn, and of blocks that have drawn their last one. The last block
// resets both for the next launch.
FLASHGEN_DEVICE void leave_counters(const auto& p) {
  if (atomic_add_release(p.counter + 1, 1u) + 1 == static_cast<u32>(grid_dim_x())) {
    store_release(p.counter, 0u);
    store_release(p.counter + 1, 0u);
  }
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

// ---- flashgen/sm90/key_tile.cuh
// Where a tile of keys lies, and the queries that attend to it: the Sequence policy of the backward kernels
// that keep keys. A tile is what the producer announces to the other warps.

// A step of the loop over queries: a block of queries of one head of the group that shares the keys.
struct QueryStep {
  i32 member;
  i32 block;
};

// ---- flashgen/sm90/backward_scores.cuh
// Probabilities P of transposed scores, and the factor of dS: the Score policy of the backward kernels.
//
//     dS = factor (dP - D),   factor = P times the slope of the score
//
// Rows are keys, and columns are queries. Scores come in chunks of 32 queries. `masks_query_end`: queries
// beyond the last must be masked, because an expression may turn their products, which are 0, into anything.

// Logits are the products, scaled. Accumulators start at -L / scale, so a product is S - L already.
struct NoScore {
  // What is loaded for a block's pairs while its products are under way.
  template <i32 queries>
  struct Pairs {};

  template <i32 queries, class Params, class Tile>
  FLASHGEN_DEVICE static Pairs<queries> load(const Params&, const Tile&, QueryStep, i32, i32, Thread) {
    return {};
  }

  // Where rows are queries: the factors of dS take the place of the scores.
  template <i32 keys, class Params, class Tile>
  FLASHGEN_DEVICE static void take_factors(Strip<keys>& scores, const Params& p, const Tile&,
                                           const float (&)[2], i32, i32, Thread) {
#pragma unroll
    for (i32 i = 0; i < keys / 2; ++i) scores[i] = exp2_approx(scores[i] * p.scale_log2);
  }
};

// ---- flashgen/strip.cuh
// Writing a warpgroup's results to shared and global memory.

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

// Writes a warp's 16 rows, from `row` on, to global memory: the first `stored` columns of them.
template <class T, i32 columns, i32 stored>
FLASHGEN_DEVICE void write_strip(GlobalRows<T> rows_of, i32 row, const Strip<columns>& strip,
                                 const float (&scale)[2], Thread thread) {
  static_assert(columns % 32 == 0 && stored % 8 == 0, "a quad of lanes writes 32 columns, each lane 8");
  // As many chunks at a time as registers surely allow.
  constexpr i32 chunks = columns / 32, together = chunks % 4 == 0   ? 4
                                                  : chunks % 3 == 0 ? 3
                                                  : chunks % 2 == 0 ? 2
                                                                    : 1;
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 mine = row + 8 * h + thread.row();
    const i32 own_column = 8 * (thread.lane % 4);
    Vec16* const target = reinterpret_cast<Vec16*>(rows_of.at(mine, own_column));
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
      for (i32 g = 0; g < together; ++g) {
        if (stored == columns || own_column + 32 * (first + g) < stored) target[4 * (first + g)] = made[g];
      }
    }
  }
}

// ---- flashgen/sm90/backward_products.cuh
// What the backward mainloops do with fragments: accumulators that are preset, products in parts, dS.
//
// A part of a product is a group of its own, so that it runs while the next one's operand is computed.

// The same with a float for each of a lane's two rows.
template <i32 count>
FLASHGEN_DEVICE void preset_rows(float (&strip)[count], const float (&rows)[2]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] = rows[i / 2 % 2];
  wgmma_pin(strip);
}
template <i32 count>
FLASHGEN_DEVICE void preset_zero(float (&strip)[count]) {
  clear_strip(strip);
  wgmma_pin(strip);
}

// ---- flashgen/non_finite.cuh
// Finding NaN and infinity.

// 0, or NaN if an element of a lane's first row, or the first one of its second row, is not finite. That is
// enough: an operand that reaches rows it must not reach makes a column of all rows NaN, or a whole row.
template <i32 count>
FLASHGEN_DEVICE float first_row_times_zero(const float (&strip)[count]) {
  float zero[2] = {strip[2] * 0.0f, 0.0f};
#pragma unroll
  for (i32 i = 0; i < count / 2; ++i)
    zero[i % 2] = fused_multiply_add(strip[4 * (i / 2) + i % 2], 0.0f, zero[i % 2]);
  return zero[0] + zero[1];
}

// ---- flashgen/sm90/failed_tiles.cuh
// Tiles of results that the mainloops could not compute, because an operand holds NaN or infinity.
//
// A mask gives a pair the probability 0, but 0 * NaN is NaN: a NaN in V, K, Q or dO reaches all results of
// the tiles that it meets in a product. Such data are rare, so the mainloops do not look for them. The
// epilogues check what they store, and flag tiles that are not finite. backward_repair.cuh computes these
// again, pair by pair. Without a mask nothing is to be checked, because all pairs are allowed.

// Flags of tiles: of dQ first, for each tile of queries and head, then of dK and dV, for each tile of keys
// and head. Several warps may flag the same tile. Kernels without a mask have no such parameters.
template <bool has_mask, class Params>
FLASHGEN_DEVICE void flag_queries(const Params& p, i32 tile) {
  if constexpr (has_mask) atomic_or(p.failed_tiles + tile, 1u);
}

// ---- flashgen/sm90/forward_config.cuh
// The sizes of a forward kernel for Hopper. The plan chooses them.

struct ForwardSm90Config {
  i32 head_dim, head_dim_v;  // of Q and K, of V and O, rounded up to 16: TMA fills the rest with zeros
  i32 stored_columns;        // of O
  i32 tile_q, tile_kv;
  i32 q_stages, stages;
  i32 consumers;
  i32 producer_registers, consumer_registers;
  i32 section_heads;  // their K and V stay in the L2 cache; several if tiles differ in length
  bool anchored;
  bool has_lower, has_upper;
};

// ---- flashgen/sm90/query_tile.cuh
// A tile of queries, as the scheduler announces it: where its rows, keys and values lie. The Tile policy of
// the mainloop.

// What consumers do with an announced tile.
enum class TileKind : i32 {
  end,    // there is no further tile
  drain,  // no further tile is known; failed ones may follow once all results are checked (tile_checks.cuh)
  normal,
  careful,  // announced after some tile of the thread block has failed
};

// All sequences have the same lengths: tensors of (batch, length, heads, head_dim).
struct alignas(16) DenseTile {
  i32 first_q;
  // Of Q, and of K and V. The second follows from the first, but by a division in each load.
  i32 head, head_kv;
  i32 sequence;
  TileKind kind;

  // How many queries and keys the sequence has, and how many rows of results.
  FLASHGEN_DEVICE static i32 len_q(const auto& p) { return p.len_q; }
  template <class Mask>
  FLASHGEN_DEVICE Mask mask(const auto& p) const { return Mask::of(p, sequence, head); }

  FLASHGEN_DEVICE void load_q(auto q, const auto& p, u32 barrier) const {
    q.load(p.q_map, barrier, first_q, head, sequence);
  }
  FLASHGEN_DEVICE void load_k(auto k, const auto& p, u32 barrier, i32 first_key) const {
    k.load(p.k_map, barrier, first_key, head_kv, sequence);
  }
  FLASHGEN_DEVICE void load_v(auto v, const auto& p, u32 barrier, i32 first_key) const {
    v.load(p.v_map, barrier, first_key, head_kv, sequence);
  }
};

// ---- flashgen/sm90/tile_scheduler.cuh
// Which tile of queries a persistent block computes next: the TileScheduler policy of the forward mainloop.
//
// The order is that of sections.cuh. Where tiles differ in length, the last tile of a head is the longest and
// comes first.

// The first query of the tile whose turn it is.
template <ForwardSm90Config cfg>
FLASHGEN_DEVICE i32 first_row(i32 turn, i32 tiles_of_head) {
  // Sections of several heads mean that tiles differ in length.
  return (cfg.section_heads > 1 ? tiles_of_head - 1 - turn : turn) * cfg.tile_q;
}

// All sequences have the same length.
template <ForwardSm90Config cfg, class Params>
struct DynamicScheduler {
  const Params& p;

  // The number of the block's first tile, and of each later one.
  FLASHGEN_DEVICE static i32 first() { return block_idx_x(); }
  FLASHGEN_DEVICE i32 draw() const { return grid_dim_x() + static_cast<i32>(atomic_add(p.counter, 1u)); }
  // Tile `number`; its kind is `end` if there are not so many. All lanes of a warp call.
  FLASHGEN_DEVICE DenseTile tile(i32 number, Thread) const {
    if (number >= p.tiles) return {0, 0, 0, 0, TileKind::end};
    const SectionTile place = section_tile<cfg.section_heads>(number, p.tiles, p.q_tiles);
    const i32 first_q = first_row<cfg>(place.turn, p.q_tiles);
    const i32 sequence = place.head / p.heads_q, head = place.head - sequence * p.heads_q;
    return {first_q, head, head / p.group, sequence, TileKind::normal};
  }
  // Each block calls this once, after its last draw.
  FLASHGEN_DEVICE void leave() const { leave_counters(p); }
};

// ---- flashgen/sm90/gradient_tile.cuh
// A tile of queries in the kernel that computes dQ alone: that of the forward kernel (query_tile.cuh), and in
// addition where dO, the statistics L and D, and dQ lie.

struct DenseGradientTile : DenseTile {
  template <ForwardSm90Config cfg, class Params>
  using Scheduler = DynamicScheduler<cfg, Params>;

  template <class DOTile, class Params>
  FLASHGEN_DEVICE void load_dout(DOTile dout, const Params& p, u32 barrier) const {
    dout.load(p.dout_map, barrier, first_q, head, sequence);
  }
  // L and D of a consumer's queries. If all of these lie beyond the end, loads the last part instead, and
  // nothing uses it.
  template <i32 rows, class Params>
  FLASHGEN_DEVICE void load_statistics(u32 to, const Params& p, u32 barrier, i32 consumer) const {
    const i32 parts = ceil_div(p.len_q, rows), part = smaller(first_q / rows + consumer, parts - 1);
    const i64 number = (static_cast<i64>(sequence) * p.heads_q + head) * parts + part;
    bulk_load(to, p.row_stats + number * (2 * rows), 2 * rows * 4, barrier);
  }
  FLASHGEN_DEVICE auto dq_rows(const auto& p) const {
    return GlobalRows{p.dq + sequence * p.dq_batch + head * p.dq_head, p.dq_row, p.len_q};
  }
  // The tile's number among all tiles.
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE i32 number(const Params& p) const {
    return (sequence * p.heads_q + head) * p.q_tiles + first_q / tile_q;
  }
};

// ---- flashgen/sm90/key_blocks.cuh
// Which blocks of keys a tile of queries visits, and which of them the mask cuts: it allows only some of
// their pairs. The Blocks policy of the mainloop.
//
// The producer calls for_each(p, tile, thread, visit), which calls visit(block, left, message) for each block
// in order. `left` is how many blocks follow, as far as that is known: at least 1 if some do.
//
// A consumer follows with begin() and advance(). Given consumer_blocks(p, tile, consumer), forbids_all() says
// that the mask allows no pair of the block to the consumer's 64 rows, and needs_mask() that it does not
// allow all.

// The blocks from the first to the last that some query of the tile may attend to. At least one, because a
// tile without allowed pairs also stores results.
template <ForwardSm90Config cfg>
FLASHGEN_DEVICE Range visited_blocks(const auto& mask, const auto& p, const auto& tile) {
  const i32 end_q = smaller(tile.first_q + cfg.tile_q, tile.len_q(p));
  if (end_q <= tile.first_q) return {0, 1};
  const Range blocks = mask.key_tiles(tile.first_q, end_q, cfg.tile_kv);
  return {blocks.begin, larger(blocks.begin + 1, blocks.end)};
}

// A band visits every block of a range, from the last to the first. Producer and consumers each compute it.
template <ForwardSm90Config cfg, class Mask>
struct BandBlocks {
  static constexpr bool has_mask = Mask::is_bounded;
  struct Message {};

  i32 block;
  i32 first_block;

  FLASHGEN_DEVICE static Range visited(const auto& p, const auto& tile) {
    return visited_blocks<cfg>(tile.template mask<Mask>(p), p, tile);
  }

  FLASHGEN_DEVICE static void for_each(const auto& p, const auto& tile, Thread, const auto& visit) {
    const Range blocks = visited(p, tile);
#pragma unroll 1
    for (i32 block = blocks.end - 1; block >= blocks.begin; --block)
      visit(block, block - blocks.begin, Message{});
  }

  FLASHGEN_DEVICE void begin(const auto& p, const auto& tile, const auto&) {
    const Range blocks = visited(p, tile);
    block = blocks.end - 1;
    first_block = blocks.begin;
  }
  FLASHGEN_DEVICE void advance(const auto&) { --block; }

  FLASHGEN_DEVICE bool is_last() const { return block == first_block; }

  // The blocks with some allowed pair of a consumer's rows, and those where all pairs are allowed. Rows
  // beyond the last query do not count, because their results are never stored.
  struct ConsumerBlocks {
    Range some, all;
  };
  FLASHGEN_DEVICE bool needs_mask(const ConsumerBlocks& blocks) const { return !blocks.all.has(block); }
  // The same for one block of any tile. It takes fewer registers than consumer_blocks().
  FLASHGEN_DEVICE bool needs_mask(const auto& p, const auto& tile, i32 consumer) const {
    const i32 first_q = tile.first_q + consumer * kWarpgroupRows, first_key = block * cfg.tile_kv;
    return !tile.template mask<Mask>(p).is_full(first_q, smaller(first_q + kWarpgroupRows, tile.len_q(p)),
                                                first_key, first_key + cfg.tile_kv);
  }
};

// ---- flashgen/sm90/backward_query_mainloop.cuh
// The backward pass on Hopper, for heads wider than 128: dQ. backward_keys_mainloop.cuh computes dK and dV.
//
// A block keeps 128 queries, and each of two warpgroups owns 64 of them. The kernel loops over blocks of
// keys, like the forward kernel, whose tiles, scheduler and blocks it shares. Rows of scores are queries, so
// dS in registers is the left operand of dQ += dS K. Line numbers in comments are those of Algorithm 2 of the
// FlashAttention-2 paper.
//
//     tensor cores   | dQ(i-1), S(i) = Q K^T | dP(i) = dO V^T      |
//     other units    |                       | P(i) = exp(S - L)   | dS(i) = P (dP - D), round

struct BackwardQueryConfig {
  i32 head_dim, head_dim_v;
  i32 stored_columns;  // of dQ
  i32 tile_q, tile_kv;
  i32 k_stages, v_stages;
  i32 stats_rows;  // queries per row of row_stats
  i32 consumers;
  i32 producer_registers, consumer_registers;
  i32 section_heads;  // heads whose operands stay in the L2 cache
  bool has_lower, has_upper;
};

// The same tiles as the forward kernel's config has them, for its scheduler and its blocks of keys.
template <BackwardQueryConfig cfg>
constexpr ForwardSm90Config kQueryTiles = {.tile_q = cfg.tile_q,
                                           .tile_kv = cfg.tile_kv,
                                           .consumers = cfg.consumers,
                                           .section_heads = cfg.section_heads};

template <BackwardQueryConfig cfg, class T, class Params, class Smem, class Tile, class Mask, class Blocks,
          class Score, class Dropping>
struct BackwardQueryMainloop {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 queries");
  static_assert((cfg.k_stages & (cfg.k_stages - 1)) == 0 && (cfg.v_stages & (cfg.v_stages - 1)) == 0,
                "one counter gives the slots of K and V, because each counter takes uniform registers");
  static_assert(cfg.stats_rows == kWarpgroupRows, "a row of statistics holds one consumer's queries");
  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using DOTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using QRing = Ring<1>;
  using DORing = Ring<1>;
  using KRing = Ring<cfg.k_stages>;
  using VRing = Ring<cfg.v_stages>;
  using TileRing = Ring<2>;
  using Message = typename Blocks::Message;
  using Scores = Strip<cfg.tile_kv>;
  static constexpr u32 consumer_warps = 4 * cfg.consumers;
  // L and D of a consumer's queries.
  static constexpr i32 statistics_bytes = 2 * kWarpgroupRows * 4;

  struct Shared {
    u8* base;
    u32 start;

    FLASHGEN_DEVICE QTile q() const { return {start + Smem::kQ}; }
    FLASHGEN_DEVICE DOTile dout() const { return {start + Smem::kDo}; }
    FLASHGEN_DEVICE KTile k(typename KRing::State at) const {
      return KTile{start + Smem::kK}.slot(at.slot());
    }
    FLASHGEN_DEVICE VTile v(typename VRing::State at) const {
      return VTile{start + Smem::kV}.slot(at.slot());
    }
    FLASHGEN_DEVICE QRing q_ring() const { return {start + Smem::kQBarriers}; }
    FLASHGEN_DEVICE DORing do_ring() const { return {start + Smem::kDoBarriers}; }
    FLASHGEN_DEVICE KRing k_ring() const { return {start + Smem::kKBarriers}; }
    FLASHGEN_DEVICE VRing v_ring() const { return {start + Smem::kVBarriers}; }
    FLASHGEN_DEVICE TileRing tile_ring() const { return {start + Smem::kTileBarriers}; }
    FLASHGEN_DEVICE float* statistics(i32 consumer) const {
      return reinterpret_cast<float*>(base + Smem::kStats + consumer * statistics_bytes);
    }
    // What the slots of tile_ring and, if the producer sends messages, of k_ring hold.
    FLASHGEN_DEVICE Tile& tile(typename TileRing::State at) const {
      return reinterpret_cast<Tile*>(base + Smem::kTiles)[at.slot()];
    }
    FLASHGEN_DEVICE void init() const {
      // All lanes read statistics and what is announced, and each gives them back.
      q_ring().init(1, kWarpSize * consumer_warps);
      do_ring().init(1, consumer_warps);
      k_ring().init(1, consumer_warps);
      v_ring().init(1, consumer_warps);
      tile_ring().init(1, kWarpSize * consumer_warps);
      fence_mbarrier_init();
    }
  };

  // ---- The producer. Only one lane waits and copies: another lane that came late to a barrier could miss a
  // phase.

  struct Producer {
    const Params& p;
    Shared shared;
    Thread thread;
    bool elected;
    typename QRing::State q_at;
    typename KRing::State k_at;
    typename VRing::State v_at;
    typename TileRing::State tile_at;

    // Line 3: load Q_i, L_i, D_i.
    FLASHGEN_DEVICE void load_queries(const Tile& tile) {
      const u32 full = shared.q_ring().full(q_at);
      shared.q_ring().wait_empty(q_at);
      mbarrier_arrive_expect_tx(full, QTile::bytes + cfg.consumers * statistics_bytes);
      tile.load_q(shared.q(), p, full);
      for (i32 consumer = 0; consumer < cfg.consumers; ++consumer)
        tile.template load_statistics<cfg.stats_rows>(shared_address(shared.statistics(consumer)), p, full,
                                                      consumer);
    }
    FLASHGEN_DEVICE void load_gradients(const Tile& tile) {
      shared.do_ring().wait_empty(q_at);
      mbarrier_arrive_expect_tx(shared.do_ring().full(q_at), DOTile::bytes);
      tile.load_dout(shared.dout(), p, shared.do_ring().full(q_at));
    }
    // Line 6: load K_j, V_j; and dO_i before the first V_j.
    FLASHGEN_DEVICE void load_block(const Tile& tile, i32 block, const Message& message, bool is_first) {
      if (elected) {
        shared.k_ring().wait_empty(k_at);
        mbarrier_arrive_expect_tx(shared.k_ring().full(k_at), KTile::bytes);
        tile.load_k(shared.k(k_at), p, shared.k_ring().full(k_at), block * cfg.tile_kv);
        if (is_first) load_gradients(tile);
        shared.v_ring().wait_empty(v_at);
        mbarrier_arrive_expect_tx(shared.v_ring().full(v_at), VTile::bytes);
        tile.load_v(shared.v(v_at), p, shared.v_ring().full(v_at), block * cfg.tile_kv);
      }
      k_at.advance();
      v_at.advance();
    }

    FLASHGEN_DEVICE void run() {
      typename Tile::template Scheduler<kQueryTiles<cfg>, Params> scheduler{{p}};
      if (elected) {
        prefetch_tensormap(&p.q_map);
        prefetch_tensormap(&p.k_map);
        prefetch_tensormap(&p.v_map);
        prefetch_tensormap(&p.dout_map);
      }
      for (i32 number = scheduler.first();;) {
        const Tile tile = {scheduler.tile(number, thread)};
        if (elected) {
          shared.tile_ring().wait_empty(tile_at);
          shared.tile(tile_at) = tile;
          mbarrier_arrive(shared.tile_ring().full(tile_at));
        }
        tile_at.advance();
        if (tile.kind == TileKind::end) break;
        if (elected) load_queries(tile);
        bool is_first = true;
        Blocks::for_each(p, tile, thread, [&](i32 block, i32, const Message& message) {
          // The other lanes have nothing to wait for. Alone they would run through all blocks first, and
          // meanwhile the elected lane would stand still.
          warp_sync();
          load_block(tile, block, message, is_first);
          is_first = false;
        });
        q_at.advance();
        number = shuffle(elected ? scheduler.draw() : 0, 0);
      }
      if (elected) scheduler.leave();
    }
  };

  // ---- A consumer

  struct Consumer {
    const Params& p;
    Shared shared;
    Thread thread;
    // Which consumer this is.
    i32 number;
    typename QRing::State q_at;
    // The position in the rings of K and V. dQ is one step behind.
    typename KRing::State k_at;
    typename TileRing::State tile_at;
    Blocks blocks;
    // L and D of the lane's two rows.
    float lse[2];
    float dsum[2];
    Strip<cfg.head_dim> dq;
    Rounded<cfg.tile_kv> ds;

    FLASHGEN_DEVICE typename VRing::State v_at() const { return {k_at.count}; }
    FLASHGEN_DEVICE Message read_message() { return {}; }
    FLASHGEN_DEVICE void read_statistics() {
      const float* const rows = shared.statistics(number) + thread.warp % 4 * kWarpRows + thread.row();
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        lse[h] = rows[8 * h];
        dsum[h] = rows[kWarpgroupRows + 8 * h];
      }
    }

    // ---- The parts of a step

    // Line 7: S_ij = Q_i K_j^T - L_i.
    FLASHGEN_DEVICE void issue_scores(Scores& scores) {
      shared.k_ring().wait_full(k_at);
      preset_rows(scores, lse);
      issue_over_columns(scores, shared.q().from_row(number * kWarpgroupRows), shared.k(k_at));
    }
    // Line 9: dP_ij = dO_i V_j^T - D_i.
    FLASHGEN_DEVICE void issue_dp(Scores& dp) {
      shared.v_ring().wait_full(v_at());
      preset_rows(dp, dsum);
      issue_over_columns(dp, shared.dout().from_row(number * kWarpgroupRows), shared.v(v_at()));
    }
    // Line 11: dQ_i += dS_ij K_j, of the previous step.
    FLASHGEN_DEVICE void issue_dq() { issue_output(dq, ds, shared.k(k_at.before())); }
    FLASHGEN_DEVICE void take_dq() {
      wgmma_pin(dq);
      shared.k_ring().release(k_at.before(), thread);
    }
    // Which pairs are kept.
    FLASHGEN_DEVICE auto draw(const Tile& tile) const {
      const Thread here = thread.recomputed();
      return Dropping::template draw<cfg.tile_kv>(p, tile, tile.first_q + (here.warp - 4) * kWarpRows,
                                                  blocks.block * cfg.tile_kv, here);
    }
    // Line 8: P_ij = exp(S_ij - L_i), times the slope of the score.
    FLASHGEN_DEVICE void take_scores(Scores& scores, const Tile& tile) {
      wgmma_pin(scores);
      // Addresses are computed in each step, to save registers.
      const Thread here = thread.recomputed();
      if (blocks.is_last()) mbarrier_arrive(shared.q_ring().empty(q_at));
      const i32 first_q = tile.first_q + (here.warp - 4) * kWarpRows, first_key = blocks.block * cfg.tile_kv;
      Score::template take_factors<cfg.tile_kv>(scores, p, tile, lse, first_q, first_key, here);
      // Not of `number`: ptxas would no longer keep it in a uniform register for the descriptors of products.
      if (blocks.needs_mask(p, tile, here.warp / 4 - 1))
        mask_keys(blocks_of(scores), 0.0f, tile.template mask<Mask>(p), first_q, first_key, here);
    }
    // Line 10: dS_ij = P_ij (dP_ij - D_i).
    FLASHGEN_DEVICE void take_dp(Scores& dp, const Scores& factors, const auto& kept) {
      wgmma_pin(dp);
      shared.v_ring().release(v_at(), thread);
      k_at.advance();
      if (blocks.is_last()) shared.do_ring().release(q_at, thread);
      Dropping::drop_gradients(dp, kept, dsum);
#pragma unroll
      for (i32 i = 0; i < cfg.tile_kv / 4; ++i)
        ds[i / 4][i % 4] = pack(T{}, dp[2 * i] * factors[2 * i], dp[2 * i + 1] * factors[2 * i + 1]);
    }

    // ---- The mainloop

    FLASHGEN_DEVICE void run() {
      while (true) {
        shared.tile_ring().wait_full(tile_at);
        const Tile& tile = shared.tile(tile_at);
        if (tile.kind == TileKind::end) break;
        const auto read = [&] { return read_message(); };
        blocks.begin(p, tile, read);
        shared.q_ring().wait_full(q_at);
        read_statistics();
        // Line 4: dQ_i = 0.
        preset_zero(dq);
        {
          const auto kept = draw(tile);
          Scores scores, dp;
          issue_scores(scores);
          shared.do_ring().wait_full(q_at);
          issue_dp(dp);
          wgmma_wait<1>();
          take_scores(scores, tile);
          wgmma_wait<0>();
          take_dp(dp, scores, kept);
        }
        while (!blocks.is_last()) {
          blocks.advance(read);
          // The products queue, so that the wait for dQ overlaps the scores: its operands' registers and slot
          // are soon free. Pairs are drawn before scores and dP take registers.
          issue_dq();
          const auto kept = draw(tile);
          Scores scores, dp;
          issue_scores(scores);
          wgmma_wait<1>();
          take_dq();
          issue_dp(dp);
          wgmma_wait<1>();
          take_scores(scores, tile);
          wgmma_wait<0>();
          take_dp(dp, scores, kept);
        }
        issue_dq();
        wgmma_wait<0>();
        take_dq();
        q_at.advance();
        store(tile);
        mbarrier_arrive(shared.tile_ring().empty(tile_at));
        tile_at.advance();
      }
    }
    // Line 14: write dQ_i to global memory.
    FLASHGEN_DEVICE void store(const Tile& tile) {
      const Thread here = thread.recomputed();
      if (Blocks::has_mask && warp_any(first_row_times_zero(dq) != 0.0f) && here.lane == 0)
        flag_queries<Blocks::has_mask>(p, tile.template number<cfg.tile_q>(p));
      const float factor = p.scale * Dropping::factor(p), scale[2] = {factor, factor};
      write_strip<T, cfg.head_dim, cfg.stored_columns>(
          tile.dq_rows(p), tile.first_q + (here.warp - 4) * kWarpRows, dq, scale, here);
    }
  };

  // ---- The kernel

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Shared shared{base, shared_address(base)};
    if (Thread::current().index() == 0) shared.init();
    block_sync();
    // The previous grids may run until here, and the next one may start from here on.
    griddep_wait();
    griddep_launch_dependents();
    // Registers that the producer does not need go to the consumers.
    const Thread thread = Thread::current().recomputed();
    if (thread.warp >= 4) {
      setmaxnreg_inc<cfg.consumer_registers>();
      // Not of `thread`, because ptxas must see that it is the same for all lanes.
      Consumer{p, shared, thread, Thread::current().warp / 4 - 1}.run();
    } else {
      setmaxnreg_dec<cfg.producer_registers>();
      if (thread.warp == 0) Producer{p, shared, thread, thread.lane == 0}.run();
    }
  }
};

}  // namespace flashgen

// ---- kernels/hopper/backward.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr BackwardQueryConfig kConfig{
    .head_dim = 256,
    .head_dim_v = 256,
    .stored_columns = 256,  // of dQ
    .tile_q = 128,          // B_r: query rows per tile that a block works on
    .tile_kv = 64,          // B_c: keys per step
    .k_stages = 2,          // slots for K
    .v_stages = 1,          // slots for V
    .stats_rows = 64,       // queries per row of row_stats
    .consumers = 2,         // warpgroups that compute, 64 query rows each
    .producer_registers = 24,
    .consumer_registers = 240,
    .section_heads = 16,  // heads of a section, whose tiles are scheduled together
    .has_lower = false,   // the band has a lower bound on k - q
    .has_upper = true,    // the band has an upper bound on k - q
};

struct Params {
  TensorMap q_map, k_map, v_map, dout_map;  // for TMA
  element_t* dq;
  const float* row_stats;         // per tile of queries: -L in units of S, then -D
  u32* counter;                   // tiles drawn, then blocks done; 0 between launches
  u32* failed_tiles;              // flags of tiles of dQ, then of dK and dV, that are not finite
  i64 dq_batch, dq_row, dq_head;  // strides are in elements
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  i32 q_tiles;                 // tiles of queries of one head
  i32 tiles;                   // tiles of all heads of all sequences
  i32 query_flags;             // how many of these are of dQ
  float scale;
  float scale_log2;  // scale * log2(e)
};
static_assert(sizeof(Params) == 640, "the launcher packs Params into 640 bytes");

struct Smem {
  static constexpr u32 kQ = 0;               // Q_i
  static constexpr u32 kDo = 65536;          // dO_i
  static constexpr u32 kK = 131072;          // K_j, 2 slots
  static constexpr u32 kV = 196608;          // V_j, 1 slots
  static constexpr u32 kStats = 229376;      // of each consumer -L_i in units of S, and -D_i
  static constexpr u32 kQBarriers = 230400;  // full and empty barriers of each slot
  static constexpr u32 kDoBarriers = 230528;
  static constexpr u32 kKBarriers = 230656;
  static constexpr u32 kVBarriers = 230784;
  static constexpr u32 kTileBarriers = 230912;
  static constexpr u32 kTiles = 231040;  // the next tiles of queries
};

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using Scoring = NoScore;
using Tile = DenseGradientTile;
using Dropping = NoBackwardDropout;
using Blocks = BandBlocks<kQueryTiles<kConfig>, Mask>;

FLASHGEN_KERNEL(384, 1) backward_query_d256_causal_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  BackwardQueryMainloop<kConfig, element_t, Params, Smem, Tile, Mask, Blocks, Scoring, Dropping>::run(p, base);
}
