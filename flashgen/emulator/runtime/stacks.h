// Memory of the machine: a stack per thread and shared memory per resident block, each next to pages that
// trap.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include "model.h"

namespace flashgen::emu {

constexpr size_t kStackBytes = 128 * 1024;

inline size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Reserves address space, which costs memory only where it is touched. Returns null if there is none.
inline u8* reserve(size_t bytes) {
  void* start =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? nullptr : static_cast<u8*>(start);
}

// Reserves address space that traps until mprotect allows accesses. Returns null if there is none.
inline u8* reserve_traps(size_t bytes) {
  void* start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? nullptr : static_cast<u8*>(start);
}

struct Stacks {
  u8* start = nullptr;
  size_t count = 0;

  bool grow(size_t wanted) {
    if (wanted <= count) return true;
    if (start != nullptr) munmap(start, count * kStackBytes);
    count = 0;
    start = reserve(wanted * kStackBytes);
    if (start == nullptr) return false;
    count = wanted;
    for (size_t i = 0; i < count; ++i) mprotect(bottom(i), page_bytes(), PROT_NONE);
    return true;
  }
  u8* bottom(size_t index) const { return start + index * kStackBytes; }
  // Tops are staggered by cache lines. Otherwise all stacks compete for the same cache sets.
  u8* top(size_t index) const { return bottom(index + 1) - 64 * (1 + index * 37 % 61); }
  bool contains(u64 address) const {
    return start != nullptr && address - reinterpret_cast<u64>(start) < count * kStackBytes;
  }
  bool in_guard(u64 address) const {
    return contains(address) && (address - reinterpret_cast<u64>(start)) % kStackBytes < page_bytes();
  }
};

// Shared memory of the resident blocks. Pages that trap lie before each and, up to its alignment, right
// behind it.
struct SharedPool {
  static constexpr size_t kAlignment = 1024;
  // Wider than any block's shared memory, so that no wrong offset leads into a neighbour.
  static constexpr size_t kGuardBytes = 256 * 1024;
  // On either side of all blocks: more than a 32-bit offset can reach.
  static constexpr size_t kReach = 1ull << 32;
  u8* start = nullptr;
  size_t count = 0;
  size_t pages = 0;
  size_t reach = 0;

  size_t slot_bytes() const { return pages * page_bytes() + 2 * kGuardBytes; }
  bool prepare(size_t wanted, size_t bytes) {
    const size_t wanted_pages = (bytes + page_bytes() - 1) / page_bytes();
    if (wanted <= count && wanted_pages == pages) return true;
    release();
    count = wanted;
    pages = wanted_pages;
    // If address space is short, only the blocks' own guards are used.
    if (!map(kReach) && !map(0)) return false;
    for (size_t i = 0; i < count; ++i) mprotect(first(i), pages * page_bytes(), PROT_READ | PROT_WRITE);
    return true;
  }
  bool map(size_t wanted_reach) {
    u8* memory = reserve_traps(count * slot_bytes() + 2 * wanted_reach);
    if (memory == nullptr) return false;
    reach = wanted_reach;
    start = memory + reach;
    return true;
  }
  void release() {
    if (start != nullptr) munmap(start - reach, count * slot_bytes() + 2 * reach);
    start = nullptr;
  }
  u8* slot(size_t index, size_t bytes) const {
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return start + (index + 1) * slot_bytes() - kGuardBytes - rounded;
  }
  bool contains(u64 address) const {
    return start != nullptr &&
           address - reinterpret_cast<u64>(start - reach) < count * slot_bytes() + 2 * reach;
  }
  // The memory of a place that does not trap.
  u8* first(size_t index) const { return start + index * slot_bytes() + kGuardBytes; }
  u8* last(size_t index) const { return first(index) + pages * page_bytes(); }
  void poison(size_t index) const { memset(first(index), kPoisonByte, pages * page_bytes()); }
  // The offset of an overwritten byte outside of `shared`, or kNone.
  static constexpr i64 kNone = -1ll << 62;
  i64 stray_write(size_t index, const u8* shared, size_t bytes) const {
    for (const u8* byte = first(index); byte < last(index); ++byte) {
      if (byte == shared) byte += bytes;
      if (byte < last(index) && *byte != kPoisonByte) return byte - shared;
    }
    return kNone;
  }
};

inline Stacks stacks;
inline SharedPool shared_pool;

}  // namespace flashgen::emu
