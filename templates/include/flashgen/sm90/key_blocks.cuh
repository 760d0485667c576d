// Which blocks of keys a tile of queries visits, and which of them the mask cuts: it allows only some of
// their pairs. The Blocks policy of the mainloop.
//
// The producer calls for_each(p, tile, thread, visit), which calls visit(block, left, message) for each block
// in order. `left` is how many blocks follow, as far as that is known: at least 1 if some do.
//
// A consumer follows with begin() and advance(). Given consumer_blocks(p, tile, consumer), forbids_all() says
// that the mask allows no pair of the block to the consumer's 64 rows, and needs_mask() that it does not
// allow all.
#pragma once
#include "flashgen/sm90/forward_config.cuh"
#include "flashgen/walk.cuh"

namespace flashgen {

// The blocks from the first to the last that some query of the tile may attend to. At least one, because a
// tile without allowed pairs also stores results.
template <ForwardSm90Config cfg>
FLASHGEN_DEVICE Range visited_blocks(const auto& mask, const auto& p, const auto& tile) {
  const i32 end_q = smaller(tile.first_q + cfg.tile_q, tile.len_q(p));
  if (end_q <= tile.first_q) return {0, 1};
  const Range blocks = mask.key_tiles(tile.first_q, end_q, cfg.tile_kv);
  return {blocks.begin, larger(blocks.begin + 1, blocks.end)};
}

// A band visits every block of a range, from the last to the first. Producer and consumers each compute it.
template <ForwardSm90Config cfg, class Mask>
struct BandBlocks {
  static constexpr bool has_mask = Mask::is_bounded;
  static constexpr bool sends_messages = false;
  struct Message {};

  i32 block;
  i32 first_block;

  FLASHGEN_DEVICE static Range visited(const auto& p, const auto& tile) {
    return visited_blocks<cfg>(tile.template mask<Mask>(p), p, tile);
  }

  FLASHGEN_DEVICE static void for_each(const auto& p, const auto& tile, Thread, const auto& visit) {
    const Range blocks = visited(p, tile);
#pragma unroll 1
    for (i32 block = blocks.end - 1; block >= blocks.begin; --block)
      visit(block, block - blocks.begin, Message{});
  }

  FLASHGEN_DEVICE void begin(const auto& p, const auto& tile, const auto&) {
    const Range blocks = visited(p, tile);
    block = blocks.end - 1;
    first_block = blocks.begin;
  }
  FLASHGEN_DEVICE void advance(const auto&) { --block; }

  FLASHGEN_DEVICE bool is_last() const { return block == first_block; }

  // The blocks with some allowed pair of a consumer's rows, and those where all pairs are allowed. Rows
  // beyond the last query do not count, because their results are never stored.
  struct ConsumerBlocks {
    Range some, all;
  };
  FLASHGEN_DEVICE static ConsumerBlocks consumer_blocks(const auto& p, const auto& tile, i32 consumer) {
    const i32 first_q = tile.first_q + consumer * kWarpgroupRows,
              end_q = smaller(first_q + kWarpgroupRows, tile.len_q(p));
    if (end_q <= first_q) return {};
    const Mask mask = tile.template mask<Mask>(p);
    return {mask.key_tiles(first_q, end_q, cfg.tile_kv), mask.full_key_tiles(first_q, end_q, cfg.tile_kv)};
  }
  FLASHGEN_DEVICE bool forbids_all(const ConsumerBlocks& blocks) const { return !blocks.some.has(block); }
  FLASHGEN_DEVICE bool needs_mask(const ConsumerBlocks& blocks) const { return !blocks.all.has(block); }
  // The same for one block of any tile. It takes fewer registers than consumer_blocks().
  FLASHGEN_DEVICE bool needs_mask(const auto& p, const auto& tile, i32 consumer) const {
    const i32 first_q = tile.first_q + consumer * kWarpgroupRows, first_key = block * cfg.tile_kv;
    return !tile.template mask<Mask>(p).is_full(first_q, smaller(first_q + kWarpgroupRows, tile.len_q(p)),
                                                first_key, first_key + cfg.tile_kv);
  }
};

// For any other mask the producer skips blocks without allowed pairs, and sends a message with each block
// that it visits.
template <ForwardSm90Config cfg, class Mask>
struct SparseBlocks {
  static constexpr bool has_mask = true;
  static constexpr bool sends_messages = true;
  struct alignas(8) Message {
    i32 block;
    // Bit 0: the last block of the tile. For consumer i, bit 1 + i: the mask allows every pair; bit 8 + i:
    // none.
    u32 flags;
  };
  static constexpr i32 kFull = 1, kEmpty = 8;

  i32 block;
  u32 flags;

  FLASHGEN_DEVICE static void for_each(const auto& p, const auto& tile, Thread thread, const auto& visit) {
    const Mask mask = tile.template mask<Mask>(p);
    const i32 len_q = tile.len_q(p);
    const Range blocks = visited_blocks<cfg>(mask, p, tile);
    // Lane i prepares what the mask needs of consumer i's rows. Then each lane tests one of 32 blocks for all
    // consumers.
    const i32 first_q = tile.first_q + smaller(thread.lane, cfg.consumers - 1) * kWarpgroupRows;
    const auto queries =
        mask.queries_in(first_q, larger(first_q + 1, smaller(first_q + kWarpgroupRows, len_q)));
    u32 found = 0;
    const auto is_visited = [&](i32 block) {
      const auto keys = mask.keys_in(block * cfg.tile_kv, (block + 1) * cfg.tile_kv);
      found = 0;
      bool visited = false;
#pragma unroll 1
      for (i32 i = 0; i < cfg.consumers; ++i) {
        const auto rows = queries.of_lane(i);
        const bool is_empty = mask.is_empty(rows, keys);
        found |= static_cast<u32>(mask.is_full(rows, keys)) << (kFull + i) | static_cast<u32>(is_empty)
                                                                                 << (kEmpty + i);
        visited |= !is_empty;
      }
      return visited;
    };
    const auto flags_of = [&](i32 lane) { return static_cast<u32>(shuffle(static_cast<i32>(found), lane)); };
    Walk<true> walk(blocks);
    walk.advance(thread, is_visited);
    i32 block = walk.over() ? blocks.begin : walk.tile;
    u32 flags = walk.over() ? ~0u << kEmpty : flags_of(walk.lane());
    for (bool is_last = false; !is_last;) {
      if (!walk.over()) walk.advance(thread, is_visited);
      is_last = walk.over();
      visit(block, is_last ? 0 : 1 + walk.following(), Message{block, flags | static_cast<u32>(is_last)});
      block = walk.tile;
      flags = flags_of(walk.lane());
    }
  }

  // `read()` is the message that came with the next block.
  FLASHGEN_DEVICE void begin(const auto&, const auto&, const auto& read) { advance(read); }
  FLASHGEN_DEVICE void advance(const auto& read) {
    const Message message = read();
    block = message.block;
    flags = message.flags;
  }

  FLASHGEN_DEVICE bool is_last() const { return (flags & 1u) != 0; }

  struct ConsumerBlocks {
    i32 consumer;
  };
  FLASHGEN_DEVICE static ConsumerBlocks consumer_blocks(const auto&, const auto&, i32 consumer) {
    return {consumer};
  }
  FLASHGEN_DEVICE bool forbids_all(const ConsumerBlocks& blocks) const {
    return (flags >> (kEmpty + blocks.consumer) & 1u) != 0;
  }
  FLASHGEN_DEVICE bool needs_mask(const ConsumerBlocks& blocks) const {
    return (flags >> (kFull + blocks.consumer) & 1u) == 0;
  }
  FLASHGEN_DEVICE bool needs_mask(const auto&, const auto&, i32 consumer) const {
    return needs_mask(ConsumerBlocks{consumer});
  }
};

}  // namespace flashgen
