// Bad values (contain.cuh) of a tile of V that are taken out where they lie: each becomes minus zero, and
// what was minus zero becomes zero, so that the tile is finite and says itself where they were.
#pragma once
#include "flashgen/contain.cuh"
#include "flashgen/panel.cuh"
#include "flashgen/primitives_packed.cuh"
#include "flashgen/primitives_sm90.cuh"
#include "flashgen/strip.cuh"

namespace flashgen {

// The sign bits of those elements of a word that are minus zero.
FLASHGEN_DEVICE u32 signs_of_minus_zero(u32 word) {
  return word & ~((word & 0x7fff7fffu) + 0x7fff7fffu) & 0x80008000u;
}

// Marks the bad values in every `step`-th chunk of a tile, from `first` on. A bit for each 16 rows that have
// one.
template <class Tile>
FLASHGEN_DEVICE u32 mark_bad_values(u8* tile, i32 first, i32 step) {
  using T = typename Tile::Element;
  constexpr i32 chunks = Tile::bytes / kChunkBytes, row_chunks = kPanelBytes / kChunkBytes;
  constexpr u32 magnitudes = ~kSigns<T>;
  // So many are on their way at once, as the whole block waits for the last one.
  constexpr i32 at_once = 4;
  u32 found = 0;
#pragma unroll 1
  for (i32 i = first; i < chunks; i += at_once * step) {
    Vec16 read[at_once] = {};
#pragma unroll
    for (i32 n = 0; n < at_once; ++n) {
      if (n == 0 || i + n * step < chunks)
        read[n] = *reinterpret_cast<const Vec16*>(tile + (i + n * step) * kChunkBytes);
    }
    // There is hardly ever anything to change. It shows in the largest magnitude, of which this is what it
    // lacks of all bits, and in the lowest of the words' halves as whole numbers, which minus zero is.
    u32 room = magnitudes, lowest = 0;
#pragma unroll
    for (const Vec16& chunk : read) {
#pragma unroll
      for (const u32 word : chunk.words) {
        room = minimum_packed(room, ~word & magnitudes);
        lowest = minimum_packed(lowest, word);
      }
    }
    if ((signs_of_bad<T>(~room) | signs_of_minus_zero(lowest)) == 0) continue;
#pragma unroll
    for (i32 n = 0; n < at_once; ++n) {
      u32 bad = 0;
#pragma unroll
      for (u32& word : read[n].words) {
        const u32 signs = signs_of_bad<T>(word);
        bad |= signs;
        // From the sign bit of each bad element to all of its bits.
        word = (word & ~((signs >> 15) * 0xffffu | signs_of_minus_zero(word))) | signs;
      }
      const i32 at = i + n * step;
      if (n == 0 || at < chunks) *reinterpret_cast<Vec16*>(tile + at * kChunkBytes) = read[n];
      if (bad != 0) found |= 1u << (at / row_chunks % Tile::rows / 16);
    }
    fence_proxy_async_shared();
  }
  return found;
}

// Puts NaN into those of a warp's 16 rows of results, of queries from `first_q` on, that attend to a bad
// value of a tile of keys from `first_key` on, which has some in these `groups` of 16. Which those rows are
// is a product, too: infinity where a row attends to what is marked, and zero elsewhere.
template <class Tile, class Mask>
FLASHGEN_DEVICE void spread_bad_values(Strip<Tile::cols>& results, Tile values, u32 groups, const Mask& mask,
                                       i32 first_q, i32 first_key, Thread thread) {
  // In bfloat16, whatever V is of. A sign bit, one place down, is 2.
  constexpr float half_of_infinity = 0x1p127f;
#pragma unroll 1
  for (; groups != 0; groups &= groups - 1) {
    const i32 key = 16 * lowest_bit(groups);
    StripBlocks<16> attends;
    for (float& pair : attends[0][0]) pair = half_of_infinity;
    for (float& pair : attends[0][1]) pair = half_of_infinity;
    mask_keys(attends, 0.0f, mask, first_q, first_key + key, thread);
    u32 left[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i)
      left[i] = pack(bfloat16_t{}, attends[0][i / 2][i % 2 * 2], attends[0][i / 2][i % 2 * 2 + 1]);
    if (!warp_any((left[0] | left[1] | left[2] | left[3]) != 0)) continue;
    const u32 chunk = values.first_chunk(key, thread);
    // A number as long as one of the results is.
    float some[2] = {not_a_number<float>(), not_a_number<float>()};
#pragma unroll
    for (i32 n = 0; n < Tile::cols / 16; ++n) {
      // Few marks are on their way at once, as results take the registers.
      if (n % (Tile::cols > 192 ? 2 : 4) == 0) warp_sync();
      u32 words[4];
      ldmatrix_x4_trans(words, Tile::chunk_after(chunk, n));
#pragma unroll
      for (u32& word : words) word = signs_of_minus_zero(word) >> 1;
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        float found[4] = {};
        mma_m16n8k16(bfloat16_t{}, found, left, {words[2 * half], words[2 * half + 1]});
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
          float& result = results[4 * (2 * n + half) + i];
          result = fused_multiply_add(found[i], 0.0f, result);
          some[i % 2] = maximum(some[i % 2], result);
        }
      }
    }
    // Where all is bad no more is to be found.
    if (!warp_any(some[0] == some[0] || some[1] == some[1])) break;
  }
}

}  // namespace flashgen
