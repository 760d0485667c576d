// Race mode: every access of shared memory, and of the caller's writable arrays, is checked against earlier
// ones in shadow memory. Two accesses race if at least one writes and no synchronization orders them, under
// any schedule. Barriers order the threads of a block. A barrier of the cluster, or a release and an acquire,
// order different blocks. Atomic accesses never race with each other.
#pragma once
#include <memory>

#include "async_clocks.h"
#include "memory.h"
#include "shadow.h"

namespace flashgen::emu {

inline const char* name_of(How how) {
  constexpr const char* names[] = {
      "load",         "store",          "ldmatrix",   "cp.async",   "cp.async (its source)",
      "reduce_add",   "stmatrix",       "atomic_add", "atomic_inc", "atomic_or",
      "load_acquire", "store_release",  "wgmma",      "bulk load",  "bulk copy (its source)",
      "bulk store",   "bulk reduce_add"};
  return names[static_cast<int>(how)];
}

inline bool is_atomic(How how) {
  return how == How::reduce_add || how == How::atomic_add || how == How::atomic_inc ||
         how == How::atomic_or || how == How::load_acquire || how == How::store_release ||
         how == How::bulk_reduce_add;
}
inline bool is_read(How how) {
  return how == How::load || how == How::ldmatrix || how == How::cp_async_source || how == How::wgmma ||
         how == How::load_acquire || how == How::bulk_source;
}
// An access by the async proxy.
inline bool is_async(How how) { return how >= How::wgmma; }
// A write whose bytes arrive only after a wait.
inline bool comes_late(How how) {
  return how == How::cp_async || how == How::bulk_load || how == How::bulk_store;
}

// An access that is being checked.
struct Access {
  Thread& thread;
  Shadow& shadow;
  u64 address;
  u32 bytes;
  How how;
  const void* code;
  // For an access by tensor cores on behalf of the thread: their agent and their clock.
  i32 agent = -1;
  u32 agent_clock = 0;

  i32 block() const { return static_cast<i32>(thread.block->index); }
  Epoch epoch() const {
    if (agent >= 0) return {code, agent_clock, block(), static_cast<i16>(agent), how, 0};
    return {code, thread.clocks[own_index(thread)], block(), static_cast<i16>(thread.thread_idx), how, 0};
  }
  bool in_shared_memory() const { return shared_pool.contains(address); }
};

// `a` and `b` are indices of blocks in the grid.
inline bool same_cluster(i64 a, i64 b) {
  return a == b || (cluster_size() > 1 && a / cluster_size() == b / cluster_size());
}

inline bool ordered(const Epoch& earlier, const Thread& thread) {
  const auto agent = static_cast<u32>(earlier.thread);
  if (!same_cluster(earlier.block, thread.block->index))
    return knows(thread.foreign.known, earlier.block, agent, earlier.clock);
  if (earlier.mbarrier != 0) return thread.clocks[phase_index(earlier.mbarrier - 1u)] >= earlier.clock;
  if (thread.clocks[clock_index(earlier.block, agent)] >= earlier.clock) return true;
  if (earlier.block != thread.block->index) return false;
  // All lanes of a warp take part in an ldmatrix, whichever lane passed the row.
  return earlier.how == How::ldmatrix && earlier.thread / kWarpSize == thread.warp_idx;
}

// ---- Findings

// The resident block that an address of the pool belongs to.
inline const Block& owner_of_shared(u64 address) {
  const Block* owner = runtime.blocks.data();
  for (const Block& block : runtime.blocks) {
    if (address - reinterpret_cast<u64>(block.shared) < shared_bytes()) owner = &block;
  }
  return *owner;
}

// An agent's thread. For tensor cores it is the first thread of the warpgroup.
inline i32 thread_of_agent(i32 agent) {
  return agent < runtime.launch.threads ? agent : (agent - runtime.launch.threads) * kWarpgroupSize;
}

inline void describe_bytes(const Access& access, char* text, size_t size) {
  if (access.in_shared_memory()) {
    const Block& owner = owner_of_shared(access.address);
    const auto offset = static_cast<long long>(access.address - reinterpret_cast<u64>(owner.shared));
    if (&owner == access.thread.block) {
      snprintf(text, size, "offset %lld of shared memory", offset);
    } else {
      snprintf(text, size, "offset %lld of the shared memory of rank %d in its cluster", offset, owner.rank);
    }
  } else {
    describe_address(access.address, text, size);
  }
}

[[noreturn]] __attribute__((format(printf, 4, 5))) inline void report_access(const Access& access,
                                                                             const Epoch* other,
                                                                             const char* kind,
                                                                             const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_report(&access.thread, kind, {nullptr, 0}, access.code, format, arguments);
  va_end(arguments);
  if (other != nullptr) {
    FlashgenEmuReport& report = *runtime.report;
    snprintf(report.other_role, sizeof report.other_role, "the %s", name_of(other->how));
    set_place(report.other, other->block, thread_of_agent(other->thread), {nullptr, 0}, other->code);
  }
  leave();
}

[[noreturn]] inline void report_race(const Access& access, const Epoch& other) {
  char bytes[256];
  describe_bytes(access, bytes, sizeof bytes);
  const char* why = !same_cluster(other.block, access.block())
                        ? "they are by different blocks, which nothing orders, and at least one is not atomic"
                    : other.mbarrier != 0           ? "this thread has not waited at the mbarrier of the copy"
                    : other.block != access.block() ? "no barrier of the cluster orders the two blocks"
                    : other.how == How::wgmma
                        ? "it may still be in flight: no wgmma_wait, or no barrier after it, orders the two"
                    : other.thread / kWarpSize == access.thread.warp_idx
                        ? "no warp_sync or barrier orders the two lanes"
                        : "no barrier orders the two threads";
  report_access(access, &other, "race", "a %s of %u bytes at %s and a %s touch the same bytes; %s",
                name_of(access.how), access.bytes, bytes, name_of(other.how), why);
}

// If the access is ordered after the copy's issue, the wait is missing. Otherwise it races with the copy.
[[noreturn]] inline void report_in_flight(const Access& access, const Cell& cell) {
  if (!ordered(cell.write, access.thread)) report_race(access, cell.write);
  char bytes[256];
  describe_bytes(access, bytes, sizeof bytes);
  const bool own = cell.write.thread == access.thread.thread_idx;
  report_access(access, &cell.write, "missing wait",
                "a %s of %u bytes at %s touches bytes that a %s still has in flight; %s", name_of(access.how),
                access.bytes, bytes, name_of(cell.write.how),
                cell.write.how == How::bulk_load ? "no thread has waited at its mbarrier"
                : own                            ? "this thread has not waited for its group"
                                                 : "the thread that issued it has not waited for it");
}

// The recorded read by an asynchronous operation, if there is one.
inline const Epoch* async_read_of(const Access& access, const Cell& cell) {
  if (is_async(cell.read.how)) return &cell.read;
  for (u32 index = cell.more_reads; index != 0; index = access.shadow.node(index).next) {
    const Epoch& other = access.shadow.node(index).epoch;
    if (is_async(other.how)) return &other;
  }
  return nullptr;
}

[[noreturn]] inline void report_still_read(const Access& access, const Cell& cell) {
  const Epoch* reader = async_read_of(access, cell);
  if (reader != nullptr && !ordered(*reader, access.thread)) report_race(access, *reader);
  char bytes[256];
  describe_bytes(access, bytes, sizeof bytes);
  report_access(
      access, reader, "missing wait",
      "a %s of %u bytes at %s overwrites what an asynchronous operation may still have to read; the "
      "thread that issued it has not waited for it",
      name_of(access.how), access.bytes, bytes);
}

[[noreturn]] inline void report_uninitialised(const Access& access) {
  char bytes[256];
  describe_bytes(access, bytes, sizeof bytes);
  report_access(access, nullptr, "uninitialised shared memory",
                "a %s of %u bytes at %s reads bytes that no thread has written", name_of(access.how),
                access.bytes, bytes);
}

// ---- Checks

inline void note_read(const Access& access) {
  const Thread& thread = access.thread;
  const bool must_be_written = access.in_shared_memory();
  const Epoch epoch = access.epoch();
  access.shadow.visit(access.address, access.bytes, false, [&](Cell& cell) {
    if (cell.in_flight || (cell.adders != 0 && !is_atomic(access.how))) report_in_flight(access, cell);
    if (cell.write.clock != 0) {
      if (!(is_atomic(access.how) && is_atomic(cell.write.how)) && !ordered(cell.write, thread))
        report_race(access, cell.write);
    } else if (must_be_written) {
      report_uninitialised(access);
    }
    if (cell.read_by_blocks) return;
    // A thread ordered after a read by tensor cores is not necessarily ordered after their thread's reads.
    const auto is_outdated = [&](const Epoch& earlier) {
      return (earlier.block == epoch.block && earlier.thread == epoch.thread) ||
             (access.agent < 0 && ordered(earlier, thread));
    };
    if (cell.read.clock == 0 || is_outdated(cell.read)) {
      cell.read = epoch;
      return;
    }
    // This read replaces a read that is ordered before it.
    if (cell.more_reads != 0) {
      Epoch& newest = access.shadow.node(cell.more_reads).epoch;
      if (is_outdated(newest)) {
        newest = epoch;
        return;
      }
    }
    cell.read_by_blocks = cell.read.block != epoch.block && !runtime.blocks_synchronise;
    access.shadow.add_read(cell, epoch);
  });
}

inline void note_write(const Access& access) {
  const Thread& thread = access.thread;
  const Epoch epoch = access.epoch();
  const auto conflicts = [&](const Epoch& earlier) {
    return !(is_atomic(access.how) && is_atomic(earlier.how)) && !ordered(earlier, thread);
  };
  // Bytes of a line may be added to by different numbers of reductions.
  const bool makes_equal = access.how != How::bulk_reduce_add;
  access.shadow.visit(access.address, access.bytes, makes_equal, [&](Cell& cell) {
    if (cell.in_flight || (cell.adders != 0 && !is_atomic(access.how))) report_in_flight(access, cell);
    if (cell.async_readers != 0) report_still_read(access, cell);
    if (cell.write.clock != 0 && conflicts(cell.write)) report_race(access, cell.write);
    if (cell.read.clock != 0 && conflicts(cell.read)) report_race(access, cell.read);
    for (u32 index = cell.more_reads; index != 0; index = access.shadow.node(index).next) {
      const Epoch other = access.shadow.node(index).epoch;
      if (conflicts(other)) report_race(access, other);
    }
    access.shadow.drop_reads(cell);
    cell.write = epoch;
    cell.in_flight = comes_late(access.how);
  });
}

// A copy has arrived. Its bytes count as written by its thread now.
inline void note_arrival(const Access& access) {
  const u32 clock = access.epoch().clock;
  access.shadow.visit(access.address, access.bytes, false, [&](Cell& cell) {
    cell.write.clock = clock;
    cell.in_flight = false;
  });
}

// Accesses of memory that an earlier grid may still access must be ordered after a griddep_wait.
inline void require_primary_done(Thread& thread, const void* pointer, How how, const void* code) {
  if (!runtime.awaits_primary) return;
  const auto address = reinterpret_cast<u64>(pointer);
  const FlashgenEmuBuffer* buffer = buffer_of(address, 1);
  if (buffer == nullptr || !buffer->from_primary || knows(thread.foreign.known, kPrimaryGrids, 0, 1)) return;
  char place[256];
  describe_address(address, place, sizeof place);
  thread.site = {nullptr, 0};
  thread.code = static_cast<const char*>(code) + 1;
  fail_for(thread, "missing griddep_wait", "a %s at %s, which an earlier grid may not have finished with",
           name_of(how), place);
}

// ---- Shadows

// One for each resident block, and one for each writable array of the launch.
inline std::vector<std::unique_ptr<Shadow>> block_shadows;
inline std::vector<std::unique_ptr<Shadow>> buffer_shadows;

// The shadow of a caller's writable array; null for other memory.
inline Shadow* shadow_of_global(u64 address) {
  for (size_t i = 0; i < runtime.buffers.size(); ++i) {
    const FlashgenEmuBuffer& buffer = runtime.buffers[i];
    if (buffer.writable && address - buffer.address < buffer.bytes) return buffer_shadows[i].get();
  }
  return nullptr;
}

inline void watch_shared(Thread& thread, const void* pointer, u32 bytes, How how, const void* code) {
  const Access access{thread, *thread.block->shadow, reinterpret_cast<u64>(pointer), bytes, how, code};
  if (is_read(how)) {
    note_read(access);
  } else {
    note_write(access);
  }
}

inline void watch_global(Thread& thread, const void* pointer, u32 bytes, How how, const void* code) {
  require_primary_done(thread, pointer, how, code);
  Shadow* shadow = shadow_of_global(reinterpret_cast<u64>(pointer));
  if (shadow == nullptr) return;
  const Access access{thread, *shadow, reinterpret_cast<u64>(pointer), bytes, how, code};
  if (is_read(how)) {
    note_read(access);
  } else {
    note_write(access);
  }
}

}  // namespace flashgen::emu
