// Communication between blocks and between grids: atomics, ordered accesses of global memory, and
// programmatic dependent launch.
#pragma once
#include "flashgen/ptx/device.cuh"

namespace flashgen {

// ---- Atomic operations, relaxed unless their names say otherwise. Additions return the previous value.

FLASHGEN_DEVICE i32 atomic_add(i32* address, i32 value) {
  i32 before;
  asm volatile("atom.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}
FLASHGEN_DEVICE u32 atomic_add(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}
FLASHGEN_DEVICE float atomic_add(float* address, float value) {
  float before;
  asm volatile("atom.global.add.f32 %0, [%1], %2;" : "=f"(before) : "l"(address), "f"(value) : "memory");
  return before;
}
FLASHGEN_DEVICE void atomic_or(u32* address, u32 bits) {
  asm volatile("red.global.or.b32 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
}
// A thread that acquires this value or a later one sees what this thread wrote before, and what a barrier
// ordered before that.
FLASHGEN_DEVICE u32 atomic_add_release(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}
// Adds 1, or sets 0 after `last`. This thread sees what those saw that incremented before it, and those after
// it see what this thread saw and wrote.
FLASHGEN_DEVICE u32 atomic_inc_acq_rel(u32* address, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(last)
               : "memory");
  return before;
}
FLASHGEN_DEVICE void store_release(u32* address, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
FLASHGEN_DEVICE u32 load_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
// No instruction. It tells the emulator that blocks wait for each other, so that all must be resident.
FLASHGEN_DEVICE void expect_cooperative_launch() {}

// ---- Programmatic dependent launch (sm_90 and later)

// Waits until the grids before this one are complete and their writes are visible.
FLASHGEN_DEVICE void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next grid start. After its griddep_wait, that grid sees all writes of this one, also later ones.
FLASHGEN_DEVICE void griddep_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace flashgen
