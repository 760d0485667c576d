// The sizes of a decode kernel. The plan chooses them.
#pragma once
#include "flashgen/cache.cuh"
#include "flashgen/primitives_sm90.cuh"
#include "flashgen/softmax.cuh"

namespace flashgen {

struct DecodeConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;   // rows of a tile: new tokens times query heads per key/value head
  i32 tile_kv;  // keys of a tile
  i32 stages;
  i32 warps;  // that compute
  // Warps that only start copies. Without any, each warp copies what it multiplies.
  i32 producers;
  // Registers of a thread of either kind, where there are both.
  i32 producer_registers;
  i32 consumer_registers;
  // Each warp keeps its rows of Q in registers. Otherwise they stay in shared memory.
  bool holds_queries;
  // Parts of eight rows that a block merges in the time of a tile of keys.
  i32 merged_parts;
  // The fixed cost of an item, in tiles of keys.
  i32 item_tiles;
  bool has_lower;
  bool has_upper;
  // Which tiles of keys hold allowed pairs depends on the query head.
  bool varies_by_head;
  i32 access_bytes;

  // Keys of a slice: those of a tile that a warp copies.
  constexpr i32 slice_keys() const { return tile_kv / warps; }
};

// Rows of one product by tensor cores.
constexpr i32 kRowBlock = 16;
// Rows that the lanes of a warp merge at a time.
constexpr i32 kMergedRows = 8;

// The named barrier of the warps that compute.
constexpr i32 kConsumerBarrier = 1;

// Waits for all warps that compute.
template <DecodeConfig cfg>
FLASHGEN_DEVICE void consumers_sync() {
  if constexpr (cfg.producers == 0) {
    block_sync();
  } else {
    named_barrier_sync(kConsumerBarrier, cfg.warps * kWarpSize);
  }
}

}  // namespace flashgen
