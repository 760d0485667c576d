// The functions of ptx/barrier.cuh on a CPU. Only primitives.h includes this file.
#pragma once

namespace flashgen {

FLASHGEN_DEVICE void named_barrier_sync(i32 barrier, i32 threads, FLASHGEN_EMU_SITE) {
  flashgen_emu_named_barrier(barrier, threads, true, site);
}
FLASHGEN_DEVICE void named_barrier_arrive(i32 barrier, i32 threads, FLASHGEN_EMU_SITE) {
  flashgen_emu_named_barrier(barrier, threads, false, site);
}
FLASHGEN_DEVICE bool named_barrier_any(i32 barrier, i32 threads, bool condition, FLASHGEN_EMU_SITE) {
  return flashgen_emu_named_barrier_any(barrier, threads, condition, site) != 0;
}

FLASHGEN_DEVICE void mbarrier_init(u32 barrier, u32 count, FLASHGEN_EMU_SITE) {
  flashgen_emu_mbarrier_init(barrier, count, site);
}
FLASHGEN_DEVICE void mbarrier_invalidate(u32 barrier, FLASHGEN_EMU_SITE) {
  flashgen_emu_mbarrier_invalidate(barrier, site);
}
FLASHGEN_DEVICE void mbarrier_arrive(u32 barrier, FLASHGEN_EMU_SITE) {
  flashgen_emu_mbarrier_arrive(barrier, false, site);
}
FLASHGEN_DEVICE void mbarrier_arrive_cluster(u32 barrier, FLASHGEN_EMU_SITE) {
  flashgen_emu_mbarrier_arrive(barrier, true, site);
}
FLASHGEN_DEVICE void mbarrier_expect_tx(u32 barrier, u32 bytes, FLASHGEN_EMU_SITE) {
  flashgen_emu_mbarrier_expect_tx(barrier, bytes, false, site);
}
FLASHGEN_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes, FLASHGEN_EMU_SITE) {
  flashgen_emu_mbarrier_expect_tx(barrier, bytes, true, site);
}
FLASHGEN_DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity, FLASHGEN_EMU_SITE) {
  return flashgen_emu_mbarrier_wait(barrier, parity, true, site) != 0;
}
// The same as try_wait: a kernel cannot rely on how long either waits.
FLASHGEN_DEVICE bool mbarrier_test_wait(u32 barrier, u32 parity, FLASHGEN_EMU_SITE) {
  return flashgen_emu_mbarrier_wait(barrier, parity, true, site) != 0;
}
FLASHGEN_DEVICE bool mbarrier_try_wait_cluster(u32 barrier, u32 parity, FLASHGEN_EMU_SITE) {
  return flashgen_emu_mbarrier_wait(barrier, parity, true, site) != 0;
}
FLASHGEN_DEVICE void mbarrier_wait(u32 barrier, u32 parity, FLASHGEN_EMU_SITE) {
  flashgen_emu_mbarrier_wait(barrier, parity, false, site);
}
FLASHGEN_DEVICE void mbarrier_wait_cluster(u32 barrier, u32 parity, FLASHGEN_EMU_SITE) {
  flashgen_emu_mbarrier_wait(barrier, parity, false, site);
}

FLASHGEN_DEVICE void fence_mbarrier_init(FLASHGEN_EMU_SITE) { flashgen_emu_fence_mbarrier_init(site); }
FLASHGEN_DEVICE void fence_proxy_async(FLASHGEN_EMU_SITE) { flashgen_emu_fence_proxy_async(1, site); }
FLASHGEN_DEVICE void fence_proxy_async_shared(FLASHGEN_EMU_SITE) { flashgen_emu_fence_proxy_async(0, site); }
FLASHGEN_DEVICE void fence_proxy_async_global(FLASHGEN_EMU_SITE) { flashgen_emu_fence_proxy_async(1, site); }

}  // namespace flashgen
