// One block for each tile of scores: what it computes between the barriers of the grid.
#pragma once
#include "flashgen/lineage/patch.cuh"

namespace flashgen {

struct GridConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  bool has_lower;
  bool has_upper;
};

// The block of tile (i, j) of one head. What blocks tell each other lies in device memory: of each tile of
// keys and each row a maximum, a sum and a part of O.
template <GridConfig cfg, class T, class Params>
struct TileOfScores {
  using Mask = Band<cfg.has_lower, cfg.has_upper>;
  static constexpr i32 rows = cfg.tile_q / kSide;

  const Params& p;
  Mask mask;
  i32 i, j;
  i32 head, sequence;
  i32 first_q, first_key;
  // Which tiles of keys have a part in O_i.
  Range keys;
  Square here;

  // Without any keys one block is left, to write zeros.
  FLASHGEN_DEVICE static i32 blocks_of_a_row(const Params& p) {
    return larger(1, ceil_div(p.len_kv, cfg.tile_kv));
  }

  FLASHGEN_DEVICE static TileOfScores current(const Params& p) {
    const i32 kv_tiles = blocks_of_a_row(p);
    const Place place = Place::current();
    const Mask mask = Mask::of(p, place.sequence, place.head);
    const i32 i = place.tile / kv_tiles, j = place.tile % kv_tiles;
    const i32 first_q = i * cfg.tile_q, end_q = smaller(first_q + cfg.tile_q, p.len_q);
    const Range keys = mask.key_tiles(first_q, end_q, cfg.tile_kv);
    return {p, mask, i, j, place.head, place.sequence, first_q, j * cfg.tile_kv, keys, Square::current()};
  }

  FLASHGEN_DEVICE bool is_visited() const { return keys.has(j); }
  FLASHGEN_DEVICE i32 q(i32 row) const { return first_q + kSide * row + here.row; }
  // A query's place among those of all heads, and among the parts that tile `tile` of keys has written.
  FLASHGEN_DEVICE i64 number(i32 query) const {
    return (static_cast<i64>(sequence) * p.heads_q + head) * p.len_q + query;
  }
  FLASHGEN_DEVICE i64 part(i32 tile, i32 query) const {
    const i64 kv_tiles = ceil_div(p.len_kv, cfg.tile_kv);
    return ((static_cast<i64>(sequence) * p.heads_q + head) * kv_tiles + tile) * p.len_q + query;
  }

  // S_ij = scale * Q_i K_j^T.
  FLASHGEN_DEVICE void compute_scores(Patch<cfg.tile_q, cfg.tile_kv>& scores, u8* q_place,
                                      u8* k_place) const {
    const FloatTile<cfg.tile_q, cfg.head_dim> q_tile{reinterpret_cast<float*>(q_place)};
    const FloatTile<cfg.tile_kv, cfg.head_dim> k_tile{reinterpret_cast<float*>(k_place)};
    q_tile.load(p.q + sequence * p.q_batch + head * p.q_head, p.q_row, first_q, p.len_q);
    k_tile.load(p.k + sequence * p.k_batch + head / p.group * p.k_head, p.k_row, first_key, p.len_kv);
    block_sync();
    masked_scores(scores, q_tile, k_tile, p.scale, mask, first_q, first_key);
  }

  // rowmax(S_ij), for all blocks of the same rows.
  FLASHGEN_DEVICE void publish_maxima(const Patch<cfg.tile_q, cfg.tile_kv>& scores) const {
#pragma unroll
    for (i32 r = 0; r < rows; ++r) {
      float largest = -kInfinity;
#pragma unroll
      for (i32 c = 0; c < cfg.tile_kv / kSide; ++c) largest = maximum(largest, scores[r][c]);
      largest = row_maximum(largest);
      if (here.column == 0 && q(r) < p.len_q) p.tile_maxima[part(j, q(r))] = largest;
    }
  }

  // m_i: the maximum over all tiles of keys.
  FLASHGEN_DEVICE float global_maximum(i32 query) const {
    float largest = -kInfinity;
    for (i32 tile = keys.begin + here.column; tile < keys.end; tile += kSide) {
      if (query < p.len_q) largest = maximum(largest, p.tile_maxima[part(tile, query)]);
    }
    return row_maximum(largest);
  }

  // P_ij = exp(S_ij - m_i), rowsum(P_ij) and P_ij V_j, for the blocks that add them up.
  FLASHGEN_DEVICE void publish_products(const Patch<cfg.tile_q, cfg.tile_kv>& scores, u8* v_place,
                                        u8* p_place) const {
    const FloatTile<cfg.tile_kv, cfg.head_dim_v> v_tile{reinterpret_cast<float*>(v_place)};
    const FloatTile<cfg.tile_q, cfg.tile_kv> p_tile{reinterpret_cast<float*>(p_place)};
    v_tile.load(p.v + sequence * p.v_batch + head / p.group * p.v_head, p.v_row, first_key, p.len_kv);
#pragma unroll
    for (i32 r = 0; r < rows; ++r) {
      const float m = global_maximum(q(r));
      float sum = 0.0f;
#pragma unroll
      for (i32 c = 0; c < cfg.tile_kv / kSide; ++c) {
        const float probability = exponential(scores[r][c], shift_of(m));
        p_tile.at(kSide * r + here.row, kSide * c + here.column) = probability;
        sum += probability;
      }
      sum = row_sum(sum);
      if (here.column == 0 && q(r) < p.len_q) p.tile_sums[part(j, q(r))] = sum;
    }
    block_sync();
    Patch<cfg.tile_q, cfg.head_dim_v> out = {};
    add_products(out, p_tile, v_tile, mask, first_q, first_key);
#pragma unroll
    for (i32 r = 0; r < rows; ++r) {
      if (q(r) >= p.len_q) continue;
      float* const to = p.tile_outputs + part(j, q(r)) * cfg.head_dim_v;
#pragma unroll
      for (i32 c = 0; c < ceil_div(cfg.head_dim_v, kSide); ++c) {
        const i32 column = kSide * c + here.column;
        if (column < cfg.head_dim_v) to[column] = out[r][c];
      }
    }
  }

  // O_i = diag(l_i)^-1 sum_j P_ij V_j, L_i = m_i + log(l_i). The blocks of the same rows share them.
  FLASHGEN_DEVICE void add_up() const {
    // Every row takes the 16 threads of a row of the square; tile j of keys begins with row 16j.
    for (i32 row = j * kSide + here.row; row < cfg.tile_q; row += blocks_of_a_row(p) * kSide) {
      const i32 query = first_q + row;
      const float m = global_maximum(query);
      if (query >= p.len_q) continue;
      float l = 0.0f;
      for (i32 tile = keys.begin; tile < keys.end; ++tile) l += p.tile_sums[part(tile, query)];
      const float normalizer = l == 0.0f ? 0.0f : 1.0f / l;
      T* const o = p.o + sequence * p.o_batch + query * p.o_row + head * p.o_head;
      for (i32 column = here.column; column < cfg.head_dim_v; column += kSide) {
        float sum = 0.0f;
        for (i32 tile = keys.begin; tile < keys.end; ++tile) {
          sum += p.tile_outputs[part(tile, query) * cfg.head_dim_v + column];
        }
        o[column] = element_from<T>(sum * normalizer);
      }
      if (here.column == 0) p.lse[number(query)] = log_sum_exp(m, l);
    }
  }
};

}  // namespace flashgen
