// mbarriers and named barriers: who waits for whom, and what a question after a phase is answered.
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;

constexpr i32 kThreads = 128;
constexpr i32 kRounds = 6;

struct Params {
  i32 variant;
  const u32* x;  // [block][thread]
  u32* out;      // [block][round][thread]
};

enum class Variant {
  kPhases,
  kAnswers,
  kAnswersOfCluster,
  kAnswersAtOnce,
  kAgain,
  kNamedSync,
  kNamedArrive,
  kRemote,
  kNamedAny
};

// Each thread tells all others through shared memory, every round by another phase.
FLASHGEN_DEVICE void phases(const Params& params, u32 barriers, u32* slots) {
  const i32 thread = thread_idx();
  if (thread == 0) {
    mbarrier_init(barriers, kThreads);
    mbarrier_init(barriers + 8, kThreads);
  }
  block_sync();
  u32 value = params.x[thread];
  for (i32 round = 0; round < kRounds; ++round) {
    const auto parity = static_cast<u32>(round % 2);
    slots[thread] = value;
    mbarrier_arrive(barriers);
    mbarrier_wait(barriers, parity);
    value = 3 * slots[(thread + 37 * (round + 1)) % kThreads] + 1;
    mbarrier_arrive(barriers + 8);
    mbarrier_wait(barriers + 8, parity);
    params.out[round * kThreads + thread] = value;
  }
}

// One thread alone: bit p of an answer says whether the phase of parity p has ended.
template <Variant variant>
FLASHGEN_DEVICE bool has_ended(u32 barrier, u32 parity) {
  if constexpr (variant == Variant::kAnswersOfCluster) return mbarrier_try_wait_cluster(barrier, parity);
  if constexpr (variant == Variant::kAnswersAtOnce) return mbarrier_test_wait(barrier, parity);
  return mbarrier_try_wait(barrier, parity);
}

template <Variant variant>
FLASHGEN_DEVICE u32 ask(u32 barrier) {
  return has_ended<variant>(barrier, 0) | has_ended<variant>(barrier, 1) << 1;
}

template <Variant variant>
FLASHGEN_DEVICE void answers(const Params& params, u32 barrier) {
  if (thread_idx() != 0) return;
  mbarrier_init(barrier, 2);
  for (i32 i = 0; i < 9; ++i) {
    params.out[i] = ask<variant>(barrier);
    mbarrier_arrive(barrier);
  }
}

// The same place, another count.
FLASHGEN_DEVICE void again(const Params& params, u32 barrier) {
  if (thread_idx() != 0) return;
  for (u32 count = 1; count < 4; ++count) {
    mbarrier_init(barrier, count);
    for (u32 i = 0; i < count; ++i) {
      params.out[4 * count + i] = ask<Variant::kAgain>(barrier);
      mbarrier_arrive(barrier);
    }
    params.out[4 * count + count] = ask<Variant::kAgain>(barrier);
    mbarrier_invalidate(barrier);
  }
}

// Two warps each, by barriers of their own; then all four by a third one.
FLASHGEN_DEVICE void named_sync(const Params& params, u32* slots) {
  const i32 thread = thread_idx();
  const i32 pair = thread / 64;
  u32 value = params.x[thread];
  for (i32 round = 0; round < kRounds; ++round) {
    slots[thread] = value;
    named_barrier_sync(1 + pair, 64);
    value = 3 * slots[64 * pair + (thread + 37 * (round + 1)) % 64] + 1;
    named_barrier_sync(15, kThreads);
    params.out[round * kThreads + thread] = value;
  }
}

// The first two warps make what the others take; neither waits for more than it needs.
FLASHGEN_DEVICE void named_arrive(const Params& params, u32* slots) {
  constexpr i32 full = 3;
  constexpr i32 empty = 4;
  const i32 lane = thread_idx() % 64;
  for (i32 round = 0; round < kRounds; ++round) {
    if (thread_idx() < 64) {
      if (round > 0) named_barrier_sync(empty, kThreads);
      slots[lane] = params.x[lane] + static_cast<u32>(round);
      named_barrier_arrive(full, kThreads);
    } else {
      named_barrier_sync(full, kThreads);
      params.out[round * kThreads + thread_idx()] = slots[63 - lane];
      if (round + 1 < kRounds) named_barrier_arrive(empty, kThreads);
    }
  }
}

// Two warps each, whose votes have one thread's condition, all threads' or nobody's.
FLASHGEN_DEVICE void named_any(const Params& params, u32* slots) {
  const i32 thread = thread_idx();
  const i32 pair = thread / 64;
  for (i32 round = 0; round < kRounds; ++round) {
    const u32 value = params.x[thread] + static_cast<u32>(round);
    slots[thread] = value;
    const bool condition = round == 5 || (round < 4 && value % 64 == static_cast<u32>(round));
    const bool any = named_barrier_any(1 + pair, 64, condition);
    params.out[round * kThreads + thread] = 2 * slots[64 * pair + (thread + 37) % 64] + (any ? 1 : 0);
    named_barrier_sync(1 + pair, 64);
  }
}

// Threads of each block of a cluster store to the next block, and arrive there.
FLASHGEN_DEVICE void remote(const Params& params, u32 barriers, u32* slots) {
  const i32 thread = thread_idx();
  const i32 first = block_idx_x() * kRounds * kThreads;
  if (thread == 0) {
    mbarrier_init(barriers, kThreads);
    mbarrier_init(barriers + 8, kThreads);
    fence_mbarrier_init();
  }
  cluster_arrive();
  cluster_wait();
  const u32 next = (cluster_rank() + 1) % cluster_size();
  const u32 previous = (cluster_rank() + cluster_size() - 1) % cluster_size();
  u32 value = params.x[block_idx_x() * kThreads + thread];
  for (i32 round = 0; round < kRounds; ++round) {
    const auto parity = static_cast<u32>(round % 2);
    cluster_store(map_to_rank(shared_address(slots + (thread + 5) % kThreads), next), value);
    mbarrier_arrive_cluster(map_to_rank(barriers, next));
    mbarrier_wait_cluster(barriers, parity);
    value = 3 * slots[thread] + 1;
    params.out[first + round * kThreads + thread] = value;
    // It may be stored to again.
    mbarrier_arrive_cluster(map_to_rank(barriers + 8, previous));
    mbarrier_wait_cluster(barriers + 8, parity);
  }
  cluster_arrive();
  cluster_wait();
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  FLASHGEN_SHARED_MEMORY(shared);
  const u32 barriers = shared_address(shared);
  auto* slots = reinterpret_cast<u32*>(shared + 16);
  if constexpr (variant == Variant::kPhases) phases(params, barriers, slots);
  if constexpr (variant == Variant::kAnswers || variant == Variant::kAnswersOfCluster ||
                variant == Variant::kAnswersAtOnce) {
    answers<variant>(params, barriers);
  }
  if constexpr (variant == Variant::kAgain) again(params, barriers);
  if constexpr (variant == Variant::kNamedSync) named_sync(params, slots);
  if constexpr (variant == Variant::kNamedArrive) named_arrive(params, slots);
  if constexpr (variant == Variant::kRemote) remote(params, barriers, slots);
  if constexpr (variant == Variant::kNamedAny) named_any(params, slots);
}
