// Which tiles of queries a block repeats, because their first results cannot be trusted.
//
// Two things can spoil a result. A row's logits may outgrow the reference maximum of the anchored softmax.
// And V may hold NaN or infinity for a key that a row must not attend to: the row's probability is 0, but 0 *
// NaN is NaN. Both are rare, so the mainloop does not look for them. The epilogue checks each row. The
// scheduler announces a failed tile again as `careful`, and so are all tiles of the block from then on. In a
// careful tile maxima are running, and products of blocks that the mask cuts leave out what is not finite
// (careful_product.cuh).
#pragma once
#include "flashgen/element.cuh"
#include "flashgen/primitives_sm90.cuh"
#include "flashgen/sm90/forward_config.cuh"

namespace flashgen {

template <i32 consumer_warps>
struct TileChecks {
  // Consumers give an announcement back when they have stored and checked the tile. So the scheduler knows
  // the checks of a tile when it fills the tile's slot again.
  static constexpr u32 kTiles = kForwardTileStages;
  static_assert(consumer_warps <= kWarpSize, "each lane of the scheduler reads one warp's checks");

  // Its only phase ends when the consumers have checked all tiles that were announced before the pause.
  u64 settled;
  // Of the last tiles: their numbers, and for each warp whether a row failed.
  i32 numbers[kTiles];
  u8 failed[kTiles][consumer_warps];
  // The numbers of the tiles to repeat, how many there are, and how many were announced again. There are no
  // more, because later tiles are careful.
  i32 list[kTiles];
  u32 listed, repeated;

  // By one thread, before all else.
  FLASHGEN_DEVICE void init() {
    mbarrier_init(shared_address(&settled), consumer_warps);
    listed = repeated = 0;
  }

  // ---- For consumer warps: tile `index` of the block is stored; and all tiles are.
  FLASHGEN_DEVICE void record(u32 index, i32 warp, bool has_failed, Thread thread) {
    if (thread.lane == 0) failed[index % kTiles][warp] = has_failed;
  }
  FLASHGEN_DEVICE void settle(Thread thread) {
    warp_sync();
    if (thread.lane == 0) mbarrier_arrive(shared_address(&settled));
  }

  // ---- For the scheduler's warp, ...
  FLASHGEN_DEVICE void wait_settled(Thread thread) {
    if (thread.lane < consumer_warps) mbarrier_wait(shared_address(&settled), 0);
    warp_sync();
  }
  // Lists tile `index` if it has failed.
  FLASHGEN_DEVICE void check(u32 index, Thread thread) {
    const bool is_warp = thread.lane < consumer_warps;
    if (!warp_any(is_warp && failed[index % kTiles][is_warp ? thread.lane : 0] != 0)) return;
    if (thread.lane == 0) list[listed++] = numbers[index % kTiles];
  }
  // ... and for one lane of it.
  FLASHGEN_DEVICE void note(u32 index, i32 number) { numbers[index % kTiles] = number; }
  FLASHGEN_DEVICE bool any_failed() const { return listed > 0; }
  FLASHGEN_DEVICE i32 next_failed() { return repeated < listed ? list[repeated++] : 0x7fffffff; }
};

}  // namespace flashgen
