// Which tiles of queries may have been spoilt by values that some of their queries must not attend to.
//
// To look through V before it is used takes time, and there is hardly ever anything to find. But a bad value
// (contain.cuh) in a tile of keys shows in every row that is multiplied by it, whatever the probability: so V
// is used as it comes as long as results are finite, but in some kernels for a block's first tile of queries.
// Where results are not, or something bad is found in that first tile, the tiles of V that the mask cuts are
// sifted from then on (sifting.cuh), and behind the last tile of queries the block takes those since the
// first doubtful one once more. All other blocks are warned, and sift from their next tile on.
#pragma once
#include "flashgen/element.cuh"
#include "flashgen/primitives_sm90.cuh"

namespace flashgen {

// Whether all of one of a lane's two rows of a strip are finite.
template <i32 count>
FLASHGEN_DEVICE bool is_finite_row(const float (&strip)[count], i32 row) {
  float zero[2] = {};
#pragma unroll
  for (i32 i = 0; i < count; i += 4) {
    for (i32 j = 0; j < 2; ++j) zero[j] = fused_multiply_add(strip[i + 2 * row + j], 0.0f, zero[j]);
  }
  return zero[0] + zero[1] == 0.0f;
}

// Whether a lane's results show something bad in V, which is bad in all rows: one of two tells. But a row
// whose sum of exponentials is no number has no results that are, whatever V holds, and says nothing of it.
template <i32 count>
FLASHGEN_DEVICE bool shows_bad_values(const float (&strip)[count], const float (&sums)[2]) {
  // Without a branch, behind which the assembler would take lanes for divergent.
  const bool are_bad[2] = {!is_finite_row(strip, 0), !is_finite_row(strip, 1)};
  const bool is_number[2] = {sums[0] == sums[0], sums[1] == sums[1]};
  return (is_number[0] & are_bad[0]) | (!is_number[0] & is_number[1] & are_bad[1]);
}

// `slots` are those of the ring by which warps learn which tile of queries is next. The `judges` are the
// warps that compute, the last ones of a block.
template <i32 slots, i32 judges>
struct Doubts {
  // Another voice is that of warps which sift, who spoil no tile.
  static constexpr i32 kVoices = judges + 1;
  static_assert(kVoices <= kWarpSize, "a lane asks what each of them says");
  static constexpr i32 kFirstJudge = 4;
  // A warp doubts tile n before it reads of n + 2, and is heard when the next tile is told of, at the latest
  // when the slot of that one is filled again. So there are no more than 2 + slots tiles since the first
  // doubtful one, and one more has a place.
  static constexpr u32 kPlaces = 4 * slots;
  static constexpr u32 kNotYet = ~0u;
  // A number that no tile has.
  static constexpr i32 kNone = 0x7fffffff;

  // The only phase ends when a voice says that there are bad values, ...
  alignas(8) u64 doubted[kVoices];
  // ... and when all have no further tile to doubt.
  u64 settled;
  // The first tile that each judge doubts.
  i32 first[judges];
  // The last tiles whose values were used as they came, and how many there were in all.
  i32 tiles[kPlaces];
  u32 unseen;
  // Which of these is taken once more next; kNotYet before that is known.
  u32 next;

  // ---- To be called once each: by one thread, ...

  FLASHGEN_DEVICE void init_barriers() {
    for (i32 voice = 0; voice < kVoices; ++voice) mbarrier_init(shared_address(&doubted[voice]), 1);
    mbarrier_init(shared_address(&settled), judges * kWarpSize);
  }
  // ... and by the lanes of another warp.
  FLASHGEN_DEVICE void begin(Thread thread) {
    if (thread.lane < judges) first[thread.lane] = kNone;
    if (thread.lane == 0) {
      unseen = 0;
      next = kNotYet;
    }
  }

  // ---- For a warp that computes. It works addresses out when it needs them, as it has no registers to keep
  // them.

  // Gives true for one lane of one that has not doubted before: of tiles since the first one it says nothing
  // more.
  FLASHGEN_DEVICE bool doubt(i32 tile, Thread thread) {
    const i32 judge = opaque(thread.warp) - kFirstJudge;
    if (thread.lane != 0 || first[judge] != kNone) return false;
    first[judge] = tile;
    mbarrier_arrive(shared_address(&doubted[judge]));
    return true;
  }
  // Each lane by itself, as each has read what is written from then on.
  FLASHGEN_DEVICE void settle() { mbarrier_arrive(shared_address(&settled)); }

  // ---- For one thread of those who sift, once: there are bad values.
  FLASHGEN_DEVICE void warn() { mbarrier_arrive(shared_address(&doubted[judges])); }

  // ---- For the one thread that tells of tiles.

  // Which tile is told of next; and, once that is known, that its values are used as they come.
  FLASHGEN_DEVICE void note(i32 tile) { tiles[unseen % kPlaces] = tile; }
  FLASHGEN_DEVICE void is_unseen() { ++unseen; }
  // Whether all doubts are known that there will be, when so many tiles have been told of: all have read what
  // was in the last one's slot before, and were done with those two before that.
  FLASHGEN_DEVICE bool are_known(u32 told) const { return unseen + slots + 2 <= told; }
  // From now on doubtful tiles are drawn, the first one first.
  FLASHGEN_DEVICE void repeat() {
    i32 tile = kNone;
#pragma unroll 1
    for (i32 judge = 0; judge < judges; ++judge) tile = smaller(tile, first[judge]);
    next = static_cast<u32>(tile);
  }
  FLASHGEN_DEVICE bool repeats() const { return next != kNotYet; }
  FLASHGEN_DEVICE i32 draw() { return next < unseen ? tiles[next++ % kPlaces] : kNone; }

  // ---- For a warp.

  // Whether some tile is in doubt by now.
  FLASHGEN_DEVICE bool are_some(Thread thread) const {
    return warp_any(mbarrier_test_wait(shared_address(&doubted[smaller(thread.lane, judges)]), 0));
  }

  // When it is done with the last tile: whether those in doubt were among those before.
  FLASHGEN_DEVICE bool have_come() const { return warp_any(next != kNotYet); }
  // Waits for those who may doubt, and says whether some tile is in doubt.
  FLASHGEN_DEVICE bool are_left(Thread thread) const {
    mbarrier_wait(shared_address(&settled), 0);
    return are_some(thread);
  }
};

}  // namespace flashgen
