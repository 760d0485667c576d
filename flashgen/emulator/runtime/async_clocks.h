// The entries of vector clocks for asynchronous operations, and messages: the clocks that a thread leaves at
// a barrier for the threads that wait there later.
#pragma once
#include "clocks.h"

namespace flashgen::emu {

// The entry up to which the async proxy sees the accesses of an agent.
inline u32 async_index(u32 index) { return basic_clocks() + index; }

// Numbers the mbarriers of a cluster.
inline u32 number_of(const Block& block, u32 mbarrier) {
  return static_cast<u32>(block.rank) * kMBarrierClocks + mbarrier;
}
// The entry that counts the ended phases of an mbarrier.
inline u32 phase_index(u32 number) { return 2 * basic_clocks() + number; }

// From now on, threads exchange these entries too.
inline void keep_async_clocks() { runtime.async_clocks = true; }

inline void make_room(Message& message) { message.clocks.resize(clock_stride(), 0); }

// Adds what `thread` has done so far to the message.
inline void publish(Thread& thread, Message& message) {
  make_room(message);
  learn(message.clocks.data(), thread.clocks, clock_count());
  learn(message.foreign, thread.foreign);
  begin_epoch(thread);
}

inline void note(Message& message, u32 index, u32 clock) {
  make_room(message);
  message.clocks[index] = clock;
}

inline void learn(Thread& thread, const Message& message) {
  if (!message.clocks.empty()) learn(thread.clocks, message.clocks.data(), clock_count());
  learn(thread.foreign, message.foreign);
}

}  // namespace flashgen::emu
