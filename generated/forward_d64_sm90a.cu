// forward_d64_sm90a: FlashAttention-3, forward pass: O and the log-sum-exp of each row.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"full","direction":"forward","deterministic":false}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --forward-only --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 192, tile_kv 128, stages 4, q_stages 2, 512 threads
// roles    of 1 warpgroup one warp brings tiles and one chooses which ones (32 registers a thread); 3
//          compute, 64 queries each (160)
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 192
//          query rows of a query head and batch entry; they start while the grid before them ends, and wait
//          for it
// smem     205248 bytes
// because  three warpgroups, as exponentials and not products set the pace at this width
//
// contents   50  Instructions, one per function: types, device, math, matrix.
//           179  Element types.
//           223  Instructions, one per function: barrier, bulk, grid, descriptor, wgmma, wgmma_fours.
//           567  Tiles as TMA writes them and wgmma reads them.
//           666  S = Q K^T and O += P V of the forward kernel.
//           731  Dropout of probabilities.
//           743  Finding NaN and infinity.
//           771  The sizes of a forward kernel for Hopper.
//           794  Banded masks.
//           880  A tile of queries, as the scheduler announces it.
//           926  What a softmax takes exponentials of.
//           954  What an online softmax keeps of each row from one tile of keys to the next.
//           989  The online softmax of a warpgroup's rows.
//          1098  Writing a warpgroup's results to shared and global memory.
//          1118  The results of a tile.
//          1190  Rings of slots in shared memory, filled by one side and emptied by the other.
//          1235  Which blocks of keys a tile of queries visits, and which of them the mask cuts.
//          1307  Which tiles of queries a thread block computes again, because their first results cannot be trusted.
//          1370  The operands of the forward kernel in shared memory, and the producers that load them.
//          1516  What queries, keys and values are multiplied by.
//          1530  The order in which persistent blocks draw tiles.
//          1565  Which tile of queries a persistent block computes next.
//          1598  The scheduler.
//          1665  What happens to products Q K^T before the softmax.
//          1680  P V of a block that the mask cuts, where V may hold NaN or infinity.
//          1735  O += P V.
//          1770  The forward pass on Hopper.
//          2122  The kernel: its configuration, parameters and text.

// The shapes of its products, by their columns: S and O.
#define WGMMA_SHAPES(shape) shape(128) shape(64)

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
FLASHGEN_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x within 1 ulp. Subnormal operands and results are flushed to zero.
FLASHGEN_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// ---- flashgen/ptx/matrix.cuh
// Warp-wide matrix instructions: ldmatrix, stmatrix and mma.sync.

FLASHGEN_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// From registers to shared memory (sm_90 and later).
FLASHGEN_DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
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

}  // namespace flashgen
#endif
// ---- flashgen/element.cuh
// Element types: conversions, and how deep one matrix instruction reaches.

namespace flashgen {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLn2 = 0x1.62e430p-1f;
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

// A warp's accumulators: row_blocks x column_blocks blocks of 16 x 8.
template <i32 row_blocks, i32 column_blocks>
using Accumulator = float[row_blocks][column_blocks][4];

constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }
constexpr i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
constexpr i32 larger(i32 a, i32 b) { return a > b ? a : b; }

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

}  // namespace flashgen

#if !defined(FLASHGEN_EMULATOR)
// ---- flashgen/ptx/barrier.cuh
// Barriers at which threads may arrive without waiting, or wait without arriving. Named barriers exist on
// every GPU, mbarriers are for sm_90 and later.

namespace flashgen {

// ---- Named barriers 1 to 15 of a block: barrier 0 is block_sync's. `threads` counts those of whole warps.

FLASHGEN_DEVICE void named_barrier_sync(i32 barrier, i32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Arrives and does not wait.
FLASHGEN_DEVICE void named_barrier_arrive(i32 barrier, i32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

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
// Orders this thread's accesses of shared memory before later ones by bulk copies and wgmma.
FLASHGEN_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

#define WGMMA_EXPANDED(macro, ...) macro(__VA_ARGS__)

// ---- flashgen/ptx/wgmma_fours.cuh
// Four products of a warpgroup, which add to the same accumulators, as one asm statement: most of the compile
// time goes into accumulators that enter and leave statements. Left operands and, in shared memory, right
// ones are K-major.

template <i32 n>
struct WgmmaFours {
  static_assert(n == 0,
                "a kernel says which shapes it uses: #define WGMMA_SHAPES(shape) shape(64) shape(128)");
};

// The products after the first one accumulate.
#define WGMMA_ADD "setp.eq.b32 p, 0, 0;\n"
#define WGMMA_SS_FOUR(function, c, n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10)                           \
  template <class T, Major... majors>                                                                        \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], const u64(&a)[4], const u64(&b)[4], i32 add) {     \
    asm volatile(WGMMA_BEGIN(i8) WGMMA_PRODUCT(n, "%" #i0, i1, i9, i10)                                      \
                     WGMMA_ADD WGMMA_PRODUCT(n, "%" #i2, i3, i9, i10) WGMMA_PRODUCT(n, "%" #i4, i5, i9, i10) \
                         WGMMA_PRODUCT(n, "%" #i6, i7, i9, i10) "}"                                          \
                 : WGMMA_REGISTERS_##n(c)                                                                    \
                 : "l"(a[0]), "l"(b[0]), "l"(a[1]), "l"(b[1]), "l"(a[2]), "l"(b[2]), "l"(a[3]), "l"(b[3]),   \
                   "r"(add), WGMMA_FORM);                                                                    \
  }
// The last product is issued first.
#define WGMMA_RS_FOUR(function, c, n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i15, \
                      i16, i17, i18, i19, i20, i21, i22)                                                    \
  template <class T, Major... majors>                                                                       \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], const u32(&a)[4][4], const u64(&b)[4], i32 add) { \
    asm volatile(WGMMA_BEGIN(i20) WGMMA_PRODUCT(n, WGMMA_LEFT(i0, i1, i2, i3), i16, i21, i22)               \
                     WGMMA_ADD WGMMA_PRODUCT(n, WGMMA_LEFT(i4, i5, i6, i7), i17, i21, i22)                  \
                         WGMMA_PRODUCT(n, WGMMA_LEFT(i8, i9, i10, i11), i18, i21, i22)                      \
                             WGMMA_PRODUCT(n, WGMMA_LEFT(i12, i13, i14, i15), i19, i21, i22) "}"            \
                 : WGMMA_REGISTERS_##n(c)                                                                   \
                 : WGMMA_LEFT_REGISTERS(a[3]), WGMMA_LEFT_REGISTERS(a[2]), WGMMA_LEFT_REGISTERS(a[1]),      \
                   WGMMA_LEFT_REGISTERS(a[0]), "l"(b[3]), "l"(b[2]), "l"(b[1]), "l"(b[0]), "r"(add),        \
                   WGMMA_FORM);                                                                             \
  }
#define WGMMA_FOURS_AT(n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, ...)                  \
  template <>                                                                                \
  struct WgmmaFours<n> {                                                                     \
    WGMMA_SS_FOUR(add_ss, "+f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10)              \
    WGMMA_SS_FOUR(set_ss, "=f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10)              \
    WGMMA_RS_FOUR(add_rs, "+f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, __VA_ARGS__) \
    WGMMA_RS_FOUR(set_rs, "=f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, __VA_ARGS__) \
  };
#define WGMMA_FOURS(n) WGMMA_EXPANDED(WGMMA_FOURS_AT, n, WGMMA_FROM_##n)
WGMMA_SHAPES(WGMMA_FOURS)
// d = the sum of four products a * b, plus what d held.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_four(float (&d)[n / 2], const MatrixDescriptor (&a)[4],
                                   const MatrixDescriptor (&b)[4]) {
  const u64 left[4] = {a[0].bits(), a[1].bits(), a[2].bits(), a[3].bits()};
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template add_ss<T, a_major, b_major>(d, left, right, 1);
}
// The same without what d held. The compiler knows that the previous value of d is dead.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_first_four(float (&d)[n / 2], const MatrixDescriptor (&a)[4],
                                         const MatrixDescriptor (&b)[4]) {
  const u64 left[4] = {a[0].bits(), a[1].bits(), a[2].bits(), a[3].bits()};
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template set_ss<T, a_major, b_major>(d, left, right, 0);
}
// With the left operands in registers, plus what d held if `accumulate`.
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs_four(float (&d)[n / 2], const u32 (&a)[4][4], const MatrixDescriptor (&b)[4],
                                   bool accumulate) {
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template add_rs<T, b_major>(d, a, right, accumulate);
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

// ---- flashgen/issue_in_fours.cuh
// S = Q K^T and O += P V of the forward kernel.
//
// Four steps of 16 are one asm statement (wgmma_fours.cuh). Recursion takes less time to compile than a loop
// to unroll. issue_rest() is for steps after the last four (issue_single_steps.cuh).

template <class QTile, class KTile, i32 step = 0>
struct ScoreSteps {};

template <class QTile, class KTile, i32 step>
FLASHGEN_DEVICE void issue_steps(Strip<KTile::rows>& scores, MatrixDescriptor left, MatrixDescriptor right,
                                 ScoreSteps<QTile, KTile, step> steps) {
  using T = typename QTile::Element;
  const auto a = [&](i32 i) { return left.advanced(QTile::along_columns(step + i)); };
  const auto b = [&](i32 i) { return right.advanced(KTile::along_columns(step + i)); };
  if constexpr (step + 4 <= QTile::steps) {
    const MatrixDescriptor four_a[4] = {a(0), a(1), a(2), a(3)}, four_b[4] = {b(0), b(1), b(2), b(3)};
    if constexpr (step == 0) {
      wgmma_ss_first_four<T, KTile::rows>(scores, four_a, four_b);
    } else {
      wgmma_ss_four<T, KTile::rows>(scores, four_a, four_b);
    }
    issue_steps(scores, left, right, ScoreSteps<QTile, KTile, step + 4>{});
  } else if constexpr (step < QTile::steps) {
    issue_rest(scores, left, right, steps);
  }
}

// Issues S = Q K^T, of this warpgroup's 64 rows of Q.
template <class QTile, class KTile>
FLASHGEN_DEVICE void issue_scores(Strip<KTile::rows>& scores, QTile q, KTile k) {
  const MatrixDescriptor left = q.by_columns(), right = k.by_columns();
  wgmma_fence();
  issue_steps(scores, left, right, ScoreSteps<QTile, KTile>{});
  wgmma_commit();
}

// The first `count` groups of 16 keys.
template <class VTile, i32 count = VTile::rows / 16>
struct OutputSteps {};

template <class VTile, i32 count>
FLASHGEN_DEVICE void issue_steps(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                 MatrixDescriptor right, bool accumulate, OutputSteps<VTile, count> steps) {
  if constexpr (count >= 4) {
    const auto b = [&](i32 i) { return right.advanced(VTile::along_rows(count - 4 + i)); };
    const MatrixDescriptor four_b[4] = {b(0), b(1), b(2), b(3)};
    const auto& four_a = reinterpret_cast<const u32(&)[4][4]>(probabilities[count - 4]);
    wgmma_rs_four<typename VTile::Element, VTile::cols, Major::mn>(out, four_a, four_b, accumulate);
    issue_steps(out, probabilities, right, true, OutputSteps<VTile, count - 4>{});
  } else if constexpr (count > 0) {
    issue_rest(out, probabilities, right, accumulate, steps);
  }
}

// Issues O = P V, plus O if `accumulate`. The last keys come first, which is up to 1 % faster.
template <class VTile>
FLASHGEN_DEVICE void issue_output_in_fours(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                           VTile v, bool accumulate) {
  const MatrixDescriptor right = v.by_rows();
  wgmma_fence();
  issue_steps(out, probabilities, right, accumulate, OutputSteps<VTile>{});
  wgmma_commit();
}

// ---- flashgen/sm90/dropping.cuh
// Dropout of probabilities: the Dropout policy of the mainloop.

// Keeps all pairs.
struct NoDropout {
  template <i32 columns>
  FLASHGEN_DEVICE static NoDropout draw(const auto&...) { return {}; }
  template <i32 columns>
  FLASHGEN_DEVICE static void apply(Strip<columns>&, NoDropout) {}
  FLASHGEN_DEVICE static float factor(const auto&) { return 1.0f; }
};

// ---- flashgen/non_finite.cuh
// Finding NaN and infinity.

// Adding this to the bits of a magnitude carries into the sign exactly when the exponent is all ones.
template <class T>
constexpr u32 kToInfinity = 0;
template <>
constexpr u32 kToInfinity<bfloat16_t> = 0x00800080u;
template <class T>
constexpr u32 kSigns = kIsFloat<T>      ? 0x80000000u
                       : sizeof(T) == 2 ? 0x80008000u
                                        : 0x80808080u;

// The sign bits of those elements of a word that are not finite.
template <class T>
FLASHGEN_DEVICE u32 non_finite_signs(u32 word) { return ((word & ~kSigns<T>)+kToInfinity<T>)&kSigns<T>; }

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

// The slots of the ring that announces tiles of queries. A consumer holds two: the tile whose results it
// still has to store, and the next one.
constexpr i32 kForwardTileStages = 4;

// The named barrier at which the scheduler waits until the producer asks for a tile. Waiting there takes no
// instructions from the consumers, as polling an mbarrier does. The consumers have barriers 1 to 3.
constexpr i32 kRequestBarrier = 4;

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
    return tiles_of(begin, end, tile);
  }

  // Tiles of keys that every query of [q_begin, q_end) may attend to.
  FLASHGEN_DEVICE Range full_key_tiles(i32 q_begin, i32 q_end, i32 tile) const {
    i32 begin = 0, end = len_kv;
    return {ceil_div(begin, tile), larger(end, 0) / tile};
  }

  // Whether every pair of the rectangle is allowed.
  FLASHGEN_DEVICE bool is_full(i32 q_begin, i32 q_end, i32 k_begin, i32 k_end) const {
    bool full = q_end <= len_q && k_end <= len_kv;
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

// Sets the bits of a lane's pairs that a mask allows.
template <i32 column_blocks, bool has_lower, bool has_upper>
FLASHGEN_DEVICE void find_allowed(u32 (&allowed)[2], const Band<has_lower, has_upper>& mask, i32 first_q,
                                  i32 first_key, Thread thread) {
#pragma unroll
  for (i32 h = 0; h < 2; ++h)
    allowed[h] = allowed_keys(mask, first_q + thread.row() + 8 * h, first_key + thread.column());
}

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

  // Whether the rows of a sequence end where the tensor ends, so that TMA clips them.
  static constexpr bool ends_with_tensor = true;
  // Whether keys and values lie in pages, which all lanes of a producer load.
  static constexpr bool in_pages = false;

  // How many queries and keys the sequence has, and how many rows of results.
  FLASHGEN_DEVICE static i32 len_q(const auto& p) { return p.len_q; }
  FLASHGEN_DEVICE static i32 result_rows(const auto& p) { return p.len_q; }
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
  FLASHGEN_DEVICE void store_o(auto o, const auto& p, i32 q) const { o.store(p.o_map, q, head, sequence); }
  FLASHGEN_DEVICE float* lse_rows(const auto& p) const {
    return p.lse + (static_cast<i64>(sequence) * p.heads_q + head) * p.len_q;
  }
};

// ---- flashgen/logits.cuh
// What a softmax takes exponentials of. The exponentials of a row are relative to its reference maximum: the
// row's maximum so far, or a number near it. Each kind of logits has its own unit for reference maxima.
//
//     logit(s, row)            accumulator s as a reference maximum; as_reference_max(x): logit x as one
//     relative(s, shift, row)  how far s is above reference maximum `shift`, in powers of two
//     powers(x), distance(x)   from a difference of reference maxima to powers of two, and back
//     natural_log(m, x)        the natural logarithm of 2^x times the factor of reference maximum m
//     kNoMax                   the reference maximum of a row without an allowed key so far

// Products that a scale turns into logits. Reference maxima are in powers of two, so that an exponent is one
// instruction. For logits beyond 2^30 its rounding error is many powers of two.
struct ScaledProducts {
  // No logit is below it but -inf, whose exponential is 0.
  static constexpr float kNoMax = -0x1.fffffep127f;
  float scale_log2;

  FLASHGEN_DEVICE float logit(float s, i32 /*row*/) const { return s * scale_log2; }
  FLASHGEN_DEVICE float relative(float s, float shift, i32 /*row*/) const {
    return fused_multiply_add(s, scale_log2, -shift);
  }
  FLASHGEN_DEVICE static float powers(float x) { return x; }
  FLASHGEN_DEVICE static float distance(float x) { return x; }
  FLASHGEN_DEVICE static float natural_log(float reference_max, float x) {
    return (reference_max + x) * kLn2;
  }
};

// ---- flashgen/row_statistics.cuh
// What an online softmax keeps of each row from one tile of keys to the next.

// The four lanes that share a row of accumulators combine their values.
FLASHGEN_DEVICE float row_maximum(float x) {
  x = maximum(x, shuffle_xor(x, 1));
  return maximum(x, shuffle_xor(x, 2));
}
FLASHGEN_DEVICE float row_total(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// Statistics of a warp's 16 rows, of which each lane has two: l/4 and l/4 + 8.
struct RowStatistics {
  float reference_max[2];  // the factor taken out of the row, in the unit of its logits' reference maxima
  float sum[2];            // this lane's share of the row's sum of exponentials

  // Every lane of a row gets the row's sum.
  FLASHGEN_DEVICE void finish() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) sum[h] = row_total(sum[h]);
  }
  FLASHGEN_DEVICE float normalizer(i32 h) const { return sum[h] == 0.0f ? 0.0f : reciprocal_approx(sum[h]); }
  // The whole powers of two in a sum are added to the reference maximum by themselves: where this is far
  // ahead, a logarithm of all of the sum would be as far from zero, and rounded accordingly.
  FLASHGEN_DEVICE float log_sum_exp(i32 h, const auto& logits) const {
    const u32 bits = bits_of(sum[h]);
    const float power = static_cast<float>(static_cast<i32>(bits >> 23) - 127);
    const float rest = log2_approx(float_of((bits & 0x7fffffu) | 0x3f800000u));
    const float finite = logits.natural_log(reference_max[h] + logits.distance(power), rest);
    return sum[h] == 0.0f ? -kInfinity : sum[h] < kInfinity ? finite : sum[h];
  }
};

// ---- flashgen/sm90/row_softmax.cuh
// The online softmax of a warpgroup's rows. A lane holds two of its warp's 16 rows.
//
// `anchored`: exponentials are relative to a reference maximum that is set once, above the maximum of the
// row's first block. Numerator and denominator share the factor, so any reference near the row's maximum
// gives the same result. Later blocks then need no maximum, no shuffles and no rescale. A row whose logits
// outgrow the reference has a large sum. The epilogue detects it, and the tile is computed again with running
// maxima (tile_checks.cuh). Not `anchored`: a running maximum, as in FlashAttention-2.

// How many powers of two a reference maximum lies above the first block's maximum, and above a running one:
// whole numbers, so that they round nothing.
template <class T>
constexpr float kHeadroom = 40.0f;
template <class T>
constexpr float kRunningHeadroom = 0.0f;
// Logits may exceed the reference maximum by at most this many powers of two: products of exponentials with
// values up to 2^100 are then finite. A row whose logits exceed it has a larger sum than kLargestSum.
template <class T>
constexpr float kMaxGrowth = 24.0f;
template <class T>
constexpr float kLargestSum = 0x1p24f;

template <class T, i32 columns, bool anchored, class Logits>
struct RowSoftmax {
  static constexpr float kNoMax = Logits::kNoMax;
  // Whether blocks after a row's first one may multiply the output, other than in careful tiles.
  static constexpr bool may_rescale = !anchored;

  RowStatistics rows;
  // If update_max() returns true, the output so far must be multiplied by this.
  float scores_scale[2];
  // Whether some row of the warp has no reference maximum yet. A vote in each step would delay its products.
  bool lacks_max;

  FLASHGEN_DEVICE void reset() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      rows.reference_max[h] = kNoMax;
      rows.sum[h] = 0.0f;
    }
    lacks_max = true;
  }

  // Whether the next block sets a reference maximum, or may raise it. The same for all lanes of a warp.
  FLASHGEN_DEVICE bool needs_max() const { return !anchored || lacks_max; }

  // Sets the reference maximum of rows without one. If `may_raise`, also raises those that logits exceed by
  // `growth` powers of two, which changes no bit of other rows. A running maximum lies kRunningHeadroom below
  // the reference, so that `growth` is minus that. Returns whether the output must be multiplied by
  // `scores_scale`.
  FLASHGEN_DEVICE bool update_max(const Strip<columns>& scores, const Logits& logits, bool may_raise,
                                  bool /*is_cut*/,
                                  float growth = anchored ? kMaxGrowth<T> : 0.0f - kRunningHeadroom<T>) {
    constexpr float headroom = anchored ? kHeadroom<T> : kRunningHeadroom<T>;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      float highest = -kInfinity;
#pragma unroll
      for (i32 i = 0; i < columns / 4; ++i) {
        if (i % 2 == h) highest = maximum(highest, maximum(scores[2 * i], scores[2 * i + 1]));
      }
      const float found = logits.logit(row_maximum(highest), h), before = rows.reference_max[h];
      const bool is_new = found > (before == kNoMax ? kNoMax
                                   : may_raise      ? before + logits.distance(growth)
                                                    : kInfinity);
      const float reference = is_new ? found + logits.distance(headroom) : before;
      scores_scale[h] = is_new ? exp2_approx(logits.powers(before - reference)) : 1.0f;
      rows.reference_max[h] = reference;
      rows.sum[h] *= scores_scale[h];
    }
    lacks_max = anchored && warp_any(rows.reference_max[0] == kNoMax || rows.reference_max[1] == kNoMax);
    return may_raise;
  }

  // Replaces scores by their exponentials, and adds these to the sums.
  FLASHGEN_DEVICE void exponentiate(Strip<columns>& scores, const Logits& logits) {
    float total[2][2] = {};
#pragma unroll
    for (i32 i = 0; i < columns / 4; ++i) {
      const i32 h = i % 2;
      // A row without allowed scores has a reference maximum of -inf, and -inf - -inf would be NaN.
      const float shift =
          kNoMax == -kInfinity && rows.reference_max[h] == kNoMax ? 0.0f : rows.reference_max[h];
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        scores[2 * i + c] = exp2_approx(logits.relative(scores[2 * i + c], shift, h));
        total[h][c] += scores[2 * i + c];
      }
    }
#pragma unroll
    for (i32 h = 0; h < 2; ++h) rows.sum[h] += total[h][0] + total[h][1];
  }
};

// Exponentials rounded to T, as the left operand of P V.
template <class T, i32 columns>
FLASHGEN_DEVICE void round_to(Rounded<columns>& probabilities, const Strip<columns>& exponentials) {
#pragma unroll
  for (i32 i = 0; i < columns / 4; ++i)
    probabilities[i / 4][i % 4] = pack(T{}, exponentials[2 * i], exponentials[2 * i + 1]);
}

// Multiplies a warpgroup's rows by a factor each.
template <i32 count>
FLASHGEN_DEVICE void scale_rows(float (&out)[count], const float (&factor)[2]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) out[i] *= factor[i / 2 % 2];
}

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

// ---- flashgen/sm90/forward_epilogue.cuh
// The results of a tile: O and the log-sum-exp. The Epilogue policy stores O: each warp its own 16 rows, from
// `warp_row` of the tile and `row` of the sequence on, multiplied by `scale`, and none from `end` on.

// Stores by TMA from shared memory, where O has its own tile at `offset`. TMA clips only at the end of the
// tensor, so the sequence must end there.
template <ForwardSm90Config cfg, class T, u32 offset>
struct TmaEpilogue {
  using OTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;

  FLASHGEN_DEVICE static void store(u32 shared, const auto& tile, const auto& p, i32 warp_row, i32 row,
                                    i32 end, const auto& out, const float (&scale)[2], Thread thread) {
    const OTile o{shared + offset};
    // The previous rows must have left shared memory. If this tile is computed again, its first results must
    // also have reached global memory, so that they do not overwrite the new ones.
    if (thread.lane == 0) {
      if (tile.kind == TileKind::careful) {
        bulk_wait<0>();
      } else {
        bulk_wait_read<0>();
      }
    }
    warp_sync();
    store_strip(o, warp_row, out, scale, thread);
    fence_proxy_async_shared();
    warp_sync();
    if (thread.lane == 0 && row < end) {
      tile.store_o(o.from_row(warp_row), p, row);
      bulk_commit();
    }
  }
  FLASHGEN_DEVICE static void wait(Thread thread) { if (thread.lane == 0) bulk_wait<0>(); }
};

// Lines 12 to 15: O = O / l, L = m + log l, and both to global memory.
template <class T, class Score, class DropoutPolicy, class Scales, class Epilogue, bool forbids_values>
FLASHGEN_DEVICE void store_results(auto& consumer, auto tile_at, RowStatistics rows) {
  const auto& p = consumer.p;
  const auto& shared = consumer.shared;
  auto& out = consumer.out;
  const auto tile = shared.tile(tile_at);
  // Addresses are computed here, so that they take no registers in the mainloop.
  const Thread thread = consumer.thread.recomputed();
  const i32 warp_row = consumer.number * kWarpgroupRows + thread.warp % 4 * kWarpRows,
            row = tile.first_q + warp_row;
  const auto logits = Score::logits(p);
  const i32 used = tile.len_q(p) - row;
  // Negated, so that NaN fails, too.
  bool has_failed = !(rows.sum[0] < kLargestSum<T>) || !(rows.sum[1] < kLargestSum<T>);
  if constexpr (forbids_values) has_failed = has_failed || first_row_times_zero(out) != 0.0f;
  const float factor = Scales::of_out(p, tile);
  float scale[2];
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    scale[h] = 1.0f;
    scale[h] *= rows.normalizer(h) * DropoutPolicy::factor(p) * factor;
  }
  shared.checks().set_failed(tile_at.count, thread.warp - 4,
                             warp_any(has_failed && tile.kind != TileKind::careful), thread);
  const i32 end = tile.result_rows(p);
  Epilogue::store(shared.start, tile, p, warp_row, row, end, out, scale, thread);
  if (thread.column() == 0) {
    float* const lse = tile.lse_rows(p) + row;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 own = 8 * h + thread.row();
      if (row + own < end) lse[own] = rows.log_sum_exp(h, logits);
    }
  }
  shared.tile_ring().release(tile_at, thread);
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
  FLASHGEN_DEVICE static ConsumerBlocks consumer_blocks(const auto& p, const auto& tile, i32 consumer) {
    const i32 first_q = tile.first_q + consumer * kWarpgroupRows,
              end_q = smaller(first_q + kWarpgroupRows, tile.len_q(p));
    if (end_q <= first_q) return {};
    const Mask mask = tile.template mask<Mask>(p);
    return {mask.key_tiles(first_q, end_q, cfg.tile_kv), mask.full_key_tiles(first_q, end_q, cfg.tile_kv)};
  }
  FLASHGEN_DEVICE bool forbids_all(const ConsumerBlocks& blocks) const { return !blocks.some.has(block); }
  FLASHGEN_DEVICE bool needs_mask(const ConsumerBlocks& blocks) const { return !blocks.all.has(block); }
  // The same for one block of any tile. It takes fewer registers than consumer_blocks().
  FLASHGEN_DEVICE bool needs_mask(const auto& p, const auto& tile, i32 consumer) const {
    const i32 first_q = tile.first_q + consumer * kWarpgroupRows, first_key = block * cfg.tile_kv;
    return !tile.template mask<Mask>(p).is_full(first_q, smaller(first_q + kWarpgroupRows, tile.len_q(p)),
                                                first_key, first_key + cfg.tile_kv);
  }
};

// ---- flashgen/sm90/tile_checks.cuh
// Which tiles of queries a thread block computes again, because their first results cannot be trusted.
//
// Two things can make a result wrong. A row's logits may outgrow the reference maximum of the anchored
// softmax. And V may hold NaN or infinity for a key that a row must not attend to: the row's probability is
// 0, but 0 * NaN is NaN. Both are rare, so the mainloop does not look for them. The epilogue checks each row.
//
// Once a tile has failed, the scheduler announces all later tiles of the thread block as `careful`. After the
// last one it announces the failed tiles again, also as careful. A careful tile has a running maximum. Where
// the mask cuts a block, its product leaves out NaN and infinity in V (careful_product.cuh).

template <i32 consumer_warps>
struct TileChecks {
  // A consumer checks and stores a tile before it releases the tile's slot, which the scheduler then refills.
  static constexpr u32 kTiles = kForwardTileStages;
  // Beyond the numbers of all tiles, so that the scheduler finds no such tile.
  static constexpr i32 kNoTile = 0x7fffffff;
  static_assert(consumer_warps <= kWarpSize, "each lane of the scheduler reads one warp's check");

  // An mbarrier. Its only phase ends when the consumers have checked all tiles announced before the drain.
  u64 drained;
  // Of the last tiles: their numbers, and for each warp whether a row failed.
  i32 numbers[kTiles];
  u8 failed[kTiles][consumer_warps];
  // The numbers of the tiles to compute again: `queued` of them, of which `taken` were announced. There are
  // at most kTiles, because later tiles are careful.
  i32 queue[kTiles];
  u32 queued, taken;

  // One thread calls this first.
  FLASHGEN_DEVICE void init() {
    mbarrier_init(shared_address(&drained), consumer_warps);
    queued = taken = 0;
  }

  // ---- Called by consumer warps: they report whether tile `index` of the thread block failed, and that all
  // tiles are stored.
  FLASHGEN_DEVICE void set_failed(u32 index, i32 warp, bool has_failed, Thread thread) {
    if (thread.lane == 0) failed[index % kTiles][warp] = has_failed;
  }
  FLASHGEN_DEVICE void arrive_drained(Thread thread) {
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(shared_address(&drained));
  }

  // ---- Called by all lanes of the scheduler's warp
  FLASHGEN_DEVICE void wait_drained(Thread thread) {
    if (thread.lane < consumer_warps) mbarrier_wait(shared_address(&drained), 0);
    warp_sync();
  }
  FLASHGEN_DEVICE void queue_if_failed(u32 index, Thread thread) {
    const bool is_warp = thread.lane < consumer_warps;
    if (!warp_any(is_warp && failed[index % kTiles][is_warp ? thread.lane : 0] != 0)) return;
    if (thread.lane == 0) queue[queued++] = numbers[index % kTiles];
  }

  // ---- Called by one lane of that warp
  FLASHGEN_DEVICE void set_number(u32 index, i32 number) { numbers[index % kTiles] = number; }
  FLASHGEN_DEVICE bool any_failed() const { return queued > 0; }
  // The number of a failed tile, once for each; kNoTile if none is left.
  FLASHGEN_DEVICE i32 take_failed() { return taken < queued ? queue[taken++] : kNoTile; }
};

// ---- flashgen/sm90/forward_producer.cuh
// The operands of the forward kernel in shared memory, and the producers that load them.

// What the warps of a thread block share. Smem holds the offsets in shared memory, which the plan computes.
template <ForwardSm90Config cfg, class T, class Smem, class Tile, class Blocks, class Values>
struct ForwardShared {
  static constexpr u32 kConsumerWarps = 4 * cfg.consumers;

  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using LoadedVTile = typename Values::Loaded;
  using VTile = typename Values::Operand;
  using Checks = TileChecks<kConsumerWarps>;
  using Message = typename Blocks::Message;
  static constexpr bool transposes = Values::transposes;

  u8* base;
  u32 start;

  FLASHGEN_DEVICE QTile q(auto at) const { return QTile{start + Smem::kQ}.slot(at.slot()); }
  FLASHGEN_DEVICE KTile k(auto at) const { return KTile{start + Smem::kK}.slot(at.slot()); }
  FLASHGEN_DEVICE LoadedVTile loaded_v(auto at) const {
    return LoadedVTile{start + Smem::kV}.slot(at.slot());
  }
  FLASHGEN_DEVICE VTile v(auto at) const { return loaded_v(at); }
  FLASHGEN_DEVICE Ring<cfg.q_stages> q_ring() const { return {start + Smem::kQBarriers}; }
  FLASHGEN_DEVICE Ring<cfg.stages> k_ring() const { return {start + Smem::kKBarriers}; }
  FLASHGEN_DEVICE Ring<cfg.stages> loaded_v_ring() const { return {start + Smem::kVBarriers}; }
  FLASHGEN_DEVICE Ring<cfg.stages> v_ring() const { return loaded_v_ring(); }
  FLASHGEN_DEVICE Ring<kForwardTileStages> tile_ring() const { return {start + Smem::kTileBarriers}; }
  // Each slot of tile_ring holds a tile. Each slot of k_ring holds a message, if the producer sends any.
  FLASHGEN_DEVICE Tile& tile(auto at) const {
    return reinterpret_cast<Tile*>(base + Smem::kTiles)[at.slot()];
  }
  FLASHGEN_DEVICE Checks& checks() const { return *reinterpret_cast<Checks*>(base + Smem::kChecks); }

  FLASHGEN_DEVICE void init() const {
    q_ring().init(1, kConsumerWarps);
    k_ring().init(1, kConsumerWarps);
    v_ring().init(1, kConsumerWarps);
    // Producers read announcements, too.
    tile_ring().init(1, kConsumerWarps + (Tile::in_pages && !transposes ? 2 : 1));
    checks().init();
    fence_mbarrier_init();
  }
};

// The producer: a warp that loads Q, K and V. Only the elected lane waits for empty slots: another lane could
// arrive so late that it misses a phase. The elected lane also starts all copies, except those of pages,
// which all lanes start.
template <ForwardSm90Config cfg, class Params, class Tile, class Blocks, class Shared>
struct ForwardProducer {
  // It requests the next tile when at most this many blocks of the current one follow.
  static constexpr i32 kBlocksAfterRequest = 4;
  using Message = typename Blocks::Message;
  using TileState = RingState<kForwardTileStages>;

  const Params& p;
  Shared shared;
  Thread thread;
  bool elected;
  RingState<cfg.q_stages> q_at;
  RingState<cfg.stages> k_at, v_at;
  // This tile, and the first one whose Q is not loaded yet.
  TileState tile_at, q_tile_at;
  // The block whose V is not loaded yet, or -1, and the slot of its tile.
  i32 pending_block = -1;
  TileState pending_tile_at;

  // Loads Q of the tile at q_tile_at, unless there is no such tile.
  FLASHGEN_DEVICE void load_q() {
    shared.tile_ring().wait_full(q_tile_at);
    const Tile tile = shared.tile(q_tile_at);
    if (tile.kind < TileKind::normal) return;
    if (elected) {
      shared.q_ring().wait_empty(q_at);
      mbarrier_arrive_expect_tx(shared.q_ring().full(q_at), Shared::QTile::bytes);
      tile.load_q(shared.q(q_at), p, shared.q_ring().full(q_at));
    }
    q_at.advance();
    q_tile_at.advance();
  }
  FLASHGEN_DEVICE void load_k(const Tile& tile, i32 block, const Message& message) {
    if (elected) {
      shared.k_ring().wait_empty(k_at);
      mbarrier_arrive_expect_tx(shared.k_ring().full(k_at), Shared::KTile::bytes);
      tile.load_k(shared.k(k_at), p, shared.k_ring().full(k_at), block * cfg.tile_kv);
    }
    k_at.advance();
  }
  FLASHGEN_DEVICE void load_v(const Tile& tile, i32 block) {
    if (elected) {
      shared.loaded_v_ring().wait_empty(v_at);
      mbarrier_arrive_expect_tx(shared.loaded_v_ring().full(v_at), Shared::LoadedVTile::bytes);
      tile.load_v(shared.loaded_v(v_at), p, shared.loaded_v_ring().full(v_at), block * cfg.tile_kv);
    }
    v_at.advance();
  }
  // V of a step is loaded after K of the next one, because consumers need it later.
  FLASHGEN_DEVICE void load_pending_v() {
    if (pending_block < 0) return;
    const Tile tile = shared.tile(pending_tile_at);
    load_v(tile, pending_block);
    // That was the last V of its tile, so the announcement of the tile is no longer needed.
    if (pending_tile_at.count != tile_at.count) shared.tile_ring().release(pending_tile_at, thread);
    pending_block = -1;
  }
  FLASHGEN_DEVICE void request_tile() {
    warp_sync();
    named_barrier_arrive(kRequestBarrier, 2 * kWarpSize);
  }

  FLASHGEN_DEVICE void run() {
    for (;; tile_at.advance()) {
      shared.tile_ring().wait_full(tile_at);
      const Tile tile = shared.tile(tile_at);
      if (tile.kind < TileKind::normal) {
        load_pending_v();
        shared.tile_ring().release(tile_at, thread);
        if (tile.kind == TileKind::end) break;
        request_tile();
        q_tile_at.advance();
        continue;
      }
      bool has_requested = false;
      Blocks::for_each(p, tile, thread, [&](i32 block, i32 left, const Message& message) {
        // Keeps the lanes together. Only the elected one waits for empty slots. Without this the others
        // could run through all blocks first, and the elected lane would stand still meanwhile.
        warp_sync();
        // Late, so that the next tile does not wait here while other thread blocks are idle. Early enough
        // that its Q arrives in time.
        if (!has_requested && left <= kBlocksAfterRequest) {
          request_tile();
          has_requested = true;
        }
        load_k(tile, block, message);
        load_pending_v();
        if (q_tile_at.count == tile_at.count) load_q();
        if (cfg.q_stages > 1 && left < kBlocksAfterRequest && q_tile_at.count == tile_at.count + 1) load_q();
        pending_block = block;
        pending_tile_at = tile_at;
      });
    }
  }
};

// ---- flashgen/sm90/input_scales.cuh
// What queries, keys and values are multiplied by: the Scales policy of the mainloop.

// 16-bit inputs have no scales.
struct NoScales {
  struct Factors {
    static constexpr float logits = 1.0f;
    static constexpr float values = 1.0f;
  };

  FLASHGEN_DEVICE static Factors of(const auto&, const auto&, i32, i32) { return {}; }
  FLASHGEN_DEVICE static float of_out(const auto&, const auto&) { return 1.0f; }
};

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

// ---- flashgen/sm90/scheduler_warp.cuh
// The scheduler: one warp that draws tiles and announces them to the producer and the consumers. It announces
// failed tiles again when all others are done (tile_checks.cuh).

template <class TileScheduler, class Params, class Tile, class Shared>
struct SchedulerWarp {
  const Params& p;
  Shared shared;
  Thread thread;
  RingState<kForwardTileStages> tile_at;

  // Writes the announcement into its slot, which is empty.
  FLASHGEN_DEVICE void announce(const Tile& tile) {
    if (thread.lane == 0) {
      shared.tile(tile_at) = tile;
      mbarrier_arrive(shared.tile_ring().full(tile_at));
    }
    warp_sync();
    tile_at.advance();
  }
  // run() reads the checks of a tile before it refills its slot. This reads those of slots not refilled.
  FLASHGEN_DEVICE void check_last(u32 tiles) {
    shared.checks().wait_drained(thread);
#pragma unroll 1
    for (u32 i = tiles < kForwardTileStages ? 0 : tiles - kForwardTileStages + 1; i < tiles; ++i)
      shared.checks().queue_if_failed(i, thread);
  }

  FLASHGEN_DEVICE void run() {
    TileScheduler tiles{p};
    auto& checks = shared.checks();
    bool is_drained = false;
    for (i32 number = tiles.first();;) {
      const u32 index = tile_at.count;
      if (thread.lane == 0) shared.tile_ring().wait_empty(tile_at);
      warp_sync();
      if (!is_drained && index >= kForwardTileStages)
        checks.queue_if_failed(index - kForwardTileStages, thread);
      Tile tile = tiles.tile(number, thread);
      if (tile.kind == TileKind::end) {
        if (is_drained) break;
        is_drained = true;
        tile.kind = TileKind::drain;
        announce(tile);
        check_last(index);
      } else {
        if (thread.lane == 0) {
          if (!is_drained) checks.set_number(index, number);
          if (checks.any_failed()) tile.kind = TileKind::careful;
        }
        announce(tile);
      }
      // The producer requests the next tile. Drawn earlier, it would wait while other thread blocks are idle.
      named_barrier_sync(kRequestBarrier, 2 * kWarpSize);
      i32 next = 0;
      if (thread.lane == 0) {
        next = is_drained ? checks.take_failed() : tiles.draw();
      }
      number = shuffle(next, 0);
    }
    Tile end = {};
    end.kind = TileKind::end;
    announce(end);
    if (thread.lane == 0) tiles.leave();
  }
};

// ---- flashgen/sm90/scores.cuh
// What happens to products Q K^T before the softmax: the Score policy of the mainloop.

// Logits are the products, scaled.
struct NoScore {
  using Logits = ScaledProducts;

  // `factor`: what products are multiplied by, besides the scale.
  FLASHGEN_DEVICE static Logits logits(const auto& p, float factor = 1.0f) { return {p.scale_log2 * factor}; }
  template <i32 columns>
  FLASHGEN_DEVICE static NoScore load(const auto&...) { return {}; }
  template <i32 columns>
  FLASHGEN_DEVICE static void apply(const auto&...) {}
};

// ---- flashgen/sm90/careful_product.cuh
// P V of a block that the mask cuts, where V may hold NaN or infinity.

template <class T>
constexpr u32 kOnes = 0x3f803f80u;

// out += P V for a warp's 16 rows, without the elements of V that are not finite. Results that an allowed
// pair brings such an element become NaN. `allowed` is as find_allowed() leaves it. Arrays are copied to
// local memory, because loops keep this rare code short.
template <class VTile>
FLASHGEN_DEVICE void multiply_careful(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                      VTile v, const u32 (&allowed)[2], Thread thread) {
  using T = typename VTile::Element;
  float sums[VTile::cols / 8][4];
  u32 left[VTile::rows / 16][4];
#pragma unroll
  for (i32 i = 0; i < VTile::cols / 2; ++i) sums[i / 4][i % 4] = out[i];
#pragma unroll
  for (i32 i = 0; i < VTile::rows / 4; ++i) left[i / 4][i % 4] = probabilities[i / 4][i % 4];
#pragma unroll 1
  for (i32 step = 0; step < VTile::rows / 16; ++step) {
    // The left operand of a product that counts allowed pairs.
    u32 pairs[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const u32 bits = allowed[i % 2] >> (4 * step + 2 * (i / 2));
      pairs[i] = ((bits & 1u) * 0xffffu | (bits >> 1 & 1u) * 0xffff0000u) & kOnes<T>;
    }
    const u32 first = v.first_chunk(16 * step, thread);
#pragma unroll 1
    for (i32 n = 0; n < VTile::cols / 16; ++n) {
      u32 words[4], bad[4];
      ldmatrix_x4_trans(words, VTile::chunk_after(first, n));
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        bad[i] = (non_finite_signs<T>(words[i]) >> 15) * 0xffffu;
        words[i] &= ~bad[i];
      }
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        float (&sum)[4] = sums[2 * n + half];
        const u32 right[2] = {words[2 * half], words[2 * half + 1]};
        mma_m16n8k16(T{}, sum, left[step], right);
        const u32 bad_right[2] = {bad[2 * half] & kOnes<T>, bad[2 * half + 1] & kOnes<T>};
        float reached[4] = {};
        mma_m16n8k16(T{}, reached, pairs, bad_right);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) sum[e] = reached[e] > 0.0f ? float_of(0x7fffffffu) : sum[e];
      }
    }
  }
#pragma unroll
  for (i32 i = 0; i < VTile::cols / 2; ++i) out[i] = sums[i / 4][i % 4];
}

// ---- flashgen/sm90/values.cuh
// O += P V: the Values policy of the mainloop, for 16-bit values. wgmma reads them as TMA wrote them.

template <ForwardSm90Config cfg, class T>
struct SixteenBitValues {
  // V as TMA writes it, and as products read it.
  using Loaded = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using Operand = Loaded;
  // Whether warps transpose V.
  static constexpr bool transposes = false;

  template <class Logits>
  using Softmax = RowSoftmax<T, cfg.tile_kv, cfg.anchored, Logits>;
  using Probabilities = Rounded<cfg.tile_kv>;
  using Out = Strip<cfg.head_dim_v>;
  // The accumulators of a product, if it does not add to O itself.
  struct Product {};

  FLASHGEN_DEVICE static void round(Probabilities& probabilities, const Strip<cfg.tile_kv>& exponentials) {
    round_to<T, cfg.tile_kv>(probabilities, exponentials);
  }
  FLASHGEN_DEVICE static void issue(Product&, Out& out, const Probabilities& probabilities, Operand v,
                                    bool accumulates) {
    issue_output_in_fours(out, probabilities, v, accumulates);
  }
  // Call it when the issued product is complete.
  FLASHGEN_DEVICE static void finish(Product&, Out& out, const Probabilities&, Operand, float /*factor*/) {
    wgmma_pin(out);
  }
  FLASHGEN_DEVICE static void multiply_careful(Out& out, const Probabilities& probabilities, Operand v,
                                               const u32 (&allowed)[2], float /*factor*/, Thread thread) {
    flashgen::multiply_careful(out, probabilities, v, allowed, thread);
  }
};

// ---- flashgen/sm90/forward_mainloop.cuh
// The forward pass on Hopper: O = softmax(Q K^T) V, warp-specialized as FlashAttention-3 is.
//
// One warp, the scheduler, draws tiles of queries and announces them. Another, the producer, copies their Q,
// K and V to shared memory by TMA. Each consumer, a warpgroup, owns 64 query rows of a tile. A step is one
// block of keys for one tile. All tiles of a thread block form one stream of steps. A consumer issues Q K^T
// of the next step together with P V of the current one, also across tiles, so that the tensor cores do not
// drain between tiles:
//
//     tensor cores   | Q K(1)         | P V(0), Q K(2)      | P V(1), Q K(3)      |
//     other units              | softmax(1)       | softmax(2)          |
//
// Line numbers in comments are those of Algorithm 1 of the FlashAttention-2 paper.

template <ForwardSm90Config cfg, class T, class Params, class Smem, class TileScheduler, class Tile,
          class Mask, class Blocks, class Score, class DropoutPolicy, class Values, class Scales,
          class Epilogue>
struct ForwardMainloop {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 rows of queries");
  // Whether V may hold keys that a row must not attend to, by a mask or beyond the end of the sequence.
  static constexpr bool kForbidsValues = Blocks::has_mask || !Tile::ends_with_tensor;

  using Shared = ForwardShared<cfg, T, Smem, Tile, Blocks, Values>;
  using Logits = typename Score::Logits;
  using Probabilities = typename Values::Probabilities;
  using Softmax = typename Values::template Softmax<Logits>;
  using Factors = typename Scales::Factors;
  using TileState = RingState<kForwardTileStages>;

  // A block of keys for a tile of queries. Members are words: ptxas keeps no bool in a uniform register.
  struct Step {
    TileKind kind;
    Blocks blocks;
    // Whether O holds products of an earlier step of the tile.
    i32 accumulates;

    FLASHGEN_DEVICE bool is_last() const { return blocks.is_last(); }
    FLASHGEN_DEVICE i32 first_key() const { return blocks.block * cfg.tile_kv; }
    FLASHGEN_DEVICE bool exists() const { return kind >= TileKind::normal; }
    FLASHGEN_DEVICE bool is_careful() const { return kind == TileKind::careful; }
  };

  // A consumer: a warpgroup that computes 64 rows of a tile.
  struct Consumer {
    const Params& p;
    Shared shared;
    Thread thread;
    i32 number;
    RingState<cfg.q_stages> q_at;
    RingState<cfg.stages> k_at, v_at;
    TileState tile_at;
    // The tile of the newest step, and which of its blocks the mask empties or cuts for this consumer's rows.
    Tile tile;
    typename Blocks::ConsumerBlocks consumer_blocks;
    Softmax softmax;
    Strip<cfg.tile_kv> scores;
    typename Values::Product product;
    typename Values::Out out;
    // Of the step whose S was issued last. If they do not differ by block: of the newest tile.
    Factors factors;

    FLASHGEN_DEVICE i32 warp_row() const { return number * kWarpgroupRows + thread.warp % 4 * kWarpRows; }

    // ---- The stream of steps

    FLASHGEN_DEVICE typename Blocks::Message read_message() { return {}; }
    FLASHGEN_DEVICE Step next_tile() {
      shared.tile_ring().wait_full(tile_at);
      tile = shared.tile(tile_at);
      tile_at.advance();
      Step step = {tile.kind, {}, 0};
      if (step.exists()) {
        step.blocks.begin(p, tile, [&]() { return read_message(); });
        consumer_blocks = Blocks::consumer_blocks(p, tile, number);
        factors = Scales::of(p, tile, 0, 0);
      }
      return step;
    }
    FLASHGEN_DEVICE Step after(const Step& step) {
      if (step.is_last()) return next_tile();
      Step next = step;
      next.accumulates = 1;
      next.blocks.advance([&]() { return read_message(); });
      return next;
    }
    // Whether this consumer computes the newest step. It skips those without allowed pairs of its rows,
    // except the last step of a tile, after which it stores results.
    FLASHGEN_DEVICE bool computes(const Step& step) const {
      return step.is_last() || !step.blocks.forbids_all(consumer_blocks);
    }
    // Whether the mask forbids some pair of the newest step and this consumer's rows.
    FLASHGEN_DEVICE bool is_cut(const Step& step) const { return step.blocks.needs_mask(consumer_blocks); }

    // ---- The warp scheduler barriers of FlashAttention-3: consumers issue products in turn, so that one
    // multiplies while another takes exponentials. Where these take most of the time, turns only delay.

    FLASHGEN_DEVICE void warp_scheduler_barrier_sync() { named_barrier_sync(1 + number, 2 * kWarpgroupSize); }
    FLASHGEN_DEVICE void warp_scheduler_barrier_arrive() {
      named_barrier_arrive(1 + (number + 1) % cfg.consumers, 2 * kWarpgroupSize);
    }

    // ---- The parts of a step

    // Line 8: S = Q K^T.
    FLASHGEN_DEVICE void issue_qk() {
      // With one stage the descriptors of Q are the same in every step, and ptxas would keep them all in
      // registers. An opaque row has it compute them anew.
      const i32 row = number * kWarpgroupRows, own_row = cfg.q_stages > 1 ? row : opaque(row);
      issue_scores(scores, shared.q(q_at).from_row(own_row), shared.k(k_at));
    }
    // Line 10: O += P V.
    FLASHGEN_DEVICE void issue_pv(const Step& step, const Probabilities& probabilities) {
      Values::issue(product, out, probabilities, shared.v(v_at), step.accumulates != 0);
      warp_scheduler_barrier_arrive();
    }
    // The product that issue_pv() issued is complete: it is added to O.
    FLASHGEN_DEVICE void finish_pv(const Probabilities& probabilities, const Factors& of_step) {
      Values::finish(product, out, probabilities, shared.v(v_at), of_step.values);
    }
    // S is complete: K may be overwritten, and after a tile's last step Q, too.
    FLASHGEN_DEVICE void release_qk(const Step& step) {
      shared.k_ring().release(k_at, thread);
      k_at.advance();
      if (step.is_last()) {
        shared.q_ring().release(q_at, thread);
        q_at.advance();
      }
    }
    FLASHGEN_DEVICE void release_v() {
      shared.v_ring().release(v_at, thread);
      v_at.advance();
    }
    FLASHGEN_DEVICE void finish_and_release_v(const Probabilities& probabilities, const Factors& of_step) {
      finish_pv(probabilities, of_step);
      release_v();
    }
    FLASHGEN_DEVICE i32 first_q() const { return tile.first_q + warp_row(); }
    FLASHGEN_DEVICE auto draw_kept(const Step& step) const {
      return DropoutPolicy::template draw<cfg.tile_kv>(p, tile, first_q(), step.first_key(), thread);
    }
    FLASHGEN_DEVICE auto load_pairs(const Step& step) const {
      return Score::template load<cfg.tile_kv>(p, tile, first_q(), step.first_key(), thread);
    }
    // Whether the step may need a mask or a new reference maximum. Most steps need neither, so one branch
    // tests both. Computed while products run, because work after them delays every step.
    FLASHGEN_DEVICE bool needs_check(const Step& step) const {
      return opaque(is_cut(step) || softmax.needs_max() || step.is_careful()) != 0;
    }
    // S is complete. Line 9: exponentials replace it. Returns whether O must be multiplied by
    // softmax.scores_scale.
    FLASHGEN_DEVICE bool take_exponentials(const Step& step, const auto& pairs, const auto& kept,
                                           bool checks) {
      wgmma_pin(scores);
      release_qk(step);
      const Logits logits = Score::logits(p, factors.logits);
      Score::template apply<cfg.tile_kv>(scores, factors.logits, pairs, p, tile, first_q(), step.first_key(),
                                         thread);
      bool rescales = false;
      if (checks) {
        if (is_cut(step))
          mask_keys(blocks_of(scores), -kInfinity, tile.template mask<Mask>(p), first_q(), step.first_key(),
                    thread);
        rescales = softmax.update_max(scores, logits, !cfg.anchored || step.is_careful(), is_cut(step));
      }
      softmax.exponentiate(scores, logits);
      DropoutPolicy::template apply<cfg.tile_kv>(scores, kept);
      return rescales;
    }

    // Rounds exponentials to P, and scales them down before if they are too large. Returns whether O must be
    // multiplied by softmax.scores_scale: `rescales`, or true if it scaled any.
    FLASHGEN_DEVICE bool round(Probabilities& probabilities, bool rescales) {
      Values::round(probabilities, scores);
      return rescales;
    }

    // ---- Results

    // The slot of the tile whose results come next. It is two back, because the tile after it has been read.
    FLASHGEN_DEVICE TileState finished_tile_at() const { return {tile_at.count - 2}; }

    FLASHGEN_DEVICE void store(RowStatistics rows) {
      store_results<T, Score, DropoutPolicy, Scales, Epilogue, kForbidsValues>(*this, finished_tile_at(),
                                                                               rows);
    }

    // ---- The mainloop

    FLASHGEN_DEVICE void run() {
      clear_strip(out);
      softmax.reset();
      // Consumer 0 issues products first.
      if (number == cfg.consumers - 1) warp_scheduler_barrier_arrive();
      Step next = next_tile();
      for (;;) {
        while (next.exists()) {
          next = skip_empty_steps(next);
          // Nothing overlaps the first scores.
          Step step = next;
          Probabilities probabilities;
          first_step(step, probabilities);
          next = after(step);
          if (!step.is_careful()) overlap_steps(step, next, probabilities);
          last_step(step, probabilities);
        }
        if (next.kind == TileKind::end) break;
        // The kind is `drain`: all announced tiles are computed. Failed ones may be announced again now.
        shared.tile_ring().release({tile_at.count - 1}, thread);
        shared.checks().arrive_drained(thread);
        next = next_tile();
      }
      // Every arrival at a named barrier needs a sync. Consumer 0 completes the last one.
      if (number == 0) warp_scheduler_barrier_sync();
      Epilogue::wait(thread);
    }

    // Skips steps that this consumer does not compute. It still passes on its turn to issue products.
    FLASHGEN_DEVICE Step skip_empty_steps(Step step) {
      while (!computes(step)) {
        shared.k_ring().wait_full(k_at);
        release_qk(step);
        shared.v_ring().wait_full(v_at);
        warp_scheduler_barrier_sync();
        warp_scheduler_barrier_arrive();
        release_v();
        const i32 accumulates = step.accumulates;
        step = after(step);
        step.accumulates = accumulates;
      }
      return step;
    }
    // Begins with `step`, whose probabilities are known. Ends when the next step is careful, does not exist
    // or is one that this consumer skips.
    FLASHGEN_DEVICE void overlap_steps(Step& step, Step& next, Probabilities& probabilities) {
      const auto overlap = [&](const Probabilities& from, Probabilities& to) {
        overlapped_step(step, next, from, to);
        step = next;
        next = after(step);
      };
      const auto continues = [&]() { return next.kind == TileKind::normal && computes(next); };
      while (continues()) overlap(probabilities, probabilities);
    }
    // `may_begin_tile`: Q may not have arrived yet.
    FLASHGEN_DEVICE void wait_qk(bool may_begin_tile) {
      if (may_begin_tile) shared.q_ring().wait_full(q_at);
      shared.k_ring().wait_full(k_at);
    }
    // S and P of a step, overlapping nothing.
    FLASHGEN_DEVICE void first_step(const Step& step, Probabilities& probabilities) {
      const auto pairs = load_pairs(step);
      wait_qk(true);
      issue_qk();
      const auto kept = draw_kept(step);
      const bool checks = needs_check(step);
      wgmma_wait<0>();
      bool rescales = take_exponentials(step, pairs, kept, checks);
      // Before scale_rows() where rounding may change scores_scale.
      if (rescales) scale_rows(out, softmax.scores_scale);
      round(probabilities, rescales);
    }
    // P V of a step together with S and P of the next one.
    FLASHGEN_DEVICE void overlapped_step(const Step& step, const Step& next,
                                         const Probabilities& probabilities,
                                         Probabilities& next_probabilities) {
      const auto pairs = load_pairs(next);
      const Factors of_step = factors;
      wait_qk(step.is_last());
      warp_scheduler_barrier_sync();
      issue_qk();
      shared.v_ring().wait_full(v_at);
      issue_pv(step, probabilities);
      RowStatistics finished = {};
      if (step.is_last()) {
        softmax.rows.finish();
        finished = softmax.rows;
        softmax.reset();
      }
      const auto kept = draw_kept(next);
      const bool checks = needs_check(next);
      bool rescales;
      wgmma_wait<0>();
      finish_and_release_v(probabilities, of_step);
      rescales = round(next_probabilities, take_exponentials(next, pairs, kept, checks));
      if (step.is_last()) {
        store(finished);
      } else if (Softmax::may_rescale && rescales) {
        scale_rows(out, softmax.scores_scale);
      }
    }
    // P V of a step, overlapping nothing.
    FLASHGEN_DEVICE void last_step(const Step& step, const Probabilities& probabilities) {
      shared.v_ring().wait_full(v_at);
      warp_scheduler_barrier_sync();
      if (leaves_out_values(step)) {
        if (step.accumulates == 0) clear_strip(out);
        u32 allowed[2];
        const Tile step_tile = tile_of(step);
        find_allowed<cfg.tile_kv / 8>(allowed, step_tile.template mask<Mask>(p),
                                      step_tile.first_q + warp_row(), step.first_key(), thread);
        Values::multiply_careful(out, probabilities, shared.v(v_at), allowed, factors.values, thread);
        warp_scheduler_barrier_arrive();
      } else {
        issue_pv(step, probabilities);
        wgmma_wait<0>();
        finish_pv(probabilities, factors);
      }
      release_v();
      if (step.is_last()) {
        softmax.rows.finish();
        store(softmax.rows);
        softmax.reset();
      }
    }
    // A step's tile. After a tile's last step, the tile that follows has been read, too.
    FLASHGEN_DEVICE const Tile& tile_of(const Step& step) const {
      return shared.tile(step.is_last() ? finished_tile_at() : TileState{tile_at.count - 1});
    }
    // Whether V of a careful step holds NaN or infinity that must not reach some row.
    FLASHGEN_DEVICE bool leaves_out_values(const Step& step) { return false; }
  };

  // ---- The kernel

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    const Thread thread = Thread::current();
    const Shared shared{base, shared_address(base)};
    if (thread.index() == 0) shared.init();
    if (thread.index() == kWarpSize) {
      prefetch_tensormap(&p.q_map);
      prefetch_tensormap(&p.k_map);
      prefetch_tensormap(&p.v_map);
    }
    block_sync();
    // Programmatic dependent launch: waits for the previous grids, and lets the next one start.
    griddep_wait();
    griddep_launch_dependents();
    // Registers that the first warpgroup does not need go to the consumers.
    if (thread.warp >= 4) {
      setmaxnreg_inc<cfg.consumer_registers>();
      Consumer{p, shared, thread, thread.warp / 4 - 1}.run();
    } else {
      setmaxnreg_dec<cfg.producer_registers>();
      ForwardProducer<cfg, Params, Tile, Blocks, Shared> producer{p, shared, thread, thread.lane == 0};
      if (thread.warp == 0) producer.run();
      if (thread.warp == 1) SchedulerWarp<TileScheduler, Params, Tile, Shared>{p, shared, thread}.run();
      // The warps after the scheduler.
    }
  }
};

}  // namespace flashgen

// ---- kernels/hopper/forward.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;
using out_t = bfloat16_t;

constexpr ForwardSm90Config kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
    .stored_columns = 64,
    .tile_q = 192,   // B_r: query rows per block
    .tile_kv = 128,  // B_c: keys per step
    .q_stages = 2,
    .stages = 4,     // of K and of V
    .consumers = 3,  // warpgroups that compute, 64 query rows each
    .producer_registers = 32,
    .consumer_registers = 160,
    .section_heads = 1,  // heads whose tiles are scheduled together
    .anchored = true,    // exponentials relative to a reference maximum that is set once
    .has_lower = false,  // the band has a lower bound on k - q
    .has_upper = false,  // the band has an upper bound on k - q
};

struct Params {
  TensorMap q_map, k_map, v_map, o_map;  // for TMA
  element_t* o;
  float* lse;                  // log-sum-exp, (batch, heads_q, len_q)
  u32* counter;                // tiles drawn, then blocks done; 0 between launches
  i64 o_batch, o_row, o_head;  // strides are in elements
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  i32 q_tiles;                 // tiles of queries of one head
  i32 tiles;                   // tiles of all heads of all sequences
  float scale_log2;            // scale * log2(e)
};
static_assert(sizeof(Params) == 640, "the launcher packs Params into 640 bytes");

struct Smem {
  static constexpr u32 kQ = 0;               // Q_i, 2 stages
  static constexpr u32 kK = 49152;           // K_j, 4 stages
  static constexpr u32 kV = 114688;          // V_j, 4 stages
  static constexpr u32 kO = 180224;          // O_i, to be stored
  static constexpr u32 kQBarriers = 204800;  // full and empty barriers of each stage
  static constexpr u32 kKBarriers = 204832;
  static constexpr u32 kVBarriers = 204896;
  static constexpr u32 kTileBarriers = 204960;
  static constexpr u32 kTiles = 205024;   // the next tiles of queries
  static constexpr u32 kChecks = 205152;  // which tiles are to be repeated (tile_checks.cuh)
};

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using Blocks = BandBlocks<kConfig, Mask>;
using Scoring = NoScore;
using Tile = DenseTile;
using Scheduler = DynamicScheduler<kConfig, Params>;
using DropoutPolicy = NoDropout;
using Values = SixteenBitValues<kConfig, element_t>;
using Scales = NoScales;
using Epilogue = TmaEpilogue<kConfig, out_t, Smem::kO>;

FLASHGEN_KERNEL(512, 1) forward_d64_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  ForwardMainloop<kConfig, element_t, Params, Smem, Scheduler, Tile, Mask, Blocks, Scoring, DropoutPolicy,
                  Values, Scales, Epilogue>::run(p, base);
}
