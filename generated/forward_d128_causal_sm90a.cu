// forward_d128_causal_sm90a: FlashAttention-3, forward pass: O and the log-sum-exp of each row.
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"bf16","mask":"causal","direction":"forward","deterministic":false}
// rebuild  flashgen build --head-dim 128 --dtype bf16 --causal --forward-only --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 128, tile_kv 128, stages 2, q_slots 2, 384 threads
// roles    of 1 warpgroup one warp brings tiles (40 registers a thread); 2 compute, 64 queries each (232)
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 128
//          query rows of a query head and batch entry; they start while the grid before them ends, and wait
//          for it
// smem     231928 bytes
//            q                      0 to  65536  Q_i, 2 slots of 128 rows
//            k                  65536 to 131072  K_j, 2 slots
//            v                 131072 to 196608  V_j, 2 slots
//            o                 196608 to 229376  O_i, to be stored
//            scrubber          229376 to 231488  non-finite values of V_j, as bits
//            q_barriers        231488 to 231520  full and empty barriers of each slot
//            k_barriers        231520 to 231552
//            v_barriers        231552 to 231584
//            tile_barriers     231584 to 231616
//            tiles             231616 to 231648  the next tiles of queries
//            key_block_ranges  231648 to 231776  the range of key tiles of each consumer
//            recomputes        231776 to 231928  tiles of queries to recompute if V is not finite
// because  the widest tile of keys that leaves room for two tiles of Q and one of O
//
// contents   75  Integer and 16-bit element types, without any CUDA header.
//            97  What the CUDA language itself provides, under names that the emulator implements on the host.
//           136  Scalar arithmetic, one instruction each.
//           179  Warp-wide matrix instructions.
//           201  Element types.
//           234  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//           239  Warp-level matrix products.
//           261  Barriers at which threads may arrive without waiting, or wait without arriving.
//           267  The kernel: its configuration, parameters and text.
//           279  The kernel: its configuration, parameters and text.
//           325  The kernel: its configuration, parameters and text.
//           338  Tensor maps, which describe tensors to bulk copies of boxes.
//           347  Bulk copies.
//           352  The kernel: its configuration, parameters and text.
//           383  The kernel: its configuration, parameters and text.
//           385  The kernel: its configuration, parameters and text.
//           401  Communication between blocks and between grids.
//           405  The kernel: its configuration, parameters and text.
//           445  The kernel: its configuration, parameters and text.
//           457  Reallocation of registers among warpgroups (sm_90a).
//           472  The 64-bit descriptor of an operand of wgmma in shared memory.
//           507  Matrix products of a warpgroup (sm_90a).
//           736  Four products of a warpgroup, which add to the same accumulators, as one asm statement.
//           820  Tiles as TMA writes them and wgmma reads them.
//           931  What a softmax takes exponentials of.
//           967  The online softmax.
//           980  What an online softmax keeps of each row from one tile of keys to the next, and what is left of it while a row's last values are still on their way.
//          1041  The online softmax with as little work per score as possible.
//          1305  Banded masks.
//          1503  The products of the forward kernel for Hopper, issued four steps at a time (wgmma_fours.cuh).
//          1566  Rings of slots in shared memory, filled by one side and emptied by the other.
//          1630  Which tiles of queries, or of keys, a persistent block works on, in order.
//          1725  Writing a warpgroup's results to shared and global memory.
//          1745  What the forward kernel for Hopper is made of.
//          1849  The kernel: its configuration, parameters and text.
//          1857  Which tiles of queries a block computes a second time, because non-finite values (contain.cuh) in V may have reached queries that must not attend to them.
//          1989  Arithmetic on pairs of 16-bit numbers packed in a word (sm_90).
//          2004  Scrubbing.
//          2319  The kernel: its configuration, parameters and text.
//          2523  The kernel: its configuration, parameters and text.
//          2695  The kernel: its configuration, parameters and text.
//          2721  The kernel: its configuration, parameters and text.

// The shapes of its products, by their columns: S and O.
#define WGMMA_SHAPES(shape) shape(128)

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

// From registers to shared memory (sm_90 and later).
FLASHGEN_DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Adds, for each row of a and column of b, the number of bits that both have set, of 128 (sm_80 and later).
// Each word has 32 of them.
FLASHGEN_DEVICE void mma_m16n8k128_bits(i32 (&d)[4], const u32 (&a)[2], u32 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

}  // namespace flashgen
#endif
// ---- flashgen/element.cuh
// Element types: conversions, and how deep one matrix instruction reaches.

namespace flashgen {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
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

// The same without waiting.
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

// A kernel may define WGMMA_SHAPES to the shapes that it uses, because each takes some time to compile.
WGMMA_SHAPES(WGMMA_SHAPE)
// d = a * b, plus what d held if `accumulate`; both operands in shared memory.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b, bool accumulate) {
  Wgmma<n>::template add_ss<WgmmaType<T>, WgmmaTailOf<T, a_major, b_major>>(d, a.bits(), b.bits(),
                                                                            accumulate);
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

// Copies the next product's operands into the registers of a product that has completed. Without the XOR
// ptxas would merge the registers and overwrite operands that wgmma still reads. ptxas cannot know that the
// sign bit of `not_negative` is 0.
template <i32 count>
FLASHGEN_DEVICE void take_over(u32 (&operands)[count][4], const u32 (&next)[count][4], i32 not_negative) {
  const u32 zero = static_cast<u32>(not_negative) & 0x80000000u;
#pragma unroll
  for (i32 i = 0; i < 4 * count; ++i) operands[i / 4][i % 4] = next[i / 4][i % 4] ^ zero;
}

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
//     sums                    in how many sums each lane adds up a row's exponentials
//     see(first, second)      called with each pair of scores
//     replaced                whether exponentials replace scores that could be kept

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
  FLASHGEN_DEVICE static float natural_log(float reference_max, float x) {
    return (reference_max + x) * kLn2;
  }

  static constexpr i32 sums = 2;
  FLASHGEN_DEVICE void see(float /*first*/, float /*second*/) {}
  static constexpr bool replaced = false;
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
// What an online softmax keeps of each row from one tile of keys to the next, and what is left of it while a
// row's last values are still on their way.

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

// Statistics of rows that are done with, while their last values are still on the way.
template <bool in_one_register>
struct FinishedRows {
  RowStatistics statistics;

  FLASHGEN_DEVICE static FinishedRows of(const RowStatistics& rows, Thread) { return {rows}; }
  FLASHGEN_DEVICE RowStatistics rows(Thread) const {
    RowStatistics finished = statistics;
    finished.finish();
    return finished;
  }
};

// The four lanes of a row know the same four numbers, once its sum is one: each of them keeps one.
template <>
struct FinishedRows<true> {
  float kept;

  FLASHGEN_DEVICE static FinishedRows of(RowStatistics rows, Thread thread) {
    rows.finish();
    const bool is_odd = (thread.lane & 1) != 0;
    const float reference_max = is_odd ? rows.reference_max[1] : rows.reference_max[0],
                sum = is_odd ? rows.sum[1] : rows.sum[0];
    return {(thread.lane & 2) == 0 ? reference_max : sum};
  }
  FLASHGEN_DEVICE RowStatistics rows(Thread thread) const {
    const i32 first = thread.lane & ~3;
    return {{shuffle(kept, first), shuffle(kept, first + 1)},
            {shuffle(kept, first + 2), shuffle(kept, first + 3)}};
  }
};

// ---- flashgen/reference_max_softmax.cuh
// The online softmax with as little work per score as possible. A row's exponentials are taken relative to a
// reference maximum. Any number near enough to the row's maximum gives the same result, because numerator and
// denominator share the factor. One chosen ahead of the first tile's maximum usually serves the whole row, so
// that no later tile needs shuffles or a rescale. If it does not serve, the row's sum grows too large. The
// tile is then recomputed with a better reference maximum: from its scores where there are registers to keep
// them, else from scores that the caller recomputes. Only a row's own maximum decides whether its reference
// maximum moves, so a row's bits do not depend on the other rows of its warp.

// How far a row's maximum may exceed its reference maximum, in powers of two, where a tile may be recomputed.
// In half_t the limit is its range; otherwise values of up to 2^60 must have finite products.
template <class T>
constexpr float kSpan = 61.0f;
// A lane's sum over its columns of a tile. All rows that grow further exceed it, and few others.
template <class T>
constexpr float kGrown = 0x1p60f;
// As kSpan, where a bound moves reference maxima before exponentials are taken, and exponentials are scaled
// afterwards.
template <class T>
constexpr float kScaledSpan = 59.0f;

// By how many powers of two a reference maximum is placed above the maximum, so that it rarely has to move.
// Exponentials must keep enough significant bits, and the logarithm of their sum loses accuracy with the
// distance. So the distance is `little` where logits are near zero, `more` where they are not, and `most`
// where they are shares of a cap: there logarithms are large, and rows may grow up to the cap. Rows whose
// first logits are at least `wide` above zero are likely to outgrow any of these.
template <class T>
struct Ahead {
  static constexpr float little = 24.0f, more = 60.0f, most = 90.0f, wide = 120.0f;
};
// Up to this distance from zero, in powers of two, a few of a row's first logits stand for all.
constexpr float kFar = 12.0f;

// How to handle a row that grows far above its reference maximum.
enum class Regrowth {
  // It cannot happen: the reference maximum is the running maximum. This takes a pass over all scores.
  never,
  // It cannot happen: reference maxima move whenever a bound on the logits permits growth.
  bounded,
  // Exponentials have registers of their own. They are recomputed where such a bound requires it.
  checked,
  // Exponentials have registers of their own. Too large ones are recomputed from the scores.
  keeps_scores,
  // Exponentials replace the scores, so the caller recomputes the scores first.
  recomputes_scores,
};

// The steps for a tile: update_reference_max(), exponentiate(), both again where has_grown() and not
// watches(), and add().
template <class T, i32 columns, Regrowth regrowth, bool computes_before_wait, class Logits = ScaledProducts>
struct ReferenceMaxSoftmax {
  static constexpr float kNowhere = Logits::kNowhere;
  static constexpr bool in_place = regrowth != Regrowth::keeps_scores && regrowth != Regrowth::checked;
  static constexpr bool bounds_growth = regrowth == Regrowth::bounded || regrowth == Regrowth::checked;
  static constexpr bool checks = regrowth == Regrowth::checked;

  // How far a row's maximum may exceed its reference maximum, in powers of two.
  static constexpr float span = regrowth == Regrowth::never ? 0.0f
                                : bounds_growth             ? kScaledSpan<T>
                                                            : kSpan<T>;

  RowStatistics rows;
  // See update_reference_max().
  float factor[2];
  // The checks due before a tile's exponentials, 0 if none; the same for all lanes of a warp.
  u32 due;

  FLASHGEN_DEVICE void reset() {
    due = kNoReferenceMax;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      rows.reference_max[h] = kNowhere;
      rows.sum[h] = 0.0f;
    }
  }

  // Moves reference maxima that are too far from the row's maximum. Returns whether the output so far must be
  // multiplied by `factor`.
  FLASHGEN_DEVICE bool update_reference_max(const Strip<columns>& scores, const Logits& logits) {
    factor[0] = factor[1] = 1.0f;
    if constexpr (regrowth == Regrowth::never) {
      follow_maximum(scores, logits);
      return true;
    }
    // Votes tell the assembler that warps do not diverge.
    if (warp_any((due & kNoReferenceMax) != 0)) set_reference_max(scores, logits);
    if (!warp_any(due >= kWatchedTile)) return false;
    follow_maximum(scores, logits);
    const bool moves = rescales();
    due = (due & kNoReferenceMax) | (moves ? kWatchedTiles : (due & ~kNoReferenceMax) - kWatchedTile);
    return moves;
  }

  // Whether the output so far must be multiplied by `factor`; the same for all lanes of a warp.
  FLASHGEN_DEVICE bool rescales() const { return warp_any(factor[0] != 1.0f || factor[1] != 1.0f); }
  // Whether update_reference_max() would leave all as it is.
  FLASHGEN_DEVICE bool is_settled() const { return regrowth != Regrowth::never && due == 0; }
  // Whether one of a lane's two rows has no reference maximum yet.
  FLASHGEN_DEVICE bool has_no_reference_max() const {
    return rows.reference_max[0] == kNowhere || rows.reference_max[1] == kNowhere;
  }
  // Whether a row's reference maximum must move to a logit found in the row.
  FLASHGEN_DEVICE bool has_grown_to(float found, i32 row, float distance = span) const {
    return found > rows.reference_max[row] + distance;
  }
  FLASHGEN_DEVICE void move_reference_max(i32 row, float reference_max, const Logits& logits = {}) {
    // Reference maxima that move in most tiles do not branch: the formula gives a factor of 1 if they stay.
    const bool stays = regrowth != Regrowth::never && reference_max == rows.reference_max[row];
    factor[row] = stays ? 1.0f : exp2_approx(logits.powers(rows.reference_max[row] - reference_max));
    rows.reference_max[row] = reference_max;
    rows.sum[row] *= factor[row];
  }

  // The same without a bound on logits. It is further ahead where logits are far from zero: such rows grow
  // further, and their logarithms are rounded more coarsely anyway.
  FLASHGEN_DEVICE static float ahead_of(float found, const Logits& logits) {
    const float powers = logits.powers(found);
    const float apart = maximum(maximum(powers, -powers), Ahead<T>::little);
    const i32 ahead = static_cast<i32>(apart < Ahead<T>::more ? apart : Ahead<T>::more);
    return found + logits.distance(static_cast<float>(ahead));
  }

  // What is subtracted from a row's logits. A row without a reference maximum subtracts 0 if exponentials are
  // taken before all rows have reference maxima, or if kNowhere is -inf: -inf - -inf would be NaN.
  FLASHGEN_DEVICE float shift(i32 row) const {
    return bounds_growth || kNowhere == -kInfinity ? finite_shift(row) : rows.reference_max[row];
  }
  // The same where masked logits are finite and far below zero.
  FLASHGEN_DEVICE float finite_shift(i32 row) const {
    return rows.reference_max[row] == kNowhere ? 0.0f : rows.reference_max[row];
  }

  // Computes a tile's exponentials and their sums. The exponentials go to `probabilities`, rounded, if scores
  // are kept, and otherwise replace the scores.
  template <class AnyLogits>
  FLASHGEN_DEVICE void exponentiate(Strip<columns>& scores, Rounded<columns>& probabilities,
                                    AnyLogits& logits) {
    const float shifts[2] = {shift(0), shift(1)};
    float total[2][2] = {};
#pragma unroll
    for (i32 i = 0; i < columns / 4; ++i) {
      const i32 h = i % 2;
      logits.see(scores[2 * i], scores[2 * i + 1]);
      const float first = exp2_approx(logits.relative(scores[2 * i], shifts[h], h));
      const float second = exp2_approx(logits.relative(scores[2 * i + 1], shifts[h], h));
      total[h][0] += first;
      total[h][AnyLogits::sums - 1] += second;
      if constexpr (in_place || AnyLogits::replaced) {
        scores[2 * i] = first;
        scores[2 * i + 1] = second;
      } else {
        probabilities[i / 4][i % 4] = pack(T{}, first, second);
      }
    }
#pragma unroll
    for (i32 h = 0; h < 2; ++h) tile_sum[h] = total[h][0] + total[h][1];
  }

  // Whether this lane has a row that might exceed its reference maximum too far.
  FLASHGEN_DEVICE bool has_grown() const { return tile_sum[0] > kGrown<T> || tile_sum[1] > kGrown<T>; }
  // Called if any lane has such a row. Returns whether maxima were checked before, so that no row exceeds its
  // reference maximum too far after all. Otherwise they are checked from now on: in this tile, which is
  // recomputed, and in some that follow.
  FLASHGEN_DEVICE bool watches() {
    if (warp_any(due >= kWatchedTile)) return true;
    due |= kWatchedTiles;
    return false;
  }

  // Moves the reference maxima of such rows, and scales a tile's exponentials with them. The output so far is
  // then to be multiplied by `factor`, as it may have been before.
  FLASHGEN_DEVICE void scale(Strip<columns>& exponentials, bool rescales) {
    float shrinks[2];
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float largest = row_maximum(tile_sum[h]);
      // Whole powers of two, so that nothing is rounded.
      const i32 power = largest > kGrown<T> ? static_cast<i32>(bits_of(largest) >> 23) - 127 : 0;
      shrinks[h] = float_of(static_cast<u32>(127 - power) << 23);
      factor[h] = rescales ? factor[h] * shrinks[h] : shrinks[h];
      rows.reference_max[h] += static_cast<float>(power);
      rows.sum[h] *= shrinks[h];
      tile_sum[h] *= shrinks[h];
    }
#pragma unroll
    for (i32 i = 0; i < columns / 2; ++i) exponentials[i] *= shrinks[i / 2 % 2];
  }

  // Adds the tile's exponentials to the rows'. `scratch` is any word of shared memory.
  FLASHGEN_DEVICE void add(u32 scratch) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) rows.sum[h] += tile_sum[h];
    // Other variants test the sums, which keeps the arithmetic before the wait anyway.
    if constexpr (computes_before_wait && (regrowth == Regrowth::never || bounds_growth))
      wgmma_compute_before_wait(rows.sum[0] + rows.sum[1], scratch);
  }

  // Exponentials that have taken the place of scores, rounded.
  FLASHGEN_DEVICE static void round(Rounded<columns>& probabilities, const Strip<columns>& scores) {
    if constexpr (in_place) round_replaced(probabilities, scores);
  }
  FLASHGEN_DEVICE static void round_replaced(Rounded<columns>& probabilities, const Strip<columns>& scores) {
#pragma unroll
    for (i32 i = 0; i < columns / 4; ++i)
      probabilities[i / 4][i % 4] = pack(T{}, scores[2 * i], scores[2 * i + 1]);
  }

 private:
  // Bits of `due`: some row needs a reference maximum, and the number of tiles whose maxima are still
  // checked. A check costs about half as much as recomputing a tile.
  static constexpr u32 kNoReferenceMax = 1, kWatchedTile = 2, kWatchedTiles = 15 * kWatchedTile;

  // This lane's share of each row's sum over the current tile.
  float tile_sum[2];

  // The largest score of a row in every `every`-th block of columns.
  FLASHGEN_DEVICE static float highest(const Strip<columns>& scores, i32 h, i32 every) {
    float found = -kInfinity;
#pragma unroll
    for (i32 n = 0; n < columns / 8; ++n) {
      if (n % every == 0) found = maximum(found, maximum(scores[4 * n + 2 * h], scores[4 * n + 2 * h + 1]));
    }
    return row_maximum(found);
  }

  // Sets a reference maximum for rows that have none: ahead of the maximum of a quarter of the columns, which
  // is usually near that of all. If that is far from zero, or if these columns are all masked, it takes all
  // columns.
  FLASHGEN_DEVICE void set_reference_max(const Strip<columns>& scores, const Logits& logits) {
    set_reference_max_from<4>(scores, logits);
    if (warp_any((due & kNoReferenceMax) != 0)) set_reference_max_from<1>(scores, logits);
  }
  template <i32 every>
  FLASHGEN_DEVICE void set_reference_max_from(const Strip<columns>& scores, const Logits& logits) {
    bool is_wide = false;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float found = logits.logit(highest(scores, h, every), h);
      const float powers = logits.powers(found);
      const bool serves = every == 1 || maximum(powers, -powers) < kFar;
      if (rows.reference_max[h] == kNowhere && serves)
        rows.reference_max[h] = maximum(ahead_of(found, logits), kNowhere);
      is_wide = is_wide || powers > Ahead<T>::wide;
    }
    if (!warp_any(has_no_reference_max())) due &= ~kNoReferenceMax;
    // Some row is likely to need recomputed tiles. Following the maxima of all rows costs less.
    if (every == 1 && warp_any(is_wide)) due |= kWatchedTiles;
  }

  // Moves the reference maxima of rows that reach too far above them, to the maximum or `little` ahead of it.
  // A larger distance would underflow what such rows had before.
  FLASHGEN_DEVICE void follow_maximum(const Strip<columns>& scores, const Logits& logits) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const float found = logits.logit(highest(scores, h, 1), h);
      if constexpr (regrowth == Regrowth::never) {
        if (has_grown_to(found, h)) move_reference_max(h, found, logits);
      } else if (has_grown_to(found, h, logits.distance(span))) {
        move_reference_max(h, found + logits.distance(Ahead<T>::little), logits);
      }
    }
  }
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

  // Tiles of keys that all queries of [q_begin, q_end) may attend to. The last one may reach beyond len_kv.
  FLASHGEN_DEVICE Range full_key_tiles(i32 q_begin, i32 q_end, i32 tile) const {
    i32 begin = 0, end = ceil_div(len_kv, tile);
    end = q_begin + upper + 1 < len_kv ? larger(0, q_begin + upper + 1) / tile : end;
    return {begin, end};
  }

  // Whether no pair of the rectangle is allowed; the rectangle has at least one row and column.
  FLASHGEN_DEVICE bool is_empty(i32 q_begin, i32 q_end, i32 k_begin, i32 k_end) const {
    bool empty = k_begin >= len_kv;
    empty |= k_begin > q_end - 1 + upper;
    return empty;
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
// computed first, and are worth keeping for the next use.
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
    wgmma_ss<T, KTile::rows>(scores, a(0), b(0), true);
    issue_scores_from<QTile, KTile, step + 1>(scores, left, right);
  }
}

// Issues S = Q K^T, of this warpgroup's 64 rows of Q.
template <class QTile, class KTile>
FLASHGEN_DEVICE void issue_scores(Strip<KTile::rows>& scores, QTile q, KTile k) {
  static_assert(QTile::steps >= 4, "the first four steps are issued together");
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

// ---- flashgen/row_tile.cuh
// Which tiles of queries, or of keys, a persistent block works on, in order.

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
  // One head after another: no partial section.
  if constexpr (section_heads == 1) return {number % tiles_of_head, number / tiles_of_head};
  const i32 odd_heads = tiles / tiles_of_head % section_heads;
  const i32 even = number - odd_heads * tiles_of_head;
  if (even < 0) return {number / odd_heads, number % odd_heads};
  const i32 section = even / (section_heads * tiles_of_head);
  const i32 rest = even - section * (section_heads * tiles_of_head);
  return {rest / section_heads, odd_heads + section * section_heads + rest % section_heads};
}

// The same with up to `last_heads` heads in the last section. With more heads there, blocks end more nearly
// at the same time.
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

// Of tiles of keys a causal mask makes the first ones the longest, so they go from the first to the last.
template <i32 tile_kv, i32 section_heads, class Params>
FLASHGEN_DEVICE KeyTile key_tile(const Params& p, i32 number) {
  if (number >= p.tiles) return {};
  const SectionPlace place = place_in_sections<section_heads>(number, p.tiles, p.kv_tiles);
  const i32 sequence = place.head / p.heads_kv;
  return {place.turn * tile_kv, place.head - sequence * p.heads_kv, sequence, true, true};
}

// Draws the number of a block's next tile. Its first tile has the block's own number.
template <class Params>
FLASHGEN_DEVICE i32 draw_tile(const Params& p) {
  return grid_dim_x() + static_cast<i32>(atomic_add(p.counter, 1u));
}

// Warns all blocks of non-finite values: the numbers that they draw from then on have this bit set.
constexpr i32 kWarning = -0x7fffffff - 1;
template <class Params>
FLASHGEN_DEVICE void warn_all(const Params& p) {
  atomic_or(p.counter, static_cast<u32>(kWarning));
}

// Each block calls this once, after its last draw. The last block resets the counters to 0 for the next
// launch.
template <class Params>
FLASHGEN_DEVICE void leave_counters(const Params& p) {
  if (atomic_add_release(p.counter + 1, 1u) + 1 == static_cast<u32>(grid_dim_x())) {
    store_release(p.counter, 0u);
    store_release(p.counter + 1, 0u);
  }
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

// ---- flashgen/forward_sm90.cuh
// What the forward kernel for Hopper is made of.

struct ForwardSm90Config {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 stages;
  i32 k_slots;
  i32 non_finite_records;
  i32 q_rows;
  i32 q_slots;
  i32 tile_slots;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  i32 section_heads;
  i32 doubles_to;
  bool longest_first;
  bool running_maximum;
  bool keeps_scores;
  bool bounds_growth;
  bool computes_before_wait;
  bool packs_statistics;
  bool ends_alone;
  bool prefetches_next_k;
  bool draws_late;
  bool has_lower;
  bool has_upper;
};

template <ForwardSm90Config cfg, class T, class Logits>
struct ForwardSm90Shape {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 rows of queries");
  // What a slot for queries holds: a tile of them, or each consumer's part by itself.
  using QTile = PanelTile<T, cfg.q_rows, cfg.head_dim>;
  static constexpr i32 q_parts = cfg.tile_q / cfg.q_rows;
  // How many parts are loaded when a tile is announced. The others follow the tile's first keys. With one
  // slot the tile is announced late, when the slot is about to be free.
  static constexpr i32 q_parts_ahead = cfg.q_slots == 1 ? 1 : smaller(q_parts, cfg.q_slots - q_parts);
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using OTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using Scores = Strip<cfg.tile_kv>;
  using Probabilities = Rounded<cfg.tile_kv>;
  using Output = Strip<cfg.head_dim_v>;
  static constexpr Regrowth regrowth = cfg.running_maximum ? Regrowth::never
                                       : cfg.bounds_growth
                                           ? (cfg.keeps_scores ? Regrowth::checked : Regrowth::bounded)
                                       : cfg.keeps_scores ? Regrowth::keeps_scores
                                                          : Regrowth::recomputes_scores;
  using Softmax = ReferenceMaxSoftmax<T, cfg.tile_kv, regrowth, cfg.computes_before_wait, Logits>;
  using Finished = FinishedRows<cfg.packs_statistics>;
  // Arrivals that empty a slot: one of each warp that reads it.
  static constexpr u32 consumer_warps = 4 * cfg.consumers;
  static constexpr u32 q_readers = consumer_warps / q_parts;
};

// What the mask makes of a tile of keys. For consumer i and after these for the whole tile of queries: every
// pair is allowed (bit i); none is (bit kNone + i).
struct TileFacts {
  static constexpr i32 kNone = 8;
  u32 bits;

  FLASHGEN_DEVICE bool is_full(i32 part) const { return (bits >> part & 1u) != 0; }
  FLASHGEN_DEVICE bool is_empty(i32 part) const { return (bits >> (kNone + part) & 1u) != 0; }
  FLASHGEN_DEVICE void add(i32 part, bool is_full, bool is_empty) {
    bits |= static_cast<u32>(is_full) << part | static_cast<u32>(is_empty) << (kNone + part);
  }
  FLASHGEN_DEVICE TileFacts of_lane(i32 lane) const {
    return {static_cast<u32>(shuffle(static_cast<i32>(bits), lane))};
  }
};

// One tile of keys for one tile of queries.
struct Step {
  RowTile rows;
  i32 key_tile;
  // The last one of its tile of queries.
  i32 last_key_tile;
  // Only with a block-sparse mask.
  TileFacts facts;
  // Whether one before it in the same tile of queries has been added to O.
  i32 continues;

  FLASHGEN_DEVICE static Step none() { return {{}, 0, -1, {}, 0}; }
  FLASHGEN_DEVICE bool exists() const { return rows.exists != 0; }
  FLASHGEN_DEVICE bool is_last() const { return key_tile == last_key_tile; }
};

// The key tiles of a tile of queries, as the producer announces them to one consumer: those that the whole
// tile attends to, those that this consumer attends to, and those that all of its queries attend to.
struct alignas(16) KeyBlockRange {
  Range tile_keys;
  Range keys;
  Range full_keys;
};

// How a tile of queries, if it exists, uses V. A scrubbed tile uses scrubbed values where the mask cuts: once
// non-finite values have been found, and in some kernels in a block's first tile. A plain tile uses values as
// loaded. So does a scrubbed one after the last step that the mask cuts (kSeenTile).
constexpr i32 kScrubbedTile = 1, kPlainTile = 2, kSeenTile = 3;

// ---- The output

template <i32 count>
FLASHGEN_DEVICE void scale_rows(float (&out)[count], const float (&factor)[2]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) out[i] *= factor[i / 2 % 2];
}

// ---- flashgen/recompute_list.cuh
// Which tiles of queries a block computes a second time, because non-finite values (contain.cuh) in V may
// have reached queries that must not attend to them.
//
// Scrubbing V before its first use costs time, and non-finite values are rare. A non-finite value in a tile
// of keys shows in every row that is multiplied by the tile, whatever the probability. So consumers multiply
// V as loaded, and check that their results are finite. Some kernels scrub V for a block's first tile of
// queries anyway. Once a result is not finite, or the scrubbing warps find a non-finite value, the block
// scrubs all tiles of V that the mask cuts (scrubber.cuh). After its last tile of queries it recomputes those
// since the first reported one that used V unscrubbed. All other blocks are warned, and scrub from their next
// tile on.

// Whether all of one of a lane's two rows of a strip are finite.
template <i32 count>
FLASHGEN_DEVICE bool is_finite_row(const float (&strip)[count], i32 row) {
  float zero[2] = {};
#pragma unroll
  for (i32 i = 0; i < count; i += 4) {
    for (i32 j = 0; j < 2; ++j) zero[j] = fused_multiply_add(strip[i + 2 * row + j], 0.0f, zero[j]);
  }
  return zero[0] + zero[1] == 0.0f;
}

// Whether a lane's results show a non-finite value in V. Such a value shows in all rows, so one of the lane's
// two rows suffices. A row whose sum of exponentials is NaN has only NaN results and shows nothing, so the
// other is used.
template <i32 count>
FLASHGEN_DEVICE bool shows_non_finite(const float (&strip)[count], const float (&sums)[2]) {
  // Without a branch, behind which the assembler would take lanes for divergent.
  const bool are_non_finite[2] = {!is_finite_row(strip, 0), !is_finite_row(strip, 1)};
  const bool is_number[2] = {sums[0] == sums[0], sums[1] == sums[1]};
  return (is_number[0] & are_non_finite[0]) | (!is_number[0] & is_number[1] & are_non_finite[1]);
}

// `slots` is the number of slots of the ring that announces tiles of queries. The consumer warps are the last
// warps of a block.
template <i32 slots, i32 consumer_warps>
struct RecomputeList {
  // The scrubbing warps also report, by one more barrier. They never trigger a recompute.
  static constexpr i32 kReporters = consumer_warps + 1;
  static_assert(kReporters <= kWarpSize, "each lane tests one barrier");
  static constexpr i32 kFirstConsumerWarp = 4;
  // A warp reports tile n before it reads tile n + 2 from the ring. The producer sees the report when it
  // announces the next tile, or at the latest when it fills that tile's slot again. So at most 2 + slots
  // unscrubbed tiles follow the first reported one.
  static constexpr u32 kPlaces = 4 * slots;
  static constexpr u32 kNotYet = ~0u;
  // Not the number of any tile.
  static constexpr i32 kNone = 0x7fffffff;

  // One barrier per reporter. Its only phase ends when the reporter has found non-finite values.
  alignas(8) u64 reported[kReporters];
  // Its only phase ends when no consumer has a further tile to report.
  u64 settled;
  // The first tile that each consumer warp reports.
  i32 first[consumer_warps];
  // The last tiles that used V unscrubbed, and how many there were in all.
  i32 tiles[kPlaces];
  u32 unscrubbed;
  // Which of these is recomputed next; kNotYet until that is known.
  u32 next;

  // ---- Initialization: by one thread, ...

  FLASHGEN_DEVICE void init_barriers() {
    for (i32 reporter = 0; reporter < kReporters; ++reporter)
      mbarrier_init(shared_address(&reported[reporter]), 1);
    mbarrier_init(shared_address(&settled), consumer_warps * kWarpSize);
  }
  // ... and by the lanes of another warp.
  FLASHGEN_DEVICE void begin(Thread thread) {
    if (thread.lane < consumer_warps) first[thread.lane] = kNone;
    if (thread.lane == 0) {
      unscrubbed = 0;
      next = kNotYet;
    }
  }

  // ---- For consumer warps. They compute addresses on use, because they have no registers to keep them in.

  // Only a warp's first report counts, because all later tiles are recomputed too. Returns true in one lane
  // of a warp that had not reported before.
  FLASHGEN_DEVICE bool report(i32 tile, Thread thread) {
    const i32 warp = opaque(thread.warp) - kFirstConsumerWarp;
    if (thread.lane != 0 || first[warp] != kNone) return false;
    first[warp] = tile;
    mbarrier_arrive(shared_address(&reported[warp]));
    return true;
  }
  // Called by every lane, because every lane has read what is overwritten from then on.
  FLASHGEN_DEVICE void settle() { mbarrier_arrive(shared_address(&settled)); }

  // ---- For one thread of the scrubbing warps, once: they have found non-finite values.
  FLASHGEN_DEVICE void report_found() { mbarrier_arrive(shared_address(&reported[consumer_warps])); }

  // ---- For the one thread that announces tiles.

  // Which tile is announced next; and, once that is known, that it uses V unscrubbed.
  FLASHGEN_DEVICE void note(i32 tile) { tiles[unscrubbed % kPlaces] = tile; }
  FLASHGEN_DEVICE void count_unscrubbed() { ++unscrubbed; }
  // Whether no further report can come, when so many tiles have been announced. All warps have then read the
  // previous content of the last one's slot, and finished the two tiles before that.
  FLASHGEN_DEVICE bool are_known(u32 announced) const { return unscrubbed + slots + 2 <= announced; }
  // From now on draw() returns the tiles to recompute, beginning with the first reported one.
  FLASHGEN_DEVICE void repeat() {
    i32 tile = kNone;
#pragma unroll 1
    for (i32 warp = 0; warp < consumer_warps; ++warp) tile = smaller(tile, first[warp]);
    next = static_cast<u32>(tile);
  }
  FLASHGEN_DEVICE bool repeats() const { return next != kNotYet; }
  FLASHGEN_DEVICE i32 draw() { return next < unscrubbed ? tiles[next++ % kPlaces] : kNone; }

  // ---- For all lanes of any warp.

  // Whether any warp has reported non-finite values so far.
  FLASHGEN_DEVICE bool has_reports(Thread thread) const {
    return warp_any(mbarrier_test_wait(shared_address(&reported[smaller(thread.lane, consumer_warps)]), 0));
  }

  // After the last tile: whether the tiles to recompute were among those announced before it.
  FLASHGEN_DEVICE bool have_come() const { return warp_any(next != kNotYet); }
  // Waits until no further report can come. Returns whether there may be tiles to recompute.
  FLASHGEN_DEVICE bool are_left(Thread thread) const {
    mbarrier_wait(shared_address(&settled), 0);
    return has_reports(thread);
  }
};

}  // namespace flashgen

#if !defined(FLASHGEN_EMULATOR)
// ---- flashgen/ptx/packed.cuh
// Arithmetic on pairs of 16-bit numbers packed in a word (sm_90).

namespace flashgen {

// 0x7fff in place of each number that is infinite or NaN, and zero in place of any other: x * 0 + 0 is NaN,
// which has these bits, exactly if x is not finite.
FLASHGEN_DEVICE u32 not_finite_packed(bfloat16_t, u32 pair) {
  u32 bits;
  asm("fma.rn.bf16x2 %0, %1, %2, %2;" : "=r"(bits) : "r"(pair), "r"(0u));
  return bits;
}

}  // namespace flashgen
#endif
// ---- flashgen/scrubber.cuh
// Scrubbing: the warps beside the producer, which are otherwise idle, clear non-finite values (contain.cuh)
// from tiles of V that a mask cuts through. Cleared values become zeros, so that products with the tile
// spread nothing, and their places are recorded as bits. A product of these bits with the bits of allowed
// pairs finds the results that the non-finite values should have reached.

namespace flashgen {

// Which values of some rows of eight columns are not finite: bit i of words[w] is the i-th row's for column
// 2w, and sixteen further up for the next one.
struct RowBits {
  u32 words[4];

  FLASHGEN_DEVICE bool are_some() const { return (words[0] | words[1] | words[2] | words[3]) != 0; }
  FLASHGEN_DEVICE u16 of_column(i32 column) const {
    return static_cast<u16>(words[column / 2] >> column % 2 * 16);
  }
};

// Which values of a tile are not finite, as the lanes of a warp that multiplies with it read them: each has a
// row of bits, of its keys and of one column of every eight. Bit 2n + c of a column is key 8n + 2t + c for
// lane t of the four that share a row of scores, as in bits_from.
template <i32 rows, i32 cols>
struct NonFiniteBits {
  static_assert(rows % 16 == 0 && rows <= 128, "a lane has a word for its keys of a column");
  // Bytes of a lane per column: four, or two. 65 to 80 keys take four bits more, which are stored behind all
  // others: a word per lane and panel.
  static constexpr i32 own_bytes = rows > 80 ? 4 : 2;
  static constexpr bool has_more = rows > 64 && own_bytes == 2;
  static constexpr i32 eights = cols / 8;
  // 16-byte chunks of a lane's row of bits.
  static constexpr i32 chunks = ceil_div(eights * own_bytes, kChunkBytes);
  static constexpr i32 at_once = kChunkBytes / own_bytes;
  static constexpr i32 more_begin = kWarpSize * chunks * kChunkBytes;
  static constexpr i32 more_stride = 4 * kWarpSize;
  static constexpr i32 bytes = more_begin + (has_more ? ceil_div(eights, 8) * more_stride : 0);

  u8* base;

  // Chunks are swizzled, so that eight lanes read from different banks.
  static constexpr u32 place(u32 lane, u32 chunk) {
    constexpr u32 exchanged = smaller(chunks & -chunks, 8);
    return (lane * chunks + (chunk ^ lane / (8 / exchanged) % exchanged)) * kChunkBytes;
  }
  FLASHGEN_DEVICE Vec16 read(i32 lane, i32 chunk) const {
    return *reinterpret_cast<const Vec16*>(base + place(static_cast<u32>(lane), static_cast<u32>(chunk)));
  }
  FLASHGEN_DEVICE u32 read_more(i32 lane, i32 panel) const {
    if constexpr (!has_more) return 0;
    const u32 more = reinterpret_cast<const u32*>(base + more_begin + panel * more_stride)[lane];
    return static_cast<u32>(opaque(static_cast<i32>(more)));
  }
  // Eight bits from bit 8 * `part` on, for lane t of each four, of the eight columns with this number. The
  // last ones have zeros beside them, if there is room for others.
  FLASHGEN_DEVICE void write(u32 t, u32 eight, u32 part, const RowBits& non_finite) const {
    constexpr u32 parts = ceil_div(rows, 32);
    const u32 chunk = eight * own_bytes / kChunkBytes;
    u8* const own = base + eight * own_bytes % kChunkBytes + part;
    // Every eight lanes have the same swizzle.
    u8* const columns[2] = {own + place(t, chunk), own + place(t + 4, chunk)};
#pragma unroll
    for (i32 g = 0; g < 8; ++g) {
      u8* const at = columns[g % 2] + place(static_cast<u32>(g / 2 * 8), 0);
      if (parts < own_bytes && part + 1 == parts) {
        *reinterpret_cast<u16*>(at) = non_finite.of_column(g);
      } else {
        *at = static_cast<u8>(non_finite.of_column(g));
      }
    }
  }
  // The four that are more, and further up those of the next eight columns.
  FLASHGEN_DEVICE void write_more(u32 t, u32 eight, const RowBits& non_finite) const {
    u8* const own = base + more_begin + eight / 8 * more_stride + 4 * t + eight % 8 / 2;
#pragma unroll
    for (i32 g = 0; g < 8; ++g) own[16 * g] = static_cast<u8>(non_finite.of_column(g));
  }
};

// Makes NaN of those of a warp's results that attend to a non-finite value; the `allowed` pairs are bits of
// its two rows.
template <i32 rows, i32 cols>
FLASHGEN_DEVICE void mark_reached(Strip<cols>& out, NonFiniteBits<rows, cols> non_finite,
                                  const u32 (&allowed)[2], Thread thread) {
  using Bits = NonFiniteBits<rows, cols>;
  // With halves of words, those of the upper ones, too. Bits of other columns that are there besides meet
  // pairs that are not.
  u32 pairs[2][2];
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    pairs[0][h] = allowed[h] & ~0u >> (32 - rows / 4);
    pairs[1][h] = pairs[0][h] << 16 | pairs[0][h] >> 16 << 4;
  }
#pragma unroll
  for (i32 c = 0; c < Bits::chunks; ++c) {
    const Vec16 chunk = non_finite.read(thread.lane, c);
    // opaque() keeps one 16-byte load. The compiler would split it.
    const auto word = [&](i32 w) { return static_cast<u32>(opaque(static_cast<i32>(chunk.words[w]))); };
    const u32 words[4] = {word(0), word(1), word(2), word(3)};
    const u32 more = non_finite.read_more(thread.lane, c);
#pragma unroll
    for (i32 i = 0; i < smaller(Bits::at_once, Bits::eights - c * Bits::at_once); ++i) {
      constexpr i32 in_word = 4 / Bits::own_bytes;
      u32 bits = words[i / in_word];
      if constexpr (Bits::has_more) {
        // Beside a lower half, those of two columns where the upper one lies, and the other way round.
        const i32 lower = 8 * (i / 2), upper = lower - 16;
        bits = i % 2 == 0 ? (bits & 0xffffu) | ((upper < 0 ? more << -upper : more >> upper) & 0xffff0000u)
                          : (bits & 0xffff0000u) | (more >> lower & 0xffffu);
      }
      // The count starts at the bits of the largest float. Any increment makes infinity or NaN, and these
      // times zero are NaN. The zero is negative, so adding it changes no bit of other results.
      constexpr i32 largest = 0x7f7fffff;
      i32 common[4] = {largest, largest, largest, largest};
      mma_m16n8k128_bits(common, pairs[i % in_word], bits);
      float (&results)[4] = blocks_of(out)[0][c * Bits::at_once + i];
#pragma unroll
      for (i32 e = 0; e < 4; ++e)
        results[e] = fused_multiply_add(float_of(static_cast<u32>(common[e])), -0.0f, results[e]);
    }
  }
}

// The shared state of the producer, the scrubbing warps and the consumers. `stages` is the number of slots
// for tiles. Every lane that reads or writes shared memory arrives itself, rather than one lane for its warp,
// so that race detectors can follow the order.
//
// What is found in a tile is kept until all consumers have marked the results that it should have reached.
// There is one record (`non_finite_records`) for each slot, or one that all tiles use in turn.
template <class Tile, i32 stages, i32 non_finite_records>
struct Scrubber {
  static_assert(non_finite_records == 1 || non_finite_records == stages,
                "one record for each slot, or one for all");
  // The warps beside the producer.
  static constexpr i32 kFirstWarp = 1;
  static constexpr i32 kWarps = 3;
  // Behind the last tile.
  static constexpr i32 kNoSlot = 255;
  using Where = RingPlace<stages>;
  using Bits = NonFiniteBits<Tile::rows, Tile::cols>;

  alignas(16) u8 bits[non_finite_records][Bits::bytes];
  // TMA has written a tile to scrub, ...
  alignas(8) u64 brought[stages];
  // ... it has been scrubbed, which the producer waits for, ...
  u64 handed_on[stages];
  // ... and which consumers wait for; ...
  u64 scrubbed[non_finite_records];
  // ... and all consumers have marked their results.
  u64 marked[non_finite_records];
  // How many tiles have been sent. The thread that sends them has no register for it.
  u32 sent;
  // Whether each scrubbing warp has found a non-finite value in the tile.
  alignas(4) u8 found[non_finite_records][4];
  // The slot of each tile.
  u8 slots[stages];

  // Called by one thread.
  FLASHGEN_DEVICE void init(u32 markers) {
    for (i32 i = 0; i < stages; ++i) {
      mbarrier_init(shared_address(&brought[i]), 1);
      mbarrier_init(shared_address(&handed_on[i]), kWarps * kWarpSize);
    }
    for (i32 i = 0; i < non_finite_records; ++i) {
      mbarrier_init(shared_address(&scrubbed[i]), kWarps * kWarpSize);
      mbarrier_init(shared_address(&marked[i]), markers);
      found[i][kWarps] = 0;
    }
    sent = 0;
  }

  // ---- For the producer's thread: returns the barrier that counts the bytes of a tile.
  FLASHGEN_DEVICE u32 send(i32 slot) {
    const u32 place = sent % stages;
    mbarrier_wait(shared_address(&handed_on[place]), sent / stages % 2 ^ 1);
    slots[place] = static_cast<u8>(slot);
    ++sent;
    return shared_address(&brought[place]);
  }
  // Waits until all tiles sent so far are scrubbed.
  FLASHGEN_DEVICE void wait_scrubbed() const {
    if (sent > 0) mbarrier_wait(shared_address(&handed_on[(sent - 1) % stages]), (sent - 1) / stages % 2);
  }

  // ---- For the scrubbing warps: waits for the next tile, and returns its slot.
  FLASHGEN_DEVICE i32 receive(Where at) const {
    mbarrier_wait(shared_address(&brought[at.slot()]), at.parity());
    return slots[at.slot()];
  }
  // Whether an odd number of tiles have used this record. All scrubbing warps have recorded the last of them,
  // since its slot has been reused. None records this tile before all have asked.
  FLASHGEN_DEVICE bool is_odd(Where at, i32 slot) const {
    return non_finite_records == 1
               ? at.count % 2
               : mbarrier_test_wait(shared_address(&scrubbed[slot % non_finite_records]), 0);
  }
  // Each warp scrubs every third part of a tile, once the record's previous content is no longer needed.
  FLASHGEN_DEVICE void scrub(u8* tile, i32 slot, bool is_odd, Thread self) {
    const i32 record = slot % non_finite_records;
    mbarrier_wait(shared_address(&marked[record]), !is_odd);
    if (self.lane == 0) found[record][self.again().warp - kFirstWarp] = false;
    each_part(self, [&](auto part) {
      const Thread thread = self.again();
      const RowBits non_finite = scrub_part(part, tile, thread);
      if (warp_any(non_finite.are_some()) && thread.lane == 0) found[record][thread.warp - kFirstWarp] = true;
      write(part, non_finite, Bits{bits[record]}, thread);
    });
    // The tensor cores read the tile through the async proxy.
    fence_proxy_async_shared();
    mbarrier_arrive(shared_address(&scrubbed[record]));
  }
  // The warp that hands the tile on waits for the others.
  FLASHGEN_DEVICE void wait_for_all(i32 slot, bool is_odd) const {
    mbarrier_wait(shared_address(&scrubbed[slot % non_finite_records]), is_odd);
  }
  FLASHGEN_DEVICE void end_scrubbing(Where at) { mbarrier_arrive(shared_address(&handed_on[at.slot()])); }

  // ---- For one scrubbing warp and the consumers: what was found in the tile in a slot.
  FLASHGEN_DEVICE bool has_found(i32 slot) const {
    return *reinterpret_cast<const u32*>(found[slot % non_finite_records]) != 0;
  }
  FLASHGEN_DEVICE Bits record_of(i32 slot) { return {bits[slot % non_finite_records]}; }

  // ---- For every lane of the consumers, once the tile is full.
  FLASHGEN_DEVICE void begin_marking(i32 slot) const {
    // The phase of `marked` says how many tiles have used the record: nobody has ended marking this one yet.
    const bool is_odd = mbarrier_test_wait(shared_address(&marked[slot % non_finite_records]), 0);
    mbarrier_wait(shared_address(&scrubbed[slot % non_finite_records]), is_odd);
  }
  // Every lane calls this once for every tile, even one that its consumer skips.
  FLASHGEN_DEVICE void end_marking(i32 slot) {
    mbarrier_arrive(shared_address(&marked[slot % non_finite_records]));
  }

 private:
  using T = typename Tile::Element;

  // 32 rows of a panel, or those that are left.
  template <i32 eights_>
  struct Part {
    static constexpr i32 eights = eights_;
    i32 panel, number;
  };
  // A warp's parts: every third one.
  template <class Visit>
  FLASHGEN_DEVICE static void each_part(Thread self, const Visit& visit) {
    constexpr i32 whole = Tile::rows / 32, left = Tile::rows % 32 / 8;
    i32 i = self.again().warp - kFirstWarp;
#pragma unroll 1
    for (; i < whole * Tile::panels; i += kWarps) visit(Part<4>{i / whole, i % whole});
    if constexpr (left > 0) {
#pragma unroll 1
      for (; i < (whole + 1) * Tile::panels; i += kWarps) visit(Part<left>{i - whole * Tile::panels, whole});
    }
  }

  // Of every eight rows of a part each lane has a chunk of two, an even one and the next.
  struct Chunks {
    u8 *even, *odd;

    template <i32 eights>
    FLASHGEN_DEVICE static Chunks of(const Part<eights>& part, u8* tile, Thread thread) {
      // A number without a sign, as signs would cost instructions.
      const u32 lane = static_cast<u32>(thread.lane), row = lane / 8 * 2;
      // Where the swizzle puts the chunk of an even row, and the next one's beside it.
      const u32 place = lane % 8 ^ row;
      u8* const rows = tile + part.panel * Tile::panel_stride + 32 * part.number * kPanelBytes;
      u8* const even = rows + (row * kPanelBytes + place * kChunkBytes);
      return {even, even + kPanelBytes + (place % 2 == 0 ? kChunkBytes : -kChunkBytes)};
    }
    FLASHGEN_DEVICE Vec16& operator[](i32 i) const {
      return *reinterpret_cast<Vec16*>((i % 2 == 0 ? even : odd) + i / 2 * kSwizzleBytes);
    }
  };
  // Clears non-finite values to zeros of their sign, and returns which they were.
  template <i32 eights>
  FLASHGEN_DEVICE static RowBits scrub_part(const Part<eights>& part, u8* tile, Thread thread) {
    // Chunks loaded ahead. Beside three consumers, whose tiles have one panel, registers are scarcest.
    constexpr i32 ahead = Tile::panels == 1 ? 1 : 2, count = 2 * eights;
    const Chunks chunks = Chunks::of(part, tile, thread);
    RowBits non_finite = {};
    Vec16 read[ahead + 1];
#pragma unroll
    for (i32 i = 0; i < ahead; ++i) read[i] = chunks[i];
#pragma unroll
    for (i32 i = 0; i < count; ++i) {
      if (i + ahead < count) read[(i + ahead) % (ahead + 1)] = chunks[i + ahead];
      Vec16& own = read[i % (ahead + 1)];
#pragma unroll
      for (i32 w = 0; w < 4; ++w) {
        const u32 not_finite = not_finite_packed(T{}, own.words[w]);
        non_finite.words[w] |= not_finite & 0x10001u << i;
        own.words[w] &= ~not_finite;
      }
      chunks[i] = own;
    }
    return non_finite;
  }
  template <i32 eights>
  FLASHGEN_DEVICE static void write(const Part<eights>& part, RowBits non_finite, Bits bits, Thread thread) {
    const u32 lane = static_cast<u32>(thread.lane), t = lane / 8, chunk = lane % 8;
    const u32 eight = static_cast<u32>(8 * part.panel) + chunk;
    if (Bits::has_more && part.number == 2) {
      // The next lane's are those of the next eight columns.
#pragma unroll
      for (i32 w = 0; w < 4; ++w)
        non_finite.words[w] |= bits_of(shuffle_xor(float_of(non_finite.words[w]), 1)) << 4;
      if (chunk % 2 == 0) bits.write_more(t, eight, non_finite);
    } else if (eight < Bits::chunks * Bits::at_once) {
      bits.write(t, eight, static_cast<u32>(part.number), non_finite);
    }
  }
};

}  // namespace flashgen

// ---- kernels/forward_sm90.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr ForwardSm90Config kConfig{
    .head_dim = 128,
    .head_dim_v = 128,
    .tile_q = 128,            // B_r: query rows per block
    .tile_kv = 128,           // B_c: keys per step
    .stages = 2,              // slots for V
    .k_slots = 2,             // slots for K
    .non_finite_records = 1,  // tiles of V with a record of non-finite values
    .q_rows = 128,            // query rows in a slot: a tile, or one consumer's part
    .q_slots = 2,             // slots for Q
    .tile_slots = 2,          // slots of the ring that announces tiles of queries
    .consumers = 2,           // warpgroups that compute, 64 query rows each
    .producer_registers = 40,
    .consumer_registers = 232,
    .section_heads = 32,           // heads of a section, whose tiles are scheduled together
    .doubles_to = 640,             // keys up to which the last section has twice as many heads
    .longest_first = true,         // the last queries of a head go first
    .running_maximum = false,      // exponentials relative to the maximum so far
    .keeps_scores = true,          // P does not overwrite S
    .bounds_growth = false,        // the cap bounds how far row maxima can grow
    .computes_before_wait = true,  // exponentials overlap the products
    .packs_statistics = false,     // row statistics of a finished tile take one register per lane
    .ends_alone = false,           // the last P V of a tile is issued without the next scores
    .prefetches_next_k = true,     // the next tile's first K is loaded before the last V
    .draws_late = true,            // the next tile is drawn when few tiles of keys are left
    .has_lower = false,            // the band has a lower bound on k - q
    .has_upper = true,             // the band has an upper bound on k - q
};

struct Params {
  TensorMap q_map;  // for TMA
  TensorMap k_map;
  TensorMap v_map;
  TensorMap o_map;
  const element_t* v;
  element_t* o;
  float* lse;    // log-sum-exp, (batch, heads_q, len_q)
  u32* counter;  // tiles drawn, then blocks done; 0 between launches
  i64 v_batch;   // strides are in elements
  i64 v_row;
  i64 v_head;
  i64 o_batch;
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

namespace smem {
constexpr u32 kQ = 0;               // Q_i, 2 slots of 128 rows
constexpr u32 kK = 65536;           // K_j, 2 slots
constexpr u32 kV = 131072;          // V_j, 2 slots
constexpr u32 kO = 196608;          // O_i, to be stored
constexpr u32 kScrubber = 229376;   // non-finite values of V_j, as bits
constexpr u32 kQBarriers = 231488;  // full and empty barriers of each slot
constexpr u32 kKBarriers = 231520;
constexpr u32 kVBarriers = 231552;
constexpr u32 kTileBarriers = 231584;
constexpr u32 kTiles = 231616;           // the next tiles of queries
constexpr u32 kKeyBlockRanges = 231648;  // the range of key tiles of each consumer
constexpr u32 kRecomputes = 231776;      // tiles of queries to recompute if V is not finite

}  // namespace smem

using Logits = ScaledProducts;
using Shape = ForwardSm90Shape<kConfig, element_t, Logits>;
using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using QRing = Ring<kConfig.q_slots>;
using KRing = Ring<kConfig.k_slots>;
using VRing = Ring<kConfig.stages>;
using TileRing = Ring<kConfig.tile_slots>;
using TileRecomputes = RecomputeList<kConfig.tile_slots, Shape::consumer_warps>;
using ValueScrubber = Scrubber<Shape::VTile, kConfig.stages, kConfig.non_finite_records>;

// Everything that the warps of a block share.
struct Shared {
  u8* base;
  Shape::QTile q;
  Shape::KTile k;
  Shape::VTile v;
  QRing q_ring;
  KRing k_ring;
  VRing v_ring;
  TileRing tile_ring;
  RowTile* tiles;  // what the slots of tile_ring hold

  FLASHGEN_DEVICE static Shared at(u8* base) {
    const u32 start = shared_address(base);
    return {base,
            {start + smem::kQ},
            {start + smem::kK},
            {start + smem::kV},
            {start + smem::kQBarriers},
            {start + smem::kKBarriers},
            {start + smem::kVBarriers},
            {start + smem::kTileBarriers},
            reinterpret_cast<RowTile*>(base + smem::kTiles),
    };
  }
  FLASHGEN_DEVICE KeyBlockRange& key_blocks(TileRing::Where at, i32 consumer) const {
    return reinterpret_cast<KeyBlockRange*>(base + smem::kKeyBlockRanges)[at.slot() * kConfig.consumers + consumer];
  }
  static_assert(smem::kScrubber + sizeof(ValueScrubber) <= smem::kQBarriers, "the plan leaves room for scrubbing");
  FLASHGEN_DEVICE ValueScrubber& scrubber() const { return *reinterpret_cast<ValueScrubber*>(base + smem::kScrubber); }
  FLASHGEN_DEVICE TileRecomputes& recomputes() const {
    return *reinterpret_cast<TileRecomputes*>(base + smem::kRecomputes);
  }
};

FLASHGEN_DEVICE Mask mask_of(const Params& p, const RowTile& rows) {
  return Mask::of(p, rows.sequence, rows.head);
}
FLASHGEN_DEVICE i32 end_q(const Params& p, const RowTile& rows) {
  return smaller(rows.first_q + kConfig.tile_q, p.len_q);
}

// The tiles of keys between the first and the last that some query of the tile may attend to. At least one, because
// a tile that attends to nothing has results too.
FLASHGEN_DEVICE Range keys_of(const Params& p, const RowTile& rows) {
  const Range keys = mask_of(p, rows).key_tiles(rows.first_q, end_q(p, rows), kConfig.tile_kv);
  return {keys.begin, larger(keys.begin + 1, keys.end)};
}

// Whether the mask cuts through a tile of keys for some query of the tile, so that its values may need scrubbing. The
// end of the keys does not count: zeros lie beyond it.
FLASHGEN_DEVICE bool is_cut(const Params& p, const RowTile& rows, i32 key_tile) {
  const i32 first_key = key_tile * kConfig.tile_kv;
  return !mask_of(p, rows).is_full(rows.first_q, end_q(p, rows), first_key,
                                   smaller(first_key + kConfig.tile_kv, p.len_kv));
}

// The queries of one consumer, at least one row.
FLASHGEN_DEVICE Range queries_of(const Params& p, const RowTile& rows, i32 consumer) {
  const i32 row = rows.first_q + consumer * kWarpgroupRows;
  return {row, larger(row + 1, smaller(row + kWarpgroupRows, p.len_q))};
}
FLASHGEN_DEVICE KeyBlockRange key_blocks_of(const Params& p, const RowTile& rows, i32 consumer) {
  const Range queries = queries_of(p, rows, consumer);
  // Rows beyond the last query attend to nothing.
  const bool are_some = queries.begin < p.len_q;
  const Range keys =
      are_some ? mask_of(p, rows).key_tiles(queries.begin, queries.end, kConfig.tile_kv) : Range{0, 0};
  return {keys_of(p, rows), keys, mask_of(p, rows).full_key_tiles(queries.begin, queries.end, kConfig.tile_kv)};
}

// A warp's position in the stream of steps: tile of queries after tile of queries, and for each of them its
// tiles of keys from the last to the first.
struct Follower {
  // Which consumer it is, and the consumer's key blocks for the tile of queries that was begun last.
  i32 consumer;
  KeyBlockRange key_blocks;
  TileRing::Where tile_at;
  KRing::Where k_at;
  VRing::Where v_at;
  // From this kind of tile of queries on, V is used as loaded. Opaque: compilers would copy the stream per constant.
  i32 plain = opaque(kPlainTile);

  FLASHGEN_DEVICE Step next_tile(const Params& p, const Shared& shared, Thread thread) {
    shared.tile_ring.wait_full(tile_at);
    key_blocks = shared.key_blocks(tile_at, consumer);
    Step step = {shared.tiles[tile_at.slot()], 0, 0};
    mbarrier_arrive(shared.tile_ring.empty(tile_at));
    tile_at.advance();
    if (step.exists()) {
      const Range keys = key_blocks.tile_keys;
      step.key_tile = keys.end - 1;
      step.last_key_tile = keys.begin;
    }
    return step;
  }

  // The step after `step`, once k_at has passed its keys. After a step that does not exist, the first one.
  FLASHGEN_DEVICE Step after(const Step& step, const Params& p, const Shared& shared, Thread thread) {
    if (step.is_last()) return next_tile(p, shared, thread);
    Step next = step;
    next.continues = 1;
    --next.key_tile;
    return next;
  }

  // After the last step: the first step of the tiles of queries to recompute, if any are still to come.
  FLASHGEN_DEVICE Step once_more(const Params& p, const Shared& shared, Thread thread) {
    const bool have_come = shared.recomputes().have_come();
    shared.recomputes().settle();
    if (have_come || !shared.recomputes().are_left(thread)) return {};
    return next_tile(p, shared, thread);
  }
};

// ---- The producer: one warp that draws tiles of queries and issues the bulk copies of Q, K and V. Only one lane waits
// and copies: another lane that came late to a barrier could miss a phase.
FLASHGEN_DEVICE void produce(const Params& p, const Shared& shared, Thread thread) {
  const bool elected = thread.lane == 0;
  QRing::Where q_at;
  KRing::Where k_at;
  VRing::Where v_at;
  TileRing::Where tile_at;
  // Whether any block has found non-finite values, as far as this one knows.
  bool has_non_finite = false;

  // Loads parts of a tile of queries, each as soon as its slot is free.
  const auto load_queries = [&](const RowTile& rows, i32 begin, i32 end) {
    for (i32 i = begin; i < end; ++i) {
      if (elected) {
        shared.q_ring.wait_empty(q_at);
        mbarrier_arrive_expect_tx(shared.q_ring.full(q_at), Shape::QTile::bytes);
        const u32 full = shared.q_ring.full(q_at);
        const i32 row = rows.first_q + i * kConfig.q_rows;
        shared.q.slot(q_at.slot()).load(p.q_map, full, row, rows.head, rows.sequence);
      }
      q_at.advance();
    }
  };
  // Loads a tile of values once its slot is free; it may need scrubbing.
  const auto load_values = [&](i32 tile, i32 head, i32 sequence, bool is_scrubbed) {
    if (elected) {
      shared.v_ring.wait_empty(v_at);
      u32 full = shared.v_ring.full(v_at);
      if (is_scrubbed) full = shared.scrubber().send(v_at.slot());
      mbarrier_arrive_expect_tx(full, Shape::VTile::bytes);
      shared.v.slot(v_at.slot()).load(p.v_map, full, tile * kConfig.tile_kv, head, sequence);
    }
    v_at.advance();
  };
  // Draws the number of the next tile of queries.
  const auto draw = [&]() {
    if (shared.recomputes().repeats()) return shared.recomputes().draw();
    return draw_tile(p);
  };
  // Announces the next tile to all warps, and loads those of its queries that have room.
  const auto announce = [&](i32 drawn) {
    const i32 number = drawn & ~kWarning;
    has_non_finite |= (drawn & kWarning) != 0;
    RowTile rows = {};
    if (number < p.tiles) {
      // If keys are short, K and V of more heads stay in the cache.
      const i32 last_heads = (p.len_kv <= kConfig.doubles_to * p.group ? 2 : 1) * kConfig.section_heads;
      const SectionPlace place = place_in_sections<kConfig.section_heads>(number, p.tiles, p.q_tiles, last_heads);
      rows = row_tile_at<kConfig.tile_q, true>(p, place);
    }
    // The end is announced only when it is known that no tile is recomputed before it.
    if (!rows.exists) return rows;
    if (elected) shared.recomputes().note(number);
    if (thread.lane < kConfig.consumers) shared.tile_ring.wait_empty(tile_at);
    // All consumer warps have read the slot's previous content.
    warp_sync();
    has_non_finite |= shared.recomputes().has_reports(thread);
    if (has_non_finite) {
      rows.exists = kScrubbedTile;
    } else {
      rows.exists = kPlainTile;
      if (elected) shared.recomputes().count_unscrubbed();
    }
    // One lane for each consumer's key blocks. Each lane arrives, so none can miss a phase.
    if (thread.lane < kConfig.consumers) {
      shared.key_blocks(tile_at, thread.lane) = key_blocks_of(p, rows, thread.lane);
      if (elected) shared.tiles[tile_at.slot()] = rows;
      mbarrier_arrive(shared.tile_ring.full(tile_at));
    }
    tile_at.advance();
    load_queries(rows, 0, Shape::q_parts_ahead);
    return rows;
  };
  // Announces that there is no further tile.
  const auto announce_end = [&]() {
    if (thread.lane < kConfig.consumers) {
      shared.tile_ring.wait_empty(tile_at);
      shared.key_blocks(tile_at, thread.lane) = {};
      if (elected) shared.tiles[tile_at.slot()] = {};
      mbarrier_arrive(shared.tile_ring.full(tile_at));
    }
    tile_at.advance();
  };
  // After the last tile of queries: whether some are recomputed. Usually it is known by then which ones, and they
  // follow at once. Otherwise they follow when all warps are done.
  const auto begins_again = [&]() {
    const bool is_again = warp_any(elected && shared.recomputes().repeats());
    const bool are_known = warp_any(elected && shared.recomputes().are_known(tile_at.count));
    if (is_again || !are_known) {
      announce_end();
      if (is_again || !shared.recomputes().are_left(thread)) return false;
    }
    if (elected) shared.recomputes().repeat();
    warp_sync();
    return true;
  };

  // The values of a step are loaded after the keys of the next one. With prefetches_next_k that holds across tiles of
  // queries too. These say which tile of values is still to be loaded, if any, and of which head.
  i32 values_left = -1, left_head = 0, left_sequence = 0;
  bool left_is_scrubbed = false;

  // Tiles of queries, each with its keys and values. One without keys stands before the first, so that the next one
  // is announced in one place: compilers make a copy of each, and take their time for it.
  RowTile rows = {};
  i32 drawn = block_idx_x();
  for (;;) {
    const i32 head_kv = rows.head / p.group;
    Range keys = {0, 0};
    if (rows.exists) keys = keys_of(p, rows);
    const auto load_keys = [&](i32 tile) {
      if (elected) {
        shared.k_ring.wait_empty(k_at);
        mbarrier_arrive_expect_tx(shared.k_ring.full(k_at), Shape::KTile::bytes);
        const u32 full = shared.k_ring.full(k_at);
        shared.k.slot(k_at.slot()).load(p.k_map, full, tile * kConfig.tile_kv, head_kv, rows.sequence);
      }
      k_at.advance();
    };
    const auto is_scrubbed = [&](i32 tile) {
      return rows.exists == kScrubbedTile && is_cut(p, rows, tile);
    };
    // Without prefetches_next_k the head and the tile are known, which saves registers.
    const auto load_values_left = [&](i32 tile) {
      const i32 left = kConfig.prefetches_next_k ? values_left : tile + 1 < keys.end ? tile + 1 : -1;
      if (left < 0) return;
      load_values(left, kConfig.prefetches_next_k ? left_head : head_kv, kConfig.prefetches_next_k ? left_sequence : rows.sequence, kConfig.prefetches_next_k ? left_is_scrubbed : is_scrubbed(left));
      values_left = -1;
    };
    RowTile next = {};
    bool announced = false;
#pragma unroll 1
    for (i32 tile = keys.end - 1;; --tile) {
      const bool is_over = tile < keys.begin, is_first = tile + 1 == keys.end;
      if (!is_over) {
        load_keys(tile);
        // Drawn late, no block has a tile waiting that another could begin.
        const bool draws = kConfig.draws_late && tile == smaller(keys.begin + 2, keys.end - 1);
        if (draws && elected) drawn = draw();
      }
      // The last values may wait until the next tile's first keys are loaded, unless the next queries get a slot only
      // after those values.
      if (!is_over || !kConfig.prefetches_next_k || !announced || !next.exists) load_values_left(tile);
      // The next tile's queries are loaded as soon as all copies that free their slots are issued. Queries without a
      // slot follow the first keys, which have room sooner.
      if (!is_over && is_first) load_queries(rows, Shape::q_parts_ahead, Shape::q_parts);
      const bool is_time = !kConfig.draws_late || tile <= keys.begin + 1;
      if (!announced && (is_over || (!is_first && kConfig.q_slots > 1 && is_time))) {
        next = announce(shuffle(drawn, 0));
        announced = true;
      }
      if (is_over) break;
      values_left = tile;
      left_head = head_kv;
      left_sequence = rows.sequence;
      left_is_scrubbed = is_scrubbed(tile);
    }
    rows = next;
    if (!rows.exists) {
      if (!begins_again()) break;
    }
    if (elected && (!kConfig.draws_late || !rows.exists)) drawn = draw();
  }
  if (elected) {
    // The block resets the counters only after its last warning.
    shared.scrubber().wait_scrubbed();
    mbarrier_arrive(shared.scrubber().send(ValueScrubber::kNoSlot));
  }
  if (elected) leave_counters(p);
}

// ---- The scrubbing warps: three warps beside the producer, idle until non-finite values may exist. They clear the non-finite values
// from the tiles of V that the producer sends them, and hand the tiles on to the consumers.
FLASHGEN_DEVICE void scrub(const Params& p, const Shared& shared, Thread thread) {
  ValueScrubber& scrubber = shared.scrubber();
  ValueScrubber::Where at;
  bool has_warned = false;
  for (;;) {
    const i32 slot = scrubber.receive(at);
    if (slot == ValueScrubber::kNoSlot) return;
    const bool is_odd = scrubber.is_odd(at, slot);
    scrubber.scrub(shared.base + smem::kV + slot * Shape::VTile::bytes, slot, is_odd, thread);
    if (thread.index() == ValueScrubber::kFirstWarp * kWarpSize) {
      scrubber.wait_for_all(slot, is_odd);
      const bool has_found = scrubber.has_found(slot);
      if (has_found && !has_warned) {
        shared.recomputes().report_found();
        warn_all(p);
      }
      has_warned |= has_found;
      mbarrier_arrive(shared.v_ring.full_of(slot));
    }
    scrubber.end_scrubbing(at);
    at.advance();
  }
}

// ---- A consumer: a warpgroup that owns 64 of the tile's queries.
FLASHGEN_DEVICE void consume(const Params& p, const Shared& shared, Thread thread) {
  const Thread self = thread;
  // Which consumer this is, and where its warps' rows begin within a tile of queries.
  const i32 consumer = thread.warp / 4 - 1;
  const i32 strip_row = consumer * kWarpgroupRows;
  const i32 warp_row = strip_row + thread.warp % 4 * 16;
  Follower at = {consumer};
  QRing::Where q_at;
  q_at.advance(consumer % Shape::q_parts);

  Shape::Scores scores;
  Shape::Output out;
  Shape::Softmax softmax;

  // Line 5: O_i = 0, l_i = 0, m_i = -inf.
  // Whether reference maxima may move in the next tile of keys. A vote in each step would come between its last
  // products and delay the next consumer's.
  bool is_due = true;
  const auto begin_rows = [&](const Step& step) {
    softmax.reset();
    is_due = true;
  };
  // Whether some pair of a step is not allowed. Rows beyond the last query are computed with the others, but never
  // written.
  const auto needs_mask = [&](const Step& step) {
    if (!at.key_blocks.full_keys.has(step.key_tile)) return true;
    return (step.key_tile + 1) * kConfig.tile_kv > p.len_kv;
  };
  // The warp scheduler barriers of FlashAttention-3: warpgroups issue products in turn, so that one multiplies while
  // another computes exponentials.
  const auto warp_scheduler_barrier_sync = [&]() {
    named_barrier_sync(1 + consumer, 2 * kWarpgroupSize);
  };
  const auto warp_scheduler_barrier_arrive = [&]() {
    named_barrier_arrive(1 + (consumer + 1) % kConfig.consumers, 2 * kWarpgroupSize);
  };
  const auto multiply_keys = [&]() {
    // With one slot the descriptors of Q_i are the same in every step. Opaque, so that they are not kept in registers.
    const i32 row = strip_row % kConfig.q_rows, first_row = kConfig.q_slots > 1 ? row : opaque(row);
    issue_scores(scores, shared.q.slot(q_at.slot()).from_row(first_row), shared.k.slot(at.k_at.slot()));
  };
  // K_j, and with the last one Q_i, are no longer needed.
  const auto release_keys = [&](const Step& step) {
    shared.k_ring.release(at.k_at, thread);
    at.k_at.advance();
    if (step.is_last()) {
      shared.q_ring.release(q_at, thread);
      q_at.advance(Shape::q_parts);
    }
  };
  // Whether V_j is scrubbed of non-finite values, because the mask cuts through it for some query of the tile.
  const auto is_scrubbed = [&](const Step& step) {
    return step.rows.exists < at.plain && is_cut(p, step.rows, step.key_tile);
  };
  // Replaces the scores of pairs that the mask forbids.
  const auto apply_mask = [&](const Step& step, float forbidden) {
    const i32 row = step.rows.first_q + warp_row, key = step.key_tile * kConfig.tile_kv;
    if (needs_mask(step)) mask_keys(blocks_of(scores), forbidden, mask_of(p, step.rows), row, key, thread);
  };
  // The bits of the pairs that the mask allows.
  const auto find_pairs = [&](u32 (&allowed)[2], const Step& step, Thread thread) {
    const i32 row = step.rows.first_q + (thread.warp - 4) * 16, key = step.key_tile * kConfig.tile_kv;
    find_allowed<kConfig.tile_kv / 8>(allowed, mask_of(p, step.rows), row, key, thread);
  };
  // Whether the mask may forbid pairs or reference maxima may move. In most steps neither holds, so one branch tests
  // both. It is computed while the scores are under way: what comes between them and the next products delays every step.
  const auto needs_check = [&](const Step& step) { return opaque(needs_mask(step) || is_due) != 0; };
  // S_ij has come. Lines 9 and 10: P_ij and l_i; whether O_i is to be multiplied by `softmax.factor`.
  const auto take_scores = [&](const Step& step, Shape::Probabilities& probabilities, bool checks) {
    wgmma_pin(scores);
    release_keys(step);
    Logits logits{p.scale_log2};
    bool rescales = false;
#pragma unroll 1
    for (;;) {
      if (checks) {
        apply_mask(step, -kInfinity);
        rescales = softmax.update_reference_max(scores, logits);
        is_due = warp_any(!softmax.is_settled());
      }
      softmax.exponentiate(scores, probabilities, logits);
      if (!warp_any(softmax.has_grown()) || softmax.watches()) break;
      checks = true;
    }
    softmax.add(shared.q.address);
    return rescales;
  };
  // Lines 12 to 15: O_i = diag(l_i)^-1 O_i, L_i = m_i + log(l_i), and both to global memory.
  const auto write_rows = [&](const Step& step, Shape::Finished finished) {
    // Addresses are computed here, rather than kept in registers throughout.
    const Thread thread = self.again();
    const i32 warp_row = (thread.warp - 4) * 16;
    const RowStatistics rows = finished.rows(thread);
    const RowTile& tile = step.rows;
    const i32 row = tile.first_q + warp_row;
    // The next tile has been read from the ring.
    const i32 tile_number = static_cast<i32>(at.tile_at.count) - 2;
    const bool is_plain = step.rows.exists == kPlainTile;
    if (is_plain && warp_any(!is_finite_row(out, 0)) && warp_any(shows_non_finite(out, rows.sum))) {
      if (shared.recomputes().report(tile_number, thread)) warn_all(p);
    }
    const float normalizers[2] = {rows.normalizer(0), rows.normalizer(1)};
    // By TMA, 16 rows per warp. They have left shared memory before the next ones are written there.
    const Shape::OTile o_tile{shared_address(shared.base + smem::kO)};
    if (thread.lane == 0) {
      // A recomputed tile's results are written after its first ones.
      if (is_plain) {
        bulk_wait_read<0>();
      } else {
        bulk_wait<0>();
      }
    }
    warp_sync();
    store_strip(o_tile, warp_row, out, normalizers, thread);
    fence_proxy_async_shared();
    warp_sync();
    if (thread.lane == 0 && row < p.len_q) {
      o_tile.from_row(warp_row).store(p.o_map, row, tile.head, tile.sequence);
      bulk_commit();
    }
    // After the results, whose copy begins with a wait for all previous stores.
    if (thread.column() == 0) {
      float* const lse = p.lse + (static_cast<i64>(tile.sequence) * p.heads_q + tile.head) * p.len_q + row;
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        if (row + 8 * h + thread.row() < p.len_q) lse[8 * h + thread.row()] = rows.log_sum_exp(h, Logits{p.scale_log2});
      }
    }
    // Lanes have reconverged. Without this the assembler takes them for divergent from here on.
    warp_sync();
  };

  clear(out);
  // The first consumer may issue products at once.
  if (consumer == kConfig.consumers - 1) warp_scheduler_barrier_arrive();
  const auto release_values = [&]() {
    shared.v_ring.release(at.v_at, thread);
    at.v_at.advance();
  };
  // The step whose probabilities are ready and whose values are not yet multiplied, if any, and the next step.
  Step step = Step::none();
  Step next = at.next_tile(p, shared, thread);
  begin_rows(next);
  Shape::Finished finished = {};
  bool checks = false;

  // Line 10: O_i += P_ij V_j.
  const auto multiply_values = [&](const Shape::Probabilities& probabilities) {
    const Shape::VTile values = shared.v.slot(at.v_at.slot());
    issue_output_in_fours(out, probabilities, values, step.continues != 0);
    warp_scheduler_barrier_arrive();
  };
  // The first scores overlap nothing, and need no warp scheduler barrier.
  const auto begin = [&]() {
    step = Step::none();
    shared.q_ring.wait_full(q_at);
    shared.k_ring.wait_full(at.k_at);
    multiply_keys();
    checks = needs_check(next);
    wgmma_wait<0>();
  };
  // The scores of `next` have come: probabilities of them, while the values before are multiplied.
  const auto take_in = [&](Shape::Probabilities& probabilities) {
    const bool rescales = take_scores(next, probabilities, checks);
    wgmma_wait<0>();
    wgmma_pin(out);
    if (step.exists()) release_values();
    Shape::Softmax::round(probabilities, scores);
    if (step.is_last()) {
      write_rows(step, finished);
    } else if (rescales) {
      scale_rows(out, softmax.factor);
    }
    step = next;
  };
  // The scores of the next step, perhaps the first ones of the next tile, ...
  const auto multiply_next_keys = [&](bool are_first) {
    if (are_first) shared.q_ring.wait_full(q_at);
    shared.k_ring.wait_full(at.k_at);
    // Line 8: S_ij = Q_i K_j^T.
    warp_scheduler_barrier_sync();
    multiply_keys();
  };
  // ... and the work to do while products are under way.
  const auto prepare_next = [&](bool ends) {
    finished = {};
    if (ends) {
      finished = Shape::Finished::of(softmax.rows, thread);
      begin_rows(next);
    }
    checks = needs_check(next);
  };
  // For a step with scrubbed values, before they are multiplied: results that non-finite values should have reached become
  // NaN, and stay NaN whatever is added.
  const auto mark = [&]() {
    shared.v_ring.wait_full(at.v_at);
    const i32 slot = at.v_at.slot();
    shared.scrubber().begin_marking(slot);
    if (step.continues == 0) clear(out);
    step.continues = 1;
    if (warp_any(shared.scrubber().has_found(slot))) {
      const Thread thread = self.again();
      u32 allowed[2];
      find_pairs(allowed, step, thread);
      mark_reached(out, shared.scrubber().record_of(slot), allowed, thread);
    }
    shared.scrubber().end_marking(slot);
  };
  // Whether the next step's scores are computed together with this step's values.
  const auto goes_on = [&]() {
    next = at.after(step, p, shared, thread);
    // One test suffices in most steps.
    if (smaller(step.rows.exists, next.rows.exists) < at.plain) {
      if (warp_any(is_scrubbed(step))) {
        mark();
      } else if (!step.is_last()) {
        // The tiles that the mask cuts come first.
        next.rows.exists = kSeenTile;
      }
      if (!next.exists()) return false;
    }
    return true;
  };
  // A step's values and the scores of the next one.
  const auto multiply_both = [&](const Shape::Probabilities& probabilities) {
    const bool ends = step.is_last();
    multiply_next_keys(ends);
    shared.v_ring.wait_full(at.v_at);
    multiply_values(probabilities);
    prepare_next(ends);
    wgmma_wait<1>();
  };
  // A step's values alone.
  const auto multiply_alone = [&](const Shape::Probabilities& probabilities) {
    shared.v_ring.wait_full(at.v_at);
    warp_scheduler_barrier_sync();
    multiply_values(probabilities);
    wgmma_wait<0>();
    wgmma_pin(out);
  };
  // After the last step there may be tiles of queries to recompute.
  const auto end_stream = [&]() {
    next = at.once_more(p, shared, thread);
    begin_rows(next);
  };

  // The stream is one run of steps. That it is a loop, though hardly ever taken twice, tells the
  // assembler that warps do not diverge here, and saves it a copy of each descriptor.
  Shape::Probabilities probabilities;
  while (next.exists()) {
    begin();
    take_in(probabilities);
    // Two steps in the loop's body, so that one reads the registers that the other writes.
    Shape::Probabilities odd;
    if (goes_on()) {
      for (;;) {
        multiply_both(probabilities);
        take_in(odd);
        if (!goes_on()) {
          take_over(probabilities, odd, p.len_q);
          break;
        }
        multiply_both(odd);
        take_in(probabilities);
        if (!goes_on()) break;
      }
    }
    multiply_alone(probabilities);
    release_values();
    if (step.is_last()) {
      write_rows(step, Shape::Finished::of(softmax.rows, thread));
      if (next.exists()) begin_rows(next);
    }
    if (!next.exists()) end_stream();
  }
  // Every arrival needs a sync: the first consumer completes the last one. Until here no register holds which consumer
  // this is.
  if (self.again().warp / 4 == 1) warp_scheduler_barrier_sync();
  if (thread.lane == 0) bulk_wait<0>();
}

FLASHGEN_KERNEL(384, 1) forward_d128_causal_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  const Thread thread = Thread::current();
  const Shared shared = Shared::at(base);
  if (thread.index() == 0) {
    constexpr u32 consumer_warps = Shape::consumer_warps;
    shared.q_ring.init(1, Shape::q_readers);
    shared.k_ring.init(1, consumer_warps);
    shared.v_ring.init(1, consumer_warps);
    // All lanes read a slot that announces a tile of queries, and each releases it.
    shared.tile_ring.init(kConfig.consumers, kWarpSize * consumer_warps);
    shared.recomputes().init_barriers();
    shared.scrubber().init(kWarpSize * consumer_warps);
    fence_mbarrier_init();
  }
  if (thread.warp == 2) shared.recomputes().begin(thread);
  if (thread.index() == kWarpSize) {
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
  }
  block_sync();
  // The previous grids may run until here, and the next one may start from here on.
  griddep_wait();
  griddep_launch_dependents();

  // Registers that the copying warps do not need go to the consumers.
  if (thread.warp >= 4) {
    setmaxnreg_inc<kConfig.consumer_registers>();
    consume(p, shared, thread);
  } else {
    setmaxnreg_dec<kConfig.producer_registers>();
    if (thread.warp == 0) {
      produce(p, shared, thread);
    } else {
      scrub(p, shared, thread);
    }
  }
}
