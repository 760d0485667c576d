// Checks of addresses: shared memory by offset, global memory against the caller's buffers.
#pragma once
#include "report.h"

namespace flashgen::emu {

inline u32 shared_bytes() { return static_cast<u32>(runtime.launch.shared_bytes); }

// The host address of `bytes` bytes of a thread's shared memory.
inline u8* shared_range(const Thread& thread, u32 address, u32 bytes, u32 alignment, const char* what) {
  const u32 offset = address - kSharedBase;
  if (offset > shared_bytes() || bytes > shared_bytes() - offset) {
    fail_for(thread, "shared memory out of bounds",
             "%s touches %u bytes at offset %d of %u bytes of shared memory", what, bytes,
             static_cast<i32>(offset), shared_bytes());
  }
  if (address % alignment != 0) {
    fail_for(thread, "misaligned",
             "%s needs a shared-memory address that is a multiple of %u; this is offset %u", what, alignment,
             offset);
  }
  return thread.block->shared + offset;
}

// The buffer nearest to an address; null if there are none.
inline const FlashgenEmuBuffer* nearest_buffer(u64 address) {
  const FlashgenEmuBuffer* best = nullptr;
  u64 best_distance = ~0ull;
  for (const FlashgenEmuBuffer& buffer : runtime.buffers) {
    const u64 end = buffer.address + buffer.bytes;
    const u64 distance = address < buffer.address ? buffer.address - address
                         : address >= end         ? address - end + 1
                                                  : 0;
    if (distance < best_distance) {
      best = &buffer;
      best_distance = distance;
    }
  }
  return best;
}

// "address 0x..., 32 bytes past the end of 'q' (4096 bytes)".
inline void describe_address(u64 address, char* text, size_t size) {
  const FlashgenEmuBuffer* buffer = nearest_buffer(address);
  const auto where = static_cast<unsigned long long>(address);
  if (address < 4096) {
    snprintf(text, size, "address 0x%llx, a null pointer", where);
  } else if (buffer == nullptr) {
    snprintf(text, size, "address 0x%llx", where);
  } else {
    const i64 offset = static_cast<i64>(address - buffer->address);
    const auto bytes = static_cast<unsigned long long>(buffer->bytes);
    if (offset < 0) {
      snprintf(text, size, "address 0x%llx, %lld bytes before '%s' (%llu bytes)", where,
               static_cast<long long>(-offset), buffer->name, bytes);
    } else if (offset >= static_cast<i64>(bytes)) {
      snprintf(text, size, "address 0x%llx, %lld bytes past the end of '%s' (%llu bytes)", where,
               offset - static_cast<i64>(bytes), buffer->name, bytes);
    } else {
      snprintf(text, size, "address 0x%llx, offset %lld of '%s' (%llu bytes)", where,
               static_cast<long long>(offset), buffer->name, bytes);
    }
  }
}

// The first buffer that contains all of these bytes, or null.
inline const FlashgenEmuBuffer* buffer_of(u64 address, u32 bytes) {
  for (const FlashgenEmuBuffer& buffer : runtime.buffers) {
    if (address >= buffer.address && address + bytes <= buffer.address + buffer.bytes) return &buffer;
  }
  return nullptr;
}

inline void require_global(const void* pointer, u32 bytes, u32 alignment, bool write, const char* what) {
  const auto address = reinterpret_cast<u64>(pointer);
  char place[256];
  if (!runtime.buffers.empty()) {
    const FlashgenEmuBuffer* buffer = buffer_of(address, bytes);
    if (buffer == nullptr) {
      describe_address(address, place, sizeof place);
      fail("global memory out of bounds", "%s touches %u bytes at %s", what, bytes, place);
    }
    if (write && !buffer->writable) {
      describe_address(address, place, sizeof place);
      fail("write to read-only memory", "%s writes to %s", what, place);
    }
  }
  if (address % alignment != 0) {
    describe_address(address, place, sizeof place);
    fail("misaligned", "%s needs an address that is a multiple of %u; this is %s", what, alignment, place);
  }
}

// Every access of global memory passes through here once. It counts the bytes.
inline void check_global(const void* pointer, u32 bytes, u32 alignment, bool write, const char* what) {
  require_global(pointer, bytes, alignment, write, what);
  if (runtime.launch.traffic == nullptr || runtime.buffers.empty()) return;
  const auto index = buffer_of(reinterpret_cast<u64>(pointer), bytes) - runtime.buffers.data();
  FlashgenEmuTraffic& traffic = runtime.launch.traffic[index];
  (write ? traffic.written : traffic.read) += bytes;
}

}  // namespace flashgen::emu
