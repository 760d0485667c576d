// Named barriers of whole warps, some of which may arrive without waiting.
#pragma once
#include "async_clocks.h"
#include "scheduler.h"

namespace flashgen::emu {

constexpr i32 kNamedBarriers = 16;

enum class Joining { arrives, waits, votes };

inline const char* named_barrier_name(Joining how) {
  if (how == Joining::votes) return "named_barrier_any";
  return how == Joining::waits ? "named_barrier_sync" : "named_barrier_arrive";
}

inline void check_named_barrier(i32 barrier, i32 threads, Joining how) {
  if (barrier < 1 || barrier >= kNamedBarriers) {
    fail("invalid operand", "%s of barrier %d, which is not from 1 to 15 (0 is that of block_sync)",
         named_barrier_name(how), barrier);
  }
  if (threads <= 0 || threads % kWarpSize != 0 || threads > runtime.launch.threads) {
    fail("invalid operand", "%s of barrier %d by %d threads, which is not a multiple of 32 from 32 to %d",
         named_barrier_name(how), barrier, threads, runtime.launch.threads);
  }
}

// The hardware counts warps, so it counts a partial warp as a whole one.
inline void check_whole_warps(const NamedBarrier& barrier, i32 number) {
  for (const u32 lanes : barrier.lanes) {
    if (lanes == 0 || lanes == kAllLanes) continue;
    fail("divergent barrier", "only %d lanes of a warp take part in named barrier %d; all 32 must",
         __builtin_popcount(lanes), number);
  }
}

inline void join_named_barrier(Thread& thread, NamedBarrier& barrier, i32 number, i32 threads, Joining how) {
  const bool votes = how == Joining::votes;
  if (barrier.arrived == 0) {
    barrier.expected = threads;
    barrier.site = thread.site;
    barrier.votes = votes;
    barrier.any = false;
  }
  if (barrier.votes != votes) {
    fail("divergent barrier", "%s of barrier %d, but the first to arrive %s (%s:%d)", named_barrier_name(how),
         number, barrier.votes ? "called named_barrier_any" : "did not vote", base_name(barrier.site.file),
         barrier.site.line);
  }
  if (barrier.expected != threads) {
    fail("divergent barrier",
         "%s of barrier %d counts %d threads, but the first to arrive counted %d (%s:%d)",
         named_barrier_name(how), number, threads, barrier.expected, base_name(barrier.site.file),
         barrier.site.line);
  }
  const u32 lane = 1u << thread.lane;
  if ((barrier.lanes[thread.warp_idx] & lane) != 0) {
    fail("divergent barrier",
         "%s of barrier %d by a thread that has already arrived; %d of %d threads have, so it would count "
         "twice",
         named_barrier_name(how), number, barrier.arrived, threads);
  }
  barrier.lanes[thread.warp_idx] |= lane;
  if (how != Joining::arrives) barrier.sleepers[thread.warp_idx] |= lane;
  ++barrier.arrived;
  // An arrival publishes what came before it.
  if (runtime.launch.race) publish(thread, barrier.published);
}

inline void release_named_barrier(Block& block, NamedBarrier& barrier) {
  for (i32 warp = 0; warp < kMaxWarps; ++warp) {
    for (u32 rest = barrier.sleepers[warp]; rest != 0; rest &= rest - 1) {
      Thread& thread = block.threads[warp * kWarpSize + lowest(rest)];
      thread.any_at_barrier = barrier.any;
      if (runtime.launch.race) learn(thread, barrier.published);
      if (thread.state == State::waiting) make_ready(thread);
    }
    barrier.lanes[warp] = barrier.sleepers[warp] = 0;
  }
  barrier.arrived = barrier.expected = 0;
  barrier.published = {};
}

inline void start_named_barriers(Block& block) {
  for (NamedBarrier& barrier : block.named_barriers) {
    barrier.arrived = barrier.expected = 0;
    barrier.published = {};
    memset(barrier.lanes, 0, sizeof barrier.lanes);
    memset(barrier.sleepers, 0, sizeof barrier.sleepers);
  }
}

inline void describe_named_barrier_wait(const Thread& thread, char* text, size_t size) {
  const NamedBarrier& barrier = thread.block->named_barriers[thread.waits_at];
  snprintf(text, size, "%s of barrier %u (%d of %d threads have arrived)",
           named_barrier_name(barrier.votes ? Joining::votes : Joining::waits), thread.waits_at,
           barrier.arrived, barrier.expected);
}

inline void arrive_at_named_barrier(i32 number, i32 threads, Joining how, bool condition = false) {
  check_named_barrier(number, threads, how);
  Thread& thread = self();
  NamedBarrier& barrier = thread.block->named_barriers[number];
  join_named_barrier(thread, barrier, number, threads, how);
  barrier.any |= condition;
  if (barrier.arrived == threads) {
    check_whole_warps(barrier, number);
    release_named_barrier(*thread.block, barrier);
  } else if (how != Joining::arrives) {
    thread.waits_at = static_cast<u32>(number);
    return park(describe_named_barrier_wait);
  }
  maybe_yield();
}

}  // namespace flashgen::emu

void flashgen_emu_named_barrier(int barrier, int threads, int waits, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  arrive_at_named_barrier(barrier, threads, waits != 0 ? Joining::waits : Joining::arrives);
}

int flashgen_emu_named_barrier_any(int barrier, int threads, int condition, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  arrive_at_named_barrier(barrier, threads, Joining::votes, condition != 0);
  return self().any_at_barrier ? 1 : 0;
}
