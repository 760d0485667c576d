// Turns signals that a kernel's own loads, stores and divisions raise into findings. The process survives.
#pragma once
#include <csetjmp>
#include <csignal>
#include <pthread.h>
#include <ucontext.h>

#include "memory.h"
#include "spin.h"
#include "stacks.h"

namespace flashgen::emu {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

struct Fault {
  int signal;
  u64 address;
  const void* code;
  int write;  // 1 a store, 0 a load, -1 not known
};

inline sigjmp_buf fault_return;
inline volatile bool in_kernel = false;
inline pthread_t kernel_thread;
inline Fault fault;
inline struct sigaction previous_actions[4];

inline void read_machine(const ucontext_t& machine, Fault& f) {
#if defined(__linux__) && defined(__x86_64__)
  f.code = reinterpret_cast<const void*>(machine.uc_mcontext.gregs[REG_RIP]);
  // Bit 1 of a page fault's error code: the access was a write. Trap 14 is the page fault.
  if (machine.uc_mcontext.gregs[REG_TRAPNO] == 14) f.write = (machine.uc_mcontext.gregs[REG_ERR] & 2) != 0;
#elif defined(__linux__) && defined(__aarch64__)
  f.code = reinterpret_cast<const void*>(machine.uc_mcontext.pc);
#else
  (void)machine;
#endif
}

inline void on_signal(int signal, siginfo_t* info, void* machine) {
  if (!in_kernel || pthread_equal(pthread_self(), kernel_thread) == 0) {
    // Not a kernel's fault: restore the previous handler, and let the instruction fault again.
    for (int i = 0; i < 4; ++i) {
      if (kSignals[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
    }
    return;
  }
  in_kernel = false;
  fault = {signal, reinterpret_cast<u64>(info->si_addr), nullptr, -1};
  read_machine(*static_cast<const ucontext_t*>(machine), fault);
  siglongjmp(fault_return, 1);
}

// Handles the signals during its lifetime, on a separate stack.
struct FaultGuard {
  stack_t previous_stack;

  FaultGuard() {
    static u8* handler_stack = reserve(64 * 1024);
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = 64 * 1024;
    sigaltstack(&stack, &previous_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &action, &previous_actions[i]);
    kernel_thread = pthread_self();
  }
  ~FaultGuard() {
    in_kernel = false;
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &previous_actions[i], nullptr);
    sigaltstack(&previous_stack, nullptr);
  }
};

__attribute__((format(printf, 3, 4))) inline void report_fault(const char* kind, Site site,
                                                               const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_report(runtime.current, kind, site, fault.code, format, arguments);
  va_end(arguments);
}

// Turns the fault into a finding about the thread that was running.
inline void describe_fault() {
  const Site site = runtime.current != nullptr ? runtime.current->site : Site{nullptr, 0};
  const char* verb = fault.write == 1 ? "a store to" : fault.write == 0 ? "a load from" : "an access to";
  char place[256];
  if (runtime.overdue) {
    report_fault("livelock", {nullptr, 0}, kLivelock, spin_seconds(), describe_deadlock());
  } else if (fault.signal == SIGFPE) {
    report_fault("division by zero", site, "an integer division by zero, which gives garbage on a GPU");
  } else if (fault.signal == SIGILL) {
    report_fault("crash", site,
                 "an illegal instruction (a trap, or a path that the compiler considers unreachable)");
  } else if (stacks.in_guard(fault.address)) {
    report_fault("stack overflow", site, "the thread's stack of %zu bytes is full", kStackBytes);
  } else if (shared_pool.contains(fault.address) && runtime.current != nullptr) {
    const auto offset =
        static_cast<long long>(fault.address - reinterpret_cast<u64>(runtime.current->block->shared));
    report_fault("shared memory out of bounds", site, "%s offset %lld of %u bytes of shared memory", verb,
                 offset, shared_bytes());
  } else if (fault.address == 0 && fault.write == -1) {
    report_fault("misaligned", site, "an access whose address is not a multiple of its size, or is invalid");
  } else {
    describe_address(fault.address, place, sizeof place);
    const FlashgenEmuBuffer* buffer = buffer_of(fault.address, 1);
    if (fault.write == 1 && buffer != nullptr && !buffer->writable) {
      report_fault("write to read-only memory", site, "a store writes to %s", place);
    } else {
      report_fault("global memory out of bounds", site, "%s %s", verb, place);
    }
  }
}

}  // namespace flashgen::emu
