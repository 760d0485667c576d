// Clusters: their barrier, and shared memory of other blocks by addresses from map_to_rank. Such an address
// has the block's rank plus one in its upper byte, and below it the address within the block.
#pragma once
#include "race.h"
#include "scheduler.h"

namespace flashgen::emu {

constexpr u32 kRankShift = 24;
constexpr i32 kMostBlocksOfCluster = 16;

struct Cluster {
  u32 phase = 0;    // how often the barrier has completed
  i32 arrived = 0;  // threads, since it last did
  i32 live = 0;     // threads that have not returned
  // Race mode: the joined clocks of the threads that have arrived in this phase, and in the last one.
  std::vector<u32> arriving;
  std::vector<u32> complete;
  ForeignKnowledge foreign_arriving;
  ForeignKnowledge foreign_complete;
};

inline std::vector<Cluster> clusters;

inline Block& block_of_rank(Block& block, u32 rank) { return (&block - block.rank)[rank]; }

inline void start_in_cluster(Block& block, size_t place) {
  const size_t size = cluster_size();
  block.cluster = &clusters[place / size];
  block.rank = static_cast<i32>(place % size);
  block.cluster->live += runtime.launch.threads;
  block.remote.clear();
  block.known_at_exit.clear();
  if (runtime.launch.race && size > 1) {
    block.remote.resize(basic_clocks());
    block.known_at_exit.assign(clock_stride(), 0);
  }
}

inline void start_cluster(size_t place) {
  Cluster& cluster = clusters[place / cluster_size()];
  cluster = {};
  if (runtime.launch.race) cluster.arriving.assign(clock_stride(), 0);
}

// ---- The barrier

inline void describe_cluster_wait(const Thread& thread, char* text, size_t size) {
  const Cluster& cluster = *thread.block->cluster;
  snprintf(text, size, "cluster_wait (%d of its cluster's %d threads have arrived)", cluster.arrived,
           cluster.live);
}

inline void complete_cluster_barrier(Block& block) {
  Cluster& cluster = *block.cluster;
  if (cluster.arrived == 0 || cluster.arrived < cluster.live) return;
  cluster.arrived = 0;
  ++cluster.phase;
  if (runtime.launch.race) {
    cluster.complete.swap(cluster.arriving);
    cluster.arriving.assign(clock_stride(), 0);
    cluster.foreign_complete = std::move(cluster.foreign_arriving);
    cluster.foreign_arriving = {};
  }
  for (u32 rank = 0; rank < cluster_size(); ++rank) {
    for (Thread& thread : block_of_rank(block, rank).threads) {
      if (thread.state == State::waiting && thread.describe == describe_cluster_wait) make_ready(thread);
    }
  }
}

inline void arrive_at_cluster(bool release) {
  Thread& thread = self();
  Cluster& cluster = *thread.block->cluster;
  if (thread.arrived_at_cluster) {
    fail("invalid barrier use", "this thread arrives at its cluster's barrier again without having waited");
  }
  thread.arrived_at_cluster = true;
  thread.cluster_phase = cluster.phase;
  ++cluster.arrived;
  if (runtime.launch.race && release) {
    learn(cluster.arriving.data(), thread.clocks, clock_count());
    learn(cluster.foreign_arriving, thread.foreign);
    begin_epoch(thread);
  }
  complete_cluster_barrier(*thread.block);
  maybe_yield();
}

inline void wait_for_cluster() {
  Thread& thread = self();
  Cluster& cluster = *thread.block->cluster;
  if (!thread.arrived_at_cluster) {
    fail("invalid barrier use", "this thread waits at its cluster's barrier without having arrived");
  }
  while (cluster.phase == thread.cluster_phase) park(describe_cluster_wait);
  thread.arrived_at_cluster = false;
  if (!runtime.launch.race) return;
  learn(thread.clocks, cluster.complete.data(), clock_count());
  learn(thread.foreign, cluster.foreign_complete);
}

// ---- Shared memory of other blocks

struct ClusterRange {
  Block& block;
  u8* pointer;
};

// A thread that has passed the cluster's barrier knows that all blocks have started, even after relaxed
// arrivals.
inline bool has_met_cluster(const Thread& thread) {
  return thread.block->cluster->phase > 0 && !(thread.arrived_at_cluster && thread.cluster_phase == 0);
}

inline bool knows_of_start(const Thread& thread, const Block& block) {
  if (has_met_cluster(thread)) return true;
  for (u32 agent = 0; agent < agents_of_block(); ++agent) {
    if (thread.clocks[clock_index(block.index, agent)] != 0) return true;
  }
  return false;
}

// Another block's memory may be accessed only from its start to its return.
inline void require_block_is_there(Thread& thread, Block& block, const char* what) {
  if (block.live == 0) {
    fail_for(thread, "exited block",
             "%s touches shared memory of rank %d in its cluster, which has returned from the kernel; add a "
             "barrier of"
             " the cluster before the return",
             what, block.rank);
  }
  if (!runtime.launch.race) return;
  if (!knows_of_start(thread, block)) {
    fail_for(
        thread, "race",
        "%s touches shared memory of rank %d in its cluster, which may not have started; no barrier of the"
        " cluster orders the two",
        what, block.rank);
  }
  block.remote[own_index(thread)] = {thread.clocks[own_index(thread)], call_before(thread.code)};
}

// The host address of `bytes` bytes of the shared memory of any block of the thread's cluster.
inline ClusterRange cluster_range(Thread& thread, u32 address, u32 bytes, u32 alignment, const char* what) {
  const u32 own = address & ((1u << kRankShift) - 1);
  const u32 rank = (address >> kRankShift) - 1;
  const bool mapped = address >> kRankShift != 0;
  if (mapped && rank >= cluster_size()) {
    fail_for(thread, "invalid operand", "%s at address 0x%x, which map_to_rank did not make", what, address);
  }
  Block& block = mapped ? block_of_rank(*thread.block, rank) : *thread.block;
  if (&block != thread.block) require_block_is_there(thread, block, what);
  return {block, shared_range(thread, own, bytes, alignment, what) - thread.block->shared + block.shared};
}

inline void watch_cluster(Thread& thread, const ClusterRange& range, u32 bytes, How how) {
  if (!runtime.launch.race) return;
  const Access access{thread, *range.block.shadow,     reinterpret_cast<u64>(range.pointer), bytes,
                      how,    call_before(thread.code)};
  is_read(how) ? note_read(access) : note_write(access);
}

// ---- Returning

// Race mode, when a block's last thread returns: other blocks' accesses of its shared memory must be ordered
// before.
inline void require_remote_accesses_over(const Block& block) {
  for (u32 index = 0; index < block.remote.size(); ++index) {
    const RemoteAccess& access = block.remote[index];
    if (access.clock <= block.known_at_exit[index]) continue;
    const Block& other = (&block - block.rank)[index / agents_of_block()];
    Thread& thread = const_cast<Thread&>(other.threads[index % agents_of_block()]);
    thread.site = {nullptr, 0};
    thread.code = static_cast<const char*>(access.code) + 1;
    fail_for(
        thread, "exited block",
        "shared memory of rank %d in the cluster is touched here, and that block may have returned from the"
        " kernel before; add a barrier of the cluster before the return",
        block.rank);
  }
}

// The running thread has returned from the kernel.
inline void leave_cluster(Thread& thread) {
  Block& block = *thread.block;
  Cluster& cluster = *block.cluster;
  --cluster.live;
  if (thread.arrived_at_cluster && thread.cluster_phase == cluster.phase) --cluster.arrived;
  complete_cluster_barrier(block);
  if (block.remote.empty()) return;
  learn(block.known_at_exit.data(), thread.clocks, clock_count());
  if (block.live == 0) require_remote_accesses_over(block);
}

}  // namespace flashgen::emu

unsigned flashgen_emu_cluster_rank(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  return static_cast<unsigned>(self().block->rank);
}

unsigned flashgen_emu_cluster_size(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  return cluster_size();
}

unsigned flashgen_emu_map_to_rank(unsigned address, unsigned rank, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  if (rank >= cluster_size()) {
    fail("invalid operand", "map_to_rank of rank %u in a cluster of %u blocks", rank, cluster_size());
  }
  return (rank + 1) << kRankShift | (address & ((1u << kRankShift) - 1));
}

void flashgen_emu_cluster_arrive(int release, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  arrive_at_cluster(release != 0);
}

void flashgen_emu_cluster_wait(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  wait_for_cluster();
}

void flashgen_emu_cluster_load(unsigned* values, unsigned address, int count, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  const auto bytes = static_cast<unsigned>(count) * 4;
  const ClusterRange range = cluster_range(self(), address, bytes, bytes, "cluster_load");
  watch_cluster(self(), range, bytes, How::load);
  memcpy(values, range.pointer, bytes);
  maybe_yield();
}

void flashgen_emu_cluster_store(unsigned address, const unsigned* values, int count, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  const auto bytes = static_cast<unsigned>(count) * 4;
  const ClusterRange range = cluster_range(self(), address, bytes, bytes, "cluster_store");
  watch_cluster(self(), range, bytes, How::store);
  memcpy(range.pointer, values, bytes);
  made_progress();
  maybe_yield();
}
