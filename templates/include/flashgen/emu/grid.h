// The functions of ptx/grid.cuh on a CPU; included by primitives.h.
#pragma once
#include "flashgen/emu/abi.h"
#include "flashgen/ptx/types.cuh"

namespace flashgen {

FLASHGEN_DEVICE u32 atomic_add(u32* address, u32 value, FLASHGEN_EMU_SITE) {
  return flashgen_emu_atomic_add_u32(address, value, false, site);
}
FLASHGEN_DEVICE i32 atomic_add(i32* address, i32 value, FLASHGEN_EMU_SITE) {
  return static_cast<i32>(
      flashgen_emu_atomic_add_u32(reinterpret_cast<u32*>(address), static_cast<u32>(value), false, site));
}
FLASHGEN_DEVICE float atomic_add(float* address, float value, FLASHGEN_EMU_SITE) {
  return flashgen_emu_atomic_add_f32(address, value, site);
}
FLASHGEN_DEVICE void atomic_or(u32* address, u32 bits, FLASHGEN_EMU_SITE) {
  flashgen_emu_atomic_or(address, bits, site);
}
FLASHGEN_DEVICE u32 atomic_add_release(u32* address, u32 value, FLASHGEN_EMU_SITE) {
  return flashgen_emu_atomic_add_u32(address, value, true, site);
}
FLASHGEN_DEVICE u32 atomic_inc_acq_rel(u32* address, u32 last, FLASHGEN_EMU_SITE) {
  return flashgen_emu_atomic_inc_acq_rel(address, last, site);
}
FLASHGEN_DEVICE void store_release(u32* address, u32 value, FLASHGEN_EMU_SITE) {
  flashgen_emu_store_release(address, value, site);
}
FLASHGEN_DEVICE u32 load_acquire(const u32* address, FLASHGEN_EMU_SITE) {
  return flashgen_emu_load_acquire(address, site);
}
FLASHGEN_DEVICE void expect_cooperative_launch(FLASHGEN_EMU_SITE) {
  flashgen_emu_expect_cooperative_launch(site);
}
FLASHGEN_DEVICE void griddep_wait(FLASHGEN_EMU_SITE) { flashgen_emu_griddep_wait(site); }
FLASHGEN_DEVICE void griddep_launch_dependents(FLASHGEN_EMU_SITE) {
  flashgen_emu_griddep_launch_dependents(site);
}

}  // namespace flashgen
