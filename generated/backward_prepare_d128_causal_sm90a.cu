// backward_prepare_d128_causal_sm90a: FlashAttention-3, backward pass, first: D = rowsum(dO * O).
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 128 --dtype bf16 --causal --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     tile_q 64, 256 threads
// grid     one block for every 64 query rows of every query head and batch entry
//
// contents  17  Instructions, one per function: types, device, math.
//           67  Element types.
//           98  Streaming tiles between global and shared memory.
//          112  The kernel: its configuration, parameters and text.

#if defined(FLASHGEN_EMULATOR)
#include "flashgen/emu/primitives.h"
#else
// ---- flashgen/ptx/types.cuh
// Integer and 16-bit element types, without any CUDA header.

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

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

FLASHGEN_DEVICE float to_float(bfloat16_t x) { return float_of(static_cast<u32>(x.bits) << 16); }
FLASHGEN_DEVICE float to_float(float x) { return x; }

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

}  // namespace flashgen

// ---- kernels/backward_prepare.cu.j2
using namespace flashgen;

struct PrepareConfig {
  i32 head_dim_v;
  i32 tile_q;
  i32 workspace_floats;
  i32 access_bytes;
};

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
  // log-sum-exp, (batch, heads_q, len_q)
  const float* lse;
  // gradient of lse, (batch, heads_q, len_q); null where it is zero
  const float* dlse;
  // D = rowsum(dO * O) - dlse, (batch, heads_q, len_q)
  float* dsum;
  // per tile of queries: -L in units of S, then -D
  float* row_stats;
  // workspace that dQ is summed in
  float* dq_accum;
  // tiles of dQ drawn by finishers; per head, tiles of keys added; per head, tiles of dQ finished
  u32* head_counts;
  // flags of tiles of dQ, then of dK and dV, that are not finite
  u32* failed_tiles;
  // strides are in elements
  i64 o_batch;
  i64 o_row;
  i64 o_head;
  i64 dout_batch;
  i64 dout_row;
  i64 dout_head;
  i32 heads_q;
  i32 len_q;
  i32 sum_heads;  // query heads in dq_accum, a ring
  i32 flags;      // how many there are
  float scale;
};
static_assert(sizeof(Params) == 144, "the launcher packs Params into 144 bytes");

constexpr i32 kThreads = 256;
constexpr i32 kChunkElements = kChunkBytes / static_cast<i32>(sizeof(element_t));
constexpr i32 kChunks = ceil_div(kConfig.head_dim_v, kChunkElements);

// Lanes that share a row: a power of two, one chunk each at a time.
constexpr i32 lanes_for(i32 chunks) {
  i32 lanes = 1;
  while (lanes < chunks && lanes < kWarpSize) lanes *= 2;
  return lanes;
}
constexpr i32 kLanes = lanes_for(kChunks);
constexpr i32 kRowsAtOnce = kThreads / kLanes;

FLASHGEN_DEVICE float element_of(const Vec16& chunk, i32 i) {
  if constexpr (kIsFloat<element_t>) {
    return float_of(chunk.words[i]);
  } else {
    return to_float(element_t{static_cast<u16>(chunk.words[i / 2] >> (16 * (i % 2)))});
  }
}

FLASHGEN_KERNEL(256, 1) backward_prepare_d128_causal_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  const Place place = Place::current();
  const i32 first_q = place.tile * kConfig.tile_q;

  // D = rowsum(dO * O), minus the gradient of L where there is one: dS = P (dP - D + dL).
  const element_t* const out = p.o + place.sequence * p.o_batch + place.head * p.o_head;
  const element_t* const dout = p.dout + place.sequence * p.dout_batch + place.head * p.dout_head;
  const i32 lane = thread_idx() % kLanes;
  // Lanes that share rows have a chunk of each. All are read before the first is summed, and lane t of them looks
  // after the row of turn t.
  constexpr i32 turns = kConfig.tile_q / kRowsAtOnce;
  static_assert(kChunks <= kLanes && turns <= kLanes && kConfig.tile_q % kRowsAtOnce == 0);
  const i32 first_row = thread_idx() / kLanes;
  const i32 row = first_row + lane * kRowsAtOnce;
  const bool is_there = lane < turns, exists = is_there && first_q + row < p.len_q;
  const i64 number = (static_cast<i64>(place.sequence) * p.heads_q + place.head) * p.len_q + first_q + row;
  const float lse = exists ? p.lse[number] : -kInfinity;
  const float dlse = exists && p.dlse != nullptr ? p.dlse[number] : 0.0f;
  Vec16 a[turns], b[turns];
#pragma unroll
  for (i32 turn = 0; turn < turns; ++turn) {
    const i64 q = first_q + first_row + turn * kRowsAtOnce;
    const i32 column = lane * kChunkElements, valid = q < p.len_q ? kConfig.head_dim_v - column : 0;
    a[turn] = read_chunk<element_t, kConfig.access_bytes>(out + q * p.o_row + column, valid);
    b[turn] = read_chunk<element_t, kConfig.access_bytes>(dout + q * p.dout_row + column, valid);
  }
  float total = 0.0f;
#pragma unroll
  for (i32 turn = 0; turn < turns; ++turn) {
    float sum = 0.0f;
#pragma unroll
    for (i32 i = 0; i < kChunkElements; ++i)
      sum = fused_multiply_add(element_of(a[turn], i), element_of(b[turn], i), sum);
#pragma unroll
    for (i32 distance = kLanes / 2; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
    if (lane == turn) total = sum;
  }
  total -= dlse;
  if (exists) p.dsum[number] = total;
  if (is_there) {
    // The probabilities of rows that do not exist, or attend to nothing, are to be 0.
    float* const stats = p.row_stats + place.number(ceil_div(p.len_q, kConfig.tile_q), p.heads_q) * (2 * kConfig.tile_q);
    stats[row] = lse == -kInfinity ? lse : -lse / p.scale;
    stats[kConfig.tile_q + row] = exists ? -total : 0.0f;
  }

  // No tile of gradients has failed.
  if (place.sequence == 0) {
    for (i32 i = (place.head * grid_dim_x() + place.tile) * kThreads + thread_idx(); i < p.flags;
         i += p.heads_q * grid_dim_x() * kThreads)
      p.failed_tiles[i] = 0;
  }

  // The dQ workspace of this tile starts at zero.
  const i32 head = place.sequence * p.heads_q + place.head;
  if (thread_idx() == 0 && place.tile == 0) {
    // Nothing has been given out to be finished, nothing added to this head's dQ, nothing of it finished.
    if (head == 0) p.head_counts[0] = 0;
    p.head_counts[1 + 2 * head] = 0;
    p.head_counts[2 + 2 * head] = 0;
  }
  if (head >= p.sum_heads) return;
  Vec16* const workspace = reinterpret_cast<Vec16*>(p.dq_accum + place.number(ceil_div(p.len_q, kConfig.tile_q), p.heads_q) * kConfig.workspace_floats);
  for (i32 i = thread_idx(); i < kConfig.workspace_floats / 4; i += kThreads) workspace[i] = Vec16{.words = {0, 0, 0, 0}};
}
