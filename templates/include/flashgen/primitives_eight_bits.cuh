// The same for elements of eight bits.
#pragma once
#include "flashgen/primitives.cuh"
#if !defined(FLASHGEN_EMULATOR)
#include "flashgen/ptx/eight_bits.cuh"
#endif
