// Race mode: every access of shared memory, and of the caller's writable arrays, is checked against what the
// shadow remembers. Two accesses of which one writes race unless a chain of barriers orders them, whatever
// the schedule happened to be; between blocks of one launch nothing orders them but being atomic.
#pragma once
#include <memory>

#include "clocks.h"
#include "memory.h"
#include "shadow.h"

namespace flashgen::emu {

inline const char* name_of(How how) {
  constexpr const char* names[] = {"load",      "store", "ldmatrix", "cp.async", "cp.async (its source)",
                                   "reduce_add"};
  return names[static_cast<int>(how)];
}

// An access under way.
struct Access {
  Thread& thread;
  Shadow& shadow;
  u64 address;
  u32 bytes;
  How how;
  const void* code;

  i32 block() const { return static_cast<i32>(thread.block->index); }
  Epoch epoch() const {
    return {code, thread.clocks[thread.thread_idx], block(), static_cast<i16>(thread.thread_idx), how};
  }
  bool in_shared_memory() const { return &shadow == thread.block->shadow; }
};

inline bool ordered(const Epoch& earlier, const Thread& thread) {
  if (earlier.block != thread.block->index) return false;
  if (thread.clocks[earlier.thread] >= earlier.clock) return true;
  // All lanes of a warp take part in an ldmatrix, whichever of them named the row.
  return earlier.how == How::ldmatrix && earlier.thread / kWarpSize == thread.warp_idx;
}

// ---- Findings

inline void describe_bytes(const Access& access, char* text, size_t size) {
  if (access.in_shared_memory()) {
    snprintf(text, size, "offset %lld of shared memory",
             static_cast<long long>(access.address - reinterpret_cast<u64>(access.thread.block->shared)));
  } else {
    describe_address(access.address, text, size);
  }
}

__attribute__((format(printf, 4, 5))) [[noreturn]] inline void report_access(const Access& access,
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
    set_place(report.other, other->block, other->thread, {nullptr, 0}, other->code);
  }
  leave();
}

[[noreturn]] inline void report_race(const Access& access, const Epoch& other) {
  char bytes[256];
  describe_bytes(access, bytes, sizeof bytes);
  const char* why = other.block != access.block()
                        ? "they are by different blocks, which nothing orders, and not both are atomic"
                    : other.thread / kWarpSize == access.thread.warp_idx
                        ? "no warp_sync or barrier orders the two lanes"
                        : "no barrier orders the two threads";
  report_access(access, &other, "race", "a %s of %u bytes at %s and a %s touch the same bytes; %s",
                name_of(access.how), access.bytes, bytes, name_of(other.how), why);
}

// An access that knows of the copy came before its wait; one that does not may as well have come before the
// copy.
[[noreturn]] inline void report_in_flight(const Access& access, const Cell& cell) {
  if (!ordered(cell.write, access.thread)) report_race(access, cell.write);
  char bytes[256];
  describe_bytes(access, bytes, sizeof bytes);
  const bool own = cell.write.thread == access.thread.thread_idx;
  report_access(
      access, &cell.write, "missing wait",
      "a %s of %u bytes at %s touches bytes that a cp.async still has in flight; %s", name_of(access.how),
      access.bytes, bytes,
      own ? "this thread has not waited for its group" : "the thread that issued it has not waited for it");
}

[[noreturn]] inline void report_uninitialised(const Access& access) {
  char bytes[256];
  describe_bytes(access, bytes, sizeof bytes);
  report_access(access, nullptr, "uninitialised shared memory",
                "a %s of %u bytes at %s reads bytes that nobody has written", name_of(access.how),
                access.bytes, bytes);
}

// ---- Checks

inline void note_read(const Access& access) {
  const Thread& thread = access.thread;
  const bool must_be_written = access.in_shared_memory();
  const Epoch epoch = access.epoch();
  access.shadow.visit(access.address, access.bytes, false, [&](Cell& cell) {
    if (cell.in_flight) report_in_flight(access, cell);
    if (cell.write.clock != 0) {
      if (!ordered(cell.write, thread)) report_race(access, cell.write);
    } else if (must_be_written) {
      report_uninitialised(access);
    }
    if (cell.read_by_blocks) return;
    if (cell.read.clock == 0 || ordered(cell.read, thread)) {
      cell.read = epoch;
      return;
    }
    // A read that is ordered before this one need not be remembered beside it.
    for (u32 index = cell.more_reads; index != 0; index = access.shadow.node(index).next) {
      Epoch& other = access.shadow.node(index).epoch;
      if (!ordered(other, thread)) continue;
      other = epoch;
      return;
    }
    cell.read_by_blocks = cell.read.block != epoch.block;
    access.shadow.add_read(cell, epoch);
  });
}

inline void note_write(const Access& access) {
  const Thread& thread = access.thread;
  const Epoch epoch = access.epoch();
  const bool atomic = access.how == How::reduce_add;
  access.shadow.visit(access.address, access.bytes, true, [&](Cell& cell) {
    if (cell.in_flight) report_in_flight(access, cell);
    if (cell.write.clock != 0 && !(atomic && cell.write.how == How::reduce_add) &&
        !ordered(cell.write, thread)) {
      report_race(access, cell.write);
    }
    if (cell.read.clock != 0 && !ordered(cell.read, thread)) report_race(access, cell.read);
    for (u32 index = cell.more_reads; index != 0; index = access.shadow.node(index).next) {
      const Epoch other = access.shadow.node(index).epoch;
      if (!ordered(other, thread)) report_race(access, other);
    }
    access.shadow.drop_reads(cell);
    cell.write = epoch;
    cell.in_flight = access.how == How::cp_async;
  });
}

// A copy has arrived: from now on its bytes are those of its thread, as of now.
inline void note_arrival(const Access& access) {
  const u32 clock = access.epoch().clock;
  access.shadow.visit(access.address, access.bytes, false, [&](Cell& cell) {
    cell.write.clock = clock;
    cell.in_flight = false;
  });
}

// ---- Which shadow

// One for each place of a resident block, and one for each writable array of the launch.
inline std::vector<std::unique_ptr<Shadow>> block_shadows;
inline std::vector<std::unique_ptr<Shadow>> buffer_shadows;

// That of a caller's writable array; null for memory that is not watched.
inline Shadow* shadow_of_global(u64 address) {
  for (size_t i = 0; i < runtime.buffers.size(); ++i) {
    const FlashgenEmuBuffer& buffer = runtime.buffers[i];
    if (buffer.writable && address - buffer.address < buffer.bytes) return buffer_shadows[i].get();
  }
  return nullptr;
}

inline void watch_shared(Thread& thread, const void* pointer, u32 bytes, How how, const void* code) {
  const Access access{thread, *thread.block->shadow, reinterpret_cast<u64>(pointer), bytes, how, code};
  if (how == How::load || how == How::ldmatrix) {
    note_read(access);
  } else {
    note_write(access);
  }
}

inline void watch_global(Thread& thread, const void* pointer, u32 bytes, How how, const void* code) {
  Shadow* shadow = shadow_of_global(reinterpret_cast<u64>(pointer));
  if (shadow == nullptr) return;
  const Access access{thread, *shadow, reinterpret_cast<u64>(pointer), bytes, how, code};
  if (how == How::load || how == How::cp_async_source) {
    note_read(access);
  } else {
    note_write(access);
  }
}

}  // namespace flashgen::emu
