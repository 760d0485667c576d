// backward_query_d256_causal_sm90a: FlashAttention-3, backward pass: dQ, without atomics.
//
// spec     {"head_dim":256,"head_dim_v":256,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 256 --dtype bf16 --causal --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 128, tile_kv 64, 384 threads
// roles    of 1 warpgroup one warp brings tiles, and three inspect K (24 registers a thread); 2 compute, 64
//          queries each (240)
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 128
//          query rows of a query head and batch entry
// smem     231440 bytes
//            q                   0 to  65536  Q_i
//            do              65536 to 131072  dO_i
//            k              131072 to 196608  K_j, 2 slots
//            v              196608 to 229376  V_j, 1 slots
//            stats          229376 to 230400  of each consumer -L_i in units of S, and -D_i
//            q_barriers     230400 to 230416  full and empty barriers of each slot
//            do_barriers    230528 to 230544
//            k_barriers     230656 to 230688
//            v_barriers     230784 to 230800
//            tile_barriers  230912 to 230944
//            tiles          231040 to 231104  the next tiles of queries
//            scores_taken   231168 to 231184  all consumers have their scores of K_j
//            inspected      231296 to 231312  non-finite values of K_j are cleared
//            written        231424 to 231440  dQ of a tile of queries is in global memory
// because  the widest tile of keys with two slots
//
// contents   70  Integer and 16-bit element types, without any CUDA header.
//            92  What the CUDA language itself provides, under names that the emulator implements on the host.
//           131  Scalar arithmetic, one instruction each.
//           150  Element types.
//           184  Tiles in shared memory, swizzled so that no access pattern of the kernels has a bank conflict.
//           189  Warp-level matrix products.
//           208  Banded masks.
//           393  Barriers at which threads may arrive without waiting, or wait without arriving.
//           399  The kernel: its configuration, parameters and text.
//           402  The kernel: its configuration, parameters and text.
//           435  The kernel: its configuration, parameters and text.
//           448  Tensor maps, which describe tensors to bulk copies of boxes.
//           457  Bulk copies.
//           462  The kernel: its configuration, parameters and text.
//           486  The kernel: its configuration, parameters and text.
//           496  The kernel: its configuration, parameters and text.
//           498  Communication between blocks and between grids.
//           502  The kernel: its configuration, parameters and text.
//           538  The kernel: its configuration, parameters and text.
//           540  Reallocation of registers among warpgroups (sm_90a).
//           555  The 64-bit descriptor of an operand of wgmma in shared memory.
//           590  Matrix products of a warpgroup (sm_90a).
//           841  Four products of a warpgroup, which add to the same accumulators, as one asm statement.
//           850  Tiles as TMA writes them and wgmma reads them.
//           963  Streaming tiles between global and shared memory.
//           976  Writing a warpgroup's results to shared and global memory.
//          1029  A step of the backward kernels for Hopper.
//          1064  Keeping NaN and infinity where they belong.
//          1122  Rings of slots in shared memory, filled by one side and emptied by the other.
//          1186  Which tiles of queries, or of keys, a persistent block works on, in order.
//          1279  Parts of the two backward kernels for wide heads on Hopper, where dK or dV of 64 keys fills a consumer's registers.
//          1283  The kernel: its configuration, parameters and text.
//          1286  The kernel: its configuration, parameters and text.
//          1338  The kernel: its configuration, parameters and text.
//          1384  The kernel: its configuration, parameters and text.
//          1522  The kernel: its configuration, parameters and text.
//          1602  The kernel: its configuration, parameters and text.
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

// ---- flashgen/band.cuh
// Banded masks: key k is allowed for query q when lower <= k - q <= upper and both exist.

struct Range {
  i32 begin, end;
  FLASHGEN_DEVICE i32 size() const { return end - begin; }
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

// Prefetches the map itself.
FLASHGEN_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- Runs of bytes. Sizes and addresses are multiples of 16.

FLASHGEN_DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

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

template <class T>
FLASHGEN_DEVICE T not_a_number() {
  if constexpr (kIsFloat<T>) {
    return float_of(0x7fffffffu);
  } else {
    return T{0x7fff};
  }
}

// Puts NaN into the results of queries that attend to a non-finite value in a tile that the mask cuts
// through. `results` are the tile of queries from first_q on, `source` the keys' rows that were multiplied;
// every thread takes columns of its own.
template <i32 threads, i32 head_dim, i32 tile_kv, class Tile, class Mask>
FLASHGEN_DEVICE void mark_non_finite_results(Tile results, i32 first_q,
                                             GlobalRows<const typename Tile::Element> source, Range keys,
                                             const Mask& mask, Thread thread) {
  const i32 end_q = smaller(first_q + Tile::rows, mask.len_q);
#pragma unroll 1
  for (i32 column = thread.index(); column < head_dim; column += threads) {
#pragma unroll 1
    for (i32 key = keys.begin * tile_kv; key < smaller(keys.end * tile_kv, source.row_count); ++key) {
      const i32 first_key = key / tile_kv * tile_kv;
      if (mask.is_full(first_q, end_q, first_key, first_key + tile_kv) ||
          !is_non_finite(*source.at(key, column)))
        continue;
#pragma unroll 1
      for (i32 q = first_q; q < end_q; ++q) {
        if (mask.allows(q, key))
          *results.element_at(q - first_q, column) = not_a_number<typename Tile::Element>();
      }
    }
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

// ---- dQ. The rows of scores are queries, 64 per consumer. Each step takes a tile of keys.

struct BackwardQueryConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 k_slots;
  i32 v_slots;
  i32 stats_rows;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  i32 section_heads;
  bool longest_first;
  bool has_lower;
  bool has_upper;
};

template <BackwardQueryConfig cfg, class T>
struct BackwardQueryShape {
  static_assert(cfg.tile_q == cfg.consumers * kWarpgroupRows, "each consumer owns 64 queries");
  static_assert((cfg.k_slots & (cfg.k_slots - 1)) == 0 && (cfg.v_slots & (cfg.v_slots - 1)) == 0,
                "K and V share a slot counter");
  static_assert(cfg.stats_rows == kWarpgroupRows, "a row of statistics holds one consumer's queries");
  using QTile = PanelTile<T, cfg.tile_q, cfg.head_dim>;
  using DOTile = PanelTile<T, cfg.tile_q, cfg.head_dim_v>;
  using KTile = PanelTile<T, cfg.tile_kv, cfg.head_dim>;
  using VTile = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using Scores = Strip<cfg.tile_kv>;
  using RoundedScores = Rounded<cfg.tile_kv>;
  using DQ = Strip<cfg.head_dim>;

  // L and D of a consumer's queries.
  static constexpr i32 stats_bytes = 2 * kWarpgroupRows * 4;
  static constexpr u32 consumer_warps = 4 * cfg.consumers;
};

// A tile of queries as the producer announces it.
struct QueryTile {
  RowTile rows;
  // Whether some query of it attends to some key.
  i32 attends;
};

// Initializes each row of a strip with one value.
template <i32 count>
FLASHGEN_DEVICE void spread_rows(float (&strip)[count], const float (&rows)[2]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] = rows[i / 2 % 2];
}

// ---- Non-finite values, see contain.cuh. Several warps share a tile: each has every `warps`-th chunk of a
// row's 16 bytes, so that a column's values are one warp's.

template <class T, i32 warps>
FLASHGEN_DEVICE bool is_column_of_warp(i32 column, i32 warp) {
  constexpr i32 elements = kChunkBytes / static_cast<i32>(sizeof(T));
  return column / elements % warps == warp;
}

// Calls `visit(chunk)` for those of the warp's chunks that are the lane's, in shared memory from `base` on.
template <i32 warps, class Tile, class Visit>
FLASHGEN_DEVICE void for_chunks_of_warp(u8* base, Tile tile, i32 warp, Thread thread, const Visit& visit) {
#pragma unroll 1
  for (i32 chunk = warp; chunk < 8 * Tile::panels; chunk += warps) {
#pragma unroll 2
    for (i32 row = thread.lane; row < Tile::rows; row += kWarpSize)
      visit(*reinterpret_cast<Vec16*>(base + (tile.chunk_at(row, chunk) - shared_address(base))));
  }
}

// Whether a lane's chunks hold NaN or infinities.
template <i32 warps, class Tile>
FLASHGEN_DEVICE bool holds_non_finite_values(u8* base, Tile tile, i32 warp, Thread thread) {
  u32 signs = 0;
  for_chunks_of_warp<warps>(base, tile, warp, thread, [&](const Vec16& chunk) {
    const Vec16 read = chunk;
#pragma unroll
    for (i32 w = 0; w < 4; ++w) signs |= non_finite_signs<typename Tile::Element>(read.words[w]);
  });
  return signs != 0;
}

// Replaces them by 0.
template <i32 warps, class Tile>
FLASHGEN_DEVICE void clear_non_finite_values(u8* base, Tile tile, i32 warp, Thread thread) {
  for_chunks_of_warp<warps>(base, tile, warp, thread, [&](Vec16& chunk) {
#pragma unroll 1
    for (i32 w = 0; w < 4; ++w) {
      u32& word = chunk.words[w];
      word &= ~((non_finite_signs<typename Tile::Element>(word) >> 15) * 0xffffu);
    }
  });
}

}  // namespace flashgen

// ---- kernels/backward_query_sm90.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr BackwardQueryConfig kConfig{
    .head_dim = 256,
    .head_dim_v = 256,
    .tile_q = 128,     // B_r: query rows per tile that a block works on
    .tile_kv = 64,     // B_c: keys per step
    .k_slots = 2,      // slots for K
    .v_slots = 1,      // slots for V
    .stats_rows = 64,  // queries per row of row_stats
    .consumers = 2,    // warpgroups that compute, 64 query rows each
    .producer_registers = 24,
    .consumer_registers = 240,
    .section_heads = 16,    // heads of a section, whose tiles are scheduled together
    .longest_first = true,  // the last queries of a head go first
    .has_lower = false,     // the band has a lower bound on k - q
    .has_upper = true,      // the band has an upper bound on k - q
};

struct Params {
  TensorMap q_map;  // for TMA
  TensorMap k_map;
  TensorMap v_map;
  TensorMap dout_map;
  const element_t* k;
  element_t* dq;
  const float* row_stats;  // per tile of queries: -L in units of S, then -D
  u32* counter;            // tiles drawn, then blocks done; 0 between launches
  i64 k_batch;             // strides are in elements
  i64 k_row;
  i64 k_head;
  i64 dq_batch;
  i64 dq_row;
  i64 dq_head;
  i32 heads_q;
  i32 heads_kv;
  i32 len_q;
  i32 len_kv;
  i32 group;       // query heads per key/value head
  i32 band_lower;  // key k is allowed for query q when band_lower <= k - q <= band_upper
  i32 band_upper;
  i32 q_tiles;  // tiles of queries of one head
  i32 tiles;    // tiles of all heads of all sequences
  float scale;
  float scale_log2;  // scale * log2(e)
};
static_assert(sizeof(Params) == 640, "the launcher packs Params into 640 bytes");

namespace smem {
constexpr u32 kQ = 0;               // Q_i
constexpr u32 kDo = 65536;          // dO_i
constexpr u32 kK = 131072;          // K_j, 2 slots
constexpr u32 kV = 196608;          // V_j, 1 slots
constexpr u32 kStats = 229376;      // of each consumer -L_i in units of S, and -D_i
constexpr u32 kQBarriers = 230400;  // full and empty barriers of each slot
constexpr u32 kDoBarriers = 230528;
constexpr u32 kKBarriers = 230656;
constexpr u32 kVBarriers = 230784;
constexpr u32 kTileBarriers = 230912;
constexpr u32 kTiles = 231040;        // the next tiles of queries
constexpr u32 kScoresTaken = 231168;  // all consumers have their scores of K_j
constexpr u32 kInspected = 231296;    // non-finite values of K_j are cleared
constexpr u32 kWritten = 231424;      // dQ of a tile of queries is in global memory

}  // namespace smem

using Shape = BackwardQueryShape<kConfig, element_t>;
using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using QRing = Ring<1>;
using DORing = Ring<1>;
using KRing = Ring<kConfig.k_slots>;
using VRing = Ring<kConfig.v_slots>;
using TileRing = Ring<2>;
// Where V_j lies, by where K_j does.
FLASHGEN_DEVICE VRing::Where values_at(KRing::Where at) { return {at.count}; }

// Everything that the warps of a block share.
struct Shared {
  u8* base;
  Shape::QTile q;
  Shape::DOTile dout;
  Shape::KTile k;
  Shape::VTile v;
  QRing q_ring;
  DORing do_ring;
  KRing k_ring;
  VRing v_ring;
  TileRing tile_ring;
  QueryTile* tiles;  // what the slots of tile_ring hold

  FLASHGEN_DEVICE static Shared at(u8* base) {
    const u32 start = shared_address(base);
    return {base,
            {start + smem::kQ},
            {start + smem::kDo},
            {start + smem::kK},
            {start + smem::kV},
            {start + smem::kQBarriers},
            {start + smem::kDoBarriers},
            {start + smem::kKBarriers},
            {start + smem::kVBarriers},
            {start + smem::kTileBarriers},
            reinterpret_cast<QueryTile*>(base + smem::kTiles),
    };
  }
  // Of a consumer's queries: what they subtract from their logits, then -D.
  FLASHGEN_DEVICE float* stats(i32 consumer) const {
    return reinterpret_cast<float*>(base + smem::kStats + consumer * Shape::stats_bytes);
  }
  // End when all have the scores of a slot of K, and when the inspectors are done with the slot.
  FLASHGEN_DEVICE u32 scores_taken(i32 slot) const { return shared_address(base + smem::kScoresTaken) + 8 * slot; }
  FLASHGEN_DEVICE u32 inspected(i32 slot) const { return shared_address(base + smem::kInspected) + 8 * slot; }
  // Ends when all results of a tile of queries have been written.
  FLASHGEN_DEVICE u32 written(TileRing::Where at) const {
    return shared_address(base + smem::kWritten) + 8 * at.slot();
  }
};

FLASHGEN_DEVICE Mask mask_of(const Params& p, const RowTile& rows) {
  return Mask::of(p, rows.sequence, rows.head);
}
FLASHGEN_DEVICE i32 end_q(const Params& p, const RowTile& rows) {
  return smaller(rows.first_q + kConfig.tile_q, p.len_q);
}
// The tiles of keys between the first and the last that some query of the tile may attend to.
FLASHGEN_DEVICE Range keys_of(const Params& p, const RowTile& rows) {
  return mask_of(p, rows).key_tiles(rows.first_q, end_q(p, rows), kConfig.tile_kv);
}

// Those that the mask does not cut through. The end of the keys does not count: zeros lie beyond.
FLASHGEN_DEVICE Range uncut_keys(const Params& p, const RowTile& rows) {
  return mask_of(p, rows).full_key_tiles(rows.first_q, end_q(p, rows), kConfig.tile_kv);
}

// ---- The producer: one warp that draws tiles of queries and loads Q, dO and their statistics by TMA, and for each
// of their steps K and V. Only one lane waits and copies: another lane that came late to a barrier could miss a
// phase.
FLASHGEN_DEVICE void produce(const Params& p, u8* base) {
  const Thread thread = Thread::current().again();
  const Shared shared = Shared::at(base);
  const bool elected = thread.lane == 0;
  QRing::Where q_at;
  KRing::Where k_at;
  VRing::Where v_at;
  TileRing::Where tile_at;
  if (elected) {
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
    prefetch_tensormap(&p.dout_map);
  }

  // Line 3: load Q_i, L_i, D_i.
  const auto load_queries = [&](const RowTile& rows) {
    constexpr i32 part = kConfig.stats_rows, floats = 2 * part;
    const i32 parts = ceil_div(p.len_q, part);
    const float* const stats =
        p.row_stats + (static_cast<i64>(rows.sequence) * p.heads_q + rows.head) * parts * floats;
    const u32 full = shared.q_ring.full(q_at);
    shared.q_ring.wait_empty(q_at);
    mbarrier_arrive_expect_tx(full, Shape::QTile::bytes + kConfig.consumers * Shape::stats_bytes);
    shared.q.load(p.q_map, full, rows.first_q, rows.head, rows.sequence);
    // If all queries of a consumer lie beyond the end, loads the last part instead, which is not used.
    for (i32 i = 0; i < kConfig.consumers; ++i) {
      const i32 number = smaller(rows.first_q / part + i, parts - 1);
      bulk_load(shared_address(shared.stats(i)), stats + number * floats, Shape::stats_bytes, full);
    }
  };
  const auto load_gradients = [&](const RowTile& rows) {
    const u32 full = shared.do_ring.full(q_at);
    shared.do_ring.wait_empty(q_at);
    mbarrier_arrive_expect_tx(full, Shape::DOTile::bytes);
    shared.dout.load(p.dout_map, full, rows.first_q, rows.head, rows.sequence);
  };

  i32 number = block_idx_x();
  while (true) {
    const RowTile rows = row_tile<kConfig.tile_q, kConfig.section_heads, kConfig.longest_first>(p, number);
    const Range keys = rows.exists ? keys_of(p, rows) : Range{0, 0};
    const bool attends = keys.size() > 0;
    if (elected) {
      shared.tile_ring.wait_empty(tile_at);
      shared.tiles[tile_at.slot()] = {rows, attends};
      mbarrier_arrive(shared.tile_ring.full(tile_at));
    }
    tile_at.advance();
    if (!rows.exists) break;
    const i32 head_kv = rows.head / p.group;
    if (elected && attends) load_queries(rows);

    // Line 6: load K_j, V_j; and dO_i before the first V_j.
    bool has_gradients = false;
    const auto load_keys = [&](i32 tile) {
      if (elected) {
        shared.k_ring.wait_empty(k_at);
        mbarrier_arrive_expect_tx(shared.k_ring.full(k_at), Shape::KTile::bytes);
        const u32 k_full = shared.k_ring.full(k_at), v_full = shared.v_ring.full(v_at);
        shared.k.slot(k_at.slot()).load(p.k_map, k_full, tile * kConfig.tile_kv, head_kv, rows.sequence);
        if (!has_gradients) load_gradients(rows);
        shared.v_ring.wait_empty(v_at);
        mbarrier_arrive_expect_tx(v_full, Shape::VTile::bytes);
        shared.v.slot(v_at.slot()).load(p.v_map, v_full, tile * kConfig.tile_kv, head_kv, rows.sequence);
      }
      has_gradients = true;
      k_at.advance();
      v_at.advance();
    };
    for (i32 tile = keys.begin; tile < keys.end; ++tile) load_keys(tile);
    if (attends) q_at.advance();
    number = shuffle(elected ? draw_tile(p) : 0, 0);
  }
  if (elected) leave_counters(p);
}

// ---- The inspectors: three warps that search the tiles of K that the mask cuts for non-finite values. S needs these
// values, and dQ = dS K must not spread them, so they are cleared between the two products. Where they should have
// reached dQ, NaN is written afterwards.

// Puts NaN into those results of a tile that a non-finite value of a key that they attend to would have reached: where it
// was taken out, dS is 0 or no number. Each inspector has columns of its own.
constexpr i32 kInspectors = 3;
FLASHGEN_DEVICE void mark_non_finite_results(const Params& p, const RowTile& rows, i32 warp, Thread thread) {
  const Mask mask = mask_of(p, rows);
  const Range keys = keys_of(p, rows);
  const element_t* const k = p.k + rows.sequence * p.k_batch + rows.head / p.group * p.k_head;
  element_t* const dq = p.dq + rows.sequence * p.dq_batch + rows.head * p.dq_head;
  for (i32 key = keys.begin * kConfig.tile_kv; key < smaller(keys.end * kConfig.tile_kv, p.len_kv); ++key) {
    for (i32 column = thread.lane; column < kConfig.head_dim; column += kWarpSize) {
      if (!is_column_of_warp<element_t, kInspectors>(column, warp) || !is_non_finite(k[key * p.k_row + column])) continue;
      for (i32 q = rows.first_q; q < end_q(p, rows); ++q) {
        if (mask.allows(q, key)) dq[q * p.dq_row + column] = not_a_number<element_t>();
      }
    }
  }
}

FLASHGEN_DEVICE void inspect(const Params& p, u8* base) {
  const Thread thread = Thread::current().again();
  const Shared shared = Shared::at(base);
  const i32 warp = thread.warp - 1;
  KRing::Where k_at;
  TileRing::Where tile_at;
  // Of the tile of queries.
  bool has_found = false;
  // Clears non-finite values from the slot of K if the mask cuts it.
  const auto inspect_slot = [&](bool is_cut) {
    const i32 slot = k_at.slot();
    const Shape::KTile keys = shared.k.slot(slot);
    const bool is_non_finite = is_cut && warp_any(holds_non_finite_values<kInspectors>(shared.base, keys, warp, thread));
    // Also if nothing is to be done, so that no phase passes unnoticed.
    mbarrier_wait(shared.scores_taken(slot), k_at.parity());
    if (is_non_finite) {
      clear_non_finite_values<kInspectors>(shared.base, keys, warp, thread);
      fence_proxy_async_shared();
      has_found = true;
    }
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(shared.inspected(slot));
    shared.k_ring.release(k_at, thread);
    k_at.advance();
  };
  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const QueryTile& tile = shared.tiles[tile_at.slot()];
    if (!tile.rows.exists) break;
    has_found = false;
    const Range keys = keys_of(p, tile.rows), uncut = uncut_keys(p, tile.rows);
    for (i32 key_tile = keys.begin; key_tile < keys.end; ++key_tile) {
      shared.k_ring.wait_full(k_at);
      inspect_slot(!uncut.has(key_tile));
    }
    mbarrier_wait(shared.written(tile_at), tile_at.parity());
    if (has_found) mark_non_finite_results(p, tile.rows, warp, thread.again());
    mbarrier_arrive(shared.tile_ring.empty(tile_at));
    tile_at.advance();
  }
}

// ---- A consumer: a warpgroup that owns 64 of the tile's queries.
FLASHGEN_DEVICE void consume(const Params& p, u8* base) {
  const Thread thread = Thread::current().again();
  const Shared shared = Shared::at(base);
  // Which consumer this is, and where its warps' queries begin within a tile.
  const i32 consumer = thread.warp / 4 - 1;
  const i32 strip_row = consumer * kWarpgroupRows;
  const i32 warp_row = strip_row + thread.warp % 4 * kWarpRows;
  const Shape::QTile strip_q = shared.q.from_row(strip_row);
  const Shape::DOTile strip_dout = shared.dout.from_row(strip_row);
  QRing::Where q_at;
  // The position in the rings of K and V. dQ is one step behind.
  KRing::Where k_at;
  TileRing::Where tile_at;

  while (true) {
    shared.tile_ring.wait_full(tile_at);
    const QueryTile& tile = shared.tiles[tile_at.slot()];
    if (!tile.rows.exists) break;
    const i32 first_q = tile.rows.first_q;
    bool goes_on = tile.attends;
    i32 key_tile = 0;
    bool is_cut = false;
    Range keys = keys_of(p, tile.rows);
    const i32 row = first_q + strip_row;
    const Range full_keys = mask_of(p, tile.rows).full_key_tiles(
        row, larger(row + 1, smaller(row + kWarpgroupRows, p.len_q)), kConfig.tile_kv);
    const auto take_step = [&]() {
      key_tile = keys.begin++;
      is_cut = !full_keys.has(key_tile) || (key_tile + 1) * kConfig.tile_kv > p.len_kv;
      goes_on = keys.size() > 0;
    };

    // Line 4: dQ_i = 0.
    Shape::DQ dq;
    clear(dq);
    wgmma_pin(dq);
    if (goes_on) {
      shared.q_ring.wait_full(q_at);
      // L_i and D_i of this lane's two rows.
      const float* const stats = shared.stats(consumer) + thread.warp % 4 * kWarpRows + thread.row();
      const float lse[2] = {stats[0], stats[8]};
      const float dsum[2] = {stats[kWarpgroupRows], stats[kWarpgroupRows + 8]};
      // Line 7: S_ij = Q_i K_j^T - L_i.
      const auto multiply_keys = [&](Shape::Scores& scores) {
        shared.k_ring.wait_full(k_at);
        spread_rows(scores, lse);
        wgmma_pin(scores);
        issue_over_columns(scores, strip_q, shared.k.slot(k_at.slot()));
      };
      // Line 9: dP_ij = dO_i V_j^T - D_i.
      const auto multiply_values = [&](Shape::Scores& dp) {
        shared.v_ring.wait_full(values_at(k_at));
        spread_rows(dp, dsum);
        wgmma_pin(dp);
        issue_over_columns(dp, strip_dout, shared.v.slot(values_at(k_at).slot()));
      };
      // Line 8: P_ij = exp(S_ij - L_i).
      const auto take_scores = [&](Shape::Scores& scores) {
        wgmma_pin(scores);
        // Addresses are computed in each step, to save registers.
        const Thread here = thread.again();
        take_step();
        warp_sync();
        if (here.lane == 0) mbarrier_arrive(shared.scores_taken(k_at.slot()));
        if (!goes_on) mbarrier_arrive(shared.q_ring.empty(q_at));
        const i32 key = key_tile * kConfig.tile_kv;
        exponentials(scores, p.scale_log2);
        if (is_cut) {
          mask_keys(blocks_of(scores), float_of(kForbidden),
                    mask_of(p, tile.rows), first_q + warp_row, key, here);
        }
      };
      // Line 10: dS_ij = P_ij * (dP_ij - D_i).
      const auto take_values = [&](Shape::Scores& dp, const Shape::Scores& scores, Shape::RoundedScores& ds) {
        wgmma_pin(dp);
        shared.v_ring.release(values_at(k_at), thread);
        k_at.advance();
        if (!goes_on) shared.do_ring.release(q_at, thread);
        if (is_cut) {
          multiply_where_allowed<kForbidden>(dp, scores);
        } else {
          multiply_strips(dp, scores);
        }
        round_strip<element_t>(ds, dp);
      };
      // Line 11: dQ_i += dS_ij K_j.
      const auto multiply_scores = [&](const Shape::RoundedScores& ds) {
        mbarrier_wait(shared.inspected(k_at.before().slot()), k_at.before().parity());
        issue_output(dq, ds, shared.k.slot(k_at.before().slot()));
      };
      const auto take_dq = [&]() {
        wgmma_pin(dq);
        shared.k_ring.release(k_at.before(), thread);
      };

      Shape::RoundedScores ds;
      {
        Shape::Scores scores, dp;
        multiply_keys(scores);
        shared.do_ring.wait_full(q_at);
        multiply_values(dp);
        wgmma_wait<1>();
        take_scores(scores);
        wgmma_wait<0>();
        take_values(dp, scores, ds);
      }
      while (goes_on) {
        Shape::Scores scores, dp;
        // The products queue, so that dQ may be waited for while the scores run: its operands' registers and slot
        // are soon free.
        multiply_scores(ds);
        multiply_keys(scores);
        wgmma_wait<1>();
        take_dq();
        multiply_values(dp);
        wgmma_wait<1>();
        take_scores(scores);
        wgmma_wait<0>();
        take_values(dp, scores, ds);
      }
      multiply_scores(ds);
      wgmma_wait<0>();
      take_dq();
      q_at.advance();
    }

    // Line 14: write dQ_i to global memory.
    {
      const Thread here = thread.again();
      const i32 row = tile.rows.first_q + (here.warp - 4) * kWarpRows;
      const float scale[2] = {p.scale, p.scale};
      const GlobalRows<element_t> results = {
          p.dq + tile.rows.sequence * p.dq_batch + tile.rows.head * p.dq_head, p.dq_row, p.len_q};
      write_strip<element_t, kConfig.head_dim>(results, row, dq, scale, here);
    }
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(shared.written(tile_at));
    mbarrier_arrive(shared.tile_ring.empty(tile_at));
    tile_at.advance();
  }
}

FLASHGEN_KERNEL(384, 1) backward_query_d256_causal_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  const Thread thread = Thread::current();
  const Shared shared = Shared::at(base);
  if (thread.index() == 0) {
    constexpr u32 consumer_warps = Shape::consumer_warps, inspectors = kInspectors;
    // What tells of a tile of queries, and their statistics, are read by all lanes, and each gives them back for itself.
    shared.q_ring.init(1, kWarpSize * consumer_warps);
    shared.do_ring.init(1, consumer_warps);
    shared.k_ring.init(1, consumer_warps + inspectors);
    shared.v_ring.init(1, consumer_warps);
    shared.tile_ring.init(1, kWarpSize * (consumer_warps + inspectors));
    for (i32 slot = 0; slot < kConfig.k_slots; ++slot) {
      mbarrier_init(shared.scores_taken(slot), consumer_warps);
      mbarrier_init(shared.inspected(slot), inspectors);
    }
    for (u32 slot = 0; slot < 2; ++slot) mbarrier_init(shared.written({slot}), consumer_warps);
    fence_mbarrier_init();
  }
  block_sync();

  // The registers that copying does not need go to those who compute.
  if (thread.warp < 4) {
    setmaxnreg_dec<kConfig.producer_registers>();
    if (thread.warp == 0) produce(p, base);
    if (thread.warp != 0) inspect(p, base);
  } else {
    setmaxnreg_inc<kConfig.consumer_registers>();
    consume(p, base);
  }
}
