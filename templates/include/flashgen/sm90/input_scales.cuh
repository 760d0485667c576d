// What queries, keys and values are multiplied by: the Scales policy of the mainloop.
#pragma once
#include "flashgen/scales.cuh"
#include "flashgen/sequence.cuh"

namespace flashgen {

// 16-bit inputs have no scales.
struct NoScales {
  struct Factors {
    static constexpr float logits = 1.0f;
    static constexpr float values = 1.0f;
  };
  static constexpr bool differ_by_block = false;

  FLASHGEN_DEVICE static Factors of(const auto&, const auto&, i32, i32) { return {}; }
  FLASHGEN_DEVICE static float of_out(const auto&, const auto&) { return 1.0f; }
};

// Scales of 8-bit inputs: `block` neighboring rows of a head share one; 0: all of them.
template <i32 block>
struct InputScales {
  // What products of queries and keys are multiplied by, and what values are.
  struct Factors {
    float logits;
    float values;
  };
  // Whether factors are not the same for all blocks of a tile.
  static constexpr bool differ_by_block = true;

  // The factors of a tile's queries from `q` on and the keys from `key` on.
  template <class Params, class Tile>
  FLASHGEN_DEVICE static Factors of(const Params& p, const Tile& tile, i32 q, i32 key) {
    // Beyond the last row there may be no scale.
    if (q >= tile.len_q(p) || key >= tile.len_kv(p)) return {1.0f, 1.0f};
    i32 q_block = q / block, key_block = key / block;
    if constexpr (!Tile::ends_with_tensor) {
      // Each packed sequence begins a block.
      q_block += first_tile_of(tile.rows.first_q, tile.sequence, block);
      key_block += first_tile_of(tile.rows.first_key, tile.sequence, block);
    }
    const float of_q =
        input_scale(p.q_scale, tile.sequence * p.q_scale_batch + tile.head * p.q_scale_head + q_block);
    const float of_k =
        input_scale(p.k_scale, tile.sequence * p.k_scale_batch + tile.head_kv * p.k_scale_head + key_block);
    const float of_v =
        input_scale(p.v_scale, tile.sequence * p.v_scale_batch + tile.head_kv * p.v_scale_head + key_block);
    return {logit_factor(of_q, of_k), of_v};
  }
  // What O is multiplied by at the end.
  FLASHGEN_DEVICE static float of_out(const auto& p, const auto&) { return p.v_factor; }
};
template <>
struct InputScales<0> {
  struct Factors {
    float logits;
    static constexpr float values = 1.0f;
  };
  static constexpr bool differ_by_block = false;

  FLASHGEN_DEVICE static Factors of(const auto& p, const auto& tile, i32, i32) {
    return {logit_factor(
        input_scale(p.q_scale, tile.sequence * p.q_scale_batch + tile.head * p.q_scale_head),
        input_scale(p.k_scale, tile.sequence * p.k_scale_batch + tile.head_kv * p.k_scale_head))};
  }
  FLASHGEN_DEVICE static float of_out(const auto& p, const auto& tile) {
    return p.v_factor *
           input_scale(p.v_scale, tile.sequence * p.v_scale_batch + tile.head_kv * p.v_scale_head);
  }
};

// Scales of an e4m3 cache, and of the queries that attend to it.
struct CacheScales {
  struct Factors {
    float logits;
    static constexpr float values = 1.0f;
  };
  static constexpr bool differ_by_block = false;

  FLASHGEN_DEVICE static Factors of(const auto& p, const auto& tile, i32, i32) {
    return {logit_factor(
        query_scale(p, tile.sequence, tile.head, tile.head_kv),
        input_scale(p.k_scale, tile.sequence * p.k_scale_batch + tile.head_kv * p.k_scale_head))};
  }
  FLASHGEN_DEVICE static float of_out(const auto& p, const auto& tile) {
    return input_scale(p.v_scale, tile.sequence * p.v_scale_batch + tile.head_kv * p.v_scale_head);
  }
};

}  // namespace flashgen
