// Vector clocks: what each thread knows of the other agents of its cluster, brought up to date where threads
// synchronise. An agent is a thread of a block or, after those, the tensor cores of one of its warpgroups.
#pragma once
#include "model.h"

namespace flashgen::emu {

inline u32 cluster_size() { return static_cast<u32>(runtime.launch.cluster); }

inline u32 agents_of_block() {
  const auto threads = static_cast<u32>(runtime.launch.threads);
  return threads + (threads + kWarpgroupSize - 1) / kWarpgroupSize;
}

// Race mode tells this many mbarriers of a block apart.
constexpr u32 kMBarrierClocks = 64;

// A vector clock has an entry for each agent of the cluster; then, as soon as asynchronous operations need
// them, one for what the async proxy would see of each; then one for each mbarrier.
inline u32 basic_clocks() { return agents_of_block() * cluster_size(); }
// Room for all of them,
inline u32 clock_stride() { return 2 * basic_clocks() + kMBarrierClocks * cluster_size(); }
// and how many there are now.
inline u32 clock_count() { return runtime.async_clocks ? clock_stride() : basic_clocks(); }

// Where a vector clock has the agent of a block, which has this index in the grid.
inline u32 clock_index(i64 block, u32 agent) {
  if (cluster_size() == 1) return agent;
  return static_cast<u32>(block % cluster_size()) * agents_of_block() + agent;
}
inline u32 own_index(const Thread& thread) {
  return static_cast<u32>(thread.block->rank) * agents_of_block() + static_cast<u32>(thread.thread_idx);
}

inline void start_clocks(Block& block) {
  const u32 stride = clock_stride();
  block.clocks.assign(block.threads.size() * stride, 0);
  for (size_t i = 0; i < block.threads.size(); ++i) {
    Thread& thread = block.threads[i];
    thread.clocks = &block.clocks[i * stride];
    thread.clocks[own_index(thread)] = 1;
    thread.foreign = {};
  }
}

// `clocks` learns what `others` know.
inline void learn(u32* clocks, const u32* others, u32 count) {
  for (u32 i = 0; i < count; ++i) clocks[i] = clocks[i] > others[i] ? clocks[i] : others[i];
}

// What the thread does from now on nobody knows of yet.
inline void begin_epoch(Thread& thread) { ++thread.clocks[own_index(thread)]; }

// All threads for whom `takes_part` holds learn what the others of them know; then each begins a new epoch,
// of which the others do not know.
template <class Predicate>
inline void synchronise(Thread* first, Thread* last, const Predicate& takes_part) {
  const u32 count = clock_count();
  static std::vector<u32> joined;
  joined.assign(count, 0);
  ForeignKnowledge foreign;
  for (Thread* thread = first; thread != last; ++thread) {
    if (!takes_part(*thread)) continue;
    learn(joined.data(), thread->clocks, count);
    learn(foreign, thread->foreign);
  }
  for (Thread* thread = first; thread != last; ++thread) {
    if (!takes_part(*thread)) continue;
    memcpy(thread->clocks, joined.data(), count * sizeof(u32));
    thread->foreign = foreign;
    begin_epoch(*thread);
  }
}

}  // namespace flashgen::emu
