// No thread can run: who waits where, and what is missing.
#pragma once
#include "block.h"
#include "warp.h"

namespace flashgen::emu {

// Text that grows in a fixed buffer; the stack it is used on is about to be abandoned.
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
  return a.state == b.state && same_site(a.site, b.site);
}

inline void describe_wait(TextBuffer& text, const Thread& thread) {
  if (thread.state == State::at_block) {
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
  const auto waits = [](const Thread& t) { return t.state == State::at_block || t.state == State::at_warp; };
  for (size_t first = 0; first < block.threads.size(); ++first) {
    const Thread& leader = block.threads[first];
    if (!waits(leader)) continue;
    bool told = false;
    for (size_t i = 0; i < first && !told; ++i) told = wait_alike(block.threads[i], leader);
    if (told) continue;
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

[[noreturn]] inline void report_deadlock() {
  static TextBuffer text;
  text.used = 0;
  for (const Block& block : runtime.blocks) {
    if (block.live > 0) describe_block(text, block);
  }
  fail("deadlock", "no thread can go on:%s", text.data);
}

}  // namespace flashgen::emu
