// Computes tiles of gradients again that the mainloops flagged (failed_tiles.cuh): pair by pair, without
// tensor cores, and only for pairs that the mask allows. So a NaN reaches the results that it has to reach,
// and no other.
//
// Such tiles are rare, and there is no bound on the time that they take. Without flags the kernel ends at
// once.
#pragma once
#include "flashgen/sm90/backward_dropping.cuh"
#include "flashgen/sm90/backward_scores.cuh"
#include "flashgen/sm90/repaired_tile.cuh"

namespace flashgen {

struct RepairConfig {
  i32 head_dim;
  i32 head_dim_v;
  // Rows of a tile of dQ, and of one of dK and dV.
  i32 tile_q;
  i32 tile_kv;
  i32 warps;
  // Flags that a block looks at, one for each lane.
  i32 flags;
  bool has_lower;
  bool has_upper;
};

template <RepairConfig cfg, class T, class Params, class Tile, class Mask, class Score, class Dropping>
struct BackwardRepair {
  static_assert(cfg.flags == kWarpSize, "each lane looks at a flag");
  // A row of a tensor, of which each lane has every 32nd column.
  template <i32 columns>
  struct Row {
    float x[ceil_div(columns, kWarpSize)] = {};
  };
  using Wide = Row<cfg.head_dim>;
  using WideV = Row<cfg.head_dim_v>;

  const Params& p;
  Thread thread;

  // ---- Rows

  template <i32 columns, class Use>
  FLASHGEN_DEVICE void for_columns(const Use& use) const {
#pragma unroll
    for (i32 i = 0; i < ceil_div(columns, kWarpSize); ++i) {
      const i32 column = i * kWarpSize + thread.lane;
      if (column < columns) use(i, column);
    }
  }
  template <i32 columns>
  FLASHGEN_DEVICE Row<columns> load(const T* from) const {
    Row<columns> row;
    for_columns<columns>([&](i32 i, i32 column) { row.x[i] = to_float(from[column]); });
    return row;
  }
  template <i32 columns>
  FLASHGEN_DEVICE void store(T* to, const Row<columns>& row, float scale) const {
    for_columns<columns>(
        [&](i32 i, i32 column) { to[column] = T{static_cast<u16>(pack(T{}, row.x[i] * scale, 0.0f))}; });
  }
  template <i32 columns>
  FLASHGEN_DEVICE static void add(Row<columns>& sum, float factor, const Row<columns>& row) {
#pragma unroll
    for (i32 i = 0; i < ceil_div(columns, kWarpSize); ++i)
      sum.x[i] = fused_multiply_add(factor, row.x[i], sum.x[i]);
  }
  template <i32 columns>
  FLASHGEN_DEVICE static float dot(const Row<columns>& a, const Row<columns>& b) {
    float sum = 0.0f;
#pragma unroll
    for (i32 i = 0; i < ceil_div(columns, kWarpSize); ++i) sum = fused_multiply_add(a.x[i], b.x[i], sum);
#pragma unroll
    for (i32 distance = kWarpSize / 2; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
    return sum;
  }

  // ---- Pairs

  struct Pair {
    // P, which is 0 if the pair is dropped, and dS = P (dP - D) times the slope of the score.
    float p;
    float ds;
  };
  FLASHGEN_DEVICE Pair pair(const Wide& q_row, const Wide& k_row, const WideV& dout_row, const WideV& v_row,
                            const Tile& tile, i32 head, i32 q, i32 key) const {
    const i64 number = tile.statistics(p, head) + q;
    const ScoreAndSlope score = Score::of_pair(p, tile, head, q, key, dot(q_row, k_row) * p.scale);
    const float probability = exp2_approx(fused_multiply_add(score.value, kLog2E, negate_lse(p.lse[number])));
    const bool is_kept = Dropping::keeps(p, tile.sequence, head, q, key);
    const float kept = Dropping::factor(p), dp = is_kept ? dot(dout_row, v_row) * kept : 0.0f;
    return {is_kept ? probability * kept : 0.0f, probability * (dp - p.dsum[number]) * score.slope};
  }

  // dQ of a row.
  FLASHGEN_DEVICE void repair_query(const Tile& tile, i32 q) const {
    const i32 head = tile.head, head_kv = head / p.group;
    const Mask mask = tile.template mask<Mask>(p, head);
    const T* const k = p.k + tile.keys(p.k_batch, p.k_row) + head_kv * p.k_head;
    const T* const v = p.v + tile.keys(p.v_batch, p.v_row) + head_kv * p.v_head;
    const Wide q_row =
        load<cfg.head_dim>(p.q + tile.queries(p.q_batch, p.q_row) + head * p.q_head + q * p.q_row);
    const WideV dout_row = load<cfg.head_dim_v>(p.dout + tile.queries(p.dout_batch, p.dout_row) +
                                                head * p.dout_head + q * p.dout_row);
    Wide dq;
    for (i32 key = 0; key < tile.len_kv(p); ++key) {
      if (!mask.allows(q, key)) continue;
      const Wide k_row = load<cfg.head_dim>(k + key * p.k_row);
      add(dq, pair(q_row, k_row, dout_row, load<cfg.head_dim_v>(v + key * p.v_row), tile, head, q, key).ds,
          k_row);
    }
    store(p.dq + tile.queries(p.dq_batch, p.dq_row) + head * p.dq_head + q * p.dq_row, dq, p.scale);
  }

  // dK and dV of a row.
  FLASHGEN_DEVICE void repair_key(const Tile& tile, i32 key) const {
    const i32 head_kv = tile.head;
    const Wide k_row =
        load<cfg.head_dim>(p.k + tile.keys(p.k_batch, p.k_row) + head_kv * p.k_head + key * p.k_row);
    const WideV v_row =
        load<cfg.head_dim_v>(p.v + tile.keys(p.v_batch, p.v_row) + head_kv * p.v_head + key * p.v_row);
    Wide dk;
    WideV dv;
    for (i32 head = head_kv * p.group; head < (head_kv + 1) * p.group; ++head) {
      const Mask mask = tile.template mask<Mask>(p, head);
      const T* const queries = p.q + tile.queries(p.q_batch, p.q_row) + head * p.q_head;
      const T* const douts = p.dout + tile.queries(p.dout_batch, p.dout_row) + head * p.dout_head;
      for (i32 q = 0; q < tile.len_q(p); ++q) {
        if (!mask.allows(q, key)) continue;
        const Wide q_row = load<cfg.head_dim>(queries + q * p.q_row);
        const WideV dout_row = load<cfg.head_dim_v>(douts + q * p.dout_row);
        const Pair of = pair(q_row, k_row, dout_row, v_row, tile, head, q, key);
        add(dk, of.ds, q_row);
        add(dv, of.p, dout_row);
      }
    }
    store(p.dk + tile.keys(p.dk_batch, p.dk_row) + head_kv * p.dk_head + key * p.dk_row, dk, p.scale);
    store(p.dv + tile.keys(p.dv_batch, p.dv_row) + head_kv * p.dv_head + key * p.dv_row, dv, 1.0f);
  }

  // ---- Tiles. The warps of a block look at the same flags, and divide the rows of a tile.

  FLASHGEN_DEVICE void repair(i32 flag) const {
    const bool is_query = flag < p.query_flags;
    const i32 tile_rows = is_query ? cfg.tile_q : cfg.tile_kv;
    const Tile tile = Tile::of(p, is_query, is_query ? flag : flag - p.query_flags, tile_rows);
    const i32 end = smaller(tile.first_row + tile_rows, tile.rows(p, is_query));
    for (i32 row = tile.first_row + thread.warp; row < end; row += cfg.warps) {
      if (is_query) {
        repair_query(tile, row);
      } else {
        repair_key(tile, row);
      }
    }
  }

  FLASHGEN_DEVICE static void run(const Params& p) {
    const Thread thread = Thread::current();
    griddep_wait();
    const i32 first = block_idx_x() * cfg.flags, own = first + thread.lane;
    for (u32 left = warp_ballot(own < p.flags && p.failed_tiles[own] != 0); left != 0; left &= left - 1)
      BackwardRepair{p, thread}.repair(first + lowest_bit(left));
  }
};

}  // namespace flashgen
