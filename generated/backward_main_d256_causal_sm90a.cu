// backward_main_d256_causal_sm90a: FlashAttention-3, backward pass: dK and dV, and dQ where it is summed with
// atomics.
//
// spec     {"head_dim":256,"head_dim_v":256,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 256 --dtype bf16 --causal --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 64, tile_kv 64, q_stages 2, do_stages 2, 384 threads
// roles    of 1 warpgroup one warp brings tiles (40 registers a thread); 2 compute, dV and dK of the same 64
//          keys (232)
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 64
//          key rows of a key/value head and batch entry; they start while the grid before them ends, and wait
//          for it
// smem     214816 bytes
// because  shared memory holds two slots for Q and dO; dV and dK are issued first to free them
//
// contents   46  Instructions, one per function: types, device, math.
//           135  Element types.
//           169  Instructions, one per function: barrier, bulk, grid, descriptor, wgmma.
//           481  Tiles as TMA writes them and wgmma reads them.
//           584  Which pairs dropout keeps in transposed scores.
//           592  Banded masks.
//           645  The order in which persistent blocks draw tiles.
//           680  Streaming tiles between global and shared memory.
//           693  Where a tile of keys lies, and the queries that attend to it.
//           792  Probabilities P of transposed scores, and the factor of dS.
//           825  Which pairs of a warp's 16 keys and a block of queries the mask allows, as bits.
//           885  Instructions, one per function: packed.
//           899  Dropout of probabilities.
//           911  Dropout of probabilities in the backward pass.
//           924  Writing a warpgroup's results to shared and global memory.
//           980  What the backward mainloops do with fragments.
//          1016  Finding NaN and infinity.
//          1030  Tiles of results that the mainloops could not compute, because an operand holds NaN or infinity.
//          1043  Rings of slots in shared memory, filled by one side and emptied by the other.
//          1088  Which blocks of queries a tile of keys visits, for each head of the group, and which of them the mask cuts.
//          1164  What the backward kernels that keep tiles of keys share.
//          1308  The backward pass on Hopper, for heads wider than 128.
//          1603  The kernel: its configuration, parameters and text.

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

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
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
// ---- flashgen/panel.cuh
// Tiles as TMA writes them and wgmma reads them: panels of 128-byte rows, one panel after
// another, each swizzled by 128 bytes (chunk c of row r lies at c ^ (r % 8)).

namespace flashgen {

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

  FLASHGEN_DEVICE i32 query_head(const auto& p, i32 member) const { return head * p.group + member; }
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
  FLASHGEN_DEVICE auto dk_rows(const auto& p) const {
    return GlobalRows{p.dk + sequence * p.dk_batch + head * p.dk_head, p.dk_row, p.len_kv};
  }
  FLASHGEN_DEVICE auto dv_rows(const auto& p) const {
    return GlobalRows{p.dv + sequence * p.dv_batch + head * p.dv_head, p.dv_row, p.len_kv};
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

template <bool has_mask, class Params>
FLASHGEN_DEVICE void flag_keys(const Params& p, i32 tile) {
  if constexpr (has_mask) atomic_or(p.failed_tiles + p.query_flags + tile, 1u);
}

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

// ---- flashgen/sm90/backward_keys_mainloop.cuh
// The backward pass on Hopper, for heads wider than 128: dK and dV. backward_query_mainloop.cuh computes dQ.
//
// dK and dV of 64 keys fill the registers of a warpgroup each. So two warpgroups work on the same 64 keys,
// and loop over blocks of 64 queries. Scores are transposed, as in backward_mainloop.cuh. Line numbers in
// comments are those of Algorithm 2 of the FlashAttention-2 paper.
//
//     values   | S(i+1) = K Q^T  | dV += P(i)^T dO  | P(i+1) = exp(S - L), to shared memory
//     keys     | dP(i+1) = V dO^T| dK += dS(i)^T Q  | P(i+1) from shared memory, dS = P (dP - D)
//
// The warpgroup that sums dK runs behind the other one. While one takes exponentials, the other one
// multiplies. Results leave registers once, so they have the same bits in every run.
//
// A step's sum is issued before the next step's pairs, because that frees its slot early.

struct BackwardKeysConfig {
  i32 head_dim, head_dim_v;
  i32 stored_columns, stored_columns_v;  // of dK and of dV
  i32 tile_q, tile_kv;
  i32 q_stages, do_stages, p_stages;
  i32 consumers;
  i32 producer_registers, consumer_registers;
  i32 section_heads;  // heads whose operands stay in the L2 cache
  bool has_lower, has_upper;
};

template <BackwardKeysConfig cfg, class T, class Params, class Smem, class Tile, class Mask, class Queries,
          class Score, class Dropping>
struct BackwardKeysMainloop {
  static_assert(cfg.tile_kv == kWarpgroupRows && cfg.consumers == 2, "two consumers share 64 keys");
  using Factors = Rounded<cfg.tile_q>;
  using PRing = Ring<cfg.p_stages>;
  using PAt = typename PRing::State;
  static constexpr i32 chunks = chunks_of(cfg.tile_q);
  // Of a warpgroup.
  static constexpr u32 warps = 4;

  struct Shared : KeyTileShared<cfg, T, Smem, Tile, Queries> {
    using Base = KeyTileShared<cfg, T, Smem, Tile, Queries>;
    FLASHGEN_DEVICE PRing p_ring() const { return {Base::start + Smem::kPBarriers}; }
    // The factors of dS on their way from one consumer to the other. What a lane writes, the same lane of the
    // other warpgroup reads.
    FLASHGEN_DEVICE Vec16* factors(PAt at, Thread thread) const {
      constexpr i32 bytes = kWarpRows * cfg.tile_q * static_cast<i32>(sizeof(T));
      const i32 part = at.slot() * static_cast<i32>(warps) + thread.warp % static_cast<i32>(warps);
      return reinterpret_cast<Vec16*>(Base::base + Smem::kP + part * bytes) + thread.lane;
    }
    FLASHGEN_DEVICE void init() const {
      Base::k_ring().init(1, warps);
      Base::v_ring().init(1, warps);
      Base::q_ring().init(1, 2 * warps);
      Base::do_ring().init(1, 2 * warps);
      p_ring().init(warps * kWarpSize, warps * kWarpSize);
      Base::tile_ring().init(1, 2 * warps * kWarpSize);
      fence_mbarrier_init();
    }
  };
  using QRing = typename Shared::QRing;
  using DORing = typename Shared::DORing;

  // A step of a consumer: its block of queries, and whether the mask forbids some pair of it.
  struct Step {
    QueryStep queries;
    bool is_cut;
  };

  // Which pairs of a warp's keys are kept. Both consumers draw, because the factors of dS do not show it.
  FLASHGEN_DEVICE static auto draw(const Params& p, const Tile& tile, Step step, Thread thread) {
    return Dropping::template draw_queries<cfg.tile_q>(
        p, tile.sequence, tile.query_head(p, step.queries.member), step.queries.block * cfg.tile_q,
        tile.first_key + thread.warp % 4 * kWarpRows, thread);
  }

  // ---- The two consumers. Each multiplies its tile (K or V) by Q or dO of a step (its pairs), makes P or dS
  // of the result, and multiplies that by dO or Q (its sum: dV or dK).

  struct SumsValues {
    static constexpr i32 columns = cfg.head_dim_v, stored = cfg.stored_columns_v;
    using FirstRing = QRing;
    using SecondRing = DORing;
    FLASHGEN_DEVICE static auto kept_ring(const Shared& shared) { return shared.k_ring(); }
    FLASHGEN_DEVICE static QRing first_ring(const Shared& shared) { return shared.q_ring(); }
    FLASHGEN_DEVICE static DORing second_ring(const Shared& shared) { return shared.do_ring(); }

    // Lines 10 and 11: S_ij = Q_i K_j^T - L_i.
    FLASHGEN_DEVICE static void issue_pairs(Strip<cfg.tile_q>& scores, const Shared& shared,
                                            typename QRing::State at, Thread thread) {
      preset_columns(scores, shared.lse(at), thread);
      issue_over_columns(scores, shared.k(), shared.q(at));
    }
    // Line 11: P_ij = exp(S_ij - L_i).
    FLASHGEN_DEVICE static void finish_pairs(Factors& probabilities, Strip<cfg.tile_q>& scores,
                                             const Params& p, const Shared& shared, const Tile& tile,
                                             Step step, typename QRing::State at, PAt p_at, Thread thread) {
      const i32 first_q = step.queries.block * cfg.tile_q,
                first_key = tile.first_key + thread.warp % 4 * kWarpRows;
      const auto pairs = Score::template load<cfg.tile_q>(p, tile, step.queries, first_q, first_key, thread);
      AllowedQueries<cfg.tile_q / 2> allowed;
      if (step.is_cut) {
        allowed = allowed_queries<cfg.tile_q / 2>(tile.template mask<Mask>(p, step.queries.member), first_q,
                                                  first_key, thread);
        allowed.forbid(scores);
      }
      const auto kept = draw(p, tile, step, thread);
      Factors slopes;
#pragma unroll
      for (i32 chunk = 0; chunk < chunks; ++chunk) {
        Score::template exponentiate<T>(scores, probabilities, slopes, chunk, pairs, p, tile, step.queries,
                                        shared.lse(at), first_q, first_key, thread);
        Dropping::template drop<Score::has_slope>(probabilities, slopes, kept, chunk);
      }
      const Factors& factors = Score::has_slope || Dropping::drops ? slopes : probabilities;
      shared.p_ring().wait_empty(p_at);
#pragma unroll
      for (i32 i = 0; i < cfg.tile_q / 16; ++i)
        shared.factors(p_at, thread)[i * kWarpSize] =
            Vec16{{factors[i][0], factors[i][1], factors[i][2], factors[i][3]}};
      mbarrier_arrive(shared.p_ring().full(p_at));
    }
    // Line 12: dV_j += P_ij^T dO_i.
    FLASHGEN_DEVICE static void issue_sum(Strip<columns>& dv, const Factors& p, const Shared& shared,
                                          typename DORing::State at) {
      issue_output(dv, p, shared.dout(at));
    }
    FLASHGEN_DEVICE static auto rows(const Params& p, const Tile& tile) { return tile.dv_rows(p); }
    FLASHGEN_DEVICE static float scale(const Params& p) { return Dropping::factor(p); }
  };

  struct SumsKeys {
    static constexpr i32 columns = cfg.head_dim, stored = cfg.stored_columns;
    using FirstRing = DORing;
    using SecondRing = QRing;
    FLASHGEN_DEVICE static auto kept_ring(const Shared& shared) { return shared.v_ring(); }
    FLASHGEN_DEVICE static DORing first_ring(const Shared& shared) { return shared.do_ring(); }
    FLASHGEN_DEVICE static QRing second_ring(const Shared& shared) { return shared.q_ring(); }

    // Line 13: dP_ij = dO_i V_j^T - D_i.
    FLASHGEN_DEVICE static void issue_pairs(Strip<cfg.tile_q>& dp, const Shared& shared,
                                            typename DORing::State at, Thread thread) {
      preset_columns(dp, shared.dsum(at), thread);
      issue_over_columns(dp, shared.v(), shared.dout(at));
    }
    // Line 14: dS_ij = P_ij (dP_ij - D_i).
    FLASHGEN_DEVICE static void finish_pairs(Factors& ds, Strip<cfg.tile_q>& dp, const Params& p,
                                             const Shared& shared, const Tile& tile, Step step,
                                             typename DORing::State at, PAt p_at, Thread thread) {
      const auto kept = draw(p, tile, step, thread);
      shared.p_ring().wait_full(p_at);
      Factors factors;
#pragma unroll
      for (i32 i = 0; i < cfg.tile_q / 16; ++i) {
        const Vec16 four = shared.factors(p_at, thread)[i * kWarpSize];
#pragma unroll
        for (i32 w = 0; w < 4; ++w) factors[i][w] = four.words[w];
      }
      mbarrier_arrive(shared.p_ring().empty(p_at));
#pragma unroll
      for (i32 chunk = 0; chunk < chunks; ++chunk) {
        Dropping::drop_gradients(dp, kept, chunk, shared.dsum(at), thread);
        multiply_chunk(T{}, ds, dp, factors, chunk);
      }
    }
    // Line 16: dK_j += dS_ij^T Q_i.
    FLASHGEN_DEVICE static void issue_sum(Strip<columns>& dk, const Factors& ds, const Shared& shared,
                                          typename QRing::State at) {
      issue_output(dk, ds, shared.q(at));
    }
    FLASHGEN_DEVICE static auto rows(const Params& p, const Tile& tile) { return tile.dk_rows(p); }
    FLASHGEN_DEVICE static float scale(const Params& p) { return p.scale * Dropping::factor(p); }
  };

  // ---- A consumer

  template <class Role>
  struct Consumer {
    const Params& p;
    Shared shared;
    Thread thread;
    Ring<1>::State kept_at;
    typename Role::FirstRing::State first_at;
    typename Role::SecondRing::State second_at;
    // The next message. It comes with Q, which is the second operand of one consumer.
    typename QRing::State message_at;
    PAt p_at;
    typename Shared::TileRing::State tile_at;
    Queries queries;
    Strip<Role::columns> sum;
    // The left operand of the sum.
    Factors left;

    FLASHGEN_DEVICE void issue_pairs(Strip<cfg.tile_q>& pairs) {
      Role::first_ring(shared).wait_full(first_at);
      Role::issue_pairs(pairs, shared, first_at, thread);
    }
    FLASHGEN_DEVICE void take_pairs(Strip<cfg.tile_q>& pairs, const Tile& tile) {
      wgmma_pin(pairs);
      // Addresses are computed in each step, to save registers.
      const Thread here = thread.recomputed();
      const QueryStep taken = queries.take([&] {
        return shared.read_message(message_at, thread);
      });
      const Step step = {taken, queries.is_cut(p, tile, taken, 0)};
      Role::finish_pairs(left, pairs, p, shared, tile, step, first_at, p_at, here);
      p_at.advance();
      Role::first_ring(shared).release(first_at, here);
      first_at.advance();
    }
    FLASHGEN_DEVICE void issue_sum() {
      Role::second_ring(shared).wait_full(second_at);
      Role::issue_sum(sum, left, shared, second_at);
    }
    FLASHGEN_DEVICE void take_sum() {
      wgmma_pin(sum);
      Role::second_ring(shared).release(second_at, thread);
      second_at.advance();
    }

    FLASHGEN_DEVICE void run() {
      while (true) {
        shared.tile_ring().wait_full(tile_at);
        const Tile& tile = shared.tile(tile_at);
        if (!tile.exists) break;
        queries.begin(p, tile);
        // Line 7: dK_j = 0, dV_j = 0.
        preset_zero(sum);
        // Line 8: for each block of queries that may attend to some key of this tile, of each head of the
        // group.
        if (!queries.over()) {
          Role::kept_ring(shared).wait_full(kept_at);
          {
            Strip<cfg.tile_q> pairs;
            issue_pairs(pairs);
            wgmma_wait<0>();
            take_pairs(pairs, tile);
          }
          // A step's sum, and the pairs of the next step.
          while (!queries.over()) {
            Strip<cfg.tile_q> pairs;
            issue_sum();
            issue_pairs(pairs);
            wgmma_wait<1>();
            take_sum();
            wgmma_wait<0>();
            take_pairs(pairs, tile);
          }
          Role::kept_ring(shared).release(kept_at, thread);
          kept_at.advance();
          issue_sum();
          wgmma_wait<0>();
          take_sum();
        }
        store(tile);
        mbarrier_arrive(shared.tile_ring().empty(tile_at));
        tile_at.advance();
      }
    }
    // Line 18: write dK_j, dV_j to global memory.
    FLASHGEN_DEVICE void store(const Tile& tile) {
      const Thread here = thread.recomputed();
      if (Queries::has_mask && warp_any(first_row_times_zero(sum) != 0.0f) && here.lane == 0)
        flag_keys<Queries::has_mask>(p, tile.template key_tile<cfg.tile_kv>(p));
      const float scale[2] = {Role::scale(p), Role::scale(p)};
      write_strip<T, Role::columns, Role::stored>(
          Role::rows(p, tile), tile.first_key + here.warp % 4 * kWarpRows, sum, scale, here);
    }
  };

  // ---- The kernel

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Shared shared{{base, shared_address(base)}};
    if (Thread::current().index() == 0) shared.init();
    block_sync();
    // The previous grids may run until here, and the next one may start from here on.
    griddep_wait();
    griddep_launch_dependents();
    // Registers that the producer does not need go to the consumers.
    const Thread thread = Thread::current().recomputed();
    if (thread.warp >= 4) {
      setmaxnreg_inc<cfg.consumer_registers>();
      if (thread.warp < 8) {
        Consumer<SumsValues>{p, shared, thread}.run();
      } else {
        Consumer<SumsKeys>{p, shared, thread}.run();
      }
    } else {
      setmaxnreg_dec<cfg.producer_registers>();
      if (thread.warp == 0)
        KeyTileProducer<cfg, Params, Shared, Tile, Queries>{p, shared, thread, thread.lane == 0}.run();
    }
  }
};

}  // namespace flashgen

// ---- kernels/hopper/backward.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr BackwardKeysConfig kConfig{
    .head_dim = 256,
    .head_dim_v = 256,
    .stored_columns = 256,    // of dK
    .stored_columns_v = 256,  // of dV
    .tile_q = 64,             // B_r: query rows per step
    .tile_kv = 64,            // B_c: keys per tile that a block works on
    .q_stages = 2,            // slots for Q
    .do_stages = 2,           // slots for dO
    .p_stages = 2,            // slots for P
    .consumers = 2,           // warpgroups that compute: one sums dV, one dK
    .producer_registers = 40,
    .consumer_registers = 232,
    .section_heads = 16,  // heads of a section, whose tiles are scheduled together
    .has_lower = false,   // the band has a lower bound on k - q
    .has_upper = true,    // the band has an upper bound on k - q
};

struct Params {
  TensorMap q_map, k_map, v_map, dout_map, row_stats_map;  // for TMA
  element_t* dk;
  element_t* dv;
  u32* counter;                   // tiles drawn, then blocks done; 0 between launches
  u32* failed_tiles;              // flags of tiles of dQ, then of dK and dV, that are not finite
  i64 dk_batch, dk_row, dk_head;  // strides are in elements
  i64 dv_batch, dv_row, dv_head;
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  i32 q_tiles;                 // tiles of queries of one head
  i32 kv_tiles;                // tiles of keys of one head
  i32 tiles;                   // tiles of all heads of all sequences
  i32 query_flags;             // how many of these are of dQ
  float scale;
  float scale_log2;  // scale * log2(e)
};
static_assert(sizeof(Params) == 832, "the launcher packs Params into 832 bytes");

struct Smem {
  static constexpr u32 kK = 0;               // K_j
  static constexpr u32 kV = 32768;           // V_j
  static constexpr u32 kQ = 65536;           // Q_i, 2 slots
  static constexpr u32 kDo = 131072;         // dO_i, 2 slots
  static constexpr u32 kP = 196608;          // P_ij for the other consumer, 2 slots
  static constexpr u32 kLse = 212992;        // -L_i in units of S, 2 slots
  static constexpr u32 kDsum = 213504;       // -D_i, 2 slots
  static constexpr u32 kKBarriers = 214016;  // full and empty barriers of each slot
  static constexpr u32 kVBarriers = 214144;
  static constexpr u32 kQBarriers = 214272;
  static constexpr u32 kDoBarriers = 214400;
  static constexpr u32 kPBarriers = 214528;
  static constexpr u32 kTileBarriers = 214656;
  static constexpr u32 kTiles = 214784;  // the next tiles of keys
};

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using Scoring = NoScore;
using Tile = DenseKeyTile;
using Dropping = NoBackwardDropout;
using Queries = BandQueries<kConfig, Mask, Scoring::masks_query_end>;

FLASHGEN_KERNEL(384, 1) backward_main_d256_causal_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  BackwardKeysMainloop<kConfig, element_t, Params, Smem, Tile, Mask, Queries, Scoring, Dropping>::run(p, base);
}
