// The interface of the runtime library to Python. flashgen/emulator/library.py has the same layouts for
// ctypes.
#pragma once
#include <cstdint>

enum FlashgenEmuSchedule : int32_t { kSequential, kReverse, kRandom, kPriority };

// An array of the caller that the kernel may access.
struct FlashgenEmuBuffer {
  const char* name;
  uint64_t address;
  uint64_t bytes;
  int32_t writable;
  // Earlier grids may access it until this one's griddep_wait.
  int32_t from_primary;
};

// Bytes of an array that a launch has read and written. A reduction or an atomic counts once, as a write.
struct FlashgenEmuTraffic {
  uint64_t read;
  uint64_t written;
};

struct FlashgenEmuLaunch {
  void (*entry)(const void* params);
  const void* params;
  uint64_t params_bytes;
  // Blocks along x, y and z.
  int64_t grid[3];
  int32_t threads;
  int32_t shared_bytes;
  int32_t schedule;
  uint64_t seed;
  // Race mode. The kernel was built with access hooks.
  int32_t race;
  // Blocks that run concurrently. Their threads are interleaved.
  int32_t resident;
  // Blocks of a cluster, consecutive along x. `resident` is a multiple of it.
  int32_t cluster;
  // All blocks are resident, and may wait for each other.
  int32_t cooperative;
  const FlashgenEmuBuffer* buffers;
  int32_t buffer_count;
  // One counter for each buffer; null: no counts. Plain loads and stores count only in a kernel that was
  // built with access hooks.
  FlashgenEmuTraffic* traffic;
  // Processor time without progress after which the launch ends with a livelock finding; 0: no limit.
  uint64_t spin_nanoseconds;
};

// A thread and its place in the code. Unknown numbers are -1, an unknown file is empty, an unknown address is
// 0.
struct FlashgenEmuPlace {
  char file[512];
  int32_t line;
  int64_t block;
  int32_t thread;
  // A library and an address in it, from which addr2line gets the chain of inlined calls.
  char library[1024];
  uint64_t code_offset;
};

// A finding. `other` is the other access of a race; it is unused if `other_role` is empty.
struct FlashgenEmuReport {
  char kind[64];
  char what[6000];
  FlashgenEmuPlace place;
  char other_role[64];
  FlashgenEmuPlace other;
};

#pragma GCC visibility push(default)
extern "C" {
// Returns 0, or 1 with the report filled in. A process can run one launch at a time.
int flashgen_emu_launch(const FlashgenEmuLaunch* launch, FlashgenEmuReport* report);
}
#pragma GCC visibility pop
