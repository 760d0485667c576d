// The functions of ptx/cluster.cuh on a CPU; included by primitives.h.
#pragma once
#include "flashgen/emu/abi.h"
#include "flashgen/ptx/types.cuh"

namespace flashgen {

FLASHGEN_DEVICE u32 cluster_rank(FLASHGEN_EMU_SITE) { return flashgen_emu_cluster_rank(site); }
FLASHGEN_DEVICE u32 cluster_size(FLASHGEN_EMU_SITE) { return flashgen_emu_cluster_size(site); }
FLASHGEN_DEVICE u32 map_to_rank(u32 address, u32 rank, FLASHGEN_EMU_SITE) {
  return flashgen_emu_map_to_rank(address, rank, site);
}
FLASHGEN_DEVICE void cluster_arrive(FLASHGEN_EMU_SITE) { flashgen_emu_cluster_arrive(true, site); }
FLASHGEN_DEVICE void cluster_arrive_relaxed(FLASHGEN_EMU_SITE) { flashgen_emu_cluster_arrive(false, site); }
FLASHGEN_DEVICE void cluster_wait(FLASHGEN_EMU_SITE) { flashgen_emu_cluster_wait(site); }
FLASHGEN_DEVICE u32 cluster_load(u32 address, FLASHGEN_EMU_SITE) {
  u32 value;
  flashgen_emu_cluster_load(&value, address, 1, site);
  return value;
}
FLASHGEN_DEVICE void cluster_load_x4(u32 (&values)[4], u32 address, FLASHGEN_EMU_SITE) {
  flashgen_emu_cluster_load(values, address, 4, site);
}
FLASHGEN_DEVICE void cluster_store(u32 address, u32 value, FLASHGEN_EMU_SITE) {
  flashgen_emu_cluster_store(address, &value, 1, site);
}
FLASHGEN_DEVICE void cluster_store_x4(u32 address, const u32 (&values)[4], FLASHGEN_EMU_SITE) {
  flashgen_emu_cluster_store(address, values, 4, site);
}

}  // namespace flashgen
