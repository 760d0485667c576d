// A timer on the processor time of the launching thread checks that the launch makes progress. On a livelock
// its signal handler leaves the kernel at once if the interrupted instruction is in the kernel's own code.
// Otherwise the next primitive, or the next access in race mode, ends the launch.
#pragma once
#include <ctime>
#include <link.h>
#include <sys/syscall.h>

#include "faults.h"
#include "spin.h"

// Older C libraries have the field without this name.
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace flashgen::emu {

struct CodeRange {
  const void* entry;
  u64 begin;
  u64 end;
};

// The kernel's own code.
inline CodeRange kernel_code = {};

inline int find_kernel_code(dl_phdr_info* library, size_t, void*) {
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const auto& part = library->dlpi_phdr[i];
    const u64 begin = library->dlpi_addr + part.p_vaddr;
    if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
    if (reinterpret_cast<u64>(kernel_code.entry) - begin >= part.p_memsz) continue;
    kernel_code.begin = begin;
    kernel_code.end = begin + part.p_memsz;
    return 1;
  }
  return 0;
}

// A real-time signal that libraries rarely use. The previous handler is restored after the launch.
inline int watch_signal() { return SIGRTMIN + 11; }

// The launch is overdue after this many checks without progress.
constexpr u32 kChecks = 4;
inline u64 progress_seen = 0;
inline u32 idle_checks = 0;

inline void on_check(int, siginfo_t*, void* machine) {
  if (!in_kernel || pthread_equal(pthread_self(), kernel_thread) == 0) return;
  if (runtime.progress != progress_seen) {
    progress_seen = runtime.progress;
    idle_checks = 0;
    return;
  }
  if (++idle_checks < kChecks) return;
  runtime.calls_left = 0;
  runtime.overdue = true;
  fault = {watch_signal(), 0, nullptr, -1};
  read_machine(*static_cast<const ucontext_t*>(machine), fault);
  const auto code = reinterpret_cast<u64>(fault.code);
  if (code < kernel_code.begin || code >= kernel_code.end) return;
  in_kernel = false;
  siglongjmp(fault_return, 1);
}

// Checks during its lifetime. Systems without such timers have no watchdog.
class Watchdog {
 public:
  explicit Watchdog(const FlashgenEmuLaunch& launch) {
    progress_seen = runtime.progress;
    idle_checks = 0;
    if (launch.spin_nanoseconds == 0) return;
    const auto entry = reinterpret_cast<const void*>(launch.entry);
    if (kernel_code.entry != entry) {
      kernel_code = {entry, 0, 0};
      dl_iterate_phdr(find_kernel_code, nullptr);
    }
    struct sigaction action = {};
    action.sa_sigaction = on_check;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigaction(watch_signal(), &action, &previous_action_);
    sigset_t ours;
    sigemptyset(&ours);
    sigaddset(&ours, watch_signal());
    pthread_sigmask(SIG_UNBLOCK, &ours, &previous_mask_);
    handles_ = true;
    start(launch.spin_nanoseconds / kChecks);
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() {
    // A pending signal arrives here at the latest, before the handler is restored.
    if (runs_) timer_delete(timer_);
    if (!handles_) return;
    pthread_sigmask(SIG_SETMASK, &previous_mask_, nullptr);
    sigaction(watch_signal(), &previous_action_, nullptr);
  }

 private:
  void start(u64 nanoseconds) {
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = watch_signal();
    event.sigev_notify_thread_id = static_cast<pid_t>(syscall(SYS_gettid));
    runs_ = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
    if (!runs_) return;
    itimerspec period = {};
    period.it_value.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000);
    period.it_value.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
    period.it_interval = period.it_value;
    timer_settime(timer_, 0, &period, nullptr);
  }

  struct sigaction previous_action_;
  sigset_t previous_mask_;
  timer_t timer_;
  bool handles_ = false;
  bool runs_ = false;
};

}  // namespace flashgen::emu
