// Blocks of a cluster: who they are, and what they read and write of each other's shared memory.
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;
constexpr i32 kWords = 4 * kThreads;

struct Params {
  i32 variant;
  const u32* x;  // [block][word]
  u32* out;      // [block][word]
};

enum class Variant { kRank, kLoad, kLoadFour, kStore, kStoreFour, kRelaxed };

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  FLASHGEN_SHARED_MEMORY(shared);
  auto* slots = reinterpret_cast<u32*>(shared);
  const i32 first = 4 * thread_idx();
  const i32 offset = block_idx_x() * kWords + first;
  const u32* x = params.x + offset;
  u32* out = params.out + offset;
  // Another block for every 16 threads, in small clusters for some of them this one.
  const u32 other = (cluster_rank() + 1 + static_cast<u32>(thread_idx()) / 16) % cluster_size();
  const u32 address = shared_address(slots + first);
  const u32 remote = map_to_rank(address, other);
  if constexpr (variant == Variant::kRank) {
    out[0] = cluster_rank();
    out[1] = cluster_size();
    return;
  }

  for (i32 i = 0; i < 4; ++i) slots[first + i] = x[3 - i];
  cluster_arrive();
  cluster_wait();
  if constexpr (variant == Variant::kRelaxed) {
    // Orders nothing, and counts as a barrier all the same.
    cluster_arrive_relaxed();
    cluster_wait();
  }

  u32 values[4];
  if constexpr (variant == Variant::kLoad) {
    for (u32 i = 0; i < 4; ++i) values[i] = cluster_load(remote + 4 * (3 - i));
  }
  if constexpr (variant == Variant::kLoadFour) cluster_load_x4(values, remote);
  if constexpr (variant == Variant::kStore) {
    for (u32 i = 0; i < 3; ++i) cluster_store(remote + 4 * i, x[i]);
  }
  if constexpr (variant == Variant::kStoreFour || variant == Variant::kRelaxed) {
    const u32 sent[4] = {x[0], x[1], x[2], x[3]};
    cluster_store_x4(remote, sent);
  }
  // No block may end while others use its memory.
  cluster_arrive();
  cluster_wait();
  constexpr bool loads = variant == Variant::kLoad || variant == Variant::kLoadFour;
  for (i32 i = 0; i < 4; ++i) out[i] = loads ? values[i] : slots[first + i];
}
