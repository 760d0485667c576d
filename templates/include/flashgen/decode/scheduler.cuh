// Which tiles of keys a thread block works on. The host fixes only the number of thread blocks. On the device
// each thread block counts the work of all sequences from their real lengths, and takes an equal share of it:
// a run of consecutive units, of one item after another. So ragged batches balance, and a graph can be
// replayed with other lengths.
//
// A unit is a tile of keys, or, with `part_tiles`, that many. Then an item is always cut at the same keys,
// whatever else is in the batch, and its result has the same bits.
//
// Units are ordered by key/value head, then by sequence, so one thread block does not get all heads of a
// short sequence. Each item also has a fixed cost: loading Q, and storing or merging results. It counts as
// `item_tiles` extra units.
//
// Units are shared out to teams of thread blocks (team.cuh). The thread blocks of a team have the same units,
// for other tiles of rows. "Thread block" below is a team where there are any.
#pragma once
#include "flashgen/decode/rows.cuh"
#include "flashgen/decode/team.cuh"

namespace flashgen {

// Extra units that stand for an item's fixed cost.
template <DecodeConfig cfg, class Params>
FLASHGEN_DEVICE i32 extra_units(const Params& p) {
  return p.part_tiles == 0 ? cfg.item_tiles : 0;
}

// How many units a thread block gets at least, where an item has `rows` rows and `tiles` tiles of keys. Parts
// of n tiles take n to compute side by side, and tiles / n parts are merged one after another. The sum is
// least where both take equally long. If an item cut so takes no less than a whole one, it stays whole.
template <DecodeConfig cfg>
FLASHGEN_DEVICE i32 min_units(i32 tiles, i32 rows) {
  const i32 row_groups = ceil_div(rows, kMergedRows);
  i32 part = 1;
  while (part * part * cfg.merged_parts < tiles * row_groups) ++part;
  const i32 merge = tiles * row_groups / (part * cfg.merged_parts);
  return part + merge + cfg.item_tiles < tiles ? part : larger(tiles, 1) + cfg.item_tiles;
}

// The work of one sequence for each key/value head: items of equal length, one for each tile of rows.
struct SequenceWork {
  CachedSequence cached;
  Range tiles;
  // Units of an item, and what all items count as.
  i32 units;
  i32 all_units;

  template <DecodeConfig cfg, class Mask, class Params>
  FLASHGEN_DEVICE static SequenceWork of(const Params& p, i32 sequence) {
    const CachedSequence cached = CachedSequence::of(p, sequence);
    Range tiles = {0, ceil_div(cached.len_kv, cfg.tile_kv)};
    if constexpr (!cfg.varies_by_head)
      tiles = mask_of<Mask>(p, cached, sequence, 0).key_tiles(0, cached.len_q, cfg.tile_kv);
    tiles.end = larger(tiles.end, tiles.begin + 1);
    const i32 row_tiles = Team::rounds(p, ceil_div(cached.len_q * p.group, cfg.tile_q));
    const i32 units = p.part_tiles == 0 ? tiles.size() : ceil_div(tiles.size(), p.part_tiles);
    return {cached, tiles, units, (units + extra_units<cfg>(p)) * row_tiles};
  }

  template <DecodeConfig cfg, class Params>
  FLASHGEN_DEVICE DecodeItem item(const Params& p, i32 sequence, i32 head_kv, i32 row_tile) const {
    const i32 first_row = Team::of(p).strided(row_tile) * cfg.tile_q;
    return {cached, sequence, head_kv, first_row, smaller(cfg.tile_q, cached.len_q * p.group - first_row),
            tiles};
  }
};

// How the units of all items are shared out.
struct alignas(16) WorkPartition {
  i64 units;
  i64 blocks;

  FLASHGEN_DEVICE i32 begin(i32 block) const {
    return static_cast<i32>(smaller_of(block, blocks) * units / blocks);
  }
  // The thread block that owns a unit.
  FLASHGEN_DEVICE i32 owner(i32 unit) const {
    return static_cast<i32>(((unit + i64{1}) * blocks - 1) / units);
  }

 private:
  FLASHGEN_DEVICE static i64 smaller_of(i64 a, i64 b) { return a < b ? a : b; }
};

// What a thread block computes next: the units from `begin` to `end` of an item. Among those of all items,
// the item's first unit is number `first_unit`.
struct alignas(16) Assignment {
  bool exists;
  DecodeItem item;
  i32 units;
  i32 begin;
  i32 end;
  i32 first_unit;
};

// Where a thread block is in its work. `at` and `end` are numbers of units of all items. The other fields
// name the same place: `unit` counts those of one head of one sequence.
struct WorkCursor {
  i32 at;
  i32 end;
  i32 head_kv;
  i32 sequence;
  i32 unit;

  // Assigns the next units.
  template <DecodeConfig cfg, class Mask, class Params>
  FLASHGEN_DEVICE void advance(const Params& p, Assignment& next) {
    const i32 extra = extra_units<cfg>(p);
    while (at < end) {
      SequenceWork work = SequenceWork::of<cfg, Mask>(p, sequence);
      while (unit >= work.all_units) {
        unit -= work.all_units;
        if (++sequence == p.batch) {
          sequence = 0;
          ++head_kv;
        }
        work = SequenceWork::of<cfg, Mask>(p, sequence);
      }
      const i32 of_item = extra + work.units, row_tile = unit / of_item, begin = unit - row_tile * of_item;
      const i32 count = smaller(of_item - begin, end - at), first_unit = at - begin + extra;
      at += count;
      unit += count;
      // Only extra units of this item are left, so the next thread block starts the item.
      if (begin + count <= extra) continue;
      next = {true,
              work.item<cfg>(p, sequence, head_kv, row_tile),
              work.units,
              larger(begin - extra, 0),
              begin + count - extra,
              first_unit};
      // The last tiles of rows may be fewer than the thread blocks of a team.
      if constexpr (requires { p.team; }) {
        if (next.item.rows <= 0) continue;
      }
      return;
    }
    next.exists = false;
  }
};

// The scheduler of a thread block. It lives in shared memory, because no registers are left for it, and one
// thread runs it.
template <DecodeConfig cfg, class Mask>
struct DecodeScheduler {
  static constexpr i32 threads = cfg.warps * kWarpSize;
  i32 warp_units[cfg.warps];
  WorkPartition work;
  // The first is for the warps that compute. Each producer has its own, because it may be at a later item.
  WorkCursor cursors[1 + cfg.producers];
  // Where there are producers, the warps that compute use the first two in turns.
  Assignment assignments[cfg.producers == 0 ? 1 : 2 + cfg.producers];

  // All threads that compute call. Each counts the units of consecutive sequences.
  template <class Params>
  FLASHGEN_DEVICE void init(const Params& p, Thread thread) {
    const i32 each = ceil_div(p.batch, threads), first = smaller(thread.index() * each, p.batch);
    const i32 last = smaller(first + each, p.batch);
    i32 own = 0;
#pragma unroll 4
    for (i32 i = first; i < last; ++i) own += SequenceWork::of<cfg, Mask>(p, i).all_units;
    // A prefix sum over the threads.
    i32 before = own;
#pragma unroll
    for (i32 distance = 1; distance < kWarpSize; distance *= 2) {
      const i32 other = shuffle(before, (thread.lane - distance) & 31);
      if (thread.lane >= distance) before += other;
    }
    if (thread.lane == kWarpSize - 1) warp_units[thread.warp] = before;
    consumers_sync<cfg>();
    i32 of_head = 0;
#pragma unroll
    for (i32 w = 0; w < cfg.warps; ++w) {
      if (w < thread.warp) before += warp_units[w];
      of_head += warp_units[w];
    }
    before -= own;
    const i32 all = of_head * p.heads_kv;
    const i32 rows = p.len_q * p.group, row_tiles = Team::rounds(p, ceil_div(rows, cfg.tile_q));
    const i32 tiles = all / (p.batch * p.heads_kv * row_tiles) - cfg.item_tiles;
    const i32 block_units = p.part_tiles == 0 ? min_units<cfg>(tiles, smaller(rows, cfg.tile_q)) : 1;
    const Team team = Team::of(p);
    const WorkPartition partition = {larger(all, 1), larger(1, smaller(all / block_units, team.count()))};
    const i32 begin = partition.begin(team.index());
    const i32 head_kv = begin / larger(of_head, 1), begin_of_head = begin - head_kv * of_head;
    if (thread.index() == 0) {
      work = partition;
      for (WorkCursor& cursor : cursors) {
        cursor.at = begin;
        cursor.end = smaller(all, partition.begin(team.index() + 1));
      }
    }
    if (before <= begin_of_head && begin_of_head < before + own) {
      // The thread block's work begins among this thread's sequences.
      for (WorkCursor& cursor : cursors) {
        cursor.head_kv = head_kv;
        cursor.sequence = first;
        cursor.unit = begin_of_head - before;
      }
    }
  }

  // The next assignment. All threads that compute call this, once they are done with the current one.
  template <class Params>
  FLASHGEN_DEVICE const Assignment& next(const Params& p, Thread thread) {
    consumers_sync<cfg>();
    if (thread.index() == 0) cursors[0].template advance<cfg, Mask>(p, assignments[0]);
    consumers_sync<cfg>();
    return assignments[0];
  }

  // Fetches the next assignment while the warps compute the current one. The barrier at the top of their loop
  // publishes it.
  template <class Params>
  FLASHGEN_DEVICE void fetch(const Params& p, i32 turn, Thread thread) {
    if (thread.index() == threads - 1) cursors[0].template advance<cfg, Mask>(p, assignments[turn]);
  }

  // The next assignment of a producer, which calls with all its lanes.
  template <class Params>
  FLASHGEN_DEVICE const Assignment& next_to_copy(const Params& p, i32 producer, Thread thread) {
    warp_sync();
    if (thread.lane == 0) cursors[1 + producer].template advance<cfg, Mask>(p, assignments[2 + producer]);
    warp_sync();
    return assignments[2 + producer];
  }
};

}  // namespace flashgen
