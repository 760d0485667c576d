// Dividing the register file among warpgroups (sm_90a).
#pragma once
#include "flashgen/ptx/device.cuh"

namespace flashgen {

// From now on each thread has `registers` of them, a multiple of 8 from 24 to 256. All warps of a warpgroup
// take part. An increase waits until other warpgroups have given up enough.
template <i32 registers>
FLASHGEN_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <i32 registers>
FLASHGEN_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace flashgen
