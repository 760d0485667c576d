// forward_d64_sm90a: FlashAttention-3, forward pass: O and the log-sum-exp of each row.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"full","direction":"forward","deterministic":false}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --forward-only --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 192, tile_kv 128, q_stages 2, k_stages 4, v_stages 4, 512 threads
// roles    of 1 warpgroup one warp brings tiles and one chooses which ones (32 registers a thread); 3
//          compute, 64 queries each (160)
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 192
//          query rows of a query head and batch entry; they start while the grid before them ends, and wait
//          for it
// smem     205200 bytes
//            q                   0 to  49152  Q_i, 2 stages
//            k               49152 to 114688  K_j, 4 stages
//            v              114688 to 180224  V_j, 4 stages
//            o              180224 to 204800  O_i, to be stored
//            q_barriers     204800 to 204832  full and empty barriers of each stage
//            k_barriers     204832 to 204896
//            v_barriers     204896 to 204960
//            tile_barriers  204960 to 205024
//            tiles          205024 to 205088  the next tiles of queries
//            requests       205088 to 205096  the producer asks for another tile
//            checks         205104 to 205200  which tiles are to be repeated (tile_checks.cuh)
// because  three warpgroups, as exponentials and not products set the pace at this width
//
// contents   71  Integer and 16-bit element types, without any CUDA header.
//            93  What the CUDA language itself provides, under names that the emulator implements on the host.
//           136  Scalar arithmetic, one instruction each.
//           179  Warp-wide matrix instructions.
//           207  Element types.
//           244  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//           249  Warp-level matrix products.
//           271  Barriers at which threads may arrive without waiting, or wait without arriving.
//           335  Tensor maps, which describe tensors to bulk copies of boxes.
//           344  Bulk copies.
//           398  Communication between blocks and between grids.
//           450  Reallocation of registers among warpgroups (sm_90a).
//           465  The 64-bit descriptor of an operand of wgmma in shared memory.
//           500  Matrix products of a warpgroup (sm_90a).
//           703  Four products of a warpgroup, which add to the same accumulators, as one asm statement.
//           787  Tiles as TMA writes them and wgmma reads them.
//           884  The products of the forward kernel for Hopper, issued four steps at a time (wgmma_fours.cuh).
//           950  Rings of slots in shared memory, filled by one side and emptied by the other.
//          1014  Banded masks.
//          1200  Streaming tiles between global and shared memory.
//          1213  Keeping NaN and infinity where they belong.
//          1247  P V of a block that the mask cuts, where V may hold NaN or infinity.
//          1316  Dropout of probabilities.
//          1336  The sizes of a forward kernel for Hopper.
//          1369  Which blocks of keys a tile of queries visits, and which of them the mask cuts.
//          1441  What a softmax takes exponentials of.
//          1471  The online softmax.
//          1484  What an online softmax keeps of each row from one tile of keys to the next.
//          1512  The online softmax of a warpgroup's rows, of which each lane has two in every warp's sixteen.
//          1622  What happens to products Q K^T before the softmax.
//          1650  Which tiles of queries a block repeats, because their first results cannot be trusted.
//          1709  A tile of queries, as the producer announces it to the consumers.
//          1781  Which sequence a tile belongs to, where sequences have their own lengths.
//          1833  Which tile of queries a persistent block computes next.
//          1910  Writing a warpgroup's results to shared and global memory.
//          1947  Storing a warp's rows from registers.
//          1976  The forward pass on Hopper.
//          2598  The kernel: its configuration, parameters and text.

// The shapes of its products, by their columns: S and O.
#define WGMMA_SHAPES(shape) shape(128) shape(64)

#if defined(FLASHGEN_EMULATOR)
#include "flashgen/emu/primitives.h"
#else
// ---- flashgen/ptx/types.cuh
// Integer and 16-bit element types, without any CUDA header.

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
constexpr i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
constexpr i32 larger(i32 a, i32 b) { return a > b ? a : b; }

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

// ---- flashgen/tile.cuh
// Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.

constexpr i32 kChunkBytes = 16;

// ---- flashgen/product.cuh
// Warp-level matrix products: tensor cores for 16-bit elements, fused multiply-adds for float.

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

}  // namespace flashgen

#if !defined(FLASHGEN_EMULATOR)
// ---- flashgen/ptx/barrier.cuh
// Barriers at which threads may arrive without waiting, or wait without arriving. Named barriers exist on
// every GPU, mbarriers are for sm_90 and later.

namespace flashgen {

// ---- Named barriers 1 to 15 of a block. Barrier 0 is block_sync's. `threads` threads take part, in whole
// warps.

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

// Makes this thread's mbarrier_init visible to asynchronous copies and, after a barrier of the cluster, to
// its other blocks.
FLASHGEN_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The same for shared memory alone.
FLASHGEN_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- flashgen/ptx/tensor_map.cuh
// Tensor maps, which describe tensors to bulk copies of boxes.

// Describes a tensor in global memory and the box that one copy moves. The host encodes it, and a kernel gets
// it in its __grid_constant__ parameters.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// ---- flashgen/ptx/bulk.cuh
// Bulk copies: TMA moves whole boxes and runs of bytes (sm_90 and later). An mbarrier counts the bytes of
// loads. The issuing thread waits for stores and reductions by groups. Whoever writes shared memory that a
// bulk copy reads must call fence_proxy_async afterwards.

// ---- Boxes of tensors. Coordinates count elements, the contiguous dimension first. There a box begins at a
// multiple of 16 bytes; anything else is an illegal instruction. Boxes may extend beyond the tensor on all
// sides. But a stored box must not begin before the tensor. The hardware clips it at a multiple of 16 bytes,
// so it writes beyond the end of rows of any other length.

FLASHGEN_DEVICE void tma_load_4d(u32 destination, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2,
                                 i32 c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Multicast: loads to the same offset in every block of the cluster whose bit is set. The barrier at the same
// offset of each block counts its bytes.

// Stores and reductions do not write outside of the tensor.

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

// ---- Runs of bytes. Sizes and addresses are multiples of 16.

// ---- Groups of stores and reductions

FLASHGEN_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most `pending` groups are in flight.
template <int pending>
FLASHGEN_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// Waits until all but `pending` groups have read shared memory. Their writes may still be in flight.
template <int pending>
FLASHGEN_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// ---- flashgen/ptx/grid.cuh
// Communication between blocks and between grids: atomics, ordered accesses of global memory, and
// programmatic dependent launch.

// ---- Atomic operations. Additions return the previous value. They are relaxed unless their names say
// otherwise.

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

// Waits until the grids before this one are complete and their writes are visible. Do not access their arrays
// earlier.
FLASHGEN_DEVICE void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next grid start. After its griddep_wait, that grid sees all writes of this one, including later
// ones.
FLASHGEN_DEVICE void griddep_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- flashgen/ptx/warpgroup.cuh
// Reallocation of registers among warpgroups (sm_90a).

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

// ---- flashgen/ptx/descriptor.cuh
// The 64-bit descriptor of an operand of wgmma in shared memory. The emulator uses the same one.
//
// An operand is made of core matrices: eight rows of 16 bytes. A row is a line along the major dimension: K
// (the summed one) or MN. Swizzled by 32, 64 or 128 bytes, eight rows of that width lie one after another,
// and the hardware permutes the 16-byte chunks of each line by its address. The two byte offsets then mean
//
//   swizzle    major   leading_bytes                       stride_bytes
//   none       k       next chunk of 16 bytes along K      next 8 rows along MN
//   none       mn      next 8 rows along K                 next chunk of 16 bytes along MN
//   32 to 128  k       not used (the chunks are adjacent)  next 8 rows along MN
//   32 to 128  mn      next line's width along MN          next 8 rows along K

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
// Matrix products of a warpgroup (sm_90a): four consecutive warps, of which the first has an index that is a
// multiple of 4.
//
// Products are asynchronous. Their operands and accumulators must not be touched until a wait completes the
// group in which they were committed. The left operand has 64 rows, the right one `n` columns, and one
// product sums over 32 bytes of K. Thread t of the warpgroup holds in d[4j + 2h + c] row 16 (t / 32) + t % 32
// / 4 + 8h, column 8j + 2 (t % 4) + c.

// Orders accesses of registers before later products that use them. It is needed before the first product,
// and again after accumulators or fragments of the left operand were modified.
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

// Makes the assembler compute `value`, which is never negative, before the next wait. It moves waits up
// across arithmetic, which then no longer overlaps the products, but not across stores. So this stores a
// negative value, which never happens, to `scratch` in shared memory.
FLASHGEN_DEVICE void wgmma_compute_before_wait(float value, u32 scratch) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(value),
               "r"(scratch)
               : "memory");
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
template <class T, Major... majors>
using WgmmaTailOf = WgmmaTail<sizeof(T) == 2, majors...>;

// An instruction names each of its n / 2 accumulators, so there is one function for each n. The operands
// after the accumulators have the numbers from n / 2 on.
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

// A kernel may define WGMMA_SHAPES to the shapes that it uses, because each takes some time to compile.
WGMMA_SHAPES(WGMMA_SHAPE)
// d = a * b, plus what d held if `accumulate`; both operands in shared memory.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b, bool accumulate) {
  Wgmma<n>::template add_ss<WgmmaType<T>, WgmmaTailOf<T, a_major, b_major>>(d, a.bits(), b.bits(),
                                                                            accumulate);
}

// d = a * b. The compiler knows that the previous value of d is dead.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_first(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b) {
  Wgmma<n>::template set_ss<WgmmaType<T>, WgmmaTailOf<T, a_major, b_major>>(d, a.bits(), b.bits(), 0);
}

// The same with the left operand in registers. Each warp holds its 16 rows in the layout of mma_m16n8k16, or
// of mma_m16n8k32 for 8-bit types.
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs(float (&d)[n / 2], const u32 (&a)[4], MatrixDescriptor b, bool accumulate) {
  Wgmma<n>::template add_rs<WgmmaType<T>, WgmmaTailOf<T, b_major>>(d, a, b.bits(), accumulate);
}

// ---- flashgen/ptx/wgmma_fours.cuh
// Four products of a warpgroup, which add to the same accumulators, as one asm statement. Compile time is
// dominated by the accumulators that go into and out of statements, so this makes it shorter. The kernel must
// define WGMMA_SHAPES.

template <i32 n>
struct WgmmaFours {
  static_assert(n == 0,
                "a kernel says which shapes it uses: #define WGMMA_SHAPES(shape) shape(64) shape(128)");
};

#define WGMMA_PRODUCT(n, a, b, type, tail) \
  "wgmma.mma_async.sync.aligned.m64n" #n "%" #type " {" WGMMA_NAMES_##n "}, " a ", %" #b ", p%" #tail ";\n"
#define WGMMA_BEGIN(accumulate) "{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate ", 0;\n"
// The products after the first one accumulate.
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

WGMMA_SHAPES(WGMMA_FOURS)
// d = the sum of four products a * b, plus what d held.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_four(float (&d)[n / 2], const MatrixDescriptor (&a)[4],
                                   const MatrixDescriptor (&b)[4]) {
  const u64 left[4] = {a[0].bits(), a[1].bits(), a[2].bits(), a[3].bits()};
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template add_ss<WgmmaType<T>, WgmmaTailOf<T, a_major, b_major>>(d, left, right, 1);
}

// d = the sum of four products a * b. The previous value of d is dead.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_first_four(float (&d)[n / 2], const MatrixDescriptor (&a)[4],
                                         const MatrixDescriptor (&b)[4]) {
  const u64 left[4] = {a[0].bits(), a[1].bits(), a[2].bits(), a[3].bits()};
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template set_ss<WgmmaType<T>, WgmmaTailOf<T, a_major, b_major>>(d, left, right, 0);
}

// With the left operands in registers, plus what d held if `accumulate`. The last product is issued first.
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs_four(float (&d)[n / 2], const u32 (&a)[4][4], const MatrixDescriptor (&b)[4],
                                   bool accumulate) {
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template add_rs<WgmmaType<T>, WgmmaTailOf<T, b_major>>(d, a, right, accumulate);
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

  // The tile's rows from `row` on of one head of one sequence; `barrier` counts `bytes`.
  FLASHGEN_DEVICE void load(const TensorMap& map, u32 barrier, i32 row, i32 head, i32 sequence) const {
#pragma unroll
    for (i32 p = 0; p < panels; ++p)
      tma_load_4d(address + p * panel_stride, &map, barrier, p * panel_cols, row, head, sequence);
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
FLASHGEN_DEVICE void clear(float (&strip)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] = 0.0f;
}

// An accumulator rounded to T, in pairs, as the left operand (A in registers) of the next product.
template <i32 n>
using Rounded = u32[n / 16][4];

// ---- flashgen/issue_in_fours.cuh
// The products of the forward kernel for Hopper, issued four steps at a time (wgmma_fours.cuh). Steps are
// distinguished by templates and not by a loop: arrays that a loop counts through are memory to compilers
// until it is unrolled, and all that they do before takes longer.

template <class QTile, class KTile, i32 step = 0>
FLASHGEN_DEVICE void issue_scores_from(Strip<KTile::rows>& scores, MatrixDescriptor left,
                                       MatrixDescriptor right) {
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
    issue_scores_from<QTile, KTile, step + 4>(scores, left, right);
  } else if constexpr (step < QTile::steps) {
    if constexpr (step == 0) {
      wgmma_ss_first<T, KTile::rows>(scores, a(0), b(0));
    } else {
      wgmma_ss<T, KTile::rows>(scores, a(0), b(0), true);
    }
    issue_scores_from<QTile, KTile, step + 1>(scores, left, right);
  }
}

// Issues S = Q K^T, of this warpgroup's 64 rows of Q.
template <class QTile, class KTile>
FLASHGEN_DEVICE void issue_scores(Strip<KTile::rows>& scores, QTile q, KTile k) {
  const MatrixDescriptor left = q.by_columns(), right = k.by_columns();
  wgmma_fence();
  issue_scores_from<QTile, KTile>(scores, left, right);
  wgmma_commit();
}

// Of the first `left` groups of 16 keys, the last one first.
template <class VTile, i32 left = VTile::rows / 16>
FLASHGEN_DEVICE void issue_output_from(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                       MatrixDescriptor right, bool kept) {
  using T = typename VTile::Element;
  constexpr i32 at_once = left >= 4 ? 4 : 1, first = left - at_once;
  const auto b = [&](i32 i) { return right.advanced(VTile::along_rows(first + i)); };
  if constexpr (at_once == 4) {
    const MatrixDescriptor four_b[4] = {b(0), b(1), b(2), b(3)};
    const auto& four_a = reinterpret_cast<const u32(&)[4][4]>(probabilities[first]);
    wgmma_rs_four<T, VTile::cols, Major::mn>(out, four_a, four_b, kept);
  } else {
    wgmma_rs<T, VTile::cols, Major::mn>(out, probabilities[first], b(0), kept);
  }
  if constexpr (first > 0) issue_output_from<VTile, first>(out, probabilities, right, true);
}

// Issues O += P V, or O = P V where O is not to be `kept`. The last keys come first, which is up to 1 %
// faster.
template <class VTile>
FLASHGEN_DEVICE void issue_output_in_fours(Strip<VTile::cols>& out, const Rounded<VTile::rows>& probabilities,
                                           VTile v, bool kept) {
  const MatrixDescriptor right = v.by_rows();
  wgmma_fence();
  issue_output_from<VTile>(out, probabilities, right, kept);
  wgmma_commit();
}

// ---- flashgen/ring.cuh
// Rings of slots in shared memory, filled by one side and emptied by the other. Each slot has two mbarriers:
// one that ends a phase when the slot is full, one when it is empty again.

// A position in a ring: the number of slots passed so far.
template <i32 slots>
struct RingPlace {
  u32 count = 0;

  FLASHGEN_DEVICE i32 slot() const { return static_cast<i32>(count % slots); }
  // The parity of the round.
  FLASHGEN_DEVICE u32 parity() const { return count / slots % 2; }
  FLASHGEN_DEVICE void advance(i32 by = 1) { count += static_cast<u32>(by); }
  FLASHGEN_DEVICE RingPlace before() const { return {count - 1}; }
};

// If the number of slots is no power of two, slot and parity are counted rather than computed by a division.
template <i32 slots>
  requires((slots & (slots - 1)) != 0)
struct RingPlace<slots> {
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

template <i32 slots>
struct Ring {
  using Where = RingPlace<slots>;

  // The address of its barriers: full ones, then empty ones.
  u32 barriers;

  FLASHGEN_DEVICE u32 full(Where at) const { return full_of(at.slot()); }
  FLASHGEN_DEVICE u32 full_of(i32 slot) const { return barriers + 8 * slot; }
  FLASHGEN_DEVICE u32 empty(Where at) const { return barriers + 8 * (slots + at.slot()); }

  // Sets how many arrivals fill a slot and how many empty it. One thread calls this before any other use.
  FLASHGEN_DEVICE void init(u32 fillers, u32 emptiers) const {
#pragma unroll
    for (i32 i = 0; i < slots; ++i) {
      mbarrier_init(barriers + 8 * i, fillers);
      mbarrier_init(barriers + 8 * (slots + i), emptiers);
    }
  }
  // A ring begins empty: waits of the first round are for a phase that counts as ended.
  FLASHGEN_DEVICE void wait_empty(Where at) const { mbarrier_wait(empty(at), at.parity() ^ 1); }
  FLASHGEN_DEVICE void wait_full(Where at) const { mbarrier_wait(full(at), at.parity()); }
  // One arrival per warp, once all its lanes are done with the slot.
  FLASHGEN_DEVICE void release(Where at, Thread thread) const {
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(empty(at));
  }
};

// ---- flashgen/band.cuh
// Banded masks: key k is allowed for query q when lower <= k - q <= upper and both exist.

struct Range {
  i32 begin, end;
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

  // Whether no pair of the rectangle is allowed; the rectangle has at least one row and column.
  FLASHGEN_DEVICE bool is_empty(i32 q_begin, i32 q_end, i32 k_begin, i32 k_end) const {
    bool empty = k_begin >= len_kv;
    return empty;
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

// As mask_pairs(), for a band. Rows beyond the last query may get any values. The assembler tests seven bits
// at once.
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

// Sets the bits of a lane's pairs that a mask forbids. Rows beyond the last query may get any bits. The
// mask's bounds on keys give a word of bits at once. The rest of the mask is evaluated pair by pair. Each
// lane first loads what the rest reads of one of 32 keys, and the lanes exchange these by shuffles. A costly
// mask is evaluated in a loop over single columns: unrolled, it takes too much code and too many registers.
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
  for (i32 h = 0; h < 2; ++h) forbidden[h] = ~(mask.ordered_bits(queries[h], from) & ~from(mask.len_kv));
  if constexpr (Mask::has_rest) {
#pragma unroll 1
    for (i32 first = 0; first < column_blocks; first += blocks_at_once) {
      const i32 key = first_key + 8 * first;
      const typename Mask::Key own = mask.key_at(key + thread.lane);
      // Four columns are a lane's share of 16 keys. The addresses for 32 keys need too many registers.
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
            if (!mask.allows_rest(queries[h], of_column)) forbidden[h] |= 1u << (2 * first + i);
          }
        }
      }
    }
  }
}

// Puts `value` where the bits of a lane's two rows are set. The assembler tests seven bits at once.
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

// Sets the bits of a lane's pairs that a mask allows.
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

// Whether a mask is so cheap that pairs are masked as they are evaluated. The bits of a costlier mask are
// computed first.
template <class Mask>
constexpr bool kIsDirect = Mask::is_light && Mask::is_quick && !Mask::in_groups;
// As mask_pairs(), for a mask that is not a band.
template <class Mask, i32 column_blocks>
FLASHGEN_DEVICE void mask_keys(Accumulator<1, column_blocks>& values, float value, const Mask& mask,
                               i32 first_q, i32 first_key, Thread thread) {
  static_assert(column_blocks <= 16, "a lane's share of a row has a bit for each column");
  constexpr i32 blocks_at_once = kWarpSize / 8;
  if constexpr (Mask::has_rest && kIsDirect<Mask>) {
    const typename Mask::Query queries[2] = {mask.query_at(first_q + thread.row()),
                                             mask.query_at(first_q + thread.row() + 8)};
    const i32 first_column = first_key + thread.column();
    const auto from = [&](i32 k) { return bits_from(larger(k, 0) - first_column); };
    const auto allowed_by_order = [&](i32 h) {
      return mask.ordered_bits(queries[h], from) & ~from(mask.len_kv);
    };
    const u32 allowed[2] = {allowed_by_order(0), allowed_by_order(1)};
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
          if (!(in_order & mask.allows_rest(queries[h], of_column)))
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

// ---- flashgen/contain.cuh
// Keeping NaN and infinity where they belong. A product with a probability of 0 is 0 * NaN = NaN, so a
// non-finite value in a key that a query may not attend to would reach the query through any tile that the
// mask cuts through. Such tiles are searched first. If one holds a non-finite value, which is rare, the
// non-finite values are cleared before the product, and the results they should have reached become NaN
// afterwards.

// Adding this to the bits of a magnitude carries into the sign exactly when the exponent is all ones.
template <class T>
constexpr u32 kToInfinity = 0;
template <>
constexpr u32 kToInfinity<bfloat16_t> = 0x00800080u;
template <class T>
constexpr u32 kSigns = kIsFloat<T> ? 0x80000000u : 0x80008000u;

// The sign bits of those elements of a word that are not finite.
template <class T>
FLASHGEN_DEVICE u32 non_finite_signs(u32 word) {
  return ((word & ~kSigns<T>)+kToInfinity<T>)&kSigns<T>;
}

// Whether some element of the tile is not finite; all threads of the block call it and get the same answer.
template <i32 threads, class Tile>
FLASHGEN_DEVICE bool holds_non_finite(Tile tile, Thread thread) {
  u32 signs = 0;
#pragma unroll 4
  for (i32 i = thread.index(); i < Tile::rows * Tile::chunks; i += threads) {
    const Vec16 chunk = *reinterpret_cast<const Vec16*>(tile.data + i * kChunkBytes);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Tile::Element>(chunk.words[w]);
  }
  return block_any(signs != 0);
}

// ---- flashgen/sm90/careful_product.cuh
// P V of a block that the mask cuts, where V may hold NaN or infinity.

template <class T>
constexpr u32 kOnes = 0x3f803f80u;

// Whether some element of a tile is not finite. Every warp that asks looks at the whole tile.
template <class Tile>
FLASHGEN_DEVICE bool holds_non_finite(Tile tile, u8* base, Thread thread) {
  u32 signs = 0;
#pragma unroll 1
  for (i32 i = thread.lane; i < Tile::bytes / kChunkBytes; i += kWarpSize) {
    const Vec16 chunk =
        *reinterpret_cast<const Vec16*>(base + (tile.address - shared_address(base)) + i * kChunkBytes);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Tile::Element>(chunk.words[w]);
  }
  return warp_any(signs != 0);
}

// out += P V for a warp's 16 rows, without the elements of V that are not finite. Results that an allowed
// pair brings such an element become NaN. Bit 2n + c of allowed[h] is for column 8n + c of the lane's row h.
// Arrays are copied to local memory, because loops keep this rare code short.
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

// ---- flashgen/sm90/dropping.cuh
// Dropout of probabilities: the Dropout policy of the mainloop.

struct NoDropout {
  // Which of a lane's pairs of a block are kept.
  template <i32 columns>
  struct Kept {};

  template <i32 columns, class Params, class Tile>
  FLASHGEN_DEVICE static Kept<columns> draw(const Params&, const Tile&, i32, i32, Thread) {
    return {};
  }
  template <i32 columns>
  FLASHGEN_DEVICE static void apply(Strip<columns>&, const Kept<columns>&) {}
  template <class Params>
  FLASHGEN_DEVICE static float factor(const Params&) {
    return 1.0f;
  }
};

// ---- flashgen/sm90/forward_config.cuh
// The sizes of a forward kernel for Hopper. The plan chooses them.

struct ForwardSm90Config {
  i32 head_dim;        // of Q and K, rounded up to 16: TMA fills the rest with zeros
  i32 head_dim_v;      // of V and O, likewise
  i32 stored_columns;  // of O
  i32 tile_q;
  i32 tile_kv;
  i32 q_stages;
  i32 k_stages;
  i32 v_stages;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  // Heads whose tiles are scheduled together, so that their K and V stay in the L2 cache.
  i32 section_heads;
  bool longest_first;
  // Exponentials relative to a reference maximum that is set once, not to the running maximum.
  bool anchored;
  // The exponentials of a step overlap the warpgroup's own P V. Otherwise they overlap other warpgroups'
  // products.
  bool overlaps_own_products;
  // O has its own tile in shared memory and is stored by TMA.
  bool stores_by_tma;
  bool has_lower;
  bool has_upper;
};

// The slots of the ring that announces tiles of queries. A consumer holds the tile whose results it still has
// to store, and the next one.
constexpr i32 kForwardTileStages = 4;

// ---- flashgen/sm90/key_blocks.cuh
// Which blocks of keys a tile of queries visits, and which of them the mask cuts.
//
//     for_each(p, tile, thread, visit)   the producer calls visit(block, is_last, message) for each block, in
//     order begin(...), advance(...)           a consumer follows, block by block block, is_last() its block,
//     and whether it is the tile's last one is_empty(...), needs_mask(...)     for the consumer's own rows:
//     no pair of the block is allowed; not all are

// The blocks between the first and the last that some query of the tile may attend to. At least one, because
// a tile without allowed pairs has results, too.
template <ForwardSm90Config cfg, class Mask, class Tile, class Params>
FLASHGEN_DEVICE Range visited_blocks(const Mask& mask, const Params& p, const Tile& tile) {
  const i32 end_q = smaller(tile.first_q + cfg.tile_q, tile.len_q(p));
  if (end_q <= tile.first_q) return {0, 1};
  const Range blocks = mask.key_tiles(tile.first_q, end_q, cfg.tile_kv);
  return {blocks.begin, larger(blocks.begin + 1, blocks.end)};
}

// Of a band: every block of a range, from the last to the first. Producer and consumers compute it for
// themselves.
template <ForwardSm90Config cfg, class Mask>
struct BandBlocks {
  static constexpr bool has_mask = Mask::is_bounded;
  static constexpr bool sends_messages = false;
  struct Message {};

  i32 block;
  i32 first_block;

  template <class Tile, class Params>
  FLASHGEN_DEVICE static Range visited(const Params& p, const Tile& tile) {
    return visited_blocks<cfg>(tile.template mask<Mask>(p), p, tile);
  }

  template <class Tile, class Params, class Visit>
  FLASHGEN_DEVICE static void for_each(const Params& p, const Tile& tile, Thread, const Visit& visit) {
    const Range blocks = visited(p, tile);
#pragma unroll 1
    for (i32 block = blocks.end - 1; block >= blocks.begin; --block)
      visit(block, block == blocks.begin, Message{});
  }

  template <class Tile, class Params, class Read>
  FLASHGEN_DEVICE void begin(const Params& p, const Tile& tile, const Read&) {
    const Range blocks = visited(p, tile);
    block = blocks.end - 1;
    first_block = blocks.begin;
  }
  template <class Read>
  FLASHGEN_DEVICE void advance(const Read&) {
    --block;
  }

  FLASHGEN_DEVICE bool is_last() const { return block == first_block; }
  // Computed anew for each block, which takes fewer registers than ranges of blocks.
  template <class Tile, class Params>
  FLASHGEN_DEVICE bool is_empty(const Params& p, const Tile& tile, i32 consumer) const {
    if constexpr (cfg.tile_q <= cfg.tile_kv) return false;
    const i32 first_q = tile.first_q + consumer * kWarpgroupRows, first_key = block * cfg.tile_kv;
    if (first_q >= tile.len_q(p)) return true;
    return tile.template mask<Mask>(p).is_empty(first_q, smaller(first_q + kWarpgroupRows, tile.len_q(p)),
                                                first_key, first_key + cfg.tile_kv);
  }
  // Rows beyond the last query are computed with the others, but never stored.
  template <class Tile, class Params>
  FLASHGEN_DEVICE bool needs_mask(const Params& p, const Tile& tile, i32 consumer) const {
    const i32 first_q = tile.first_q + consumer * kWarpgroupRows, first_key = block * cfg.tile_kv;
    return !tile.template mask<Mask>(p).is_full(first_q, smaller(first_q + kWarpgroupRows, tile.len_q(p)),
                                                first_key, first_key + cfg.tile_kv);
  }
};

// ---- flashgen/logits.cuh
// What a softmax takes exponentials of. The exponentials of a row are relative to its reference maximum: the
// row's maximum so far, or a number near it. Each kind of logits has its own unit for reference maxima.
//
//     logit(s, row)           accumulator s as a reference maximum
//     relative(s, shift, row) how far s is above reference maximum `shift`, in powers of two
//     powers(x), distance(x)  from a difference of reference maxima to powers of two, and back
//     as_reference_max(x)     logit x as a reference maximum
//     natural_log(m, x)       the natural logarithm of 2^x times the factor of reference maximum m
//     kNowhere                the reference maximum of a row without an allowed key so far

// Products that a scale turns into logits. Reference maxima are in powers of two, so that an exponent is one
// instruction. For logits beyond 2^30 its rounding error is many powers of two.
struct ScaledProducts {
  // No logit is below it but -inf, whose exponential is 0.
  static constexpr float kNowhere = -0x1.fffffep127f;
  float scale_log2;

  FLASHGEN_DEVICE float logit(float s, i32 /*row*/) const { return s * scale_log2; }
  FLASHGEN_DEVICE float relative(float s, float shift, i32 /*row*/) const {
    return fused_multiply_add(s, scale_log2, -shift);
  }
  FLASHGEN_DEVICE static float powers(float x) { return x; }
  FLASHGEN_DEVICE static float distance(float x) { return x; }
  FLASHGEN_DEVICE static float as_reference_max(float logit) { return logit * kLog2E; }
  FLASHGEN_DEVICE static float natural_log(float reference_max, float x) {
    return (reference_max + x) * kLn2;
  }
};

// ---- flashgen/softmax.cuh
// The online softmax: running row maxima and sums, and the rescaling that keeps them consistent.

// The four lanes that share a row of accumulators combine their values.
FLASHGEN_DEVICE float row_maximum(float x) {
  x = maximum(x, shuffle_xor(x, 1));
  return maximum(x, shuffle_xor(x, 2));
}
FLASHGEN_DEVICE float row_total(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// ---- flashgen/row_statistics.cuh
// What an online softmax keeps of each row from one tile of keys to the next.

// Statistics of a warp's 16 rows, of which each lane has two: l/4 and l/4 + 8.
struct RowStatistics {
  // The factor taken out of the row, in the unit of its logits' reference maxima.
  float reference_max[2];
  // This lane's share of the row's sum of exponentials.
  float sum[2];

  // Every lane of a row gets the row's sum.
  FLASHGEN_DEVICE void finish() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) sum[h] = row_total(sum[h]);
  }
  FLASHGEN_DEVICE float normalizer(i32 h) const { return sum[h] == 0.0f ? 0.0f : reciprocal_approx(sum[h]); }
  // The whole powers of two in a sum are added to the reference maximum by themselves: where this is far
  // ahead, a logarithm of all of the sum would be as far from zero, and rounded accordingly.
  template <class Logits>
  FLASHGEN_DEVICE float log_sum_exp(i32 h, const Logits& logits) const {
    const u32 bits = bits_of(sum[h]);
    const float power = static_cast<float>(static_cast<i32>(bits >> 23) - 127);
    const float rest = log2_approx(float_of((bits & 0x7fffffu) | 0x3f800000u));
    const float finite = logits.natural_log(reference_max[h] + logits.distance(power), rest);
    return sum[h] == 0.0f ? -kInfinity : sum[h] < kInfinity ? finite : sum[h];
  }
};

// ---- flashgen/sm90/row_softmax.cuh
// The online softmax of a warpgroup's rows, of which each lane has two in every warp's sixteen.
//
// `anchored`: exponentials are relative to a reference maximum that is set once, above the maximum of the
// row's first block. Numerator and denominator share the factor, so any reference near the row's maximum
// gives the same result. Later blocks then need no maximum, no shuffles and no rescale. A row that outgrows
// its reference is found in the end by its sum, and its tile is repeated with running maxima
// (tile_checks.cuh). Otherwise: exponentials relative to the running maximum, as in FlashAttention-2.

// How many powers of two a reference maximum lies above the first block's maximum: a whole number, so that it
// rounds nothing. In half_t the probabilities need the bits.
template <class T>
constexpr float kHeadroom = 40.0f;
// A row has outgrown its reference maximum if it exceeds it by so many powers of two. Its products with
// values up to 2^100 are finite.
template <class T>
constexpr float kMostGrowth = 24.0f;
// Rows that have outgrown it have larger sums.
template <class T>
constexpr float kLargestSum = 0x1p24f;

template <class T, i32 columns, bool anchored, class Logits>
struct RowSoftmax {
  static constexpr float kNone = Logits::kNowhere;

  RowStatistics rows;
  // What the output so far is to be multiplied by.
  float factor[2];

  FLASHGEN_DEVICE void reset() {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      rows.reference_max[h] = kNone;
      rows.sum[h] = 0.0f;
    }
  }

  // Whether the next block may move some row's reference maximum. The same for all lanes of a warp.
  FLASHGEN_DEVICE bool may_move() const {
    return !anchored || warp_any(rows.reference_max[0] == kNone || rows.reference_max[1] == kNone);
  }

  // Moves reference maxima: of rows without one, and if it `watches`, of rows that have outgrown theirs.
  // Returns whether the output so far must be multiplied by `factor`. To watch changes no bit of other rows.
  FLASHGEN_DEVICE bool move(const Strip<columns>& scores, const Logits& logits, bool watches) {
    constexpr float most = anchored ? kMostGrowth<T> : 0.0f, headroom = anchored ? kHeadroom<T> : 0.0f;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      float highest = -kInfinity;
#pragma unroll
      for (i32 i = 0; i < columns / 4; ++i) {
        if (i % 2 == h) highest = maximum(highest, maximum(scores[2 * i], scores[2 * i + 1]));
      }
      const float found = logits.logit(row_maximum(highest), h), before = rows.reference_max[h];
      const bool moves = found > (before == kNone ? kNone
                                  : watches       ? before + logits.distance(most)
                                                  : kInfinity);
      const float reference = moves ? found + logits.distance(headroom) : before;
      factor[h] = moves ? exp2_approx(logits.powers(before - reference)) : 1.0f;
      rows.reference_max[h] = reference;
      rows.sum[h] *= factor[h];
    }
    return watches;
  }

  // Replaces scores by their exponentials, and adds these to the sums.
  FLASHGEN_DEVICE void exponentiate(Strip<columns>& scores, const Logits& logits) {
    float total[2][2] = {};
#pragma unroll
    for (i32 i = 0; i < columns / 4; ++i) {
      const i32 h = i % 2;
      // A row without allowed scores has a reference maximum of -inf, and -inf - -inf would be NaN.
      const float shift =
          kNone == -kInfinity && rows.reference_max[h] == kNone ? 0.0f : rows.reference_max[h];
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

// Whether the first of a lane's two rows is finite.
template <i32 count>
FLASHGEN_DEVICE bool is_finite_row(const float (&strip)[count]) {
  float zero[2] = {};
#pragma unroll
  for (i32 i = 0; i < count / 2; ++i)
    zero[i % 2] = fused_multiply_add(strip[4 * (i / 2) + i % 2], 0.0f, zero[i % 2]);
  return zero[0] + zero[1] == 0.0f;
}

// ---- flashgen/sm90/scores.cuh
// What happens to products Q K^T before the softmax: the Score policy of the mainloop.

// Logits are the products, scaled.
struct NoScore {
  using Logits = ScaledProducts;
  static constexpr bool has_sink = false;
  // What is loaded for a block's pairs while its products are under way.
  template <i32 columns>
  struct Pairs {};

  template <class Params>
  FLASHGEN_DEVICE static Logits logits(const Params& p) {
    return {p.scale_log2};
  }
  template <i32 columns, class Params, class Tile>
  FLASHGEN_DEVICE static Pairs<columns> load(const Params&, const Tile&, i32, i32, Thread) {
    return {};
  }
  template <i32 columns, class Params, class Tile>
  FLASHGEN_DEVICE static void apply(Strip<columns>&, const Pairs<columns>&, const Params&, const Tile&, i32,
                                    i32, Thread) {}
  template <class Params, class Tile>
  FLASHGEN_DEVICE static float sink(const Params&, const Tile&) {
    return -kInfinity;
  }
};

// ---- flashgen/sm90/tile_checks.cuh
// Which tiles of queries a block repeats, because their first results cannot be trusted.
//
// Two things can spoil a result. A row's logits may outgrow the reference maximum of the anchored softmax.
// And V may hold NaN or infinity for a key that a row must not attend to: the row's probability is 0, but 0 *
// NaN is NaN. Both are rare, so the mainloop does not look for them. The epilogue checks each row. The
// scheduler announces a failed tile again as `careful`, and so are all tiles of the block from then on. In a
// careful tile maxima are running, and products of blocks that the mask cuts leave out what is not finite
// (careful_product.cuh).

template <i32 consumer_warps>
struct TileChecks {
  // Consumers give an announcement back when they have stored and checked the tile. So the scheduler knows
  // the checks of a tile when it fills the tile's slot again.
  static constexpr u32 kTiles = kForwardTileStages;
  static_assert(consumer_warps <= kWarpSize, "each lane of the scheduler reads one warp's checks");

  // Its only phase ends when the consumers have checked all tiles that were announced before the pause.
  u64 settled;
  // Of the last tiles: their numbers, and for each warp whether a row failed.
  i32 numbers[kTiles];
  u8 failed[kTiles][consumer_warps];
  // The numbers of the tiles to repeat, how many there are, and how many were announced again. There are no
  // more, because later tiles are careful.
  i32 list[kTiles];
  u32 listed, repeated;

  // By one thread, before all else.
  FLASHGEN_DEVICE void init() {
    mbarrier_init(shared_address(&settled), consumer_warps);
    listed = repeated = 0;
  }

  // ---- For consumer warps: tile `index` of the block is stored; and all tiles are.
  FLASHGEN_DEVICE void record(u32 index, i32 warp, bool has_failed, Thread thread) {
    if (thread.lane == 0) failed[index % kTiles][warp] = has_failed;
  }
  FLASHGEN_DEVICE void settle(Thread thread) {
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(shared_address(&settled));
  }

  // ---- For the scheduler's warp, ...
  FLASHGEN_DEVICE void wait_settled(Thread thread) {
    if (thread.lane < consumer_warps) mbarrier_wait(shared_address(&settled), 0);
    warp_sync();
  }
  // Lists tile `index` if it has failed.
  FLASHGEN_DEVICE void check(u32 index, Thread thread) {
    const bool is_warp = thread.lane < consumer_warps;
    if (!warp_any(is_warp && failed[index % kTiles][is_warp ? thread.lane : 0] != 0)) return;
    if (thread.lane == 0) list[listed++] = numbers[index % kTiles];
  }
  // ... and for one lane of it.
  FLASHGEN_DEVICE void note(u32 index, i32 number) { numbers[index % kTiles] = number; }
  FLASHGEN_DEVICE bool any_failed() const { return listed > 0; }
  FLASHGEN_DEVICE i32 next_failed() { return repeated < listed ? list[repeated++] : 0x7fffffff; }
};

// ---- flashgen/sm90/query_tile.cuh
// A tile of queries, as the producer announces it to the consumers: where its rows, keys and values lie. This
// is the Tile policy of the mainloop.

// What consumers do with an announced tile.
enum class TileKind : i32 {
  // There is no further tile.
  end,
  // No further tile is known. One to repeat may follow once all results are checked.
  pause,
  normal,
  // A tile to repeat, because its first results cannot be trusted (tile_checks.cuh).
  careful,
};

// All sequences have the same lengths: tensors of (batch, length, heads, head_dim).
struct alignas(16) DenseTile {
  i32 first_q;
  i32 head;
  i32 sequence;
  TileKind kind;

  // Whether the rows of a sequence end where the tensor ends, so that TMA does not load or store others.
  static constexpr bool ends_with_tensor = true;
  // Whether all lanes of the producer load keys and values, not only one.
  static constexpr bool warp_loads = false;

  // How many queries and keys the sequence has, and how many rows of results.
  template <class Params>
  FLASHGEN_DEVICE static i32 len_q(const Params& p) {
    return p.len_q;
  }
  template <class Params>
  FLASHGEN_DEVICE static i32 len_kv(const Params& p) {
    return p.len_kv;
  }
  template <class Params>
  FLASHGEN_DEVICE static i32 result_rows(const Params& p) {
    return p.len_q;
  }
  template <class Mask, class Params>
  FLASHGEN_DEVICE Mask mask(const Params& p) const {
    return Mask::of(p, sequence, head);
  }

  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_q(Panels q, const Params& p, u32 barrier) const {
    q.load(p.q_map, barrier, first_q, head, sequence);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_k(Panels k, const Params& p, u32 barrier, i32 first_key, Thread) const {
    k.load(p.k_map, barrier, first_key, head / p.group, sequence);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void load_v(Panels v, const Params& p, u32 barrier, i32 first_key, Thread) const {
    v.load(p.v_map, barrier, first_key, head / p.group, sequence);
  }
  template <class Panels, class Params>
  FLASHGEN_DEVICE void store_o(Panels o, const Params& p, i32 q) const {
    o.store(p.o_map, q, head, sequence);
  }
  // The sequence's rows of the head in O, and in the log-sum-exp.
  template <class Params>
  FLASHGEN_DEVICE auto o_rows(const Params& p) const {
    return GlobalRows{p.o + sequence * p.o_batch + head * p.o_head, p.o_row, p.len_q};
  }
  template <class Params>
  FLASHGEN_DEVICE float* lse_rows(const Params& p) const {
    return p.lse + (static_cast<i64>(sequence) * p.heads_q + head) * p.len_q;
  }
};

// ---- flashgen/sm90/sequence_search.cuh
// Which sequence a tile belongs to, where sequences have their own lengths.
//
// Tiles of one sequence follow those of another, sequences with many tiles before those with half as many.
// Only the device knows the lengths, so blocks count tiles as they go: each lane of a warp those of one
// sequence, 32 sequences at a time.

struct SequenceSearch {
  // Which 32 sequences, counted from 0 again for each class of lengths; and how many tiles there are before
  // them.
  i32 group = 0;
  i32 tiles_before = 0;

  // A sequence, its tiles of each head, and the tile's number among all of them.
  struct Found {
    bool exists;
    i32 sequence;
    i32 tiles_of_head;
    i32 number;
  };

  // `tiles_of(sequence)` are its tiles of each head, at most `longest`. All lanes of a warp call.
  template <class TilesOf>
  FLASHGEN_DEVICE Found find(i32 number, i32 sequences, i32 heads, i32 longest, Thread thread,
                             const TilesOf& tiles_of) {
    const i32 groups = ceil_div(sequences, kWarpSize);
    // The tile may lie before the current sequences.
    if (number < tiles_before) group = tiles_before = 0;
    for (; longest >> (group / groups) != 0; ++group) {
      // Sequences of this class have at most so many tiles for each head, and more than half of it.
      const i32 most = longest >> (group / groups), first = group % groups * kWarpSize,
                own = first + thread.lane;
      i32 tiles = own < sequences ? tiles_of(own) : 0;
      if (tiles > most || tiles <= most / 2) tiles = 0;
      i32 end = tiles * heads;
#pragma unroll
      for (i32 distance = 1; distance < kWarpSize; distance *= 2) {
        const i32 other = shuffle(end, (thread.lane - distance) & 31);
        if (thread.lane >= distance) end += other;
      }
      const u32 later = warp_ballot(number < tiles_before + end);
      if (later != 0) {
        const i32 lane = lowest_bit(later), tiles_of_head = shuffle(tiles, lane);
        return {true, first + lane, tiles_of_head,
                number - tiles_before - shuffle(end, lane) + tiles_of_head * heads};
      }
      tiles_before += shuffle(end, kWarpSize - 1);
    }
    return {};
  }
};

// ---- flashgen/sm90/tile_scheduler.cuh
// Which tile of queries a persistent block computes next.
//
// Blocks draw numbers from a counter in global memory, so that none waits while another has tiles left.
// Consecutive numbers are tiles of a few heads, a section, whose keys and values then stay in the L2 cache.
// Within a section the tile varies slowest, and the longest tiles come first where tiles differ in length.

// Where a tile of some heads of one sequence lies: the number of its head, and its place among the head's
// tiles.
struct HeadPlace {
  i32 head;
  i32 tile;
};

// Tile `number` of `heads` heads with `tiles` tiles each.
template <ForwardSm90Config cfg>
FLASHGEN_DEVICE HeadPlace place_in_sections(i32 number, i32 heads, i32 tiles) {
  // A partial section comes first: at the end its few long tiles would leave most blocks without work.
  const i32 partial = heads % cfg.section_heads, rest = number - partial * tiles;
  i32 first_head = 0, section = partial;
  if (rest >= 0) {
    section = cfg.section_heads;
    first_head = partial + rest / (section * tiles) * section;
    number = rest % (section * tiles);
  }
  const i32 turn = number / section;
  return {first_head + number % section, cfg.longest_first ? tiles - 1 - turn : turn};
}

// Drawing numbers is the same for all kinds of tiles.
template <class Params>
struct TileCounter {
  const Params& p;

  FLASHGEN_DEVICE static i32 first() { return block_idx_x(); }
  FLASHGEN_DEVICE i32 draw() const { return grid_dim_x() + static_cast<i32>(atomic_add(p.counter, 1u)); }
  // Each block calls this once, after its last draw. The last block resets the counters for the next launch.
  FLASHGEN_DEVICE void leave() const {
    if (atomic_add_release(p.counter + 1, 1u) + 1 == static_cast<u32>(grid_dim_x())) {
      store_release(p.counter, 0u);
      store_release(p.counter + 1, 0u);
    }
  }
};

// Where sequences have their own lengths.
template <ForwardSm90Config cfg, class Params, class Tile>
struct TileScheduler : TileCounter<Params> {
  using Rows = typename Tile::Rows;

  SequenceSearch search = {};

  // Tile `number`; its kind is `end` if there are not so many. All lanes of a warp call.
  FLASHGEN_DEVICE Tile tile(i32 number, Thread thread) {
    const Params& p = this->p;
    const auto found = search.find(number, p.batch, p.heads_q, p.q_tiles, thread, [&](i32 sequence) {
      return ceil_div(Rows::of(p, sequence).result_rows(), cfg.tile_q);
    });
    if (!found.exists) return {{0, 0, 0, TileKind::end, {}}};
    const HeadPlace place = place_in_sections<cfg>(found.number, p.heads_q, found.tiles_of_head);
    return {
        {place.tile * cfg.tile_q, place.head, found.sequence, TileKind::normal, Rows::of(p, found.sequence)}};
  }
};

// All sequences have the same length.
template <ForwardSm90Config cfg, class Params>
struct TileScheduler<cfg, Params, DenseTile> : TileCounter<Params> {
  // Tile `number`; its kind is `end` if there are not so many. All lanes of a warp call.
  FLASHGEN_DEVICE DenseTile tile(i32 number, Thread) const {
    const Params& p = this->p;
    if (number >= p.tiles) return {0, 0, 0, TileKind::end};
    const HeadPlace place = place_in_sections<cfg>(number, p.tiles / p.q_tiles, p.q_tiles);
    return {place.tile * cfg.tile_q, place.head % p.heads_q, place.head / p.heads_q, TileKind::normal};
  }
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

// ---- flashgen/sm90/write_rows.cuh
// Storing a warp's rows from registers.

// Writes 16 rows of a strip from `row` on, as far as the tensor has them, and `valid` columns of each, a
// multiple of eight. The lanes of a quad exchange their columns, so that each writes 16 bytes at once.
template <i32 valid, class T, i32 columns>
FLASHGEN_DEVICE void write_rows(GlobalRows<T> rows, i32 row, const float (&strip)[columns],
                                const float (&scale)[2], Thread thread) {
  constexpr i32 blocks = columns / 4;  // of eight columns
  static_assert(valid <= 8 * blocks && valid % 8 == 0, "a lane writes eight columns at once");
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    const i32 own = row + 8 * h + thread.row();
#pragma unroll
    for (i32 first = 0; first < blocks; first += 4) {
      Vec16 eight;
#pragma unroll
      for (i32 k = 0; k < 4; ++k) {
        const i32 block = smaller(first + k, blocks - 1);
        const float* const o = strip + 4 * block + 2 * h;
        eight.words[k] = pack(T{}, o[0] * scale[h], o[1] * scale[h]);
      }
      transpose_quad(eight.words, thread);
      const i32 column = 8 * (first + thread.lane % 4);
      if (own < rows.row_count && column < valid) *reinterpret_cast<Vec16*>(rows.at(own, column)) = eight;
    }
  }
}

// ---- flashgen/sm90/forward_mainloop.cuh
// The forward pass on Hopper: O = softmax(Q K^T) V.
//
// The kernel is warp-specialized, as FlashAttention-3 is. One warp, the scheduler, draws tiles of queries and
// announces them. Another, the producer, copies their Q, K and V to shared memory by TMA. Warpgroups of
// consumers own 64 query rows each: they multiply by wgmma and take exponentials in between. Line numbers in
// comments are those of Algorithm 1 of the FlashAttention-2 paper.
//
// All tiles of a block are one stream of steps, a step being one block of keys for one tile of queries. A
// consumer issues the products Q K^T of the next step together with P V of the current one, also where the
// next step begins another tile. So tensor cores do not drain between tiles:
//
//     tensor cores   | Q K(1)         | P V(0), Q K(2)      | P V(1), Q K(3)      |
//     other units              | softmax(1)       | softmax(2)          |
//
// Policies: Tile says where rows lie (query_tile.cuh), Mask and Blocks which keys a row may attend to
// (key_blocks.cuh), Score what becomes of the products (scores.cuh), Dropout which probabilities are dropped
// (dropping.cuh). Smem holds the offsets of the shared-memory map.

template <ForwardSm90Config cfg, class T, class Params, class Smem, class Tile, class Mask, class Blocks,
          class Score, class Dropping>
struct ForwardMainloop {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 rows of queries");
  static constexpr u32 kConsumerWarps = 4 * cfg.consumers;

  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using OTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using QRing = Ring<cfg.q_stages>;
  using KRing = Ring<cfg.k_stages>;
  using VRing = Ring<cfg.v_stages>;
  using TileRing = Ring<kForwardTileStages>;
  using Checks = TileChecks<kConsumerWarps>;
  using Logits = typename Score::Logits;
  using Softmax = RowSoftmax<T, cfg.tile_kv, cfg.anchored, Logits>;
  using Pairs = typename Score::template Pairs<cfg.tile_kv>;
  using Kept = typename Dropping::template Kept<cfg.tile_kv>;
  using Message = typename Blocks::Message;
  // Whether V may hold values for keys that a row must not attend to.
  static constexpr bool kForbidsValues = Blocks::has_mask || !Tile::ends_with_tensor;

  // ---- What the warps of a block share

  struct Shared {
    u8* base;
    u32 start;

    FLASHGEN_DEVICE QTile q(typename QRing::Where at) const {
      return QTile{start + Smem::kQ}.slot(at.slot());
    }
    FLASHGEN_DEVICE KTile k(typename KRing::Where at) const {
      return KTile{start + Smem::kK}.slot(at.slot());
    }
    FLASHGEN_DEVICE VTile v(typename VRing::Where at) const {
      return VTile{start + Smem::kV}.slot(at.slot());
    }
    FLASHGEN_DEVICE QRing q_ring() const { return {start + Smem::kQBarriers}; }
    FLASHGEN_DEVICE KRing k_ring() const { return {start + Smem::kKBarriers}; }
    FLASHGEN_DEVICE VRing v_ring() const { return {start + Smem::kVBarriers}; }
    FLASHGEN_DEVICE TileRing tile_ring() const { return {start + Smem::kTileBarriers}; }
    // What the slots of tile_ring and, if the producer sends messages, of k_ring hold.
    FLASHGEN_DEVICE Tile& tile(typename TileRing::Where at) const {
      return reinterpret_cast<Tile*>(base + Smem::kTiles)[at.slot()];
    }
    FLASHGEN_DEVICE Message& message(typename KRing::Where at) const
      requires Blocks::sends_messages
    {
      return reinterpret_cast<Message*>(base + Smem::kMessages)[at.slot()];
    }
    // A phase ends when the producer asks for another tile.
    FLASHGEN_DEVICE u32 requests() const { return start + Smem::kRequests; }
    FLASHGEN_DEVICE Checks& checks() const { return *reinterpret_cast<Checks*>(base + Smem::kChecks); }

    FLASHGEN_DEVICE void init() const {
      q_ring().init(1, kConsumerWarps);
      k_ring().init(1, kConsumerWarps);
      v_ring().init(1, kConsumerWarps);
      // The producer reads announcements, too.
      tile_ring().init(1, kConsumerWarps + 1);
      mbarrier_init(requests(), 1);
      checks().init();
      fence_mbarrier_init();
    }
  };

  // ---- The scheduler: one warp that announces tiles to the producer and the consumers

  struct Scheduler {
    const Params& p;
    Shared shared;
    Thread thread;
    typename TileRing::Where tile_at;

    // Writes the announcement into its slot, which is empty.
    FLASHGEN_DEVICE void announce(const Tile& tile) {
      if (thread.lane == 0) {
        shared.tile(tile_at) = tile;
        mbarrier_arrive(shared.tile_ring().full(tile_at));
      }
      warp_sync();
      tile_at.advance();
    }
    // Checks the tiles whose slots were not filled again.
    FLASHGEN_DEVICE void check_last(u32 tiles) {
      shared.checks().wait_settled(thread);
#pragma unroll 1
      for (u32 i = tiles < kForwardTileStages ? 0 : tiles - kForwardTileStages + 1; i < tiles; ++i)
        shared.checks().check(i, thread);
    }

    FLASHGEN_DEVICE void run() {
      TileScheduler<cfg, Params, Tile> tiles{p};
      Checks& checks = shared.checks();
      bool is_paused = false;
      for (i32 number = tiles.first();;) {
        const u32 index = tile_at.count;
        if (thread.lane == 0) shared.tile_ring().wait_empty(tile_at);
        warp_sync();
        if (!is_paused && index >= kForwardTileStages) checks.check(index - kForwardTileStages, thread);
        Tile tile = tiles.tile(number, thread);
        if (tile.kind == TileKind::end) {
          if (is_paused) break;
          is_paused = true;
          tile.kind = TileKind::pause;
          announce(tile);
          check_last(index);
        } else {
          if (thread.lane == 0) {
            if (!is_paused) checks.note(index, number);
            if (checks.any_failed()) tile.kind = TileKind::careful;
          }
          announce(tile);
        }
        // The next tile is drawn when the producer asks for it. Drawn earlier, it would wait here while other
        // blocks have nothing left.
        i32 next = 0;
        if (thread.lane == 0) {
          mbarrier_wait(shared.requests(), index % 2);
          next = is_paused ? checks.next_failed() : tiles.draw();
        }
        number = shuffle(next, 0);
      }
      Tile end = {};
      end.kind = TileKind::end;
      announce(end);
      if (thread.lane == 0) tiles.leave();
    }
  };

  // ---- The producer: one warp that loads Q, K and V

  // Only one lane waits for empty slots and copies: another lane that came late to a barrier could miss a
  // phase.
  struct Producer {
    const Params& p;
    Shared shared;
    Thread thread;
    bool elected;
    typename QRing::Where q_at;
    typename KRing::Where k_at;
    typename VRing::Where v_at;
    typename TileRing::Where tile_at;
    // The last block whose values are not loaded yet, if any, and the announcement of its tile.
    i32 values_block = -1;
    typename TileRing::Where values_at;

    // Whether this lane loads keys and values. If all do, they follow the one that has waited.
    FLASHGEN_DEVICE bool may_load() const {
      if constexpr (Tile::warp_loads) warp_sync();
      return Tile::warp_loads || elected;
    }
    FLASHGEN_DEVICE void load_queries(const Tile& tile) {
      if (elected) {
        shared.q_ring().wait_empty(q_at);
        mbarrier_arrive_expect_tx(shared.q_ring().full(q_at), QTile::bytes);
        tile.load_q(shared.q(q_at), p, shared.q_ring().full(q_at));
      }
      q_at.advance();
    }
    FLASHGEN_DEVICE void load_keys(const Tile& tile, i32 block, const Message& message) {
      if (elected) {
        shared.k_ring().wait_empty(k_at);
        if constexpr (Blocks::sends_messages) shared.message(k_at) = message;
        mbarrier_arrive_expect_tx(shared.k_ring().full(k_at), KTile::bytes);
      }
      if (may_load()) tile.load_k(shared.k(k_at), p, shared.k_ring().full(k_at), block * cfg.tile_kv, thread);
      k_at.advance();
    }
    // Values are loaded after the keys of the next step, because consumers need them later.
    FLASHGEN_DEVICE void load_last_values() {
      if (values_block < 0) return;
      if (elected) {
        shared.v_ring().wait_empty(v_at);
        mbarrier_arrive_expect_tx(shared.v_ring().full(v_at), VTile::bytes);
      }
      const i32 first_key = values_block * cfg.tile_kv;
      if (may_load())
        shared.tile(values_at).load_v(shared.v(v_at), p, shared.v_ring().full(v_at), first_key, thread);
      v_at.advance();
      if (values_at.count != tile_at.count) shared.tile_ring().release(values_at, thread);
      values_block = -1;
    }
    FLASHGEN_DEVICE void request_tile() {
      if (elected) mbarrier_arrive(shared.requests());
    }

    FLASHGEN_DEVICE void run() {
      for (;; tile_at.advance()) {
        shared.tile_ring().wait_full(tile_at);
        const Tile tile = shared.tile(tile_at);
        if (tile.kind < TileKind::normal) {
          load_last_values();
          shared.tile_ring().release(tile_at, thread);
          if (tile.kind == TileKind::end) return;
          request_tile();
          continue;
        }
        bool is_first = true;
        Blocks::for_each(p, tile, thread, [&](i32 block, bool is_last, const Message& message) {
          if (is_last) request_tile();
          load_keys(tile, block, message);
          load_last_values();
          if (is_first) load_queries(tile);
          is_first = false;
          values_block = block;
          values_at = tile_at;
        });
      }
    }
  };

  // ---- A consumer: a warpgroup that computes 64 rows of a tile

  // A block of keys for a tile of queries.
  struct Step {
    TileKind kind;
    i32 block;
    bool is_last;
    // Whether O holds products of an earlier step of the tile.
    bool accumulates;
    // Whether the mask forbids some pair of the consumer's rows.
    bool is_cut;

    FLASHGEN_DEVICE bool exists() const { return kind >= TileKind::normal; }
    FLASHGEN_DEVICE bool is_careful() const { return kind == TileKind::careful; }
  };

  struct Consumer {
    const Params& p;
    Shared shared;
    Thread thread;
    // Which consumer this is.
    i32 number;
    typename QRing::Where q_at;
    typename KRing::Where k_at;
    typename VRing::Where v_at;
    typename TileRing::Where tile_at;
    // Of the step that was begun last.
    Tile tile;
    Blocks blocks;
    Softmax softmax;
    Strip<cfg.tile_kv> scores;
    Strip<cfg.head_dim_v> out;
    Rounded<cfg.tile_kv> probabilities;

    FLASHGEN_DEVICE i32 warp_row() const { return number * kWarpgroupRows + thread.warp % 4 * kWarpRows; }

    // ---- The stream of steps

    FLASHGEN_DEVICE Message read_message() {
      if constexpr (Blocks::sends_messages) {
        shared.k_ring().wait_full(k_at);
        return shared.message(k_at);
      } else {
        return {};
      }
    }
    FLASHGEN_DEVICE Step next_tile() {
      shared.tile_ring().wait_full(tile_at);
      tile = shared.tile(tile_at);
      tile_at.advance();
      if (tile.kind < TileKind::normal) return {tile.kind, 0, true, false, false};
      blocks.begin(p, tile, [&]() { return read_message(); });
      return step_of(false);
    }
    FLASHGEN_DEVICE Step after(const Step& step) {
      if (step.is_last) return next_tile();
      blocks.advance([&]() { return read_message(); });
      return step_of(true);
    }
    FLASHGEN_DEVICE Step step_of(bool accumulates) const {
      return {tile.kind, blocks.block, blocks.is_last(), accumulates, blocks.needs_mask(p, tile, number)};
    }
    // Whether the step concerns this consumer. The last one of a tile always does, because results follow it.
    FLASHGEN_DEVICE bool is_own(const Step& step) const {
      return step.is_last || !blocks.is_empty(p, tile, number);
    }

    // ---- The warp scheduler barriers of FlashAttention-3: consumers issue products in turn, so that one
    // multiplies while another takes exponentials.

    FLASHGEN_DEVICE void warp_scheduler_barrier_sync() { named_barrier_sync(1 + number, 2 * kWarpgroupSize); }
    FLASHGEN_DEVICE void warp_scheduler_barrier_arrive() {
      named_barrier_arrive(1 + (number + 1) % cfg.consumers, 2 * kWarpgroupSize);
    }

    // ---- The parts of a step

    // Line 8: S = Q K^T.
    FLASHGEN_DEVICE void issue_scores_of() {
      // With one stage the descriptors of Q are the same in every step. Opaque, so that they take no
      // registers.
      const i32 row = number * kWarpgroupRows, own_row = cfg.q_stages > 1 ? row : opaque(row);
      issue_scores(scores, shared.q(q_at).from_row(own_row), shared.k(k_at));
    }
    // Line 10: O += P V.
    FLASHGEN_DEVICE void issue_output_of(const Step& step) {
      issue_output_in_fours(out, probabilities, shared.v(v_at), step.accumulates);
      warp_scheduler_barrier_arrive();
    }
    FLASHGEN_DEVICE void release_keys(const Step& step) {
      shared.k_ring().release(k_at, thread);
      k_at.advance();
      if (step.is_last) {
        shared.q_ring().release(q_at, thread);
        q_at.advance();
      }
    }
    FLASHGEN_DEVICE void release_values() {
      shared.v_ring().release(v_at, thread);
      v_at.advance();
    }
    FLASHGEN_DEVICE i32 first_q() const { return tile.first_q + warp_row(); }
    FLASHGEN_DEVICE static i32 first_key(const Step& step) { return step.block * cfg.tile_kv; }
    FLASHGEN_DEVICE Kept draw_kept(const Step& step) const {
      return Dropping::template draw<cfg.tile_kv>(p, tile, first_q(), first_key(step), thread);
    }
    FLASHGEN_DEVICE Pairs load_pairs(const Step& step) const {
      return Score::template load<cfg.tile_kv>(p, tile, first_q(), first_key(step), thread);
    }
    // Whether the step may need a mask or move a reference maximum. In most steps neither holds, so one
    // branch tests both. It is computed while products are under way, as what comes after them delays every
    // step.
    FLASHGEN_DEVICE bool needs_check(const Step& step) const {
      return opaque(step.is_cut || softmax.may_move() || step.is_careful()) != 0;
    }
    // S has come. Line 9: exponentials take its place. Returns whether O must be multiplied by
    // softmax.factor.
    FLASHGEN_DEVICE bool take_exponentials(const Step& step, const Pairs& pairs, const Kept& kept,
                                           bool checks) {
      wgmma_pin(scores);
      release_keys(step);
      const Logits logits = Score::logits(p);
      Score::template apply<cfg.tile_kv>(scores, pairs, p, tile, first_q(), first_key(step), thread);
      bool rescales = false;
      if (checks) {
        if (step.is_cut)
          mask_keys(blocks_of(scores), -kInfinity, tile.template mask<Mask>(p), first_q(), first_key(step),
                    thread);
        rescales = softmax.move(scores, logits, !cfg.anchored || step.is_careful());
      }
      softmax.exponentiate(scores, logits);
      Dropping::template apply<cfg.tile_kv>(scores, kept);
      return rescales;
    }

    // ---- Results

    // The announcement of the tile whose results are not stored yet. The one after it has been read, too.
    FLASHGEN_DEVICE typename TileRing::Where stored_at() const { return {tile_at.count - 2}; }

    // Lines 12 to 15: O = O / l, L = m + log l, and both to global memory.
    FLASHGEN_DEVICE void store(RowStatistics rows) {
      const Tile tile = shared.tile(stored_at());
      // Addresses are computed here, rather than kept in registers throughout.
      const Thread thread = this->thread.again();
      const i32 warp_row = number * kWarpgroupRows + thread.warp % 4 * kWarpRows,
                row = tile.first_q + warp_row;
      const Logits logits = Score::logits(p);
      rows.finish();
      const i32 used = tile.len_q(p) - row;
      if constexpr (!Tile::ends_with_tensor) clear_unused(rows, used, thread);
      // Written so that NaN is suspect. NaN or infinity in V shows in every row that is multiplied by it, so
      // one of the lane's rows suffices.
      bool is_suspect = !(rows.sum[0] < kLargestSum<T>) || !(rows.sum[1] < kLargestSum<T>);
      if constexpr (kForbidsValues) is_suspect = is_suspect || !is_finite_row(out);
      float scale[2];
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        scale[h] = 1.0f;
        if constexpr (Score::has_sink) {
          const float sink = logits.as_reference_max(Score::sink(p, tile));
          const float reference = maximum(rows.reference_max[h], sink);
          const bool is_used = Tile::ends_with_tensor || 8 * h + thread.row() < used;
          if (sink > -kInfinity && is_used) {
            scale[h] = exp2_approx(logits.powers(rows.reference_max[h] - reference));
            rows.sum[h] = rows.sum[h] * scale[h] + exp2_approx(logits.powers(sink - reference));
            rows.reference_max[h] = reference;
          }
        }
        scale[h] *= rows.normalizer(h) * Dropping::factor(p);
      }
      shared.checks().record(stored_at().count, thread.warp - 4,
                             warp_any(is_suspect && tile.kind != TileKind::careful), thread);
      const i32 end = tile.result_rows(p);
      // TMA stores whole warps' rows where others follow in memory.
      const bool by_tma = cfg.stores_by_tma && (Tile::ends_with_tensor || row + kWarpRows <= end);
      if (by_tma) {
        store_by_tma(tile, scale, warp_row, row, end, thread);
      } else {
        write_rows<cfg.stored_columns>(tile.o_rows(p), row, out, scale, thread);
      }
      if (thread.column() == 0) {
        float* const lse = tile.lse_rows(p) + row;
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          const i32 own = 8 * h + thread.row();
          if (row + own < end) lse[own] = rows.log_sum_exp(h, logits);
        }
      }
      shared.tile_ring().release(stored_at(), thread);
    }

    // Each warp stores its own 16 rows. The previous ones must have left shared memory; and if this tile is
    // repeated, its first results must have reached global memory.
    FLASHGEN_DEVICE void store_by_tma(const Tile& tile, const float (&scale)[2], i32 warp_row, i32 row,
                                      i32 end, Thread thread) {
      if constexpr (cfg.stores_by_tma) {
        const OTile o{shared.start + Smem::kO};
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
    }

    // Queries beyond the warp's first `used` rows attend to nothing, whatever they hold.
    FLASHGEN_DEVICE void clear_unused(RowStatistics& rows, i32 used, Thread thread) {
      if (used >= kWarpRows) return;
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const bool is_used = 8 * h + thread.row() < used;
        rows.sum[h] = is_used ? rows.sum[h] : 0.0f;
#pragma unroll
        for (i32 i = 0; i < cfg.head_dim_v / 4; ++i) {
          float& o = out[4 * (i / 2) + 2 * h + i % 2];
          o = is_used ? o : 0.0f;
        }
      }
    }

    // ---- The mainloop

    FLASHGEN_DEVICE void run() {
      clear(out);
      softmax.reset();
      // The first consumer may issue products at once.
      if (number == cfg.consumers - 1) warp_scheduler_barrier_arrive();
      Step next = next_tile();
      for (;;) {
        while (next.exists()) {
          next = skip_to_own(next);
          // Nothing overlaps the first scores.
          Step step = next;
          first_step(step);
          next = after(step);
          while (next.exists() && is_own(next) && !step.is_careful() && !next.is_careful()) {
            overlapped_step(step, next);
            step = next;
            next = after(step);
          }
          last_step(step);
        }
        if (next.kind == TileKind::end) break;
        // The pause. A tile that is announced after it may repeat one.
        shared.tile_ring().release({tile_at.count - 1}, thread);
        shared.checks().settle(thread);
        next = next_tile();
      }
      // Every arrival needs a sync: the first consumer completes the last one.
      if (number == 0) warp_scheduler_barrier_sync();
      if (cfg.stores_by_tma && thread.lane == 0) bulk_wait<0>();
    }

    // Passes by steps that do not concern this consumer.
    FLASHGEN_DEVICE Step skip_to_own(Step step) {
      while (!is_own(step)) {
        shared.k_ring().wait_full(k_at);
        release_keys(step);
        shared.v_ring().wait_full(v_at);
        warp_scheduler_barrier_sync();
        warp_scheduler_barrier_arrive();
        release_values();
        const bool accumulates = step.accumulates;
        step = after(step);
        step.accumulates = accumulates;
      }
      return step;
    }
    FLASHGEN_DEVICE void wait_operands(const Step& step, bool is_first) {
      if (is_first) shared.q_ring().wait_full(q_at);
      shared.k_ring().wait_full(k_at);
    }
    // S and P of a step by itself.
    FLASHGEN_DEVICE void first_step(const Step& step) {
      const Pairs pairs = load_pairs(step);
      wait_operands(step, true);
      issue_scores_of();
      const Kept kept = draw_kept(step);
      const bool checks = needs_check(step);
      wgmma_wait<0>();
      if (take_exponentials(step, pairs, kept, checks)) scale_rows(out, softmax.factor);
      round_to<T, cfg.tile_kv>(probabilities, scores);
    }
    // P V of a step together with S and P of the next one.
    FLASHGEN_DEVICE void overlapped_step(const Step& step, const Step& next) {
      const Pairs pairs = load_pairs(next);
      wait_operands(next, step.is_last);
      warp_scheduler_barrier_sync();
      issue_scores_of();
      shared.v_ring().wait_full(v_at);
      issue_output_of(step);
      RowStatistics finished = {};
      if (step.is_last) {
        finished = softmax.rows;
        softmax.reset();
      }
      const Kept kept = draw_kept(next);
      const bool checks = needs_check(next);
      bool rescales;
      if constexpr (cfg.overlaps_own_products) {
        wgmma_wait<1>();
        rescales = take_exponentials(next, pairs, kept, checks);
        wgmma_compute_before_wait(softmax.rows.sum[0] + softmax.rows.sum[1], shared.start);
        wgmma_wait<0>();
        wgmma_pin(out);
        release_values();
      } else {
        wgmma_wait<0>();
        wgmma_pin(out);
        release_values();
        rescales = take_exponentials(next, pairs, kept, checks);
      }
      round_to<T, cfg.tile_kv>(probabilities, scores);
      if (step.is_last) {
        store(finished);
      } else if (!cfg.anchored && rescales) {
        scale_rows(out, softmax.factor);
      }
    }
    // Whether V holds what must not reach some row.
    FLASHGEN_DEVICE bool leaves_out_values(const Step& step) {
      if constexpr (!kForbidsValues) return false;
      return step.is_careful() && step.is_cut && holds_non_finite(shared.v(v_at), shared.base, thread);
    }
    // P V of a step by itself.
    FLASHGEN_DEVICE void last_step(const Step& step) {
      shared.v_ring().wait_full(v_at);
      warp_scheduler_barrier_sync();
      if (leaves_out_values(step)) {
        if (!step.accumulates) clear(out);
        u32 allowed[2];
        const Tile own =
            shared.tile(step.is_last ? stored_at() : typename TileRing::Where{tile_at.count - 1});
        find_allowed<cfg.tile_kv / 8>(allowed, own.template mask<Mask>(p), own.first_q + warp_row(),
                                      first_key(step), thread);
        multiply_careful(out, probabilities, shared.v(v_at), allowed, thread);
        warp_scheduler_barrier_arrive();
      } else {
        issue_output_of(step);
        wgmma_wait<0>();
        wgmma_pin(out);
      }
      release_values();
      if (step.is_last) {
        store(softmax.rows);
        softmax.reset();
      }
    }
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
    // The previous grids may run until here, and the next one may start from here on.
    griddep_wait();
    griddep_launch_dependents();
    // Registers that the first warpgroup does not need go to the consumers.
    if (thread.warp >= 4) {
      setmaxnreg_inc<cfg.consumer_registers>();
      Consumer{p, shared, thread, thread.warp / 4 - 1}.run();
    } else {
      setmaxnreg_dec<cfg.producer_registers>();
      if (thread.warp == 0) Producer{p, shared, thread, thread.lane == 0}.run();
      if (thread.warp == 1) Scheduler{p, shared, thread}.run();
    }
  }
};

}  // namespace flashgen

// ---- kernels/hopper/forward.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr ForwardSm90Config kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
    .stored_columns = 64,
    .tile_q = 192,   // B_r: query rows per block
    .tile_kv = 128,  // B_c: keys per step
    .q_stages = 2,
    .k_stages = 4,
    .v_stages = 4,
    .consumers = 3,  // warpgroups that compute, 64 query rows each
    .producer_registers = 32,
    .consumer_registers = 160,
    .section_heads = 1,              // heads whose tiles are scheduled together
    .longest_first = false,          // the last queries of a head go first
    .anchored = true,                // exponentials relative to a reference maximum that is set once
    .overlaps_own_products = false,  // exponentials overlap own P V
    .stores_by_tma = true,
    .has_lower = false,  // the band has a lower bound on k - q
    .has_upper = false,  // the band has an upper bound on k - q
};

struct Params {
  TensorMap q_map;  // for TMA
  TensorMap k_map;
  TensorMap v_map;
  TensorMap o_map;
  element_t* o;
  float* lse;    // log-sum-exp, (batch, heads_q, len_q)
  u32* counter;  // tiles drawn, then blocks done; 0 between launches
  i64 o_batch;   // strides are in elements
  i64 o_row;
  i64 o_head;
  i32 heads_q;
  i32 heads_kv;
  i32 len_q;
  i32 len_kv;
  i32 group;       // query heads per key/value head
  i32 band_lower;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  i32 band_upper;
  i32 q_tiles;       // tiles of queries of one head
  i32 tiles;         // tiles of all heads of all sequences
  float scale_log2;  // scale * log2(e)
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
  static constexpr u32 kTiles = 205024;     // the next tiles of queries
  static constexpr u32 kRequests = 205088;  // the producer asks for another tile
  static constexpr u32 kChecks = 205104;    // which tiles are to be repeated (tile_checks.cuh)
};

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using Blocks = BandBlocks<kConfig, Mask>;
using Scoring = NoScore;
using Tile = DenseTile;
using Dropping = NoDropout;

FLASHGEN_KERNEL(512, 1) forward_d64_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  ForwardMainloop<kConfig, element_t, Params, Smem, Tile, Mask, Blocks, Scoring, Dropping>::run(p, base);
}
