// Each block of a cluster loads one box into the same place of several blocks.
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;

struct Params {
  i32 variant;
  i32 box_bytes;
  TensorMap map;
  const i32* places;  // [rank][5]: the box that this block loads
  const i32* masks;   // [rank]: the blocks that get it
  const i32* counts;  // [rank]: how many boxes this block gets
  u8* out;            // [block][rank][byte]: shared memory
};

struct Variant {
  i32 rank;
};

template <i32 rank>
FLASHGEN_DEVICE void load(u32 destination, const TensorMap* map, u32 barrier, u16 blocks, const i32* c) {
  if constexpr (rank == 2) tma_load_2d_multicast(destination, map, barrier, blocks, c[0], c[1]);
  if constexpr (rank == 3) tma_load_3d_multicast(destination, map, barrier, blocks, c[0], c[1], c[2]);
  if constexpr (rank == 4) tma_load_4d_multicast(destination, map, barrier, blocks, c[0], c[1], c[2], c[3]);
  if constexpr (rank == 5)
    tma_load_5d_multicast(destination, map, barrier, blocks, c[0], c[1], c[2], c[3], c[4]);
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  FLASHGEN_SHARED_MEMORY(shared);
  u8* boxes = shared + 1024;
  const i32 rank = static_cast<i32>(cluster_rank());
  const i32 bytes = static_cast<i32>(cluster_size()) * params.box_bytes;
  const u32 barrier = shared_address(shared);
  for (i32 k = thread_idx(); k < bytes; k += kThreads) boxes[k] = 0;
  fence_proxy_async_shared();
  if (thread_idx() == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, static_cast<u32>(params.counts[rank] * params.box_bytes));
  }
  cluster_arrive();
  cluster_wait();
  if (thread_idx() == 0) {
    load<variant.rank>(shared_address(boxes + rank * params.box_bytes), &params.map, barrier,
                       static_cast<u16>(params.masks[rank]), params.places + 5 * rank);
  }
  mbarrier_wait(barrier, 0);
  for (i32 k = thread_idx(); k < bytes; k += kThreads) params.out[block_idx_x() * bytes + k] = boxes[k];
  // No block may end while boxes are on their way to it, or to others by its barrier.
  cluster_arrive();
  cluster_wait();
}
