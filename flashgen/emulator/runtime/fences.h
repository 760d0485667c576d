// Checks of the order before a wgmma: of ordinary accesses of its registers (wgmma_fence), and of writes to
// shared memory that it reads. The left operand's registers are read at the issue, because the compiler keeps
// later values of the same array in other registers.
#pragma once
#include "proxy.h"
#include "wgmma_operands.h"

namespace flashgen::emu {

// ---- Registers

inline u64 digest(const void* registers, u32 bytes) {
  u64 hash = 0;
  for (u32 i = 0; i < bytes / 4; ++i) {
    u32 word;
    memcpy(&word, static_cast<const u8*>(registers) + 4 * i, 4);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  }
  return hash;
}

inline void note_fence(Thread& thread) {
  thread.warpgroup_lane.fenced = true;
  for (WatchedRegisters& watched : thread.warpgroup_lane.watched)
    watched.digest = digest(watched.registers, watched.bytes);
}

// Registers that a product has used are watched from then on. At the next product they must be as they were
// at the fence.
inline void require_unchanged(Thread& thread, const void* registers, u32 bytes, const char* what) {
  constexpr size_t kMostWatched = 64;
  std::vector<WatchedRegisters>& watched = thread.warpgroup_lane.watched;
  for (const WatchedRegisters& known : watched) {
    if (known.registers != registers || known.bytes != bytes) continue;
    if (known.digest == digest(registers, bytes)) return;
    fail("missing fence", "the %s changed between the last wgmma_fence and this wgmma", what);
  }
  if (watched.size() == kMostWatched) watched.erase(watched.begin());
  watched.push_back({registers, bytes, digest(registers, bytes)});
}

// `d` is null if earlier products of the same chain already own these accumulators. After each wait this
// requires a fence. The instruction set requires one only if the registers were accessed.
inline void require_fence(Thread& thread, const FlashgenEmuWgmma& form, const float* d) {
  if (!thread.warpgroup_lane.fenced) {
    fail("missing fence", "no wgmma_fence since %s",
         thread.warpgroup_lane.retired == 0 ? "the kernel began" : "the last wgmma_wait");
  }
  if (!runtime.launch.race) return;
  if (form.a != nullptr) require_unchanged(thread, form.a, 16, "left operand's registers");
  if (d != nullptr && form.accumulate)
    require_unchanged(thread, d, static_cast<u32>(form.columns) * 2, "accumulators");
}

// ---- Shared memory (race mode)

inline u32 tensor_core_agent(const Thread& thread) {
  return static_cast<u32>(runtime.launch.threads + thread.thread_idx / kWarpgroupSize);
}

// The tensor cores read until the wait for the product, so later writes must be ordered after that wait.
// Earlier writes must be ordered before the product in each warp; the first lane of a warp is checked.
inline void watch_operands(Thread& thread, const FlashgenEmuWgmma& form, u32 number) {
  if (thread.lane != 0) return;
  const void* code = call_before(thread.code);
  const auto visit = [&](u32, u32, u32 address) {
    const u8* pointer = thread.block->shared + (address - kSharedBase);
    const Access access{thread,
                        *thread.block->shadow,
                        reinterpret_cast<u64>(pointer),
                        kChunkBytes,
                        How::wgmma,
                        code,
                        static_cast<i32>(tensor_core_agent(thread)),
                        number + 1};
    check_fenced(access);
    note_read(access);
  };
  const Operand right = right_operand(form);
  right.each_chunk(0, static_cast<u32>(right.lines), 0, static_cast<u32>(right.chunks), visit);
  if (form.a != nullptr) return;
  // Each warp reads its own 16 rows of the left operand.
  const Operand left = left_operand(form);
  const auto warp = static_cast<u32>(thread.warp_idx % 4);
  if (left.mn_major) {
    left.each_chunk(0, static_cast<u32>(left.lines), 2 * warp, 2, visit);
  } else {
    left.each_chunk(16 * warp, 16, 0, static_cast<u32>(left.chunks), visit);
  }
}

// The running lane has waited: the products before this one have read their operands.
inline void note_operands_read(Thread& thread, u32 number) {
  u32& known = thread.clocks[clock_index(thread.block->index, tensor_core_agent(thread))];
  if (known < number) known = number;
}

}  // namespace flashgen::emu
