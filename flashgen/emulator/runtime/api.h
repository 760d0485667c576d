// What Python asks of the runtime library (flashgen/emulator/library.py holds the same layouts for ctypes).
#pragma once
#include <cstdint>

enum FlashgenEmuSchedule : int32_t { kSequential, kReverse, kRandom, kPriority };

// An array of the caller that the kernel may touch.
struct FlashgenEmuBuffer {
  const char* name;
  uint64_t address;
  uint64_t bytes;
  int32_t writable;
  // Grids that this one waits for (griddep_wait) may write it until then, or read it.
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
  // The kernel was built with access hooks: watch every load and store.
  int32_t race;
  // Blocks that run at the same time; their threads take turns.
  int32_t resident;
  // Blocks of a cluster, neighbours along x; `resident` is a multiple of it.
  int32_t cluster;
  // All blocks are resident, and may wait for each other.
  int32_t cooperative;
  const FlashgenEmuBuffer* buffers;
  int32_t buffer_count;
  // One for each buffer, to be added to; null: nothing is counted. Loads and stores of C++ count only in a
  // kernel that was built with access hooks.
  FlashgenEmuTraffic* traffic;
  // For so much processor time threads may run while nothing comes of it; 0: for ever.
  uint64_t spin_nanoseconds;
};

// Who was where. Unknown numbers are -1, an unknown file is empty, an unknown code address is 0.
struct FlashgenEmuPlace {
  char file[512];
  int32_t line;
  int64_t block;
  int32_t thread;
  // A library and an address in it, from which a debugger's tools know the chain of inlined calls.
  char library[1024];
  uint64_t code_offset;
};

// What a finding says. `other` is the other side of a race, if `other_role` is not empty.
struct FlashgenEmuReport {
  char kind[64];
  char what[6000];
  FlashgenEmuPlace place;
  char other_role[64];
  FlashgenEmuPlace other;
};

#pragma GCC visibility push(default)
extern "C" {
// 0, or 1 with the report filled in. One launch at a time per process.
int flashgen_emu_launch(const FlashgenEmuLaunch* launch, FlashgenEmuReport* report);
}
#pragma GCC visibility pop
