// Which tiles of queries a block computes a second time, because non-finite values (contain.cuh) in V may
// have reached queries that must not attend to them.
//
// Scrubbing V before its first use costs time, and non-finite values are rare. A non-finite value in a tile
// of keys shows in every row that is multiplied by the tile, whatever the probability. So consumers multiply
// V as loaded, and check that their results are finite. Some kernels scrub V for a block's first tile of
// queries anyway. Once a result is not finite, or the scrubbing warps find a non-finite value, the block
// scrubs all tiles of V that the mask cuts (scrubber.cuh). After its last tile of queries it recomputes those
// since the first reported one that used V unscrubbed. All other blocks are warned, and scrub from their next
// tile on.
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

// Whether a lane's results show a non-finite value in V. Such a value shows in all rows, so one of the lane's
// two rows suffices. A row whose sum of exponentials is NaN has only NaN results and shows nothing, so the
// other is used.
template <i32 count>
FLASHGEN_DEVICE bool shows_non_finite(const float (&strip)[count], const float (&sums)[2]) {
  // Without a branch, behind which the assembler would take lanes for divergent.
  const bool are_non_finite[2] = {!is_finite_row(strip, 0), !is_finite_row(strip, 1)};
  const bool is_number[2] = {sums[0] == sums[0], sums[1] == sums[1]};
  return (is_number[0] & are_non_finite[0]) | (!is_number[0] & is_number[1] & are_non_finite[1]);
}

// `slots` is the number of slots of the ring that announces tiles of queries. The consumer warps are the last
// warps of a block.
template <i32 slots, i32 consumer_warps>
struct RecomputeList {
  // The scrubbing warps also report, by one more barrier. They never trigger a recompute.
  static constexpr i32 kReporters = consumer_warps + 1;
  static_assert(kReporters <= kWarpSize, "each lane tests one barrier");
  static constexpr i32 kFirstConsumerWarp = 4;
  // A warp reports tile n before it reads tile n + 2 from the ring. The producer sees the report when it
  // announces the next tile, or at the latest when it fills that tile's slot again. So at most 2 + slots
  // unscrubbed tiles follow the first reported one.
  static constexpr u32 kPlaces = 4 * slots;
  static constexpr u32 kNotYet = ~0u;
  // Not the number of any tile.
  static constexpr i32 kNone = 0x7fffffff;

  // One barrier per reporter. Its only phase ends when the reporter has found non-finite values.
  alignas(8) u64 reported[kReporters];
  // Its only phase ends when no consumer has a further tile to report.
  u64 settled;
  // The first tile that each consumer warp reports.
  i32 first[consumer_warps];
  // The last tiles that used V unscrubbed, and how many there were in all.
  i32 tiles[kPlaces];
  u32 unscrubbed;
  // Which of these is recomputed next; kNotYet until that is known.
  u32 next;

  // ---- Initialization: by one thread, ...

  FLASHGEN_DEVICE void init_barriers() {
    for (i32 reporter = 0; reporter < kReporters; ++reporter)
      mbarrier_init(shared_address(&reported[reporter]), 1);
    mbarrier_init(shared_address(&settled), consumer_warps * kWarpSize);
  }
  // ... and by the lanes of another warp.
  FLASHGEN_DEVICE void begin(Thread thread) {
    if (thread.lane < consumer_warps) first[thread.lane] = kNone;
    if (thread.lane == 0) {
      unscrubbed = 0;
      next = kNotYet;
    }
  }

  // ---- For consumer warps. They compute addresses on use, because they have no registers to keep them in.

  // Only a warp's first report counts, because all later tiles are recomputed too. Returns true in one lane
  // of a warp that had not reported before.
  FLASHGEN_DEVICE bool report(i32 tile, Thread thread) {
    const i32 warp = opaque(thread.warp) - kFirstConsumerWarp;
    if (thread.lane != 0 || first[warp] != kNone) return false;
    first[warp] = tile;
    mbarrier_arrive(shared_address(&reported[warp]));
    return true;
  }
  // Called by every lane, because every lane has read what is overwritten from then on.
  FLASHGEN_DEVICE void settle() { mbarrier_arrive(shared_address(&settled)); }

  // ---- For one thread of the scrubbing warps, once: they have found non-finite values.
  FLASHGEN_DEVICE void report_found() { mbarrier_arrive(shared_address(&reported[consumer_warps])); }

  // ---- For the one thread that announces tiles.

  // Which tile is announced next; and, once that is known, that it uses V unscrubbed.
  FLASHGEN_DEVICE void note(i32 tile) { tiles[unscrubbed % kPlaces] = tile; }
  FLASHGEN_DEVICE void count_unscrubbed() { ++unscrubbed; }
  // Whether no further report can come, when so many tiles have been announced. All warps have then read the
  // previous content of the last one's slot, and finished the two tiles before that.
  FLASHGEN_DEVICE bool are_known(u32 announced) const { return unscrubbed + slots + 2 <= announced; }
  // From now on draw() returns the tiles to recompute, beginning with the first reported one.
  FLASHGEN_DEVICE void repeat() {
    i32 tile = kNone;
#pragma unroll 1
    for (i32 warp = 0; warp < consumer_warps; ++warp) tile = smaller(tile, first[warp]);
    next = static_cast<u32>(tile);
  }
  FLASHGEN_DEVICE bool repeats() const { return next != kNotYet; }
  FLASHGEN_DEVICE i32 draw() { return next < unscrubbed ? tiles[next++ % kPlaces] : kNone; }

  // ---- For all lanes of any warp.

  // Whether any warp has reported non-finite values so far.
  FLASHGEN_DEVICE bool has_reports(Thread thread) const {
    return warp_any(mbarrier_test_wait(shared_address(&reported[smaller(thread.lane, consumer_warps)]), 0));
  }

  // After the last tile: whether the tiles to recompute were among those announced before it.
  FLASHGEN_DEVICE bool have_come() const { return warp_any(next != kNotYet); }
  // Waits until no further report can come. Returns whether there may be tiles to recompute.
  FLASHGEN_DEVICE bool are_left(Thread thread) const {
    mbarrier_wait(shared_address(&settled), 0);
    return has_reports(thread);
  }
};

}  // namespace flashgen
