// Sifting tiles of V that a mask cuts through and that may hold bad values (contain.cuh). Warps that have
// nothing else to do put zeros in the place of these, so that products with the tile spread nothing, and note
// them down as bits. A product of these with the bits of allowed pairs says which results they should have
// reached.
#pragma once
#include "flashgen/band.cuh"
#include "flashgen/contain.cuh"
#include "flashgen/panel.cuh"
#include "flashgen/primitives_packed.cuh"
#include "flashgen/ring.cuh"

namespace flashgen {

template <bool in_words>
struct BitsOfLane {
  using Word = u16;
};
template <>
struct BitsOfLane<true> {
  using Word = u32;
};

// Which values of a tile are bad. Four lanes share a column as they share a row of scores: for lane t of them
// bit 2n + c is key 8n + 2t + c, as in bits_from.
template <i32 rows, i32 cols>
struct BadBits {
  // What is beyond sixteen bits of a lane: nothing, four that lie behind all others, or half of a word.
  static constexpr bool in_words = rows > 80;
  static constexpr bool has_more = rows > 64 && !in_words;
  static_assert(rows <= 128, "a lane has a word for its keys of a column");
  using Word = typename BitsOfLane<in_words>::Word;
  static constexpr i32 first_bytes = 4 * cols * static_cast<i32>(sizeof(Word));
  static constexpr i32 bytes = first_bytes + (has_more ? 4 * cols / 2 : 0);

  u8* base;

  // Which word is that of lane t for a column. Columns are exchanged, so that what four lanes read of eight
  // columns lies in different banks.
  FLASHGEN_DEVICE static u32 place(i32 t, i32 column) {
    return static_cast<u32>(t * cols + (column ^ 8 * t));
  }
  // For a column that is eight times n further on than one of the first eight.
  static constexpr u32 place_after(u32 first, i32 n) {
    return (first ^ static_cast<u32>(n % 4 * 8)) + static_cast<u32>(n / 4 * 32);
  }

  // Of two columns, the even one's in the lower halves: bits of the first 64 keys and of those beyond.
  FLASHGEN_DEVICE void write(i32 t, i32 column, u32 first, u32 others) const {
    const u32 at = place(t, column);
    if constexpr (in_words) {
      u32* const words = reinterpret_cast<u32*>(base) + at;
      words[0] = (first & 0xffffu) | others << 16;
      words[1] = first >> 16 | (others & 0xffff0000u);
    } else {
      *reinterpret_cast<u32*>(base + 2 * at) = first;
      if constexpr (has_more)
        base[first_bytes + at / 2] = static_cast<u8>((others & 0xfu) | (others >> 12 & 0xf0u));
    }
  }
  FLASHGEN_DEVICE u32 read(u32 at) const {
    const u32 bits = reinterpret_cast<const Word*>(base)[at];
    if constexpr (has_more) {
      // Those of eight columns are a word; the lane's come to its end.
      const u32 of_eight = reinterpret_cast<const u32*>(base + first_bytes)[at / 8];
      return bits | (of_eight << (28 - at % 8 * 4) & 0xf0000000u);
    } else {
      return bits;
    }
  }
  // Bits of rows in the order in which those of columns are read.
  FLASHGEN_DEVICE static u32 as_read(u32 bits) {
    return has_more ? (bits & 0xffffu) | bits >> 16 << 28 : bits;
  }
};

// Makes NaN of those of a warp's results that attend to a bad value; the `allowed` pairs are bits of its two
// rows.
template <i32 rows, i32 cols>
FLASHGEN_DEVICE void mark_reached(Strip<cols>& out, BadBits<rows, cols> bad, const u32 (&allowed)[2],
                                  Thread thread) {
  const u32 pairs[2] = {bad.as_read(allowed[0]), bad.as_read(allowed[1])};
  const u32 first = bad.place(thread.lane % 4, thread.lane / 4);
#pragma unroll
  for (i32 n = 0; n < cols / 8; ++n) {
    // As floats, what is counted from the largest number on is infinity or NaN beyond it, and these times
    // zero are NaN. The zero has a sign, so that it changes no bit of other results.
    constexpr i32 largest = 0x7f7fffff;
    i32 common[4] = {largest, largest, largest, largest};
    mma_m16n8k128_bits(common, pairs, bad.read(bad.place_after(first, n)));
    float (&results)[4] = blocks_of(out)[0][n];
#pragma unroll
    for (i32 i = 0; i < 4; ++i)
      results[i] = fused_multiply_add(float_of(static_cast<u32>(common[i])), -0.0f, results[i]);
  }
}

// Takes bad values out of a lane's two columns of two rows of every eight, from the eight `begin` on,
// `at_once` of them together as far as there are registers. Bit i % 16 of bits[i / 16] is the i-th row's,
// sixteen further up that of the second column.
template <class T, i32 eights, i32 at_once, i32 begin = 0>
FLASHGEN_DEVICE void take_out(u32 (&bits)[2], u8* even_row, u8* odd_row) {
  constexpr i32 end = smaller(begin + at_once, eights), first = 2 * begin, count = 2 * (end - begin);
  const auto word = [&](i32 i) {
    u8* const row = i % 2 == 0 ? even_row : odd_row;
    return reinterpret_cast<volatile u32*>(row + (begin + i / 2) * kSwizzleBytes);
  };
  u32 words[count], found[2] = {}, all[2] = {};
#pragma unroll
  for (i32 i = 0; i < count; ++i) words[i] = *word(i);
#pragma unroll
  for (i32 i = 0; i < count; ++i) {
    const u32 both = 0x10001u << (first + i) % 16;
    found[(first + i) / 16] |= not_finite_packed(T{}, words[i]) & both;
    all[(first + i) / 16] |= both;
  }
  if (!warp_any(found[0] != all[0] || found[1] != all[1])) {
#pragma unroll
    for (i32 i = 0; i < count; ++i) *word(i) = 0;
  } else if (warp_any((found[0] | found[1]) != 0)) {
    // Read once more, as there are not the registers to keep all.
#pragma unroll
    for (i32 i = 0; i < count; ++i) words[i] = *word(i);
#pragma unroll
    for (i32 i = 0; i < count; ++i) *word(i) = words[i] & ~not_finite_packed(T{}, words[i]);
  }
  bits[0] |= found[0];
  bits[1] |= found[1];
  if constexpr (end < eights) take_out<T, eights, at_once, end>(bits, even_row, odd_row);
}

// What those who sift, who have tiles brought and who use them share. `stages` are the slots for tiles. All
// who have read or written something say so themselves, and not one lane for its warp: so tools can follow
// it.
template <class Tile, i32 stages>
struct Sifting {
  // The warps beside the one that has tiles brought.
  static constexpr i32 kFirstWarp = 1;
  static constexpr i32 kWarps = 3;
  // Behind the last tile.
  static constexpr i32 kNoSlot = 255;
  using Where = RingPlace<stages>;
  using Bits = BadBits<Tile::rows, Tile::cols>;

  // Of one tile; until all who use it have marked what it should have reached.
  alignas(64) u8 bits[Bits::bytes];
  // The copy engine has brought a tile that is to be sifted, ...
  alignas(8) u64 brought[stages];
  // ... it has been, and is where it was for who has tiles brought, ...
  u64 handed_on[stages];
  // ... and for who uses it; ...
  u64 sifted;
  // ... and all have marked their results.
  u64 marked;
  // How many have been sent; the one thread that sends them has no registers for it.
  u32 sent;
  // Whether each warp has found some bad value.
  alignas(4) u8 found[4];
  // The slot that each lies in.
  u8 slots[stages];

  // By the thread that sends tiles.
  FLASHGEN_DEVICE void init(u32 markers) {
    for (i32 i = 0; i < stages; ++i) {
      mbarrier_init(shared_address(&brought[i]), 1);
      mbarrier_init(shared_address(&handed_on[i]), kWarps * kWarpSize);
    }
    mbarrier_init(shared_address(&sifted), kWarps * kWarpSize);
    mbarrier_init(shared_address(&marked), markers);
    sent = 0;
    found[kWarps] = 0;
  }

  // ---- For the one thread that has tiles brought: the barrier that is to count the bytes of one.
  FLASHGEN_DEVICE u32 send(i32 slot) {
    const u32 place = sent % stages;
    mbarrier_wait(shared_address(&handed_on[place]), sent / stages % 2 ^ 1);
    slots[place] = static_cast<u8>(slot);
    ++sent;
    return shared_address(&brought[place]);
  }
  // Until all are sifted that have been sent so far.
  FLASHGEN_DEVICE void wait_sifted() const {
    if (sent > 0) mbarrier_wait(shared_address(&handed_on[(sent - 1) % stages]), (sent - 1) / stages % 2);
  }

  // ---- For those who sift: the slot of the next tile, once it is there and the bits of the one before are
  // not needed any more.
  FLASHGEN_DEVICE i32 receive(Where at) const {
    mbarrier_wait(shared_address(&brought[at.slot()]), at.parity());
    mbarrier_wait(shared_address(&marked), at.count % 2 ^ 1);
    return slots[at.slot()];
  }
  // Each takes every third part of a tile, which is two rows of every eight of a panel, and of which each
  // lane has two columns.
  FLASHGEN_DEVICE void sift(u8* tile, Thread self) {
    using T = typename Tile::Element;
    // Beside three consumers, whose tiles have one panel, there are the fewest registers.
    constexpr i32 eights = Tile::rows / 8, most = Tile::panels == 1 ? 4 : 8;
    constexpr i32 at_once = ceil_div(eights, ceil_div(eights, most));
    const i32 warp = self.again().warp - kFirstWarp;
    u32 some = 0;
#pragma unroll 1
    for (i32 part = warp; part < 4 * Tile::panels; part += kWarps) {
      const Thread thread = self.again();
      const i32 row = 2 * (part % 4), chunk = thread.lane / 4;
      u8* const rows = tile + part / 4 * Tile::panel_stride + row * kPanelBytes + thread.lane % 4 * 4;
      u8* const even_row = rows + (chunk ^ row) * kChunkBytes;
      u8* const odd_row = rows + kPanelBytes + (chunk ^ (row + 1)) * kChunkBytes;
      u32 bad[2] = {};
      take_out<T, eights, at_once>(bad, even_row, odd_row);
      const i32 column = part / 4 * Tile::panel_cols + 2 * thread.lane;
      if (column < Tile::cols) Bits{bits}.write(part % 4, column, bad[0], bad[1]);
      some |= bad[0] | bad[1];
    }
    const bool is_some = warp_any(some != 0);
    if (self.lane == 0) found[warp] = is_some;
    // The tensor cores read the tile by another way.
    fence_proxy_async_shared();
    mbarrier_arrive(shared_address(&sifted));
  }
  // One of them, which hands the tile on, waits for the others.
  FLASHGEN_DEVICE void wait_for_all(Where at) const { mbarrier_wait(shared_address(&sifted), at.count % 2); }
  FLASHGEN_DEVICE void end_sifting(Where at) { mbarrier_arrive(shared_address(&handed_on[at.slot()])); }

  // ---- Of the tile that was sifted last, for one of those who did it and those who use it.
  FLASHGEN_DEVICE bool has_found() const { return *reinterpret_cast<const u32*>(found) != 0; }

  // ---- For those who use a tile, each lane by itself, when it is there.
  FLASHGEN_DEVICE void begin_marking() const {
    // How many there have been is known by those before: of this one nobody has ended its marks.
    const bool is_odd = mbarrier_test_wait(shared_address(&marked), 0);
    mbarrier_wait(shared_address(&sifted), is_odd);
  }
  // By each lane once, for tiles that do not concern it as well.
  FLASHGEN_DEVICE void end_marking() { mbarrier_arrive(shared_address(&marked)); }
};

}  // namespace flashgen
