// Results of a part of the keys: O without its normalizer, and for each row the reference maximum and the sum
// of exponentials. They are merged exactly, whatever the size of the logits.
#pragma once
#include "flashgen/decode/rows.cuh"
#include "flashgen/decode/team.cuh"
#include "flashgen/primitives_sm90.cuh"

namespace flashgen {

// The factor taken out of a row's exponentials, and their sum.
struct RowTotal {
  float reference_max;
  float sum;
};

// The weight of a part of a row whose parts have the common reference maximum `most`.
template <class Logits>
FLASHGEN_DEVICE float weight_of_part(const Logits& logits, float reference_max, float most) {
  return exp2_approx(logits.powers(reference_max - (most == -kInfinity ? 0.0f : most)));
}

// Partial results in the workspace. A slot holds those of one part of an item: for each eight columns a small
// matrix of the item's rows, so that the lanes of a warp access neighboring addresses and rows that do not
// exist take no room.
template <i32 blocks>
struct Partials {
  float* out;
  RowTotal* totals;
  i32 rows;

  template <class Params>
  FLASHGEN_DEVICE static Partials of(const Params& p) {
    return {p.o_partial, reinterpret_cast<RowTotal*>(p.row_partial), p.slot_rows};
  }
  // Two columns of block `n`, from `column` on.
  FLASHGEN_DEVICE float* pair(i32 slot, i32 n, i32 row, i32 column) const {
    return out + ((static_cast<i64>(slot) * blocks + n) * rows + row) * 8 + column;
  }
  FLASHGEN_DEVICE RowTotal& total(i32 slot, i32 row) const {
    return totals[static_cast<i64>(slot) * rows + row];
  }
};

struct alignas(8) FloatPair {
  float values[2];
};

// The slots of an item's parts, in the order of its keys. With parts of fixed sizes each has a slot of its
// own. Otherwise each block has two: for an item that a block before it has begun, and for one that it begins
// itself.
struct PartSlots {
  Team team;
  bool is_fixed;
  i32 count;
  // The item's first unit among those of all items, and the block that begins it.
  i32 first_unit;
  i32 first_block;

  FLASHGEN_DEVICE i32 operator()(i32 part) const {
    if (is_fixed) return team.member(first_unit + part);
    return team.member(part == 0 ? 2 * first_block + 1 : 2 * (first_block + part));
  }
};

// Whether this block is the last of `blocks` to arrive at a counter, which it then resets for the next
// launch. All threads that compute call. Those of the last block see what all blocks wrote before they
// arrived.
template <DecodeConfig cfg>
FLASHGEN_DEVICE bool arrives_last(u32* counter, u32 blocks, u32& shared, Thread thread) {
  consumers_sync<cfg>();
  if (thread.index() == 0) {
    const bool is_last = atomic_add_release(counter, 1u) + 1 == blocks;
    if (is_last) {
      load_acquire(counter);
      store_release(counter, 0u);
    }
    shared = is_last;
  }
  consumers_sync<cfg>();
  return shared != 0;
}

}  // namespace flashgen
