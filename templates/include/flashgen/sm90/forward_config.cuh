// The sizes of a forward kernel for Hopper. The plan chooses them.
#pragma once
#include "flashgen/panel.cuh"

namespace flashgen {

struct ForwardSm90Config {
  i32 head_dim, head_dim_v;  // of Q and K, of V and O, rounded up to 16: TMA fills the rest with zeros
  i32 stored_columns;        // of O
  i32 tile_q, tile_kv;
  i32 q_stages, stages;
  i32 consumers;
  i32 producer_registers, consumer_registers;
  i32 section_heads;  // their K and V stay in the L2 cache; several if tiles differ in length
  bool anchored;
  bool has_lower, has_upper;
};

// The slots of the ring that announces tiles of queries. A consumer holds two: the tile whose results it
// still has to store, and the next one.
constexpr i32 kForwardTileStages = 4;

// The named barrier at which the scheduler waits until the producer asks for a tile. Waiting there takes no
// instructions from the consumers, as polling an mbarrier does. The consumers have barriers 1 to 3.
constexpr i32 kRequestBarrier = 4;

}  // namespace flashgen
