// The same for what Hopper adds: mbarriers, bulk copies, warpgroups, clusters, and grids that follow
// each other.
#pragma once
#include "flashgen/primitives.cuh"
#if !defined(FLASHGEN_EMULATOR)
#include "flashgen/ptx/barrier.cuh"
#include "flashgen/ptx/bulk.cuh"
#include "flashgen/ptx/cluster.cuh"
#include "flashgen/ptx/grid.cuh"
#include "flashgen/ptx/wgmma.cuh"
#include "flashgen/ptx/wgmma_fours.cuh"
#endif
