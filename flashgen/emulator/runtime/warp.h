// Operations of a warp. The last lane to arrive executes them for all lanes.
#pragma once
#include "race.h"
#include "scheduler.h"

namespace flashgen::emu {

void run_products(Warp& warp, Thread* lanes);
void change_registers(Warp& warp, Thread* lanes);

inline const char* name_of(WarpOp op) {
  switch (op) {
    case WarpOp::sync:
      return "warp_sync";
    case WarpOp::any:
      return "warp_any";
    case WarpOp::ballot:
      return "warp_ballot";
    case WarpOp::shuffle:
      return "shuffle";
    case WarpOp::ldmatrix:
      return "ldmatrix";
    case WarpOp::stmatrix:
      return "stmatrix";
    case WarpOp::registers:
      return "setmaxnreg";
    case WarpOp::count:
      return "a product of bits";
    default:
      return "mma";
  }
}

// Votes and shuffles do not order memory; only warp_sync does.
inline void run_any(Warp& warp) {
  u32 any = 0;
  for (const LaneCall& call : warp.calls) any |= call.value;
  for (const LaneCall& call : warp.calls) *static_cast<int*>(call.out) = any != 0;
}

inline void run_ballot(Warp& warp) {
  u32 votes = 0;
  for (i32 lane = 0; lane < kWarpSize; ++lane) votes |= (warp.calls[lane].value != 0 ? 1u : 0u) << lane;
  for (const LaneCall& call : warp.calls) *static_cast<u32*>(call.out) = votes;
}

inline void run_shuffle(Warp& warp) {
  for (i32 lane = 0; lane < kWarpSize; ++lane) {
    const LaneCall& call = warp.calls[lane];
    const i32 source = call.form[0] >= 0 && call.form[0] < kWarpSize ? call.form[0] : lane;
    *static_cast<u32*>(call.out) = warp.calls[source].value;
  }
}

// Lane 8i + r passes the address of row r of matrix i.
inline void run_ldmatrix(Warp& warp, Thread* lanes) {
  const i32 count = warp.calls[0].form[0];
  for (i32 matrix = 0; matrix < count; ++matrix) {
    for (i32 row = 0; row < 8; ++row) {
      Thread& thread = lanes[matrix * 8 + row];
      const u8* source = shared_range(thread, warp.calls[matrix * 8 + row].value, 16, 16, "ldmatrix");
      if (runtime.launch.race) watch_shared(thread, source, 16, How::ldmatrix, call_before(thread.code));
      memcpy(warp.matrices[matrix][row], source, 16);
    }
  }
}

// Register i of lane 4g + t is row g, columns 2t and 2t + 1 of matrix i, or of its transpose.
inline void fetch_matrices(const Warp& warp, u32 lane, u32* registers, i32 count, bool transposed) {
  const u32 g = lane / 4;
  const u32 t = 2 * (lane % 4);
  for (i32 i = 0; i < count; ++i) {
    const u16(&matrix)[8][8] = warp.matrices[i];
    if (transposed) {
      registers[i] = matrix[t][g] | static_cast<u32>(matrix[t + 1][g]) << 16;
    } else {
      memcpy(&registers[i], &matrix[g][t], 4);
    }
  }
}

// The inverse of ldmatrix.
inline void run_stmatrix(const Warp& warp, Thread* lanes) {
  const i32 count = warp.calls[0].form[0];
  const bool transposed = warp.calls[0].form[1] != 0;
  for (i32 matrix = 0; matrix < count; ++matrix) {
    u16 rows[8][8];
    for (u32 lane = 0; lane < kWarpSize; ++lane) {
      const u32 pair = static_cast<const u32*>(warp.calls[lane].a)[matrix];
      const u32 g = lane / 4;
      const u32 t = 2 * (lane % 4);
      (transposed ? rows[t][g] : rows[g][t]) = static_cast<u16>(pair);
      (transposed ? rows[t + 1][g] : rows[g][t + 1]) = static_cast<u16>(pair >> 16);
    }
    for (i32 row = 0; row < 8; ++row) {
      Thread& thread = lanes[matrix * 8 + row];
      u8* target = shared_range(thread, warp.calls[matrix * 8 + row].value, 16, 16, "stmatrix");
      if (runtime.launch.race) watch_shared(thread, target, 16, How::stmatrix, call_before(thread.code));
      memcpy(target, rows[row], 16);
    }
  }
}

// The first words of lanes 4g to 4g + 3 are row g of the left operand, and their second words are row g + 8.
// The same lanes hold column g of the right operand.
inline void run_count(const Warp& warp) {
  for (u32 lane = 0; lane < kWarpSize; ++lane) {
    i32* const counts = static_cast<i32*>(warp.calls[lane].out);
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = lane / 4;
      const u32 column = 2 * (lane % 4) + i % 2;
      for (u32 t = 0; t < 4; ++t) {
        const u32 left = static_cast<const u32*>(warp.calls[4 * row + t].a)[i / 2];
        counts[i] += __builtin_popcount(left & warp.calls[4 * column + t].value);
      }
    }
  }
}

inline void run_warp_op(Warp& warp, Thread* lanes) {
  switch (warp.op) {
    case WarpOp::sync:
      if (runtime.launch.race) {
        synchronise(lanes, lanes + kWarpSize, [](const Thread&) { return true; });
      }
      return;
    case WarpOp::any:
      return run_any(warp);
    case WarpOp::ballot:
      return run_ballot(warp);
    case WarpOp::shuffle:
      return run_shuffle(warp);
    case WarpOp::ldmatrix:
      return run_ldmatrix(warp, lanes);
    case WarpOp::stmatrix:
      return run_stmatrix(warp, lanes);
    case WarpOp::registers:
      return change_registers(warp, lanes);
    case WarpOp::mma:
      return run_products(warp, lanes);
    case WarpOp::count:
      return run_count(warp);
  }
}

inline void require_all_lanes(const Warp& warp, WarpOp op) {
  if (warp.live == kAllLanes) return;
  fail("divergent collective",
       "%s needs all 32 lanes, but %d lanes of the warp have returned from the kernel", name_of(op),
       kWarpSize - __builtin_popcount(warp.live));
}

[[noreturn]] inline void report_divergence(const Warp& warp, WarpOp op) {
  fail("divergent collective", "this lane is at %s while %d other lanes of its warp wait at %s (%s:%d)",
       name_of(op), __builtin_popcount(warp.arrived), name_of(warp.op), base_name(warp.site.file),
       warp.site.line);
}

// All lanes have arrived. The running one executes the operation and makes the others ready.
inline void complete(Warp& warp, Thread& thread) {
  warp.arrived = 0;
  Thread* lanes = &thread - thread.lane;
  run_warp_op(warp, lanes);
  for (i32 lane = 0; lane < kWarpSize; ++lane) lanes[lane].state = State::ready;
  thread.state = State::running;
  warp.ready = kAllLanes & ~(1u << thread.lane);
  thread.block->ready_warps |= 1u << thread.warp_idx;
  maybe_yield();
}

// The running lane takes part in `op`. Returns when all 32 lanes have arrived and the operation is done.
// Inlined, because a copy of `call` would stall on store forwarding.
__attribute__((always_inline)) inline void meet(WarpOp op, const LaneCall& call) {
  Thread& thread = self();
  Warp& warp = *thread.warp;
  require_all_lanes(warp, op);
  if (op != WarpOp::ldmatrix && op != WarpOp::mma) require_no_products(thread);
  if (warp.arrived == 0) {
    warp.op = op;
    warp.site = thread.site;
  } else if (warp.op != op || !same_site(warp.site, thread.site)) {
    report_divergence(warp, op);
  }
  warp.calls[thread.lane] = call;
  warp.arrived |= 1u << thread.lane;
  if (warp.arrived != kAllLanes) return park(State::at_warp);
  complete(warp, thread);
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

unsigned flashgen_emu_warp_ballot(int condition, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  unsigned votes = 0;
  meet(WarpOp::ballot, {.out = &votes, .value = static_cast<unsigned>(condition)});
  return votes;
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
  meet(WarpOp::ldmatrix, {.value = address, .form = {count, transposed}});
  fetch_matrices(*self().warp, self().lane, registers, count, transposed != 0);
}

void flashgen_emu_stmatrix(unsigned address, const unsigned* registers, int count, int transposed,
                           FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  made_progress();
  meet(WarpOp::stmatrix, {.a = registers, .value = address, .form = {count, transposed}});
}

void flashgen_emu_count(int* counts, const unsigned* a, unsigned b, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  meet(WarpOp::count, {.out = counts, .a = a, .value = b});
}
