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
  i32 k_stages;
  i32 v_stages;
  i32 consumers;
  i32 producer_registers;
  i32 consumer_registers;
  // Heads whose tiles are scheduled together, so that their K and V stay in the L2 cache.
  i32 section_heads;
  bool longest_first;
  // Exponentials relative to a reference maximum that is set once, not to the running maximum.
  bool anchored;
  // The exponentials of a step overlap the warpgroup's own P V. Otherwise they overlap other warpgroups'
  // products.
  bool overlaps_own_products;
  // O has its own tile in shared memory and is stored by TMA.
  bool stores_by_tma;
  bool has_lower;
  bool has_upper;
};

// The slots of the ring that announces tiles of queries. A consumer holds the tile whose results it still has
// to store, and the next one.
constexpr i32 kForwardTileStages = 4;

}  // namespace flashgen
