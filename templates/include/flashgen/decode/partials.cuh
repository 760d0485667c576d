// Results of a part of the keys: O without its normalizer, and for each row the reference maximum and the sum
// of exponentials. They are merged exactly, whatever the size of the logits.
#pragma once
#include "flashgen/decode/rows.cuh"
#include "flashgen/decode/team.cuh"
#include "flashgen/primitives_sm90.cuh"

namespace flashgen {

// The factor taken out of a row's exponentials, and their sum.
struct alignas(8) RowTotal {
  float reference_max;
  float sum;
};

// The weight of a part of a row whose parts have the common reference maximum `row_max`.
template <class Logits>
FLASHGEN_DEVICE float weight_of_part(const Logits& logits, float reference_max, float row_max) {
  return exp2_approx(logits.powers(reference_max - (row_max == -kInfinity ? 0.0f : row_max)));
}

// Partial results in the workspace, those of one part of an item after another: for each eight columns a
// small matrix of the item's rows, so that the lanes of a warp access neighboring addresses and rows that do
// not exist take no room.
template <i32 blocks>
struct Partials {
  float* out;
  RowTotal* totals;
  i32 rows;

  template <class Params>
  FLASHGEN_DEVICE static Partials of(const Params& p) {
    return {p.o_partial, reinterpret_cast<RowTotal*>(p.row_partial), p.partial_rows};
  }
  // Two columns of block `n`, from `column` on.
  FLASHGEN_DEVICE float* pair(i32 index, i32 n, i32 row, i32 column) const {
    return out + index * partial_floats() + n * block_floats() + row * 8 + column;
  }
  // From each part to the next, and from each block of columns to the next.
  FLASHGEN_DEVICE i64 partial_floats() const { return blocks * block_floats(); }
  FLASHGEN_DEVICE i64 block_floats() const { return i64{8} * rows; }
  FLASHGEN_DEVICE RowTotal& total(i32 index, i32 row) const {
    return totals[static_cast<i64>(index) * rows + row];
  }
};

struct alignas(8) FloatPair {
  float values[2];
};

// Where an item's parts lie among all in the workspace, in the order of its keys.
struct PartialIndices {
  i32 count;
  i32 first;
  // Of the second part, and from each part to the next one.
  i32 second;
  i32 stride;

  // Parts of fixed sizes, of an item whose first unit is number `first_unit` of all.
  FLASHGEN_DEVICE static PartialIndices fixed(Team team, i32 first_unit, i32 units) {
    return {units, team.strided(first_unit), team.strided(first_unit + 1), team.size};
  }
  // One part of each thread block from `first_block` on. The workspace has room for two parts of a thread
  // block: of an item that a thread block before it has begun, and of one that it begins itself.
  FLASHGEN_DEVICE static PartialIndices of_blocks(Team team, i32 first_block, i32 blocks) {
    return {blocks, team.strided(2 * first_block + 1), team.strided(2 * (first_block + 1)), 2 * team.size};
  }
  FLASHGEN_DEVICE i32 operator()(i32 part) const { return part == 0 ? first : second + (part - 1) * stride; }
};

// Whether this thread block is the last of `blocks` to arrive at a counter, which is 0 again after that. All
// threads that compute call, after a barrier of theirs. Those of the last thread block see what all thread
// blocks wrote before they arrived.
template <DecodeConfig cfg>
FLASHGEN_DEVICE bool arrives_last(u32* counter, u32 blocks, u32& shared, Thread thread) {
  if (thread.index() == 0) shared = atomic_inc_acq_rel(counter, blocks - 1) == blocks - 1;
  consumers_sync<cfg>();
  return shared != 0;
}

}  // namespace flashgen
