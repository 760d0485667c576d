// The same for 8-bit elements.
#pragma once
#include "flashgen/primitives.cuh"
#if !defined(FLASHGEN_EMULATOR)
#include "flashgen/ptx/eight_bits.cuh"
#endif
