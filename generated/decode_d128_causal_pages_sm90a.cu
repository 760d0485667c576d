// decode_d128_causal_pages_sm90a: Flash-Decoding, forward pass of few new queries: O and the log-sum-exp of
// each row.
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"bf16","mask":"causal","direction":"forward","deterministic":false,"cache":"paged"}
// rebuild  flashgen build --head-dim 128 --dtype bf16 --causal --forward-only --cache paged --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 64, tile_kv 64, stages 4, warps 8, 384 threads
// roles    of 1 warpgroup 4 warps copy tiles (40 registers a thread); 2 compute, in turns (232)
// grid     no more blocks than run at once, 1 on each multiprocessor; they take one tile after another: 64
//          key rows of a key/value head and batch entry; they start while the grid before them ends, and wait
//          for it
// smem     182912 bytes
// because  four warps keep up to 128 KiB of keys and values under way, and two warpgroups take turns
//
// contents   55  Instructions, one per function: types, device, copy, math, matrix.
//           186  Element types.
//           233  Banded masks.
//           312  Streaming tiles between global and shared memory.
//           328  Keys and values in a cache.
//           383  Instructions, one per function: barrier, bulk, grid, descriptor, wgmma, wgmma_fours.
//           688  What a softmax takes exponentials of.
//           717  What an online softmax keeps of each row from one tile of keys to the next.
//           730  The online softmax.
//           874  The sizes of a decode kernel.
//           914  The rows of a tile.
//          1037  The type of the cache's elements.
//          1060  Thread blocks that go over the same keys at the same time, each for different rows.
//          1095  Results of a part of the keys.
//          1170  What happens to products Q K^T before the softmax.
//          1187  The results of rows.
//          1331  Accumulators of a warp's 16 rows in memory, in the layout of its lanes.
//          1370  From the results of warps, each with keys of its own, to those of a thread block.
//          1493  Tiles as TMA writes them and wgmma reads them.
//          1587  S = Q K^T and O += P V of the forward kernel.
//          1652  Rings of slots in shared memory, filled by one side and emptied by the other.
//          1698  Finding NaN and infinity.
//          1715  P V of a block that the mask cuts, where V may hold NaN or infinity.
//          1784  Which keys, and which tiles of them, the rows of an item may attend to.
//          1839  The boxes by which TMA copies a tile of keys or values from a cache.
//          1895  Walking over the tiles that a mask does not rule out.
//          1930  How the producer warps of Hopper's decode kernels copy tiles of keys and values.
//          1981  Which tiles of keys a thread block works on.
//          2201  What a thread block computes of an item.
//          2265  What Hopper's decode kernels have in common.
//          2338  The online softmax of a warpgroup's rows.
//          2360  Attention of few new tokens to a cache, on Hopper.
//          2520  The kernel: its configuration, parameters and text.

// The shapes of its products, by their columns: S and O.
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
FLASHGEN_DEVICE i32 block_idx_x() { return static_cast<i32>(blockIdx.x); }
FLASHGEN_DEVICE i32 grid_dim_x() { return static_cast<i32>(gridDim.x); }
FLASHGEN_DEVICE void block_sync() { __syncthreads(); }
FLASHGEN_DEVICE void warp_sync() { __syncwarp(); }
FLASHGEN_DEVICE bool warp_any(bool condition) { return __any_sync(0xffffffffu, condition) != 0; }
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

// The 32-bit address of a pointer into shared memory, as instructions take it.
FLASHGEN_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- flashgen/ptx/copy.cuh
// Moving data: asynchronous global-to-shared copies and reductions to global memory.

// Copies the first `valid_bytes` of 16 (8, 4) bytes and zeroes the rest. Copies of 16 bytes bypass L1.
FLASHGEN_DEVICE void cp_async_16(u32 destination, const void* source, u32 valid_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

FLASHGEN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` groups are in flight.
template <int pending>
FLASHGEN_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

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
  FLASHGEN_DEVICE i32 index() const { return warp * kWarpSize + lane; }
  // The lane's accumulators in a block of 16 x 8 are in rows row() and + 8, and in columns column() and + 1.
  FLASHGEN_DEVICE i32 row() const { return lane / 4; }
  FLASHGEN_DEVICE i32 column() const { return 2 * (lane % 4); }
};

// A warp's accumulators: row_blocks x column_blocks blocks of 16 x 8.
template <i32 row_blocks, i32 column_blocks>
using Accumulator = float[row_blocks][column_blocks][4];

constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }
constexpr i32 round_up(i32 a, i32 b) { return ceil_div(a, b) * b; }
constexpr i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
constexpr i32 larger(i32 a, i32 b) { return a > b ? a : b; }

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

// Two neighboring elements, written with one store.
template <class T>
struct alignas(4) Pair {
  u32 bits;
  FLASHGEN_DEVICE static Pair from(float first, float second) { return {pack(T{}, first, second)}; }
};

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

  // Tiles of keys that some query of [q_begin, q_end) may attend to.
  FLASHGEN_DEVICE Range key_tiles(i32 q_begin, i32 q_end, i32 tile) const {
    i32 begin = 0, end = len_kv;
    end = smaller(end, q_end + upper);
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

// The keys that a band allows for a query, as bits_from() counts them from `key`, the lane's first one.
template <bool has_lower, bool has_upper>
FLASHGEN_DEVICE u32 allowed_keys(const Band<has_lower, has_upper>& mask, i32 q, i32 key) {
  i32 end = mask.len_kv - key;
  end = smaller(end, q + mask.upper - key + 1);
  u32 allowed = ~bits_from(end);
  return allowed;
}

// Sets the bits of a lane's pairs that a mask allows.
template <i32 column_blocks, bool has_lower, bool has_upper>
FLASHGEN_DEVICE void find_allowed(u32 (&allowed)[2], const Band<has_lower, has_upper>& mask, i32 first_q,
                                  i32 first_key, Thread thread) {
#pragma unroll
  for (i32 h = 0; h < 2; ++h)
    allowed[h] = allowed_keys(mask, first_q + thread.row() + 8 * h, first_key + thread.column());
}

// ---- flashgen/stream.cuh
// Streaming tiles between global and shared memory.

// Asynchronous copy of one chunk, in pieces of access_bytes.
template <class T, i32 access_bytes>
FLASHGEN_DEVICE void copy_chunk_async(u32 destination, const T* source, i32 valid) {
  constexpr i32 pieces = kChunkBytes / access_bytes;
  constexpr i32 piece_elements = access_bytes / static_cast<i32>(sizeof(T));
#pragma unroll
  for (i32 i = 0; i < pieces; ++i) {
    const u32 bytes = i * piece_elements < valid ? access_bytes : 0;
    const T* from = source + (bytes != 0 ? i * piece_elements : 0);
    cp_async_16(destination, from, bytes);
  }
}

// ---- flashgen/cache.cuh
// Keys and values in a cache: where those of a sequence lie, and the tiles of keys that one of several blocks
// goes over.

// The row of a cache, or of a table of pages, that belongs to a sequence, which of its keys are there, and
// where its queries begin among those of all, if they are packed.
struct CachedSequence {
  i64 row;
  i32 first_key;
  i32 first_q;
  i32 len_q, len_kv;

  // What an array says is never taken for more than there is room for.
  template <class Params>
  FLASHGEN_DEVICE static CachedSequence of(const Params& p, i32 sequence) {
    const i32 end = smaller(keys_of(p, sequence) + p.appended, p.len_kv);
    const i32 first = p.cache_leftpad == nullptr ? 0 : larger(0, smaller(p.cache_leftpad[sequence], end));
    const Range queries = queries_of(p, sequence);
    return {row_of(p, sequence), first, queries.begin, queries.size(), end - first};
  }

  // No more than the longest sequence may have.
  FLASHGEN_DEVICE static Range queries_of(const auto& p, i32 sequence) {
    if (p.cu_seqlens_q == nullptr) return {0, p.len_q};
    const i32 first = p.cu_seqlens_q[sequence];
    return {first, larger(first, smaller(p.cu_seqlens_q[sequence + 1], first + p.len_q))};
  }

  FLASHGEN_DEVICE static i64 row_of(const auto& p, i32 sequence) {
    return p.cache_batch_idx == nullptr ? sequence : p.cache_batch_idx[sequence];
  }

  // How many keys there are without those that were appended.
  FLASHGEN_DEVICE static i32 before(const auto& p, i32 sequence) {
    return p.cache_seqlens == nullptr ? p.len_kv : larger(0, smaller(p.cache_seqlens[sequence], p.len_kv));
  }

  // The same where an array may say how many keys all sequences before this one have.
  FLASHGEN_DEVICE static i32 keys_of(const auto& p, i32 sequence) {
    if (p.cu_seqlens_k == nullptr) return before(p, sequence);
    return larger(0, smaller(p.cu_seqlens_k[sequence + 1] - p.cu_seqlens_k[sequence], p.len_kv));
  }
};

// The band of one sequence: what is aligned at the bottom right moves with its length.
template <class Mask, class Params>
FLASHGEN_DEVICE Mask band_of(const Params& p, const CachedSequence& cached) {
  const i32 corner = cached.len_kv - cached.len_q;
  return {larger(p.band_lower + corner, p.corner_lower), smaller(p.band_upper + corner, p.corner_upper),
          cached.len_q, cached.len_kv};
}

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
// Prefetches the map itself.
FLASHGEN_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- flashgen/ptx/grid.cuh
// Communication between blocks and between grids: atomics, ordered accesses of global memory, and
// programmatic dependent launch.

// ---- Atomic operations, relaxed unless their names say otherwise. Additions return the previous value.

// Adds 1, or sets 0 after `last`. This thread sees what those saw that incremented before it, and those after
// it see what this thread saw and wrote.
FLASHGEN_DEVICE u32 atomic_inc_acq_rel(u32* address, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(last)
               : "memory");
  return before;
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
// ---- flashgen/logits.cuh
// What a softmax takes exponentials of. The exponentials of a row are relative to its reference maximum: the
// row's maximum so far, or a number near it. Each kind of logits has its own unit for reference maxima.
//
//     logit(s, row)            accumulator s as a reference maximum; as_reference_max(x): logit x as one
//     relative(s, shift, row)  how far s is above reference maximum `shift`, in powers of two
//     powers(x), distance(x)   from a difference of reference maxima to powers of two, and back
//     natural_log(m, x)        the natural logarithm of 2^x times the factor of reference maximum m
//     kNoMax                   the reference maximum of a row without an allowed key so far

namespace flashgen {

// Products that a scale turns into logits. Reference maxima are in powers of two, so that an exponent is one
// instruction. For logits beyond 2^30 its rounding error is many powers of two.
struct ScaledProducts {
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

// ---- flashgen/softmax.cuh
// The online softmax: running row maxima and sums, and the rescaling that keeps them consistent.

// A row's maximum may lag behind by this many powers of two before the row is rescaled: the result is the
// same (numerator and denominator share the factor), and most tiles then need no rescaling at all.
constexpr float kMaximumLag = 8.0f;

// The power of two of the largest exponential of a row.
template <class Logits>
constexpr float headroom_of() {
  if constexpr (requires { Logits::kHeadroom; }) {
    return Logits::kHeadroom;
  } else {
    return 0.0f;
  }
}

// The reference maximum of a row whose largest logit is `logit`. Without headroom it is that logit: 16-bit
// kernels do not subtract.
template <class Logits>
FLASHGEN_DEVICE float reference_below(float logit) {
  if constexpr (headroom_of<Logits>() == 0.0f) {
    return logit;
  } else {
    return logit - Logits::distance(headroom_of<Logits>());
  }
}

// What exponentials add to a row's sum: all of them count alike.
struct EqualWeights {
  FLASHGEN_DEVICE float weighted_sum(float a, float b, i32 /*n*/) const { return a + b; }
};

// Statistics of 16 * row_blocks rows; element [m][h] is that of the lane's row l/4 + 8h of block m.
template <i32 row_blocks, class Logits>
struct OnlineSoftmax {
  // The running maximum of the row's logits less the headroom, a reference maximum: the factor taken out of
  // the row.
  float reference_max[row_blocks][2];
  // This lane's share of the row's sum of exponentials.
  float sum[row_blocks][2];

  FLASHGEN_DEVICE void reset() {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        reference_max[m][h] = -kInfinity;
        sum[m][h] = 0.0f;
      }
    }
  }

  // Takes in a tile of scores, which become exponentials, and rescales what was accumulated before.
  template <i32 columns, i32 out_columns, class Weights = EqualWeights>
  FLASHGEN_DEVICE void update(Accumulator<row_blocks, columns>& scores,
                              Accumulator<row_blocks, out_columns>& out, const Logits& logits,
                              const Weights& weights = {}) {
    // Each lane looks at its own columns: as long as no lane sees a score far above its row's maximum, which
    // is the rule, the lanes of a row need not even agree on one.
    float highest[row_blocks][2];
    bool lagging = false;
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) highest[m][h] = maximum(scores[m][0][2 * h], scores[m][0][2 * h + 1]);
    }
#pragma unroll
    for (i32 n = 1; n < columns; ++n) {
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
          highest[m][h] = maximum(highest[m][h], maximum(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
        }
      }
    }
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        highest[m][h] = logits.logit(highest[m][h], h);
        lagging |= highest[m][h] > reference_max[m][h] + Logits::distance(kMaximumLag);
      }
    }
    if (warp_any(lagging)) rescale(highest, out);

    // A row with no allowed key so far subtracts 0, so that exp2(-inf - 0) is 0 and not NaN.
    float shift[row_blocks][2];
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h)
        shift[m][h] = reference_max[m][h] == -kInfinity ? 0.0f : reference_max[m][h];
    }
#pragma unroll
    for (i32 n = 0; n < columns; ++n) {
#pragma unroll
      for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) {
          scores[m][n][e] = exp2_approx(logits.relative(scores[m][n][e], shift[m][e / 2], e / 2));
        }
#pragma unroll
        for (i32 h = 0; h < 2; ++h)
          sum[m][h] += weights.weighted_sum(scores[m][n][2 * h], scores[m][n][2 * h + 1], n);
      }
    }
  }

  // Adds up the lanes' shares; afterwards every lane of a row has the row's sum.
  FLASHGEN_DEVICE void finish() {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) sum[m][h] = row_total(sum[m][h]);
    }
  }

 private:
  // Each row decides for itself, so no row's result depends on its neighbors.
  template <i32 out_columns>
  FLASHGEN_DEVICE void rescale(const float (&highest)[row_blocks][2],
                               Accumulator<row_blocks, out_columns>& out) {
#pragma unroll
    for (i32 m = 0; m < row_blocks; ++m) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const float tile_maximum = row_maximum(highest[m][h]);
        const bool lags = tile_maximum > reference_max[m][h] + Logits::distance(kMaximumLag);
        const float raised = reference_below<Logits>(tile_maximum);
        const float factor = lags ? exp2_approx(Logits::powers(reference_max[m][h] - raised)) : 1.0f;
        if (lags) reference_max[m][h] = raised;
        sum[m][h] *= factor;
#pragma unroll
        for (i32 n = 0; n < out_columns; ++n) {
          out[m][n][2 * h] *= factor;
          out[m][n][2 * h + 1] *= factor;
        }
      }
    }
  }
};

// ---- flashgen/decode/config.cuh
// The sizes of a decode kernel. The plan chooses them.

struct DecodeConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;   // rows of a tile: new tokens times query heads per key/value head
  i32 tile_kv;  // keys of a tile
  i32 stages;
  i32 warps;  // that compute
  // Warps that only start copies. Without any, each warp copies what it multiplies.
  i32 producers;
  // Registers of a thread of either kind, where there are both.
  i32 producer_registers;
  i32 consumer_registers;
  // Each warp keeps its rows of Q in registers. Otherwise they stay in shared memory.
  bool holds_queries;
  // Parts of eight rows that a block merges in the time of a tile of keys.
  i32 merged_parts;
  // The fixed cost of an item, in tiles of keys.
  i32 item_tiles;
  bool has_lower;
  bool has_upper;
  // Which tiles of keys hold allowed pairs depends on the query head.
  bool varies_by_head;
  i32 access_bytes;
};

// Rows of one product by tensor cores.
constexpr i32 kRowBlock = 16;
// Rows that the lanes of a warp merge at a time.
constexpr i32 kMergedRows = 8;

// The named barrier of the warps that compute.
constexpr i32 kConsumerBarrier = 1;

// Waits for all warps that compute.
template <DecodeConfig cfg>
FLASHGEN_DEVICE void consumers_sync() { named_barrier_sync(kConsumerBarrier, cfg.warps * kWarpSize); }

// ---- flashgen/decode/rows.cuh
// The rows of a tile. Query heads that share a key/value head read the same keys, so their rows lie in one
// tile:
//
//     row = token * group + query head of the group
//
// The tensor cores thus have up to 16 useful rows for one new token, and each key is read once for the whole
// group.

// What blocks compute: a tile of rows of one key/value head of one sequence.
struct alignas(16) DecodeItem {
  CachedSequence cached;
  i32 sequence;
  i32 head_kv;
  // The first row of the tile, and how many rows it has.
  i32 first_row;
  i32 rows;
  // Tiles of keys that some row of the sequence may attend to; at least one, because rows without keys also
  // have results.
  Range tiles;

  FLASHGEN_DEVICE i32 row_blocks() const { return ceil_div(rows, kRowBlock); }
};

// The token and the query head of a row of the tile.
struct RowPlace {
  i32 q;
  i32 head;

  // Rows beyond the last repeat it. They read no other memory, and are not stored.
  template <class Params>
  FLASHGEN_DEVICE static RowPlace of(const Params& p, const DecodeItem& item, i32 row) {
    const i32 own = item.first_row + smaller(row, item.rows - 1), q = own / p.group;
    return {q, item.head_kv * p.group + own - q * p.group};
  }
};

// The mask of a query head of the sequence.
template <class Mask, class Params>
FLASHGEN_DEVICE Mask mask_of(const Params& p, const CachedSequence& cached, i32 sequence, i32 head) {
  if constexpr (requires { Mask::of(p, cached, sequence, head); }) {
    return Mask::of(p, cached, sequence, head);
  } else {
    return band_of<Mask>(p, cached);
  }
}

// The two rows that a lane holds of a block of 16.
struct LaneRows {
  RowPlace places[2];

  template <class Params>
  FLASHGEN_DEVICE static LaneRows of(const Params& p, const DecodeItem& item, i32 row_block, Thread thread) {
    const i32 row = row_block * kRowBlock + thread.row();
    return {{RowPlace::of(p, item, row), RowPlace::of(p, item, row + 8)}};
  }
};

// Their masks.
template <class Mask>
struct LaneMasks {
  Mask masks[2];
  i32 q[2];

  template <class Params>
  FLASHGEN_DEVICE static LaneMasks of(const Params& p, const DecodeItem& item, const LaneRows& rows) {
    const RowPlace first = rows.places[0], second = rows.places[1];
    return {{mask_of<Mask>(p, item.cached, item.sequence, first.head),
             mask_of<Mask>(p, item.cached, item.sequence, second.head)},
            {first.q, second.q}};
  }
  FLASHGEN_DEVICE bool is_full(i32 k_begin, i32 k_end) const {
    return masks[0].is_full(q[0], q[0] + 1, k_begin, k_end) &&
           masks[1].is_full(q[1], q[1] + 1, k_begin, k_end);
  }
  FLASHGEN_DEVICE bool is_empty(i32 k_begin, i32 k_end) const {
    return masks[0].is_empty(q[0], q[0] + 1, k_begin, k_end) &&
           masks[1].is_empty(q[1], q[1] + 1, k_begin, k_end);
  }
  FLASHGEN_DEVICE bool allows(i32 h, i32 k) const { return masks[h].allows(q[h], k); }
};

// Which pairs of a lane's rows and the keys of a tile are allowed: bit 2n + c of allowed[h] is for column 8n
// + c of row h. `first_key` is the key of the lane's first column.
template <i32 columns, class Mask>
FLASHGEN_DEVICE void find_allowed(u32 (&allowed)[2], const LaneMasks<Mask>& masks, i32 first_key) {
  allowed[0] = allowed[1] = 0;
#pragma unroll
  for (i32 n = 0; n < columns / 8; ++n) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      const bool is_allowed = masks.allows(e / 2, first_key + (8 * n + e % 2));
      allowed[e / 2] |= static_cast<u32>(is_allowed) << (2 * n + e % 2);
    }
  }
}

// Calls visit(value, h, column) for each of a lane's scores.
template <i32 blocks, class Visit>
FLASHGEN_DEVICE void for_each_score(Accumulator<1, blocks>& scores, const Visit& visit) {
#pragma unroll
  for (i32 n = 0; n < blocks; ++n) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) visit(scores[0][n][e], e / 2, 8 * n + e % 2);
  }
}

// The rows of Q of a head, by token.
template <class T>
struct QueryRows {
  const T* data;
  i64 row_stride;
  i64 head_stride;

  template <class Params>
  FLASHGEN_DEVICE static QueryRows of(const Params& p, const DecodeItem& item) {
    return {p.q + item.sequence * p.q_batch + item.cached.first_q * p.q_row, p.q_row, p.q_head};
  }
  FLASHGEN_DEVICE const T* at(RowPlace place) const {
    return data + place.q * row_stride + place.head * head_stride;
  }
};

// ---- flashgen/decode/cache_element.cuh
// The type of the cache's elements: the CacheElement policy of the decode mainloop. It says how rows of K and
// V lie in shared memory, how tensor cores get them and the queries, and how scores and results are scaled.
//
//     fetch_scales(slot, keys, thread)     starts copies of the scales of a slice of keys
//     slice_scales(slot, thread)           the scales of a slice's keys:
//       apply_qk_scales(scores, queries)     multiplies products by the scales of K and Q
//       add_log_v_scales(logits)             adds logarithms, so that exponentials include the scales of V
//       weighted_sum(a, b, n)                what two exponentials of block n add to the row's sum
//     scale_and_reorder(out)               makes O of accumulators: the last scale, and the order of columns
//     column(n, thread)                    the first of the two columns of O that a lane holds of block n

// Elements of the queries' type, without scales.
template <DecodeConfig cfg, class T>
struct SameElement {
  static constexpr i32 dim = round_up(cfg.head_dim, 16);
  static constexpr i32 dim_v = round_up(cfg.head_dim_v, 16);

  template <class Params>
  FLASHGEN_DEVICE static SameElement of(const Params&, const DecodeItem&, u8*) { return {}; }
  FLASHGEN_DEVICE static i32 column(i32 n, Thread thread) { return 8 * n + thread.column(); }
};

// ---- flashgen/decode/team.cuh
// Thread blocks that go over the same keys at the same time, each for different rows. One of them reads a key
// from device memory, and the others find it in L2.

struct Team {
  i32 size;
  // This thread block's number in its team.
  i32 rank;

  // The host chooses the size. Kernels without a `team` parameter have teams of one thread block.
  template <class Params>
  FLASHGEN_DEVICE static Team of(const Params& p) {
    if constexpr (requires { p.team; }) {
      return {p.team, block_idx_x() % p.team};
    } else {
      return {1, 0};
    }
  }
  // Rounds that a team needs for `tiles` tiles of rows.
  template <class Params>
  FLASHGEN_DEVICE static i32 rounds(const Params& p, i32 tiles) {
    if constexpr (requires { p.team; }) {
      return ceil_div(tiles, p.team);
    } else {
      return tiles;
    }
  }
  // This thread block's team, and how many there are. Thread blocks that are left over get no work.
  FLASHGEN_DEVICE i32 index() const { return block_idx_x() / size; }
  FLASHGEN_DEVICE i32 count() const { return grid_dim_x() / size; }
  // The thread block or tile number `index` of this thread block, where the thread blocks of a team take
  // turns.
  FLASHGEN_DEVICE i32 strided(i32 index) const { return index * size + rank; }
};

// ---- flashgen/decode/partials.cuh
// Results of a part of the keys: O without its normalizer, and for each row the reference maximum and the sum
// of exponentials. They are merged exactly, whatever the size of the logits.

// The factor taken out of a row's exponentials, and their sum.
struct alignas(8) RowTotal {
  float reference_max;
  float sum;
};

// The weight of a part of a row whose parts have the common reference maximum `row_max`.
template <class Logits>
FLASHGEN_DEVICE float weight_of_part(const Logits& logits, float reference_max, float row_max) {
  return exp2_approx(logits.powers(reference_max - (row_max == -kInfinity ? 0.0f : row_max)));
}

// Partial results in the workspace, those of one part of an item after another: for each eight columns a
// small matrix of the item's rows, so that the lanes of a warp access neighboring addresses and rows that do
// not exist take no room.
template <i32 blocks>
struct Partials {
  float* out;
  RowTotal* totals;
  i32 rows;

  template <class Params>
  FLASHGEN_DEVICE static Partials of(const Params& p) {
    return {p.o_partial, reinterpret_cast<RowTotal*>(p.row_partial), p.partial_rows};
  }
  // Two columns of block `n`, from `column` on.
  FLASHGEN_DEVICE float* pair(i32 index, i32 n, i32 row, i32 column) const {
    return out + index * partial_floats() + n * block_floats() + row * 8 + column;
  }
  // From each part to the next, and from each block of columns to the next.
  FLASHGEN_DEVICE i64 partial_floats() const { return blocks * block_floats(); }
  FLASHGEN_DEVICE i64 block_floats() const { return i64{8} * rows; }
  FLASHGEN_DEVICE RowTotal& total(i32 index, i32 row) const {
    return totals[static_cast<i64>(index) * rows + row];
  }
};

struct alignas(8) FloatPair {
  float values[2];
};

// Where an item's parts lie among all in the workspace, in the order of its keys.
struct PartialIndices {
  i32 count;
  i32 first;
  // Of the second part, and from each part to the next one.
  i32 second;
  i32 stride;

  // Parts of fixed sizes, of an item whose first unit is number `first_unit` of all.
  FLASHGEN_DEVICE static PartialIndices fixed(Team team, i32 first_unit, i32 units) {
    return {units, team.strided(first_unit), team.strided(first_unit + 1), team.size};
  }
  // One part of each thread block from `first_block` on. The workspace has room for two parts of a thread
  // block: of an item that a thread block before it has begun, and of one that it begins itself.
  FLASHGEN_DEVICE static PartialIndices of_blocks(Team team, i32 first_block, i32 blocks) {
    return {blocks, team.strided(2 * first_block + 1), team.strided(2 * (first_block + 1)), 2 * team.size};
  }
  FLASHGEN_DEVICE i32 operator()(i32 part) const { return part == 0 ? first : second + (part - 1) * stride; }
};

// Whether this thread block is the last of `blocks` to arrive at a counter, which is 0 again after that. All
// threads that compute call, after a barrier of theirs. Those of the last thread block see what all thread
// blocks wrote before they arrived.
template <DecodeConfig cfg>
FLASHGEN_DEVICE bool arrives_last(u32* counter, u32 blocks, u32& shared, Thread thread) {
  if (thread.index() == 0) shared = atomic_inc_acq_rel(counter, blocks - 1) == blocks - 1;
  consumers_sync<cfg>();
  return shared != 0;
}

// ---- flashgen/decode/scores.cuh
// What happens to products Q K^T before the softmax: the Score policy of the decode mainloop. Rows have their
// own query and head.

// Logits are the products, scaled.
struct NoRowScore {
  using Logits = ScaledProducts;

  template <class Params>
  FLASHGEN_DEVICE static Logits logits(const Params& p) { return {p.scale_log2}; }
  template <i32 blocks, class Params>
  FLASHGEN_DEVICE static void apply(Accumulator<1, blocks>&, const Params&, const DecodeItem&,
                                    const LaneRows&, i32, Thread) {}
  template <class Params>
  FLASHGEN_DEVICE static float sink(const Params&, const DecodeItem&, i32) { return -kInfinity; }
};

// ---- flashgen/decode/row_results.cuh
// The results of rows: from parts to O and L.

// The rows of one item. All threads that compute call its functions.
template <DecodeConfig cfg, class T, class Params, class Score, class CacheElement>
struct RowResults {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  static constexpr i32 out_blocks = CacheElement::dim_v / 8;
  // Blocks of eight columns that a warp merges.
  static constexpr i32 own_blocks = ceil_div(out_blocks, cfg.warps);
  using Logits = typename Score::Logits;

  const Params& p;
  const DecodeItem& item;
  // In shared memory: the totals of the tile's rows.
  RowTotal (&totals)[cfg.tile_q];
  Thread thread;

  // Stores the totals of a part in the workspace.
  FLASHGEN_DEVICE void store_totals(const Partials<out_blocks>& partials, i32 index) const {
    for (i32 row = thread.index(); row < item.rows; row += threads) partials.total(index, row) = totals[row];
  }

  // Merges the parts of an item, in the order of its keys. Each lane loads the totals of its row and its own
  // columns of several parts at once, so it waits for memory once for all of these.
  FLASHGEN_DEVICE void merge(const PartialIndices& indices) const {
    const Logits logits = Score::logits(p);
#pragma unroll 1
    for (i32 row = thread.row(); row < item.rows; row += kMergedRows) {
      RowTotal total = {-kInfinity, 0.0f};
      FloatPair sums[own_blocks] = {};
#pragma unroll 1
      for (i32 first = 0; first < indices.count; first += LoadedParts::count) {
        const LoadedParts parts = load_parts(indices, first, row);
        float row_max = total.reference_max;
#pragma unroll
        for (const RowTotal& part : parts.totals) row_max = maximum(row_max, part.reference_max);
        const float kept = weight_of_part(logits, total.reference_max, row_max);
        total = {row_max, total.sum * kept};
#pragma unroll
        for (FloatPair& sum : sums) sum = {{sum.values[0] * kept, sum.values[1] * kept}};
#pragma unroll
        for (i32 i = 0; i < LoadedParts::count; ++i) {
          const float weight = weight_of_part(logits, parts.totals[i].reference_max, row_max);
          total.sum += parts.totals[i].sum * weight;
#pragma unroll
          for (i32 b = 0; b < own_blocks; ++b) {
#pragma unroll
            for (i32 c = 0; c < 2; ++c)
              sums[b].values[c] = fused_multiply_add(weight, parts.pairs[i][b].values[c], sums[b].values[c]);
          }
        }
      }
      const OutputRow to = output_row(row, block_of(0), with_sink(row, total));
#pragma unroll
      for (i32 b = 0; b < own_blocks; ++b) {
        if (has_block(b)) store_pair(to, block_of(b), sums[b]);
      }
    }
  }

  // A row's total with the sink, which takes part in the softmax like a key without a value.
  struct Finished {
    RowTotal total;
    // What O is multiplied by.
    float factor;
  };
  FLASHGEN_DEVICE Finished with_sink(i32 row, RowTotal total) const {
    const Logits logits = Score::logits(p);
    const float sink = Logits::as_reference_max(Score::sink(p, item, RowPlace::of(p, item, row).head));
    const float row_max = maximum(total.reference_max, sink),
                weight = weight_of_part(logits, total.reference_max, row_max);
    const float sum = total.sum * weight + weight_of_part(logits, sink, row_max);
    return {{row_max, sum}, sum == 0.0f ? 0.0f : weight / sum};
  }

  // A row of O in memory, and what O is multiplied by.
  struct OutputRow {
    T* data;
    float factor;
  };
  // Where a row's results go. `n` is the first block that this thread stores. With the first columns it
  // writes L.
  FLASHGEN_DEVICE OutputRow output_row(i32 row, i32 n, const Finished& finished) const {
    const RowPlace place = RowPlace::of(p, item, row);
    const i64 q = item.cached.first_q + place.q;
    if (CacheElement::column(n, thread) == 0) {
      const RowTotal total = finished.total;
      p.lse[item.sequence * p.lse_batch + place.head * p.lse_head + q] =
          total.sum == 0.0f ? -kInfinity : Logits::natural_log(total.reference_max, log2_approx(total.sum));
    }
    return {p.o + item.sequence * p.o_batch + q * p.o_row + place.head * p.o_head, finished.factor};
  }
  // Writes two columns of O.
  FLASHGEN_DEVICE void store_pair(const OutputRow& to, i32 n, const FloatPair& pair) const {
    const i32 column = CacheElement::column(n, thread);
    if (column < cfg.head_dim_v) {
      *reinterpret_cast<Pair<T>*>(to.data + column) =
          Pair<T>::from(pair.values[0] * to.factor, pair.values[1] * to.factor);
    }
  }

 private:
  FLASHGEN_DEVICE i32 block_of(i32 b) const { return thread.warp + b * cfg.warps; }
  FLASHGEN_DEVICE bool has_block(i32 b) const {
    return out_blocks % cfg.warps == 0 || block_of(b) < out_blocks;
  }

  // A lane's row and columns of several parts. Those beyond the last part are empty.
  struct LoadedParts {
    // What registers hold, and no more than 17: where 132 thread blocks share eight heads, a head has at most
    // 17 parts.
    static constexpr i32 count = larger(1, smaller(17, 40 / own_blocks));
    RowTotal totals[count];
    FloatPair pairs[count][own_blocks];
  };

  // Starts all loads before the first of them has arrived. So no branch may come between them.
  FLASHGEN_DEVICE LoadedParts load_parts(const PartialIndices& indices, i32 first, i32 row) const {
    const auto partials = Partials<out_blocks>::of(p);
    LoadedParts parts;
    const i32 index = indices(first);
    const RowTotal* total = &partials.total(index, row);
    const float* pair = partials.pair(index, thread.warp, row, thread.column());
    const i64 between_blocks = partials.block_floats() * cfg.warps;
#pragma unroll
    for (i32 i = 0; i < LoadedParts::count; ++i) {
      const bool exists = first + i < indices.count;
      parts.totals[i] = exists ? *total : RowTotal{-kInfinity, 0.0f};
#pragma unroll
      for (i32 b = 0; b < own_blocks; ++b) {
        parts.pairs[i][b] = exists && has_block(b)
                                ? *reinterpret_cast<const FloatPair*>(pair + b * between_blocks)
                                : FloatPair{};
      }
      // Only the second part may lie at another distance.
      const i64 distance = i == 0 ? indices(first + 1) - index : indices.stride;
      total += distance * partials.rows;
      pair += distance * partials.partial_floats();
    }
    return parts;
  }
};

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
// Adds a strip to the fragments of one before it.
template <i32 count>
FLASHGEN_DEVICE void add_fragments(float* part, float (&strip)[count], Thread thread) {
  float before[count];
  read_fragments(before, part, thread);
#pragma unroll
  for (i32 i = 0; i < count; ++i) strip[i] += before[i];
  write_fragments(part, strip, thread);
}

// ---- flashgen/decode/results.cuh
// From the results of warps, each with keys of its own, to those of a thread block.

// In shared memory: the totals of each warp's rows, and of the rows of the tile.
template <DecodeConfig cfg>
struct RowTotals {
  RowTotal of_warps[cfg.warps][kRowBlock];
  RowTotal of_rows[cfg.tile_q];
};

// The results of one item. All threads that compute call its functions.
template <DecodeConfig cfg, class T, class Params, class Score, class CacheElement>
struct DecodeResults {
  static constexpr i32 dim_v = CacheElement::dim_v;
  static constexpr i32 out_blocks = dim_v / 8;
  // With producers, the ring already fills for the next item, so results need a buffer of their own. To halve
  // it, the upper half of the warps add their O to that of the lower half.
  static constexpr i32 buffers = cfg.producers == 0 ? cfg.warps : cfg.warps / 2;
  static constexpr i32 bytes = buffers * kRowBlock * dim_v * static_cast<i32>(sizeof(float));
  using Output = Accumulator<1, out_blocks>;
  using Logits = typename Score::Logits;
  using Softmax = OnlineSoftmax<1, Logits>;
  using Rows = RowResults<cfg, T, Params, Score, CacheElement>;

  Rows rows;
  // `buffers` results of 16 rows, in the layout of a warp's lanes.
  float* out_buffers;
  RowTotal (&totals_of_warps)[cfg.warps][kRowBlock];
  // How many warps have different rows.
  i32 row_warps;

  // Brings the warps' results to common reference maxima, and puts them into shared memory.
  FLASHGEN_DEVICE void reduce_warps(Output& out, const Softmax& softmax) const {
    const Thread thread = rows.thread;
    RowTotal(&of_warps)[cfg.warps][kRowBlock] = totals_of_warps;
    // No warp needs the ring any more.
    consumers_sync<cfg>();
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      if (thread.column() == 0)
        of_warps[thread.warp][thread.row() + 8 * h] = {softmax.reference_max[0][h], softmax.sum[0][h]};
    }
    consumers_sync<cfg>();
    const Logits logits = Score::logits(rows.p);
    const i32 row_block = thread.warp % row_warps;
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      const i32 row = thread.row() + 8 * h;
      float row_max = -kInfinity, total = 0.0f;
      for (i32 w = row_block; w < cfg.warps; w += row_warps)
        row_max = maximum(row_max, of_warps[w][row].reference_max);
      for (i32 w = row_block; w < cfg.warps; w += row_warps)
        total += of_warps[w][row].sum * weight_of_part(logits, of_warps[w][row].reference_max, row_max);
      const float factor = weight_of_part(logits, softmax.reference_max[0][h], row_max);
#pragma unroll
      for (i32 n = 0; n < out_blocks; ++n) {
        out[0][n][2 * h] *= factor;
        out[0][n][2 * h + 1] *= factor;
      }
      if (thread.warp < row_warps && thread.column() == 0)
        rows.totals[row_block * kRowBlock + row] = {row_max, total};
    }
    float flat[4 * out_blocks];
#pragma unroll
    for (i32 i = 0; i < 4 * out_blocks; ++i) flat[i] = out[0][i / 4][i % 4];
    if constexpr (buffers < cfg.warps) {
      const bool has_rows = row_block < rows.item.row_blocks();
      if (has_rows && thread.warp >= buffers)
        write_fragments(out_buffer(thread.warp - buffers), flat, thread);
      consumers_sync<cfg>();
      if (has_rows && thread.warp < buffers) add_fragments(out_buffer(thread.warp), flat, thread);
    } else {
      write_fragments(out_buffer(thread.warp), flat, thread);
    }
    consumers_sync<cfg>();
  }

  // Stores a part's results in the workspace.
  FLASHGEN_DEVICE void store_part(i32 index) const {
    const auto partials = Partials<out_blocks>::of(rows.p);
    rows.store_totals(partials, index);
    for_each_result([&](i32 row, i32 n, const FloatPair& pair) {
      *reinterpret_cast<FloatPair*>(partials.pair(index, n, row, rows.thread.column())) = pair;
    });
  }

  // Writes O and L of the whole item.
  FLASHGEN_DEVICE void store_whole() const {
    for_each_result([&](i32 row, i32 n, const FloatPair& pair) {
      rows.store_pair(rows.output_row(row, n, rows.with_sink(row, rows.totals[row])), n, pair);
    });
  }

  FLASHGEN_DEVICE void merge(const PartialIndices& indices) const { rows.merge(indices); }

 private:
  FLASHGEN_DEVICE float* out_buffer(i32 buffer) const { return out_buffers + buffer * kRowBlock * dim_v; }

  // Calls visit(row, n, pair) for each pair of neighboring results: row of the tile, and block of eight
  // columns. Each warp takes blocks of its own, and adds up the buffers.
  template <class Visit>
  FLASHGEN_DEVICE void for_each_result(const Visit& visit) const {
    const DecodeItem& item = rows.item;
    const Thread thread = rows.thread;
#pragma unroll 1
    for (i32 i = thread.warp; i < item.row_blocks() * out_blocks; i += cfg.warps) {
      const i32 row_block = i / out_blocks, n = i - row_block * out_blocks;
      float sums[4] = {};
      for (i32 buffer = row_block; buffer < buffers; buffer += row_warps) {
        float own[4];
        read_fragments(own, out_buffer(buffer) + n * 4 * kWarpSize, thread);
#pragma unroll
        for (i32 e = 0; e < 4; ++e) sums[e] += own[e];
      }
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const i32 row = row_block * kRowBlock + thread.row() + 8 * h;
        if (row < item.rows) visit(row, n, FloatPair{{sums[2 * h], sums[2 * h + 1]}});
      }
    }
  }
};

// ---- flashgen/panel.cuh
// Tiles as TMA writes them and wgmma reads them: panels of 128-byte rows, one panel after
// another, each swizzled by 128 bytes (chunk c of row r lies at c ^ (r % 8)).

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

  // The tile's rows from `row` on of one head of one sequence, from column `column` on; `barrier` counts
  // `bytes`.
  FLASHGEN_DEVICE void load(const TensorMap& map, u32 barrier, i32 row, i32 head, i32 sequence,
                            i32 column = 0) const {
#pragma unroll
    for (i32 p = 0; p < panels; ++p)
      tma_load_4d(address + p * panel_stride, &map, barrier, column + p * panel_cols, row, head, sequence);
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

// ---- flashgen/sm90/careful_product.cuh
// P V of a block that the mask cuts, where V may hold NaN or infinity.

template <class T>
constexpr u32 kOnes = 0x3f803f80u;

// Whether some element of a tile is not finite. Every warp that asks looks at the whole tile.
template <class Tile>
FLASHGEN_DEVICE bool panels_hold_non_finite(Tile tile, u8* base, Thread thread) {
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

// ---- flashgen/decode/visited_tiles.cuh
// Which keys, and which tiles of them, the rows of an item may attend to.

template <DecodeConfig cfg, class Mask, class Params>
struct VisitedTiles {
  const Params& p;

  // The keys that some row may attend to.
  FLASHGEN_DEVICE Range existing_keys(const DecodeItem& item) const {
    const Range keys = mask_of<Mask>(p, item.cached, item.sequence, 0).key_tiles(0, item.cached.len_q, 1);
    return {keys.begin, smaller(keys.end, item.cached.len_kv)};
  }

  // Narrows `tiles`, which serve the whole sequence, to those that the rows of this item may attend to.
  FLASHGEN_DEVICE Range tiles_of(const DecodeItem& item, Range tiles) const {
    const RowPlace first = RowPlace::of(p, item, 0), last = RowPlace::of(p, item, item.rows - 1);
    const Range own =
        mask_of<Mask>(p, item.cached, item.sequence, 0).key_tiles(first.q, last.q + 1, cfg.tile_kv);
    const i32 begin = larger(tiles.begin, own.begin);
    return {begin, larger(begin, smaller(tiles.end, own.end))};
  }

  // The queries of an item's rows.
  FLASHGEN_DEVICE Range queries_of(const DecodeItem& item) const {
    return {RowPlace::of(p, item, 0).q, RowPlace::of(p, item, item.rows - 1).q + 1};
  }

  // Whether the mask forbids some pair of an item's queries and a tile. All warps get the same.
  FLASHGEN_DEVICE bool is_cut(const DecodeItem& item, Range queries, i32 first_key) const {
    const i32 heads = cfg.varies_by_head ? p.group : 1;
    bool cut = false;
#pragma unroll 1
    for (i32 i = 0; i < heads; ++i) {
      const Mask mask = mask_of<Mask>(p, item.cached, item.sequence, item.head_kv * p.group + i);
      cut |= !mask.is_full(queries.begin, queries.end, first_key, first_key + cfg.tile_kv);
    }
    return cut;
  }

  // A function that tells whether a tile of keys holds allowed pairs.
  FLASHGEN_DEVICE auto visited_by(const DecodeItem& item) const {
    return [this, &item](i32 tile) {
      const RowPlace first = RowPlace::of(p, item, 0), last = RowPlace::of(p, item, item.rows - 1);
      const i32 heads = cfg.varies_by_head ? p.group : 1;
      bool is_visited = false;
#pragma unroll 1
      for (i32 i = 0; i < heads; ++i) {
        const Mask mask = mask_of<Mask>(p, item.cached, item.sequence, item.head_kv * p.group + i);
        is_visited |= !mask.is_empty(first.q, last.q + 1, tile * cfg.tile_kv, (tile + 1) * cfg.tile_kv);
      }
      return is_visited;
    };
  }
};

// ---- flashgen/sm90/key_boxes.cuh
// The boxes by which TMA copies a tile of keys or values from a cache.

// The rows of a TMA box in a paged cache: the largest power of two that divides both the page size and the
// tile. So no box crosses a page boundary.
template <i32 tile_rows>
FLASHGEN_DEVICE i32 page_box_rows(i32 page_size) {
  return smaller(page_size & -page_size, tile_rows & -tile_rows);
}

// Where a box comes from and goes: its first row in the tile, its page, and its first row in the page.
// Without pages, `page` is the row of a contiguous cache.
struct BoxCoordinates {
  i32 tile_row;
  i32 page;
  i32 page_row;
};

// How tiles of keys are cut into boxes. Where keys lie in pages, a box is a part of one.
template <i32 tile, bool paged>
struct KeyBoxes {
  static_assert(paged || (tile & (tile - 1)) == 0, "without pages a tile is one box");

  // A box has 1 << shift rows. `existing` are the boxes that hold a readable key; without pages it is unused.
  i32 shift;
  Range existing;

  // `keys` are those that may be read.
  template <class Params>
  FLASHGEN_DEVICE static KeyBoxes of(const Params& p, Range keys) {
    if constexpr (paged) {
      const i32 shift = lowest_bit(static_cast<u32>(page_box_rows<tile>(p.page_size)));
      return {shift, {keys.begin >> shift, keys.size() > 0 ? (keys.end - 1 >> shift) + 1 : 0}};
    } else {
      return {lowest_bit(static_cast<u32>(tile)), keys};
    }
  }
  FLASHGEN_DEVICE i32 count() const { return tile >> shift; }

  // Box `index` of the tile from `first_key` on. Reads the table of pages.
  template <class Params>
  FLASHGEN_DEVICE BoxCoordinates at(const Params& p, const CachedSequence& rows, i32 first_key,
                                    i32 index) const {
    if constexpr (paged) {
      // Boxes outside the readable range become the nearest readable one. Masks forbid their keys.
      const i32 box = (first_key >> shift) + index;
      const i32 key = larger(existing.begin, smaller(box, existing.end - 1)) << shift;
      const i32 page = key / p.page_size;
      const i32 number = existing.size() > 0 ? p.block_table[rows.row * p.table_row + page] : 0;
      return {index << shift, number, key - page * p.page_size};
    } else {
      return {0, static_cast<i32>(rows.row), rows.first_key + first_key};
    }
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

  // Advances to the next tile. Returns how many tiles were skipped before it.
  template <class Visited>
  FLASHGEN_DEVICE i32 advance(Thread thread, const Visited& visited) {
    ++tile;
    return 0;
  }
};

// ---- flashgen/sm90/decode_boxes.cuh
// How the producer warps of Hopper's decode kernels copy tiles of keys and values: by TMA, in boxes.

// Fills the slots of a ring with tiles of an item. `sharing` warps take the boxes of a tile in turns, and
// `own` is the number of this one among them. `load(at, box)` starts the copy of a box, whose rows have
// `row_bytes` each.
template <DecodeConfig cfg, class Mask, bool paged, i32 sharing, class Params, class TileRing, class Load>
FLASHGEN_DEVICE void load_tiles(const Params& p, const DecodeItem& item, Range tiles, i32 own, TileRing ring,
                                typename TileRing::State& at, i32 row_bytes, Thread thread,
                                const Load& load) {
  // No page outside these keys is read: it may belong to another sequence by now.
  const VisitedTiles<cfg, Mask, Params> visits{p};
  const auto boxes = KeyBoxes<cfg.tile_kv, paged>::of(p, visits.existing_keys(item));
  // This warp has the boxes own, own + sharing, ..., and of these this lane has the first_box and each 32nd
  // after it.
  const i32 first_box = sharing * thread.lane + own;
  const bool has_box = first_box < boxes.count();
  const i32 own_boxes = (boxes.count() + sharing - 1 - own) / sharing,
            own_bytes = (own_boxes << boxes.shift) * row_bytes;
  const auto visited = visits.visited_by(item);
  Walk<Mask::has_holes> walk(tiles);
  const auto box_of = [&](i32 tile, i32 index) {
    return boxes.at(p, item.cached, tile * cfg.tile_kv, index);
  };
  BoxCoordinates next = {};
  const auto find_next = [&]() {
    walk.advance(thread, visited);
    if (!walk.over() && has_box) next = box_of(walk.tile, first_box);
  };
  find_next();
#pragma unroll 1
  for (; !walk.over(); at.advance()) {
    // Page numbers are read one tile ahead, because each copy would wait for them.
    const BoxCoordinates box = next;
    const i32 tile = walk.tile;
    find_next();
    if (thread.lane == 0) {
      ring.wait_empty(at);
      mbarrier_arrive_expect_tx(ring.full(at), own_bytes);
    }
    warp_sync();
    if (has_box) load(at, box);
    if constexpr (paged && cfg.tile_kv > sharing * kWarpSize) {
      // A page with an odd number of rows has boxes of one row each: more than these warps have lanes.
#pragma unroll 1
      for (i32 i = first_box + sharing * kWarpSize; i < boxes.count(); i += sharing * kWarpSize)
        load(at, box_of(tile, i));
    }
  }
}

// ---- flashgen/decode/scheduler.cuh
// Which tiles of keys a thread block works on. The host fixes only the number of thread blocks. On the device
// each thread block counts the work of all sequences from their real lengths, and takes an equal share of it:
// a run of consecutive units, of one item after another. So ragged batches balance, and a graph can be
// replayed with other lengths.
//
// A unit is a tile of keys, or, with `part_tiles`, that many. Then an item is always cut at the same keys,
// whatever else is in the batch, and its result has the same bits.
//
// Units are ordered by key/value head, then by sequence, so one thread block does not get all heads of a
// short sequence. Each item also has a fixed cost: loading Q, and storing or merging results. It counts as
// `item_tiles` extra units.
//
// Units are shared out to teams of thread blocks (team.cuh). The thread blocks of a team have the same units,
// for other tiles of rows. "Thread block" below is a team where there are any.

// Extra units that stand for an item's fixed cost.
template <DecodeConfig cfg, class Params>
FLASHGEN_DEVICE i32 extra_units(const Params& p) { return p.part_tiles == 0 ? cfg.item_tiles : 0; }

// How many units a thread block gets at least, where an item has `rows` rows and `tiles` tiles of keys. Parts
// of n tiles take n to compute side by side, and tiles / n parts are merged one after another. The sum is
// least where both take equally long. If an item cut so takes no less than a whole one, it stays whole.
template <DecodeConfig cfg>
FLASHGEN_DEVICE i32 min_units(i32 tiles, i32 rows) {
  const i32 row_groups = ceil_div(rows, kMergedRows);
  i32 part = 1;
  while (part * part * cfg.merged_parts < tiles * row_groups) ++part;
  const i32 merge = tiles * row_groups / (part * cfg.merged_parts);
  return part + merge + cfg.item_tiles < tiles ? part : larger(tiles, 1) + cfg.item_tiles;
}

// The work of one sequence for each key/value head: items of equal length, one for each tile of rows.
struct SequenceWork {
  CachedSequence cached;
  Range tiles;
  // Units of an item, and what all items count as.
  i32 units;
  i32 all_units;

  template <DecodeConfig cfg, class Mask, class Params>
  FLASHGEN_DEVICE static SequenceWork of(const Params& p, i32 sequence) {
    const CachedSequence cached = CachedSequence::of(p, sequence);
    Range tiles = {0, ceil_div(cached.len_kv, cfg.tile_kv)};
    if constexpr (!cfg.varies_by_head)
      tiles = mask_of<Mask>(p, cached, sequence, 0).key_tiles(0, cached.len_q, cfg.tile_kv);
    tiles.end = larger(tiles.end, tiles.begin + 1);
    const i32 row_tiles = Team::rounds(p, ceil_div(cached.len_q * p.group, cfg.tile_q));
    const i32 units = p.part_tiles == 0 ? tiles.size() : ceil_div(tiles.size(), p.part_tiles);
    return {cached, tiles, units, (units + extra_units<cfg>(p)) * row_tiles};
  }

  template <DecodeConfig cfg, class Params>
  FLASHGEN_DEVICE DecodeItem item(const Params& p, i32 sequence, i32 head_kv, i32 row_tile) const {
    const i32 first_row = Team::of(p).strided(row_tile) * cfg.tile_q;
    return {cached, sequence, head_kv, first_row, smaller(cfg.tile_q, cached.len_q * p.group - first_row),
            tiles};
  }
};

// How the units of all items are shared out.
struct alignas(16) WorkPartition {
  i64 units;
  i64 blocks;

  FLASHGEN_DEVICE i32 begin(i32 block) const {
    return static_cast<i32>(smaller_of(block, blocks) * units / blocks);
  }
  // The thread block that owns a unit.
  FLASHGEN_DEVICE i32 owner(i32 unit) const {
    return static_cast<i32>(((unit + i64{1}) * blocks - 1) / units);
  }

 private:
  FLASHGEN_DEVICE static i64 smaller_of(i64 a, i64 b) { return a < b ? a : b; }
};

// What a thread block computes next: the units from `begin` to `end` of an item. Among those of all items,
// the item's first unit is number `first_unit`.
struct alignas(16) Assignment {
  bool exists;
  DecodeItem item;
  i32 units;
  i32 begin;
  i32 end;
  i32 first_unit;
};

// Where a thread block is in its work. `at` and `end` are numbers of units of all items. The other fields
// name the same place: `unit` counts those of one head of one sequence.
struct WorkCursor {
  i32 at;
  i32 end;
  i32 head_kv;
  i32 sequence;
  i32 unit;

  // Assigns the next units.
  template <DecodeConfig cfg, class Mask, class Params>
  FLASHGEN_DEVICE void advance(const Params& p, Assignment& next) {
    const i32 extra = extra_units<cfg>(p);
    while (at < end) {
      SequenceWork work = SequenceWork::of<cfg, Mask>(p, sequence);
      while (unit >= work.all_units) {
        unit -= work.all_units;
        if (++sequence == p.batch) {
          sequence = 0;
          ++head_kv;
        }
        work = SequenceWork::of<cfg, Mask>(p, sequence);
      }
      const i32 of_item = extra + work.units, row_tile = unit / of_item, begin = unit - row_tile * of_item;
      const i32 count = smaller(of_item - begin, end - at), first_unit = at - begin + extra;
      at += count;
      unit += count;
      // Only extra units of this item are left, so the next thread block starts the item.
      if (begin + count <= extra) continue;
      next = {true,
              work.item<cfg>(p, sequence, head_kv, row_tile),
              work.units,
              larger(begin - extra, 0),
              begin + count - extra,
              first_unit};
      // The last tiles of rows may be fewer than the thread blocks of a team.
      if constexpr (requires { p.team; }) {
        if (next.item.rows <= 0) continue;
      }
      return;
    }
    next.exists = false;
  }
};

// The scheduler of a thread block. It lives in shared memory, because no registers are left for it, and one
// thread runs it.
template <DecodeConfig cfg, class Mask>
struct DecodeScheduler {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  i32 warp_units[cfg.warps];
  WorkPartition work;
  // The first is for the warps that compute. Each producer has its own, because it may be at a later item.
  WorkCursor cursors[1 + cfg.producers];
  // Where there are producers, the warps that compute use the first two in turns.
  Assignment assignments[cfg.producers == 0 ? 1 : 2 + cfg.producers];

  // All threads that compute call. Each counts the units of consecutive sequences.
  template <class Params>
  FLASHGEN_DEVICE void init(const Params& p, Thread thread) {
    const i32 each = ceil_div(p.batch, threads), first = smaller(thread.index() * each, p.batch);
    const i32 last = smaller(first + each, p.batch);
    i32 own = 0;
#pragma unroll 4
    for (i32 i = first; i < last; ++i) own += SequenceWork::of<cfg, Mask>(p, i).all_units;
    // A prefix sum over the threads.
    i32 before = own;
#pragma unroll
    for (i32 distance = 1; distance < kWarpSize; distance *= 2) {
      const i32 other = shuffle(before, (thread.lane - distance) & 31);
      if (thread.lane >= distance) before += other;
    }
    if (thread.lane == kWarpSize - 1) warp_units[thread.warp] = before;
    consumers_sync<cfg>();
    i32 of_head = 0;
#pragma unroll
    for (i32 w = 0; w < cfg.warps; ++w) {
      if (w < thread.warp) before += warp_units[w];
      of_head += warp_units[w];
    }
    before -= own;
    const i32 all = of_head * p.heads_kv;
    const i32 rows = p.len_q * p.group, row_tiles = Team::rounds(p, ceil_div(rows, cfg.tile_q));
    const i32 tiles = all / (p.batch * p.heads_kv * row_tiles) - cfg.item_tiles;
    const i32 block_units = p.part_tiles == 0 ? min_units<cfg>(tiles, smaller(rows, cfg.tile_q)) : 1;
    const Team team = Team::of(p);
    const WorkPartition partition = {larger(all, 1), larger(1, smaller(all / block_units, team.count()))};
    const i32 begin = partition.begin(team.index());
    const i32 head_kv = begin / larger(of_head, 1), begin_of_head = begin - head_kv * of_head;
    if (thread.index() == 0) {
      work = partition;
      for (WorkCursor& cursor : cursors) {
        cursor.at = begin;
        cursor.end = smaller(all, partition.begin(team.index() + 1));
      }
    }
    if (before <= begin_of_head && begin_of_head < before + own) {
      // The thread block's work begins among this thread's sequences.
      for (WorkCursor& cursor : cursors) {
        cursor.head_kv = head_kv;
        cursor.sequence = first;
        cursor.unit = begin_of_head - before;
      }
    }
  }

  // The next assignment. All threads that compute call this, once they are done with the current one.
  template <class Params>
  FLASHGEN_DEVICE const Assignment& next(const Params& p, Thread thread) {
    consumers_sync<cfg>();
    if (thread.index() == 0) cursors[0].template advance<cfg, Mask>(p, assignments[0]);
    consumers_sync<cfg>();
    return assignments[0];
  }

  // Fetches the next assignment while the warps compute the current one. The barrier at the top of their loop
  // publishes it.
  template <class Params>
  FLASHGEN_DEVICE void fetch(const Params& p, i32 turn, Thread thread) {
    if (thread.index() == threads - 1) cursors[0].template advance<cfg, Mask>(p, assignments[turn]);
  }

  // The next assignment of a producer, which calls with all its lanes.
  template <class Params>
  FLASHGEN_DEVICE const Assignment& next_to_copy(const Params& p, i32 producer, Thread thread) {
    warp_sync();
    if (thread.lane == 0) cursors[1 + producer].template advance<cfg, Mask>(p, assignments[2 + producer]);
    warp_sync();
    return assignments[2 + producer];
  }
};

// ---- flashgen/decode/assignment.cuh
// What a thread block computes of an item: its parts one after another, and the merge of all parts by the
// last thread block.

// Which thread blocks compute an item, and where its parts go. The loop over keys leaves no registers for it,
// so it is found after that loop.
struct ItemParts {
  PartialIndices indices;
  Team team;
  i32 first_block;
  // How many thread blocks share the item.
  i32 blocks;

  template <class Params>
  FLASHGEN_DEVICE static ItemParts of(const Params& p, const Assignment& assigned,
                                      const WorkPartition& work) {
    const Team team = Team::of(p);
    const i32 first_block = work.owner(assigned.first_unit);
    const i32 blocks = work.owner(assigned.first_unit + assigned.units - 1) - first_block + 1;
    return {p.part_tiles != 0 ? PartialIndices::fixed(team, assigned.first_unit, assigned.units)
                              : PartialIndices::of_blocks(team, first_block, blocks),
            team, first_block, blocks};
  }
};

// Calls visit(part, tiles) for the parts of an assignment: those of fixed size one by one
// (batch_invariant, num_splits), or all tiles at once.
template <class Params, class Visit>
FLASHGEN_DEVICE void for_each_part(const Params& p, const Assignment& assigned, const Visit& visit) {
  const i32 unit_tiles = p.part_tiles != 0 ? p.part_tiles : 1;
  const auto next = [&](i32 unit) { return p.part_tiles != 0 ? unit + 1 : assigned.end; };
#pragma unroll 1
  for (i32 unit = assigned.begin; unit < assigned.end; unit = next(unit)) {
    const Range tiles = assigned.item.tiles;
    visit(unit,
          Range{tiles.begin + unit * unit_tiles, smaller(tiles.end, tiles.begin + next(unit) * unit_tiles)});
  }
}

// `attend(tiles)` computes the results of some tiles. `results` stores them as those of the whole item or of
// a part, and merges parts. All threads that compute call.
template <DecodeConfig cfg, class Params, class Results, class Attend>
FLASHGEN_DEVICE void compute_parts(const Params& p, const Assignment& assigned, const WorkPartition& work,
                                   u32& is_last, Thread thread, const Results& results,
                                   const Attend& attend) {
  ItemParts parts;
  for_each_part(p, assigned, [&](i32 unit, Range tiles) {
    attend(tiles);
    parts = ItemParts::of(p, assigned, work);
    if (parts.indices.count == 1) {
      results.store_whole();
    } else {
      results.store_part(parts.indices(p.part_tiles != 0 ? unit : parts.team.index() - parts.first_block));
    }
    // The next copies overwrite these results, where results take the place of the ring. A thread block
    // arrives once all its threads have stored theirs.
    consumers_sync<cfg>();
  });
  if (parts.indices.count == 1) return;
  u32* const counter = p.counter + parts.team.strided(parts.first_block);
  if (parts.blocks == 1 || arrives_last<cfg>(counter, static_cast<u32>(parts.blocks), is_last, thread))
    results.merge(parts.indices);
}

// ---- flashgen/sm90/decode_roles.cuh
// What Hopper's decode kernels have in common: warps that copy, warps that compute, and the rows of Q.

// Two warpgroups compute, and the four warps of a third copy.
constexpr i32 kWarpgroupWarps = 4;

// Runs a block. The mainloop has
//
//     init_rings()                      called by one thread
//     load(producer, item, tiles)       called by a producer warp
//     compute(scheduler, turn)          called by the warps that compute, for assignment `turn`
template <DecodeConfig cfg, class Mainloop>
FLASHGEN_DEVICE void run_decode_roles(Mainloop& mainloop) {
  const auto& p = mainloop.p;
  const Thread thread = mainloop.thread;
  auto& scheduler = mainloop.shared().scheduler;
  if (thread.index() == 0) {
    mainloop.init_rings();
    fence_mbarrier_init();
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
  }
  // Programmatic dependent launch: waits for the previous grids, and lets the next one start.
  griddep_wait();
  griddep_launch_dependents();
  // All warps wait here for the rings and for the scheduler.
  if (thread.warp < cfg.warps) scheduler.init(p, thread);
  block_sync();
  if (thread.warp >= cfg.warps) {
    setmaxnreg_dec<cfg.producer_registers>();
    const i32 producer = thread.warp - cfg.warps;
#pragma unroll 1
    while (true) {
      const Assignment& assigned = scheduler.next_to_copy(p, producer, thread);
      if (!assigned.exists) break;
      for_each_part(p, assigned, [&](i32, Range tiles) { mainloop.load(producer, assigned.item, tiles); });
    }
  } else {
    setmaxnreg_inc<cfg.consumer_registers>();
    scheduler.fetch(p, 0, thread);
#pragma unroll 1
    for (i32 turn = 0;; turn ^= 1) {
      consumers_sync<cfg>();
      if (!scheduler.assignments[turn].exists) break;
      mainloop.compute(scheduler, turn);
    }
  }
}

// Starts copies of an item's rows to shared memory. A row has `columns` elements.
template <DecodeConfig cfg, class QTile, class Params>
FLASHGEN_DEVICE void start_queries(QTile tile, const QueryRows<typename QTile::Element>& source,
                                   const Params& p, const DecodeItem& item, i32 columns, Thread thread) {
  using T = typename QTile::Element;
  constexpr i32 chunk_columns = kChunkBytes / static_cast<i32>(sizeof(T)),
                chunks = QTile::cols / chunk_columns;
#pragma unroll 2
  for (i32 i = thread.index(); i < kWarpgroupRows * chunks; i += cfg.warps * kWarpSize) {
    const i32 row = i / chunks, chunk = i % chunks;
    const T* const from = source.at(RowPlace::of(p, item, row)) + chunk * chunk_columns;
    copy_chunk_async<T, cfg.access_bytes>(tile.chunk_at(row, chunk), from, columns - chunk * chunk_columns);
  }
  cp_async_commit();
}

// Waits until the rows of Q have arrived, and makes them visible to wgmma.
template <DecodeConfig cfg>
FLASHGEN_DEVICE void await_queries() {
  cp_async_wait<0>();
  fence_proxy_async_shared();
  consumers_sync<cfg>();
}

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

// Exponentials rounded to T, as the left operand of P V.
template <class T, i32 columns>
FLASHGEN_DEVICE void round_to(Rounded<columns>& probabilities, const Strip<columns>& exponentials) {
#pragma unroll
  for (i32 i = 0; i < columns / 4; ++i)
    probabilities[i / 4][i % 4] = pack(T{}, exponentials[2 * i], exponentials[2 * i + 1]);
}

// ---- flashgen/sm90/decode_mainloop.cuh
// Attention of few new tokens to a cache, on Hopper. Items, and how blocks share them, are those of
// decode/mainloop.cuh.
//
// Four producer warps copy tiles of K and V to a ring in shared memory by TMA. They run ahead into the
// block's next item. Two warpgroups take turns at the tiles. Each multiplies all rows of an item, at most 64,
// by its tile. While one takes exponentials, the other one multiplies. They merge their results at the end of
// the item:
//
//     producers     | tile 0 | tile 1 | tile 2 | tile 3 |
//     warpgroup 0            | S, P, P V of 0  | of 2            |
//     warpgroup 1                     | S, P, P V of 1  | of 3            |

template <DecodeConfig cfg, class T, class Params, class Smem, class Mask, class Score, bool paged>
struct DecodeSm90Mainloop {
  // An mbarrier wait tests only a parity, and copies may arrive out of order. If a stage changed warpgroups
  // between rounds, one could wait for round n while round n - 1 is incomplete, match the parity of round
  // n - 2, and read old keys.
  static_assert(cfg.stages % 2 == 0, "each stage belongs to one warpgroup while an item lasts");

  using Element = SameElement<cfg, T>;
  using QTile = PanelTile<T, kWarpgroupRows, Element::dim>;
  using KTile = PanelTile<T, cfg.tile_kv, Element::dim>;
  using VTile = PanelTile<T, cfg.tile_kv, Element::dim_v>;
  using TileRing = Ring<cfg.stages>;
  using Logits = typename Score::Logits;
  using Softmax = OnlineSoftmax<1, Logits>;
  using Results = DecodeResults<cfg, T, Params, Score, Element>;

  struct Shared {
    DecodeScheduler<cfg, Mask> scheduler;
    u32 is_last;
    RowTotals<cfg> totals;
  };

  const Params& p;
  u8* base;
  u32 start;
  Thread thread;
  // The next tile of the ring.
  typename TileRing::State at = {};

  FLASHGEN_DEVICE Shared& shared() const { return *reinterpret_cast<Shared*>(base + Smem::kShared); }
  FLASHGEN_DEVICE TileRing ring() const { return {start + Smem::kBarriers}; }
  FLASHGEN_DEVICE QTile q_tile() const { return {start + Smem::kQ}; }
  FLASHGEN_DEVICE KTile k_tiles() const { return {start + Smem::kK}; }
  FLASHGEN_DEVICE VTile v_tiles() const { return {start + Smem::kV}; }
  FLASHGEN_DEVICE KTile k_tile() const { return k_tiles().slot(at.slot()); }
  FLASHGEN_DEVICE VTile v_tile() const { return v_tiles().slot(at.slot()); }

  // ---- The producers. A warp issues the copies of its lanes one after another, so four warps share them:
  // two of keys, two of values, and of each pair one has the even boxes of a tile.

  // Loads half of the boxes of the keys, or of the values, of some tiles.
  template <class Panels>
  FLASHGEN_DEVICE void load_half(Panels ring_tiles, const TensorMap& map, const DecodeItem& item, Range tiles,
                                 i32 half) {
    load_tiles<cfg, Mask, paged, 2>(p, item, tiles, half, ring(), at, Panels::bytes / cfg.tile_kv, thread,
                                    [&](typename TileRing::State to, const BoxCoordinates& box) {
                                      const auto rows = ring_tiles.slot(to.slot()).from_row(box.tile_row);
                                      rows.load(map, ring().full(to), box.page_row, item.head_kv, box.page);
                                    });
  }
  FLASHGEN_DEVICE void load(i32 producer, const DecodeItem& item, Range tiles) {
    const i32 half = producer / 2;
    if (producer % 2 == 0) {
      load_half(k_tiles(), p.k_map, item, tiles, half);
    } else {
      load_half(v_tiles(), p.v_map, item, tiles, half);
    }
  }

  // ---- The warpgroups that compute

  // O and the softmax of the warpgroup's share of some tiles.
  FLASHGEN_DEVICE void attend(Strip<Element::dim_v>& out, Softmax& softmax, const DecodeItem& item,
                              Range tiles) {
    const i32 warpgroup = thread.warp / kWarpgroupWarps, row_block = thread.warp % kWarpgroupWarps;
    const LaneRows rows = LaneRows::of(p, item, row_block, thread);
    const auto masks = LaneMasks<Mask>::of(p, item, rows);
    const Logits logits = Score::logits(p);
    // Products have 64 rows in any case. Only warps with rows of the item take exponentials.
    const bool has_rows = row_block < item.row_blocks();
    const VisitedTiles<cfg, Mask, Params> visits{p};
    const auto visited = visits.visited_by(item);
    const Range queries = visits.queries_of(item);
    await_queries<cfg>();
    clear_strip(out);
    softmax.reset();
    Walk<Mask::has_holes> walk(tiles);
    walk.advance(thread, visited);
#pragma unroll 1
    for (i32 turn = 0; !walk.over(); walk.advance(thread, visited), at.advance(), turn ^= 1) {
      if (turn != warpgroup) continue;
      const i32 key = walk.tile * cfg.tile_kv;
      const bool cut = visits.is_cut(item, queries, key);
      ring().wait_full(at);
      Strip<cfg.tile_kv> strip;
      issue_scores(strip, q_tile(), k_tile());
      wgmma_wait<0>();
      wgmma_pin(strip);
      Accumulator<1, cfg.tile_kv / 8>& scores = blocks_of(strip);
      if (has_rows) {
        Score::apply(scores, p, item, rows, key, thread);
        if (cut) {
          for_each_score(scores, [&](float& s, i32 h, i32 column) {
            if (!masks.allows(h, key + thread.column() + column)) s = -kInfinity;
          });
        }
        softmax.update(scores, blocks_of(out), logits);
      }
      Rounded<cfg.tile_kv> probabilities;
      round_to<T, cfg.tile_kv>(probabilities, strip);
      if (cut && panels_hold_non_finite(v_tile(), base, thread)) {
        u32 allowed[2];
        find_allowed<cfg.tile_kv>(allowed, masks, key + thread.column());
        multiply_careful(out, probabilities, v_tile(), allowed, thread);
      } else {
        issue_output_in_fours(out, probabilities, v_tile(), true);
        wgmma_wait<0>();
        wgmma_pin(out);
      }
      ring().release(at, thread);
    }
    softmax.finish();
  }

  FLASHGEN_DEVICE void compute(DecodeScheduler<cfg, Mask>& scheduler, i32 turn) {
    const Assignment& assigned = scheduler.assignments[turn];
    const Results results{{p, assigned.item, shared().totals.of_rows, thread},
                          reinterpret_cast<float*>(base + Smem::kMerge),
                          shared().totals.of_warps,
                          kWarpgroupWarps};
    bool has_fetched = false;
    compute_parts<cfg>(p, assigned, scheduler.work, shared().is_last, thread, results, [&](Range tiles) {
      Strip<Element::dim_v> out;
      Softmax softmax;
      start_queries<cfg>(q_tile(), QueryRows<T>::of(p, assigned.item), p, assigned.item, cfg.head_dim,
                         thread);
      // Meanwhile: the copies take longer than finding the next assignment.
      if (!has_fetched) scheduler.fetch(p, turn ^ 1, thread);
      has_fetched = true;
      attend(out, softmax, assigned.item, tiles);
      results.reduce_warps(blocks_of(out), softmax);
    });
  }

  // ---- The kernel

  // The producers fill a slot, and the warps of one warpgroup empty it.
  FLASHGEN_DEVICE void init_rings() const { ring().init(cfg.producers, kWarpgroupWarps); }

  FLASHGEN_DEVICE static void run(const Params& p, u8* base) {
    DecodeSm90Mainloop self{p, base, shared_address(base), Thread::current()};
    run_decode_roles<cfg>(self);
  }
};

}  // namespace flashgen

// ---- kernels/hopper/decode.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr DecodeConfig kConfig{
    .head_dim = 128,
    .head_dim_v = 128,
    .tile_q = 64,   // rows of a tile: new tokens times query heads that share a key/value head
    .tile_kv = 64,  // keys of a tile
    .stages = 4,
    .warps = 8,      // two warpgroups that take turns at the tiles
    .producers = 4,  // warps that only copy
    .producer_registers = 40,
    .consumer_registers = 232,
    .holds_queries = false,   // each warp keeps its rows of Q in registers
    .merged_parts = 14,       // parts of eight rows that a block merges in the time of a tile
    .item_tiles = 4,          // fixed cost of an item, in tiles
    .has_lower = false,       // the band has a lower bound on k - q
    .has_upper = true,        // the band has an upper bound on k - q
    .varies_by_head = false,  // which tiles hold allowed pairs depends on the head
    .access_bytes = 16,       // alignment of rows in global memory
};

struct Params {
  TensorMap k_map, v_map;  // for TMA
  const element_t* q;
  element_t* o;
  float* lse;                  // log-sum-exp, (batch, heads_q, len_q)
  float* o_partial;            // O of each split of the keys, (splits, batch, heads_q, len_q, head_dim_v)
  float* row_partial;          // of each row of a part: the reference maximum, and the sum of exponentials
  u32* counter;                // tiles drawn, then blocks done; 0 between launches
  const i32* cache_seqlens;    // keys of each sequence, without appended ones; null: the capacity
  const i32* cache_batch_idx;  // row of the cache of each sequence; null: the sequence's index
  const i32* cache_leftpad;    // first keys of each sequence to skip; null: none
  const i32* block_table;      // the pages of each sequence; entries beyond its length are ignored
  const i32* cu_seqlens_q;     // first query of each packed sequence; null: queries are a batch
  const i32* cu_seqlens_k;  // prefix sums of the sequences' keys, in place of cache_seqlens; null: use that
  i64 q_batch, q_row, q_head;  // strides are in elements
  i64 o_batch, o_row, o_head;
  i64 table_row;            // stride between rows of the table
  i64 lse_batch, lse_head;  // strides between sequences and heads; the first is 0 if queries are packed
  i64 lse_rows;             // stride between splits
  i32 heads_q, heads_kv;
  i32 len_q;
  i32 len_kv;                  // capacity in keys of each sequence
  i32 group;                   // query heads per key/value head
  i32 band_lower, band_upper;  // relative to the diagonal through the last query and the last key
  i32 part_tiles;              // tiles of keys of a part; 0: blocks share all tiles equally
  i32 partial_rows;            // rows of a part in o_partial
  i32 page_size;               // keys per page
  i32 batch;                   // sequences
  i32 appended;                // keys of each sequence after those in cache_seqlens
  i32 corner_lower;  // the band of terms aligned top-left; band_... is for those aligned bottom-right
  i32 corner_upper;
  float scale;
  float scale_log2;  // scale * log2(e)
};
static_assert(sizeof(Params) == 512, "the launcher packs Params into 512 bytes");

struct Smem {
  static constexpr u32 kQ = 0;              // Q, all rows of an item
  static constexpr u32 kK = 16384;          // K_j, 4 stages
  static constexpr u32 kV = 81920;          // V_j, 4 stages
  static constexpr u32 kBarriers = 147456;  // of the ring of K_j and V_j
  static constexpr u32 kShared = 147584;    // what the threads exchange
  static constexpr u32 kMerge = 150144;     // O of all rows, once the loop is over
};

using Mask = Band<kConfig.has_lower, kConfig.has_upper>;

using Scoring = NoRowScore;

FLASHGEN_KERNEL(384, 1) decode_d128_causal_pages_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(base);
  DecodeSm90Mainloop<kConfig, element_t, Params, Smem, Mask, Scoring, true>::run(p, base);
}
