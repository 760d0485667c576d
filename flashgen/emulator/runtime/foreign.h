// Vector clocks of blocks outside of a thread's cluster, which it acquired from memory. They are sparse,
// because few kernels do that.
#pragma once
#include <memory>
#include <unordered_map>
#include <vector>

#include "flashgen/ptx/types.cuh"

namespace flashgen::emu {

// Stands for the grids that a dependent launch waits for, in place of a block's index.
constexpr i64 kPrimaryGrids = -1;

// The clocks of the agents of each block. Shared values are immutable.
struct Foreign {
  std::unordered_map<i64, std::vector<u32>> blocks;
};

using Knowledge = std::shared_ptr<const Foreign>;

// What a thread has acquired of other blocks, and how much of that the async proxy of its own block sees. A
// fence affects the async proxy of its own block only.
struct ForeignKnowledge {
  Knowledge known;
  Knowledge seen_by_async;
};

inline void learn(Foreign& mine, i64 block, const u32* clocks, size_t count) {
  std::vector<u32>& known = mine.blocks[block];
  if (known.size() < count) known.resize(count, 0);
  for (size_t i = 0; i < count; ++i) known[i] = known[i] > clocks[i] ? known[i] : clocks[i];
}

inline void learn(Knowledge& mine, const Knowledge& others) {
  if (others == nullptr || others == mine) return;
  if (mine == nullptr) {
    mine = others;
    return;
  }
  auto both = std::make_shared<Foreign>(*mine);
  for (const auto& [block, clocks] : others->blocks) learn(*both, block, clocks.data(), clocks.size());
  mine = std::move(both);
}

inline void learn(ForeignKnowledge& mine, const ForeignKnowledge& others) {
  learn(mine.known, others.known);
  learn(mine.seen_by_async, others.seen_by_async);
}

inline bool knows(const Knowledge& knowledge, i64 block, u32 agent, u32 clock) {
  if (knowledge == nullptr) return false;
  const auto found = knowledge->blocks.find(block);
  return found != knowledge->blocks.end() && agent < found->second.size() && found->second[agent] >= clock;
}

}  // namespace flashgen::emu
