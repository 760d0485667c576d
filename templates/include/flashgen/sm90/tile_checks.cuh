// Which tiles of queries a thread block computes again, because their first results cannot be trusted.
//
// Two things can make a result wrong. A row's logits may outgrow the reference maximum of the anchored
// softmax. And V may hold NaN or infinity for a key that a row must not attend to: the row's probability is
// 0, but 0 * NaN is NaN. Both are rare, so the mainloop does not look for them. The epilogue checks each row.
//
// Once a tile has failed, the scheduler announces all later tiles of the thread block as `careful`. After the
// last one it announces the failed tiles again, also as careful. A careful tile has a running maximum. Where
// the mask cuts a block, its product leaves out NaN and infinity in V (careful_product.cuh).
#pragma once
#include "flashgen/element.cuh"
#include "flashgen/primitives_sm90.cuh"
#include "flashgen/sm90/forward_config.cuh"

namespace flashgen {

template <i32 consumer_warps>
struct TileChecks {
  // A consumer checks and stores a tile before it releases the tile's slot, which the scheduler then refills.
  static constexpr u32 kTiles = kForwardTileStages;
  // Beyond the numbers of all tiles, so that the scheduler finds no such tile.
  static constexpr i32 kNoTile = 0x7fffffff;
  static_assert(consumer_warps <= kWarpSize, "each lane of the scheduler reads one warp's check");

  // An mbarrier. Its only phase ends when the consumers have checked all tiles announced before the drain.
  u64 drained;
  // Of the last tiles: their numbers, and for each warp whether a row failed.
  i32 numbers[kTiles];
  u8 failed[kTiles][consumer_warps];
  // The numbers of the tiles to compute again: `queued` of them, of which `taken` were announced. There are
  // at most kTiles, because later tiles are careful.
  i32 queue[kTiles];
  u32 queued, taken;

  // One thread calls this first.
  FLASHGEN_DEVICE void init() {
    mbarrier_init(shared_address(&drained), consumer_warps);
    queued = taken = 0;
  }

  // ---- Called by consumer warps: they report whether tile `index` of the thread block failed, and that all
  // tiles are stored.
  FLASHGEN_DEVICE void set_failed(u32 index, i32 warp, bool has_failed, Thread thread) {
    if (thread.lane == 0) failed[index % kTiles][warp] = has_failed;
  }
  FLASHGEN_DEVICE void arrive_drained(Thread thread) {
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(shared_address(&drained));
  }

  // ---- Called by all lanes of the scheduler's warp
  FLASHGEN_DEVICE void wait_drained(Thread thread) {
    if (thread.lane < consumer_warps) mbarrier_wait(shared_address(&drained), 0);
    warp_sync();
  }
  FLASHGEN_DEVICE void queue_if_failed(u32 index, Thread thread) {
    const bool is_warp = thread.lane < consumer_warps;
    if (!warp_any(is_warp && failed[index % kTiles][is_warp ? thread.lane : 0] != 0)) return;
    if (thread.lane == 0) queue[queued++] = numbers[index % kTiles];
  }

  // ---- Called by one lane of that warp
  FLASHGEN_DEVICE void set_number(u32 index, i32 number) { numbers[index % kTiles] = number; }
  FLASHGEN_DEVICE bool any_failed() const { return queued > 0; }
  // The number of a failed tile, once for each; kNoTile if none is left.
  FLASHGEN_DEVICE i32 take_failed() { return taken < queued ? queue[taken++] : kNoTile; }
};

}  // namespace flashgen
