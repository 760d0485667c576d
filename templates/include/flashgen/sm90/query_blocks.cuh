// Which blocks of queries a tile of keys visits, for each head of the group, and which of them the mask cuts.
//
//     for_each(p, tile, thread, announce, visit)
//                                          the producer calls announce(is_attended), visit(step, message_of)
//     begin(p, tile), over(), take(read)   a consumer follows, step by step
//     is_cut(p, tile, step, strip)         whether the mask forbids some pair of the last step and 64 keys
//
// `descending`: the last block comes first. Rows beyond the last query need no mask, because L makes their
// probabilities 0, unless the score is computed by an expression.
#pragma once
#include "flashgen/sm90/key_tile.cuh"
#include "flashgen/walk.cuh"

namespace flashgen {

template <auto cfg, class Mask>
FLASHGEN_DEVICE bool is_empty_block(const Mask& mask, i32 block, i32 first_key) {
  const i32 first_q = block * cfg.tile_q, end_q = smaller(first_q + cfg.tile_q, mask.len_q);
  return mask.is_empty(first_q, end_q, first_key, first_key + cfg.tile_kv);
}
// Whether the mask allows every pair of a block and the 64 keys of a strip.
template <auto cfg, bool masks_query_end, class Mask>
FLASHGEN_DEVICE bool is_full_strip(const Mask& mask, i32 block, i32 first_key, i32 strip) {
  const i32 first_q = block * cfg.tile_q, end_q = first_q + cfg.tile_q;
  const i32 key = first_key + strip * kWarpgroupRows;
  return mask.is_full(first_q, masks_query_end ? end_q : smaller(end_q, mask.len_q), key,
                      key + kWarpgroupRows);
}

// Of a band: every block of a range, the same for each head. Producer and consumers compute it for
// themselves.
template <auto cfg, class Mask, bool masks_query_end, bool descending = false>
struct BandQueries {
  static constexpr bool has_mask = Mask::is_bounded;
  static constexpr bool sends_messages = false;
  struct Message {};

  i32 left;
  i32 member;
  Range blocks;
  i32 block;

  FLASHGEN_DEVICE static Range visited(const Mask& mask, i32 first_key) {
    return mask.query_tiles(first_key, smaller(first_key + cfg.tile_kv, mask.len_kv), cfg.tile_q);
  }

  template <class Tile, class Params, class Announce, class Visit>
  FLASHGEN_DEVICE static void for_each(const Params& p, const Tile& tile, Thread, const Announce& announce,
                                       const Visit& visit) {
    BandQueries queries;
    queries.begin(p, tile);
    announce(!queries.over());
    while (!queries.over()) visit(queries.take([] { return Message{}; }), [] { return Message{}; });
  }

  template <class Tile, class Params>
  FLASHGEN_DEVICE void begin(const Params& p, const Tile& tile) {
    blocks = visited(tile.template mask<Mask>(p, 0), tile.first_key);
    left = p.group * blocks.size();
    member = 0;
    block = descending ? blocks.end - 1 : blocks.begin;
  }
  FLASHGEN_DEVICE bool over() const { return left == 0; }
  FLASHGEN_DEVICE QueryStep take(const auto&) {
    const QueryStep step = {member, block};
    --left;
    if constexpr (descending) {
      if (--block < blocks.begin) {
        block = blocks.end - 1;
        ++member;
      }
    } else {
      if (++block == blocks.end) {
        block = blocks.begin;
        ++member;
      }
    }
    return step;
  }
  template <class Tile, class Params>
  FLASHGEN_DEVICE bool is_cut(const Params& p, const Tile& tile, QueryStep step, i32 strip) const {
    return !is_full_strip<cfg, masks_query_end>(tile.template mask<Mask>(p, step.member), step.block,
                                                tile.first_key, strip);
  }
};

// Of any other mask: the producer leaves out blocks without allowed pairs, and sends a message with each
// other block.
template <auto cfg, class Mask, bool masks_query_end, bool descending = false>
struct SparseQueries {
  static constexpr bool has_mask = true;
  static constexpr bool sends_messages = true;
  struct alignas(8) Message {
    i32 block;
    // Bit 0: it is the last one. Bit 1 + i: the mask forbids some pair of strip i. From bit kMember on: the
    // head.
    u32 facts;
  };
  static constexpr i32 kCut = 1, kMember = 8, strips = cfg.tile_kv / kWarpgroupRows;

  bool is_over;
  u32 facts;

  template <class Tile, class Params, class Announce, class Visit>
  FLASHGEN_DEVICE static void for_each(const Params& p, const Tile& tile, Thread thread,
                                       const Announce& announce, const Visit& visit) {
    // Where blocks descend, position i of the walk is block -i.
    const auto block_of = [](i32 position) { return descending ? -position : position; };
    i32 member = -1;
    Walk<true> walk(Range{0, -1});
    bool is_last = false;
    while (!is_last) {
      const QueryStep step = {member, block_of(walk.tile)};
      // Finds the next step. There is one copy of this code, because the mask is long.
      for (;;) {
        if (member >= 0) {
          const Mask mask = tile.template mask<Mask>(p, member);
          walk.advance(thread,
                       [&](i32 i) { return !is_empty_block<cfg>(mask, block_of(i), tile.first_key); });
        }
        if (!walk.over() || ++member == p.group) break;
        const Range blocks = tile.template mask<Mask>(p, member).query_tiles(
            tile.first_key, tile.first_key + cfg.tile_kv, cfg.tile_q);
        walk = Walk<true>(descending ? Range{1 - blocks.end, 1 - blocks.begin} : blocks);
      }
      is_last = member == p.group;
      if (step.member < 0) {
        announce(!is_last);
      } else {
        visit(step, [&] {
          // One lane for each strip.
          const bool is_full = is_full_strip<cfg, masks_query_end>(
              tile.template mask<Mask>(p, step.member), step.block, tile.first_key, thread.lane % strips);
          const u32 cut = warp_ballot(!is_full) & ((1u << strips) - 1);
          return Message{step.block,
                         static_cast<u32>(step.member) << kMember | cut << kCut | static_cast<u32>(is_last)};
        });
      }
    }
  }

  template <class Tile, class Params>
  FLASHGEN_DEVICE void begin(const Params&, const Tile& tile) {
    is_over = !tile.is_attended;
  }
  FLASHGEN_DEVICE bool over() const { return is_over; }
  // `read()` is the message that came with the next block.
  FLASHGEN_DEVICE QueryStep take(const auto& read) {
    const Message message = read();
    facts = message.facts;
    is_over = (facts & 1u) != 0;
    return {static_cast<i32>(facts >> kMember), message.block};
  }
  template <class Tile, class Params>
  FLASHGEN_DEVICE bool is_cut(const Params&, const Tile&, QueryStep, i32 strip) const {
    return (facts >> (kCut + strip) & 1u) != 0;
  }
};

}  // namespace flashgen
