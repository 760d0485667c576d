// backward_main_d256_causal_sm90a: FlashAttention-3, backward pass: dK and dV, and dQ where it is summed with
// atomics.
//
// spec     {"head_dim":256,"head_dim_v":256,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 256 --dtype bf16 --causal --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 64, tile_kv 64, q_slots 2, do_slots 2, 384 threads
// roles    of 1 warpgroup one warp brings tiles (40 registers a thread); 2 compute, dV and dK of the same 64
//          keys (232)
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 64
//          key rows of a key/value head and batch entry
// smem     231200 bytes
//            k                   0 to  32768  K_j
//            v               32768 to  65536  V_j
//            q               65536 to 131072  Q_i, 2 slots
//            do             131072 to 196608  dO_i, 2 slots
//            p              196608 to 229376  P_ij for the other consumer, 2 slots
//            lse            229376 to 229888  -L_i in units of S, 2 slots
//            dsum           229888 to 230400  -D_i, 2 slots
//            k_barriers     230400 to 230416  full and empty barriers of each slot
//            v_barriers     230528 to 230544
//            q_barriers     230656 to 230688
//            do_barriers    230784 to 230816
//            p_barriers     230912 to 230944
//            tile_barriers  231040 to 231072
//            tiles          231168 to 231200  the next tiles of keys
// because  shared memory holds two slots for Q and dO; dV and dK are issued first to free them
//
// contents   72  Integer and 16-bit element types, without any CUDA header.
//            94  What the CUDA language itself provides, under names that the emulator implements on the host.
//           134  Scalar arithmetic, one instruction each.
//           153  Element types.
//           197  Warp-level matrix products.
//           216  Banded masks.
//           271  Walking over the tiles that a mask does not rule out.
//           308  The loop over the tiles of queries of a group of heads, for kernels whose block keeps one tile of keys.
//           390  Barriers at which threads may arrive without waiting, or wait without arriving.
//           396  The kernel: its configuration, parameters and text.
//           399  The kernel: its configuration, parameters and text.
//           432  The kernel: its configuration, parameters and text.
//           440  Tensor maps, which describe tensors to bulk copies of boxes.
//           449  Bulk copies.
//           454  The kernel: its configuration, parameters and text.
//           478  The kernel: its configuration, parameters and text.
//           480  The kernel: its configuration, parameters and text.
//           482  Communication between blocks and between grids.
//           486  The kernel: its configuration, parameters and text.
//           522  The kernel: its configuration, parameters and text.
//           524  Reallocation of registers among warpgroups (sm_90a).
//           539  The 64-bit descriptor of an operand of wgmma in shared memory.
//           574  Matrix products of a warpgroup (sm_90a).
//           825  Four products of a warpgroup, which add to the same accumulators, as one asm statement.
//           834  Tiles as TMA writes them and wgmma reads them.
//           928  Streaming tiles between global and shared memory.
//           941  Writing a warpgroup's results to shared and global memory.
//           994  A step of the backward kernels for Hopper.
//          1108  Accumulators of a warp's 16 rows in memory, in the layout of its lanes.
//          1138  Rings of slots in shared memory, filled by one side and emptied by the other.
//          1202  Which tiles of queries, or of keys, a persistent block works on, in order.
//          1273  Parts of the two backward kernels for wide heads on Hopper, where dK or dV of 64 keys fills a consumer's registers.
//          1277  The kernel: its configuration, parameters and text.
//          1327  The kernel: its configuration, parameters and text.
//          1329  The kernel: its configuration, parameters and text.
//          1334  The kernel: its configuration, parameters and text.
//          1478  The kernel: its configuration, parameters and text.
//          1563  The kernel: its configuration, parameters and text.
//          1666  The kernel: its configuration, parameters and text.

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

}  // namespace flashgen

#if !defined(FLASHGEN_EMULATOR)
// ---- flashgen/ptx/barrier.cuh
// Barriers at which threads may arrive without waiting, or wait without arriving. Named barriers exist on
// every GPU, mbarriers are for sm_90 and later.

namespace flashgen {

// ---- Named barriers 1 to 15 of a block. Barrier 0 is block_sync's. `threads` threads take part, in whole
// warps.

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

// Prefetches the map itself.
FLASHGEN_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- Runs of bytes. Sizes and addresses are multiples of 16.

// ---- Groups of stores and reductions

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

  // The tile's rows from `row` on of one head of one sequence; `barrier` counts `bytes`.
  FLASHGEN_DEVICE void load(const TensorMap& map, u32 barrier, i32 row, i32 head, i32 sequence) const {
#pragma unroll
    for (i32 p = 0; p < panels; ++p)
      tma_load_4d(address + p * panel_stride, &map, barrier, p * panel_cols, row, head, sequence);
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

// Rounds pairs of neighbours along a row.
template <class T, i32 count>
FLASHGEN_DEVICE void round_strip(u32 (&rounded)[count / 8][4], const float (&strip)[count]) {
#pragma unroll
  for (i32 i = 0; i < count / 2; ++i) rounded[i / 4][i % 4] = pack(T{}, strip[2 * i], strip[2 * i + 1]);
}

// P = exp(S - L) of products from which L has been subtracted.
template <i32 count>
FLASHGEN_DEVICE void exponentials(float (&scores)[count], float scale_log2) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) scores[i] = exp2_approx(scores[i] * scale_log2);
}

// Marks forbidden pairs in P, or in P times a slope: values that do not occur otherwise. In P it must be a
// zero.
constexpr u32 kForbidden = 0x80000000u;

// dS = P (dP - D), where D has already been subtracted from dP. For a forbidden pair the result must not
// depend on dP, even if that is NaN.
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
    // The mask allows queries from q + first to q + last.
    i32 first = key < mask.len_kv ? -1 : 2 * count, last = mask.len_q - 1 - q;
    first = larger(first, key - mask.upper - q);
#pragma unroll
    for (i32 n = 0; n < count / 4; ++n) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        if (8 * n + c < first || 8 * n + c > last) forbid(4 * n + 2 * h + c);
      }
    }
  }
}

// The same for any mask. The terms that depend on the query are computed for 32 queries at a time, one per
// lane, and shuffled. Expensive masks use a loop, to bound the code size.
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
template <i32 count>
FLASHGEN_DEVICE void read_fragments(float (&strip)[count], const float* part, Thread thread) {
#pragma unroll
  for (i32 n = 0; n < count / 4; ++n) {
    const Vec16 four = reinterpret_cast<const Vec16*>(part)[n * kWarpSize + thread.lane];
#pragma unroll
    for (i32 e = 0; e < 4; ++e) strip[4 * n + e] = float_of(four.words[e]);
  }
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

// Draws the number of a block's next tile. Its first tile has the block's own number.
template <class Params>
FLASHGEN_DEVICE i32 draw_tile(const Params& p) {
  return grid_dim_x() + static_cast<i32>(atomic_add(p.counter, 1u));
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

// ---- flashgen/backward_wide_sm90.cuh
// Parts of the two backward kernels for wide heads on Hopper, where dK or dV of 64 keys fills a consumer's
// registers. One kernel keeps keys and computes dK and dV, the other one keeps queries and computes dQ.

// ---- dK and dV. Scores are transposed, and both consumers work on all keys of the tile. One computes P and
// dV, and passes P on. The other one computes dS and dK.

struct BackwardKeysConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 q_slots;
  i32 do_slots;
  i32 p_slots;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  i32 section_heads;
  bool sums_first;
  bool has_lower;
  bool has_upper;
};

template <BackwardKeysConfig cfg, class T>
struct BackwardKeysShape {
  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using DOTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using Scores = Strip<cfg.tile_q>;
  using RoundedScores = Rounded<cfg.tile_q>;

  static constexpr i32 row_bytes = cfg.tile_q * 4;
  // Bytes of P: of a warp's keys, and of all.
  static constexpr i32 part_bytes = kWarpRows * cfg.tile_q * 4;
  static constexpr i32 p_bytes = 4 * part_bytes;
  static constexpr u32 warps_each = 4;
};

// dS = P (dP - D), where D has already been subtracted from dP, and P comes from `write_fragments`. With
// `has_forbidden`, forbidden pairs get 0, even if dP is NaN.
template <u32 forbidden, i32 count>
FLASHGEN_DEVICE void multiply_by_fragments(float (&dp)[count], const float* part, bool has_forbidden,
                                           Thread thread) {
  float p[count];
  read_fragments(p, part, thread);
  if (has_forbidden) {
    multiply_where_allowed<forbidden>(dp, p);
  } else {
    multiply_strips(dp, p);
  }
}

// ---- dQ. The rows of scores are queries, 64 per consumer. Each step takes a tile of keys.

// ---- Non-finite values, see contain.cuh. Several warps share a tile: each has every `warps`-th chunk of a
// row's 16 bytes, so that a column's values are one warp's.

}  // namespace flashgen

// ---- kernels/backward_keys_sm90.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr BackwardKeysConfig kConfig{
    .head_dim = 256,
    .head_dim_v = 256,
    .tile_q = 64,    // B_r: query rows per step
    .tile_kv = 64,   // B_c: keys per tile that a block works on
    .q_slots = 2,    // slots for Q
    .do_slots = 2,   // slots for dO
    .p_slots = 2,    // slots for P
    .consumers = 2,  // warpgroups that compute: one sums dV, one dK
    .producer_registers = 40,
    .consumer_registers = 232,
    .section_heads = 16,  // heads of a section, whose tiles are scheduled together
    .sums_first = true,   // dV and dK of a step are issued before the next step's scores
    .has_lower = false,   // the band has a lower bound on k - q
    .has_upper = true,    // the band has an upper bound on k - q
};

struct Params {
  TensorMap q_map;  // for TMA
  TensorMap k_map;
  TensorMap v_map;
  TensorMap dout_map;
  TensorMap row_stats_map;
  element_t* dk;
  element_t* dv;
  u32* counter;  // tiles drawn, then blocks done; 0 between launches
  i64 dk_batch;  // strides are in elements
  i64 dk_row;
  i64 dk_head;
  i64 dv_batch;
  i64 dv_row;
  i64 dv_head;
  i32 heads_q;
  i32 heads_kv;
  i32 len_q;
  i32 len_kv;
  i32 group;       // query heads per key/value head
  i32 band_lower;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  i32 band_upper;
  i32 q_tiles;   // tiles of queries of one head
  i32 kv_tiles;  // tiles of keys of one head
  i32 tiles;     // tiles of all heads of all sequences
  float scale;
  float scale_log2;  // scale * log2(e)
};
static_assert(sizeof(Params) == 768, "the launcher packs Params into 768 bytes");

namespace smem {
constexpr u32 kK = 0;               // K_j
constexpr u32 kV = 32768;           // V_j
constexpr u32 kQ = 65536;           // Q_i, 2 slots
constexpr u32 kDo = 131072;         // dO_i, 2 slots
constexpr u32 kP = 196608;          // P_ij for the other consumer, 2 slots
constexpr u32 kLse = 229376;        // -L_i in units of S, 2 slots
constexpr u32 kDsum = 229888;       // -D_i, 2 slots
constexpr u32 kKBarriers = 230400;  // full and empty barriers of each slot
constexpr u32 kVBarriers = 230528;
constexpr u32 kQBarriers = 230656;
constexpr u32 kDoBarriers = 230784;
constexpr u32 kPBarriers = 230912;
constexpr u32 kTileBarriers = 231040;
constexpr u32 kTiles = 231168;  // the next tiles of keys

}  // namespace smem

using Shape = BackwardKeysShape<kConfig, element_t>;
using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using KRing = Ring<1>;
using VRing = Ring<1>;
using QRing = Ring<kConfig.q_slots>;
using DORing = Ring<kConfig.do_slots>;
using PRing = Ring<kConfig.p_slots>;
using TileRing = Ring<2>;

// Everything that the warps of a block share.
struct Shared {
  u8* base;
  Shape::KTile k;
  Shape::VTile v;
  Shape::QTile q;
  Shape::DOTile dout;
  KRing k_ring;
  VRing v_ring;
  QRing q_ring;
  DORing do_ring;
  PRing p_ring;
  TileRing tile_ring;
  KeyTile* tiles;  // what the slots of tile_ring hold

  FLASHGEN_DEVICE static Shared at(u8* base) {
    const u32 start = shared_address(base);
    return {base,
            {start + smem::kK},
            {start + smem::kV},
            {start + smem::kQ},
            {start + smem::kDo},
            {start + smem::kKBarriers},
            {start + smem::kVBarriers},
            {start + smem::kQBarriers},
            {start + smem::kDoBarriers},
            {start + smem::kPBarriers},
            {start + smem::kTileBarriers},
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
  // P of the keys of a warp, counted within its warpgroup, on the way from one consumer to the other.
  FLASHGEN_DEVICE float* part(PRing::Where at, i32 warp) const {
    return reinterpret_cast<float*>(base + smem::kP + at.slot() * Shape::p_bytes + warp * Shape::part_bytes);
  }
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

  i32 number = block_idx_x();
  while (true) {
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
    // Consumers are steps behind, which hides the latency of the draw.
    number = shuffle(elected ? draw_tile(p) : 0, 0);
  }
  if (elected) leave_counters(p);
}

// ---- The two consumers. Each multiplies its tile (K or V) by Q or dO of a step (its pairs), computes P or dS from the
// result, and multiplies that by dO or Q (its sum: dV or dK).

// S = K Q^T, P = exp(S - L), dV += P^T dO. P goes to the other consumer.
struct SumOfValues {
  static constexpr i32 first_warp = 4;
  using Sum = Strip<kConfig.head_dim_v>;
  using FirstRing = QRing;
  using SecondRing = DORing;

  FLASHGEN_DEVICE static KRing kept_ring(const Shared& shared) { return shared.k_ring; }
  FLASHGEN_DEVICE static QRing first_ring(const Shared& shared) { return shared.q_ring; }
  FLASHGEN_DEVICE static DORing second_ring(const Shared& shared) { return shared.do_ring; }

  // Lines 10 and 11: S_ij = Q_i K_j^T - L_i.
  FLASHGEN_DEVICE static void issue_pairs(Shape::Scores& scores, const Shared& shared, QRing::Where at, Thread thread) {
    spread_columns(scores, shared.lse(at), thread);
    issue_over_columns(scores, shared.k, shared.q.slot(at.slot()));
  }

  // Line 11: P_ij = exp(S_ij - L_i), with marks for forbidden pairs.
  FLASHGEN_DEVICE static void finish_pairs(Shape::Scores& scores, Shape::RoundedScores& made, const Params& p,
                                           const Shared& shared, const KeyTile& keys, Step step, bool is_cut,
                                           QRing::Where at, PRing::Where p_at, Thread thread) {
    const i32 first_q = step.tile * kConfig.tile_q, warp = thread.warp - first_warp;
    const i32 first_key = keys.first_key + warp * kWarpRows;
    exponentials(scores, p.scale_log2);
    if (is_cut) {
      const auto forbid = [&](i32 i) {
        scores[i] = float_of(kForbidden);
      };
      // A band allows queries beyond the last. Their P is 0, but not if their key is no number, nor is then
      // their dS.
      for_forbidden<kConfig.tile_q / 2>(mask_of(p, keys, step.member), first_q, first_key, thread, forbid);
    }
    shared.p_ring.wait_empty(p_at);
    write_fragments(shared.part(p_at, warp), scores, thread);
    mbarrier_arrive(shared.p_ring.full(p_at));
  }
  FLASHGEN_DEVICE static void round_pairs(Shape::RoundedScores& rounded, const Shape::Scores& scores,
                                          const Shape::RoundedScores& made) {
    round_strip<element_t>(rounded, scores);
  }

  // Line 12: dV_j += P_ij^T dO_i.
  FLASHGEN_DEVICE static void issue_sum(Sum& dv, const Shape::RoundedScores& p, const Shared& shared, DORing::Where at) {
    issue_output(dv, p, shared.dout.slot(at.slot()));
  }

  FLASHGEN_DEVICE static void write(const Sum& dv, const Params& p, const KeyTile& keys, Thread thread) {
    const GlobalRows<element_t> rows = {
        p.dv + keys.sequence * p.dv_batch + keys.head * p.dv_head, p.dv_row, p.len_kv};
    const float one[2] = {1.0f, 1.0f};
    write_strip<element_t, kConfig.head_dim_v>(
        rows, keys.first_key + (thread.warp - first_warp) * kWarpRows, dv, one, thread);
  }
};

// dP = V dO^T, dS = P (dP - D), dK += dS^T Q. P comes from the other consumer.
struct SumOfKeys {
  static constexpr i32 first_warp = 8;
  using Sum = Strip<kConfig.head_dim>;
  using FirstRing = DORing;
  using SecondRing = QRing;

  FLASHGEN_DEVICE static VRing kept_ring(const Shared& shared) { return shared.v_ring; }
  FLASHGEN_DEVICE static DORing first_ring(const Shared& shared) { return shared.do_ring; }
  FLASHGEN_DEVICE static QRing second_ring(const Shared& shared) { return shared.q_ring; }

  // Line 13: dP_ij = dO_i V_j^T - D_i.
  FLASHGEN_DEVICE static void issue_pairs(Shape::Scores& dp, const Shared& shared, DORing::Where at, Thread thread) {
    spread_columns(dp, shared.dsum(at), thread);
    issue_over_columns(dp, shared.v, shared.dout.slot(at.slot()));
  }

  // Line 14: dS_ij = P_ij * (dP_ij - D_i).
  FLASHGEN_DEVICE static void finish_pairs(Shape::Scores& dp, Shape::RoundedScores& /*made*/, const Params& /*p*/,
                                           const Shared& shared, const KeyTile& /*keys*/, Step /*step*/, bool is_cut,
                                           DORing::Where /*at*/, PRing::Where p_at, Thread thread) {
    shared.p_ring.wait_full(p_at);
    multiply_by_fragments<kForbidden>(
        dp, shared.part(p_at, thread.warp - first_warp), is_cut, thread);
    mbarrier_arrive(shared.p_ring.empty(p_at));
  }
  FLASHGEN_DEVICE static void round_pairs(Shape::RoundedScores& rounded, const Shape::Scores& ds,
                                          const Shape::RoundedScores& /*made*/) {
    round_strip<element_t>(rounded, ds);
  }

  // Line 16: dK_j += dS_ij^T Q_i.
  FLASHGEN_DEVICE static void issue_sum(Sum& dk, const Shape::RoundedScores& ds, const Shared& shared, QRing::Where at) {
    issue_output(dk, ds, shared.q.slot(at.slot()));
  }

  FLASHGEN_DEVICE static void write(const Sum& dk, const Params& p, const KeyTile& keys, Thread thread) {
    const GlobalRows<element_t> rows = {
        p.dk + keys.sequence * p.dk_batch + keys.head * p.dk_head, p.dk_row, p.len_kv};
    const float scale[2] = {p.scale, p.scale};
    write_strip<element_t, kConfig.head_dim>(
        rows, keys.first_key + (thread.warp - first_warp) * kWarpRows, dk, scale, thread);
  }
};

// ---- A consumer: a warpgroup that works on all keys of the tile, and computes dV or dK.
template <class Role>
FLASHGEN_DEVICE void consume(const Params& p, u8* base) {
  const Thread thread = Thread::current().again();
  const Shared shared = Shared::at(base);
  const auto kept_ring = Role::kept_ring(shared);
  const auto first_ring = Role::first_ring(shared);
  const auto second_ring = Role::second_ring(shared);
  Ring<1>::Where kept_at;
  typename Role::FirstRing::Where first_at;
  typename Role::SecondRing::Where second_at;
  PRing::Where p_at;
  TileRing::Where tile_at;

  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const KeyTile& keys = shared.tiles[tile_at.slot()];
    if (!keys.exists) break;

    // Line 8: for each tile of queries that may attend to some key of this tile, of each head of the group.
    bool is_cut = false;
    const auto mask_of_member = [&](i32 member) { return mask_of(p, keys, member); };
    Queries steps = queries_of(p, keys);
    steps.start(thread, mask_of_member);
    bool goes_on = !steps.over();
    const auto take_step = [&]() {
      const Step step = steps.step();
      steps.advance(thread, mask_of_member);
      goes_on = !steps.over();
      const i32 first_q = step.tile * kConfig.tile_q, key_end = keys.first_key + kConfig.tile_kv;
      is_cut = !mask_of(p, keys, step.member).is_full(first_q, end_query(p, first_q), keys.first_key, key_end);
      return step;
    };

    // Line 7: dK_j = 0, dV_j = 0.
    typename Role::Sum sum;
    clear(sum);
    wgmma_pin(sum);
    if (goes_on) {
      // The left operand of a sum, and the next one, which replaces it once the product is complete.
      Shape::RoundedScores rounded, made;
      // Computes P or dS from a step's pairs, without the rounding.
      const auto take_pairs = [&](Shape::Scores& pairs) {
        wgmma_pin(pairs);
        // Addresses are computed in each step, to save registers.
        const Thread here = thread.again();
        const Step step = take_step();
        Role::finish_pairs(pairs, made, p, shared, keys, step, is_cut, first_at, p_at, here);
        p_at.advance();
        first_ring.release(first_at, here);
        first_at.advance();
      };
      const auto take_sum = [&]() {
        wgmma_pin(sum);
        second_ring.release(second_at, thread);
        second_at.advance();
      };

      kept_ring.wait_full(kept_at);
      {
        Shape::Scores pairs;
        first_ring.wait_full(first_at);
        Role::issue_pairs(pairs, shared, first_at, thread);
        wgmma_wait<0>();
        take_pairs(pairs);
        Role::round_pairs(rounded, pairs, made);
      }
      // A step's sum and the pairs of the next one.
      while (goes_on) {
        Shape::Scores pairs;
        const auto issue_pairs = [&]() {
          first_ring.wait_full(first_at);
          Role::issue_pairs(pairs, shared, first_at, thread);
        };
        if constexpr (!kConfig.sums_first) issue_pairs();
        second_ring.wait_full(second_at);
        Role::issue_sum(sum, rounded, shared, second_at);
        if constexpr (kConfig.sums_first) {
          issue_pairs();
          wgmma_wait<1>();
          take_sum();
          wgmma_wait<0>();
          take_pairs(pairs);
        } else {
          wgmma_wait<1>();
          take_pairs(pairs);
          wgmma_wait<0>();
          take_sum();
        }
        Role::round_pairs(rounded, pairs, made);
      }
      kept_ring.release(kept_at, thread);
      kept_at.advance();
      second_ring.wait_full(second_at);
      Role::issue_sum(sum, rounded, shared, second_at);
      wgmma_wait<0>();
      take_sum();
    }
    // Line 18: write dK_j, dV_j to global memory.
    Role::write(sum, p, keys, thread.again());
    mbarrier_arrive(shared.tile_ring.empty(tile_at));
    tile_at.advance();
  }
}

FLASHGEN_KERNEL(384, 1) backward_main_d256_causal_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  const Thread thread = Thread::current();
  const Shared shared = Shared::at(base);
  if (thread.index() == 0) {
    constexpr u32 each = Shape::warps_each, both = 2 * each;
    shared.k_ring.init(1, each);
    shared.v_ring.init(1, each);
    shared.q_ring.init(1, both);
    shared.do_ring.init(1, both);
    // P goes from thread to thread, and what tells of a tile of keys is read by all: each says so by itself.
    shared.p_ring.init(each * kWarpSize, each * kWarpSize);
    shared.tile_ring.init(1, both * kWarpSize);
    fence_mbarrier_init();
  }
  block_sync();

  // The registers that copying does not need go to those who compute. Each role finds out again who it is: so
  // few are left for copying that nothing else is to be kept.
  if (thread.warp < 4) {
    setmaxnreg_dec<kConfig.producer_registers>();
    if (thread.warp == 0) produce(p, base, thread);
  } else {
    setmaxnreg_inc<kConfig.consumer_registers>();
    if (thread.warp < 8) {
      consume<SumOfValues>(p, base);
    } else {
      consume<SumOfKeys>(p, base);
    }
  }
}
