// append_d128_pages_e4m3_sm90a: Flash-Decoding, before a forward pass: new keys and values into the cache,
// turned by their positions, and so queries.
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"bf16","mask":"causal","direction":"forward","deterministic":false,"cache":"paged","cache_dtype":"e4m3"}
// rebuild  flashgen build --head-dim 128 --dtype bf16 --causal --forward-only --cache paged --cache-dtype e4m3 --arch sm_90a
// for      sm_90a (H100, H200, with Hopper-only instructions)
// plan     warps 4, 128 threads
// grid     one block for every 8 query rows of every query head and batch entry
//
// contents  24  Instructions, one per function: types, device, math.
//           79  Element types.
//          118  Banded masks.
//          126  Streaming tiles between global and shared memory.
//          139  Keys and values in a cache.
//          201  8-bit floats.
//          238  New keys and values of an 8-bit cache.
//          254  Single elements from floats.
//          266  Rotary position embedding, and rows of a head copied with it.
//          315  The kernel: its configuration, parameters and text.

#if defined(FLASHGEN_EMULATOR)
#include "flashgen/emu/primitives.h"
#else
// ---- flashgen/ptx/types.cuh
// Integer and element types, without any CUDA header.

namespace flashgen {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using i64 = long long;

struct bfloat16_t {
  u16 bits;
};
// 8-bit floats. After the sign, e4m3 has 4 exponent and 3 mantissa bits; e5m2 has 5 and 2.
struct e4m3_t {
  u8 bits;
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
FLASHGEN_DEVICE float shuffle(float value, i32 source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
}
FLASHGEN_DEVICE i32 shuffle(i32 value, i32 source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
}
FLASHGEN_DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
FLASHGEN_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// ---- flashgen/ptx/math.cuh
// Scalar arithmetic, one instruction each.

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
  FLASHGEN_DEVICE i32 index() const { return warp * kWarpSize + lane; }
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
};

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

FLASHGEN_DEVICE float to_float(bfloat16_t x) { return float_of(static_cast<u32>(x.bits) << 16); }
FLASHGEN_DEVICE float to_float(float x) { return x; }

// ---- flashgen/band.cuh
// Banded masks: key k is allowed for query q when lower <= k - q <= upper and both exist.

struct Range {
  i32 begin, end;
  FLASHGEN_DEVICE i32 size() const { return end - begin; }
};

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

// Rows of keys or values in pages: row r is number first + r of those that the table of pages counts. The
// table is read for rows that exist, and for no others.
template <class T>
struct PagedRows {
  T* data;
  i64 page_stride;
  i64 row_stride;
  const i32* pages;
  i32 page_size;
  i32 first;
  i32 row_count;

  FLASHGEN_DEVICE T* at(i32 row, i32 col) const {
    const i32 place = first + row, page = place / page_size;
    return data + pages[page] * page_stride + (place - page * page_size) * row_stride + col;
  }
};

// ---- flashgen/eight_bits.cuh
// 8-bit floats: e4m3 has four bits of exponent, no infinity and one NaN; e5m2 is the upper half of a 16-bit
// float. Every one of them is a 16-bit float, too.

template <class E>
struct EightBitFormat;
template <>
struct EightBitFormat<e4m3_t> {
  static constexpr i32 mantissa_bits = 3;
  static constexpr i32 bias = 7;
  static constexpr u32 largest = 0x7e;
};

// The nearest number, of two as near the even one. What is too large becomes the largest number, and NaN
// stays NaN.
template <class E>
FLASHGEN_DEVICE E quantized(float x) {
  using Format = EightBitFormat<E>;
  constexpr i32 dropped = 23 - Format::mantissa_bits;
  // Bits of the smallest normal number, and of a float whose last bit is worth as much as the smallest
  // number.
  constexpr u32 least_normal = static_cast<u32>(128 - Format::bias) << 23;
  constexpr u32 rounder = static_cast<u32>(128 - Format::bias + dropped) << 23;
  const u32 sign = bits_of(x) >> 24 & 0x80u, magnitude = bits_of(x) & 0x7fffffffu;
  u32 code;
  if (magnitude > 0x7f800000u) {
    return {0x7f};
  } else if (magnitude < least_normal) {
    code = bits_of(float_of(magnitude) + float_of(rounder)) - rounder;
  } else {
    const u32 even = magnitude >> dropped & 1u;
    code = (magnitude - least_normal + (1u << 23) + (1u << (dropped - 1)) - 1u + even) >> dropped;
    code = code < Format::largest ? code : Format::largest;
  }
  return {static_cast<u8>(sign | code)};
}

// ---- flashgen/append_eight_bits.cuh
// New keys and values of an 8-bit cache: they are divided by a scale, and rounded.

template <class Stored, class T>
FLASHGEN_DEVICE void put(Stored& to, T x, float scale) { to = quantized<Stored>(to_float(x) / scale); }

// The scale of a new row: that of its head, or of the page that it comes into.
struct HeadScale {
  float scale;

  FLASHGEN_DEVICE static HeadScale of(const float* scales, i64 row, i64 head, Place place) {
    return {scales == nullptr ? 1.0f : scales[place.sequence * row + place.head * head]};
  }
  FLASHGEN_DEVICE float at(i32 /*row*/) const { return scale; }
};

// ---- flashgen/convert.cuh
// Single elements from floats.

template <class T>
FLASHGEN_DEVICE T element_from(float value) {
  if constexpr (kIsFloat<T>) {
    return value;
  } else {
    return T{static_cast<u16>(pack(T{}, value, 0.0f))};
  }
}

// ---- flashgen/rotary.cuh
// Rotary position embedding, and rows of a head copied with it.

struct AppendConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 rows;
  i32 warps;
};

// Stores an element in a row of the same type, which has no scale. For 8-bit caches see
// append_eight_bits.cuh.
template <class T>
FLASHGEN_DEVICE void put(T& to, T x, float /*scale*/) { to = x; }

// Which elements of a head are turned together, and by which angles. Pairs of elements are counted through:
// those that are turned come first, and behind them neighbors that are not.
template <class T>
struct Rotary {
  GlobalRows<const T> cos;
  GlobalRows<const T> sin;
  i32 pairs;
  bool interleaved;

  FLASHGEN_DEVICE i32 first_of(i32 pair) const { return pair < pairs && !interleaved ? pair : 2 * pair; }
  FLASHGEN_DEVICE i32 second_of(i32 pair) const {
    return first_of(pair) + (pair < pairs && !interleaved ? pairs : 1);
  }

  // Copies one pair of a head of `head_dim` elements, turned as its position says.
  template <class Stored>
  FLASHGEN_DEVICE void copy(Stored* to, const T* from, i32 pair, i32 head_dim, i32 position,
                            float scale) const {
    const i32 first = first_of(pair), second = second_of(pair);
    if (pair >= pairs) {
      put(to[first], from[first], scale);
      if (second < head_dim) put(to[second], from[second], scale);
      return;
    }
    const i32 row = larger(0, smaller(position, cos.row_count - 1));
    const float c = to_float(*cos.at(row, pair)), s = to_float(*sin.at(row, pair));
    const float x = to_float(from[first]), y = to_float(from[second]);
    put(to[first], element_from<T>(x * c - y * s), scale);
    put(to[second], element_from<T>(x * s + y * c), scale);
  }
};

}  // namespace flashgen

// ---- kernels/append.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;
using cache_t = e4m3_t;

constexpr AppendConfig kConfig{
    .head_dim = 128,
    .head_dim_v = 128,
    .rows = 8,
    .warps = 4,
};

struct Params {
  const element_t* q;
  const element_t* new_k;
  const element_t* new_v;
  cache_t* k;
  cache_t* v;
  element_t* rotated_q;
  const float* k_scale;  // what elements of the cache are multiplied by; null: 1
  const float* v_scale;
  const i32* cache_seqlens;     // keys of each sequence, without appended ones; null: the capacity
  const i32* cache_batch_idx;   // row of the cache of each sequence; null: the sequence's index
  const i32* block_table;       // the pages of each sequence; entries beyond its length are ignored
  const i32* rotary_positions;  // position of the first new key and query; null: cache_seqlens
  const element_t* rotary_cos;  // (positions, rotary_dim / 2)
  const element_t* rotary_sin;
  i64 q_batch, q_row, q_head;  // strides are in elements
  i64 new_k_batch, new_k_row, new_k_head, new_v_batch, new_v_row, new_v_head;
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 rotated_q_batch, rotated_q_row, rotated_q_head;
  i64 k_scale_batch, k_scale_head;  // strides between sequences and heads; 0: they share the scale
  i64 v_scale_batch, v_scale_head;
  i64 table_row;  // stride between rows of the table
  i64 cos_row;
  i64 sin_row;
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;
  i32 len_new;      // keys to append to the cache
  i32 page_size;    // keys per page
  i32 rotary_rows;  // positions in the tables
  i32 rotary_dim;   // elements of each head that are rotated; 0: none
  i32 interleaved;  // 1: adjacent elements form a pair; 0: one of each half
  i32 q_advance;    // difference of the positions of consecutive queries
};
static_assert(sizeof(Params) == 352, "the launcher packs Params into 352 bytes");

FLASHGEN_KERNEL(128, 1) append_d128_pages_e4m3_sm90a(FLASHGEN_GRID_CONSTANT Params p) {
  const Thread thread = Thread::current();
  const Place place = Place::current();
  const i32 first_row = place.tile * kConfig.rows;
  constexpr i32 threads = kConfig.warps * kWarpSize;

  // New keys come behind those that are there; positions count from the first of them.
  const i32 first_key = CachedSequence::before(p, place.sequence);
  const i32 position = p.rotary_positions == nullptr ? first_key : p.rotary_positions[place.sequence];
  const Rotary<element_t> rotary{
      {p.rotary_cos, p.cos_row, p.rotary_rows}, {p.rotary_sin, p.sin_row, p.rotary_rows}, p.rotary_dim / 2, p.interleaved != 0};
  constexpr i32 pairs = ceil_div(kConfig.head_dim, 2);

  if (place.head < p.heads_q) {
    const GlobalRows<const element_t> q{p.q + place.sequence * p.q_batch + place.head * p.q_head, p.q_row, p.len_q};
    const GlobalRows<element_t> rotated{
        p.rotated_q + place.sequence * p.rotated_q_batch + place.head * p.rotated_q_head, p.rotated_q_row, p.len_q};
    for (i32 i = thread.index(); i < kConfig.rows * pairs; i += threads) {
      const i32 row = first_row + i / pairs;
      if (row >= p.len_q) break;
      rotary.copy(rotated.at(row, 0), q.at(row, 0), i % pairs, kConfig.head_dim, position + row * p.q_advance, 1.0f);
    }
  }

  if (place.head < p.heads_kv) {
    const i32 head_kv = place.head;
    // A key that there is no room for is left out.
    const i32 end = smaller(p.len_new, p.len_kv - first_key);
    const i64 cache_row = CachedSequence::row_of(p, place.sequence);
    const i32* const pages = p.block_table + cache_row * p.table_row;
    const auto k_rows = PagedRows<cache_t>{p.k + head_kv * p.k_head, p.k_batch, p.k_row, pages, p.page_size, first_key, end};
    const auto v_rows = PagedRows<cache_t>{p.v + head_kv * p.v_head, p.v_batch, p.v_row, pages, p.page_size, first_key, end};
    const auto k_scales = HeadScale::of(p.k_scale, p.k_scale_batch, p.k_scale_head, place);
    const auto v_scales = HeadScale::of(p.v_scale, p.v_scale_batch, p.v_scale_head, place);
    const element_t* const new_k = p.new_k + place.sequence * p.new_k_batch + head_kv * p.new_k_head;
    const element_t* const new_v = p.new_v + place.sequence * p.new_v_batch + head_kv * p.new_v_head;
    for (i32 i = thread.index(); i < kConfig.rows * pairs; i += threads) {
      const i32 row = first_row + i / pairs;
      if (row >= end) break;
      rotary.copy(k_rows.at(row, 0), new_k + row * p.new_k_row, i % pairs, kConfig.head_dim, position + row, k_scales.at(row));
    }
    for (i32 i = thread.index(); i < kConfig.rows * kConfig.head_dim_v; i += threads) {
      const i32 row = first_row + i / kConfig.head_dim_v, column = i % kConfig.head_dim_v;
      if (row >= end) break;
      const element_t value = new_v[row * p.new_v_row + column];
      put(*v_rows.at(row, column), value, v_scales.at(row));
    }
  }
}
