// All access to the hardware: PTX on a GPU, the emulator's functions on a CPU, under the same names.
#pragma once
#if defined(FLASHGEN_EMULATOR)
#include "flashgen/emu/primitives.h"
#else
#include "flashgen/ptx/copy.cuh"
#include "flashgen/ptx/device.cuh"
#include "flashgen/ptx/math.cuh"
#include "flashgen/ptx/matrix.cuh"
#endif
