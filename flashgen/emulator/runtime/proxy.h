// Race mode: the async proxy. Bulk copies and wgmma reach memory by another way than ordinary loads and
// stores, and see what those wrote only if a fence lies between. What such an operation reads must also stay
// as it is until somebody has waited for the operation.
#pragma once
#include "race.h"

namespace flashgen::emu {

// A stretch of shared or global memory that an asynchronous operation touches on behalf of a thread.
struct AsyncAccess {
  Thread& thread;
  // In whose shared memory; null for global memory.
  Block* block;
  const void* memory;
  u32 bytes;
  How how;
  const void* code;

  Shadow* shadow() const {
    return block != nullptr ? block->shadow : shadow_of_global(reinterpret_cast<u64>(memory));
  }
  Access in(Shadow& shadow) const {
    return {thread, shadow, reinterpret_cast<u64>(memory), bytes, how, code};
  }
};

// The async proxy, used by the thread from now on, sees all that the thread knows of. What other blocks wrote
// lies in global memory, which not every fence is for.
inline void fence_async(Thread& thread, bool global) {
  keep_async_clocks();
  learn(thread.clocks + async_index(0), thread.clocks, basic_clocks());
  if (global) learn(thread.foreign.seen_by_async, thread.foreign.known);
  begin_epoch(thread);
}

// Whatever another block wrote by, a fence of the block that uses the async proxy must follow it.
inline bool seen_by_async(const Epoch& write, const Thread& thread) {
  if (!same_cluster(write.block, thread.block->index)) {
    const auto agent = static_cast<u32>(write.thread);
    return knows(thread.foreign.seen_by_async, write.block, agent, write.clock);
  }
  if (is_async(write.how)) return true;
  const u32 index = clock_index(write.block, static_cast<u32>(write.thread));
  return runtime.async_clocks && thread.clocks[async_index(index)] >= write.clock;
}

[[noreturn]] inline void report_unfenced(const Access& access, const Epoch& write) {
  char bytes[256];
  describe_bytes(access, bytes, sizeof bytes);
  if (!same_cluster(write.block, access.thread.block->index)) {
    report_access(
        access, &write, "missing fence",
        "a %s of %u bytes at %s touches bytes of another block's %s that the async proxy of this block "
        "need not have seen; call fence_proxy_async in this block, after the acquire",
        name_of(access.how), access.bytes, bytes, name_of(write.how));
  }
  report_access(
      access, &write, "missing fence",
      "a %s of %u bytes at %s touches bytes of an ordinary %s that the async proxy need not have seen; "
      "call fence_proxy_async after writing, before the barrier that tells of it",
      name_of(access.how), access.bytes, bytes, name_of(write.how));
}

inline void check_fenced(const Access& access) {
  access.shadow.visit(access.address, access.bytes, false, [&](Cell& cell) {
    if (cell.write.clock == 0 || cell.in_flight) return;
    if (ordered(cell.write, access.thread) && !seen_by_async(cell.write, access.thread))
      report_unfenced(access, cell.write);
  });
}

inline void require_primary_done(const AsyncAccess& access) {
  if (access.block == nullptr) require_primary_done(access.thread, access.memory, access.how, access.code);
}

// An asynchronous operation begins that will read.
inline void begin_async_read(const AsyncAccess& read) {
  require_primary_done(read);
  Shadow* shadow = read.shadow();
  if (shadow == nullptr) return;
  const Access access = read.in(*shadow);
  check_fenced(access);
  note_read(access);
  shadow->visit(access.address, access.bytes, false, [](Cell& cell) { ++cell.async_readers; });
}

// It has read, and nobody in particular knows.
inline void drop_async_read(const AsyncAccess& read) {
  Shadow* shadow = read.shadow();
  if (shadow == nullptr) return;
  shadow->visit(reinterpret_cast<u64>(read.memory), read.bytes, false, [](Cell& cell) {
    if (cell.async_readers != 0) --cell.async_readers;
  });
}

// It has read, and the thread knows.
inline void end_async_read(const AsyncAccess& read) {
  Shadow* shadow = read.shadow();
  if (shadow == nullptr) return;
  drop_async_read(read);
  note_read(read.in(*shadow));
}

// An asynchronous operation begins that will write.
inline void begin_async_write(const AsyncAccess& write) {
  require_primary_done(write);
  Shadow* shadow = write.shadow();
  if (shadow == nullptr) return;
  const Access access = write.in(*shadow);
  check_fenced(access);
  note_write(access);
}

// It is a reduction: others may add at the same time, but none may read the sum yet.
inline void begin_adding(const AsyncAccess& write) {
  begin_async_write(write);
  if (Shadow* shadow = write.shadow())
    shadow->visit(reinterpret_cast<u64>(write.memory), write.bytes, false, [](Cell& cell) { ++cell.adders; });
}
// It has added, and the thread knows, as of now: who knows of the issue alone may not read.
inline void end_adding(const AsyncAccess& write) {
  Shadow* shadow = write.shadow();
  if (shadow == nullptr) return;
  const Epoch epoch = write.in(*shadow).epoch();
  shadow->visit(reinterpret_cast<u64>(write.memory), write.bytes, false, [&](Cell& cell) {
    --cell.adders;
    cell.write = epoch;
  });
}

// It has written, and the thread knows.
inline void end_async_write(const AsyncAccess& write) {
  Shadow* shadow = write.shadow();
  if (shadow != nullptr) note_arrival(write.in(*shadow));
}

// It has written, and those know who know that this many phases of an mbarrier have ended.
inline void end_async_write_at(const AsyncAccess& write, u32 mbarrier_number, u32 phases) {
  write.shadow()->visit(reinterpret_cast<u64>(write.memory), write.bytes, false, [&](Cell& cell) {
    cell.write.clock = phases;
    cell.write.mbarrier = static_cast<u16>(mbarrier_number + 1);
    cell.in_flight = false;
  });
}

// ---- For operations that read a block's own shared memory while the thread goes on, such as wgmma.

// At its issue: the bytes must have been written, in order and fenced, and may not be written again ...
inline void async_proxy_reads(Thread& thread, const void* memory, u32 bytes, How how) {
  begin_async_read({thread, thread.block, memory, bytes, how, call_before(thread.code)});
}
// ... until the wait that completes it.
inline void async_proxy_has_read(Thread& thread, const void* memory, u32 bytes, How how) {
  end_async_read({thread, thread.block, memory, bytes, how, call_before(thread.code)});
}

}  // namespace flashgen::emu
