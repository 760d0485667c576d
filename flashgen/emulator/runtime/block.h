// Barriers of a whole block. A thread that has returned from the kernel counts as arrived, as on the
// hardware.
#pragma once
#include "clocks.h"
#include "scheduler.h"

namespace flashgen::emu {

inline const char* barrier_name(bool votes) { return votes ? "block_any" : "block_sync"; }

// Releases all threads when the last live one has arrived.
inline void release_if_complete(Block& block) {
  Barrier& barrier = block.barrier;
  if (barrier.arrived == 0 || barrier.arrived < block.live) return;
  barrier.arrived = 0;
  barrier.result = barrier.any;
  if (runtime.launch.race) {
    Thread* first = block.threads.data();
    synchronise(first, first + block.threads.size(),
                [](const Thread& t) { return t.state == State::at_block || t.state == State::running; });
  }
  for (Thread& thread : block.threads) {
    if (thread.state == State::at_block) make_ready(thread);
  }
}

inline bool arrive_and_wait(bool votes, bool condition) {
  Thread& thread = self();
  Block& block = *thread.block;
  Barrier& barrier = block.barrier;
  require_no_products(thread);
  if (barrier.arrived == 0) {
    barrier.votes = votes;
    barrier.any = false;
    barrier.site = thread.site;
  } else if (barrier.votes != votes || !same_site(barrier.site, thread.site)) {
    fail("divergent barrier", "this thread is at %s while %d threads of its block wait at %s (%s:%d)",
         barrier_name(votes), barrier.arrived, barrier_name(barrier.votes), base_name(barrier.site.file),
         barrier.site.line);
  }
  barrier.any |= condition;
  ++barrier.arrived;
  if (barrier.arrived < block.live) {
    park(State::at_block);
  } else {
    release_if_complete(block);
    maybe_yield();
  }
  return barrier.result;
}

}  // namespace flashgen::emu

void flashgen_emu_block_sync(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  arrive_and_wait(false, false);
}

int flashgen_emu_block_any(int condition, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  return arrive_and_wait(true, condition != 0);
}
