// The same door for arithmetic of numbers that lie in a word by twos.
#pragma once
#include "flashgen/primitives.cuh"
#if !defined(FLASHGEN_EMULATOR)
#include "flashgen/ptx/packed.cuh"
#endif
