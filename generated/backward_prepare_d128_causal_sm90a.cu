// backward_prepare_d128_causal_sm90a: FlashAttention-3, backward pass, first: D = rowsum(dO * O).
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 128 --dtype bf16 --causal --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 64, 256 threads
// grid     one block for every 64 query rows of every query head and batch entry
//
// contents  19  Instructions, one per function: types, device, math.
//           75  Element types.
//          104  What a softmax takes exponentials of.
//          124  Streaming tiles between global and shared memory.
//          136  What the backward kernels for Hopper begin with.
//          280  The kernel: its configuration, parameters and text.

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
FLASHGEN_DEVICE i32 block_idx_y() { return static_cast<i32>(blockIdx.y); }
FLASHGEN_DEVICE i32 block_idx_z() { return static_cast<i32>(blockIdx.z); }
FLASHGEN_DEVICE i32 grid_dim_x() { return static_cast<i32>(gridDim.x); }
FLASHGEN_DEVICE float shuffle_xor(float value, i32 lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
FLASHGEN_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// ---- flashgen/ptx/math.cuh
// Scalar arithmetic, one instruction each.

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

}  // namespace flashgen
#endif
// ---- flashgen/element.cuh
// Element types: conversions, and how deep one matrix instruction reaches.

namespace flashgen {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLog2E = 0x1.715476p+0f;
constexpr i32 kWarpSize = 32;
// The widest access of a thread, and the unit of swizzles.
constexpr i32 kChunkBytes = 16;

constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

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

FLASHGEN_DEVICE float to_float(bfloat16_t x) { return float_of(static_cast<u32>(x.bits) << 16); }
FLASHGEN_DEVICE float to_float(float x) { return x; }

// ---- flashgen/logits.cuh
// What a softmax takes exponentials of. The exponentials of a row are relative to its reference maximum: the
// row's maximum so far, or a number near it. Each kind of logits has its own unit for reference maxima.
//
//     logit(s, row)            accumulator s as a reference maximum; as_reference_max(x): logit x as one
//     relative(s, shift, row)  how far s is above reference maximum `shift`, in powers of two
//     powers(x), distance(x)   from a difference of reference maxima to powers of two, and back
//     natural_log(m, x)        the natural logarithm of 2^x times the factor of reference maximum m
//     kNoMax                   the reference maximum of a row without an allowed key so far

// -L of a row in powers of two: P = exp(score - L) takes one instruction before the exponential. A row that
// attends to nothing has L = -inf. Such an L counts as +inf, so that P is 0 even where scores are -inf. So
// does an L that overflows in powers of two. Beyond 2^22 L is rounded up by its rounding error, so that P
// stays near or below 1.
FLASHGEN_DEVICE float negate_lse(float lse) {
  const float excess = maximum(maximum(lse, -lse) - 0x1p22f, 0.0f);
  const float rounded_up = fused_multiply_add(excess, 0x1p-22f, lse);
  return lse < -0x1p126f ? -kInfinity : -rounded_up * kLog2E;
}

// ---- flashgen/stream.cuh
// Streaming tiles between global and shared memory.

// One 16-byte chunk read with the widest accesses that its alignment allows; elements past `valid` are zero.
template <class T, i32 access_bytes>
FLASHGEN_DEVICE Vec16 read_chunk(const T* source, i32 valid) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  Vec16 chunk = {{0, 0, 0, 0}};
  if (valid > 0) chunk = *reinterpret_cast<const Vec16*>(source);
  return chunk;
}

// ---- flashgen/sm90/backward_prepare.cuh
// What the backward kernels for Hopper begin with: the statistics L and D of the query rows, and workspaces
// without anything in them.

struct PrepareConfig {
  i32 head_dim_v;
  i32 tile_q;
  i32 workspace_floats;
  i32 access_bytes;
};

// ---- Where the rows of a block's tile of queries lie: the Tile policy

struct DensePreparedTile {
  Place place;

  template <class Params>
  FLASHGEN_DEVICE static DensePreparedTile of(const Params&, Place place) { return {place}; }
  // Whether its sequence has so many rows, and how many are used.
  FLASHGEN_DEVICE static bool exists(i32 /*tile_q*/) { return true; }
  FLASHGEN_DEVICE static i32 len_q(const auto& p) { return p.len_q; }
  // From the first row of a tensor, or of row statistics, to that of the sequence.
  FLASHGEN_DEVICE i64 rows(i64 batch, i64 /*row*/) const { return place.sequence * batch; }
  FLASHGEN_DEVICE i64 statistics(const auto& p) const {
    return (static_cast<i64>(place.sequence) * p.heads_q + place.head) * p.len_q;
  }
  // The number under which workspaces hold what belongs to it.
  template <class Params>
  FLASHGEN_DEVICE i64 number(const Params& p, i32 tile_q) const {
    return place.number(ceil_div(p.len_q, tile_q), p.heads_q);
  }
};

// ---- The kernel

// How dQ is summed: in a ring of sums that are cleared, in sums whose first addition stores, or in registers.
enum class DqSums { ring, in_order, registers };

// `scales`: accumulators of S start at -L / scale. `has_mask`: tiles may have to be repaired. `drops`:
// accumulators of dP start at -D (1 - p).
template <PrepareConfig cfg, class T, class Params, i32 threads, class Tile, DqSums sums, bool scales,
          bool has_mask, bool drops>
struct BackwardPrepare {
  static constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  static constexpr i32 chunks = ceil_div(cfg.head_dim_v, chunk_elements);
  // Lanes that share a row: a power of two, one chunk each. At least 8: a tile has rows for all threads.
  static constexpr i32 lanes_for(i32 chunks) {
    i32 lanes = 8;
    while (lanes < chunks && lanes < kWarpSize) lanes *= 2;
    return lanes;
  }
  static constexpr i32 lanes = lanes_for(chunks), rows_at_once = threads / lanes;
  // All chunks of a lane are read before the first is summed, and lane t looks after the row of turn t.
  static constexpr i32 turns = cfg.tile_q / rows_at_once;
  static_assert(chunks <= lanes && turns <= lanes && cfg.tile_q % rows_at_once == 0);

  FLASHGEN_DEVICE static float element_of(const Vec16& chunk, i32 i) {
    return to_float(T{static_cast<u16>(chunk.words[i / 2] >> (16 * (i % 2)))});
  }

  // No tile of gradients has failed.
  FLASHGEN_DEVICE static void clear_flags(const Params& p, Place place) {
    if (place.sequence != 0) return;
    for (i32 i = (place.head * grid_dim_x() + place.tile) * threads + thread_idx(); i < p.flags;
         i += p.heads_q * grid_dim_x() * threads)
      p.failed_tiles[i] = 0;
  }
  // Nothing has been given out to be finished, nothing added to this head's dQ, nothing of it finished.
  FLASHGEN_DEVICE static void clear_counts(const Params& p, Place place) {
    if (thread_idx() != 0 || place.tile != 0) return;
    const i32 head = place.sequence * p.heads_q + place.head;
    if (head == 0) p.head_counts[0] = 0;
    p.head_counts[1 + 2 * head] = 0;
    p.head_counts[2 + 2 * head] = 0;
  }
  // The sum of dQ of this tile starts at zero.
  FLASHGEN_DEVICE static void clear_sum(const Params& p, const Tile& tile) {
    if (tile.place.sequence * p.heads_q + tile.place.head >= p.sum_heads) return;
    Vec16* const sum =
        reinterpret_cast<Vec16*>(p.dq_accum + tile.number(p, cfg.tile_q) * cfg.workspace_floats);
    for (i32 i = thread_idx(); i < cfg.workspace_floats / 4; i += threads)
      sum[i] = Vec16{.words = {0, 0, 0, 0}};
  }

  // D = rowsum(dO * O), minus the gradient of L where there is one: dS = P (dP - D + dL).
  FLASHGEN_DEVICE static void write_statistics(const Params& p, const Tile& tile) {
    const T* const out = p.o + tile.rows(p.o_batch, p.o_row) + tile.place.head * p.o_head;
    const T* const dout = p.dout + tile.rows(p.dout_batch, p.dout_row) + tile.place.head * p.dout_head;
    const i32 lane = thread_idx() % lanes, first_row = thread_idx() / lanes;
    const i32 first_q = tile.place.tile * cfg.tile_q, row = first_row + lane * rows_at_once;
    const bool is_there = lane < turns, exists = is_there && first_q + row < tile.len_q(p);
    const i64 number = tile.statistics(p) + first_q + row;
    const float lse = exists ? p.lse[number] : -kInfinity;
    const float dlse = exists && p.dlse != nullptr ? p.dlse[number] : 0.0f;
    Vec16 a[turns], b[turns];
#pragma unroll
    for (i32 turn = 0; turn < turns; ++turn) {
      const i64 q = first_q + first_row + turn * rows_at_once;
      const i32 column = lane * chunk_elements, valid = q < tile.len_q(p) ? cfg.head_dim_v - column : 0;
      a[turn] = read_chunk<T, cfg.access_bytes>(out + q * p.o_row + column, valid);
      b[turn] = read_chunk<T, cfg.access_bytes>(dout + q * p.dout_row + column, valid);
    }
    float total = 0.0f;
#pragma unroll
    for (i32 turn = 0; turn < turns; ++turn) {
      float sum = 0.0f;
#pragma unroll
      for (i32 i = 0; i < chunk_elements; ++i)
        sum = fused_multiply_add(element_of(a[turn], i), element_of(b[turn], i), sum);
#pragma unroll
      for (i32 distance = lanes / 2; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
      if (lane == turn) total = sum;
    }
    total -= dlse;
    if (exists) p.dsum[number] = total;
    if (!is_there) return;
    // The probabilities of rows that do not exist, or attend to nothing, are to be 0.
    float* const stats = p.row_stats + tile.number(p, cfg.tile_q) * (2 * cfg.tile_q);
    if constexpr (scales) {
      stats[row] = lse == -kInfinity ? lse : -lse / p.scale;
    } else {
      stats[row] = negate_lse(lse);
    }
    if constexpr (drops) total /= p.dropout_factor;
    stats[cfg.tile_q + row] = exists ? -total : 0.0f;
  }

  FLASHGEN_DEVICE static void run(const Params& p) {
    const Place place = Place::current();
    if constexpr (has_mask) clear_flags(p, place);
    if constexpr (sums == DqSums::ring) clear_counts(p, place);
    const Tile tile = Tile::of(p, place);
    if (!tile.exists(cfg.tile_q)) return;
    write_statistics(p, tile);
    if constexpr (sums == DqSums::ring) clear_sum(p, tile);
    // The first tile of keys that adds to it may do so.
    if constexpr (sums == DqSums::in_order) {
      if (thread_idx() == 0) p.dq_semaphore[tile.number(p, cfg.tile_q)] = 0;
    }
  }
};

}  // namespace flashgen

// ---- kernels/hopper/backward_prepare.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr PrepareConfig kConfig{
    .head_dim_v = 128,
    .tile_q = 64,
    .workspace_floats = 8192,  // of dQ, per tile of queries
    .access_bytes = 16,        // alignment of rows in global memory
};

struct Params {
  const element_t* o;
  const element_t* dout;
  const float* lse;   // log-sum-exp, (batch, heads_q, len_q)
  const float* dlse;  // gradient of lse, (batch, heads_q, len_q); null where it is zero
  float* dsum;        // D = rowsum(dO * O) - dlse, (batch, heads_q, len_q)
  float* row_stats;   // per tile of queries: -L in units of S, then -D
  float* dq_accum;    // workspace that dQ is summed in
  // tiles of dQ drawn by finishers; per head, tiles of keys added; per head, tiles of dQ finished
  u32* head_counts;
  u32* failed_tiles;           // flags of tiles of dQ, then of dK and dV, that are not finite
  i64 o_batch, o_row, o_head;  // strides are in elements
  i64 dout_batch, dout_row, dout_head;
  i32 heads_q;
  i32 len_q;
  i32 sum_heads;  // query heads in dq_accum, a ring
  i32 flags;      // how many there are
  float scale;
};
static_assert(sizeof(Params) == 144, "the launcher packs Params into 144 bytes");

using Tile = DensePreparedTile;
constexpr DqSums kSums = DqSums::ring;
constexpr bool kScales = true;
constexpr bool kHasMask = true;
constexpr bool kDrops = false;

FLASHGEN_KERNEL(256, 1) backward_prepare_d128_causal_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  BackwardPrepare<kConfig, element_t, Params, 256, Tile, kSums, kScales, kHasMask, kDrops>::run(p);
}
