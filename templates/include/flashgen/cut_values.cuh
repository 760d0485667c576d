// Products with a tile of V that a mask cuts through and that may hold bad values (contain.cuh). A row of the
// output gets what its query attends to and nothing of what lies beside it, and V stays as it is.
//
// Rows are told apart by warps, 16 keys at a time: those that all of a warp's queries attend to are
// multiplied as they come, and of those that some attend to the bad values are left out; which results they
// should have reached is a product of its own.
#pragma once
#include "flashgen/contain.cuh"
#include "flashgen/issue_in_fours.cuh"

namespace flashgen {

// Keys that are multiplied at a time.
constexpr i32 kKeyGroup = 16;

// Of a tile of V the first groups of keys, and zeros for the others.
struct FirstGroups {
  MatrixDescriptor first, zeros;
  i32 count;

  template <class Tile>
  FLASHGEN_DEVICE MatrixDescriptor group(i32 step) const {
    return step < count ? first.advanced(Tile::along_rows(step)) : zeros;
  }
};

// The operand of a product all of whose rows are zero: eight of 16 bytes at `address`, again and again.
constexpr i32 kZeroBytes = 8 * kChunkBytes;
FLASHGEN_DEVICE MatrixDescriptor zero_descriptor(u32 address) {
  return matrix_descriptor(address, 0, 0, Swizzle::none);
}

// Which of a group's pairs are allowed, as the left operand of a product with marks.
struct AttendedPairs {
  // In bfloat16, whatever V is of. A sign bit, one place down, is 2.
  static constexpr float kHalfOfInfinity = 0x1p127f;
  static constexpr u32 kBoth = 0x7f007f00u;
  u32 left[4];

  template <class Mask>
  FLASHGEN_DEVICE static AttendedPairs of(const Mask& mask, i32 first_q, i32 first_key, Thread thread) {
    StripBlocks<kKeyGroup> allowed;
    for (float& pair : allowed[0][0]) pair = kHalfOfInfinity;
    for (float& pair : allowed[0][1]) pair = kHalfOfInfinity;
    mask_keys(allowed, 0.0f, mask, first_q, first_key, thread);
    AttendedPairs pairs;
#pragma unroll
    for (i32 i = 0; i < 4; ++i)
      pairs.left[i] = pack(bfloat16_t{}, allowed[0][i / 2][i % 2 * 2], allowed[0][i / 2][i % 2 * 2 + 1]);
    return pairs;
  }

  // Of all of a warp's pairs.
  FLASHGEN_DEVICE bool are_some() const { return warp_any((left[0] | left[1] | left[2] | left[3]) != 0); }
  FLASHGEN_DEVICE bool are_all() const { return !warp_any((left[0] & left[1] & left[2] & left[3]) != kBoth); }
};

// One group's probabilities, of which the number is known only now.
template <i32 groups>
FLASHGEN_DEVICE void take_group(u32 (&left)[4], const u32 (&probabilities)[groups][4], i32 group) {
#pragma unroll
  for (i32 g = 0; g < groups; ++g) {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) left[i] = g == 0 || g == group ? probabilities[g][i] : left[i];
  }
}

// Takes bad values out of an operand's columns 16 n to 16 n + 15, and makes NaN of those results that attend
// to them.
template <class T, i32 count>
FLASHGEN_DEVICE void take_out_of_operand(u32 (&words)[4], float (&out)[count], i32 n,
                                         const AttendedPairs& pairs) {
  u32 signs[4];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    signs[i] = signs_of_bad<T>(words[i]);
    // From the sign bit of each bad element to all of its bits.
    words[i] &= ~((signs[i] >> 15) * 0xffffu);
  }
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    // Infinity where a row attends to what is bad, and zero elsewhere.
    float reached[4] = {};
    mma_m16n8k16(bfloat16_t{}, reached, pairs.left, {signs[2 * half] >> 1, signs[2 * half + 1] >> 1});
    float (&block)[4] = blocks_of(out)[0][2 * n + half];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) block[i] = fused_multiply_add(reached[i], 0.0f, block[i]);
  }
}

// A group of keys as a right operand, of which so many times 16 columns are there at once: the first ones
// from the beginning, so that they come while it is found out what else is needed.
template <class Tile>
struct GroupOperand {
  static constexpr i32 at_once = Tile::cols / 16 % 4 == 0 ? 4 : 3;
  u32 chunk;
  u32 words[at_once][4];

  FLASHGEN_DEVICE GroupOperand(Tile values, i32 key, Thread thread) : chunk(values.first_chunk(key, thread)) {
    load(0);
  }
  FLASHGEN_DEVICE void load(i32 first) {
#pragma unroll
    for (i32 n = 0; n < at_once; ++n) ldmatrix_x4_trans(words[n], Tile::chunk_after(chunk, first + n));
  }
};

// Adds to a warp's rows of the output what a group of keys has; where not all pairs are allowed, without bad
// values.
template <class Tile>
FLASHGEN_DEVICE void multiply_group(Strip<Tile::cols>& out, const u32 (&left)[4], GroupOperand<Tile>& values,
                                    bool is_whole, const AttendedPairs& pairs) {
  using T = typename Tile::Element;
  constexpr i32 all = Tile::cols / 16, at_once = GroupOperand<Tile>::at_once;
  auto& words = values.words;
#pragma unroll
  for (i32 first = 0; first < all; first += at_once) {
    if (first > 0) values.load(first);
    if (!is_whole) {
      u32 signs = 0;
#pragma unroll
      for (i32 i = 0; i < 4 * at_once; ++i) signs |= signs_of_bad<T>(words[i / 4][i % 4]);
      if (warp_any(signs != 0)) {
#pragma unroll
        for (i32 n = 0; n < at_once; ++n) take_out_of_operand<T>(words[n], out, first + n, pairs);
      }
    }
#pragma unroll
    for (i32 n = 0; n < 2 * at_once; ++n) {
      const u32(&of_both)[4] = words[n / 2];
      mma_m16n8k16(T{}, blocks_of(out)[0][2 * first + n], left, {of_both[n % 2 * 2], of_both[n % 2 * 2 + 1]});
    }
  }
}

// Adds P V to a warp's 16 rows of the output, of queries from `first_q` on; of a tile of keys from
// `first_key` on the groups from `begin` on, the last one first.
template <class Tile, class Mask>
FLASHGEN_DEVICE void multiply_cut_values(Strip<Tile::cols>& out, const Rounded<Tile::rows>& probabilities,
                                         Tile values, i32 begin, const Mask& mask, i32 first_q, i32 first_key,
                                         Thread thread) {
  // A band says which groups there are; another mask is asked of each.
  constexpr bool is_band = requires { mask.full_key_tiles(0, 0, 0); };
  i32 end = Tile::rows / kKeyGroup;
  Range whole = {0, 0};
  if constexpr (is_band) {
    const i32 before = first_key / kKeyGroup;
    const Range some = mask.key_tiles(first_q, first_q + kWarpRows, kKeyGroup);
    whole = mask.full_key_tiles(first_q, first_q + kWarpRows, kKeyGroup);
    whole = {whole.begin - before, whole.end - before};
    begin = larger(begin, some.begin - before);
    end = smaller(end, some.end - before);
  }
#pragma unroll 1
  for (i32 group = end - 1; group >= begin; --group) {
    const i32 key = group * kKeyGroup;
    GroupOperand<Tile> operand(values, key, thread);
    bool is_whole = warp_any(whole.has(group));
    AttendedPairs pairs = {};
    if (!is_whole) {
      pairs = AttendedPairs::of(mask, first_q, first_key + key, thread);
      if (!pairs.are_some()) continue;
      is_whole = !is_band && pairs.are_all();
    }
    u32 left[4];
    take_group(left, probabilities, group);
    multiply_group<Tile>(out, left, operand, is_whole, pairs);
  }
}

// Whether a thread's share of a tile has bad values, from a group of keys on; every `kWarpgroupSize`-th chunk
// from `first` on is its share.
template <class Tile>
FLASHGEN_DEVICE bool has_bad_values(const u8* tile, i32 group, i32 first) {
  constexpr i32 row_chunks = kPanelBytes / kChunkBytes;
  u32 signs = 0;
#pragma unroll 1
  for (i32 panel = 0; panel < Tile::panels; ++panel) {
#pragma unroll 4
    for (i32 i = group * kKeyGroup * row_chunks + first; i < Tile::rows * row_chunks; i += kWarpgroupSize) {
      const Vec16 chunk =
          *reinterpret_cast<const Vec16*>(tile + panel * Tile::panel_stride + i * kChunkBytes);
#pragma unroll
      for (const u32 word : chunk.words) signs |= signs_of_bad<typename Tile::Element>(word);
    }
  }
  return signs != 0;
}

}  // namespace flashgen
