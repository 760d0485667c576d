// The machine: threads in warps in blocks, and the state of the one launch under way.
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
// Where dynamic shared memory starts in the 32-bit window; as on a device, where the first KiB is the
// system's.
constexpr u32 kSharedBase = 1024;
constexpr i64 kMaxBlocks = 0x7fffffff;
constexpr i32 kMaxSharedBytes = 227 * 1024;
// As 16-bit and 32-bit floats this byte pattern is NaN.
constexpr int kPoisonByte = 0xff;

// `waiting`: for what the thread's `describe` tells.
enum class State : u8 { ready, running, at_warp, at_block, waiting, done };

// Operations at which all lanes of a warp meet.
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

// Says in a deadlock report what a thread waits for.
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
  i32 wanted_registers;  // those that it waits for; 0: it does not
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
  u64 polled;  // where its last load_acquire looked
  WarpgroupLane warpgroup_lane;
  // Of the cluster's barrier: phases that it has arrived in, and whether it has still to wait for the last
  // one.
  bool arrived_at_cluster;
  u32 cluster_phase;
  u32 store_groups;  // of bulk stores and reductions, committed so far
  // At a named barrier: which one. At an mbarrier: its index, the parity, whether it asks rather than waits,
  // as the how many-th question of the launch, and the answer.
  u32 waits_at;
  bool any_at_barrier;  // what the last vote came to
  u32 parity;
  bool asks;
  u64 asked;
  bool phase_ended;
  // Race mode: what it knows of blocks beyond its cluster.
  ForeignKnowledge foreign;
  u64 stack;  // its lowest address
  // Race mode: up to when this thread knows of each agent of its cluster; its own entry is its clock.
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

// Race mode: what a thread knew when it published to others.
struct Message {
  std::vector<u32> clocks;
  ForeignKnowledge foreign;
};

// Where some threads of a block meet, or pass without waiting.
struct NamedBarrier {
  i32 expected;  // how many threads; 0 while nobody has arrived
  i32 arrived;
  Site site;
  u32 lanes[kMaxWarps];     // who has arrived
  u32 sleepers[kMaxWarps];  // and who of them waits
  bool votes;               // named_barrier_any
  bool any;                 // of the conditions that have arrived
  Message published;
};

struct MBarrier {
  u32 offset;  // in shared memory
  bool live;   // initialised, and not invalidated since
  u32 count;
  u32 pending;  // arrivals that the phase still needs
  i32 bytes;    // announced and not yet there; less than none if they come before they are announced
  u32 phase;
  Site site;  // of its initialisation
  std::vector<Thread*> waiters;
  // Race mode. Who initialised it and when, when that thread fenced it (0: never) and in which phase of the
  // cluster's barrier, how many phases have ended at
  // this place, and what those who arrived and those who waited know.
  i32 init_thread;
  u32 init_clock;
  u32 fence_clock;
  u32 fence_phase;
  u32 ended;
  Message arriving;
  Message ended_with;
};

// A resident block: memory and threads that successive blocks of the grid run in.
struct Block {
  i64 index;
  i32 live;
  bool started;  // and not yet seen to have ended
  u32 ready_warps;
  u8* shared;
  Barrier barrier;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  Cluster* cluster;
  i32 rank;            // in its cluster
  i32 free_registers;  // for an increase
  // Race mode, in a cluster: for each of its agents the last access from outside, and what the block's
  // threads knew when they returned.
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
  // Blocks beyond a cluster may wait for each other, so that accesses of theirs can be ordered.
  bool blocks_synchronise;
  // Some buffers are others' before griddep_wait.
  bool awaits_primary;
  // Race mode: mbarriers or the async proxy are in use.
  bool async_clocks;
  // Grows whenever a thread starts, returns, or stores or copies by a primitive. Calls of primitives that may
  // follow without that before a thread must let others run; and whether the launch has been without it for
  // too long.
  u64 progress;
  i64 calls_left;
  volatile bool overdue;
  // Questions whether a phase has ended, in all and since one last did.
  u64 questions;
  u64 fruitless_questions;
};

inline Runtime runtime;

inline Thread& self() { return *runtime.current; }

}  // namespace flashgen::emu
