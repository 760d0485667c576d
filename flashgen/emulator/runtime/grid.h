// Blocks that wait for each other through global memory, and grids that wait for earlier ones.
//
// A load_acquire, or an atomic_add of 0, first lets all other threads run, so that loops that poll end.
// Earlier grids finish as late as possible: until the first griddep_wait they may still access the buffers
// from_primary. Those that this grid may write are NaN until then. The others may be in read-only memory, and
// keep their values. In race mode, each thread that accesses one of either kind must be ordered after a
// griddep_wait. A later grid that starts early is invisible to this one, so griddep_launch_dependents does
// nothing.
#pragma once
#include <fcntl.h>

#include "race.h"
#include "scheduler.h"

namespace flashgen::emu {

// ---- Threads that poll

constexpr u32 kMostIdleRounds = 10000;

// Consecutive rounds of polling in which no value changed.
struct Polling {
  u32 idle_rounds = 0;
  u64 last = 0;
};

inline Polling polling;

inline void describe_polling(const Thread& thread, const char* by, char* text, size_t size) {
  char place[200];
  describe_address(thread.polled, place, sizeof place);
  snprintf(text, size, "%s of %s, which keeps its value", by, place);
}
inline void describe_poll(const Thread& thread, char* text, size_t size) {
  describe_polling(thread, "load_acquire", text, size);
}
inline void describe_atomic_poll(const Thread& thread, char* text, size_t size) {
  describe_polling(thread, "atomic_add of nothing", text, size);
}

inline bool polls(const Thread& thread) {
  return thread.state == State::waiting &&
         (thread.describe == describe_poll || thread.describe == describe_atomic_poll ||
          thread.describe == describe_forced_yield);
}

// A digest of the polling threads, their addresses and the values there.
inline u64 digest_of_pollers() {
  u64 hash = 0;
  for (const Block& block : runtime.blocks) {
    if (block.live == 0) continue;
    for (const Thread& thread : block.threads) {
      if (!polls(thread)) continue;
      // What a thread that was forced to yield polls is unknown, so it counts as a change.
      if (thread.describe == describe_forced_yield) return polling.last + 1;
      u32 value;
      memcpy(&value, reinterpret_cast<const void*>(thread.polled), sizeof value);
      for (const u64 word : {reinterpret_cast<u64>(&thread), reinterpret_cast<u64>(thread.code),
                             thread.polled, static_cast<u64>(value)})
        hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    }
  }
  return hash;
}

// No other thread can run: the polling threads try again. Null if there are none, or if nothing changes.
inline Thread* wake_pollers() {
  const u64 now = digest_of_pollers();
  polling.idle_rounds = now == polling.last ? polling.idle_rounds + 1 : 0;
  polling.last = now;
  if (polling.idle_rounds > kMostIdleRounds) return nullptr;
  for (Block& block : runtime.blocks) {
    if (block.live == 0) continue;
    for (Thread& thread : block.threads) {
      if (polls(thread)) make_ready(thread);
    }
  }
  return find_ready();
}

inline void yield_while_polling(const void* address, Description describe) {
  if (runtime.randomised && one_in(2)) return;
  self().polled = reinterpret_cast<u64>(address);
  park(describe);
}

// ---- Releases and acquires (race mode): the clocks that were released at each address

inline std::unordered_map<u64, Knowledge> released;

// `continues`: an atomic update continues the release sequence at the address. A store begins a new one.
inline void release_at(Thread& thread, const void* address, bool continues) {
  auto known = std::make_shared<Foreign>();
  const i64 first = thread.block->index - thread.block->rank;
  const u32 agents = agents_of_block();
  for (u32 rank = 0; rank < cluster_size(); ++rank)
    learn(*known, first + rank, thread.clocks + rank * agents, agents);
  Knowledge all = std::move(known);
  learn(all, thread.foreign.known);
  Knowledge& there = released[reinterpret_cast<u64>(address)];
  if (continues) learn(all, there);
  there = std::move(all);
  begin_epoch(thread);
}

inline void acquire_at(Thread& thread, const void* address) {
  const auto found = released.find(reinterpret_cast<u64>(address));
  if (found == released.end()) return;
  learn(thread.foreign.known, found->second);
  for (const auto& [block, clocks] : found->second->blocks) {
    if (block == kPrimaryGrids || !same_cluster(block, thread.block->index)) continue;
    learn(thread.clocks + clock_index(block, 0), clocks.data(), agents_of_block());
  }
}

inline void watch_atomic(const void* address, u32 bytes, bool write, How how) {
  check_global(address, bytes, bytes, write, name_of(how));
  if (runtime.launch.race) watch_global(self(), address, bytes, how, call_before(self().code));
}

// ---- Earlier grids

struct PrimaryBuffer {
  u8* address;
  std::vector<u8> content;
};

inline std::vector<PrimaryBuffer> primary_buffers;

// Zeroes the buffer. Returns false, without a fault, if it cannot be written.
inline bool clear_buffer(u8* address, size_t bytes) {
  const int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  if (zeros < 0) return false;
  size_t done = 0;
  while (done < bytes) {
    const ssize_t count = read(zeros, address + done, bytes - done);
    if (count <= 0) break;
    done += static_cast<size_t>(count);
  }
  close(zeros);
  return done == bytes;
}

// Returns false if a buffer that this grid may write is in read-only memory.
inline bool poison_primary_buffers() {
  primary_buffers.clear();
  runtime.awaits_primary = false;
  for (const FlashgenEmuBuffer& buffer : runtime.buffers) {
    if (!buffer.from_primary) continue;
    runtime.awaits_primary = true;
    if (!buffer.writable) continue;
    auto* address = reinterpret_cast<u8*>(buffer.address);
    primary_buffers.push_back({address, {address, address + buffer.bytes}});
    if (!clear_buffer(address, buffer.bytes)) {
      primary_buffers.pop_back();
      return false;
    }
    memset(address, kPoisonByte, buffer.bytes);
  }
  return true;
}

// In reverse order, because the saved contents of overlapping buffers include the poison of earlier ones.
inline void restore_primary_buffers() {
  for (auto saved = primary_buffers.rbegin(); saved != primary_buffers.rend(); ++saved)
    memcpy(saved->address, saved->content.data(), saved->content.size());
  primary_buffers.clear();
}

inline void wait_for_primary() {
  restore_primary_buffers();
  if (!runtime.launch.race || !runtime.awaits_primary) return;
  static const Knowledge done = [] {
    auto known = std::make_shared<Foreign>();
    known->blocks[kPrimaryGrids] = {1};
    return known;
  }();
  learn(self().foreign.known, done);
}

}  // namespace flashgen::emu

unsigned flashgen_emu_atomic_add_u32(unsigned* address, unsigned value, int release, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  watch_atomic(address, sizeof *address, true, How::atomic_add);
  // Adding 0 is polling.
  value == 0 ? yield_while_polling(address, describe_atomic_poll) : made_progress();
  const unsigned before = *address;
  *address = before + value;
  if (runtime.launch.race && release) release_at(self(), address, true);
  maybe_yield();
  return before;
}

unsigned flashgen_emu_atomic_inc_acq_rel(unsigned* address, unsigned last, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  watch_atomic(address, sizeof *address, true, How::atomic_inc);
  const unsigned before = *address;
  *address = before >= last ? 0 : before + 1;
  made_progress();
  if (runtime.launch.race) {
    acquire_at(self(), address);
    release_at(self(), address, true);
  }
  maybe_yield();
  return before;
}

float flashgen_emu_atomic_add_f32(float* address, float value, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  watch_atomic(address, sizeof *address, true, How::atomic_add);
  const float before = *address;
  *address = before + value;
  made_progress();
  maybe_yield();
  return before;
}

void flashgen_emu_atomic_or(unsigned* address, unsigned bits, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  watch_atomic(address, sizeof *address, true, How::atomic_or);
  *address |= bits;
  made_progress();
  maybe_yield();
}

void flashgen_emu_store_release(unsigned* address, unsigned value, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  watch_atomic(address, sizeof *address, true, How::store_release);
  *address = value;
  made_progress();
  if (runtime.launch.race) release_at(self(), address, false);
  maybe_yield();
}

unsigned flashgen_emu_load_acquire(const unsigned* address, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  require_global(address, sizeof *address, sizeof *address, false, "load_acquire");
  yield_while_polling(address, describe_poll);
  watch_atomic(address, sizeof *address, false, How::load_acquire);
  if (runtime.launch.race) acquire_at(self(), address);
  return *address;
}

void flashgen_emu_expect_cooperative_launch(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  if (runtime.launch.cooperative) return;
  fail("launch not cooperative",
       "blocks wait for each other here, but the grid of %lld blocks was not launched with cooperative=True",
       static_cast<long long>(runtime.block_count));
}

void flashgen_emu_griddep_wait(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  wait_for_primary();
  maybe_yield();
}

void flashgen_emu_griddep_launch_dependents(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  maybe_yield();
}
