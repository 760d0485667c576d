// Which sequence a tile belongs to, where sequences have their own lengths.
//
// Tile numbers go through one sequence after another. Long sequences come first, by classes: a class has the
// sequences with more than n / 2 and at most n tiles for each head, and the next class halves n. Only the
// device knows the lengths. So a warp counts tiles of 32 sequences at a time, one in each lane, and continues
// there for later numbers.
#pragma once
#include "flashgen/primitives_sm90.cuh"

namespace flashgen {

struct SequenceSearch {
  // The current 32 sequences: the class times the groups of a class, plus the group. And the number of tiles
  // before them.
  i32 group = 0;
  i32 tiles_before = 0;

  // A sequence, its tiles of each head, and the tile's number within the sequence.
  struct Found {
    bool exists;
    i32 sequence;
    i32 tiles_of_head;
    i32 number;
  };

  // `tiles_of(sequence)` are its tiles of each head, at most `longest`. All lanes of a warp call.
  FLASHGEN_DEVICE Found find(i32 number, i32 sequences, i32 heads, i32 longest, Thread thread,
                             const auto& tiles_of) {
    const i32 groups = ceil_div(sequences, kWarpSize);
    // The tile may lie before the current sequences.
    if (number < tiles_before) group = tiles_before = 0;
    for (; longest >> (group / groups) != 0; ++group) {
      // Sequences of this class have at most this many tiles for each head, and more than half as many.
      const i32 most = longest >> (group / groups), first = group % groups * kWarpSize,
                own = first + thread.lane;
      i32 tiles = own < sequences ? tiles_of(own) : 0;
      if (tiles > most || tiles <= most / 2) tiles = 0;
      i32 end = tiles * heads;
#pragma unroll
      for (i32 distance = 1; distance < kWarpSize; distance *= 2) {
        const i32 other = shuffle(end, (thread.lane - distance) & 31);
        if (thread.lane >= distance) end += other;
      }
      const u32 later = warp_ballot(number < tiles_before + end);
      if (later != 0) {
        const i32 lane = lowest_bit(later), tiles_of_head = shuffle(tiles, lane);
        return {true, first + lane, tiles_of_head,
                number - tiles_before - shuffle(end, lane) + tiles_of_head * heads};
      }
      tiles_before += shuffle(end, kWarpSize - 1);
    }
    return {};
  }
};

}  // namespace flashgen
