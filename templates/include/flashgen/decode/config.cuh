// The sizes of a decode kernel. The plan chooses them.
#pragma once
#include "flashgen/cache.cuh"
#include "flashgen/softmax.cuh"

namespace flashgen {

struct DecodeConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;   // rows of a tile: new tokens times the query heads of a group, 16 for each warp
  i32 tile_kv;  // keys of a tile, 16 for each warp
  i32 stages;
  i32 warps;
  // Each warp keeps its rows of Q in registers. Otherwise they stay in shared memory.
  bool holds_queries;
  // A block gets no fewer tiles than this for each 16 rows, as long as others have work.
  i32 least_tiles;
  bool has_lower;
  bool has_upper;
  // Which tiles of keys hold allowed pairs depends on the query head.
  bool varies_by_head;
  i32 access_bytes;
};

// Rows and keys of one product by tensor cores.
constexpr i32 kRowBlock = 16;
constexpr i32 kSliceKeys = 16;

}  // namespace flashgen
