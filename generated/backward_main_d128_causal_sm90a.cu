// backward_main_d128_causal_sm90a: FlashAttention-3, backward pass: dK, dV and dQ.
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 128 --dtype bf16 --causal --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 64, tile_kv 128, q_stages 3, do_stages 2, 384 threads
// roles    of 1 warpgroup one warp brings tiles, and three finish dQ (24 registers a thread); 2 compute, 64
//          keys each (240)
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 128
//          key rows of a key/value head and batch entry; they start while the grid before them ends, and wait
//          for it
// smem     231840 bytes
// because  dK and dV take half of the registers, which leaves them for 64 queries
//
// contents   51  Instructions, one per function: types, device, math, matrix.
//           147  Element types.
//           183  Instructions, one per function: barrier, bulk, grid, descriptor, wgmma.
//           519  Tiles as TMA writes them and wgmma reads them.
//           645  Which pairs dropout keeps in transposed scores.
//           653  Banded masks.
//           713  The order in which persistent blocks draw tiles.
//           748  Streaming tiles between global and shared memory.
//           794  Where a tile of keys lies, and the queries that attend to it.
//           903  Probabilities P of transposed scores, and the factor of dS.
//           936  Which pairs of a warp's 16 keys and a block of queries the mask allows, as bits.
//           996  Instructions, one per function: packed.
//          1010  Dropout of probabilities.
//          1022  Dropout of probabilities in the backward pass.
//          1035  Writing a warpgroup's results to shared and global memory.
//          1055  What the backward mainloops do with fragments.
//          1127  Accumulators of a warp's 16 rows in memory, in the layout of its lanes.
//          1148  The sizes of the fused backward kernel for Hopper, which the plan chooses, and how its consumers divide dQ.
//          1191  Finding NaN and infinity.
//          1205  Tiles of results that the mainloops could not compute, because an operand holds NaN or infinity.
//          1224  Tiles of queries whose dQ is summed in global memory, and the order in which thread blocks finish them.
//          1267  Rings of slots in shared memory, filled by one side and emptied by the other.
//          1313  Which blocks of queries a tile of keys visits, for each head of the group, and which of them the mask cuts.
//          1389  What the backward kernels that keep tiles of keys share.
//          1533  What the warps of a block of the fused backward kernel share.
//          1638  The backward pass on Hopper, for heads up to 128 wide.
//          1931  dQ as a sum over tiles of keys, added in any order.
//          2187  Positions in rings whose number of slots is no power of two.
//          2211  The kernel: its configuration, parameters and text.

// The shapes of its products, by their columns.
#define WGMMA_SHAPES(shape) shape(64) shape(128)

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
FLASHGEN_DEVICE i32 grid_dim_x() { return static_cast<i32>(gridDim.x); }
FLASHGEN_DEVICE void block_sync() { __syncthreads(); }
FLASHGEN_DEVICE void warp_sync() { __syncwarp(); }
FLASHGEN_DEVICE bool warp_any(bool condition) { return __any_sync(0xffffffffu, condition) != 0; }
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

// ---- flashgen/ptx/matrix.cuh
// Warp-wide matrix instructions: ldmatrix, stmatrix and mma.sync.

// From registers to shared memory (sm_90 and later).
FLASHGEN_DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace flashgen
#endif
// ---- flashgen/element.cuh
// Element types: conversions, and how deep one matrix instruction reaches.

namespace flashgen {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
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
  // The same thread, in a way that the compiler cannot see through: addresses made from it inside a loop are
  // then computed there, instead of all being kept in registers from before the loop.
  FLASHGEN_DEVICE Thread recomputed() const { return {opaque(lane), opaque(warp)}; }
  FLASHGEN_DEVICE i32 index() const { return warp * kWarpSize + lane; }
  // The lane's accumulators in a block of 16 x 8 are in rows row() and + 8, and in columns column() and + 1.
  FLASHGEN_DEVICE i32 row() const { return lane / 4; }
  FLASHGEN_DEVICE i32 column() const { return 2 * (lane % 4); }
};

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
// Orders ordinary accesses of this thread, and those that a barrier ordered before it, before later accesses
// by bulk copies and wgmma.
FLASHGEN_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Orders this thread's accesses of shared memory before later ones by bulk copies and wgmma.
FLASHGEN_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// As fence_proxy_async() for global memory alone. It does not wait for shared memory.
FLASHGEN_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

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

FLASHGEN_DEVICE void bulk_reduce_add(float* destination, u32 source, u32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
      "r"(source), "r"(bytes)
      : "memory");
}

// Groups of stores and reductions.
FLASHGEN_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most `pending` groups are in flight.
template <int pending>
FLASHGEN_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory"); }
// Waits until all but `pending` groups have read shared memory. Their writes may still be in flight.
template <int pending>
FLASHGEN_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
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
FLASHGEN_DEVICE u32 load_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
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
#define WGMMA_NAMES_64 WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31"
#define WGMMA_NAMES_80 \
  WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_128 WGMMA_NAMES_80 ", " WGMMA_TEN(4) WGMMA_TEN(5) "%60, %61, %62, %63"

// The accumulators as operands with the constraint c.
#define WGMMA_FLOATS_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define WGMMA_FLOATS_16(c, i) \
  WGMMA_FLOATS_4(c, i), WGMMA_FLOATS_4(c, i + 4), WGMMA_FLOATS_4(c, i + 8), WGMMA_FLOATS_4(c, i + 12)
#define WGMMA_FLOATS_64(c, i) \
  WGMMA_FLOATS_16(c, i), WGMMA_FLOATS_16(c, i + 16), WGMMA_FLOATS_16(c, i + 32), WGMMA_FLOATS_16(c, i + 48)
#define WGMMA_REGISTERS_64(c) WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_16(c, 16)
#define WGMMA_REGISTERS_128(c) WGMMA_FLOATS_64(c, 0)

#define WGMMA_FROM_64 \
  32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54
#define WGMMA_FROM_128 \
  64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86

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

// d = a * b. The compiler knows that the previous value of d is dead.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_first(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b) {
  Wgmma<n>::template set_ss<T, a_major, b_major>(d, a, b, 0);
}

// The same with the left operand in registers. Each warp holds its 16 rows in the layout of mma_m16n8k16, or
// of mma_m16n8k32 for 8-bit types.
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs(float (&d)[n / 2], const u32 (&a)[4], MatrixDescriptor b, bool accumulate) {
  Wgmma<n>::template add_rs<T, b_major>(d, a, b, accumulate);
}

}  // namespace flashgen
#endif
// ---- flashgen/panel.cuh
// Tiles as TMA writes them and wgmma reads them: panels of 128-byte rows, one panel after
// another, each swizzled by 128 bytes (chunk c of row r lies at c ^ (r % 8)).

namespace flashgen {

constexpr i32 kWarpgroupSize = 128;
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

  // A panel by itself, as an operand whose rows are summed over.
  FLASHGEN_DEVICE PanelTile panel(i32 index) const {
    return {address + static_cast<u32>(index * panel_stride)};
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

  // A lane's address for stmatrix when a warp stores 16 rows from `row` on (a multiple of eight), two chunks
  // of each row at a time: for the first two chunks. chunk_after gives the address 2 n chunks further on. The
  // swizzle is an XOR, so the lane's bit and the bits of n do not interfere. Unsigned, to save instructions.
  FLASHGEN_DEVICE u32 first_chunk(i32 row, Thread thread) const {
    const u32 lane = static_cast<u32>(thread.lane), r = lane % 16;
    return address + static_cast<u32>(row * kPanelBytes) + r * kPanelBytes +
           ((lane / 16 ^ r % 8) * kChunkBytes);
  }
  static constexpr u32 chunk_after(u32 first, i32 n) {
    return (first ^ static_cast<u32>(2 * n % 8 * kChunkBytes)) + static_cast<u32>(n / 4 * panel_stride);
  }
};

// A warpgroup's share of a product with n columns: 64 rows, 16 of them each warp's.
template <i32 n>
using Strip = float[n / 2];

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

// Issues sums = A^T B, for 64 columns of A and n columns of B, one panel each.
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

// ---- flashgen/sm90/kept_queries.cuh
// Which pairs dropout keeps in transposed scores: rows are keys, columns are queries.

// Steps of 16 queries that make a chunk of transposed scores.
constexpr i32 kChunkSteps = 2;
constexpr i32 kChunkElements = 8 * kChunkSteps;
constexpr i32 chunks_of(i32 queries) { return queries / (16 * kChunkSteps); }

// ---- flashgen/band.cuh
// Banded masks: key k is allowed for query q when lower <= k - q <= upper and both exist.

struct Range {
  i32 begin, end;
  FLASHGEN_DEVICE i32 size() const { return end - begin; }
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

  // Tiles of queries that may attend to some key of [k_begin, k_end).
  FLASHGEN_DEVICE Range query_tiles(i32 k_begin, i32 k_end, i32 tile) const {
    i32 begin = 0, end = len_q;
    begin = larger(begin, k_begin - upper);
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

// A lane has two of every eight columns. Bit 2n + c stands for column 8n + c; those from `column` on are set.
FLASHGEN_DEVICE u32 bits_from(i32 column) {
  const u32 c = static_cast<u32>(smaller(larger(column, 0), 128));
  return static_cast<u32>(~u64{0} << (c / 8 * 2 + (c % 8 < 2 ? c % 8 : 2)));
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

// ---- flashgen/sm90/key_tile.cuh
// Where a tile of keys lies, and the queries that attend to it: the Sequence policy of the backward kernels
// that keep keys. A tile is what the producer announces to the other warps.

// A step of the loop over queries: a block of queries of one head of the group that shares the keys.
struct QueryStep {
  i32 member;
  i32 block;
};

// All sequences have the same lengths: tensors of (batch, length, heads, head_dim).
struct alignas(16) DenseKeyTile {
  i32 first_key;
  // Of keys and values.
  i32 head;
  i32 sequence;
  // False for the tile after the last one.
  bool exists;
  // Whether some query attends to some key of it.
  bool is_attended;

  // The rows of dK and dV.
  FLASHGEN_DEVICE static i32 result_rows(const auto& p) { return p.len_kv; }
  FLASHGEN_DEVICE i32 query_head(const auto& p, i32 member) const { return head * p.group + member; }
  // The first head of queries of the group, counted over all sequences.
  FLASHGEN_DEVICE i32 first_head(const auto& p) const { return sequence * p.heads_q + head * p.group; }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p, i32 member) const {
    return Mask::of(p, sequence, query_head(p, member));
  }

  // The numbers under which workspaces hold what belongs to a tile of queries, its sum of dQ
  // (dq_sums_any_order.cuh) and the flag of this tile of keys.
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE i32 query_tile(const Params& p, QueryStep step) const {
    return (sequence * p.heads_q + query_head(p, step.member)) * p.q_tiles + step.block;
  }
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE i32 first_sum(const Params& p) const { return first_head(p) % p.sum_heads * p.q_tiles; }
  FLASHGEN_DEVICE static i32 sum(const auto& p, i32 first_sum, QueryStep step) {
    return first_sum + step.member * p.q_tiles + step.block;
  }
  // The sum of a tile of queries whose number is given, and whether another head will use it.
  FLASHGEN_DEVICE static i32 sum_of(const auto& p, i32 head, i32 query_tile) {
    return query_tile - (head - head % p.sum_heads) * p.q_tiles;
  }
  FLASHGEN_DEVICE static bool is_sum_needed_again(const auto& p, i32 head) {
    return head + p.sum_heads < p.tiles / p.kv_tiles * p.group;
  }
  template <i32 tile_kv, class Params>
  FLASHGEN_DEVICE i32 key_tile(const Params& p) const {
    return (sequence * p.heads_kv + head) * p.kv_tiles + first_key / tile_kv;
  }

  template <class KTile, class Params>
  FLASHGEN_DEVICE void load_k(KTile k, const Params& p, u32 barrier) const {
    k.load(p.k_map, barrier, first_key, head, sequence);
  }
  template <class VTile, class Params>
  FLASHGEN_DEVICE void load_v(VTile v, const Params& p, u32 barrier) const {
    v.load(p.v_map, barrier, first_key, head, sequence);
  }
  template <class QTile, class Params>
  FLASHGEN_DEVICE void load_q(QTile q, const Params& p, u32 barrier, QueryStep step) const {
    q.load(p.q_map, barrier, step.block * QTile::rows, query_head(p, step.member), sequence);
  }
  template <class DOTile, class Params>
  FLASHGEN_DEVICE void load_dout(DOTile dout, const Params& p, u32 barrier, QueryStep step) const {
    dout.load(p.dout_map, barrier, step.block * DOTile::rows, query_head(p, step.member), sequence);
  }
  // L (part 0) or D (part 1) of a block of queries.
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE void load_statistics(u32 rows, const Params& p, u32 barrier, QueryStep step,
                                       i32 part) const {
    tma_load_4d(rows, &p.row_stats_map, barrier, 0, 2 * query_tile<tile_q>(p, step) + part, 0, 0);
  }
  // Rows of dK and dV. TMA clips rows beyond the last key.
  template <class Rows, class Params>
  FLASHGEN_DEVICE void store(Rows rows, const Params&, const TensorMap& map, i32 row) const {
    rows.store(map, row, head, sequence);
  }
};

// Which tile of keys a persistent block computes next: blocks draw numbers from a counter, so that none waits
// while another has tiles left. Consecutive numbers are tiles of a few heads, a section, whose operands then
// stay in the L2 cache. Within a section the tile varies slowest, from the first one: a causal mask makes
// that the longest.
//
// Blocks draw their first tile, too. So a tile never waits for one that no running block has drawn.
template <class Params>
struct KeyTileCounter {
  const Params& p;

  FLASHGEN_DEVICE i32 draw() const { return static_cast<i32>(atomic_add(p.counter, 1u)); }
  // Each block calls this once, after its last draw. The last block resets the counters for the next launch.
  FLASHGEN_DEVICE void leave() const { leave_counters(p); }
};

template <i32 tile_kv, i32 section_heads, class Params, class Tile>
struct KeyTileScheduler : KeyTileCounter<Params> {
  // Tile `number`. It does not exist if there are not so many.
  FLASHGEN_DEVICE DenseKeyTile tile(i32 number, Thread) const {
    const Params& p = this->p;
    if (number >= p.tiles) return {};
    const SectionTile place = section_tile<section_heads>(number, p.tiles, p.kv_tiles);
    return {place.turn * tile_kv, place.head % p.heads_kv, place.head / p.heads_kv, true, true};
  }
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
  static constexpr bool masks_query_end = false;
  static constexpr bool has_slope = false;
  // What is loaded for a block's pairs while its products are under way.
  template <i32 queries>
  struct Pairs {};

  template <i32 queries, class Params, class Tile>
  FLASHGEN_DEVICE static Pairs<queries> load(const Params&, const Tile&, QueryStep, i32, i32, Thread) {
    return {};
  }
  // Of one chunk: P, rounded.
  template <class T, i32 queries, class Params, class Tile>
  FLASHGEN_DEVICE static void exponentiate(const Strip<queries>& scores, Rounded<queries>& probabilities,
                                           Rounded<queries>&, i32 chunk, const Pairs<queries>&,
                                           const Params& p, const Tile&, QueryStep, const float*, i32, i32,
                                           Thread) {
#pragma unroll
    for (i32 i = kChunkElements * chunk; i < kChunkElements * (chunk + 1); i += 2)
      probabilities[i / 8][i % 8 / 2] =
          pack(T{}, exp2_approx(scores[i] * p.scale_log2), exp2_approx(scores[i + 1] * p.scale_log2));
  }
};

// ---- flashgen/sm90/allowed_queries.cuh
// Which pairs of a warp's 16 keys and a block of queries the mask allows, as bits.

// Of a lane's `count` elements of a strip whose rows are keys: bit 2n + c of rows[h] is for element 4n + 2h +
// c.
template <i32 count>
struct AllowedQueries {
  static_assert(count <= 64, "a lane's share of a row has a bit for each element");
  u32 rows[2];

  FLASHGEN_DEVICE bool allows(i32 i) const { return (rows[i % 4 / 2] & 1u << (i / 4 * 2 + i % 2)) != 0; }

  FLASHGEN_DEVICE void forbid(float (&scores)[count]) const {
#pragma unroll
    for (i32 i = 0; i < count; ++i) scores[i] = allows(i) ? scores[i] : -kInfinity;
  }
  // The same for a chunk of probabilities, where 0 takes the place of the exponential of -inf.
  FLASHGEN_DEVICE void forbid(u32 (&probabilities)[count / 8][4], i32 chunk) const {
#pragma unroll
    for (i32 i = kChunkElements * chunk; i < kChunkElements * (chunk + 1); ++i) {
      if (!allows(i)) probabilities[i / 8][i % 8 / 2] &= i % 2 == 0 ? 0xffff0000u : 0xffffu;
    }
  }
};

// Of a band, and of queries that exist. The warp's rows begin at first_key.
template <i32 count, bool has_lower, bool has_upper>
FLASHGEN_DEVICE AllowedQueries<count> allowed_queries(const Band<has_lower, has_upper>& mask, i32 first_q,
                                                      i32 first_key, Thread thread) {
  const i32 q = first_q + thread.column();
  AllowedQueries<count> allowed;
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 key = first_key + thread.row() + 8 * h;
    u32 bits = ~bits_from(mask.len_q - q);
    bits &= bits_from(key - mask.upper - q);
    allowed.rows[h] = key < mask.len_kv ? bits : 0;
  }
  return allowed;
}

// Of any mask, which never allows queries beyond the last. A loop keeps the code short.
template <i32 count, class Mask>
FLASHGEN_DEVICE AllowedQueries<count> allowed_queries(const Mask& mask, i32 first_q, i32 first_key,
                                                      Thread thread) {
  const i32 q = first_q + thread.column(), key = first_key + thread.row();
  AllowedQueries<count> allowed = {{0, 0}};
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

#if !defined(FLASHGEN_EMULATOR)
// ---- flashgen/ptx/packed.cuh
// Arithmetic on pairs of 16-bit numbers packed in a word (sm_90).

namespace flashgen {

// Both products, rounded.
FLASHGEN_DEVICE u32 multiply_packed(bfloat16_t, u32 a, u32 b) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

}  // namespace flashgen
#endif
// ---- flashgen/sm90/dropping.cuh
// Dropout of probabilities: the Dropout policy of the mainloop.

namespace flashgen {

// Keeps all pairs.
struct NoDropout {
  template <i32 columns>
  FLASHGEN_DEVICE static NoDropout draw(const auto&...) { return {}; }
  FLASHGEN_DEVICE static float factor(const auto&) { return 1.0f; }
};

// ---- flashgen/sm90/backward_dropping.cuh
// Dropout of probabilities in the backward pass: the Dropout policy of the backward mainloops.

struct NoBackwardDropout : NoDropout {
  static constexpr bool drops = false;

  template <i32 queries>
  FLASHGEN_DEVICE static NoDropout draw_queries(const auto&...) { return {}; }
  template <bool has_slope>
  FLASHGEN_DEVICE static void drop(const auto&...) {}
  FLASHGEN_DEVICE static void drop_gradients(const auto&...) {}
};

// ---- flashgen/strip.cuh
// Writing a warpgroup's results to shared and global memory.

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

// ---- flashgen/sm90/backward_products.cuh
// What the backward mainloops do with fragments: accumulators that are preset, products in parts, dS.
//
// A part of a product is a group of its own, so that it runs while the next one's operand is computed.

// Presets every row of an accumulator to `columns`, one float for each column. Products are added on top. The
// pin tells ptxas that no product in flight writes these registers; otherwise it waits.
template <i32 count>
FLASHGEN_DEVICE void preset_columns(float (&strip)[count], const float* columns, Thread thread) {
#pragma unroll
  for (i32 n = 0; n < count / 4; ++n) {
    const float first = columns[8 * n + thread.column()], second = columns[8 * n + thread.column() + 1];
    strip[4 * n] = first;
    strip[4 * n + 1] = second;
    strip[4 * n + 2] = first;
    strip[4 * n + 3] = second;
  }
  wgmma_pin(strip);
}
template <i32 count>
FLASHGEN_DEVICE void preset_zero(float (&strip)[count]) {
  clear_strip(strip);
  wgmma_pin(strip);
}

// Issues half of the steps of sums += A B^T.
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

// Issues the chunk's part of sums += A B, of A in registers.
template <class B>
FLASHGEN_DEVICE void issue_chunk(Strip<B::cols>& sums, const Rounded<B::rows>& a, B b, i32 chunk) {
  using T = typename B::Element;
  const MatrixDescriptor right = b.by_rows();
  wgmma_fence();
#pragma unroll
  for (i32 step = kChunkSteps * chunk; step < kChunkSteps * (chunk + 1); ++step)
    wgmma_rs<T, B::cols, Major::mn>(sums, a[step], right.advanced(B::along_rows(step)), true);
  wgmma_commit();
}

// dS = factor (dP - D) of a chunk. dP - D is rounded in bf16, which has the exponents of float32 and
// multiplies two elements at once. In fp16 it may be infinite, so it stays float.
template <i32 count>
FLASHGEN_DEVICE void multiply_chunk(bfloat16_t, u32 (&ds)[count / 8][4], const float (&dp)[count],
                                    const u32 (&factors)[count / 8][4], i32 chunk) {
#pragma unroll
  for (i32 i = kChunkElements / 2 * chunk; i < kChunkElements / 2 * (chunk + 1); ++i)
    ds[i / 4][i % 4] =
        multiply_packed(bfloat16_t{}, pack(bfloat16_t{}, dp[2 * i], dp[2 * i + 1]), factors[i / 4][i % 4]);
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

// ---- flashgen/fragments.cuh
// Accumulators of a warp's 16 rows in memory, in the layout of its lanes: for each block of 16 x 8, four
// floats per lane. Each lane reads what the same lane of a warp wrote, 16 bytes at a time.

// Writes the columns from `first` to `end`.
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
// Writes all columns.
template <i32 count>
FLASHGEN_DEVICE void write_fragments(float* part, const float (&strip)[count], Thread thread) {
  write_columns(part, strip, 0, 2 * count, thread);
}

// ---- flashgen/sm90/backward_config.cuh
// The sizes of the fused backward kernel for Hopper, which the plan chooses, and how its consumers divide dQ.

struct BackwardSm90Config {
  i32 head_dim, head_dim_v;
  i32 tile_q, tile_kv;
  i32 q_stages, do_stages, ds_stages;
  i32 sum_stages, rounded_stages;  // slots for sums of dQ to be scaled and rounded, and for rounded ones
  i32 consumers;
  i32 producer_registers, consumer_registers;
  i32 section_heads;   // heads whose operands stay in the L2 cache
  bool presets_ahead;  // the next step's scores are preset to -L while dK is multiplied
  bool dq_last;        // dQ is multiplied after dK, in the registers of dP, and not between dV and dK
  bool has_lower, has_upper;
};

constexpr i32 kPanelColumns = 64;

// Which part of dQ_i = sum over j of dS_ij K_j each consumer computes: 64 rows, or 64 columns (or those that
// are left). Each warp has 16 rows of it. The float32 sum in global memory has the layout of the
// accumulators: warp after warp, then blocks of 16 rows x 8 columns, then four floats per lane. So all
// accesses are contiguous.
template <i32 tile_q, i32 head_dim, i32 consumers>
struct DqShare {
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
  // The offset and the size of a warp's part of a tile. Warps are counted over all consumers.
  FLASHGEN_DEVICE static i32 warp_begin(i32 warp) {
    const i32 consumer = warp / 4;
    return consumer * kWarpgroupRows * kPanelColumns + warp % 4 * warp_floats(consumer);
  }
  FLASHGEN_DEVICE static i32 warp_floats(i32 consumer) { return kWarpRows * columns(consumer); }
};

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
template <bool has_mask, class Params>
FLASHGEN_DEVICE void flag_keys(const Params& p, i32 tile) {
  if constexpr (has_mask) atomic_or(p.failed_tiles + p.query_flags + tile, 1u);
}

// ---- flashgen/sm90/finish_order.cuh
// Tiles of queries whose dQ is summed in global memory, and the order in which thread blocks finish them:
// scale, round and store the sums.

// A tile of queries: a block of queries of a head.
struct DenseDqTile {
  bool exists;
  i32 block;
  i32 head;
  i32 sequence;

  // The tile's number among all tiles.
  template <class Params>
  FLASHGEN_DEVICE i32 number(const Params& p, i32 /*tile_q*/) const {
    return (sequence * p.heads_q + head) * p.q_tiles + block;
  }
  // Where its rows begin in the map of dQ.
  template <class Params>
  FLASHGEN_DEVICE i32 first_row(const Params&, i32 tile_q) const { return block * tile_q; }
  // The last coordinate in the map of dQ.
  FLASHGEN_DEVICE i32 place() const { return sequence; }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p) const { return Mask::of(p, sequence, head); }
  // The number of tiles of keys of a head, and of those with keys that are used.
  FLASHGEN_DEVICE i32 key_tiles(const auto& p, i32 /*tile_kv*/) const { return p.kv_tiles; }
};

// by_heads(number): head after head. by_sections<descending>(number): in sections of heads, as tiles of keys
// are drawn; within a head from the first block of queries to the last one, or the other way round.
template <auto cfg, class Params, class Tile>
struct FinishOrder {
  // Whether all lanes of a warp call.
  static constexpr bool by_warp = false;
  const Params& p;

  FLASHGEN_DEVICE DenseDqTile by_heads(i32 number, Thread) const {
    const i32 heads = p.tiles / p.kv_tiles * p.group;
    if (number >= heads * p.q_tiles) return {};
    const i32 head = number / p.q_tiles, sequence = head / p.heads_q;
    return {true, number - head * p.q_tiles, head - sequence * p.heads_q, sequence};
  }
};

// ---- flashgen/ring.cuh
// Rings of slots in shared memory, filled by one side and emptied by the other. Each slot has two mbarriers:
// one that ends a phase when the slot is full, one when it is empty again.

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

// ---- flashgen/sm90/query_blocks.cuh
// Which blocks of queries a tile of keys visits, for each head of the group, and which of them the mask cuts.
//
//     for_each(p, tile, thread, announce, visit)
//                                          the producer calls announce(is_attended), visit(step, message_of)
//     begin(p, tile), over(), take(read)   a consumer follows, step by step
//     is_cut(p, tile, step, strip)         whether the mask forbids some pair of the last step and 64 keys
//
// `descending`: the last block comes first. Rows beyond the last query need no mask, because L makes their
// probabilities 0, unless the score is computed by an expression.

// Whether the mask allows every pair of a block and the 64 keys of a strip.
template <auto cfg, bool masks_query_end, class Mask>
FLASHGEN_DEVICE bool is_full_strip(const Mask& mask, i32 block, i32 first_key, i32 strip) {
  const i32 first_q = block * cfg.tile_q, end_q = first_q + cfg.tile_q;
  const i32 key = first_key + strip * kWarpgroupRows;
  return mask.is_full(first_q, masks_query_end ? end_q : smaller(end_q, mask.len_q), key,
                      key + kWarpgroupRows);
}

// Of a band: every block of a range, the same for each head. Producer and consumers compute it for
// themselves.
template <auto cfg, class Mask, bool masks_query_end, bool descending = false>
struct BandQueries {
  static constexpr bool has_mask = Mask::is_bounded;
  struct Message {};

  i32 left;
  i32 member;
  Range blocks;
  i32 block;

  FLASHGEN_DEVICE static Range visited(const Mask& mask, i32 first_key) {
    return mask.query_tiles(first_key, smaller(first_key + cfg.tile_kv, mask.len_kv), cfg.tile_q);
  }

  template <class Tile, class Params, class Announce, class Visit>
  FLASHGEN_DEVICE static void for_each(const Params& p, const Tile& tile, Thread, const Announce& announce,
                                       const Visit& visit) {
    BandQueries queries;
    queries.begin(p, tile);
    announce(!queries.over());
    while (!queries.over()) visit(queries.take([] { return Message{}; }), [] { return Message{}; });
  }

  template <class Tile, class Params>
  FLASHGEN_DEVICE void begin(const Params& p, const Tile& tile) {
    blocks = visited(tile.template mask<Mask>(p, 0), tile.first_key);
    left = p.group * blocks.size();
    member = 0;
    block = descending ? blocks.end - 1 : blocks.begin;
  }
  FLASHGEN_DEVICE bool over() const { return left == 0; }
  FLASHGEN_DEVICE QueryStep take(const auto&) {
    const QueryStep step = {member, block};
    --left;
    if constexpr (descending) {
      if (--block < blocks.begin) {
        block = blocks.end - 1;
        ++member;
      }
    } else {
      if (++block == blocks.end) {
        block = blocks.begin;
        ++member;
      }
    }
    return step;
  }
  template <class Tile, class Params>
  FLASHGEN_DEVICE bool is_cut(const Params& p, const Tile& tile, QueryStep step, i32 strip) const {
    return !is_full_strip<cfg, masks_query_end>(tile.template mask<Mask>(p, step.member), step.block,
                                                tile.first_key, strip);
  }
};

// ---- flashgen/sm90/key_tile_producer.cuh
// What the backward kernels that keep tiles of keys share: operands in shared memory, and the producer that
// loads them.

// Slots of the ring that announces tiles of keys.
constexpr i32 kTileStages = 2;

template <auto cfg, class T, class Smem, class Tile, class Queries>
struct KeyTileShared {
  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using DOTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using KRing = Ring<1>;
  using VRing = Ring<1>;
  using QRing = Ring<cfg.q_stages>;
  using DORing = Ring<cfg.do_stages>;
  using TileRing = Ring<kTileStages>;
  using Message = typename Queries::Message;
  // Bytes of L, or of D, of a block of queries.
  static constexpr i32 statistics_bytes = cfg.tile_q * 4;

  u8* base;
  u32 start;

  FLASHGEN_DEVICE KTile k() const { return {start + Smem::kK}; }
  FLASHGEN_DEVICE VTile v() const { return {start + Smem::kV}; }
  FLASHGEN_DEVICE QTile q(typename QRing::State at) const { return QTile{start + Smem::kQ}.slot(at.slot()); }
  FLASHGEN_DEVICE DOTile dout(typename DORing::State at) const {
    return DOTile{start + Smem::kDo}.slot(at.slot());
  }
  FLASHGEN_DEVICE KRing k_ring() const { return {start + Smem::kKBarriers}; }
  FLASHGEN_DEVICE VRing v_ring() const { return {start + Smem::kVBarriers}; }
  FLASHGEN_DEVICE QRing q_ring() const { return {start + Smem::kQBarriers}; }
  FLASHGEN_DEVICE DORing do_ring() const { return {start + Smem::kDoBarriers}; }
  FLASHGEN_DEVICE TileRing tile_ring() const { return {start + Smem::kTileBarriers}; }
  // Of a block of queries, -L in units of S and -D. They come with Q and with dO.
  FLASHGEN_DEVICE float* lse(typename QRing::State at) const {
    return reinterpret_cast<float*>(base + Smem::kLse + at.slot() * statistics_bytes);
  }
  FLASHGEN_DEVICE float* dsum(typename DORing::State at) const {
    return reinterpret_cast<float*>(base + Smem::kDsum + at.slot() * statistics_bytes);
  }
  // What the slots of tile_ring and, if the producer sends messages, of q_ring hold.
  FLASHGEN_DEVICE Tile& tile(typename TileRing::State at) const {
    return reinterpret_cast<Tile*>(base + Smem::kTiles)[at.slot()];
  }
  // One lane reads a message for its warp, and another warp's lane may then overwrite it.
  FLASHGEN_DEVICE Message read_message(typename QRing::State at, Thread thread) const { return {}; }
};

// One warp that draws tiles of keys, and copies K and V, and for each step Q and dO with L and D, by TMA.
// Only one lane waits and copies: another lane that came late to a barrier could miss a phase. The tile stays
// in shared memory, because the producer has few registers.
template <auto cfg, class Params, class Shared, class Tile, class Queries>
struct KeyTileProducer {
  using Message = typename Queries::Message;

  const Params& p;
  Shared shared;
  Thread thread;
  bool elected;
  typename Shared::KRing::State kv_at;
  typename Shared::QRing::State q_at;
  typename Shared::DORing::State do_at;
  typename Shared::TileRing::State tile_at;

  // Line 6: load K_j, V_j.
  FLASHGEN_DEVICE void load_keys(const Tile& tile) {
    if (elected) {
      shared.k_ring().wait_empty(kv_at);
      mbarrier_arrive_expect_tx(shared.k_ring().full(kv_at), Shared::KTile::bytes);
      tile.load_k(shared.k(), p, shared.k_ring().full(kv_at));
      shared.v_ring().wait_empty(kv_at);
      mbarrier_arrive_expect_tx(shared.v_ring().full(kv_at), Shared::VTile::bytes);
      tile.load_v(shared.v(), p, shared.v_ring().full(kv_at));
    }
    kv_at.advance();
  }
  // Line 9: load Q_i, dO_i, L_i, D_i.
  FLASHGEN_DEVICE void load_queries(const Tile& tile, QueryStep step, const Message& message) {
    if (elected) {
      const u32 full = shared.q_ring().full(q_at);
      shared.q_ring().wait_empty(q_at);
      mbarrier_arrive_expect_tx(full, Shared::QTile::bytes + Shared::statistics_bytes);
      tile.load_q(shared.q(q_at), p, full, step);
      tile.template load_statistics<cfg.tile_q>(shared_address(shared.lse(q_at)), p, full, step, 0);
    }
    q_at.advance();
    if (elected) {
      const u32 full = shared.do_ring().full(do_at);
      shared.do_ring().wait_empty(do_at);
      mbarrier_arrive_expect_tx(full, Shared::DOTile::bytes + Shared::statistics_bytes);
      tile.load_dout(shared.dout(do_at), p, full, step);
      tile.template load_statistics<cfg.tile_q>(shared_address(shared.dsum(do_at)), p, full, step, 1);
    }
    do_at.advance();
  }

  FLASHGEN_DEVICE void run() {
    KeyTileScheduler<cfg.tile_kv, cfg.section_heads, Params, Tile> scheduler{{p}};
    if (elected) {
      prefetch_tensormap(&p.q_map);
      prefetch_tensormap(&p.k_map);
      prefetch_tensormap(&p.v_map);
      prefetch_tensormap(&p.dout_map);
      prefetch_tensormap(&p.row_stats_map);
    }
    for (bool goes_on = true; goes_on;) {
      // Consumers are steps behind, which hides the latency of the draw.
      const Tile drawn = scheduler.tile(shuffle(elected ? scheduler.draw() : 0, 0), thread);
      Tile& tile = shared.tile(tile_at);
      if (elected) {
        shared.tile_ring().wait_empty(tile_at);
        tile = drawn;
      }
      warp_sync();
      const auto announce = [&](bool is_attended) {
        if (elected) {
          tile.is_attended = is_attended;
          mbarrier_arrive(shared.tile_ring().full(tile_at));
        }
        tile_at.advance();
      };
      goes_on = drawn.exists;
      if (goes_on) {
        bool is_first = true;
        Queries::for_each(p, tile, thread, announce, [&](QueryStep step, const auto& message_of) {
          // The other lanes have nothing to wait for. Alone they would run through all steps first, and
          // meanwhile the elected lane would stand still.
          warp_sync();
          load_queries(tile, step, message_of());
          // The first queries may be loaded while the previous tile still uses its keys.
          if (is_first) load_keys(tile);
          is_first = false;
        });
      } else {
        announce(false);
      }
    }
    if (elected) scheduler.leave();
  }
};

// ---- flashgen/sm90/backward_shared.cuh
// What the warps of a block of the fused backward kernel share.

template <BackwardSm90Config cfg, class T, class Smem, class Tile, class Queries>
struct BackwardShared : KeyTileShared<cfg, T, Smem, Tile, Queries> {
  using Base = KeyTileShared<cfg, T, Smem, Tile, Queries>;
  using Base::base, Base::start;
  static_assert(cfg.tile_kv == cfg.consumers * kWarpgroupRows, "each consumer owns 64 keys");
  static_assert(cfg.do_stages == 2 && cfg.ds_stages == 2, "slots of dO and dS go by together");
  static constexpr u32 consumer_warps = 4 * cfg.consumers;

  using Share = DqShare<cfg.tile_q, cfg.head_dim, cfg.consumers>;
  // Keys x queries.
  using DSTile = PanelTile<T, cfg.tile_kv, cfg.tile_q>;
  using DSRing = Ring<cfg.ds_stages>;
  // A warp's rows of dK and dV, and its share of dQ, rounded.
  using DKRows = PanelTile<T, kWarpRows, cfg.head_dim>;
  using DVRows = PanelTile<T, kWarpRows, cfg.head_dim_v>;
  using DQRows = PanelTile<T, kWarpRows, kPanelColumns>;
  // The staging buffer of a warp: its share of dQ, or its rows of dK and dV.
  static constexpr i32 out_bytes = kWarpRows * kPanelColumns * 4;
  static_assert(DKRows::bytes <= out_bytes && DVRows::bytes <= out_bytes,
                "dK and dV fit in the staging buffer of dQ");

  FLASHGEN_DEVICE DSTile ds(typename DSRing::State at) const {
    return DSTile{start + Smem::kDs}.slot(at.slot());
  }
  FLASHGEN_DEVICE DSRing ds_ring() const { return {start + Smem::kDsBarriers}; }
  // Warps are counted over all consumers.
  FLASHGEN_DEVICE u32 out(i32 warp) const { return start + Smem::kDq + static_cast<u32>(warp * out_bytes); }

  FLASHGEN_DEVICE void init(u32 tile_readers) const {
    Base::k_ring().init(1, consumer_warps);
    Base::v_ring().init(1, consumer_warps);
    Base::q_ring().init(1, consumer_warps);
    Base::do_ring().init(1, consumer_warps);
    ds_ring().init(consumer_warps, consumer_warps);
    // All lanes read what is announced, and each gives it back.
    Base::tile_ring().init(1, kWarpSize * (consumer_warps + tile_readers));
  }
};

// A warp's share of a tile of dQ, to be scaled, rounded and stored.
struct alignas(32) DqPart {
  // Where it goes in the map of dQ.
  i32 column;
  i32 row;
  i32 head;
  i32 place;
  // The number of its tile, among all.
  i32 tile;
  // Where its sum lies in the workspace, in lines, and its size in boxes: 0 after the last part.
  i32 line;
  i32 boxes;
  // Whether another head will use its slot of the workspace.
  bool is_needed_again;
  // Whether it is the last part of its tile.
  bool is_last;
};

// Scales and rounds 32 columns of a part's 16 rows into a tile in shared memory. The finisher warp competes
// with consumers for issue slots, so each instruction counts. With `in_place` the tile overlays the first
// half of the part, which has been read by then.
template <i32 box, bool in_place, class Tile>
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
      // Everything is read before the first element is overwritten. Two at a time, to save registers.
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

// Whether the first row of a part's 16, or an element of another row, is not finite. That is enough, see
// failed_tiles.cuh. All lanes call.
template <bool checks>
FLASHGEN_DEVICE bool has_failed(const float* part, i32 columns, Thread thread) {
  if constexpr (!checks) return false;
  // Two columns of the first row for each lane, those of lane l % 4 in block l / 4; and one of its own two
  // rows.
  const float* const two = part + (thread.lane / 4 * kWarpSize + thread.lane % 4) * 4;
  const float* const own = part + thread.lane * 4;
  const bool has_two = 2 * thread.lane < columns;
  return warp_any((has_two && (two[0] + two[1]) * 0.0f != 0.0f) || (own[0] + own[2]) * 0.0f != 0.0f);
}

// ---- flashgen/sm90/backward_mainloop.cuh
// The backward pass on Hopper, for heads up to 128 wide: dQ, dK and dV in one kernel.
//
// The kernel is warp-specialized, as FlashAttention-3 is. A thread block keeps a tile of 128 keys and loops
// over blocks of queries. One warp, the producer, copies tiles to shared memory by TMA. Two warpgroups, the
// consumers, own 64 of the keys each. Line numbers in comments are those of Algorithm 2 of the
// FlashAttention-2 paper.
//
// Scores are transposed: rows are keys. So P^T and dS^T in registers are the left operands of dV += P^T dO
// and dK += dS^T Q. Only dQ = dS K needs the dS of both consumers, which therefore also goes to shared
// memory.
//
// wgmma adds to its accumulators. So S starts at -L, and dP starts at -D.
//
// dQ is one step behind, so that no consumer waits for the other one's dS:
//
//     tensor cores | S(i)             | dP(i)       | dV(i)          | dQ(i-1)              | dK(i)
//     others       | TMA adds dQ(i-2) | P = exp(S)  | dS = P (dP - D), to shared memory     | store dQ(i-1)
//
// P and dS come in chunks of 32 queries. The tensor cores multiply one chunk while the next one is computed.
//
// Policies: Tile says where rows lie (key_tile.cuh), Queries which blocks of queries there are
// (query_blocks.cuh), Score how P follows from products (backward_scores.cuh), Dropping which pairs are
// dropped (backward_dropping.cuh), Sums how dQ is summed and finished (dq_sums_*.cuh).

template <BackwardSm90Config cfg, class T, class Params, class Smem, class Tile, class Mask, class Queries,
          class Score, class Dropping, class Sums>
struct BackwardMainloop {
  using Shared = BackwardShared<cfg, T, Smem, Tile, Queries>;
  using Producer = KeyTileProducer<cfg, Params, Shared, Tile, Queries>;
  using Share = typename Shared::Share;
  using Pairs = typename Score::template Pairs<cfg.tile_q>;
  static constexpr i32 chunks = chunks_of(cfg.tile_q);
  // Whether dS = P (dP - D) has other factors than the P that is multiplied with dO.
  static constexpr bool has_factors = Score::has_slope || Dropping::drops;
  static constexpr i32 none = -1;

  struct Consumer {
    const Params& p;
    Shared shared;
    Thread thread;
    // Which consumer this is.
    i32 number;
    typename Shared::KRing::State kv_at;
    typename Shared::QRing::State q_at;
    // The position in the rings of dO and dS.
    typename Shared::DORing::State do_at;
    typename Shared::TileRing::State tile_at;
    Queries queries;
    typename Sums::Adder sums;
    // Numbers of tiles of queries: that of the previous step, and that whose dQ is in shared memory.
    i32 previous;
    i32 in_buffer;
    Strip<cfg.head_dim> dk;
    Strip<cfg.head_dim_v> dv;
    Strip<cfg.tile_q> scores;

    // ---- The parts of a step

    // Lines 10 and 11: S_ij = Q_i K_j^T - L_i. First the accumulators,
    FLASHGEN_DEVICE void preset_scores(typename Shared::QRing::State q_at) {
      shared.q_ring().wait_full(q_at);
      preset_columns(scores, shared.lse(q_at), thread);
    }
    // then the product.
    FLASHGEN_DEVICE void issue_scores() {
      issue_over_columns(scores, shared.k().from_row(number * kWarpgroupRows), shared.q(q_at));
    }
    // Line 13: dP_ij = dO_i V_j^T - D_i, half of it.
    FLASHGEN_DEVICE void issue_half_of_dp(Strip<cfg.tile_q>& dp, i32 half) {
      issue_half(dp, shared.v().from_row(number * kWarpgroupRows), shared.dout(do_at), half);
    }
    // Line 15: dQ_i += dS_ij K_j of the step at `ds_at`. The first step of a tile has none before it: it
    // multiplies K_j instead of dS, and the product is not used. A branch would serialize the products.
    FLASHGEN_DEVICE void issue_dq(Strip<kPanelColumns>& dq, typename Shared::DSRing::State ds_at,
                                  bool exists) {
      shared.ds_ring().wait_full(ds_at);
      const typename Shared::DSTile ds = {exists ? shared.ds(ds_at).address : shared.k().address};
      issue_over_rows<kPanelColumns>(dq, Share::by_rows ? ds.panel(number) : ds,
                                     Share::by_rows ? shared.k() : shared.k().panel(number));
    }
    // Writes dQ to shared memory. In the next step TMA adds it to global memory.
    FLASHGEN_DEVICE void store_dq(Strip<kPanelColumns>& dq, typename Shared::DSRing::State ds_at,
                                  bool exists) {
      wgmma_pin(dq);
      warp_sync();
      if (thread.lane == 0) {
        if (exists) mbarrier_arrive(shared.ds_ring().empty(ds_at));
        bulk_wait_read<0>();
      }
      warp_sync();
      sums.wait_buffer(ds_at);
      const i32 offset = static_cast<i32>(shared.out(thread.warp - 4) - shared.start);
      write_fragments(reinterpret_cast<float*>(shared.base + offset), dq, thread);
    }
    // TMA adds the dQ that is in shared memory.
    FLASHGEN_DEVICE void add_dq() {
      if (in_buffer != none) sums.add(in_buffer, do_at.before().before(), tile_at, thread);
    }

    // ---- A step: a block of queries

    FLASHGEN_DEVICE void step(const Tile& tile) {
      // No product is in flight, but ptxas does not know that at the head of a loop.
      wgmma_wait<0>();
      if (!cfg.presets_ahead) preset_scores(q_at);
      const QueryStep step = queries.take([&] { return shared.read_message(q_at, thread); });
      const i32 first_q = step.block * cfg.tile_q;
      const bool is_first = previous == none;
      issue_scores();
      // The mask is evaluated while S is multiplied, and before dP takes registers. `number` does not appear
      // here: ptxas would no longer keep it in a uniform register for the descriptors of products.
      const bool is_cut = queries.is_cut(p, tile, step, thread.recomputed().warp / 4 - 1);
      AllowedQueries<cfg.tile_q / 2> allowed;
      if (is_cut) {
        const Thread own = thread.recomputed();
        const i32 first_key = tile.first_key + (own.warp - 4) * kWarpRows;
        allowed = allowed_queries<cfg.tile_q / 2>(tile.template mask<Mask>(p, step.member), first_q,
                                                  first_key, own);
      }
      if (is_first) shared.v_ring().wait_full(kv_at);
      // Addresses are computed in each step, to save registers.
      const Thread here = thread.recomputed();
      const i32 warp_key = (here.warp - 4) * kWarpRows;
      const Pairs pairs =
          Score::template load<cfg.tile_q>(p, tile, step, first_q, tile.first_key + warp_key, here);
      const auto kept = Dropping::template draw_queries<cfg.tile_q>(
          p, tile.sequence, tile.query_head(p, step.member), first_q, tile.first_key + warp_key, here);

      Strip<cfg.tile_q> dp;
      shared.do_ring().wait_full(do_at);
      preset_columns(dp, shared.dsum(do_at), here);
      issue_half_of_dp(dp, 0);
      if (is_first) sums.report(thread);
      // Earlier, products would wait for its fence. Later, the buffer would be needed again.
      add_dq();

      // Line 11: P_ij = exp(S_ij - L_i). Line 12: dV_j += P_ij^T dO_i.
      wgmma_wait<1>();
      wgmma_pin(scores);
      if (is_cut) allowed.forbid(scores);
      Rounded<cfg.tile_q> probabilities, factors;
#pragma unroll
      for (i32 chunk = 0; chunk < chunks; ++chunk) {
        Score::template exponentiate<T>(scores, probabilities, factors, chunk, pairs, p, tile, step,
                                        shared.lse(q_at), first_q, tile.first_key + warp_key, here);
        Dropping::template drop<Score::has_slope>(probabilities, factors, kept, chunk);
        if (chunk == 0) issue_half_of_dp(dp, 1);
        issue_chunk(dv, probabilities, shared.dout(do_at), chunk);
      }
      const Rounded<cfg.tile_q>& factor = has_factors ? factors : probabilities;

      Strip<kPanelColumns> dq;
      issue_dq(dq, do_at.before(), !is_first);
      // Line 14: dS_ij = P_ij (dP_ij - D_i). Line 16: dK_j += dS_ij^T Q_i. A chunk is issued once the next is
      // stored.
      wgmma_wait<chunks + (cfg.dq_last ? 0 : 1)>();
      wgmma_pin(dp);
      Rounded<cfg.tile_q> ds;
      shared.ds_ring().wait_empty(do_at);
#pragma unroll
      for (i32 chunk = 0; chunk < chunks; ++chunk) {
        Dropping::drop_gradients(dp, kept, chunk, shared.dsum(do_at), here);
        multiply_chunk(T{}, ds, dp, factor, chunk);
        store_chunk(shared.ds(do_at), warp_key, ds, chunk, here);
        if (chunk > 0) issue_chunk(dk, ds, shared.q(q_at), chunk - 1);
      }
      fence_proxy_async_shared();
      warp_sync();
      if (thread.lane == 0) mbarrier_arrive(shared.ds_ring().full(do_at));
      issue_chunk(dk, ds, shared.q(q_at), chunks - 1);

      wgmma_wait<chunks + 1>();
      wgmma_pin(dv);
      shared.do_ring().release(do_at, thread);
      wgmma_wait<cfg.dq_last ? 0 : chunks>();
      store_dq(dq, do_at.before(), !is_first);
      wgmma_wait<0>();
      wgmma_pin(dk);
      in_buffer = previous;
      previous = sums.number(tile, step);
      shared.q_ring().release(q_at, thread);
      q_at.advance();
      do_at.advance();
    }

    // ---- Results

    // Line 18: write dK_j, dV_j to global memory. Each warp stores its 16 rows by TMA.
    FLASHGEN_DEVICE void store(const Tile& tile) {
      const Thread here = thread.recomputed();
      const i32 first_row = tile.first_key + (here.warp - 4) * kWarpRows;
      const u32 rows = shared.out(here.warp - 4);
      const float kept = Dropping::factor(p), dv_scale[2] = {kept, kept};
      const float dk_scale[2] = {p.scale * kept, p.scale * kept};
      if (Queries::has_mask && warp_any(first_row_times_zero(dk) + first_row_times_zero(dv) != 0.0f) &&
          here.lane == 0)
        flag_keys<Queries::has_mask>(p, tile.template key_tile<cfg.tile_kv>(p));
      sums.wait_buffer(do_at);
      const auto store_rows = [&](auto to, const auto& strip, const float (&factor)[2],
                                  const TensorMap& map) {
        if (here.lane == 0) bulk_wait_read<0>();
        warp_sync();
        store_strip(to, 0, strip, factor, here);
        fence_proxy_async_shared();
        warp_sync();
        if (here.lane == 0) {
          if (first_row < tile.result_rows(p)) tile.store(to, p, map, first_row);
          bulk_commit();
        }
      };
      store_rows(typename Shared::DVRows{rows}, dv, dv_scale, p.dv_map);
      store_rows(typename Shared::DKRows{rows}, dk, dk_scale, p.dk_map);
    }

    // ---- The mainloop

    FLASHGEN_DEVICE void run() {
      while (true) {
        shared.tile_ring().wait_full(tile_at);
        // A reference, so that the tile stays in shared memory and takes no registers.
        const Tile& tile = shared.tile(tile_at);
        if (!tile.exists) break;
        queries.begin(p, tile);
        // Line 7: dK_j = 0, dV_j = 0.
        preset_zero(dk);
        preset_zero(dv);
        if (queries.over()) {
          sums.pass(tile_at, thread);
        } else {
          shared.k_ring().wait_full(kv_at);
          sums.begin(tile);
          previous = in_buffer = none;
          // Line 8: for each tile of queries that may attend to some key of this tile, of each head of the
          // group.
          while (!queries.over()) step(tile);
          shared.v_ring().release(kv_at, thread);
          add_dq();
          last_dq();
          shared.k_ring().release(kv_at, thread);
          kv_at.advance();
        }
        store(tile);
        mbarrier_arrive(shared.tile_ring().empty(tile_at));
        tile_at.advance();
      }
      sums.leave(thread);
      if (thread.lane == 0) bulk_wait<0>();
    }
    // dQ of the last step.
    FLASHGEN_DEVICE void last_dq() {
      Strip<kPanelColumns> dq;
      issue_dq(dq, do_at.before(), true);
      wgmma_wait<0>();
      store_dq(dq, do_at.before(), true);
      sums.add(previous, do_at.before(), tile_at, thread);
    }
  };

  // ---- The kernel

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Thread thread = Thread::current();
    const Shared shared{{base, shared_address(base)}};
    Sums::clear_shared(shared, thread);
    if (thread.index() == 0) {
      shared.init(Sums::tile_readers);
      Sums::init(shared);
      fence_mbarrier_init();
    }
    block_sync();
    // Programmatic dependent launch: waits for the previous grids, and lets the next one start.
    griddep_wait();
    griddep_launch_dependents();
    // Registers that the producer does not need go to the consumers. Each role reads its thread index again,
    // because the producer has no register to keep it in.
    if (thread.warp >= 4) {
      setmaxnreg_inc<cfg.consumer_registers>();
      const Thread own = Thread::current().recomputed();
      const i32 number = own.warp / 4 - 1;
      Consumer{p, shared, own, number, {}, {}, {}, {}, {}, {p, shared, number}}.run();
    } else {
      setmaxnreg_dec<cfg.producer_registers>();
      const Thread own = Thread::current().recomputed();
      if (own.warp == 0) {
        Producer{p, shared, own, own.lane == 0}.run();
      } else {
        Sums::run_helper(p, shared, own);
      }
    }
  }
};

// ---- flashgen/sm90/dq_sums_any_order.cuh
// dQ as a sum over tiles of keys, added in any order: one of the two Sums policies of the fused backward
// kernel.
//
// Consumers leave their shares of dQ in shared memory, and TMA adds them to a float32 sum in global memory.
// Only heads in progress have sums: a ring of p.sum_heads heads stays in the L2 cache. The three warps beside
// the producer finish sums that are complete:
//
//     reporter    counts, for all thread blocks, tiles of keys that have added; signals consumers when a ring
//                 slot is cleared
//     collector   one lane that draws tiles of queries, head after head, and loads their complete sums by TMA
//     finisher    scales, rounds and stores them, and clears the sums for a later head
//
// There is no deadlock. A head waits for the one that used its slot before, and a tile of queries for the
// tiles of keys of its head. Tiles are drawn in order by running blocks, and no section of heads waits for
// itself.

// Part of a sum in shared memory. The TMA map of the workspace is an array of lines; a box is two of them.
struct SumLines {
  static constexpr i32 floats = 256;
  static constexpr u32 box_bytes = 2 * floats * 4;
  u32 address;

  FLASHGEN_DEVICE void load(const TensorMap& map, u32 barrier, i32 line, i32 boxes) const {
#pragma unroll 1
    for (i32 i = 0; i < boxes; ++i)
      tma_load_4d(address + static_cast<u32>(i) * box_bytes, &map, barrier, 0, line + 2 * i, 0, 0);
  }
  // Stores the same bytes to each box.
  FLASHGEN_DEVICE void repeat(const TensorMap& map, i32 line, i32 boxes) const {
#pragma unroll 1
    for (i32 i = 0; i < boxes; ++i) tma_store_4d(&map, address, 0, line + 2 * i, 0, 0);
  }
};

template <BackwardSm90Config cfg, class T, class Params, class Smem, class Tile, class Mask, class Queries,
          class Dropping>
struct SumsInAnyOrder {
  using Shared = BackwardShared<cfg, T, Smem, Tile, Queries>;
  using Share = typename Shared::Share;
  using TileAt = typename Shared::TileRing::State;
  using StepAt = typename Shared::DORing::State;
  using SumRing = Ring<cfg.sum_stages>;
  using Order = FinishOrder<cfg, Params, Tile>;
  // Warps beside consumers that read announced tiles.
  static constexpr u32 tile_readers = 1;
  // Shares of a tile of dQ: one for each warp.
  static constexpr i32 parts = Shared::consumer_warps;

  // ---- Barriers and counters

  FLASHGEN_DEVICE static SumRing sum_ring(Shared shared) { return {shared.start + Smem::kSumBarriers}; }
  FLASHGEN_DEVICE static u8* sum(Shared shared, typename SumRing::State at) {
    return shared.base + Smem::kSums + at.slot() * Shared::out_bytes;
  }
  FLASHGEN_DEVICE static DqPart& part(Shared shared, typename SumRing::State at) {
    return reinterpret_cast<DqPart*>(shared.base + Smem::kSumParts)[at.slot()];
  }
  // Two barriers with a phase for each tile of keys: all warps' shares of the previous tile have been added
  // to dQ, and this tile's may be.
  FLASHGEN_DEVICE static u32 added(Shared shared) { return shared.start + Smem::kTurnBarriers; }
  FLASHGEN_DEVICE static u32 may_add(Shared shared) { return added(shared) + 8; }
  FLASHGEN_DEVICE static u32 turn_of(TileAt tile) { return tile.count % 2; }
  // How many tiles of keys have added to the sums of a group, and how many tiles of a head's dQ are finished
  // and cleared.
  FLASHGEN_DEVICE static u32* added_tiles(const Params& p, i32 first_head) {
    return p.head_counts + 1 + 2 * first_head;
  }
  FLASHGEN_DEVICE static u32* finished_tiles(const Params& p, i32 head) {
    return p.head_counts + 2 + 2 * head;
  }

  FLASHGEN_DEVICE static void init(Shared shared) {
    sum_ring(shared).init(2, kWarpSize);
    mbarrier_init(added(shared), Shared::consumer_warps);
    mbarrier_init(may_add(shared), 1);
  }
  // All threads call this before the block begins.
  FLASHGEN_DEVICE static void clear_shared(Shared shared, Thread thread) {
    constexpr i32 threads = (cfg.consumers + 1) * kWarpgroupSize;
    for (i32 i = thread.index(); i < static_cast<i32>(SumLines::box_bytes) / kChunkBytes; i += threads)
      reinterpret_cast<Vec16*>(shared.base + Smem::kZeros)[i] = Vec16{.words = {0, 0, 0, 0}};
    fence_proxy_async_shared();
  }

  // ---- A consumer's warp

  struct Adder {
    const Params& p;
    Shared shared;
    i32 consumer;
    // The number of the group's first tile of queries in the ring of sums.
    i32 first_number;

    FLASHGEN_DEVICE void begin(const Tile& tile) { first_number = tile.template first_sum<cfg.tile_q>(p); }
    FLASHGEN_DEVICE i32 number(const Tile&, QueryStep step) const { return Tile::sum(p, first_number, step); }

    // All additions of the previous tile of keys are complete. Its stores of dK and dV, two groups, may be in
    // flight.
    FLASHGEN_DEVICE void report(Thread thread) const {
      if (thread.lane == 0) {
        bulk_wait<2>();
        mbarrier_arrive(added(shared));
      }
    }
    // A tile that no query attends to adds nothing. But a warp that ran ahead could make the reporter miss a
    // phase.
    FLASHGEN_DEVICE void pass(TileAt tile_at, Thread thread) const {
      report(thread);
      mbarrier_wait(may_add(shared), turn_of(tile_at));
    }
    FLASHGEN_DEVICE void wait_buffer(StepAt) const {}
    FLASHGEN_DEVICE void add(i32 number, StepAt, TileAt tile_at, Thread thread) const {
      mbarrier_wait(may_add(shared), turn_of(tile_at));
      fence_proxy_async_shared();
      warp_sync();
      if (thread.lane == 0) {
        const i32 warp = thread.warp - 4;
        float* const sum =
            p.dq_accum + static_cast<i64>(number) * Share::tile_floats + Share::warp_begin(warp);
        bulk_reduce_add(sum, shared.out(warp), static_cast<u32>(Share::warp_floats(warp / 4) * 4));
        bulk_commit();
      }
    }
    FLASHGEN_DEVICE void leave(Thread thread) const { report(thread); }
  };

  // ---- The warps beside the producer

  FLASHGEN_DEVICE static void run_helper(const Params& p, Shared shared, Thread self) {
    const Thread thread = self.recomputed();
    if (thread.warp == 1) {
      report(p, shared, thread);
    } else if (thread.warp == 2) {
      if (Order::by_warp || thread.lane == 0) collect(p, shared, thread);
    } else {
      finish(p, shared, thread);
    }
  }

  FLASHGEN_DEVICE static void report(const Params& p, Shared shared, Thread thread) {
    TileAt tile_at;
    i32 previous_head = 0;
    while (true) {
      shared.tile_ring().wait_full(tile_at);
      const Tile tile = shared.tile(tile_at);
      mbarrier_arrive(shared.tile_ring().empty(tile_at));
      mbarrier_wait(added(shared), turn_of(tile_at));
      if (tile_at.count > 0 && thread.lane == 0) atomic_add_release(added_tiles(p, previous_head), 1u);
      if (!tile.exists) break;
      const i32 head = tile.first_head(p);
      if (head >= p.sum_heads) {
        // Earlier heads used these sums. Wait until they are finished, and the sums are cleared.
        for (i32 member = thread.lane; member < p.group; member += kWarpSize) {
          while (load_acquire(finished_tiles(p, head - p.sum_heads + member)) !=
                 static_cast<u32>(p.q_tiles)) {}
        }
        // TMA of another block cleared the sums, and TMA of this block adds to them.
        fence_proxy_async_global();
      }
      warp_sync();
      if (thread.lane == 0) mbarrier_arrive(may_add(shared));
      previous_head = head;
      tile_at.advance();
    }
  }

  FLASHGEN_DEVICE static void collect(const Params& p, Shared shared, Thread thread) {
    Order order{p};
    typename SumRing::State at;
    const bool elected = !Order::by_warp || thread.lane == 0;
    const auto draw = [&]() {
      const i32 number = elected ? static_cast<i32>(atomic_add(p.head_counts, 1u)) : 0;
      return Order::by_warp ? shuffle(number, 0) : number;
    };
    for (i32 number = draw();;) {
      const auto tile = order.by_heads(number, thread);
      if (!tile.exists) break;
      const i32 head = tile.sequence * p.heads_q + tile.head;
      const u32* const tiles_added = added_tiles(p, head - head % p.group);
      while (elected && load_acquire(tiles_added) != static_cast<u32>(tile.key_tiles(p, cfg.tile_kv))) {}
      fence_proxy_async();
      // The next draw overlaps the loads of this tile.
      number = draw();
      const i32 sum_number = Tile::sum_of(p, head, tile.number(p, cfg.tile_q));
      for (i32 warp = 0; warp < parts; ++warp) {
        const i32 consumer = warp / 4;
        const DqPart to = {
            Share::column(consumer),
            tile.first_row(p, cfg.tile_q) + Share::row(consumer) + warp % 4 * kWarpRows,
            tile.head,
            tile.place(),
            tile.number(p, cfg.tile_q),
            sum_number * (Share::tile_floats / SumLines::floats) + Share::warp_begin(warp) / SumLines::floats,
            Share::warp_floats(consumer) / (2 * SumLines::floats),
            Tile::is_sum_needed_again(p, head),
            warp == parts - 1};
        if (elected) {
          const u32 full = sum_ring(shared).full(at);
          sum_ring(shared).wait_empty(at);
          part(shared, at) = to;
          mbarrier_arrive_expect_tx(full, static_cast<u32>(to.boxes) * SumLines::box_bytes);
          SumLines{shared_address(sum(shared, at))}.load(p.dq_accum_map, full, to.line, to.boxes);
          // A second arrival, by this thread, orders the loads before the finisher clears the sum.
          mbarrier_arrive(full);
        }
        at.advance();
      }
    }
    if (!elected) return;
    sum_ring(shared).wait_empty(at);
    part(shared, at) = {};
    mbarrier_arrive(sum_ring(shared).full(at));
    mbarrier_arrive(sum_ring(shared).full(at));
  }

  // dQ_i = scale * (sum over the tiles of keys), for rows of one warp at a time.
  FLASHGEN_DEVICE static void finish(const Params& p, Shared shared, Thread thread) {
    using Rows = typename Shared::DQRows;
    typename SumRing::State at;
    while (true) {
      sum_ring(shared).wait_full(at);
      const DqPart& to = part(shared, at);
      const i32 boxes = to.boxes;
      if (boxes == 0) break;
      const Rows rows =
          Rows{shared.start + Smem::kDqRows}.slot(static_cast<i32>(at.count % cfg.rounded_stages));
      if (thread.lane == 0) bulk_wait_read<cfg.rounded_stages - 1>();
      warp_sync();
      const float* const from = reinterpret_cast<const float*>(sum(shared, at));
      if (has_failed<Queries::has_mask>(from, Share::columns(0) / 2 * boxes, thread) && thread.lane == 0)
        flag_queries<Queries::has_mask>(p, to.tile);
      const float scale = p.scale * Dropping::factor(p);
      finish_box<0, false>(rows, from, scale, thread);
      if (cfg.head_dim % kPanelColumns == 0 || boxes == 2) finish_box<1, false>(rows, from, scale, thread);
      fence_proxy_async_shared();
      warp_sync();
      if (thread.lane == 0) {
        const DqPart here = to;
        if (here.row < p.len_q)
          tma_store_4d(&p.dq_map, rows.address, here.column, here.row, here.head, here.place);
        if (here.is_needed_again)
          SumLines{shared.start + Smem::kZeros}.repeat(p.dq_accum_map, here.line, boxes);
        bulk_commit();
        if (here.is_needed_again && here.is_last) {
          bulk_wait<0>();
          atomic_add_release(finished_tiles(p, here.place * p.heads_q + here.head), 1u);
        }
      }
      mbarrier_arrive(sum_ring(shared).empty(at));
      at.advance();
    }
    if (thread.lane == 0) bulk_wait<0>();
  }
};

// ---- flashgen/ring_any_size.cuh
// Positions in rings whose number of slots is no power of two.

// Slot and parity are counted rather than computed by a division.
template <i32 slots>
  requires((slots & (slots - 1)) != 0)
struct RingState<slots> {
  u32 count = 0;
  i32 at = 0;
  u32 round = 0;

  FLASHGEN_DEVICE i32 slot() const { return at; }
  FLASHGEN_DEVICE u32 parity() const { return round; }
  // Advances by at most the number of slots.
  FLASHGEN_DEVICE void advance(i32 by = 1) {
    count += static_cast<u32>(by);
    const bool wraps = at >= slots - by;
    at += wraps ? by - slots : by;
    round ^= wraps ? 1u : 0u;
  }
};

}  // namespace flashgen

// ---- kernels/hopper/backward.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr BackwardSm90Config kConfig{
    .head_dim = 128,
    .head_dim_v = 128,
    .tile_q = 64,    // B_r: query rows per step
    .tile_kv = 128,  // B_c: keys per tile that a block works on
    .q_stages = 3,
    .do_stages = 2,
    .ds_stages = 2,
    .sum_stages = 3,      // slots for sums of dQ to be scaled and rounded
    .rounded_stages = 1,  // slots for rounded dQ
    .consumers = 2,       // warpgroups that compute, 64 keys each
    .producer_registers = 24,
    .consumer_registers = 240,
    .section_heads = 16,     // heads of a section, whose tiles are scheduled together
    .presets_ahead = false,  // the next S starts during dK
    .dq_last = false,        // dQ is multiplied after dK, not before
    .has_lower = false,      // the band has a lower bound on k - q
    .has_upper = true,       // the band has an upper bound on k - q
};

struct Params {
  TensorMap q_map, k_map, v_map, dout_map, row_stats_map, dk_map, dv_map, dq_accum_map, dq_map;  // for TMA
  float* dq_accum;  // workspace that dQ is summed in
  u32* counter;     // tiles drawn, then blocks done; 0 between launches
  // tiles of dQ drawn by finishers; per head, tiles of keys added; per head, tiles of dQ finished
  u32* head_counts;
  u32* failed_tiles;  // flags of tiles of dQ, then of dK and dV, that are not finite
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  i32 q_tiles;                 // tiles of queries of one head
  i32 kv_tiles;                // tiles of keys of one head
  i32 tiles;                   // tiles of all heads of all sequences
  i32 sum_heads;               // query heads in dq_accum, a ring
  i32 query_flags;             // how many of these are of dQ
  float scale;
  float scale_log2;  // scale * log2(e)
};
static_assert(sizeof(Params) == 1280, "the launcher packs Params into 1280 bytes");

struct Smem {
  static constexpr u32 kK = 0;               // K_j
  static constexpr u32 kV = 32768;           // V_j
  static constexpr u32 kQ = 65536;           // Q_i, 3 slots
  static constexpr u32 kDo = 114688;         // dO_i, 2 slots
  static constexpr u32 kDs = 147456;         // dS_ij, 2 slots
  static constexpr u32 kDq = 180224;         // dQ_i, and at the end dK_j and dV_j, to be stored
  static constexpr u32 kSums = 212992;       // rows of dQ_i to be scaled and rounded, 3 slots
  static constexpr u32 kDqRows = 225280;     // rounded rows of dQ_i
  static constexpr u32 kZeros = 227328;      // zeros that clear the sum of dQ
  static constexpr u32 kLse = 229376;        // -L_i in units of S, 3 slots
  static constexpr u32 kDsum = 230144;       // -D_i, 2 slots
  static constexpr u32 kKBarriers = 230656;  // full and empty barriers of each slot
  static constexpr u32 kVBarriers = 230784;
  static constexpr u32 kQBarriers = 230912;
  static constexpr u32 kDoBarriers = 231040;
  static constexpr u32 kDsBarriers = 231168;
  static constexpr u32 kSumBarriers = 231296;
  static constexpr u32 kTurnBarriers = 231424;
  static constexpr u32 kSumParts = 231552;  // the part of dQ in each slot
  static constexpr u32 kTileBarriers = 231680;
  static constexpr u32 kTiles = 231808;  // the next tiles of keys
};

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using Scoring = NoScore;
using Tile = DenseKeyTile;
using Dropping = NoBackwardDropout;
using Queries = BandQueries<kConfig, Mask, Scoring::masks_query_end, false>;
using Sums = SumsInAnyOrder<kConfig, element_t, Params, Smem, Tile, Mask, Queries, Dropping>;

FLASHGEN_KERNEL(384, 1) backward_main_d128_causal_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  BackwardMainloop<kConfig, element_t, Params, Smem, Tile, Mask, Queries, Scoring, Dropping, Sums>::run(p, base);
}
