// Detection of threads that spin. The emulator never preempts a running thread, so a loop that waits for
// another thread's store must yield. Primitives yield after many calls that change nothing, as long as
// another thread can run. A loop without primitives never yields. If a launch makes no progress for
// FLASHGEN_SPIN_LIMIT seconds of processor time, the running thread is in such a loop: the launch ends with a
// livelock finding.
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

// Reports the livelock at a load or store.
[[noreturn]] inline void report_livelock_at(Thread& thread, const void* code) {
  thread.site = {nullptr, 0};
  thread.code = code;
  report_livelock();
}

}  // namespace flashgen::emu

void flashgen::emu::force_yield() {
  if (runtime.overdue) report_livelock();
  park(describe_forced_yield);
}
