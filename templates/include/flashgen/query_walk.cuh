// The loop over the tiles of queries of a group of heads, for kernels whose block keeps one tile of keys.
#pragma once
#include "flashgen/walk.cuh"

namespace flashgen {

// A step of the loop: a tile of queries of one head of the group.
struct Step {
  i32 member;
  i32 tile;
};

// Visits, for each head of the group, the tiles with a query that may attend to a key of [k_begin, k_end).
// `mask_of(member)` is the mask of a head of the group.
template <class Mask, i32 tile_q>
struct QueryWalk {
  i32 k_begin, k_end;
  i32 members;
  i32 member;
  Walk<Mask::has_holes> tiles;

  FLASHGEN_DEVICE QueryWalk(i32 k_begin_, i32 k_end_, i32 members_)
      : k_begin(k_begin_), k_end(k_end_), members(members_), member(-1), tiles(Range{0, -1}) {}

  FLASHGEN_DEVICE bool over() const { return member >= members; }
  FLASHGEN_DEVICE Step step() const { return {member, tiles.tile}; }

  FLASHGEN_DEVICE void start(Thread thread, const auto& mask_of) { advance(thread, mask_of); }
  template <class MaskOf>
  FLASHGEN_DEVICE void advance(Thread thread, const MaskOf& mask_of) {
    // A loop, so that the code that evaluates the mask is inlined only once.
    while (true) {
      if (member >= 0) advance_within_head(thread, mask_of);
      if (!tiles.over() || ++member >= members) return;
      tiles = Walk<Mask::has_holes>(mask_of(member).query_tiles(k_begin, k_end, tile_q));
    }
  }

 private:
  FLASHGEN_DEVICE void advance_within_head(Thread thread, const auto& mask_of) {
    const Mask mask = mask_of(member);
    tiles.advance(thread, [&](i32 tile) {
      return !mask.is_empty(tile * tile_q, smaller((tile + 1) * tile_q, mask.len_q), k_begin, k_end);
    });
  }
};

// A band is the same for every head, and its tiles are consecutive, so two counters suffice.
template <bool has_lower, bool has_upper, i32 tile_q>
struct QueryWalk<Band<has_lower, has_upper>, tile_q> {
  i32 k_begin, k_end;
  i32 left;
  i32 member;
  Range tiles;
  i32 tile;

  FLASHGEN_DEVICE QueryWalk(i32 k_begin_, i32 k_end_, i32 members_)
      : k_begin(k_begin_), k_end(k_end_), left(members_), member(0) {}

  FLASHGEN_DEVICE bool over() const { return left == 0; }
  FLASHGEN_DEVICE Step step() const { return {member, tile}; }

  FLASHGEN_DEVICE void start(Thread /*thread*/, const auto& mask_of) {
    tiles = mask_of(0).query_tiles(k_begin, k_end, tile_q);
    left *= tiles.size();
    tile = tiles.begin;
  }
  template <class MaskOf>
  FLASHGEN_DEVICE void advance(Thread /*thread*/, const MaskOf& /*mask_of*/) {
    --left;
    if (++tile == tiles.end) {
      tile = tiles.begin;
      ++member;
    }
  }
};

}  // namespace flashgen
