// Race mode: the async proxy, by which bulk copies and wgmma access memory. It sees ordinary writes only
// after a fence. What an asynchronous operation reads must not change until a thread has waited for the
// operation.
#pragma once
#include "race.h"

namespace flashgen::emu {

// A range of shared or global memory that an asynchronous operation of a thread accesses.
struct AsyncAccess {
  Thread& thread;
  // The block whose shared memory it is; null for global memory.
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

// The thread's later uses of the async proxy see everything that is ordered before now. What other blocks
// wrote is in global memory, so it needs a fence for that.
inline void fence_async(Thread& thread, bool global) {
  keep_async_clocks();
  learn(thread.clocks + async_index(0), thread.clocks, basic_clocks());
  if (global) learn(thread.foreign.seen_by_async, thread.foreign.known);
  begin_epoch(thread);
}

// For another block's writes of any kind, the block that uses the async proxy needs a fence.
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
        "may not have seen; call fence_proxy_async in this block, after the acquire",
        name_of(access.how), access.bytes, bytes, name_of(write.how));
  }
  report_access(
      access, &write, "missing fence",
      "a %s of %u bytes at %s touches bytes of an ordinary %s that the async proxy may not have seen; "
      "call fence_proxy_async after writing, before the barrier that publishes it",
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

// Begins an asynchronous read.
inline void begin_async_read(const AsyncAccess& read) {
  require_primary_done(read);
  Shadow* shadow = read.shadow();
  if (shadow == nullptr) return;
  const Access access = read.in(*shadow);
  check_fenced(access);
  note_read(access);
  shadow->visit(access.address, access.bytes, false, [](Cell& cell) { ++cell.async_readers; });
}

// Ends an asynchronous read for which no thread has waited.
inline void drop_async_read(const AsyncAccess& read) {
  Shadow* shadow = read.shadow();
  if (shadow == nullptr) return;
  shadow->visit(reinterpret_cast<u64>(read.memory), read.bytes, false, [](Cell& cell) {
    if (cell.async_readers != 0) --cell.async_readers;
  });
}

// Ends an asynchronous read for which the thread has waited.
inline void end_async_read(const AsyncAccess& read) {
  Shadow* shadow = read.shadow();
  if (shadow == nullptr) return;
  drop_async_read(read);
  note_read(read.in(*shadow));
}

// Begins an asynchronous write.
inline void begin_async_write(const AsyncAccess& write) {
  require_primary_done(write);
  Shadow* shadow = write.shadow();
  if (shadow == nullptr) return;
  const Access access = write.in(*shadow);
  check_fenced(access);
  note_write(access);
}

// Begins an asynchronous reduction. Others may add concurrently, but none may read the sum.
inline void begin_adding(const AsyncAccess& write) {
  begin_async_write(write);
  if (Shadow* shadow = write.shadow())
    shadow->visit(reinterpret_cast<u64>(write.memory), write.bytes, false, [](Cell& cell) { ++cell.adders; });
}
// Ends a reduction for which the thread has waited. Reads must be ordered after this, not just after the
// issue.
inline void end_adding(const AsyncAccess& write) {
  Shadow* shadow = write.shadow();
  if (shadow == nullptr) return;
  const Epoch epoch = write.in(*shadow).epoch();
  shadow->visit(reinterpret_cast<u64>(write.memory), write.bytes, false, [&](Cell& cell) {
    --cell.adders;
    cell.write = epoch;
  });
}

// Ends an asynchronous write for which the thread has waited.
inline void end_async_write(const AsyncAccess& write) {
  Shadow* shadow = write.shadow();
  if (shadow != nullptr) note_arrival(write.in(*shadow));
}

// Ends an asynchronous write that the end of the mbarrier's phase with this number orders.
inline void end_async_write_at(const AsyncAccess& write, u32 mbarrier_number, u32 phases) {
  write.shadow()->visit(reinterpret_cast<u64>(write.memory), write.bytes, false, [&](Cell& cell) {
    cell.write.clock = phases;
    cell.write.mbarrier = static_cast<u16>(mbarrier_number + 1);
    cell.in_flight = false;
  });
}

// ---- Operations that read the block's shared memory asynchronously, such as wgmma

// At the issue. Writes of the bytes must be ordered and fenced before.
inline void async_proxy_reads(Thread& thread, const void* memory, u32 bytes, How how) {
  begin_async_read({thread, thread.block, memory, bytes, how, call_before(thread.code)});
}
// At the wait. From now on the bytes may be written again.
inline void async_proxy_has_read(Thread& thread, const void* memory, u32 bytes, How how) {
  end_async_read({thread, thread.block, memory, bytes, how, call_before(thread.code)});
}

}  // namespace flashgen::emu
