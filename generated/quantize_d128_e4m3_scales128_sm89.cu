// quantize_d128_e4m3_scales128_sm89: FlashAttention-2, before a forward pass: 16-bit queries, keys and values
// to e4m3, with a scale for each block of rows.
//
// spec     {"head_dim":128,"head_dim_v":128,"dtype":"e4m3","mask":"full","direction":"forward","deterministic":false,"out_dtype":"bf16","scale_block":128}
// rebuild  flashgen build --head-dim 128 --dtype e4m3 --forward-only --out-dtype bf16 --scale-block 128 --arch sm_89
// for      sm_89 (L4, L40, RTX 40)
// plan     warps 8, 256 threads, registers for 2 blocks per multiprocessor
// grid     one block for every 128 rows of every head of queries, keys and values, and batch entry
// smem     49216 bytes
//
// contents  21  Instructions, one per function: types, device, copy, math.
//          143  Element types.
//          193  Instructions, one per function: eight_bits.
//          216  Streaming tiles between global and shared memory.
//          276  16-bit rows of a head to e4m3.
//          600  The kernel: its configuration, parameters and text.

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

// ---- flashgen/ptx/copy.cuh
// Moving data: asynchronous global-to-shared copies and reductions to global memory.

// Copies the first `valid_bytes` of 16 (8, 4) bytes and zeroes the rest. Copies of 16 bytes bypass L1.
FLASHGEN_DEVICE void cp_async_16(u32 destination, const void* source, u32 valid_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

FLASHGEN_DEVICE void cp_async_8(u32 destination, const void* source, u32 valid_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

FLASHGEN_DEVICE void cp_async_4(u32 destination, const void* source, u32 valid_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

FLASHGEN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` groups are in flight.
template <int pending>
FLASHGEN_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// ---- flashgen/ptx/math.cuh
// Scalar arithmetic, one instruction each.

// The larger of two. If one is NaN, the result is the other.
FLASHGEN_DEVICE float maximum(float a, float b) {
  float c;
  asm("max.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
// The larger of a and |b|, or NaN if one of them is NaN (sm_80 and later).
FLASHGEN_DEVICE float maximum_magnitude(float a, float b) {
  float c;
  asm("{\n\t"
      ".reg .f32 magnitude;\n\t"
      "abs.f32 magnitude, %2;\n\t"
      "max.NaN.f32 %0, %1, magnitude;\n\t"
      "}"
      : "=f"(c)
      : "f"(a), "f"(b));
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
  // The same thread, in a way that the compiler cannot see through: addresses made from it inside a loop are
  // then computed there, instead of all being kept in registers from before the loop.
  FLASHGEN_DEVICE Thread recomputed() const { return {opaque(lane), opaque(warp)}; }
  FLASHGEN_DEVICE i32 index() const { return warp * kWarpSize + lane; }
  // The lane's accumulators in a block of 16 x 8 are in rows row() and + 8, and in columns column() and + 1.
  FLASHGEN_DEVICE i32 row() const { return lane / 4; }
};

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

FLASHGEN_DEVICE float to_float(bfloat16_t x) { return float_of(static_cast<u32>(x.bits) << 16); }
FLASHGEN_DEVICE float to_float(float x) { return x; }

}  // namespace flashgen

#if !defined(FLASHGEN_EMULATOR)
// ---- flashgen/ptx/eight_bits.cuh
// Bytes of words, and conversions of 8-bit floats.

namespace flashgen {

// Four numbers of a word, each the nearest to a float, of two as near the even one. What is too large becomes
// the largest number, and NaN stays NaN (sm_89 and later).
FLASHGEN_DEVICE u32 pack_four(e4m3_t, float a, float b, float c, float d) {
  u32 word;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t"
      "}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

}  // namespace flashgen
#endif

// ---- flashgen/stream.cuh
// Streaming tiles between global and shared memory.

namespace flashgen {

// `row_count` rows of `cols` elements in global memory, row r at source + r * stride.
template <class T>
struct GlobalRows {
  T* data;
  i64 stride;
  i32 row_count;

  FLASHGEN_DEVICE T* at(i32 row, i32 col) const { return data + row * stride + col; }
};

// One 16-byte chunk read with the widest accesses that its alignment allows; elements past `valid` are zero.
template <class T, i32 access_bytes>
FLASHGEN_DEVICE Vec16 read_chunk(const T* source, i32 valid) {
  constexpr i32 chunk_elements = kChunkBytes / static_cast<i32>(sizeof(T));
  Vec16 chunk = {{0, 0, 0, 0}};
  if constexpr (access_bytes == 16) {
    if (valid > 0) chunk = *reinterpret_cast<const Vec16*>(source);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) chunk.words[i] = bits_of(source[i]);
    }
  } else {
    constexpr i32 bits = 8 * static_cast<i32>(sizeof(T)), word_elements = 32 / bits;
#pragma unroll
    for (i32 i = 0; i < chunk_elements; ++i) {
      if (i < valid) {
        chunk.words[i / word_elements] |= static_cast<u32>(source[i].bits) << (bits * (i % word_elements));
      }
    }
  }
  return chunk;
}

// Asynchronous copy of one chunk, in pieces of access_bytes.
template <class T, i32 access_bytes>
FLASHGEN_DEVICE void copy_chunk_async(u32 destination, const T* source, i32 valid) {
  constexpr i32 pieces = kChunkBytes / access_bytes;
  constexpr i32 piece_elements = access_bytes / static_cast<i32>(sizeof(T));
#pragma unroll
  for (i32 i = 0; i < pieces; ++i) {
    const u32 bytes = i * piece_elements < valid ? access_bytes : 0;
    const T* from = source + (bytes != 0 ? i * piece_elements : 0);
    if constexpr (access_bytes == 16) cp_async_16(destination, from, bytes);
    if constexpr (access_bytes == 8) cp_async_8(destination + 8 * i, from, bytes);
    if constexpr (access_bytes == 4) cp_async_4(destination + 4 * i, from, bytes);
  }
}

// Marks the copies issued so far as one group, and waits until at most `pending` groups are under way.
template <bool async_copy>
FLASHGEN_DEVICE void commit_copies() { if constexpr (async_copy) cp_async_commit(); }
template <bool async_copy, i32 pending>
FLASHGEN_DEVICE void wait_for_copies() { if constexpr (async_copy) cp_async_wait<pending>(); }

// ---- flashgen/quantize.cuh
// 16-bit rows of a head to e4m3: rotated, divided by a scale for each block of rows, rounded.

struct QuantizeConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 block;
  i32 warps;
};

// A segment is this many neighboring elements of a block, in row order. Each thread has one.
constexpr i32 kSegment = 64;
constexpr float kLargestE4m3 = 448.0f;
// The least maximum that a block counts as having: 448 / maximum must be finite.
constexpr float kLeastMaximum = 0x1p-100f;

// How many elements of a head are rotated together: the largest power of two that divides it.
constexpr i32 rotated_together(i32 head_dim) { return head_dim & -head_dim; }

// 1 / sqrt(n) of a power of two.
constexpr float inverse_root(i32 n) {
  float root = 1.0f;
  for (; n >= 4; n /= 4) root *= 0.5f;
  return n == 2 ? root * 0x1.6a09e6p-1f : root;
}

// The signs that a rotation begins with, of eight neighboring columns: bit i is set where column i changes
// its sign. Without them a row of equal elements would become one outlier.
FLASHGEN_DEVICE u32 rotation_signs(i32 chunk) { return 0x9e3779b1u * static_cast<u32>(chunk + 1) >> 24; }

// The largest magnitude of n values, or NaN if one is NaN. Four independent chains hide the latency of a
// comparison.
template <i32 n, class Value>
FLASHGEN_DEVICE float largest_of(const Value& value) {
  float most[4] = {};
#pragma unroll
  for (i32 i = 0; i < n; ++i) most[i % 4] = maximum_magnitude(most[i % 4], value(i));
  return maximum_magnitude(maximum_magnitude(most[0], most[1]), maximum_magnitude(most[2], most[3]));
}

// The 16-byte chunks of a block of rows in global memory that a lane copies, one after another. Those of a
// warp's segments follow one another, and neighboring lanes copy neighboring ones.
template <class E, i32 head_dim>
struct LaneChunks {
  static constexpr i32 elements = kChunkBytes / static_cast<i32>(sizeof(E));
  static constexpr i32 row_chunks = head_dim / elements;
  static constexpr i32 count = kSegment / elements;

  E* at;
  i64 stride;
  i32 row;
  i32 chunk;

  FLASHGEN_DEVICE static LaneChunks of(GlobalRows<E> rows, Thread thread) {
    const u32 number = static_cast<u32>(thread.warp * count * kWarpSize + thread.lane);
    const i32 row = static_cast<i32>(number / row_chunks), chunk = static_cast<i32>(number % row_chunks);
    return {rows.at(row, chunk * elements), rows.stride, row, chunk};
  }
  FLASHGEN_DEVICE void next() {
    constexpr i32 rows = kWarpSize / row_chunks, more = kWarpSize % row_chunks;
    row += rows;
    at += rows * stride + more * elements;
    if constexpr (more != 0) {
      chunk += more;
      if (chunk >= row_chunks) {
        row += 1;
        chunk -= row_chunks;
        at += stride - head_dim;
      }
    }
  }
};

// The chunks of a warp's segments in shared memory, of elements of E. `parts` neighboring segments form a
// group, and eight neighboring lanes have parts of different groups. Swizzled: the lowest three bits of a
// chunk's number are XORed with the number of its group, so that lanes that read the same chunk of their
// groups use different banks.
template <class E, i32 parts>
struct WarpChunks {
  static constexpr i32 each = kSegment / (kChunkBytes / static_cast<i32>(sizeof(E)));
  static constexpr i32 group = parts * each;
  static constexpr i32 span = larger(group, 8);
  static constexpr i32 bytes = kWarpSize * each * kChunkBytes;

  u8* data;

  // The i-th that a lane copies: chunk i * 32 + lane, of group lane / span ^ i * 32 / span. Written so,
  // because with the sum of both the machine code is 7 % longer.
  FLASHGEN_DEVICE Vec16& copied(i32 i, i32 lane) const {
    return at(i * kWarpSize + (lane ^ ((lane / span ^ i * kWarpSize / span) & 7)));
  }
  // A chunk of the group that a lane has a part of.
  FLASHGEN_DEVICE Vec16& of_group(i32 i, i32 lane) const {
    const i32 first = lane % (kWarpSize / parts) * group;
    return at((first ^ (first / span & 7)) ^ i);
  }

 private:
  FLASHGEN_DEVICE Vec16& at(i32 i) const { return *reinterpret_cast<Vec16*>(data + i * kChunkBytes); }
};

// A thread's segment of a block. `group` elements are rotated together, which may be those of several lanes'
// segments; 1 if none are.
template <class T, i32 head_dim, i32 block, i32 group>
struct Segment {
  using Rows = LaneChunks<const T, head_dim>;
  using Codes = LaneChunks<e4m3_t, head_dim>;
  static_assert(head_dim % 16 == 0, "rows of codes are whole 16-byte chunks");
  // Lanes with parts of the same group are this far apart.
  static constexpr i32 parts = larger(group / kSegment, 1);
  static constexpr i32 lanes_apart = kWarpSize / parts;
  using Incoming = WarpChunks<T, parts>;
  using Outgoing = WarpChunks<e4m3_t, parts>;
  // Lanes exchange runs of this many elements. Part p begins with segment p of its group, its runs in the
  // order p, p ^ 1 ..., and ends with run p of each segment. For four parts, in the order of registers:
  //
  //     part 0   s0.r0 s0.r1 s0.r2 s0.r3   becomes   s0.r0 s1.r0 s2.r0 s3.r0
  //     part 1   s1.r1 s1.r0 s1.r3 s1.r2             s1.r1 s0.r1 s3.r1 s2.r1
  static constexpr i32 run = kSegment / parts;

  float x[kSegment];

  // Starts copying a warp's rows to shared memory. Rows beyond the last become zeros.
  FLASHGEN_DEVICE static void fetch(Incoming to, GlobalRows<const T> rows, bool is_aligned, Thread thread) {
    const i32 count = smaller(block, rows.row_count);
    Rows from = Rows::of(rows, thread);
    if (is_aligned) {
#pragma unroll
      for (i32 i = 0; i < Rows::count; ++i, from.next()) {
        copy_chunk_async<T, kChunkBytes>(shared_address(&to.copied(i, thread.lane)), from.at,
                                         from.row < count ? Rows::elements : 0);
      }
      commit_copies<true>();
    } else {
#pragma unroll 1
      for (i32 i = 0; i < Rows::count; ++i, from.next()) {
        to.copied(i, thread.lane) = read_chunk<T, sizeof(T)>(from.at, from.row < count ? Rows::elements : 0);
      }
    }
  }

  // Reads the segment. Afterwards its shared memory may be overwritten.
  FLASHGEN_DEVICE void read(Incoming from, Thread thread) {
    constexpr i32 run_chunks = run / Rows::elements;
    const i32 part = thread.lane / lanes_apart;
    Vec16 chunks[Rows::count];
#pragma unroll
    for (i32 j = 0; j < Rows::count; ++j) {
      chunks[j] = from.of_group((part * Rows::count ^ part * run_chunks) ^ j, thread.lane);
    }
    warp_sync();
    const i32 first = (thread.warp * kWarpSize + thread.lane % lanes_apart * parts + part) * Rows::count;
#pragma unroll
    for (i32 j = 0; j < Rows::count; ++j) {
      // The bits of an even column and of the next one, 16 places apart.
      u32 signs = 0;
      if constexpr (group > 1) {
        signs =
            rotation_signs(static_cast<u32>((first ^ part * run_chunks) ^ j) % Rows::row_chunks) * 0x8001u;
      }
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const u32 pair = chunks[j].words[i] ^ (signs << (15 - 2 * i) & 0x80008000u);
        x[j * Rows::elements + 2 * i] = to_float(T{static_cast<u16>(pair)});
        x[j * Rows::elements + 2 * i + 1] = to_float(T{static_cast<u16>(pair >> 16)});
      }
    }
  }

  // The Hadamard transform of each group, without its factor 1 / sqrt(group). Step by step, elements 1, 2, 4
  // ... apart become their sum and difference. For the widest steps the elements are in different lanes: of
  // each pair of runs, a lane keeps one and sends the other. The steps before leave the run to keep in the
  // same registers of every lane.
  FLASHGEN_DEVICE void rotate(Thread thread) {
    const i32 part = thread.lane / lanes_apart;
    const auto each_pair = [&](i32 apart, const auto& combine) {
#pragma unroll
      for (i32 i = 0; i < kSegment; ++i) {
        if ((i & apart) == 0) combine(x[i], x[i + apart]);
      }
    };
#pragma unroll
    for (i32 apart = 1; apart < smaller(group, run); apart *= 2) {
      each_pair(apart, [](float& a, float& b) {
        const float sum = a + b;
        b = a - b;
        a = sum;
      });
    }
#pragma unroll
    for (i32 apart = run; apart < kSegment; apart *= 2) {
      const float sign = (part & apart / run) == 0 ? 1.0f : -1.0f;
      each_pair(apart, [&](float& kept, float& given) {
        const float other = kept;
        kept = fused_multiply_add(kept, sign, given);
        given = fused_multiply_add(given, -sign, other);
      });
    }
#pragma unroll
    for (i32 apart = run; apart < kSegment; apart *= 2) {
      const i32 lanes = apart / run * lanes_apart;
      const float sign = (part & apart / run) == 0 ? 1.0f : -1.0f;
      each_pair(apart, [&](float& kept, float& given) {
        const float taken = shuffle_xor(given, lanes);
        given = fused_multiply_add(taken, -sign, kept * sign);
        kept += taken;
      });
    }
  }

  // The largest magnitude; infinity or NaN if an element is not finite.
  FLASHGEN_DEVICE float largest() const { return largest_of<kSegment>([&](i32 i) { return x[i]; }); }

  // The same of the finite elements alone.
  FLASHGEN_DEVICE float largest_finite() const {
    return largest_of<kSegment>([&](i32 i) { return x[i] - x[i] == 0.0f ? x[i] : 0.0f; });
  }

  // The codes of x times a factor, into shared memory. e4m3 has no infinity: it becomes NaN.
  template <bool all_finite>
  FLASHGEN_DEVICE void round(Outgoing to, float factor, Thread thread) const {
    constexpr i32 run_chunks = run / Codes::elements;
    const i32 part = thread.lane / lanes_apart;
    const auto number = [&](i32 i) {
      const float y = x[i] * factor;
      return all_finite ? y : y + (y - y);
    };
#pragma unroll
    for (i32 j = 0; j < Codes::count; ++j) {
      Vec16 chunk;
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 k = j * Codes::elements + 4 * i;
        chunk.words[i] = pack_four(e4m3_t{}, number(k), number(k + 1), number(k + 2), number(k + 3));
      }
      const i32 place = j % run_chunks + j / run_chunks * Codes::count;
      to.of_group(part * run_chunks ^ place, thread.lane) = chunk;
    }
  }

  // Stores a warp's codes. Rows beyond the last are left out.
  FLASHGEN_DEVICE static void store(Outgoing from, GlobalRows<e4m3_t> rows, Thread thread) {
    const i32 count = smaller(block, rows.row_count);
    Codes to = Codes::of(rows, thread);
#pragma unroll
    for (i32 i = 0; i < Codes::count; ++i, to.next()) {
      if (to.row < count) *reinterpret_cast<Vec16*>(to.at) = from.copied(i, thread.lane);
    }
  }
};

// The largest value of a block's threads, or NaN if there is one. Calls alternate between the halves of
// `scratch`, because a thread may still read the half of the call before.
template <i32 warps>
struct BlockMaximum {
  float* scratch;
  i32 half = 0;

  FLASHGEN_DEVICE float of(float value, Thread thread) {
#pragma unroll
    for (i32 apart = kWarpSize / 2; apart > 0; apart /= 2) {
      value = maximum_magnitude(value, shuffle_xor(value, apart));
    }
    float* const values = scratch + half * warps;
    half ^= 1;
    if (thread.lane == 0) values[thread.warp] = value;
    block_sync();
    return largest_of<warps>([&](i32 warp) { return values[warp]; });
  }
};

// Shared memory: for each warp its segments, their codes, and two floats.
struct Scratch {
  u8* rows;
  u8* codes;
  float* maxima;
};

// Quantizes up to `blocks` blocks of rows, one after another. `rows`, `codes` and `scales` begin with
// the first. A block's rows are on their way while the one before is computed.
template <QuantizeConfig config, i32 head_dim, bool rotates, class T>
FLASHGEN_DEVICE void quantize_rows(GlobalRows<const T> rows, GlobalRows<e4m3_t> codes, float* scales,
                                   i32 blocks, bool is_aligned, Scratch scratch, Thread thread) {
  constexpr i32 group = rotates ? rotated_together(head_dim) : 1;
  using Part = Segment<T, head_dim, config.block, group>;
  const typename Part::Incoming incoming{scratch.rows + thread.warp * Part::Incoming::bytes};
  const typename Part::Outgoing outgoing{scratch.codes + thread.warp * Part::Outgoing::bytes};
  BlockMaximum<config.warps> maximum_of{scratch.maxima};
  Part::fetch(incoming, rows, is_aligned, thread);
#pragma unroll 1
  for (i32 i = 0; i < blocks && codes.row_count > 0; ++i) {
    wait_for_copies<true, 0>();
    warp_sync();
    Part part;
    part.read(incoming, thread.recomputed());
    rows.data += config.block * rows.stride;
    rows.row_count -= config.block;
    if (i + 1 < blocks && rows.row_count > 0) {
      Part::fetch(incoming, rows, is_aligned, thread.recomputed());
    }

    if constexpr (group > 1) part.rotate(thread);
    float largest = maximum_of.of(part.largest(), thread);
    const bool all_finite = largest < kInfinity;
    if (!all_finite) largest = maximum_of.of(part.largest_finite(), thread);
    largest = maximum(largest, kLeastMaximum);
    const float factor = kLargestE4m3 / largest;
    if (all_finite) {
      part.template round<true>(outgoing, factor, thread.recomputed());
    } else {
      part.template round<false>(outgoing, factor, thread.recomputed());
    }
    if (thread.index() == 0) {
      scales[i] = largest * inverse_root(group) / kLargestE4m3;
    }
    warp_sync();
    Part::store(outgoing, codes, thread.recomputed());
    codes.data += config.block * codes.stride;
    codes.row_count -= config.block;
  }
}

}  // namespace flashgen

// ---- kernels/quantize.cu.j2
using namespace flashgen;

using element_t = bfloat16_t;

constexpr QuantizeConfig kConfig{
    .head_dim = 128,
    .head_dim_v = 128,
    .block = 128,  // rows that share a scale
    .warps = 8,
};

struct Params {
  const element_t* q;
  const element_t* k;
  const element_t* v;
  e4m3_t* q8;
  e4m3_t* k8;
  e4m3_t* v8;
  float* q_scale;  // what the codes of each block of rows are multiplied by
  float* k_scale;
  float* v_scale;
  i64 q_batch, q_row, q_head;  // strides are in elements
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 q8_batch, q8_row, q8_head;
  i64 k8_batch, k8_row, k8_head;
  i64 v8_batch, v8_row, v8_head;
  i64 q_scale_batch, q_scale_head;
  i64 k_scale_batch, k_scale_head;
  i64 v_scale_batch, v_scale_head;
  i32 heads_q, heads_kv;
  i32 len_q, len_kv;
  i32 rotates;     // 1: queries and keys are rotated
  i32 is_aligned;  // 1: all rows begin at multiples of 16 bytes
  i32 blocks;      // blocks of rows of each thread block; the grid is smaller in proportion
};
static_assert(sizeof(Params) == 296, "the launcher packs Params into 296 bytes");

namespace smem {
constexpr u32 kRows = 0;
constexpr u32 kCodes = 32768;
constexpr u32 kMaxima = 49152;  // two of each warp

}  // namespace smem

FLASHGEN_KERNEL(256, 2) quantize_d128_e4m3_scales128_sm89(FLASHGEN_GRID_CONSTANT Params p) {
  FLASHGEN_SHARED_MEMORY(shared);
  const Thread thread = Thread::current();
  // Blocks start in the order of x, then of y. Neighboring ones take the same rows of neighboring heads, which
  // lie side by side in memory; and values, which take less time, come in between.
  const i32 number = block_idx_y() * grid_dim_x() + block_idx_x(), heads = p.heads_q + 2 * p.heads_kv;
  const Place place{number / heads, number % heads, block_idx_z()};
  const i32 first_block = place.tile * p.blocks, first_row = first_block * kConfig.block;

  // Heads of queries come first, then those of keys, then those of values.
  const bool is_value = place.head >= p.heads_q + p.heads_kv;
  GlobalRows<const element_t> rows;
  GlobalRows<e4m3_t> codes;
  float* scale;
  if (place.head < p.heads_q) {
    const i32 head = place.head, row = first_row, count = p.len_q - first_row;
    if (count <= 0) return;
    rows = {p.q + place.sequence * p.q_batch + row * p.q_row + head * p.q_head, p.q_row, count};
    codes = {p.q8 + place.sequence * p.q8_batch + row * p.q8_row + head * p.q8_head, p.q8_row, count};
    scale = p.q_scale + place.sequence * p.q_scale_batch + head * p.q_scale_head + first_block;

  } else if (!is_value) {
    const i32 head = place.head - p.heads_q, row = first_row, count = p.len_kv - first_row;
    if (count <= 0) return;
    rows = {p.k + place.sequence * p.k_batch + row * p.k_row + head * p.k_head, p.k_row, count};
    codes = {p.k8 + place.sequence * p.k8_batch + row * p.k8_row + head * p.k8_head, p.k8_row, count};
    scale = p.k_scale + place.sequence * p.k_scale_batch + head * p.k_scale_head + first_block;

  } else {
    const i32 head = place.head - p.heads_q - p.heads_kv, row = first_row, count = p.len_kv - first_row;
    if (count <= 0) return;
    rows = {p.v + place.sequence * p.v_batch + row * p.v_row + head * p.v_head, p.v_row, count};
    codes = {p.v8 + place.sequence * p.v8_batch + row * p.v8_row + head * p.v8_head, p.v8_row, count};
    scale = p.v_scale + place.sequence * p.v_scale_batch + head * p.v_scale_head + first_block;
  }

  // Queries and keys are rotated alike, which does not change their products. Values are not rotated.
  const bool is_aligned = p.is_aligned != 0, rotates = p.rotates != 0 && !is_value;
  const Scratch scratch{shared + smem::kRows, shared + smem::kCodes,
                        reinterpret_cast<float*>(shared + smem::kMaxima)};
  if (rotates) {
    quantize_rows<kConfig, kConfig.head_dim, true>(rows, codes, scale, p.blocks, is_aligned, scratch, thread);
  } else {
    quantize_rows<kConfig, kConfig.head_dim, false>(rows, codes, scale, p.blocks, is_aligned, scratch, thread);
  }
}
