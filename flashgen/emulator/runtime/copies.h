// cp.async. The destination is NaN from the issue on, and the data arrives only at the wait. A missing wait,
// or a buffer that is reused too early, shows in the results. Under the random schedules some copies arrive
// earlier, and overwrite what was written meanwhile.
#pragma once
#include "race.h"
#include "scheduler.h"

namespace flashgen::emu {

inline void issue_copy(u32 destination, const void* source, u32 bytes, u32 valid_bytes) {
  Thread& thread = self();
  u8* target = shared_range(thread, destination, bytes, bytes, "cp.async destination");
  if (valid_bytes > bytes) {
    fail("invalid operand", "cp.async copies %u valid bytes of only %u", valid_bytes, bytes);
  }
  if (valid_bytes != 0) check_global(source, valid_bytes, 1, false, "cp.async source");
  if (reinterpret_cast<u64>(source) % bytes != 0) {
    fail("misaligned", "cp.async needs a source address that is a multiple of %u; this is %p", bytes, source);
  }
  const void* code = call_before(thread.code);
  if (runtime.launch.race) {
    watch_shared(thread, target, bytes, How::cp_async, code);
    if (valid_bytes != 0) watch_global(thread, source, valid_bytes, How::cp_async_source, code);
  }
  memset(target, kPoisonByte, bytes);
  thread.copies.push_back({target, source, bytes, valid_bytes, code, false});
  ++thread.uncommitted;
}

inline void deliver(Copy& copy) {
  if (copy.arrived) return;
  copy.arrived = true;
  memcpy(copy.destination, copy.source, copy.valid_bytes);
  memset(copy.destination + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
}

inline void finish_copy(Thread& thread, Copy& copy) {
  if (runtime.launch.race) {
    note_arrival({thread, *thread.block->shadow, reinterpret_cast<u64>(copy.destination), copy.bytes,
                  How::cp_async, copy.code});
    if (copy.valid_bytes != 0) {
      watch_global(thread, copy.source, copy.valid_bytes, How::cp_async_source, copy.code);
    }
  }
  deliver(copy);
}

// Completes the running thread's oldest groups until at most `pending` are left.
inline void wait_for_copies(size_t pending) {
  Thread& thread = self();
  if (thread.groups.size() <= pending) return;
  const size_t finished = thread.groups.size() - pending;
  size_t count = 0;
  for (size_t group = 0; group < finished; ++group) count += thread.groups[group];
  for (size_t index = 0; index < count; ++index) finish_copy(thread, thread.copies[index]);
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<std::ptrdiff_t>(count));
  thread.groups.erase(thread.groups.begin(), thread.groups.begin() + static_cast<std::ptrdiff_t>(finished));
}

}  // namespace flashgen::emu

void flashgen_emu_cp_async(unsigned destination, const void* source, unsigned bytes, unsigned valid_bytes,
                           FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  issue_copy(destination, source, bytes, valid_bytes);
  made_progress();
}

void flashgen_emu_cp_async_commit(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  self().groups.push_back(self().uncommitted);
  self().uncommitted = 0;
  maybe_yield();
}

void flashgen_emu_cp_async_wait(int pending, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  wait_for_copies(static_cast<size_t>(pending));
}

void flashgen_emu_reduce_add(float* address, const float* values, int count, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  const auto bytes = static_cast<unsigned>(count) * 4;
  check_global(address, bytes, bytes, true, "reduce_add");
  if (runtime.launch.race) watch_global(self(), address, bytes, How::reduce_add, call_before(self().code));
  for (int i = 0; i < count; ++i) address[i] += values[i];
  made_progress();
  maybe_yield();
}

void flashgen_emu_reduce_add_u64(unsigned long long* address, unsigned long long value,
                                 FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  check_global(address, 8, 8, true, "reduce_add");
  if (runtime.launch.race) watch_global(self(), address, 8, How::reduce_add, call_before(self().code));
  *address += value;
  made_progress();
  maybe_yield();
}

unsigned flashgen_emu_shared_address(const void* pointer, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  const auto offset = static_cast<const flashgen::u8*>(pointer) - self().block->shared;
  if (offset < 0 || offset > static_cast<std::ptrdiff_t>(shared_bytes())) {
    fail("shared memory out of bounds", "shared_address of %p, which is not in the block's shared memory",
         pointer);
  }
  return kSharedBase + static_cast<unsigned>(offset);
}
