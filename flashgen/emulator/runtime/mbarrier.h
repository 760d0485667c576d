// mbarriers. Their state lies outside of the emulated memory. The 8 bytes of a barrier hold a mark and an
// index, so the emulator detects a barrier that was overwritten or never initialized.
#pragma once
#include "cluster.h"
#include "proxy.h"

namespace flashgen::emu {

constexpr u32 kMaxArrivals = (1u << 20) - 1;
constexpr i32 kMaxPendingBytes = (1 << 20) - 1;
constexpr u32 kMarkOfMBarrier = 0xba221e20u;
constexpr u32 kMBarrierBytes = 8;

inline u32 address_in_block(u32 address) { return address & ((1u << kRankShift) - 1); }

// The contents of a barrier's memory.
struct MBarrierMark {
  u32 mark;
  u32 index;
};

// An mbarrier and its block.
struct MBarrierPlace {
  Block& block;
  MBarrier& barrier;
};

inline MBarrier* find_mbarrier(Block& block, u32 offset) {
  MBarrierMark found;
  memcpy(&found, block.shared + offset, sizeof found);
  if (found.mark != (kMarkOfMBarrier ^ offset) || found.index >= block.mbarriers.size()) return nullptr;
  MBarrier& barrier = block.mbarriers[found.index];
  return barrier.live && barrier.offset == offset ? &barrier : nullptr;
}

inline MBarrier* mbarrier_placed_at(Block& block, u32 offset) {
  for (MBarrier& barrier : block.mbarriers)
    if (barrier.offset == offset) return &barrier;
  return nullptr;
}

inline u32 index_of(const Block& block, const MBarrier& barrier) {
  return static_cast<u32>(&barrier - block.mbarriers.data());
}

[[noreturn]] inline void report_no_mbarrier(Block& block, u32 offset, const char* what) {
  const MBarrier* lost = mbarrier_placed_at(block, offset);
  if (lost == nullptr) {
    fail("uninitialised mbarrier",
         "%s at offset %u of shared memory, where no thread has called mbarrier_init", what, offset);
  }
  fail("uninitialised mbarrier", "%s at offset %u of shared memory, where the barrier of %s:%d was %s", what,
       offset, base_name(lost->site.file), lost->site.line, lost->live ? "written over" : "invalidated");
}

// ---- Race mode: uses of a barrier must be ordered after its initialization, and TMA also needs a fence.

// Even a relaxed arrival at the cluster's barrier publishes the fence.
inline bool came_by_cluster_barrier(const Thread& thread, const MBarrier& barrier) {
  return barrier.fence_clock != 0 && thread.block->cluster->phase > barrier.fence_phase &&
         !(thread.arrived_at_cluster && thread.cluster_phase == barrier.fence_phase);
}

inline void check_initialisation_is_known(const Thread& thread, const MBarrierPlace& place, const char* what,
                                          bool async) {
  const MBarrier& barrier = place.barrier;
  if (came_by_cluster_barrier(thread, barrier)) return;
  const u32 index = clock_index(place.block.index, static_cast<u32>(barrier.init_thread));
  const u32 known = thread.clocks[index];
  if (known < barrier.init_clock) {
    fail("race",
         "%s of the mbarrier at offset %u of shared memory, which thread %d initialises at %s:%d; no barrier "
         "orders "
         "the two",
         what, barrier.offset, barrier.init_thread, base_name(barrier.site.file), barrier.site.line);
  }
  const bool fenced = barrier.fence_clock != 0 && known >= barrier.fence_clock;
  if (async && !fenced && thread.clocks[async_index(index)] < barrier.init_clock) {
    fail("missing fence",
         "%s counts on the mbarrier at offset %u of shared memory, whose initialisation at %s:%d the async "
         "proxy "
         "may not have seen; call fence_mbarrier_init after it, before the barrier that publishes it",
         what, barrier.offset, base_name(barrier.site.file), barrier.site.line);
  }
}

// The barrier at an address in any block of the cluster. `async`: TMA uses it.
inline MBarrierPlace use_mbarrier_of_cluster(u32 address, const char* what, bool async = false) {
  Thread& thread = self();
  Block& block = cluster_range(thread, address, kMBarrierBytes, kMBarrierBytes, what).block;
  const u32 offset = address_in_block(address) - kSharedBase;
  MBarrier* barrier = find_mbarrier(block, offset);
  if (barrier == nullptr) report_no_mbarrier(block, offset, what);
  if (runtime.launch.race) check_initialisation_is_known(thread, {block, *barrier}, what, async);
  return {block, *barrier};
}

inline MBarrierPlace use_mbarrier(u32 address, const char* what) {
  if (address >> kRankShift != 0)
    fail("invalid operand",
         "%s at address 0x%x of map_to_rank; this takes a barrier of the thread's own block", what, address);
  return use_mbarrier_of_cluster(address, what);
}

// ---- Phases

inline void end_phase(Block& block, MBarrier& barrier) {
  ++barrier.phase;
  ++barrier.ended;
  barrier.pending = barrier.count;
  runtime.failed_try_waits = 0;
  if (runtime.launch.race) {
    note(barrier.arriving, phase_index(number_of(block, index_of(block, barrier))), barrier.ended);
    barrier.ended_with = barrier.arriving;
  }
  for (Thread* thread : barrier.waiters) {
    if (runtime.launch.race) learn(*thread, barrier.ended_with);
    thread->may_fail = false;
    thread->phase_ended = true;
    make_ready(*thread);
  }
  barrier.waiters.clear();
}

inline void end_phase_if_complete(Block& block, MBarrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) end_phase(block, barrier);
}

inline void expect_bytes(MBarrier& barrier, u32 bytes) {
  const i64 announced = static_cast<i64>(barrier.bytes) + bytes;
  if (announced > kMaxPendingBytes) {
    fail("mbarrier overflow", "%lld bytes would be expected at the mbarrier at offset %u; its limit is %d",
         static_cast<long long>(announced), barrier.offset, kMaxPendingBytes);
  }
  barrier.bytes = static_cast<i32>(announced);
}

inline void arrive(const MBarrierPlace& place) {
  MBarrier& barrier = place.barrier;
  if (barrier.pending == 0) {
    fail("mbarrier overflow",
         "an arrival at the mbarrier at offset %u, where all %u arrivals of this phase are in and %d bytes "
         "are "
         "missing",
         barrier.offset, barrier.count, barrier.bytes);
  }
  Thread& thread = self();
  if (runtime.launch.race) publish(thread, barrier.arriving);
  --barrier.pending;
  end_phase_if_complete(place.block, barrier);
}

// Bytes of a copy have arrived.
inline void complete_bytes(Block& block, MBarrier& barrier, u32 bytes) {
  barrier.bytes -= static_cast<i32>(bytes);
  end_phase_if_complete(block, barrier);
}

inline bool phase_has_ended(const MBarrier& barrier, u32 parity) { return (barrier.phase & 1) != parity; }

// ---- Waits and try_waits

inline void describe_mbarrier_wait(const Thread& thread, char* text, size_t size) {
  const MBarrier& barrier = thread.block->mbarriers[thread.waits_at];
  char bytes[64] = "";
  if (barrier.bytes > 0) snprintf(bytes, sizeof bytes, " and misses %d bytes", barrier.bytes);
  if (barrier.bytes < 0) snprintf(bytes, sizeof bytes, " and %d bytes more than expected", -barrier.bytes);
  snprintf(text, size,
           "%s for parity %u of the barrier at offset %u of shared memory, whose phase %u (parity %u) has %u "
           "of %u "
           "arrivals%s",
           thread.may_fail ? "mbarrier_try_wait" : "mbarrier_wait", thread.parity, barrier.offset,
           barrier.phase, barrier.phase & 1, barrier.count - barrier.pending, barrier.count, bytes);
}

inline void wait_at(Thread& thread, MBarrier& barrier, u32 parity, bool may_fail) {
  thread.waits_at = index_of(*thread.block, barrier);
  thread.parity = parity;
  thread.may_fail = may_fail;
  thread.try_wait_number = ++runtime.try_waits;
  thread.phase_ended = false;
  barrier.waiters.push_back(&thread);
  park(describe_mbarrier_wait);
}

// A try_wait fails if nothing else can happen, and under the random schedules at random.
inline bool wait_for_phase(u32 address, u32 parity, bool may_fail) {
  const char* what = may_fail ? "mbarrier_try_wait" : "mbarrier_wait";
  if (parity > 1) fail("invalid operand", "%s for parity %u, which is neither 0 nor 1", what, parity);
  Thread& thread = self();
  MBarrier& barrier = use_mbarrier(address, what).barrier;
  if (phase_has_ended(barrier, parity)) {
    if (runtime.launch.race) learn(thread, barrier.ended_with);
    maybe_yield();
    return true;
  }
  if (may_fail && runtime.randomised && one_in(4)) {
    maybe_yield();
    return false;
  }
  wait_at(thread, barrier, parity, may_fail);
  return thread.phase_ended;
}

// The thread with the oldest pending try_wait.
inline Thread* oldest_try_wait() {
  Thread* first = nullptr;
  for (Block& block : runtime.blocks) {
    if (block.live == 0) continue;
    for (Thread& thread : block.threads) {
      if (!thread.may_fail) continue;
      if (first == nullptr || thread.try_wait_number < first->try_wait_number) first = &thread;
    }
  }
  return first;
}

// No thread can run: the oldest try_wait fails. Returns false if there is none, or if they have failed too
// often without progress.
inline bool fail_a_try_wait() {
  constexpr u64 kMostFailures = 64;
  const u64 threads = runtime.blocks.size() * static_cast<u64>(runtime.launch.threads);
  Thread* thread = oldest_try_wait();
  if (thread == nullptr || ++runtime.failed_try_waits > kMostFailures * threads) return false;
  thread->may_fail = false;
  std::erase(thread->block->mbarriers[thread->waits_at].waiters, thread);
  make_ready(*thread);
  return true;
}

}  // namespace flashgen::emu

void flashgen_emu_mbarrier_arrive(unsigned barrier, int in_cluster, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  arrive(in_cluster ? use_mbarrier_of_cluster(barrier, "mbarrier_arrive_cluster")
                    : use_mbarrier(barrier, "mbarrier_arrive"));
  maybe_yield();
}

void flashgen_emu_mbarrier_expect_tx(unsigned barrier, unsigned bytes, int arrives, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  const MBarrierPlace place =
      use_mbarrier(barrier, arrives ? "mbarrier_arrive_expect_tx" : "mbarrier_expect_tx");
  expect_bytes(place.barrier, bytes);
  if (arrives) arrive(place);
  maybe_yield();
}

int flashgen_emu_mbarrier_wait(unsigned barrier, unsigned parity, int may_fail, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  return wait_for_phase(barrier, parity, may_fail != 0);
}
