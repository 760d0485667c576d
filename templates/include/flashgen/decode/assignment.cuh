// What a thread block computes of an item: its parts one after another, and the merge of all parts by the
// last thread block.
#pragma once
#include "flashgen/decode/partials.cuh"
#include "flashgen/decode/scheduler.cuh"

namespace flashgen {

// Which thread blocks compute an item, and where its parts go. The loop over keys leaves no registers for it,
// so it is found after that loop.
struct ItemParts {
  PartialIndices indices;
  Team team;
  i32 first_block;
  // How many thread blocks share the item.
  i32 blocks;

  template <class Params>
  FLASHGEN_DEVICE static ItemParts of(const Params& p, const Assignment& assigned,
                                      const WorkPartition& work) {
    const Team team = Team::of(p);
    const i32 first_block = work.owner(assigned.first_unit);
    const i32 blocks = work.owner(assigned.first_unit + assigned.units - 1) - first_block + 1;
    return {p.part_tiles != 0 ? PartialIndices::fixed(team, assigned.first_unit, assigned.units)
                              : PartialIndices::of_blocks(team, first_block, blocks),
            team, first_block, blocks};
  }
};

// Calls visit(part, tiles) for the parts of an assignment: those of fixed size one by one
// (batch_invariant, num_splits), or all tiles at once.
template <class Params, class Visit>
FLASHGEN_DEVICE void for_each_part(const Params& p, const Assignment& assigned, const Visit& visit) {
  const i32 unit_tiles = p.part_tiles != 0 ? p.part_tiles : 1;
  const auto next = [&](i32 unit) { return p.part_tiles != 0 ? unit + 1 : assigned.end; };
#pragma unroll 1
  for (i32 unit = assigned.begin; unit < assigned.end; unit = next(unit)) {
    const Range tiles = assigned.item.tiles;
    visit(unit,
          Range{tiles.begin + unit * unit_tiles, smaller(tiles.end, tiles.begin + next(unit) * unit_tiles)});
  }
}

// `attend(tiles)` computes the results of some tiles. `results` stores them as those of the whole item or of
// a part, and merges parts. All threads that compute call.
template <DecodeConfig cfg, class Params, class Results, class Attend>
FLASHGEN_DEVICE void compute_parts(const Params& p, const Assignment& assigned, const WorkPartition& work,
                                   u32& is_last, Thread thread, const Results& results,
                                   const Attend& attend) {
  ItemParts parts;
  for_each_part(p, assigned, [&](i32 unit, Range tiles) {
    attend(tiles);
    parts = ItemParts::of(p, assigned, work);
    if (parts.indices.count == 1) {
      results.store_whole();
    } else {
      results.store_part(parts.indices(p.part_tiles != 0 ? unit : parts.team.index() - parts.first_block));
    }
    // The next copies overwrite these results, where results take the place of the ring. A thread block
    // arrives once all its threads have stored theirs.
    consumers_sync<cfg>();
  });
  if (parts.indices.count == 1) return;
  u32* const counter = p.counter + parts.team.strided(parts.first_block);
  if (parts.blocks == 1 || arrives_last<cfg>(counter, static_cast<u32>(parts.blocks), is_last, thread))
    results.merge(parts.indices);
}

}  // namespace flashgen
