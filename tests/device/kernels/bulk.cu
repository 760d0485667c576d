// Runs of bytes between global and shared memory, and additions of floats.
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;

struct Params {
  i32 variant;
  i32 pieces;
  i32 total_bytes;
  const i32* table;  // [piece][3]: first byte in shared memory, first byte in global memory, bytes
  const u8* x;
  u8* out;
};

enum class Variant { kLoad, kStore, kStoreGroups, kAdd };

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  FLASHGEN_SHARED_MEMORY(shared);
  u8* bytes = shared + 1024;
  const u32 barrier = shared_address(shared);
  constexpr bool loads = variant == Variant::kLoad;
  for (i32 k = thread_idx(); k < params.total_bytes; k += kThreads) bytes[k] = loads ? 0 : params.x[k];
  if (loads && thread_idx() == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  fence_proxy_async();
  block_sync();

  if (thread_idx() == 0) {
    for (i32 i = 0; i < params.pieces; ++i) {
      const i32* piece = params.table + 3 * i;
      const u32 here = shared_address(bytes + piece[0]);
      const auto count = static_cast<u32>(piece[2]);
      if constexpr (loads) {
        mbarrier_expect_tx(barrier, count);
        bulk_load(here, params.x + piece[1], count, barrier);
      }
      if constexpr (variant == Variant::kStore || variant == Variant::kStoreGroups) {
        bulk_store(params.out + piece[1], here, count);
      }
      if constexpr (variant == Variant::kAdd) {
        bulk_reduce_add(reinterpret_cast<float*>(params.out + piece[1]), here, count);
      }
      if constexpr (variant == Variant::kStoreGroups) {
        bulk_commit();
        bulk_wait<2>();
        bulk_wait_read<1>();
      }
    }
    if constexpr (loads) {
      mbarrier_arrive(barrier);
    } else {
      bulk_commit();
      bulk_wait<0>();
    }
  }
  if constexpr (loads) {
    mbarrier_wait(barrier, 0);
    for (i32 k = thread_idx(); k < params.total_bytes; k += kThreads) params.out[k] = bytes[k];
  }
}
