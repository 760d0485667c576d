// Reports of deadlocks: where threads wait, and for what.
#pragma once
#include <algorithm>

#include "block.h"
#include "warp.h"

namespace flashgen::emu {

// Text in a fixed buffer. It does not allocate, because its stack may be abandoned.
struct TextBuffer {
  char data[5600];
  size_t used = 0;

  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    if (used + 1 >= sizeof data) return;
    va_list arguments;
    va_start(arguments, format);
    const int written = vsnprintf(data + used, sizeof data - used, format, arguments);
    va_end(arguments);
    used = written < 0 ? used : used + static_cast<size_t>(written);
    if (used >= sizeof data) used = sizeof data - 1;
  }
};

inline bool wait_alike(const Thread& a, const Thread& b) {
  if (a.state != b.state || !same_site(a.site, b.site)) return false;
  if (a.state != State::waiting) return true;
  char what_a[256], what_b[256];
  a.describe(a, what_a, sizeof what_a);
  b.describe(b, what_b, sizeof what_b);
  return strcmp(what_a, what_b) == 0;
}

inline void describe_wait(TextBuffer& text, const Thread& thread) {
  if (thread.state == State::waiting) {
    char what[256];
    thread.describe(thread, what, sizeof what);
    text.add("%s:%d, %s", base_name(thread.site.file), thread.site.line, what);
  } else if (thread.state == State::at_block) {
    const Barrier& barrier = thread.block->barrier;
    text.add("%s at %s:%d (%d of %d threads have arrived)", barrier_name(barrier.votes),
             base_name(thread.site.file), thread.site.line, barrier.arrived, thread.block->live);
  } else {
    text.add("%s at %s:%d (%d of its warp's 32 lanes have arrived)", name_of(thread.warp->op),
             base_name(thread.site.file), thread.site.line, __builtin_popcount(thread.warp->arrived));
  }
}

// One line per group of threads that wait for the same thing at the same place.
inline void describe_block(TextBuffer& text, const Block& block) {
  text.add("\n  block %lld:", static_cast<long long>(block.index));
  const auto waits = [](const Thread& t) {
    return t.state == State::at_block || t.state == State::at_warp || t.state == State::waiting;
  };
  for (size_t first = 0; first < block.threads.size(); ++first) {
    const Thread& leader = block.threads[first];
    if (!waits(leader)) continue;
    bool reported = false;
    for (size_t i = 0; i < first && !reported; ++i) reported = wait_alike(block.threads[i], leader);
    if (reported) continue;
    i32 count = 0;
    u32 warps = 0;
    for (const Thread& thread : block.threads) {
      if (!wait_alike(thread, leader)) continue;
      ++count;
      warps |= 1u << thread.warp_idx;
    }
    text.add("\n    %d threads (warps", count);
    for (; warps != 0; warps &= warps - 1) text.add(" %d", lowest(warps));
    text.add(") wait at ");
    describe_wait(text, leader);
  }
  const i32 done = static_cast<i32>(block.threads.size()) - block.live;
  if (done > 0) text.add("\n    %d threads have returned", done);
}

inline const char* describe_deadlock() {
  static TextBuffer text;
  text.used = 0;
  for (const Block& block : runtime.blocks) {
    if (block.live > 0) describe_block(text, block);
  }
  const size_t waiting =
      (runtime.order.size() - runtime.started) * static_cast<size_t>(runtime.launch.cluster);
  if (waiting > 0) {
    text.add("\n  %zu blocks have not started; only with cooperative=True are all blocks resident", waiting);
  }
  return text.data;
}

[[noreturn]] inline void report_deadlock() { fail("deadlock", "no thread can run:%s", describe_deadlock()); }

// The same on the main stack, when a block has ended and no other block can run.
inline void report_deadlock_of_grid() {
  const auto is_stuck = [](const Block& block) { return block.live > 0; };
  const auto stuck = std::find_if(runtime.blocks.begin(), runtime.blocks.end(), is_stuck);
  report_for_block(*stuck, "deadlock", "no thread can run:%s", describe_deadlock());
}

}  // namespace flashgen::emu
