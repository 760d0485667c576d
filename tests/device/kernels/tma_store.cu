// Boxes of shared memory into a tensor, or added to it. What lies outside the tensor is left out.
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;

struct Params {
  i32 variant;
  i32 boxes;
  i32 box_bytes;
  TensorMap map;
  const i32* places;  // [box][5]: where it begins, innermost dimension first
  const u8* x;        // [box][byte]: shared memory
  u8* tensor;
};

enum class Kind { kStore, kAdd };

struct Variant {
  i32 rank;
  Kind kind;
};

template <i32 rank>
FLASHGEN_DEVICE void store(const TensorMap* map, u32 source, const i32* c) {
  if constexpr (rank == 2) tma_store_2d(map, source, c[0], c[1]);
  if constexpr (rank == 3) tma_store_3d(map, source, c[0], c[1], c[2]);
  if constexpr (rank == 4) tma_store_4d(map, source, c[0], c[1], c[2], c[3]);
  if constexpr (rank == 5) tma_store_5d(map, source, c[0], c[1], c[2], c[3], c[4]);
}

template <i32 rank>
FLASHGEN_DEVICE void add(const TensorMap* map, u32 source, const i32* c) {
  if constexpr (rank == 2) tma_reduce_add_2d(map, source, c[0], c[1]);
  if constexpr (rank == 3) tma_reduce_add_3d(map, source, c[0], c[1], c[2]);
  if constexpr (rank == 4) tma_reduce_add_4d(map, source, c[0], c[1], c[2], c[3]);
  if constexpr (rank == 5) tma_reduce_add_5d(map, source, c[0], c[1], c[2], c[3], c[4]);
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  FLASHGEN_SHARED_MEMORY(shared);
  for (i32 i = 0; i < params.boxes; ++i) {
    for (i32 k = thread_idx(); k < params.box_bytes; k += kThreads)
      shared[k] = params.x[i * params.box_bytes + k];
    fence_proxy_async_shared();
    block_sync();
    if (thread_idx() == 0) {
      if constexpr (variant.kind == Kind::kStore) {
        store<variant.rank>(&params.map, shared_address(shared), params.places + 5 * i);
        bulk_commit();
        // Boxes overlap: the last one to be stored is the one to be seen.
        bulk_wait<0>();
      } else {
        add<variant.rank>(&params.map, shared_address(shared), params.places + 5 * i);
        bulk_commit();
        bulk_wait_read<0>();
      }
    }
    block_sync();
  }
  if (thread_idx() == 0) bulk_wait<0>();
}
