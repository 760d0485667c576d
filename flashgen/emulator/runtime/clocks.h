// Vector clocks: what each thread of a block knows of the others, brought up to date where threads
// synchronise.
#pragma once
#include "model.h"

namespace flashgen::emu {

inline void start_clocks(Block& block) {
  const size_t threads = block.threads.size();
  block.clocks.assign(threads * threads, 0);
  for (size_t i = 0; i < threads; ++i) {
    block.threads[i].clocks = &block.clocks[i * threads];
    block.threads[i].clocks[i] = 1;
  }
}

// All threads for whom `takes_part` holds learn what the others of them know; then each begins a new epoch,
// of which the others do not know.
template <class Predicate>
inline void synchronise(Block& block, Thread* first, Thread* last, const Predicate& takes_part) {
  const size_t threads = block.threads.size();
  static u32 joined[kMaxThreads];
  memset(joined, 0, threads * sizeof *joined);
  for (Thread* thread = first; thread != last; ++thread) {
    if (!takes_part(*thread)) continue;
    for (size_t i = 0; i < threads; ++i)
      joined[i] = joined[i] > thread->clocks[i] ? joined[i] : thread->clocks[i];
  }
  for (Thread* thread = first; thread != last; ++thread) {
    if (!takes_part(*thread)) continue;
    memcpy(thread->clocks, joined, threads * sizeof *joined);
    ++thread->clocks[thread->thread_idx];
  }
}

}  // namespace flashgen::emu
