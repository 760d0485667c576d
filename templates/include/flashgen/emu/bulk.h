// The functions of ptx/bulk.cuh on a CPU. Only primitives.h includes this file.
#pragma once
#include "flashgen/ptx/types.cuh"

namespace flashgen {

template <int rank>
FLASHGEN_DEVICE void tma_load(u32 destination, const TensorMap* map, u32 barrier, u32 blocks,
                              const i32 (&at)[rank], FlashgenEmuSite site) {
  flashgen_emu_tma_load(destination, map, barrier, blocks, at, rank, site);
}
template <int rank>
FLASHGEN_DEVICE void tma_store(const TensorMap* map, u32 source, bool adds, const i32 (&at)[rank],
                               FlashgenEmuSite site) {
  flashgen_emu_tma_store(map, source, adds, at, rank, site);
}

FLASHGEN_DEVICE void tma_load_2d(u32 destination, const TensorMap* map, u32 barrier, i32 c0, i32 c1,
                                 FLASHGEN_EMU_SITE) {
  tma_load<2>(destination, map, barrier, 0, {c0, c1}, site);
}
FLASHGEN_DEVICE void tma_load_3d(u32 destination, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2,
                                 FLASHGEN_EMU_SITE) {
  tma_load<3>(destination, map, barrier, 0, {c0, c1, c2}, site);
}
FLASHGEN_DEVICE void tma_load_4d(u32 destination, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2,
                                 i32 c3, FLASHGEN_EMU_SITE) {
  tma_load<4>(destination, map, barrier, 0, {c0, c1, c2, c3}, site);
}
FLASHGEN_DEVICE void tma_load_5d(u32 destination, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2,
                                 i32 c3, i32 c4, FLASHGEN_EMU_SITE) {
  tma_load<5>(destination, map, barrier, 0, {c0, c1, c2, c3, c4}, site);
}
FLASHGEN_DEVICE void tma_load_2d_multicast(u32 destination, const TensorMap* map, u32 barrier, u16 blocks,
                                           i32 c0, i32 c1, FLASHGEN_EMU_SITE) {
  tma_load<2>(destination, map, barrier, blocks, {c0, c1}, site);
}
FLASHGEN_DEVICE void tma_load_3d_multicast(u32 destination, const TensorMap* map, u32 barrier, u16 blocks,
                                           i32 c0, i32 c1, i32 c2, FLASHGEN_EMU_SITE) {
  tma_load<3>(destination, map, barrier, blocks, {c0, c1, c2}, site);
}
FLASHGEN_DEVICE void tma_load_4d_multicast(u32 destination, const TensorMap* map, u32 barrier, u16 blocks,
                                           i32 c0, i32 c1, i32 c2, i32 c3, FLASHGEN_EMU_SITE) {
  tma_load<4>(destination, map, barrier, blocks, {c0, c1, c2, c3}, site);
}
FLASHGEN_DEVICE void tma_load_5d_multicast(u32 destination, const TensorMap* map, u32 barrier, u16 blocks,
                                           i32 c0, i32 c1, i32 c2, i32 c3, i32 c4, FLASHGEN_EMU_SITE) {
  tma_load<5>(destination, map, barrier, blocks, {c0, c1, c2, c3, c4}, site);
}
FLASHGEN_DEVICE void tma_store_2d(const TensorMap* map, u32 source, i32 c0, i32 c1, FLASHGEN_EMU_SITE) {
  tma_store<2>(map, source, false, {c0, c1}, site);
}
FLASHGEN_DEVICE void tma_store_3d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2,
                                  FLASHGEN_EMU_SITE) {
  tma_store<3>(map, source, false, {c0, c1, c2}, site);
}
FLASHGEN_DEVICE void tma_store_4d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2, i32 c3,
                                  FLASHGEN_EMU_SITE) {
  tma_store<4>(map, source, false, {c0, c1, c2, c3}, site);
}
FLASHGEN_DEVICE void tma_store_5d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4,
                                  FLASHGEN_EMU_SITE) {
  tma_store<5>(map, source, false, {c0, c1, c2, c3, c4}, site);
}
FLASHGEN_DEVICE void tma_reduce_add_2d(const TensorMap* map, u32 source, i32 c0, i32 c1, FLASHGEN_EMU_SITE) {
  tma_store<2>(map, source, true, {c0, c1}, site);
}
FLASHGEN_DEVICE void tma_reduce_add_3d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2,
                                       FLASHGEN_EMU_SITE) {
  tma_store<3>(map, source, true, {c0, c1, c2}, site);
}
FLASHGEN_DEVICE void tma_reduce_add_4d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2, i32 c3,
                                       FLASHGEN_EMU_SITE) {
  tma_store<4>(map, source, true, {c0, c1, c2, c3}, site);
}
FLASHGEN_DEVICE void tma_reduce_add_5d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2, i32 c3,
                                       i32 c4, FLASHGEN_EMU_SITE) {
  tma_store<5>(map, source, true, {c0, c1, c2, c3, c4}, site);
}
FLASHGEN_DEVICE void prefetch_tensormap(const TensorMap* map, FLASHGEN_EMU_SITE) {
  flashgen_emu_prefetch_tensormap(map, site);
}

FLASHGEN_DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier,
                               FLASHGEN_EMU_SITE) {
  flashgen_emu_bulk_load(destination, source, bytes, barrier, site);
}
FLASHGEN_DEVICE void bulk_store(void* destination, u32 source, u32 bytes, FLASHGEN_EMU_SITE) {
  flashgen_emu_bulk_store(destination, source, bytes, false, site);
}
FLASHGEN_DEVICE void bulk_reduce_add(float* destination, u32 source, u32 bytes, FLASHGEN_EMU_SITE) {
  flashgen_emu_bulk_store(destination, source, bytes, true, site);
}
FLASHGEN_DEVICE void bulk_commit(FLASHGEN_EMU_SITE) { flashgen_emu_bulk_commit(site); }
template <int pending>
FLASHGEN_DEVICE void bulk_wait(FLASHGEN_EMU_SITE) {
  flashgen_emu_bulk_wait(pending, false, site);
}
template <int pending>
FLASHGEN_DEVICE void bulk_wait_read(FLASHGEN_EMU_SITE) {
  flashgen_emu_bulk_wait(pending, true, site);
}

}  // namespace flashgen
