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
//            dq             180224 to 212992  dQ_i, and at the end dK_j and dV_j, to be stored
//            sums           212992 to 225280  rows of dQ_i to be scaled and rounded, 3 slots
//            dq_rows        225280 to 227328  rounded rows of dQ_i
//            zeros          227328 to 229376  zeros that clear the sum of dQ
//            lse            229376 to 230144  -L_i in units of S, 3 slots
//            dsum           230144 to 230656  -D_i, 2 slots
//            k_barriers     230656 to 230672  full and empty barriers of each slot
//            v_barriers     230784 to 230800
//            q_barriers     230912 to 230960
//            do_barriers    231040 to 231072
//            ds_barriers    231168 to 231200
//            sum_barriers   231296 to 231344
//            turn_barriers  231424 to 231440
//            sum_parts      231552 to 231648  the part of dQ in each slot
//            tile_barriers  231680 to 231712
//            tiles          231808 to 231840  the next tiles of keys
// because  dK and dV take half of the registers, which leaves them for 64 queries
//
// contents   86  Integer and 16-bit element types, without any CUDA header.
//           108  What the CUDA language itself provides, under names that the emulator implements on the host.
//           146  Moving data.
//           158  Scalar arithmetic, one instruction each.
//           181  Warp-wide matrix instructions.
//           193  Element types.
//           244  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//           249  Warp-level matrix products.
//           268  Banded masks.
//           329  Which pairs a mask allows, as bits.
//           391  Arithmetic on pairs of 16-bit numbers packed in a word (sm_90).
//           407  Barriers at which threads may arrive without waiting, or wait without arriving.
//           413  The kernel: its configuration, parameters and text.
//           434  The kernel: its configuration, parameters and text.
//           467  The kernel: its configuration, parameters and text.
//           487  Tensor maps, which describe tensors to bulk copies of boxes.
//           496  Bulk copies.
//           501  The kernel: its configuration, parameters and text.
//           532  The kernel: its configuration, parameters and text.
//           541  The kernel: its configuration, parameters and text.
//           557  Communication between blocks and between grids.
//           561  The kernel: its configuration, parameters and text.
//           603  The kernel: its configuration, parameters and text.
//           605  Reallocation of registers among warpgroups (sm_90a).
//           620  The 64-bit descriptor of an operand of wgmma in shared memory.
//           655  Matrix products of a warpgroup (sm_90a).
//           912  Four products of a warpgroup, which add to the same accumulators, as one asm statement.
//           921  Tiles as TMA writes them and wgmma reads them.
//          1075  Writing a warpgroup's results to shared and global memory.
//          1095  A step of the backward pass in chunks.
//          1165  Walking over the tiles that a mask does not rule out.
//          1202  The loop over the tiles of queries of a group of heads, for kernels whose block keeps one tile of keys.
//          1281  A step of the backward kernels for Hopper.
//          1298  Keeping NaN and infinity where they belong.
//          1322  Accumulators of a warp's 16 rows in memory, in the layout of its lanes.
//          1343  Rings of slots in shared memory, filled by one side and emptied by the other.
//          1407  Which tiles of queries, or of keys, a persistent block works on, in order.
//          1472  The parts of the backward kernel for Hopper that computes dK, dV and dQ together.
//          1597  The kernel: its configuration, parameters and text.
//          1631  The kernel: its configuration, parameters and text.
//          1670  The kernel: its configuration, parameters and text.
//          1861  The kernel: its configuration, parameters and text.
//          1946  The kernel: its configuration, parameters and text.
//          2007  The kernel: its configuration, parameters and text.
//          2272  The kernel: its configuration, parameters and text.
//          2303  The kernel: its configuration, parameters and text.
//          2351  The kernel: its configuration, parameters and text.

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
FLASHGEN_DEVICE i32 block_idx_y() { return static_cast<i32>(blockIdx.y); }
FLASHGEN_DEVICE i32 block_idx_z() { return static_cast<i32>(blockIdx.z); }
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

// ---- flashgen/ptx/copy.cuh
// Moving data: asynchronous global-to-shared copies and reductions to global memory.

FLASHGEN_DEVICE void reduce_add(float* address, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// This works for signed numbers too, in two's complement.
FLASHGEN_DEVICE void reduce_add(u64* address, u64 value) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
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

FLASHGEN_DEVICE float to_float(bfloat16_t x) { return float_of(static_cast<u32>(x.bits) << 16); }
FLASHGEN_DEVICE float to_float(float x) { return x; }

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
  // The tiles that hold allowed pairs are consecutive.
  static constexpr bool has_holes = false;
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

// ---- flashgen/allowed_pairs.cuh
// Which pairs a mask allows, as bits: they are found once in a step, and asked for twice.

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
    bits &= bits_from(key - mask.upper - q);
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

// Waits, and returns whether the condition holds in any thread.
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

// Orders ordinary accesses of this thread, and those that a barrier ordered before it, before later accesses
// by bulk copies and wgmma.
FLASHGEN_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The same for shared memory alone.
FLASHGEN_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory alone. It does not wait for shared memory.
FLASHGEN_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

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

FLASHGEN_DEVICE void bulk_reduce_add(float* destination, u32 source, u32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
      "r"(source), "r"(bytes)
      : "memory");
}

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

FLASHGEN_DEVICE u32 load_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ---- Programmatic dependent launch (sm_90 and later)

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

#define WGMMA_REGISTERS_OF(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

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

  // The 16-byte chunk of a row, for ldmatrix and stmatrix.
  FLASHGEN_DEVICE u32 chunk_at(i32 row, i32 chunk) const {
    return address + static_cast<u32>(chunk / 8 * panel_stride + row * kPanelBytes +
                                      (((chunk % 8) ^ (row % 8)) * kChunkBytes));
  }
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

template <i32 count>
FLASHGEN_DEVICE void clear(float (&strip)[count]) {
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

// ---- flashgen/backward_chunks.cuh
// A step of the backward pass in chunks: 32 queries of what a warp computes are the left operand of one part
// of a product, which runs while the next chunk is computed.

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

// ---- flashgen/walk.cuh
// Walking over the tiles that a mask does not rule out.
//
// A mask says which pairs of a query and a key are allowed. Kernels use five functions of it:
//
//     Mask::has_holes                       whether a tile within the ranges below may hold no allowed pair
//     key_tiles(q_begin, q_end, tile)       the tiles of keys that some query of the range may attend to
//     query_tiles(k_begin, k_end, tile)     the tiles of queries that may attend to some key of the range
//     is_empty(q_begin, q_end, k_begin, k_end), is_full(...)   whether no pair, every pair is allowed
//     allows(q, k)                          whether one pair is allowed

// Iterates over the tiles of a range, without those for which `visited(tile)` is false. A walk starts before
// its first tile. The lanes of a warp test 32 tiles at once, some perhaps beyond the last. All lanes call,
// and get the same result.
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
  // The lane that tested the tile.
  FLASHGEN_DEVICE i32 lane() const { return (tile - group) % kWarpSize; }

  // Advances to the next tile. Returns how many tiles were skipped before it.
  template <class Visited>
  FLASHGEN_DEVICE i32 advance(Thread thread, const Visited& visited) {
    ++tile;
    return 0;
  }
};

// ---- flashgen/query_walk.cuh
// The loop over the tiles of queries of a group of heads, for kernels whose block keeps one tile of keys.

// A step of the loop: a tile of queries of one head of the group.
struct Step {
  i32 member;
  i32 tile;
};

// Visits, for each head of the group, the tiles with a query that may attend to a key of [k_begin, k_end).
// `mask_of(member)` is the mask of a head of the group.
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
    // A loop, so that the code that evaluates the mask is inlined only once.
    while (true) {
      if (member >= 0) advance_within_head(thread, mask_of);
      if (!tiles.over() || ++member >= members) return;
      tiles = Walk<Mask::has_holes>(mask_of(member).query_tiles(k_begin, k_end, tile_q));
    }
  }

 private:
  template <class MaskOf>
  FLASHGEN_DEVICE void advance_within_head(Thread thread, const MaskOf& mask_of) {
    const Mask mask = mask_of(member);
    tiles.advance(thread, [&](i32 tile) {
      return !mask.is_empty(tile * tile_q, smaller((tile + 1) * tile_q, mask.len_q), k_begin, k_end);
    });
  }
};

// A band is the same for every head, and its tiles are consecutive, so two counters suffice.
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
  template <class MaskOf>
  FLASHGEN_DEVICE void advance(Thread /*thread*/, const MaskOf& /*mask_of*/) {
    --left;
    if (++tile == tiles.end) {
      tile = tiles.begin;
      ++member;
    }
  }
};

// ---- flashgen/backward_step_sm90.cuh
// A step of the backward kernels for Hopper: the next tile of queries, and P and dS from its scores. Scores
// are transposed: rows are keys, 64 per warpgroup, and columns are queries.

// Initializes every row of a strip with `columns`, one float per column.
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

FLASHGEN_DEVICE bool is_non_finite(float x) { return non_finite_signs<float>(bits_of(x)) != 0; }
FLASHGEN_DEVICE bool is_non_finite(bfloat16_t x) { return non_finite_signs<bfloat16_t>(x.bits) != 0; }

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

// Of tiles of keys a causal mask makes the first ones the longest, so they go from the first to the last.
template <i32 tile_kv, i32 section_heads, class Params>
FLASHGEN_DEVICE KeyTile key_tile(const Params& p, i32 number) {
  if (number >= p.tiles) return {};
  const SectionPlace place = place_in_sections<section_heads>(number, p.tiles, p.kv_tiles);
  const i32 sequence = place.head / p.heads_kv;
  return {place.turn * tile_kv, place.head - sequence * p.heads_kv, sequence, true, true};
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

// ---- flashgen/backward_sm90.cuh
// The parts of the backward kernel for Hopper that computes dK, dV and dQ together. Scores are transposed:
// their rows are keys, 64 for each warpgroup, and their columns are queries. So P and dS in registers are the
// left operands of dV and dK without a transposition.

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
  // In tiles of keys, see AddingOrder.
  i32 order_group = 0;
  bool has_lower;
  bool has_upper;
};

// Which part of dQ_i = sum over j of dS_ij K_j each consumer computes: 64 rows, or 64 columns (or those that
// are left). Each warp has 16 rows of it. The float32 sum in global memory has the layout of the
// accumulators: warp after warp, then blocks of 16 rows x 8 columns, then four floats per lane. So all
// accesses are contiguous.
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
  // The offset and the size of a warp's part of a tile. Warps are counted over all consumers.
  FLASHGEN_DEVICE static i32 warp_begin(i32 warp) {
    const i32 consumer = warp / 4;
    return consumer * kWarpgroupRows * kPanelColumns + warp % 4 * warp_floats(consumer);
  }
  FLASHGEN_DEVICE static i32 warp_floats(i32 consumer) { return kWarpRows * columns(consumer); }
  // The offset of an element of the tile.
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
  // A warp's share of dQ, rounded.
  using DQRows = PanelTile<T, kWarpRows, kPanelColumns>;
  using Share = QueryGradientShare<cfg.tile_q, cfg.head_dim, cfg.consumers>;

  using Scores = Strip<cfg.tile_q>;
  using RoundedScores = Rounded<cfg.tile_q>;
  using DK = Strip<cfg.head_dim>;
  using DV = Strip<cfg.head_dim_v>;
  // 64 queries x 64 columns, whatever the share.
  using DQ = Strip<kPanelColumns>;

  static constexpr i32 row_bytes = cfg.tile_q * 4;
  // The staging buffer of a warp: its share of dQ, or its rows of dK and dV.
  static constexpr i32 out_bytes = kWarpRows * kPanelColumns * 4;
  static_assert(DKRows::bytes <= out_bytes && DVRows::bytes <= out_bytes,
                "dK and dV fit in the staging buffer of dQ");
  static constexpr bool both_at_once = DKRows::bytes + DVRows::bytes <= out_bytes;
  static constexpr u32 consumer_warps = 4 * cfg.consumers;
};

// A warp's rows of a tile of dQ, to be scaled, rounded and stored.
struct alignas(32) SumPart {
  // Where the results go.
  i32 column;
  i32 row;
  i32 head;
  i32 sequence;
  // The place of the sum in the workspace, and its number of boxes: 0 after the last sum.
  i32 line;
  i32 boxes;
  // Whether another head will use its slot of the ring.
  bool is_needed_again;
  // Whether it is the last part of its tile.
  bool is_last;
};

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

// ---- The sum of dQ, see fragments.cuh

// Scales and rounds 32 columns of a part's 16 rows into a tile in shared memory. The finisher warp competes
// with consumers for issue slots, so each instruction counts. With `in_place` the tile overlays the first
// half of the part, which has been read by then.
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

// ---- Non-finite values, see contain.cuh

// Whether this lane's elements of a warp's rows of a panelled tile hold NaN or infinities.
template <class Tile>
FLASHGEN_DEVICE bool lane_finds_non_finite(SharedPanels<Tile> tile, i32 row, Thread thread) {
  u32 signs = 0;
  constexpr i32 chunks = Tile::panels * 8;
#pragma unroll 4
  for (i32 i = thread.lane; i < kWarpRows * chunks; i += kWarpSize) {
    const Vec16 chunk = tile.chunk(row + i / chunks, i % chunks);
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Tile::Element>(chunk.words[w]);
  }
  return signs != 0;
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

// ---- kernels/backward_main_sm90.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr BackwardSm90Config kConfig{
    .head_dim = 128,
    .head_dim_v = 128,
    .tile_q = 64,        // B_r: query rows per step
    .tile_kv = 128,      // B_c: keys per tile that a block works on
    .q_slots = 3,        // slots for Q
    .do_slots = 2,       // slots for dO
    .ds_slots = 2,       // slots for dS
    .sum_slots = 3,      // slots for sums of dQ to be scaled and rounded
    .rounded_slots = 1,  // slots for rounded dQ
    .consumers = 2,      // warpgroups that compute, 64 keys each
    .producer_registers = 24,
    .consumer_registers = 240,
    .section_heads = 16,  // heads of a section, whose tiles are scheduled together
    .has_lower = false,   // the band has a lower bound on k - q
    .has_upper = true,    // the band has an upper bound on k - q
};

struct Params {
  TensorMap q_map;  // for TMA
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
  // per tile of queries: -L in units of S, then -D
  const float* row_stats;
  // workspace that dQ is summed in
  float* dq_accum;
  // tiles drawn, then blocks done; 0 between launches
  u32* counter;
  // tiles of dQ drawn by finishers; per head, tiles of keys added; per head, tiles of dQ finished
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
  i32 sum_heads;  // query heads in dq_accum, a ring
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
constexpr u32 kDq = 180224;         // dQ_i, and at the end dK_j and dV_j, to be stored
constexpr u32 kSums = 212992;       // rows of dQ_i to be scaled and rounded, 3 slots
constexpr u32 kDqRows = 225280;     // rounded rows of dQ_i
constexpr u32 kZeros = 227328;      // zeros that clear the sum of dQ
constexpr u32 kLse = 229376;        // -L_i in units of S, 3 slots
constexpr u32 kDsum = 230144;       // -D_i, 2 slots
constexpr u32 kKBarriers = 230656;  // full and empty barriers of each slot
constexpr u32 kVBarriers = 230784;
constexpr u32 kQBarriers = 230912;
constexpr u32 kDoBarriers = 231040;
constexpr u32 kDsBarriers = 231168;
constexpr u32 kSumBarriers = 231296;
constexpr u32 kTurnBarriers = 231424;
constexpr u32 kSumParts = 231552;  // the part of dQ in each slot
constexpr u32 kTileBarriers = 231680;
constexpr u32 kTiles = 231808;  // the next tiles of keys

}  // namespace smem

using Shape = BackwardSm90Shape<kConfig, element_t>;
using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using KRing = Ring<1>;
using VRing = Ring<1>;
using QRing = Ring<kConfig.q_slots>;
using DORing = Ring<kConfig.do_slots>;
using DSRing = Ring<kConfig.ds_slots>;
using TileRing = Ring<2>;
using SumRing = Ring<kConfig.sum_slots>;
// Of the dQ of a tile of queries: one for each warp that adds to it.
constexpr i32 parts_of_dq = 4 * kConfig.consumers;
static_assert(kConfig.do_slots == 2 && kConfig.ds_slots == 2, "slots of dO and dS go by together");

// The shared memory of a block.
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
  SumRing sum_ring;  // sums of dQ to be scaled and rounded
  SumPart* sum_parts;  // what its slots hold
  Shape::DQRows dq_rows;
  KeyTile* tiles;  // what the slots of tile_ring hold

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
            {start + smem::kSumBarriers},
            reinterpret_cast<SumPart*>(base + smem::kSumParts),
            {start + smem::kDqRows},
            reinterpret_cast<KeyTile*>(base + smem::kTiles),
    };
  }
  // Of a tile of queries: what its rows subtract from their logits, and -D.
  FLASHGEN_DEVICE float* lse(QRing::Where at) const {
    return reinterpret_cast<float*>(base + smem::kLse) + at.slot() * kConfig.tile_q;
  }
  FLASHGEN_DEVICE float* dsum(DORing::Where at) const {
    return reinterpret_cast<float*>(base + smem::kDsum) + at.slot() * kConfig.tile_q;
  }
  // Once for each tile of keys: that all warps' shares of the tile before have been added to dQ, ...
  FLASHGEN_DEVICE u32 added() const { return shared_address(base) + smem::kTurnBarriers; }
  // ... and that theirs of this one may be.
  FLASHGEN_DEVICE u32 may_add() const { return added() + 8; }
  FLASHGEN_DEVICE u8* sum(SumRing::Where at) const { return base + smem::kSums + at.slot() * Shape::out_bytes; }
  // What the warp, counted among those of consumers, writes out.
  FLASHGEN_DEVICE u8* out(i32 warp) const { return base + smem::kDq + warp * Shape::out_bytes; }
};

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
  return Queries(keys.first_key, end_key(p, keys), p.group);
}
FLASHGEN_DEVICE Mask mask_of(const Params& p, const KeyTile& keys, i32 member) {
  return Mask::of(p, keys.sequence, keys.head * p.group + member);
}

// The first of the heads of queries that attend to the keys; heads of all sequences are counted.
FLASHGEN_DEVICE i32 first_head(const Params& p, const KeyTile& keys) {
  return keys.sequence * p.heads_q + keys.head * p.group;
}
// How many tiles of keys have added all they have to the sums of a group, and how many tiles of a head's have been
// finished and cleared.
FLASHGEN_DEVICE u32* done_tiles(const Params& p, i32 first_head) { return p.head_counts + 1 + 2 * first_head; }
FLASHGEN_DEVICE u32* finished_tiles(const Params& p, i32 head) { return p.head_counts + 2 + 2 * head; }
// Which phase of the barriers that go by with tiles of keys is a tile's.
FLASHGEN_DEVICE u32 turn_of(TileRing::Where tile) { return tile.count % 2; }

// ---- The producer: one warp that draws tiles of keys and loads K and V by TMA, and for each of their steps Q, dO and
// the statistics of the rows. Only one lane waits and copies: another lane that came late to a barrier could miss a phase.
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

  // Line 6: load K_j, V_j. Reads the tile from shared memory again, to save registers.
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
      load(shared.q.slot(q_at.slot()), p.q_map, shared.lse(q_at), 0, shared.q_ring.full(q_at));
    }
    q_at.advance();
    if (elected) {
      shared.do_ring.wait_empty(do_at);
      load(shared.dout.slot(do_at.slot()), p.dout_map, shared.dsum(do_at), 1, shared.do_ring.full(do_at));
    }
    do_at.advance();
  };

  while (true) {
    // The first tile is drawn, too, so that blocks only wait for tiles of running blocks. Consumers are steps behind, so
    // the latency of the draw is hidden.
    const i32 number = shuffle(elected ? static_cast<i32>(atomic_add(p.counter, 1u)) : 0, 0);
    KeyTile keys = key_tile<kConfig.tile_kv, kConfig.section_heads>(p, number);
    Queries steps = queries_of(p, keys);
    const auto mask_of_member = [&](i32 member) { return mask_of(p, keys, member); };
    if (keys.exists) {
      steps.start(thread, mask_of_member);
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
      // The first queries may be loaded while the previous tile still uses its keys.
      if (!has_keys) load_keys();
      has_keys = true;
    }
  }
  if (elected) leave_counters(p);
}

// ---- Tiles of keys with NaN or infinities. These must not reach queries that may not attend to their keys, but in dS K
// a 0 * NaN reaches all queries. Such tiles are rare: their dQ is computed pair by pair, without tensor cores. In dK and
// dV the values of a key reach only its own rows, so these need no special case.

// Whether K_j has any. Each consumer warp checks its own keys.
FLASHGEN_DEVICE bool has_non_finite_keys(const Shared& shared, Thread self) {
  const Thread thread = self.again();
  const i32 warp_key = (thread.warp - 4) * kWarpRows;
  const bool found = lane_finds_non_finite(SharedPanels<Shape::KTile>{shared.base, shared.k}, warp_key, thread);
  // The vote tells ptxas that the result is uniform in a warp.
  return warp_any(named_barrier_any(1, kConfig.consumers * kWarpgroupSize, found));
}

// Adds dS K of a tile of keys to dQ, over the pairs that the mask allows. Runs before the steps of the tile.
FLASHGEN_DEVICE void add_slowly(const Params& p, const Shared& shared, const KeyTile& keys, Thread self) {
  // Addresses are computed here: this rare path must not cost the main loop registers.
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
    if (mask.is_empty(first_q, smaller(first_q + kConfig.tile_q, p.len_q), keys.first_key, end_key(p, keys))) continue;
    const Place place = {tile, head, keys.sequence};
    const float* const stats = p.row_stats + place.number(p.q_tiles, p.heads_q) * (2 * kConfig.tile_q);
    const element_t* const q = p.q + keys.sequence * p.q_batch + head * p.q_head + first_q * p.q_row;
    const element_t* const dout = p.dout + keys.sequence * p.dout_batch + head * p.dout_head + first_q * p.dout_row;
    for (i32 i = thread.lane; i < kWarpRows * kConfig.tile_q; i += kWarpSize) {
      const i32 row = warp_key + i % kWarpRows, column = i / kWarpRows;
      float gradient = 0.0f;
      if (first_q + column < p.len_q && mask.allows(first_q + column, keys.first_key + row)) {
        const float product = dot_row(k, row, q + column * p.q_row), subtracted = stats[column];
        const float probability = exp2_approx((product + subtracted) * p.scale_log2);
        gradient = probability * (dot_row(v, row, dout + column * p.dout_row) + stats[kConfig.tile_q + column]);
      }
      ds.set_element(row, column, gradient);
    }
    named_barrier_sync(1, threads);
    const i32 sum_head = (first_head(p, keys) + member) % p.sum_heads;
    float* const sum = p.dq_accum + static_cast<i64>(sum_head * p.q_tiles + tile) * Shape::Share::tile_floats;
    for (i32 i = index; i < kConfig.tile_q * kConfig.head_dim; i += threads) {
      const i32 row = i / kConfig.head_dim, column = i % kConfig.head_dim;
      float total = 0.0f;
      // Bounded, because the compiler would unroll over all keys, and the main loop would lack registers.
#pragma unroll 4
      for (i32 key = 0; key < kConfig.tile_kv; ++key) {
        if (mask.allows(first_q + row, keys.first_key + key))
          total = fused_multiply_add(ds.element(key, row), k.element(key, column), total);
      }
      reduce_add(sum + Shape::Share::place(row, column), total);
    }
    named_barrier_sync(1, threads);
  }
  // TMA reads the sums.
  fence_proxy_async();
}

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
  const u32 out = shared_address(shared.out(out_warp));
  KRing::Where kv_at;
  QRing::Where q_at;
  // The position in the rings of dO and dS. dS is read one step after it was written.
  DORing::Where at;
  TileRing::Where tile_at;
  // Reports that all additions to dQ of the previous tile are complete. Its stores of dK and dV, two bulk groups, may be
  // in flight.
  const auto report_added = [&]() {
    if (thread.lane == 0) {
      bulk_wait<2>();
      mbarrier_arrive(shared.added());
    }
  };

  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const KeyTile& keys = shared.tiles[tile_at.slot()];
    if (!keys.exists) break;
    const i32 first_key = keys.first_key;

    // Line 18: write dK_j, dV_j to global memory. Each warp stores its 16 rows by TMA.
    const auto write_keys = [&](const Shape::DK& dk, const Shape::DV& dv) {
      const Thread here = thread.again();
      const i32 first_row = keys.first_key + (here.warp - 4) * kWarpRows;
      const u32 rows = shared_address(shared.out(here.warp - 4));
      const float one[2] = {1.0f, 1.0f}, scale[2] = {p.scale, p.scale};
      const auto store_by_tma = [&](auto tile, const auto& strip, const float (&factor)[2], const TensorMap& map) {
        store_strip(tile, 0, strip, factor, here);
        fence_proxy_async_shared();
        warp_sync();
        if (here.lane == 0) {
          if (first_row < p.len_kv) tile.store(map, first_row, keys.head, keys.sequence);
          bulk_commit();
        }
      };
      const auto wait_for_buffer = [&]() {
        if (here.lane == 0) bulk_wait_read<0>();
        warp_sync();
      };
      wait_for_buffer();
      store_by_tma(Shape::DVRows{rows}, dv, one, p.dv_map);
      if constexpr (!Shape::both_at_once) wait_for_buffer();
      store_by_tma(Shape::DKRows{rows + (Shape::both_at_once ? Shape::DVRows::bytes : 0)}, dk, scale, p.dk_map);
      mbarrier_arrive(shared.tile_ring.empty(tile_at));
      tile_at.advance();
    };
    // Line 8: for each tile of queries that may attend to some key of this tile, of each head of the group.
    const auto mask_of_member = [&](i32 member) { return mask_of(p, keys, member); };
    Queries steps = queries_of(p, keys);
    steps.start(thread, mask_of_member);
    bool goes_on = !steps.over();
    const auto take_step = [&]() {
      const Step step = steps.step();
      steps.advance(thread, mask_of_member);
      goes_on = !steps.over();
      return step;
    };
    if (goes_on) shared.k_ring.wait_full(kv_at);
    if (!goes_on) {
      report_added();
      // Nothing to add. But a warp that runs ahead could make the reporter miss a phase.
      mbarrier_wait(shared.may_add(), turn_of(tile_at));
    }
    // If K_j has non-finite values, dQ is computed without tensor cores.
    const bool is_non_finite = goes_on && has_non_finite_keys(shared, thread);
    if (is_non_finite) {
      report_added();
      mbarrier_wait(shared.may_add(), turn_of(tile_at));
      shared.v_ring.wait_full(kv_at);
      add_slowly(p, shared, keys, thread);
    }
    // Line 7: dK_j = 0, dV_j = 0.
    Shape::DK dk;
    Shape::DV dv;
    clear(dk);
    clear(dv);
    wgmma_pin(dk);
    wgmma_pin(dv);
    if (goes_on) {
      // The number of the group's first tile of queries, over all heads in the ring of sums.
      const i32 first_number = first_head(p, keys) % p.sum_heads * p.q_tiles;
      // Lines 10 and 11: S_ij = Q_i K_j^T - L_i. Accumulators that are written while other products are in flight are
      // pinned: otherwise ptxas waits for those products.
      const auto preset_scores = [&](Shape::Scores& scores, QRing::Where at) {
        spread_columns(scores, shared.lse(at), thread);
        wgmma_pin(scores);
      };
      const auto multiply_keys = [&](Shape::Scores& scores, QRing::Where at) {
        issue_over_columns(scores, strip_k, shared.q.slot(at.slot()));
      };
      const auto add_to_sum = [&](i32 number, Thread thread) {
        mbarrier_wait(shared.may_add(), turn_of(tile_at));
        fence_proxy_async_shared();
        warp_sync();
        if (thread.lane == 0 && !is_non_finite) {
          float* const sum = p.dq_accum + static_cast<i64>(number) * Share::tile_floats + Share::warp_begin(out_warp);
          bulk_reduce_add(sum, out, Share::warp_floats(consumer) * 4);
          bulk_commit();
        }
      };
      // Line 15: dQ_i += dS_ij K_j, of the previous step. A tile's first step has none: it multiplies K_j instead of dS,
      // and the product is not used. A branch would serialize the products.
      const auto multiply_scores = [&](Shape::DQ& dq, DSRing::Where at, bool is_there) {
        shared.ds_ring.wait_full(at);
        const Shape::DSTile ds = {is_there ? shared.ds.slot(at.slot()).address : shared.k.address};
        issue_over_rows<kPanelColumns>(dq, Share::by_rows ? ds.panel(consumer) : ds,
                                       Share::by_rows ? shared.k : shared.k.panel(consumer));
      };
      // Writes dQ from registers to shared memory. TMA adds it to the sum from there.
      const auto put_out = [&](Shape::DQ& dq, DSRing::Where at, bool is_there) {
        wgmma_pin(dq);
        warp_sync();
        if (thread.lane == 0 && is_there) mbarrier_arrive(shared.ds_ring.empty(at));
        if (thread.lane == 0) bulk_wait_read<0>();
        warp_sync();
        write_fragments(reinterpret_cast<float*>(shared.out(out_warp)), dq, thread);
      };
      // The tiles of queries of two earlier steps: of the previous one, whose dQ is multiplied in the middle of this step,
      // and of the one before it, whose dQ is in shared memory.
      constexpr i32 kNone = -1, chunks = chunks_of(kConfig.tile_q);
      i32 number = kNone, number_out = kNone;
      // A causal mask may forbid all pairs of this consumer in the first tile of queries. It then stores zeros as dS.
      if constexpr (kConfig.has_upper && kConfig.tile_q < kConfig.tile_kv) {
        const Step step = steps.step();
        const i32 first_q = step.tile * kConfig.tile_q, end_q = smaller(first_q + kConfig.tile_q, p.len_q);
        const i32 strip_first = first_key + strip_key;
        if (mask_of(p, keys, step.member).is_empty(first_q, end_q, strip_first, strip_first + kWarpgroupRows)) {
          take_step();
          shared.q_ring.wait_full(q_at);
          shared.q_ring.release(q_at, thread);
          if (!is_non_finite) report_added();
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
      Shape::Scores scores;
      const auto start_scores = [&](QRing::Where at) {
        shared.q_ring.wait_full(at);
        preset_scores(scores, at);
      };
      while (goes_on) {
        // No product is in flight, but ptxas does not know that at the head of a loop.
        wgmma_wait<0>();
        start_scores(q_at);
        const Step step = take_step();
        const i32 first_q = step.tile * kConfig.tile_q;
        multiply_keys(scores, q_at);
        if (number == kNone) shared.v_ring.wait_full(kv_at);
        // Addresses are computed in each step, to save registers.
        const Thread here = thread.again();
        Shape::RoundedScores ds;
        {
          // Line 13: dP_ij = dO_i V_j^T - D_i.
          Shape::Scores dp;
          shared.do_ring.wait_full(at);
          spread_columns(dp, shared.dsum(at), here);
          wgmma_pin(dp);
          issue_half(dp, strip_v, shared.dout.slot(at.slot()), 0);
          if (number == kNone && !is_non_finite) report_added();
          if (number_out != kNone) add_to_sum(number_out, here);

          // Line 11: P_ij = exp(S_ij - L_i).
          wgmma_wait<1>();
          wgmma_pin(scores);
          Shape::RoundedScores probabilities;
          const i32 strip_first = first_key + strip_key;
          const bool strip_is_cut =
              !mask_of(p, keys, step.member)
                   .is_full(first_q, end_query(p, first_q), strip_first, strip_first + kWarpgroupRows);
          AllowedPairs<kConfig.tile_q / 2> allowed;
          if (strip_is_cut) {
            const Mask mask = mask_of(p, keys, step.member);
            allowed = allowed_pairs<kConfig.tile_q / 2>(mask, first_q, first_key + warp_key, thread);
            allowed.forbid(scores, -kInfinity);
          }
          // Line 12: dV_j += P_ij^T dO_i. Products of a chunk run while the next one's exponentials do.
#pragma unroll
          for (i32 chunk = 0; chunk < chunks; ++chunk) {
            for_chunk(chunk, [&](i32 i) { scores[i] = exp2_approx(scores[i] * p.scale_log2); });
            round_chunk<element_t>(probabilities, scores, chunk);
            if (chunk == 0) issue_half(dp, strip_v, shared.dout.slot(at.slot()), 1);
            issue_chunk(dv, probabilities, shared.dout.slot(at.slot()), chunk);
          }

          // Overlaps the computation of dS. dQ is stored while dK is multiplied.
          Shape::DQ dq;
          multiply_scores(dq, at.before(), number != kNone);
          // Line 14: dS_ij = P_ij * (dP_ij - D_i). Forbidden pairs get 0, even if
          // dP is NaN.
          wgmma_wait<chunks + 1>();
          wgmma_pin(dp);
          if (strip_is_cut) allowed.forbid(dp, 0.0f);
          shared.ds_ring.wait_empty(at);
          // Line 16: dK_j += dS_ij^T Q_i. Each chunk is issued once the next one is stored.
#pragma unroll
          for (i32 chunk = 0; chunk < chunks; ++chunk) {
            multiply_chunk(element_t{}, ds, dp, probabilities, chunk);
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
          wgmma_wait<chunks>();
          put_out(dq, at.before(), number != kNone);
          wgmma_wait<0>();
          wgmma_pin(dk);
        }
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
      if (number_out != kNone) add_to_sum(number_out, thread);
      finish_dq(at.before(), number);
      shared.k_ring.release(kv_at, thread);
      kv_at.advance();
    }

    write_keys(dk, dv);
  }
  report_added();
  if (thread.lane == 0) bulk_wait<0>();
}

// ---- The reporter: a warp that counts, for all blocks, the tiles of keys whose additions to dQ are complete. It also
// tells the consumers of its block when the sums of their heads have been cleared.
FLASHGEN_DEVICE void report(const Params& p, u8* base, Thread self) {
  const Thread thread = self.again();
  const Shared shared = Shared::at(base);
  TileRing::Where tile_at;
  i32 head_before = 0;
  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const KeyTile keys = shared.tiles[tile_at.slot()];
    mbarrier_arrive(shared.tile_ring.empty(tile_at));
    // All warps' additions of the previous tile have reached memory.
    mbarrier_wait(shared.added(), turn_of(tile_at));
    if (tile_at.count > 0 && thread.lane == 0) atomic_add_release(done_tiles(p, head_before), 1u);
    if (!keys.exists) break;
    const i32 head = first_head(p, keys);
    if (head >= p.sum_heads) {
      // Earlier heads used these sums. Wait until they are finished, and the sums are cleared.
      for (i32 member = thread.lane; member < p.group; member += kWarpSize) {
        while (load_acquire(finished_tiles(p, head - p.sum_heads + member)) != static_cast<u32>(p.q_tiles)) {}
      }
      // TMA of another block cleared the sums, and TMA of this block adds to them.
      fence_proxy_async_global();
    }
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(shared.may_add());
    head_before = head;
    tile_at.advance();
  }
}

// ---- The collector: one lane that loads complete sums of dQ by TMA. Blocks draw tiles of queries from a global counter,
// head after head, in the order in which heads complete.
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
    while (load_acquire(done) != static_cast<u32>(p.kv_tiles)) {}
    fence_proxy_async();
    // The next draw overlaps the loads of this tile.
    drawn = draw();
    const i32 place = head % p.sum_heads * p.q_tiles + tile;
    // Whether another head will use this slot of the ring.
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
      // A second arrival, by this thread, orders the loads before the finisher clears the sum.
      mbarrier_arrive(shared.sum_ring.full(at));
      at.advance();
    }
  }
  shared.sum_ring.wait_empty(at);
  shared.sum_parts[at.slot()] = {};
  mbarrier_arrive(shared.sum_ring.full(at));
  mbarrier_arrive(shared.sum_ring.full(at));
}

// ---- The finisher: a warp that scales, rounds and stores these sums, and clears them for the next head.
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

FLASHGEN_KERNEL(384, 1) backward_main_d128_causal_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  const Thread thread = Thread::current();
  const Shared shared = Shared::at(base);
  // What sums are cleared with.
  for (i32 i = thread.index(); i < static_cast<i32>(SumLines::box_bytes) / kChunkBytes; i += 384)
    reinterpret_cast<Vec16*>(base + smem::kZeros)[i] = Vec16{.words = {0, 0, 0, 0}};
  fence_proxy_async_shared();
  if (thread.index() == 0) {
    constexpr u32 consumer_warps = Shape::consumer_warps;
    shared.k_ring.init(1, consumer_warps);
    shared.v_ring.init(1, consumer_warps);
    shared.q_ring.init(1, consumer_warps);
    shared.do_ring.init(1, consumer_warps);
    shared.ds_ring.init(consumer_warps, consumer_warps);
    // What tells of a tile of keys, or of a part of dQ, is read by all lanes, and each gives it back for itself.
    // The reporter reads them, too.
    shared.tile_ring.init(1, kWarpSize * (consumer_warps + 1));
    shared.sum_ring.init(2, kWarpSize);
    mbarrier_init(shared.added(), consumer_warps);
    mbarrier_init(shared.may_add(), 1);
    fence_mbarrier_init();
  }
  block_sync();

  // The registers that copying does not need go to those who compute. Each role finds out again who it is: so
  // few are left for copying that nothing else is to be kept.
  if (thread.warp < 4) {
    setmaxnreg_dec<kConfig.producer_registers>();
    if (thread.warp == 0) produce(p, base, thread);
    else if (thread.warp == 1) report(p, base, thread);
    else if (thread.warp == 2) collect(p, base, thread);
    else finish(p, base, thread);
  } else {
    setmaxnreg_inc<kConfig.consumer_registers>();
    consume(p, base);
  }
}
