// Which tiles of queries may have been spoilt by values that some of their queries must not attend to.
//
// To look through V before it is used takes time, and there is hardly ever anything to find. But a bad value
// (contain.cuh) in a tile of keys shows in every row that is multiplied by it, whatever the probability: so V
// is not looked through as long as results are finite, but for a block's first tile of queries, if it has
// many steps. A warp whose results are not doubts its tile, or the one after that first one. From then on
// those who compute look through V before they use it, and in the end the block takes the tiles since the
// first doubtful one once more.
#pragma once
#include "flashgen/element.cuh"
#include "flashgen/primitives_sm90.cuh"

namespace flashgen {

// Whether all of one of a lane's two rows of a strip are finite: what is bad in V is so in all rows.
template <i32 count>
FLASHGEN_DEVICE bool is_finite_row(const float (&strip)[count]) {
  float zero[2] = {};
#pragma unroll
  for (i32 i = 0; i < count; i += 4) {
    for (i32 j = 0; j < 2; ++j) zero[j] = fused_multiply_add(strip[i + j], 0.0f, zero[j]);
  }
  return zero[0] + zero[1] == 0.0f;
}

// `slots` are those of the ring by which warps learn which tile of queries is next, `stages` those of V. The
// `judges` are the warps that compute, the last ones of a block.
template <i32 slots, i32 stages, i32 judges>
struct Doubts {
  static_assert(judges <= kWarpSize, "a lane asks what each of them says");
  static constexpr i32 kFirstJudge = 4;
  // A warp doubts tile n before it reads of n + 2, and is heard when the next tile is told of, at the latest
  // when the slot of that one is filled again. So there are no more than 2 + slots tiles since the first
  // doubtful one, and one more has a place.
  static constexpr u32 kPlaces = 4 * slots;
  static constexpr u32 kNotYet = ~0u;
  // A number that no tile has.
  static constexpr i32 kNone = 0x7fffffff;

  // A phase ends when a slot of V has been looked through, ...
  alignas(8) u64 looked[stages];
  // ... a single one when a warp doubts some tile, ...
  u64 doubted[judges];
  // ... and when all have no further tile to doubt.
  u64 settled;
  // Where each of them found bad values in its share of a slot: a bit for each 16 keys.
  u32 found[stages][judges];
  // The parity of the phase of `looked` that comes next, a bit for each slot, as each of them counts.
  u32 parities[judges];
  // The first tile that each doubts.
  i32 first[judges];
  // Whether it has come to the end once, which is nothing to keep a register for.
  u32 ended[judges];
  // The last tiles whose values were not looked through, and how many there were in all.
  i32 tiles[kPlaces];
  u32 unseen;
  // Which of these is taken once more next; kNotYet before that is known.
  u32 next;

  // ---- To be called once, by one thread.

  FLASHGEN_DEVICE void init() {
    for (i32 stage = 0; stage < stages; ++stage) mbarrier_init(shared_address(&looked[stage]), judges);
    for (i32 judge = 0; judge < judges; ++judge) {
      mbarrier_init(shared_address(&doubted[judge]), 1);
      parities[judge] = 0;
      first[judge] = kNone;
      ended[judge] = 0;
    }
    mbarrier_init(shared_address(&settled), judges);
    unseen = 0;
    next = kNotYet;
  }

  // ---- For a warp that computes. It works addresses out when it needs them, as it has no registers to keep
  // them.

  FLASHGEN_DEVICE static i32 judge_of(Thread thread) { return opaque(thread.warp) - kFirstJudge; }

  FLASHGEN_DEVICE void doubt(i32 tile, Thread thread) {
    const i32 judge = judge_of(thread);
    // What is taken once more has been in doubt before: nothing is written while others read.
    if (thread.lane != 0 || first[judge] != kNone) return;
    first[judge] = tile;
    mbarrier_arrive(shared_address(&doubted[judge]));
  }
  // It has looked through its share of a slot, and each lane found what it did. The parity to wait with.
  FLASHGEN_DEVICE u32 look_through(i32 slot, u32 groups, Thread thread) {
    const i32 judge = judge_of(thread);
    if (warp_any(groups != 0)) {
      for (i32 i = 1; i < kWarpSize; i *= 2)
        groups |= static_cast<u32>(shuffle(static_cast<i32>(groups), thread.lane ^ i));
    }
    const u32 parity = parities[judge] >> slot & 1u;
    // All of it is done and read.
    warp_sync();
    if (thread.lane == 0) {
      found[slot][judge] = groups;
      parities[judge] ^= 1u << slot;
      mbarrier_arrive(shared_address(&looked[slot]));
    }
    return parity;
  }
  // What all have found, when they are done with the slot.
  FLASHGEN_DEVICE u32 bad_groups(i32 slot, u32 parity) const {
    mbarrier_wait(shared_address(&looked[slot]), parity);
    u32 groups = 0;
    for (i32 judge = 0; judge < judges; ++judge) groups |= found[slot][judge];
    return groups;
  }
  FLASHGEN_DEVICE void settle(Thread thread) {
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(shared_address(&settled));
  }

  // ---- For the one thread that tells of tiles.

  // Which tile is told of next; and, once that is known, that its values are not looked through.
  FLASHGEN_DEVICE void note(i32 tile) { tiles[unseen % kPlaces] = tile; }
  FLASHGEN_DEVICE void is_unseen() { ++unseen; }
  // From now on doubtful tiles are drawn, the first one first.
  FLASHGEN_DEVICE void repeat() {
    i32 tile = kNone;
    for (i32 judge = 0; judge < judges; ++judge) tile = smaller(tile, first[judge]);
    next = static_cast<u32>(tile);
  }
  FLASHGEN_DEVICE bool repeats() const { return next != kNotYet; }
  FLASHGEN_DEVICE i32 draw() { return next < unseen ? tiles[next++ % kPlaces] : kNone; }

  // ---- For a warp.

  // Whether some tile is in doubt by now, so that values are looked through.
  FLASHGEN_DEVICE bool are_some(Thread thread) const {
    return warp_any(mbarrier_test_wait(shared_address(&doubted[smaller(thread.lane, judges - 1)]), 0));
  }

  // When it is done with the last tile.

  FLASHGEN_DEVICE bool is_first_end(Thread thread) {
    // By a vote, so that the assembler knows that lanes agree.
    const i32 judge = judge_of(thread);
    const bool is_first = warp_any(ended[judge] == 0);
    warp_sync();
    if (thread.lane == 0) ended[judge] = 1;
    return is_first;
  }
  // Waits for those who may doubt, and says whether some tile is in doubt.
  FLASHGEN_DEVICE bool are_left(Thread thread) const {
    mbarrier_wait(shared_address(&settled), 0);
    return are_some(thread);
  }
};

}  // namespace flashgen
