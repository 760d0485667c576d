// The functions that the compiler calls before each load and store of a kernel built for race mode or for
// counting bytes. They replace those of its thread sanitizer.
#pragma once
#include <cstddef>

#include "race.h"
#include "spin.h"

namespace flashgen::emu {

// Parameters, and constants of the kernel's library.
inline bool is_constant(u64 address, u32 bytes) {
  const u64 offset = address - reinterpret_cast<u64>(runtime.launch.params);
  if (offset < runtime.launch.params_bytes && bytes <= runtime.launch.params_bytes - offset) return true;
  Dl_info here, entry;
  return dladdr(reinterpret_cast<const void*>(address), &here) != 0 &&
         dladdr(reinterpret_cast<const void*>(runtime.launch.entry), &entry) != 0 &&
         here.dli_fbase == entry.dli_fbase;
}

// The runtime's own variables that a kernel reads.
inline bool is_own(const Thread& thread, u64 address) {
  return address - reinterpret_cast<u64>(static_cast<const FlashgenEmuThread*>(&thread)) <
             sizeof(FlashgenEmuThread) ||
         address - reinterpret_cast<u64>(&flashgen_emu_thread) < sizeof flashgen_emu_thread;
}

inline void check_access(Thread& thread, u64 address, u32 bytes, bool write, bool aligned, const void* code) {
  // A finding names this access, not the primitive before it.
  thread.site = {nullptr, 0};
  thread.code = code;
  const char* verb = write ? "a store" : "a load";
  const How how = write ? How::store : How::load;
  const auto* pointer = reinterpret_cast<const void*>(address);
  code = call_before(code);
  const auto offset = static_cast<i64>(address - reinterpret_cast<u64>(thread.block->shared));
  if (shared_pool.contains(address)) {
    // An offset beyond 32 bits must not wrap around to a valid one.
    const i32 near = offset == static_cast<i32>(offset) ? static_cast<i32>(offset) : INT32_MIN;
    shared_range(thread, static_cast<u32>(near) + kSharedBase, bytes, aligned ? bytes : 1, verb);
    if (runtime.launch.race) watch_shared(thread, pointer, bytes, how, code);
  } else if (stacks.contains(address)) {
    fail("stray access", "%s of %u bytes in the local memory of another thread", verb, bytes);
  } else if (!runtime.buffers.empty()) {
    if (!write && buffer_of(address, bytes) == nullptr && is_constant(address, bytes)) return;
    check_global(pointer, bytes, aligned ? bytes : 1, write, verb);
    if (runtime.launch.race) watch_global(thread, pointer, bytes, how, code);
  }
}

inline void on_access(const void* pointer, size_t bytes, bool write, bool aligned, const void* code) {
  Thread* thread = runtime.current;
  const auto address = reinterpret_cast<u64>(pointer);
  if (thread == nullptr || address - thread->stack < kStackBytes || is_own(*thread, address) || bytes == 0)
    return;
  if (runtime.overdue) report_livelock_at(*thread, code);
  check_access(*thread, address, static_cast<u32>(bytes), write, aligned, code);
}

}  // namespace flashgen::emu

#define FLASHGEN_EMU_HOOK(name, parameters, bytes, write, aligned)                         \
  void __tsan_##name parameters {                                                          \
    flashgen::emu::on_access(address, bytes, write, aligned, __builtin_return_address(0)); \
  }
#define FLASHGEN_EMU_HOOKS(bytes)                                                \
  FLASHGEN_EMU_HOOK(read##bytes, (void* address), bytes, false, true)            \
  FLASHGEN_EMU_HOOK(write##bytes, (void* address), bytes, true, true)            \
  FLASHGEN_EMU_HOOK(unaligned_read##bytes, (void* address), bytes, false, false) \
  FLASHGEN_EMU_HOOK(unaligned_write##bytes, (void* address), bytes, true, false)

#pragma GCC visibility push(default)
extern "C" {
FLASHGEN_EMU_HOOKS(1)
FLASHGEN_EMU_HOOKS(2)
FLASHGEN_EMU_HOOKS(4)
FLASHGEN_EMU_HOOKS(8)
FLASHGEN_EMU_HOOKS(16)
FLASHGEN_EMU_HOOK(read_range, (void* address, size_t bytes), bytes, false, false)
FLASHGEN_EMU_HOOK(write_range, (void* address, size_t bytes), bytes, true, false)

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// Clang calls these for whole structs. Newer versions call __tsan_ functions. Older ones call the C library's
// functions, which the build redirects to the __wrap_ functions.
#define FLASHGEN_EMU_MEMORY_HOOKS(prefix)                                               \
  void* prefix##memcpy(void* target, const void* source, size_t bytes) {                \
    flashgen::emu::on_access(source, bytes, false, false, __builtin_return_address(0)); \
    flashgen::emu::on_access(target, bytes, true, false, __builtin_return_address(0));  \
    return memcpy(target, source, bytes);                                               \
  }                                                                                     \
  void* prefix##memmove(void* target, const void* source, size_t bytes) {               \
    flashgen::emu::on_access(source, bytes, false, false, __builtin_return_address(0)); \
    flashgen::emu::on_access(target, bytes, true, false, __builtin_return_address(0));  \
    return memmove(target, source, bytes);                                              \
  }                                                                                     \
  void* prefix##memset(void* target, int value, size_t bytes) {                         \
    flashgen::emu::on_access(target, bytes, true, false, __builtin_return_address(0));  \
    return memset(target, value, bytes);                                                \
  }
FLASHGEN_EMU_MEMORY_HOOKS(__tsan_)
FLASHGEN_EMU_MEMORY_HOOKS(__wrap_)
}
#pragma GCC visibility pop

#undef FLASHGEN_EMU_MEMORY_HOOKS
#undef FLASHGEN_EMU_HOOK
#undef FLASHGEN_EMU_HOOKS
