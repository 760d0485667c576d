// Initialization and invalidation of mbarriers, and the fence that publishes them.
#pragma once
#include "mbarrier.h"

namespace flashgen::emu {

inline MBarrier& add_mbarrier(Block& block) {
  if (runtime.launch.race && block.mbarriers.size() == kMBarrierClocks) {
    fail("mbarrier overflow", "a block has more than the %u mbarriers that race mode supports",
         kMBarrierClocks);
  }
  return block.mbarriers.emplace_back();
}

inline void initialise_mbarrier(u32 address, u32 count) {
  Thread& thread = self();
  Block& block = *thread.block;
  u8* memory = shared_range(thread, address, kMBarrierBytes, kMBarrierBytes, "mbarrier_init");
  const u32 offset = address - kSharedBase;
  if (count < 1 || count > kMaxArrivals)
    fail("invalid operand", "mbarrier_init for %u arrivals, which is not from 1 to %u", count, kMaxArrivals);
  MBarrier* barrier = mbarrier_placed_at(block, offset);
  if (barrier != nullptr && barrier->live) {
    fail("mbarrier initialised twice",
         "mbarrier_init at offset %u of shared memory, where the barrier of %s:%d is still valid; call "
         "mbarrier_invalidate first",
         offset, base_name(barrier->site.file), barrier->site.line);
  }
  if (barrier == nullptr) barrier = &add_mbarrier(block);
  barrier->offset = offset;
  barrier->live = true;
  barrier->count = barrier->pending = count;
  barrier->bytes = 0;
  barrier->phase = 0;
  barrier->site = thread.site;
  const MBarrierMark mark = {kMarkOfMBarrier ^ offset, index_of(block, *barrier)};
  memcpy(memory, &mark, sizeof mark);
  if (!runtime.launch.race) return;
  keep_async_clocks();
  barrier->init_thread = thread.thread_idx;
  barrier->init_clock = thread.clocks[own_index(thread)];
  barrier->fence_clock = 0;
  barrier->arriving = barrier->ended_with = {};
}

inline void invalidate_mbarrier(u32 address) {
  MBarrier& barrier = use_mbarrier(address, "mbarrier_invalidate").barrier;
  if (!barrier.waiters.empty() || barrier.bytes != 0) {
    fail("mbarrier in use",
         "mbarrier_invalidate at offset %u, where %d threads wait and %d bytes are missing", barrier.offset,
         static_cast<i32>(barrier.waiters.size()), barrier.bytes);
  }
  barrier.live = false;
  memset(self().block->shared + barrier.offset, kPoisonByte, kMBarrierBytes);
}

// Fences the barriers that this thread has initialized.
inline void fence_initialisation() {
  Thread& thread = self();
  if (!runtime.launch.race) return;
  for (MBarrier& barrier : thread.block->mbarriers) {
    if (barrier.init_thread != thread.thread_idx || barrier.fence_clock != 0) continue;
    barrier.fence_clock = thread.clocks[own_index(thread)];
    barrier.fence_phase = thread.block->cluster->phase;
  }
  begin_epoch(thread);
}

}  // namespace flashgen::emu

void flashgen_emu_mbarrier_init(unsigned barrier, unsigned count, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  initialise_mbarrier(barrier, count);
}

void flashgen_emu_mbarrier_invalidate(unsigned barrier, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  invalidate_mbarrier(barrier);
}

void flashgen_emu_fence_mbarrier_init(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  fence_initialisation();
  maybe_yield();
}

void flashgen_emu_fence_proxy_async(int global, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  if (runtime.launch.race) fence_async(self(), global != 0);
}
