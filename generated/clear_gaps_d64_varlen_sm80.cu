// clear_gaps_d64_varlen_sm80: FlashAttention-2, after either pass: zeros in rows of packed arrays that belong
// to no sequence.
//
// spec     {"head_dim":64,"head_dim_v":64,"dtype":"bf16","mask":"full","direction":"forward","deterministic":false,"varlen":true}
// rebuild  flashgen build --head-dim 64 --dtype bf16 --forward-only --varlen --arch sm_80
// for      sm_80 (A100)
// plan     warps 4, 128 threads
// grid     one block for every 32 rows of all heads
//
// contents  20  Instructions, one per function: types, device.
//           63  Element types.
//           87  Banded masks.
//           95  Streaming tiles between global and shared memory.
//          104  Rows of packed arrays that belong to no sequence.
//          175  The kernel: its configuration, parameters and text.

#if defined(FLASHGEN_EMULATOR)
#include "flashgen/emu/primitives.h"
#else
// ---- flashgen/ptx/types.cuh
// Integer and element types, without any CUDA header.

namespace flashgen {

using u16 = unsigned short;
using u32 = unsigned int;
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

namespace flashgen {

FLASHGEN_DEVICE i32 thread_idx() { return static_cast<i32>(threadIdx.x); }
FLASHGEN_DEVICE i32 block_idx_x() { return static_cast<i32>(blockIdx.x); }
// Bit l is lane l's condition.
FLASHGEN_DEVICE u32 warp_ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }
FLASHGEN_DEVICE i32 lowest_bit(u32 bits) { return __ffs(static_cast<int>(bits)) - 1; }
FLASHGEN_DEVICE float shuffle(float value, i32 source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
}
FLASHGEN_DEVICE i32 shuffle(i32 value, i32 source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
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
  // The lane's accumulators in a block of 16 x 8 are in rows row() and + 8, and in columns column() and + 1.
  FLASHGEN_DEVICE i32 row() const { return lane / 4; }
};

// ---- flashgen/band.cuh
// Banded masks: key k is allowed for query q when lower <= k - q <= upper and both exist.

struct Range {
  i32 begin, end;
  FLASHGEN_DEVICE i32 size() const { return end - begin; }
};

// ---- flashgen/stream.cuh
// Streaming tiles between global and shared memory.

template <class T, i32 access_bytes>
FLASHGEN_DEVICE void write_chunk(T* destination, const Vec16& chunk, i32 valid) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  if (valid > 0) *reinterpret_cast<Vec16*>(destination) = chunk;
}

// ---- flashgen/clear_gaps.cuh
// Rows of packed arrays that belong to no sequence.

struct ClearGapsConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 rows;
  i32 warps;
  i32 access_bytes;
};

// Where the sequences of packed rows begin, as the other kernels read it: none is longer than `longest`.
struct PackedRows {
  const i32* starts;
  i32 sequences;
  i32 longest;
  i64 total;

  // Gap g lies before sequence g, and the last one behind all sequences. Gaps and sequences together form a
  // path from row 0 to row `total`, so they cover every row, whatever numbers `starts` holds.
  FLASHGEN_DEVICE i64 gap_begin(i32 gap) const {
    if (gap == 0) return 0;
    const i64 first = starts[gap - 1], length = starts[gap] - first;
    return first + (length < 0 ? 0 : length < longest ? length : longest);
  }
  FLASHGEN_DEVICE i64 gap_end(i32 gap) const { return gap < sequences ? starts[gap] : total; }
};

FLASHGEN_DEVICE i32 clamp_row(i64 row, Range rows) {
  return static_cast<i32>(row < rows.begin ? rows.begin : row > rows.end ? rows.end : row);
}

// Calls `visit` with each stretch of `rows` that lies in a gap. Lane l looks at gaps l, l + 32 ...
FLASHGEN_DEVICE void for_each_gap(const PackedRows& packed, Range rows, Thread thread, const auto& visit) {
#pragma unroll 1
  for (i32 first = 0; first <= packed.sequences; first += kWarpSize) {
    const i32 gap = first + thread.lane;
    const bool exists = gap <= packed.sequences;
    const Range own{exists ? clamp_row(packed.gap_begin(gap), rows) : 0,
                    exists ? clamp_row(packed.gap_end(gap), rows) : 0};
    for (u32 left = warp_ballot(own.size() > 0); left != 0; left &= left - 1) {
      const i32 lane = lowest_bit(left);
      visit(Range{shuffle(own.begin, lane), shuffle(own.end, lane)});
    }
  }
}

// Zeros into whole rows of a contiguous (rows, heads, head_dim) array, by one warp. A null array is none.
template <i32 access_bytes, class T>
FLASHGEN_DEVICE void clear_whole_rows(T* data, Range rows, i64 row_elements, Thread thread) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  if (data == nullptr) return;
  const i64 end = rows.end * row_elements;
  for (i64 i = rows.begin * row_elements + thread.lane * chunk_elements; i < end;
       i += kWarpSize * chunk_elements) {
    const i32 valid = end - i < chunk_elements ? static_cast<i32>(end - i) : chunk_elements;
    write_chunk<T, access_bytes>(data + i, Vec16{.words = {0, 0, 0, 0}}, valid);
  }
}

// Minus infinity into rows of a contiguous (heads, total) array.
FLASHGEN_DEVICE void clear_log_sums(float* lse, Range rows, i32 heads, i64 total, Thread thread) {
  if (lse == nullptr) return;
  for (i32 head = 0; head < heads; ++head) {
    for (i32 row = rows.begin + thread.lane; row < rows.end; row += kWarpSize)
      lse[head * total + row] = -kInfinity;
  }
}

}  // namespace flashgen

// ---- kernels/clear_gaps.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr ClearGapsConfig kConfig{
    .head_dim = 64,
    .head_dim_v = 64,
    .rows = 32,
    .warps = 4,
    .access_bytes = 16,
};

struct Params {
  const i32* cu_seqlens_q;  // where the queries of each sequence begin
  const i32* cu_seqlens_k;
  element_t* o;  // results of a pass; null: of the other one
  float* lse;
  element_t* dq;
  element_t* dk;
  element_t* dv;
  i64 total_q, total_kv;  // rows of queries, and of keys
  i32 batch;              // sequences
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;  // of the longest sequence
};
static_assert(sizeof(Params) == 96, "the launcher packs Params into 96 bytes");

FLASHGEN_KERNEL(128, 1) clear_gaps_d64_varlen_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  const Thread thread = Thread::current();

  // Each warp looks for gaps in rows of its own: rows of queries, then as many rows of keys.
  constexpr i32 rows_of_warp = kConfig.rows / kConfig.warps;
  const i64 first_row = static_cast<i64>(block_idx_x()) * kConfig.rows + thread.warp * rows_of_warp;
  const auto rows_below = [&](i64 total) {
    const Range all{0, static_cast<i32>(total)};
    return Range{clamp_row(first_row, all), clamp_row(first_row + rows_of_warp, all)};
  };

  const PackedRows queries{p.cu_seqlens_q, p.batch, p.len_q, p.total_q};
  for_each_gap(queries, rows_below(p.total_q), thread, [&](Range rows) {
    clear_whole_rows<kConfig.access_bytes>(p.o, rows, static_cast<i64>(p.heads_q) * kConfig.head_dim_v, thread);
    clear_log_sums(p.lse, rows, p.heads_q, p.total_q, thread);
    clear_whole_rows<kConfig.access_bytes>(p.dq, rows, static_cast<i64>(p.heads_q) * kConfig.head_dim, thread);
  });

  // A forward pass writes no rows of keys.
  if (p.dk == nullptr) return;
  const PackedRows keys{p.cu_seqlens_k, p.batch, p.len_kv, p.total_kv};
  for_each_gap(keys, rows_below(p.total_kv), thread, [&](Range rows) {
    clear_whole_rows<kConfig.access_bytes>(p.dk, rows, static_cast<i64>(p.heads_kv) * kConfig.head_dim, thread);
    clear_whole_rows<kConfig.access_bytes>(p.dv, rows, static_cast<i64>(p.heads_kv) * kConfig.head_dim_v, thread);
  });
}
