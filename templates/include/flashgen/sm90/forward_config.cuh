// The sizes of a forward kernel for Hopper. The plan chooses them.
#pragma once
#include "flashgen/panel.cuh"

namespace flashgen {

struct ForwardSm90Config {
  i32 head_dim;        // of Q and K, rounded up to 16: TMA fills the rest with zeros
  i32 head_dim_v;      // of V and O, likewise
  i32 stored_columns;  // of O
  i32 tile_q;
  i32 tile_kv;
  i32 q_stages;
  i32 stages;  // of K and of V
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  // Heads whose tiles are scheduled together, so that their K and V stay in the L2 cache: several if tiles
  // differ in length.
  i32 section_heads;
  // Exponentials relative to a reference maximum that is set once, not to the running maximum.
  bool anchored;
  bool has_lower;
  bool has_upper;
};

// The slots of the ring that announces tiles of queries. A consumer holds the tile whose results it still has
// to store, and the next one.
constexpr i32 kForwardTileStages = 4;

// The named barrier at which the scheduler waits until the producer asks for a tile. Waiting there takes no
// instructions from the consumers, as polling an mbarrier does. The consumers have barriers 1 to 3.
constexpr i32 kRequestBarrier = 4;

}  // namespace flashgen
