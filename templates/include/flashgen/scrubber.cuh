// Scrubbing: the warps beside the producer, which are otherwise idle, clear non-finite values (contain.cuh)
// from tiles of V that a mask cuts through. Cleared values become zeros, so that products with the tile
// spread nothing, and their places are recorded as bits. A product of these bits with the bits of allowed
// pairs finds the results that the non-finite values should have reached.
#pragma once
#include "flashgen/band.cuh"
#include "flashgen/contain.cuh"
#include "flashgen/panel.cuh"
#include "flashgen/primitives_packed.cuh"
#include "flashgen/ring.cuh"

namespace flashgen {

// Which values of some rows of eight columns are not finite: bit i of words[w] is the i-th row's for column
// 2w, and sixteen further up for the next one.
struct RowBits {
  u32 words[4];

  FLASHGEN_DEVICE bool are_some() const { return (words[0] | words[1] | words[2] | words[3]) != 0; }
  FLASHGEN_DEVICE u16 of_column(i32 column) const {
    return static_cast<u16>(words[column / 2] >> column % 2 * 16);
  }
};

// Which values of a tile are not finite, as the lanes of a warp that multiplies with it read them: each has a
// row of bits, of its keys and of one column of every eight. Bit 2n + c of a column is key 8n + 2t + c for
// lane t of the four that share a row of scores, as in bits_from.
template <i32 rows, i32 cols>
struct NonFiniteBits {
  static_assert(rows % 16 == 0 && rows <= 128, "a lane has a word for its keys of a column");
  // Bytes of a lane per column: four, or two. 65 to 80 keys take four bits more, which are stored behind all
  // others: a word per lane and panel.
  static constexpr i32 own_bytes = rows > 80 ? 4 : 2;
  static constexpr bool has_more = rows > 64 && own_bytes == 2;
  static constexpr i32 eights = cols / 8;
  // 16-byte chunks of a lane's row of bits.
  static constexpr i32 chunks = ceil_div(eights * own_bytes, kChunkBytes);
  static constexpr i32 at_once = kChunkBytes / own_bytes;
  static constexpr i32 more_begin = kWarpSize * chunks * kChunkBytes;
  static constexpr i32 more_stride = 4 * kWarpSize;
  static constexpr i32 bytes = more_begin + (has_more ? ceil_div(eights, 8) * more_stride : 0);

  u8* base;

  // Chunks are swizzled, so that eight lanes read from different banks.
  static constexpr u32 place(u32 lane, u32 chunk) {
    constexpr u32 exchanged = smaller(chunks & -chunks, 8);
    return (lane * chunks + (chunk ^ lane / (8 / exchanged) % exchanged)) * kChunkBytes;
  }
  FLASHGEN_DEVICE Vec16 read(i32 lane, i32 chunk) const {
    return *reinterpret_cast<const Vec16*>(base + place(static_cast<u32>(lane), static_cast<u32>(chunk)));
  }
  FLASHGEN_DEVICE u32 read_more(i32 lane, i32 panel) const {
    if constexpr (!has_more) return 0;
    const u32 more = reinterpret_cast<const u32*>(base + more_begin + panel * more_stride)[lane];
    return static_cast<u32>(opaque(static_cast<i32>(more)));
  }
  // Eight bits from bit 8 * `part` on, for lane t of each four, of the eight columns with this number. The
  // last ones have zeros beside them, if there is room for others.
  FLASHGEN_DEVICE void write(u32 t, u32 eight, u32 part, const RowBits& non_finite) const {
    constexpr u32 parts = ceil_div(rows, 32);
    const u32 chunk = eight * own_bytes / kChunkBytes;
    u8* const own = base + eight * own_bytes % kChunkBytes + part;
    // Every eight lanes have the same swizzle.
    u8* const columns[2] = {own + place(t, chunk), own + place(t + 4, chunk)};
#pragma unroll
    for (i32 g = 0; g < 8; ++g) {
      u8* const at = columns[g % 2] + place(static_cast<u32>(g / 2 * 8), 0);
      if (parts < own_bytes && part + 1 == parts) {
        *reinterpret_cast<u16*>(at) = non_finite.of_column(g);
      } else {
        *at = static_cast<u8>(non_finite.of_column(g));
      }
    }
  }
  // The four that are more, and further up those of the next eight columns.
  FLASHGEN_DEVICE void write_more(u32 t, u32 eight, const RowBits& non_finite) const {
    u8* const own = base + more_begin + eight / 8 * more_stride + 4 * t + eight % 8 / 2;
#pragma unroll
    for (i32 g = 0; g < 8; ++g) own[16 * g] = static_cast<u8>(non_finite.of_column(g));
  }
};

// Makes NaN of those of a warp's results that attend to a non-finite value; the `allowed` pairs are bits of
// its two rows.
template <i32 rows, i32 cols>
FLASHGEN_DEVICE void mark_reached(Strip<cols>& out, NonFiniteBits<rows, cols> non_finite,
                                  const u32 (&allowed)[2], Thread thread) {
  using Bits = NonFiniteBits<rows, cols>;
  // With halves of words, those of the upper ones, too. Bits of other columns that are there besides meet
  // pairs that are not.
  u32 pairs[2][2];
#pragma unroll
  for (i32 h = 0; h < 2; ++h) {
    pairs[0][h] = allowed[h] & ~0u >> (32 - rows / 4);
    pairs[1][h] = pairs[0][h] << 16 | pairs[0][h] >> 16 << 4;
  }
#pragma unroll
  for (i32 c = 0; c < Bits::chunks; ++c) {
    const Vec16 chunk = non_finite.read(thread.lane, c);
    // opaque() keeps one 16-byte load. The compiler would split it.
    const auto word = [&](i32 w) { return static_cast<u32>(opaque(static_cast<i32>(chunk.words[w]))); };
    const u32 words[4] = {word(0), word(1), word(2), word(3)};
    const u32 more = non_finite.read_more(thread.lane, c);
#pragma unroll
    for (i32 i = 0; i < smaller(Bits::at_once, Bits::eights - c * Bits::at_once); ++i) {
      constexpr i32 in_word = 4 / Bits::own_bytes;
      u32 bits = words[i / in_word];
      if constexpr (Bits::has_more) {
        // Beside a lower half, those of two columns where the upper one lies, and the other way round.
        const i32 lower = 8 * (i / 2), upper = lower - 16;
        bits = i % 2 == 0 ? (bits & 0xffffu) | ((upper < 0 ? more << -upper : more >> upper) & 0xffff0000u)
                          : (bits & 0xffff0000u) | (more >> lower & 0xffffu);
      }
      // The count starts at the bits of the largest float. Any increment makes infinity or NaN, and these
      // times zero are NaN. The zero is negative, so adding it changes no bit of other results.
      constexpr i32 largest = 0x7f7fffff;
      i32 common[4] = {largest, largest, largest, largest};
      mma_m16n8k128_bits(common, pairs[i % in_word], bits);
      float (&results)[4] = blocks_of(out)[0][c * Bits::at_once + i];
#pragma unroll
      for (i32 e = 0; e < 4; ++e)
        results[e] = fused_multiply_add(float_of(static_cast<u32>(common[e])), -0.0f, results[e]);
    }
  }
}

// The shared state of the producer, the scrubbing warps and the consumers. `stages` is the number of slots
// for tiles. Every lane that reads or writes shared memory arrives itself, rather than one lane for its warp,
// so that race detectors can follow the order.
//
// What is found in a tile is kept until all consumers have marked the results that it should have reached.
// There is one record (`non_finite_records`) for each slot, or one that all tiles use in turn.
template <class Tile, i32 stages, i32 non_finite_records>
struct Scrubber {
  static_assert(non_finite_records == 1 || non_finite_records == stages,
                "one record for each slot, or one for all");
  // The warps beside the producer.
  static constexpr i32 kFirstWarp = 1;
  static constexpr i32 kWarps = 3;
  // Behind the last tile.
  static constexpr i32 kNoSlot = 255;
  using Where = RingPlace<stages>;
  using Bits = NonFiniteBits<Tile::rows, Tile::cols>;

  alignas(16) u8 bits[non_finite_records][Bits::bytes];
  // TMA has written a tile to scrub, ...
  alignas(8) u64 brought[stages];
  // ... it has been scrubbed, which the producer waits for, ...
  u64 handed_on[stages];
  // ... and which consumers wait for; ...
  u64 scrubbed[non_finite_records];
  // ... and all consumers have marked their results.
  u64 marked[non_finite_records];
  // How many tiles have been sent. The thread that sends them has no register for it.
  u32 sent;
  // Whether each scrubbing warp has found a non-finite value in the tile.
  alignas(4) u8 found[non_finite_records][4];
  // The slot of each tile.
  u8 slots[stages];

  // Called by one thread.
  FLASHGEN_DEVICE void init(u32 markers) {
    for (i32 i = 0; i < stages; ++i) {
      mbarrier_init(shared_address(&brought[i]), 1);
      mbarrier_init(shared_address(&handed_on[i]), kWarps * kWarpSize);
    }
    for (i32 i = 0; i < non_finite_records; ++i) {
      mbarrier_init(shared_address(&scrubbed[i]), kWarps * kWarpSize);
      mbarrier_init(shared_address(&marked[i]), markers);
      found[i][kWarps] = 0;
    }
    sent = 0;
  }

  // ---- For the producer's thread: returns the barrier that counts the bytes of a tile.
  FLASHGEN_DEVICE u32 send(i32 slot) {
    const u32 place = sent % stages;
    mbarrier_wait(shared_address(&handed_on[place]), sent / stages % 2 ^ 1);
    slots[place] = static_cast<u8>(slot);
    ++sent;
    return shared_address(&brought[place]);
  }
  // Waits until all tiles sent so far are scrubbed.
  FLASHGEN_DEVICE void wait_scrubbed() const {
    if (sent > 0) mbarrier_wait(shared_address(&handed_on[(sent - 1) % stages]), (sent - 1) / stages % 2);
  }

  // ---- For the scrubbing warps: waits for the next tile, and returns its slot.
  FLASHGEN_DEVICE i32 receive(Where at) const {
    mbarrier_wait(shared_address(&brought[at.slot()]), at.parity());
    return slots[at.slot()];
  }
  // Whether an odd number of tiles have used this record. All scrubbing warps have recorded the last of them,
  // since its slot has been reused. None records this tile before all have asked.
  FLASHGEN_DEVICE bool is_odd(Where at, i32 slot) const {
    return non_finite_records == 1
               ? at.count % 2
               : mbarrier_test_wait(shared_address(&scrubbed[slot % non_finite_records]), 0);
  }
  // Each warp scrubs every third part of a tile, once the record's previous content is no longer needed.
  FLASHGEN_DEVICE void scrub(u8* tile, i32 slot, bool is_odd, Thread self) {
    const i32 record = slot % non_finite_records;
    mbarrier_wait(shared_address(&marked[record]), !is_odd);
    if (self.lane == 0) found[record][self.again().warp - kFirstWarp] = false;
    each_part(self, [&](auto part) {
      const Thread thread = self.again();
      const RowBits non_finite = scrub_part(part, tile, thread);
      if (warp_any(non_finite.are_some()) && thread.lane == 0) found[record][thread.warp - kFirstWarp] = true;
      write(part, non_finite, Bits{bits[record]}, thread);
    });
    // The tensor cores read the tile through the async proxy.
    fence_proxy_async_shared();
    mbarrier_arrive(shared_address(&scrubbed[record]));
  }
  // The warp that hands the tile on waits for the others.
  FLASHGEN_DEVICE void wait_for_all(i32 slot, bool is_odd) const {
    mbarrier_wait(shared_address(&scrubbed[slot % non_finite_records]), is_odd);
  }
  FLASHGEN_DEVICE void end_scrubbing(Where at) { mbarrier_arrive(shared_address(&handed_on[at.slot()])); }

  // ---- For one scrubbing warp and the consumers: what was found in the tile in a slot.
  FLASHGEN_DEVICE bool has_found(i32 slot) const {
    return *reinterpret_cast<const u32*>(found[slot % non_finite_records]) != 0;
  }
  FLASHGEN_DEVICE Bits record_of(i32 slot) { return {bits[slot % non_finite_records]}; }

  // ---- For every lane of the consumers, once the tile is full.
  FLASHGEN_DEVICE void begin_marking(i32 slot) const {
    // The phase of `marked` says how many tiles have used the record: nobody has ended marking this one yet.
    const bool is_odd = mbarrier_test_wait(shared_address(&marked[slot % non_finite_records]), 0);
    mbarrier_wait(shared_address(&scrubbed[slot % non_finite_records]), is_odd);
  }
  // Every lane calls this once for every tile, even one that its consumer skips.
  FLASHGEN_DEVICE void end_marking(i32 slot) {
    mbarrier_arrive(shared_address(&marked[slot % non_finite_records]));
  }

 private:
  using T = typename Tile::Element;

  // 32 rows of a panel, or those that are left.
  template <i32 eights_>
  struct Part {
    static constexpr i32 eights = eights_;
    i32 panel, number;
  };
  // A warp's parts: every third one.
  template <class Visit>
  FLASHGEN_DEVICE static void each_part(Thread self, const Visit& visit) {
    constexpr i32 whole = Tile::rows / 32, left = Tile::rows % 32 / 8;
    i32 i = self.again().warp - kFirstWarp;
#pragma unroll 1
    for (; i < whole * Tile::panels; i += kWarps) visit(Part<4>{i / whole, i % whole});
    if constexpr (left > 0) {
#pragma unroll 1
      for (; i < (whole + 1) * Tile::panels; i += kWarps) visit(Part<left>{i - whole * Tile::panels, whole});
    }
  }

  // Of every eight rows of a part each lane has a chunk of two, an even one and the next.
  struct Chunks {
    u8 *even, *odd;

    template <i32 eights>
    FLASHGEN_DEVICE static Chunks of(const Part<eights>& part, u8* tile, Thread thread) {
      // A number without a sign, as signs would cost instructions.
      const u32 lane = static_cast<u32>(thread.lane), row = lane / 8 * 2;
      // Where the swizzle puts the chunk of an even row, and the next one's beside it.
      const u32 place = lane % 8 ^ row;
      u8* const rows = tile + part.panel * Tile::panel_stride + 32 * part.number * kPanelBytes;
      u8* const even = rows + (row * kPanelBytes + place * kChunkBytes);
      return {even, even + kPanelBytes + (place % 2 == 0 ? kChunkBytes : -kChunkBytes)};
    }
    FLASHGEN_DEVICE Vec16& operator[](i32 i) const {
      return *reinterpret_cast<Vec16*>((i % 2 == 0 ? even : odd) + i / 2 * kSwizzleBytes);
    }
  };
  // Clears non-finite values to zeros of their sign, and returns which they were.
  template <i32 eights>
  FLASHGEN_DEVICE static RowBits scrub_part(const Part<eights>& part, u8* tile, Thread thread) {
    // Chunks loaded ahead. Beside three consumers, whose tiles have one panel, registers are scarcest.
    constexpr i32 ahead = Tile::panels == 1 ? 1 : 2, count = 2 * eights;
    const Chunks chunks = Chunks::of(part, tile, thread);
    RowBits non_finite = {};
    Vec16 read[ahead + 1];
#pragma unroll
    for (i32 i = 0; i < ahead; ++i) read[i] = chunks[i];
#pragma unroll
    for (i32 i = 0; i < count; ++i) {
      if (i + ahead < count) read[(i + ahead) % (ahead + 1)] = chunks[i + ahead];
      Vec16& own = read[i % (ahead + 1)];
#pragma unroll
      for (i32 w = 0; w < 4; ++w) {
        const u32 not_finite = not_finite_packed(T{}, own.words[w]);
        non_finite.words[w] |= not_finite & 0x10001u << i;
        own.words[w] &= ~not_finite;
      }
      chunks[i] = own;
    }
    return non_finite;
  }
  template <i32 eights>
  FLASHGEN_DEVICE static void write(const Part<eights>& part, RowBits non_finite, Bits bits, Thread thread) {
    const u32 lane = static_cast<u32>(thread.lane), t = lane / 8, chunk = lane % 8;
    const u32 eight = static_cast<u32>(8 * part.panel) + chunk;
    if (Bits::has_more && part.number == 2) {
      // The next lane's are those of the next eight columns.
#pragma unroll
      for (i32 w = 0; w < 4; ++w)
        non_finite.words[w] |= bits_of(shuffle_xor(float_of(non_finite.words[w]), 1)) << 4;
      if (chunk % 2 == 0) bits.write_more(t, eight, non_finite);
    } else if (eight < Bits::chunks * Bits::at_once) {
      bits.write(t, eight, static_cast<u32>(part.number), non_finite);
    }
  }
};

}  // namespace flashgen
