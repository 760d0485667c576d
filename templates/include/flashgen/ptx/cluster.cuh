// Clusters (sm_90 and later): ranks, the barrier, and distributed shared memory.
#pragma once
#include "flashgen/ptx/device.cuh"

namespace flashgen {

FLASHGEN_DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

FLASHGEN_DEVICE u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// The address, in the block of that rank, that corresponds to `address` in this block's shared memory.
FLASHGEN_DEVICE u32 map_to_rank(u32 address, u32 rank) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// ---- The cluster's barrier. All threads arrive, then wait. Threads that have returned count as arrived.
// After the wait, a thread sees what the others wrote before they arrived.

FLASHGEN_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Arrives without ordering any memory access.
FLASHGEN_DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

FLASHGEN_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- Shared memory of any block of the cluster, by addresses from map_to_rank()

FLASHGEN_DEVICE u32 cluster_load(u32 address) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

FLASHGEN_DEVICE void cluster_load_x4(u32 (&values)[4], u32 address) {
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(address)
               : "memory");
}

FLASHGEN_DEVICE void cluster_store(u32 address, u32 value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

FLASHGEN_DEVICE void cluster_store_x4(u32 address, const u32 (&values)[4]) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values[0]),
               "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

}  // namespace flashgen
