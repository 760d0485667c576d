// The machine: threads in warps in blocks, and the state of the one launch under way.
#pragma once
#include <cstring>
#include <vector>

#include "api.h"
#include "context.h"
#include "flashgen/emu/abi.h"
#include "flashgen/ptx/types.cuh"

namespace flashgen::emu {

using Site = FlashgenEmuSite;

using i16 = short;

constexpr i32 kWarpSize = 32;
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

enum class State : u8 { ready, running, at_warp, at_block, done };

// Operations at which all lanes of a warp meet.
enum class WarpOp : u8 { sync, any, shuffle, ldmatrix, mma };

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
class Shadow;

struct Warp {
  u32 ready;    // lanes that can run
  u32 live;     // lanes that have not returned
  u32 arrived;  // lanes waiting at the operation below
  WarpOp op;
  Site site;
  LaneCall calls[kWarpSize];
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
  u64 stack;  // its lowest address
  // Race mode: up to when this thread knows of each thread of its block; its own entry is its clock.
  u32* clocks;
};

// A barrier of all live threads of a block.
struct Barrier {
  i32 arrived;
  bool votes;  // block_any, not block_sync
  bool any;    // the vote so far
  bool result;
  Site site;
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
};

inline Runtime runtime;

inline Thread& self() { return *runtime.current; }

}  // namespace flashgen::emu
