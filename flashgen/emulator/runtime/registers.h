// setmaxnreg moves registers between the warps of a block through a pool. A block starts with an empty pool,
// and with the registers per thread that its launch bounds allow for one block per multiprocessor.
#pragma once
#include "wgmma.h"
#include "warp.h"

namespace flashgen::emu {

constexpr i32 kRegisterFile = 65536;
constexpr i32 kFewestRegisters = 24;
constexpr i32 kMostRegisters = 256;

inline i32 registers_at_start() {
  const i32 share = kRegisterFile / runtime.launch.threads / 8 * 8;
  return share < kMostRegisters ? share : kMostRegisters;
}

inline void start_registers(Block& block) {
  block.free_registers = 0;
  for (Warp& warp : block.warps) {
    warp.registers = registers_at_start();
    warp.wanted_registers = 0;
  }
}

inline void describe_register_wait(const Thread& thread, char* text, size_t size) {
  const Warp& warp = *thread.warp;
  snprintf(text, size,
           "setmaxnreg_inc<%d> (its warp needs %d more registers, and the block has %d free ones)",
           warp.wanted_registers, (warp.wanted_registers - warp.registers) * kWarpSize,
           thread.block->free_registers);
}

// Gives registers to waiting warps as far as the pool allows.
inline void grant_registers(Block& block) {
  for (size_t index = 0; index < block.warps.size(); ++index) {
    Warp& warp = block.warps[index];
    const i32 missing = (warp.wanted_registers - warp.registers) * kWarpSize;
    if (warp.wanted_registers == 0 || missing > block.free_registers) continue;
    block.free_registers -= missing;
    warp.registers = warp.wanted_registers;
    warp.wanted_registers = 0;
    for (i32 lane = 0; lane < kWarpSize; ++lane) {
      Thread& thread = block.threads[index * kWarpSize + static_cast<size_t>(lane)];
      if (thread.state == State::waiting) make_ready(thread);
    }
  }
}

// All four warps of a warpgroup must make the same calls in the same order.
inline void note_register_change(const Thread& thread, i32 count) {
  Warpgroup& warpgroup = warpgroup_of(thread);
  const size_t index = warpgroup.register_changes[thread.warp_idx % 4]++;
  if (index < warpgroup.register_counts.size()) {
    if (warpgroup.register_counts[index] == count) return;
    fail("divergent warpgroup", "this warp asks for %d registers where others of its warpgroup asked for %d",
         count, warpgroup.register_counts[index]);
  }
  warpgroup.register_counts.push_back(count);
  const Thread* lanes = lanes_of_warpgroup(thread);
  for (i32 warp = 0; warp < 4; ++warp) {
    if (lanes[warp * kWarpSize].warp->live == 0) {
      fail("divergent warpgroup", "warp %d of this warpgroup has returned without calling setmaxnreg<%d>",
           lanes[warp * kWarpSize].warp_idx, count);
    }
  }
}

inline void require_same_register_changes(const Thread& thread) {
  if (thread.warp->live != 0 || thread.block->warpgroups.empty()) return;
  const Warpgroup& warpgroup = warpgroup_of(thread);
  const size_t changes = warpgroup.register_changes[thread.warp_idx % 4];
  if (changes == warpgroup.register_counts.size()) return;
  fail_for(thread, "divergent warpgroup",
           "this warp returned without calling setmaxnreg<%d>, which others of its warpgroup called",
           warpgroup.register_counts[changes]);
}

// The last lane of the warp to arrive calls this.
inline void change_registers(Warp& warp, Thread* lanes) {
  Thread& thread = self();
  const i32 count = warp.calls[0].form[0];
  const bool increase = warp.calls[0].form[1] != 0;
  require_whole_warpgroup(thread, "setmaxnreg");
  if (count < kFewestRegisters || count > kMostRegisters || count % 8 != 0) {
    fail("invalid operand", "setmaxnreg of %d registers; it takes a multiple of 8 from %d to %d", count,
         kFewestRegisters, kMostRegisters);
  }
  if (increase ? count < warp.registers : count > warp.registers) {
    fail("invalid operand", "%s<%d> of a warp whose threads have %d registers each",
         increase ? "setmaxnreg_inc" : "setmaxnreg_dec", count, warp.registers);
  }
  note_register_change(*lanes, count);
  if (increase) {
    warp.wanted_registers = count;
  } else {
    lanes->block->free_registers += (warp.registers - count) * kWarpSize;
    warp.registers = count;
  }
  grant_registers(*lanes->block);
}

}  // namespace flashgen::emu

void flashgen_emu_setmaxnreg(int registers, int increase, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  meet(WarpOp::registers, {.form = {registers, increase}});
  while (self().warp->wanted_registers != 0) park(describe_register_wait);
}
