// Operations of a warp are meeting points: the last lane to arrive does the work for all.
#pragma once
#include "matrix.h"
#include "race.h"
#include "scheduler.h"

namespace flashgen::emu {

inline const char* name_of(WarpOp op) {
  switch (op) {
    case WarpOp::sync:
      return "warp_sync";
    case WarpOp::any:
      return "warp_any";
    case WarpOp::shuffle:
      return "shuffle";
    case WarpOp::ldmatrix:
      return "ldmatrix";
    default:
      return "mma";
  }
}

// Only warp_sync orders memory: a vote or a shuffle exchanges registers.
inline void run_any(Warp& warp) {
  u32 any = 0;
  for (const LaneCall& call : warp.calls) any |= call.value;
  for (const LaneCall& call : warp.calls) *static_cast<int*>(call.out) = any != 0;
}

inline void run_shuffle(Warp& warp) {
  for (i32 lane = 0; lane < kWarpSize; ++lane) {
    const LaneCall& call = warp.calls[lane];
    const i32 source = call.form[0] >= 0 && call.form[0] < kWarpSize ? call.form[0] : lane;
    *static_cast<u32*>(call.out) = warp.calls[source].value;
  }
}

// Lane 8i + r gives the address of row r of matrix i. Register i of lane 4g + t is row g, columns 2t and 2t +
// 1 of matrix i, or of its transpose.
inline void run_ldmatrix(Warp& warp, Thread* lanes) {
  const i32 count = warp.calls[0].form[0];
  const bool transposed = warp.calls[0].form[1] != 0;
  for (i32 matrix = 0; matrix < count; ++matrix) {
    u16 rows[8][8];
    for (i32 row = 0; row < 8; ++row) {
      Thread& thread = lanes[matrix * 8 + row];
      const u8* source = shared_range(thread, warp.calls[matrix * 8 + row].value, 16, 16, "ldmatrix");
      if (runtime.launch.race) watch_shared(thread, source, 16, How::ldmatrix, call_before(thread.code));
      memcpy(rows[row], source, 16);
    }
    for (i32 lane = 0; lane < kWarpSize; ++lane) {
      const i32 g = lane / 4;
      const i32 t = 2 * (lane % 4);
      const u32 low = transposed ? rows[t][g] : rows[g][t];
      const u32 high = transposed ? rows[t + 1][g] : rows[g][t + 1];
      static_cast<u32*>(warp.calls[lane].out)[matrix] = low | high << 16;
    }
  }
}

inline void run_warp_op(Warp& warp, Thread* lanes) {
  switch (warp.op) {
    case WarpOp::sync:
      if (runtime.launch.race) {
        synchronise(*lanes->block, lanes, lanes + kWarpSize, [](const Thread&) { return true; });
      }
      return;
    case WarpOp::any:
      return run_any(warp);
    case WarpOp::shuffle:
      return run_shuffle(warp);
    case WarpOp::ldmatrix:
      return run_ldmatrix(warp, lanes);
    case WarpOp::mma:
      return matrix_multiply(warp.calls, warp.calls[0].form[0],
                             warp.calls[0].form[1] == kFlashgenEmuBfloat16);
  }
}

// The running lane takes part in `op`; returns when all 32 lanes have, and it is done.
inline void meet(WarpOp op, const LaneCall& call) {
  Thread& thread = self();
  Warp& warp = *thread.warp;
  if (warp.live != kAllLanes) {
    fail("divergent collective",
         "%s needs all 32 lanes, but %d lanes of the warp have returned from the kernel", name_of(op),
         kWarpSize - __builtin_popcount(warp.live));
  }
  if (warp.arrived == 0) {
    warp.op = op;
    warp.site = thread.site;
  } else if (warp.op != op || !same_site(warp.site, thread.site)) {
    fail("divergent collective", "this lane is at %s while %d other lanes of its warp wait at %s (%s:%d)",
         name_of(op), __builtin_popcount(warp.arrived), name_of(warp.op), base_name(warp.site.file),
         warp.site.line);
  }
  warp.calls[thread.lane] = call;
  warp.arrived |= 1u << thread.lane;
  if (warp.arrived != kAllLanes) {
    park(State::at_warp);
    return;
  }
  warp.arrived = 0;
  Thread* lanes = &thread - thread.lane;
  run_warp_op(warp, lanes);
  for (i32 lane = 0; lane < kWarpSize; ++lane) lanes[lane].state = State::ready;
  thread.state = State::running;
  warp.ready = kAllLanes & ~(1u << thread.lane);
  thread.block->ready_warps |= 1u << thread.warp_idx;
  maybe_yield();
}

}  // namespace flashgen::emu

void flashgen_emu_warp_sync(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  meet(WarpOp::sync, {});
}

int flashgen_emu_warp_any(int condition, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  int any = 0;
  meet(WarpOp::any, {.out = &any, .value = static_cast<unsigned>(condition)});
  return any;
}

unsigned flashgen_emu_shuffle(unsigned value, int source_lane, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  unsigned received = 0;
  meet(WarpOp::shuffle, {.out = &received, .value = value, .form = {source_lane, 0}});
  return received;
}

void flashgen_emu_ldmatrix(unsigned* registers, unsigned address, int count, int transposed,
                           FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  meet(WarpOp::ldmatrix, {.out = registers, .value = address, .form = {count, transposed}});
}

void flashgen_emu_mma(float* d, const unsigned* a, const unsigned* b, int depth, FlashgenEmuElement element,
                      FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  meet(WarpOp::mma, {.out = d, .a = a, .b = b, .form = {depth, element}});
}
