// The machine: blocks, warps and threads, and the state of the current launch.
#pragma once
#include <cstring>
#include <memory>
#include <vector>

#include "api.h"
#include "batch.h"
#include "context.h"
#include "flashgen/emu/abi.h"
#include "flashgen/ptx/types.cuh"
#include "foreign.h"
#include "warpgroup.h"

namespace flashgen::emu {

using Site = FlashgenEmuSite;

using i16 = short;

constexpr i32 kMaxThreads = 1024;
constexpr i32 kMaxWarps = kMaxThreads / kWarpSize;
constexpr u32 kAllLanes = 0xffffffffu;
// Where dynamic shared memory starts in the 32-bit window. On a device the first KiB is reserved, too.
constexpr u32 kSharedBase = 1024;
constexpr i64 kMaxBlocks = 0x7fffffff;
constexpr i32 kMaxSharedBytes = 227 * 1024;
// As 16-bit and 32-bit floats this byte pattern is NaN.
constexpr int kPoisonByte = 0xff;

// `waiting`: the thread's `describe` says for what.
enum class State : u8 { ready, running, at_warp, at_block, waiting, done };

// Operations of all lanes of a warp.
enum class WarpOp : u8 { sync, any, ballot, shuffle, ldmatrix, stmatrix, registers, mma, count };

// A lane's operands of a WarpOp; which fields are used depends on the operation.
struct LaneCall {
  void* out = nullptr;
  const void* a = nullptr;
  const void* b = nullptr;
  u32 value = 0;
  // What must be the same in all lanes: counts, shapes, types.
  i32 form[2] = {};
};

// An asynchronous copy that was issued and has not been waited for.
struct Copy {
  u8* destination;
  const void* source;
  u32 bytes;
  u32 valid_bytes;
  const void* code;
  bool arrived;
};

struct Block;
struct Cluster;
struct Thread;
class Shadow;

// Writes for a deadlock report what a thread waits for.
using Description = void (*)(const Thread&, char* text, size_t size);

struct Warp {
  u32 ready;    // lanes that can run
  u32 live;     // lanes that have not returned
  u32 arrived;  // lanes waiting at the operation below
  WarpOp op;
  Site site;
  LaneCall calls[kWarpSize];
  // What the last ldmatrix read.
  u16 matrices[4][8][8];
  std::unique_ptr<Batch> batch;
  i32 registers;         // of each of its threads
  i32 wanted_registers;  // per thread, while it waits for them; otherwise 0
  i32 priority;
};

struct Thread : FlashgenEmuThread {
  Context context;
  Block* block;
  Warp* warp;
  i32 lane;
  i32 warp_idx;
  State state;
  // The last primitive called: where, and the code address it returns to.
  Site site;
  const void* code;
  std::vector<Copy> copies;
  // Sizes of the committed groups at the front of `copies`, oldest first; the rest is not committed yet.
  std::vector<u32> groups;
  u32 uncommitted;
  // Products in its warp's batch.
  u32 issued;
  Description describe;
  u64 polled;  // address of its last load_acquire
  WarpgroupLane warpgroup_lane;
  // The cluster's barrier: whether it has arrived and not waited yet, and in which phase.
  bool arrived_at_cluster;
  u32 cluster_phase;
  u32 store_groups;  // of bulk stores and reductions, committed so far
  // While it waits: the number of the named barrier, or the index of the mbarrier and the parity.
  u32 waits_at;
  bool any_at_barrier;  // result of its last vote at a named barrier
  u32 parity;
  bool may_fail;        // it waits in a try_wait,
  u64 try_wait_number;  // which is this one of the launch,
  bool phase_ended;     // and its result
  // Race mode: clocks of blocks outside of its cluster.
  ForeignKnowledge foreign;
  u64 stack;  // its lowest address
  // Race mode: its vector clock, with an entry for each agent of the cluster.
  u32* clocks;
};

// An access of another block's shared memory.
struct RemoteAccess {
  u32 clock;
  const void* code;
};

// A barrier of all live threads of a block.
struct Barrier {
  i32 arrived;
  bool votes;  // block_any, not block_sync
  bool any;    // the vote so far
  bool result;
  Site site;
};

// Race mode: the clocks that threads left at a barrier.
struct Message {
  std::vector<u32> clocks;
  ForeignKnowledge foreign;
};

// A barrier of some warps of a block, which may arrive without waiting.
struct NamedBarrier {
  i32 expected;  // threads; 0 before the first arrival
  i32 arrived;
  Site site;
  u32 lanes[kMaxWarps];     // that have arrived
  u32 sleepers[kMaxWarps];  // that wait
  bool votes;               // named_barrier_any
  bool any;                 // whether a condition so far holds
  Message published;
};

struct MBarrier {
  u32 offset;  // in shared memory
  bool live;   // initialised, and not invalidated since
  u32 count;
  u32 pending;  // arrivals that the phase still needs
  i32 bytes;    // expected and not yet copied; negative if they were copied before they were expected
  u32 phase;
  Site site;  // of its initialisation
  std::vector<Thread*> waiters;
  // Race mode. The thread and clock of its initialization; the clock of that thread's fence (0: none) and the
  // phase of the cluster's barrier then; the number of phases that have ended at this address; and the joined
  // clocks of the arrivals in this phase, and in the last one.
  i32 init_thread;
  u32 init_clock;
  u32 fence_clock;
  u32 fence_phase;
  u32 ended;
  Message arriving;
  Message ended_with;
};

// A place for a resident block. Successive blocks of the grid reuse its memory and threads.
struct Block {
  i64 index;
  i32 live;
  bool started;  // and its end not processed yet
  u32 ready_warps;
  u8* shared;
  Barrier barrier;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  Cluster* cluster;
  i32 rank;            // in its cluster
  i32 free_registers;  // the pool of setmaxnreg
  // Race mode, in a cluster: the last access of this block's memory by each agent of another block, and the
  // joined clocks of the block's threads when they returned.
  std::vector<RemoteAccess> remote;
  std::vector<u32> known_at_exit;
  NamedBarrier named_barriers[16];
  std::vector<MBarrier> mbarriers;
  std::vector<u32> clocks;
  Shadow* shadow;
};

struct Runtime {
  FlashgenEmuLaunch launch;
  i64 block_count;
  FlashgenEmuReport* report;
  std::vector<FlashgenEmuBuffer> buffers;
  std::vector<Block> blocks;
  // Grid indices in the order in which blocks start.
  std::vector<i64> order;
  size_t started;
  Thread* current;
  Context main;
  u64 random_state;
  bool randomised;
  bool failed;
  // Accesses of different blocks can be ordered.
  bool blocks_synchronise;
  // Some buffers belong to earlier grids until griddep_wait.
  bool awaits_primary;
  // Race mode: mbarriers or the async proxy are in use.
  bool async_clocks;
  // Counts events: a thread starts or returns, or a primitive stores or copies.
  u64 progress;
  // Calls of primitives without progress that are left before the thread must yield.
  i64 calls_left;
  // The launch has made no progress for too long.
  volatile bool overdue;
  // try_waits of mbarriers, in all, and failed ones since a phase last ended.
  u64 try_waits;
  u64 failed_try_waits;
};

inline Runtime runtime;

inline Thread& self() { return *runtime.current; }

}  // namespace flashgen::emu
