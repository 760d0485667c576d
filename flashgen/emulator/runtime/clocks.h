// Vector clocks: up to when each thread's accesses are ordered after those of the other agents of its
// cluster. Synchronization updates them. An agent is a thread of a block or the tensor cores of one of its
// warpgroups; tensor cores are numbered after all threads.
#pragma once
#include "model.h"

namespace flashgen::emu {

inline u32 cluster_size() { return static_cast<u32>(runtime.launch.cluster); }

inline u32 agents_of_block() {
  const auto threads = static_cast<u32>(runtime.launch.threads);
  return threads + (threads + kWarpgroupSize - 1) / kWarpgroupSize;
}

// The most mbarriers of a block in race mode.
constexpr u32 kMBarrierClocks = 64;

// A vector clock has an entry for each agent of the cluster. Once asynchronous operations need them, there
// are also an entry for what the async proxy sees of each agent, and one for each mbarrier.
inline u32 basic_clocks() { return agents_of_block() * cluster_size(); }
// The number of entries that memory is reserved for.
inline u32 clock_stride() { return 2 * basic_clocks() + kMBarrierClocks * cluster_size(); }
// The number of entries in use.
inline u32 clock_count() { return runtime.async_clocks ? clock_stride() : basic_clocks(); }

// The entry of an agent of the block with this index in the grid.
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

// Sets `clocks` to the maximum of both, entry by entry.
inline void learn(u32* clocks, const u32* others, u32 count) {
  for (u32 i = 0; i < count; ++i) clocks[i] = clocks[i] > others[i] ? clocks[i] : others[i];
}

// No other thread is ordered after what the thread does from now on.
inline void begin_epoch(Thread& thread) { ++thread.clocks[own_index(thread)]; }

// Joins the clocks of all threads for which `takes_part` holds. Then each of them begins a new epoch.
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
