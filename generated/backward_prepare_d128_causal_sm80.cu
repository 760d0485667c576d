// backward_prepare_d128_causal_sm80: FlashAttention-2, backward pass, first: D = rowsum(dO * O).
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"bf16","mask":"causal","direction":"both","deterministic":false}
// rebuild  flashgen build --head-dim 128 --dtype bf16 --causal --arch sm_80
// for      sm_80 (A100)
// plan     tile_q 64, 256 threads
// grid     one block for every 64 query rows of every query head and batch entry
//
// contents  17  Instructions, one per function: types, device, math.
//           66  Element types.
//           96  Streaming tiles between global and shared memory.
//          110  The kernel: its configuration, parameters and text.

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
    .workspace_floats = 8192,  // of the dQ workspace, per tile of queries
    .access_bytes = 16,        // alignment of rows in global memory
};

struct Params {
  const element_t* o;
  const element_t* dout;
  const float* dlse;           // gradient of lse, (batch, heads_q, len_q); null where it is zero
  float* dsum;                 // D = rowsum(dO * O) - dlse, (batch, heads_q, len_q)
  float* dq_accum;             // workspace that dQ is summed in
  i64 o_batch, o_row, o_head;  // strides are in elements
  i64 dout_batch, dout_row, dout_head;
  i32 heads_q;
  i32 len_q;
};
static_assert(sizeof(Params) == 96, "the launcher packs Params into 96 bytes");

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

FLASHGEN_KERNEL(256, 1) backward_prepare_d128_causal_sm80(FLASHGEN_GRID_CONSTANT Params p) {
  const Place place = Place::current();
  const i32 first_q = place.tile * kConfig.tile_q;

  // D = rowsum(dO * O), minus the gradient of L where there is one: dS = P (dP - D + dL).
  const element_t* const out = p.o + place.sequence * p.o_batch + place.head * p.o_head;
  const element_t* const dout = p.dout + place.sequence * p.dout_batch + place.head * p.dout_head;
  const i32 lane = thread_idx() % kLanes;
  for (i32 row = thread_idx() / kLanes; row < kConfig.tile_q; row += kRowsAtOnce) {
    const bool exists = first_q + row < p.len_q;
    float total = 0.0f;
    for (i32 chunk = lane; chunk < kChunks; chunk += kLanes) {
      const i32 column = chunk * kChunkElements;
      const i32 valid = exists ? kConfig.head_dim_v - column : 0;
      const i64 safe_row = exists ? first_q + row : 0;
      const Vec16 a = read_chunk<element_t, kConfig.access_bytes>(out + safe_row * p.o_row + column, valid);
      const Vec16 b = read_chunk<element_t, kConfig.access_bytes>(dout + safe_row * p.dout_row + column, valid);
#pragma unroll
      for (i32 i = 0; i < kChunkElements; ++i) total = fused_multiply_add(element_of(a, i), element_of(b, i), total);
    }
#pragma unroll
    for (i32 distance = kLanes / 2; distance > 0; distance /= 2) total += shuffle_xor(total, distance);
    const i64 number = (static_cast<i64>(place.sequence) * p.heads_q + place.head) * p.len_q + first_q + row;
    if (lane == 0 && exists) {
      if (p.dlse != nullptr) total -= p.dlse[number];
      p.dsum[number] = total;
    }
  }

  // The dQ workspace of this tile starts at zero.
  Vec16* const workspace = reinterpret_cast<Vec16*>(p.dq_accum + place.number(ceil_div(p.len_q, kConfig.tile_q), p.heads_q) * kConfig.workspace_floats);
  for (i32 i = thread_idx(); i < kConfig.workspace_floats / 4; i += kThreads) workspace[i] = Vec16{.words = {0, 0, 0, 0}};
}
