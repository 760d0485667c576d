// The sizes of the fused backward kernel for Hopper, which the plan chooses, and how its consumers divide dQ.
#pragma once
#include "flashgen/panel.cuh"

namespace flashgen {

struct BackwardSm90Config {
  i32 head_dim, head_dim_v;
  i32 tile_q, tile_kv;
  i32 q_stages, do_stages, ds_stages;
  i32 sum_stages, rounded_stages;  // slots for sums of dQ to be scaled and rounded, and for rounded ones
  i32 consumers;
  i32 producer_registers, consumer_registers;
  i32 section_heads;   // heads whose operands stay in the L2 cache
  bool presets_ahead;  // the next step's scores are preset to -L while dK is multiplied
  bool dq_last;        // dQ is multiplied after dK, in the registers of dP, and not between dV and dK
  bool has_lower, has_upper;
};

constexpr i32 kPanelColumns = 64;

// Which part of dQ_i = sum over j of dS_ij K_j each consumer computes: 64 rows, or 64 columns (or those that
// are left). Each warp has 16 rows of it. The float32 sum in global memory has the layout of the
// accumulators: warp after warp, then blocks of 16 rows x 8 columns, then four floats per lane. So all
// accesses are contiguous.
template <i32 tile_q, i32 head_dim, i32 consumers>
struct DqShare {
  static constexpr bool by_rows = tile_q == consumers * kWarpgroupRows;
  static_assert(by_rows ? head_dim == kPanelColumns
                        : tile_q == kWarpgroupRows && ceil_div(head_dim, kPanelColumns) == consumers,
                "each consumer owns 64 rows, or 64 columns, of a tile of dQ");
  static constexpr i32 tile_floats = tile_q * head_dim;

  FLASHGEN_DEVICE static i32 row(i32 consumer) { return by_rows ? consumer * kWarpgroupRows : 0; }
  FLASHGEN_DEVICE static i32 column(i32 consumer) { return by_rows ? 0 : consumer * kPanelColumns; }
  FLASHGEN_DEVICE static i32 columns(i32 consumer) {
    return smaller(kPanelColumns, head_dim - column(consumer));
  }
  // The offset and the size of a warp's part of a tile. Warps are counted over all consumers.
  FLASHGEN_DEVICE static i32 warp_begin(i32 warp) {
    const i32 consumer = warp / 4;
    return consumer * kWarpgroupRows * kPanelColumns + warp % 4 * warp_floats(consumer);
  }
  FLASHGEN_DEVICE static i32 warp_floats(i32 consumer) { return kWarpRows * columns(consumer); }
};

}  // namespace flashgen
