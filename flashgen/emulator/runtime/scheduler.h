// Chooses the thread that runs next. Each CUDA thread is a fiber, and fibers switch only inside primitives.
#pragma once
#include "report.h"

namespace flashgen::emu {

[[noreturn]] void report_deadlock();
Thread* wake_pollers();
// Under the random schedules: perhaps completes a copy of `thread` or of TMA that is in flight.
void maybe_deliver_a_copy(Thread& thread);
void maybe_deliver_a_bulk_copy();
// No thread can run: completes an asynchronous operation. Returns false if there is none.
bool complete_something();

inline u64 random_bits() {
  u64& x = runtime.random_state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x * 0x2545f4914f6cdd1dull >> 16;
}
inline bool one_in(u32 n) { return random_bits() % n == 0; }

inline i32 lowest(u32 mask) { return __builtin_ctz(mask); }
inline i32 highest(u32 mask) { return 31 - __builtin_clz(mask); }
inline i32 any_of(u32 mask) {
  for (u32 skip = random_bits() % __builtin_popcount(mask); skip > 0; --skip) mask &= mask - 1;
  return lowest(mask);
}

// A thread yields after this many calls of primitives without progress.
constexpr i64 kCallsBeforeYield = 1 << 18;

inline void made_progress() {
  ++runtime.progress;
  runtime.calls_left = kCallsBeforeYield;
}

// A thread that was forced to yield runs again when no other thread can.
inline void describe_forced_yield(const Thread&, char* text, size_t size) {
  snprintf(text, size, "many calls without any progress");
}

inline void make_ready(Thread& thread) {
  thread.state = State::ready;
  thread.warp->ready |= 1u << thread.lane;
  thread.block->ready_warps |= 1u << thread.warp_idx;
}

inline Thread& take_lane(Block& block, i32 warp_idx) {
  Warp& warp = block.warps[warp_idx];
  i32 lane = lowest(warp.ready);
  if (runtime.launch.schedule == kReverse) {
    lane = highest(warp.ready);
  } else if (runtime.randomised && one_in(8)) {
    lane = any_of(warp.ready);
  }
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) block.ready_warps &= ~(1u << warp_idx);
  return block.threads[warp_idx * kWarpSize + lane];
}

// Among the ready warps of a block; `after` is the warp that ran last, or -1.
inline i32 choose_warp(Block& block, i32 after) {
  const u32 ready = block.ready_warps;
  switch (runtime.launch.schedule) {
    case kSequential: {
      const u32 above = static_cast<u32>(ready & ~((1ull << (after + 1)) - 1));
      return lowest(above != 0 ? above : ready);
    }
    case kReverse: {
      const u32 below = after > 0 ? ready & ((1u << after) - 1) : 0;
      return highest(below != 0 ? below : ready);
    }
    case kRandom:
      return any_of(ready);
    default: {
      i32 best = lowest(ready);
      for (u32 rest = ready; rest != 0; rest &= rest - 1) {
        if (block.warps[lowest(rest)].priority > block.warps[best].priority) best = lowest(rest);
      }
      return best;
    }
  }
}

// A ready thread, or null when there is none.
inline Thread* find_ready() {
  Thread* last = runtime.current;
  const size_t count = runtime.blocks.size();
  size_t first = last != nullptr ? last->block - runtime.blocks.data() : 0;
  if (runtime.randomised && count > 1) first = random_bits() % count;
  for (size_t step = 0; step < count; ++step) {
    Block& block = runtime.blocks[(first + step) % count];
    if (block.ready_warps == 0) continue;
    const i32 after = last != nullptr && last->block == &block ? last->warp_idx : -1;
    return &take_lane(block, choose_warp(block, after));
  }
  return nullptr;
}

// The same, of the warp that ran last if possible.
inline Thread* find_ready_near(Thread& last) {
  return last.warp->ready != 0 ? &take_lane(*last.block, last.warp_idx) : find_ready();
}

// The same, after asynchronous operations if necessary. Null if no thread will ever run. `last` may be null.
inline Thread* wait_for_ready(Thread* last) {
  for (;;) {
    Thread* next = last != nullptr ? find_ready_near(*last) : find_ready();
    if (next != nullptr) return next;
    if (!complete_something()) return wake_pollers();
  }
}

inline void resume(Thread& next) {
  Thread* previous = runtime.current;
  next.state = State::running;
  if (previous == &next) return;
  runtime.current = &next;
  flashgen_emu_thread = &next;
  switch_context(previous != nullptr ? previous->context : runtime.main, next.context);
}

// The running thread waits, in `state`, until make_ready() is called for it.
inline void park(State state) {
  Thread& thread = self();
  thread.state = state;
  if (runtime.randomised && one_in(4)) maybe_deliver_a_copy(thread);
  Thread* next = wait_for_ready(&thread);
  if (next == nullptr) report_deadlock();
  resume(*next);
}

// The same. `describe` says what the thread waits for.
inline void park(Description describe) {
  self().describe = describe;
  runtime.calls_left = kCallsBeforeYield;
  park(State::waiting);
}

// Under the random schedules: perhaps lets another thread run first.
inline void maybe_yield() {
  if (!runtime.randomised || !one_in(8)) return;
  Thread& thread = self();
  if (runtime.launch.schedule == kPriority) thread.warp->priority = -static_cast<i32>(random_bits() & 0xffff);
  make_ready(thread);
  maybe_deliver_a_bulk_copy();
  resume(*find_ready());
}

}  // namespace flashgen::emu
