// Threads that spin. Nothing takes a running thread's turn away, so a loop that waits for what another thread
// stores must let that thread run. A thread whose primitives have changed nothing for many calls does so,
// until nobody else can go on. A loop without primitives never does. Where nothing comes of a launch for a
// long time, whoever runs is in such a loop: that is a finding, and no launch that never ends.
#pragma once
#include "deadlock.h"

namespace flashgen::emu {

constexpr const char* kLivelock =
    "for %g s of processor time no thread has returned, and none has copied or stored by a primitive; this "
    "thread still runs. If it waits for another thread's store, use load_acquire or an mbarrier, which let "
    "that thread run. If it only computes for long, raise FLASHGEN_SPIN_LIMIT. The block's other threads:%s";

inline double spin_seconds() { return static_cast<double>(runtime.launch.spin_nanoseconds) / 1e9; }

[[noreturn]] inline void report_livelock() {
  fail("livelock", kLivelock, spin_seconds(), describe_deadlock());
}

// The same at a load or store.
[[noreturn]] inline void report_livelock_at(Thread& thread, const void* code) {
  thread.site = {nullptr, 0};
  thread.code = code;
  report_livelock();
}

}  // namespace flashgen::emu

void flashgen::emu::end_turn() {
  if (runtime.overdue) report_livelock();
  park(describe_turn);
}
