// Adding to dQ in a fixed order, so that its sums are the same bits in every run: to each tile of queries the
// tiles of keys add in the order in which they are given out. Of each tile of queries global memory holds
// whose turn it is, as one more than the tile of keys that added last.
//
// There is no deadlock. Blocks draw the tiles of keys in order, process theirs in that order, and wait only
// for tiles of the same head that are drawn earlier. So the earliest unfinished tile waits for no other,
// however few blocks run.
//
// Waits are rare. All tiles of keys visit the queries from the last to the first. If two start together, the
// later one waits for one addition, once, and stays behind. A mask along the diagonal makes the later one
// come later anyway.
#pragma once
#include "flashgen/backward_sm90.cuh"

namespace flashgen {

// As QueryWalk, but of each member the last tile comes first.
template <class Mask, i32 tile_q>
struct DescendingQueryWalk {
  i32 k_begin, k_end;
  i32 members;
  i32 member;
  // Of tile i goes over -i.
  Walk<Mask::has_holes> tiles;

  FLASHGEN_DEVICE DescendingQueryWalk(i32 k_begin_, i32 k_end_, i32 members_)
      : k_begin(k_begin_), k_end(k_end_), members(members_), member(-1), tiles(Range{0, -1}) {}

  FLASHGEN_DEVICE bool over() const { return member >= members; }
  FLASHGEN_DEVICE Step step() const { return {member, -tiles.tile}; }

  template <class MaskOf>
  FLASHGEN_DEVICE void start(Thread thread, const MaskOf& mask_of) {
    advance(thread, mask_of);
  }
  template <class MaskOf>
  FLASHGEN_DEVICE void advance(Thread thread, const MaskOf& mask_of) {
    while (true) {
      if (member >= 0) go_on(thread, mask_of);
      if (!tiles.over() || ++member >= members) return;
      const Range range = mask_of(member).query_tiles(k_begin, k_end, tile_q);
      tiles = Walk<Mask::has_holes>(Range{1 - range.end, 1 - range.begin});
    }
  }

 private:
  template <class MaskOf>
  FLASHGEN_DEVICE void go_on(Thread thread, const MaskOf& mask_of) {
    const Mask mask = mask_of(member);
    tiles.advance(thread, [&](i32 negated) {
      const i32 first = -negated * tile_q;
      return !mask.is_empty(first, smaller(first + tile_q, mask.len_q), k_begin, k_end);
    });
  }
};

template <bool has_lower, bool has_upper, i32 tile_q>
struct DescendingQueryWalk<Band<has_lower, has_upper>, tile_q> {
  i32 k_begin, k_end;
  i32 left;
  i32 member;
  Range tiles;
  i32 tile;

  FLASHGEN_DEVICE DescendingQueryWalk(i32 k_begin_, i32 k_end_, i32 members_)
      : k_begin(k_begin_), k_end(k_end_), left(members_), member(0) {}

  FLASHGEN_DEVICE bool over() const { return left == 0; }
  FLASHGEN_DEVICE Step step() const { return {member, tile}; }

  template <class MaskOf>
  FLASHGEN_DEVICE void start(Thread /*thread*/, const MaskOf& mask_of) {
    tiles = mask_of(0).query_tiles(k_begin, k_end, tile_q);
    left *= tiles.size();
    tile = tiles.end - 1;
  }
  template <class MaskOf>
  FLASHGEN_DEVICE void advance(Thread /*thread*/, const MaskOf& /*mask_of*/) {
    --left;
    if (--tile < tiles.begin) {
      tile = tiles.end - 1;
      ++member;
    }
  }
};

// In which order the tiles of keys of a head are given out, and add: groups of tiles from the first to the
// last, and every other group, the first one among them, from its last to its first. Where a mask makes the
// first tiles the longest, of those that work on a head at the same time each then comes a few steps behind
// the one before: they take longer and longer to be done, and then less and less.
template <i32 group>
struct AddingOrder {
  FLASHGEN_DEVICE static bool is_upwards(i32 tile) { return tile / group % 2 != 0; }
  FLASHGEN_DEVICE static i32 tile(i32 turn, i32 tiles) {
    const i32 first = turn / group * group;
    return is_upwards(turn) ? turn : first + smaller(first + group, tiles) - 1 - turn;
  }
  // The one before, if there is such a tile and it adds, too; else it is the last one of the group before.
  FLASHGEN_DEVICE static i32 before(i32 key_tile) {
    const bool is_first = key_tile % group == (is_upwards(key_tile) ? 0 : group - 1);
    return is_first ? before_group(key_tile) : is_upwards(key_tile) ? key_tile - 1 : key_tile + 1;
  }
  // The last one of the group before, which goes the other way.
  FLASHGEN_DEVICE static i32 before_group(i32 key_tile) {
    const i32 first = key_tile / group * group;
    return is_upwards(key_tile) ? first - group : first - 1;
  }
  // One more than the last one to add where the tiles that do begin with the first and end at `end`.
  FLASHGEN_DEVICE static i32 last_turn(i32 end) {
    return end == 0 || is_upwards(end - 1) ? end : (end - 1) / group * group + 1;
  }
};
// Without groups, from the first to the last.
template <>
struct AddingOrder<0> {
  FLASHGEN_DEVICE static i32 tile(i32 turn, i32 /*tiles*/) { return turn; }
  // The one before a tile of keys, which may be none: -1.
  FLASHGEN_DEVICE static i32 before(i32 key_tile) { return key_tile - 1; }
  FLASHGEN_DEVICE static i32 before_group(i32 /*key_tile*/) { return -1; }
  // One more than the last one to add where the tiles that do end at `end`.
  FLASHGEN_DEVICE static i32 last_turn(i32 end) { return end; }
};

// Whether a tile of keys adds to a tile of queries, by the rule that walks use.
template <BackwardSm90Config cfg, class Mask>
FLASHGEN_DEVICE bool adds(const Mask& mask, i32 query_tile, i32 key_tile) {
  const i32 first_q = query_tile * cfg.tile_q, first_key = key_tile * cfg.tile_kv;
  const i32 end_key =
      Mask::has_holes ? first_key + cfg.tile_kv : smaller(first_key + cfg.tile_kv, mask.len_kv);
  bool is_visited = mask.query_tiles(first_key, end_key, cfg.tile_q).has(query_tile);
  if constexpr (Mask::has_holes) {
    const i32 end_q = smaller(first_q + cfg.tile_q, mask.len_q);
    is_visited = is_visited && !mask.is_empty(first_q, end_q, first_key, end_key);
  }
  return is_visited;
}

// One more than the last tile of keys before `end` that adds to a tile of queries; 0 if there is none. All
// lanes of a warp call, and get the same.
template <BackwardSm90Config cfg, class Mask>
FLASHGEN_DEVICE i32 end_of_adding(const Mask& mask, i32 query_tile, i32 end, Thread thread) {
  for (i32 left = end; left > 0; left -= kWarpSize) {
    const i32 earlier = left - 1 - thread.lane;
    const u32 found = warp_ballot(earlier >= 0 && adds<cfg>(mask, query_tile, earlier));
    if (found != 0) return left - lowest_bit(found);
  }
  return 0;
}

// The value of `dq_semaphore` at which a tile of keys may add to a tile of queries: one more than the
// previous tile of keys that adds there, or 0 if there is none. All lanes of a warp call this and get the
// same value.
template <BackwardSm90Config cfg, class Mask>
FLASHGEN_DEVICE u32 awaited_turn(const Mask& mask, i32 query_tile, i32 key_tile, Thread thread) {
  static_assert(cfg.order_group == 0 || (cfg.has_upper && !cfg.has_lower && !Mask::has_holes),
                "in groups, all tiles of keys before one add where it does");
  if constexpr (Mask::has_holes) {
    return static_cast<u32>(end_of_adding<cfg>(mask, query_tile, key_tile, thread));
  } else {
    // Those that add to a tile of queries follow one another in their order.
    const auto does = [&](i32 tile) {
      return tile >= 0 && tile * cfg.tile_kv < mask.len_kv && adds<cfg>(mask, query_tile, tile);
    };
    using Order = AddingOrder<cfg.order_group>;
    const i32 before = Order::before(key_tile);
    return static_cast<u32>((does(before) ? before : Order::before_group(key_tile)) + 1);
  }
}

// The value of `dq_semaphore` when all of `tiles` tiles of keys have added; 0 if none does.
template <BackwardSm90Config cfg, class Mask>
FLASHGEN_DEVICE u32 last_turn(const Mask& mask, i32 query_tile, i32 tiles, Thread thread) {
  const i32 end = end_of_adding<cfg>(mask, query_tile, tiles, thread);
  return static_cast<u32>(AddingOrder<cfg.order_group>::last_turn(end));
}

// Waits until the semaphore has the value `turn`. Bulk additions that this thread issues afterwards are
// ordered after those of the previous tiles of keys.
FLASHGEN_DEVICE void wait_for_turn(const u32* semaphore, u32 turn) {
  while (load_acquire(semaphore) != turn) {
  }
  fence_proxy_async_global();
}

// Issues a bulk addition of a consumer's share of a tile of dQ, or a bulk store if it is the first. The
// shares of all warps begin at `out`, in the layout of the sum, with gaps where a consumer has fewer columns.
template <class Shape>
FLASHGEN_DEVICE void add_share(float* sum, u32 out, i32 consumer, bool is_first) {
  using Share = typename Shape::Share;
  const auto add = [&](i32 warp, i32 warps) {
    float* const to = sum + Share::warp_begin(warp);
    const u32 from = out + static_cast<u32>(warp * Shape::out_bytes);
    const u32 bytes = static_cast<u32>(warps * Share::warp_floats(consumer) * 4);
    if (is_first) {
      bulk_store(to, from, bytes);
    } else {
      bulk_reduce_add(to, from, bytes);
    }
  };
  if constexpr (Share::tile_floats * 4 == static_cast<i32>(Shape::consumer_warps) * Shape::out_bytes) {
    add(4 * consumer, 4);
  } else {
#pragma unroll 1
    for (i32 warp = 4 * consumer; warp < 4 * consumer + 4; ++warp) add(warp, 1);
  }
}

}  // namespace flashgen
