// A tile of queries in the kernel that computes dQ alone: that of the forward kernel (query_tile.cuh), and in
// addition where dO, the statistics L and D, and dQ lie.
#pragma once
#include "flashgen/sm90/packed_window.cuh"
#include "flashgen/sm90/tile_scheduler.cuh"

namespace flashgen {

struct DenseGradientTile : DenseTile {
  template <ForwardSm90Config cfg, class Params>
  using Scheduler = DynamicScheduler<cfg, Params>;

  template <class DOTile, class Params>
  FLASHGEN_DEVICE void load_dout(DOTile dout, const Params& p, u32 barrier) const {
    dout.load(p.dout_map, barrier, first_q, head, sequence);
  }
  // L and D of a consumer's queries. If all of these lie beyond the end, loads the last part instead, and
  // nothing uses it.
  template <i32 rows, class Params>
  FLASHGEN_DEVICE void load_statistics(u32 to, const Params& p, u32 barrier, i32 consumer) const {
    const i32 parts = ceil_div(p.len_q, rows), part = smaller(first_q / rows + consumer, parts - 1);
    const i64 number = (static_cast<i64>(sequence) * p.heads_q + head) * parts + part;
    bulk_load(to, p.row_stats + number * (2 * rows), 2 * rows * 4, barrier);
  }
  FLASHGEN_DEVICE auto dq_rows(const auto& p) const {
    return GlobalRows{p.dq + sequence * p.dq_batch + head * p.dq_head, p.dq_row, p.len_q};
  }
  // The tile's number among all tiles.
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE i32 number(const Params& p) const {
    return (sequence * p.heads_q + head) * p.q_tiles + first_q / tile_q;
  }
};

// The same for packed sequences. TMA maps are windows (packed_window.cuh).
struct PackedGradientTile : PackedTile {
  template <ForwardSm90Config cfg, class Params>
  using Scheduler = VarlenScheduler<cfg, Params, PackedTile>;

  template <class QTile, class Params>
  FLASHGEN_DEVICE void load_q(QTile q, const Params& p, u32 barrier) const {
    PackedWindow::of(rows.first_q, rows.len_q, p.len_q).load(q, p.q_map, barrier, first_q, head);
  }
  template <class DOTile, class Params>
  FLASHGEN_DEVICE void load_dout(DOTile dout, const Params& p, u32 barrier) const {
    PackedWindow::of(rows.first_q, rows.len_q, p.len_q).load(dout, p.dout_map, barrier, first_q, head);
  }
  template <class KTile, class Params>
  FLASHGEN_DEVICE void load_k(KTile k, const Params& p, u32 barrier, i32 first_key) const {
    PackedWindow::of(rows.first_key, rows.len_kv, p.len_kv).load(k, p.k_map, barrier, first_key, head_kv);
  }
  template <class VTile, class Params>
  FLASHGEN_DEVICE void load_v(VTile v, const Params& p, u32 barrier, i32 first_key) const {
    PackedWindow::of(rows.first_key, rows.len_kv, p.len_kv).load(v, p.v_map, barrier, first_key, head_kv);
  }
  template <i32 rows_of_part, class Params>
  FLASHGEN_DEVICE void load_statistics(u32 to, const Params& p, u32 barrier, i32 consumer) const {
    const i32 parts = ceil_div(rows.rows_q, rows_of_part),
              part = smaller(first_q / rows_of_part + consumer, parts - 1);
    const i64 number =
        static_cast<i64>(first_tile_of(rows.first_q, sequence, rows_of_part) + part) * p.heads_q + head;
    bulk_load(to, p.row_stats + number * (2 * rows_of_part), 2 * rows_of_part * 4, barrier);
  }
  // Rows that seqused_q leaves out get gradients, too: zeros.
  FLASHGEN_DEVICE auto dq_rows(const auto& p) const {
    return GlobalRows{p.dq + rows.first_q * p.dq_row + head * p.dq_head, p.dq_row, rows.rows_q};
  }
  template <i32 tile_q, class Params>
  FLASHGEN_DEVICE i32 number(const Params& p) const {
    return (first_tile_of(rows.first_q, sequence, tile_q) + first_q / tile_q) * p.heads_q + head;
  }
};

}  // namespace flashgen
