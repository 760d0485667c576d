// 16-bit rows of a head to e4m3: rotated, divided by a scale for each block of rows, rounded.
#pragma once
#include "flashgen/eight_bits.cuh"
#include "flashgen/stream.cuh"

namespace flashgen {

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
  FLASHGEN_DEVICE float largest() const {
    return largest_of<kSegment>([&](i32 i) { return x[i]; });
  }

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
