// Boxes of a tensor into shared memory, one after the other; the barrier's phases follow.
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;

struct Params {
  i32 variant;
  i32 boxes;
  i32 box_bytes;
  TensorMap map;
  const i32* places;  // [box][5]: where it begins, innermost dimension first
  u8* out;            // [box][byte]: shared memory
};

struct Variant {
  i32 rank;
};

template <i32 rank>
FLASHGEN_DEVICE void load(u32 destination, const TensorMap* map, u32 barrier, const i32* c) {
  if constexpr (rank == 2) tma_load_2d(destination, map, barrier, c[0], c[1]);
  if constexpr (rank == 3) tma_load_3d(destination, map, barrier, c[0], c[1], c[2]);
  if constexpr (rank == 4) tma_load_4d(destination, map, barrier, c[0], c[1], c[2], c[3]);
  if constexpr (rank == 5) tma_load_5d(destination, map, barrier, c[0], c[1], c[2], c[3], c[4]);
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  FLASHGEN_SHARED_MEMORY(shared);
  u8* box = shared + 1024;
  const u32 barrier = shared_address(shared);
  if (thread_idx() == 0) {
    prefetch_tensormap(&params.map);
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  block_sync();
  for (i32 i = 0; i < params.boxes; ++i) {
    if (thread_idx() == 0) {
      mbarrier_arrive_expect_tx(barrier, static_cast<u32>(params.box_bytes));
      load<variant.rank>(shared_address(box), &params.map, barrier, params.places + 5 * i);
    }
    mbarrier_wait(barrier, static_cast<u32>(i % 2));
    for (i32 k = thread_idx(); k < params.box_bytes; k += kThreads)
      params.out[i * params.box_bytes + k] = box[k];
    block_sync();
  }
}
