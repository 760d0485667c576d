// The same for arithmetic on two numbers packed in a word.
#pragma once
#include "flashgen/primitives.cuh"
#if !defined(FLASHGEN_EMULATOR)
#include "flashgen/ptx/packed.cuh"
#endif
