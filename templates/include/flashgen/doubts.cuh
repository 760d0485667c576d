// Which tiles of queries may have been spoilt by values that some of their queries must not attend to.
//
// To look through V before it is used takes time, and there is hardly ever anything to find. But a bad value
// (contain.cuh) in a tile of keys shows in every row that is multiplied by it, whatever the probability: so V
// is not looked through as long as results are finite. A warp whose results are not doubts its tile. Then the
// block has V looked through for further tiles, and in the end takes those since the first doubtful one once
// more.
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

// `slots` are those of the ring by which the `warps` of a block learn which tile of queries is next. The
// `judges` among them compute, and may doubt.
template <i32 slots, i32 warps, i32 judges>
struct Doubts {
  static_assert(warps <= 16, "what warps say of a slot is read at once");
  // A warp doubts tile n when it has read of tile n + 1, says so when it reads of n + 2, and is heard when
  // the slot of that one is filled again. So there are no more than 2 + slots tiles since the first doubtful
  // one, and one more has a place.
  static constexpr u32 kPlaces = 4 * slots;
  static constexpr u32 kNotYet = ~0u;
  // A number that no tile has.
  static constexpr i32 kNone = 0x7fffffff;

  // Whether a warp doubts some tile: as it says in each slot, and as it knows. And the first such tile.
  alignas(16) u8 said[slots + 1][16];
  i32 first[warps];
  // Whether a warp has come to the end once, which is nothing to keep a register for.
  u32 ended[warps];
  // Whether values are looked through, as those who tell of tiles have heard.
  u32 heard[4];
  // The last tiles whose values were not looked through, and how many there were in all.
  i32 tiles[kPlaces];
  u32 unseen;
  // Which of these is taken once more next; kNotYet before that is known.
  u32 next;
  // A phase ends when all warps have no further tile to doubt.
  alignas(8) u64 settled;

  // ---- To be called once, by one thread.

  FLASHGEN_DEVICE void init() {
    for (i32 slot = 0; slot <= slots; ++slot) *reinterpret_cast<Vec16*>(said[slot]) = {};
    for (i32 warp = 0; warp < warps; ++warp) {
      first[warp] = kNone;
      ended[warp] = 0;
    }
    for (i32 teller = 0; teller < 4; ++teller) heard[teller] = 0;
    unseen = 0;
    next = kNotYet;
    mbarrier_init(shared_address(&settled), judges);
  }

  // ---- For a warp that computes. It works addresses out when it needs them, as it has no registers to keep
  // them.

  FLASHGEN_DEVICE void doubt(i32 tile, Thread thread) {
    const i32 warp = opaque(thread.warp);
    // What is taken once more has been in doubt before: nothing is written while others read.
    if (thread.lane != 0 || said[slots][warp] != 0) return;
    said[slots][warp] = 1;
    first[warp] = tile;
  }
  // Before the slot is given back.
  FLASHGEN_DEVICE void say(i32 slot, Thread thread) {
    const i32 warp = opaque(thread.warp);
    if (thread.lane == 0) said[slot][warp] = said[slots][warp];
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
    for (i32 teller = 0; teller < 4; ++teller) heard[teller] = 1;
    i32 tile = kNone;
    for (i32 warp = 0; warp < warps; ++warp) tile = smaller(tile, first[warp]);
    next = static_cast<u32>(tile);
  }
  FLASHGEN_DEVICE bool repeats() const { return next != kNotYet; }
  FLASHGEN_DEVICE i32 draw() { return next < unseen ? tiles[next++ % kPlaces] : kNone; }

  // ---- For those who tell of tiles.

  // Whether values are looked through from the tile on that comes into this slot, which has been given back.
  // Each teller has a number below four.
  FLASHGEN_DEVICE bool look_through(i32 teller, i32 slot) {
    heard[teller] |= any_of(slot);
    return heard[teller] != 0;
  }

  // ---- For all, when they are done with the last tile.

  FLASHGEN_DEVICE bool is_first_end(Thread thread) {
    // By a vote, so that the assembler knows that lanes agree.
    const i32 warp = opaque(thread.warp);
    const bool is_first = warp_any(ended[warp] == 0);
    warp_sync();
    if (thread.lane == 0) ended[warp] = 1;
    return is_first;
  }
  // Waits for those who may doubt, and says whether some tile is in doubt.
  FLASHGEN_DEVICE bool are_left() const {
    mbarrier_wait(shared_address(&settled), 0);
    return any_of(slots) != 0;
  }

 private:
  FLASHGEN_DEVICE u32 any_of(i32 slot) const {
    const Vec16 all = *reinterpret_cast<const Vec16*>(said[slot]);
    return all.words[0] | all.words[1] | all.words[2] | all.words[3];
  }
};

}  // namespace flashgen
