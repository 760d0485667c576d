// The emulator's runtime, one translation unit: a launch runs every block of the grid, thread by thread.
#include "api.h"
#include "block.h"
#include "bulk_store.h"
#include "cluster.h"
#include "deadlock.h"
#include "faults.h"
#include "grid.h"
#include "hooks.h"
#include "mbarrier_init.h"
#include "named_barrier.h"
#include "products.h"
#include "registers.h"
#include "spin.h"
#include "warp.h"
#include "watchdog.h"
#include "wgmma.h"

FlashgenEmuThread* flashgen_emu_thread = nullptr;

namespace flashgen::emu {

// When the last thread of a block returns, the next block takes its place. The main stack starts it, because
// the new block reuses the returning thread's stack.
[[noreturn]] static void thread_main() {
  runtime.launch.entry(runtime.launch.params);
  Thread& thread = self();
  require_no_products(thread);
  require_no_wgmma(thread);
  Block& block = *thread.block;
  finish_stores_of(thread);
  thread.site = {nullptr, 0};
  thread.code = nullptr;
  thread.state = State::done;
  made_progress();
  thread.warp->live &= ~(1u << thread.lane);
  if (thread.warp->arrived != 0) {
    fail("divergent collective",
         "this lane returned from the kernel while %d lanes of its warp wait at %s (%s:%d)",
         __builtin_popcount(thread.warp->arrived), name_of(thread.warp->op),
         base_name(thread.warp->site.file), thread.warp->site.line);
  }
  require_same_register_changes(thread);
  if (--block.live == 0) check_no_load_is_in_flight(block);
  leave_cluster(thread);
  if (block.live == 0) leave();
  release_if_complete(block);
  Thread* next = wait_for_ready(&thread);
  if (next == nullptr) report_deadlock();
  resume(*next);
  __builtin_unreachable();
}

static void start_thread(Block& block, i32 index, size_t stack) {
  Thread& thread = block.threads[index];
  thread.thread_idx = index;
  const int64_t* grid = runtime.launch.grid;
  thread.block_idx_x = static_cast<i32>(block.index % grid[0]);
  thread.block_idx_y = static_cast<i32>(block.index / grid[0] % grid[1]);
  thread.block_idx_z = static_cast<i32>(block.index / grid[0] / grid[1]);
  thread.grid_dim_x = static_cast<i32>(grid[0]);
  thread.shared_memory = block.shared;
  thread.block = &block;
  thread.warp_idx = index / kWarpSize;
  thread.warp = &block.warps[thread.warp_idx];
  thread.lane = index % kWarpSize;
  thread.state = State::ready;
  thread.site = {nullptr, 0};
  thread.code = nullptr;
  thread.copies.clear();
  thread.groups.clear();
  thread.uncommitted = 0;
  thread.issued = 0;
  thread.warpgroup_lane = {};
  thread.arrived_at_cluster = false;
  thread.store_groups = 0;
  thread.may_fail = false;
  thread.stack = reinterpret_cast<u64>(stacks.bottom(stack));
  prepare(thread.context, stacks.bottom(stack) + page_bytes(), stacks.top(stack), thread_main);
}

static void start_block(size_t place, i64 index) {
  Block& block = runtime.blocks[place];
  const i32 threads = runtime.launch.threads;
  made_progress();
  block.index = index;
  block.live = threads;
  block.barrier = {};
  start_named_barriers(block);
  block.mbarriers.clear();
  block.shared = shared_pool.slot(place, shared_bytes());
  shared_pool.poison(place);
  block.started = true;
  for (Warp& warp : block.warps) {
    warp.ready = warp.live = kAllLanes;
    warp.arrived = 0;
    if (warp.batch != nullptr) warp.batch->forget();
    warp.priority = static_cast<i32>(random_bits() & 0xffff);
  }
  for (Warpgroup& warpgroup : block.warpgroups) warpgroup.forget();
  start_registers(block);
  start_in_cluster(block, place);
  const auto warps = static_cast<u32>(threads / kWarpSize);
  block.ready_warps = warps == 32 ? kAllLanes : (1u << warps) - 1;
  for (i32 i = 0; i < threads; ++i)
    start_thread(block, i, place * static_cast<size_t>(threads) + static_cast<size_t>(i));
  if (runtime.launch.race) {
    start_clocks(block);
    block.shadow = block_shadows[place].get();
    block.shadow->forget();
  }
}

// The bytes around shared memory, up to the pages that trap, must be unchanged.
static void check_surroundings(size_t place) {
  Block& block = runtime.blocks[place];
  if (!block.started) return;
  block.started = false;
  const i64 stray = shared_pool.stray_write(place, block.shared, shared_bytes());
  if (stray == SharedPool::kNone) return;
  report_for_block(block, "shared memory out of bounds",
                   "a store to offset %lld of %u bytes of shared memory", static_cast<long long>(stray),
                   shared_bytes());
}

// The order in which clusters start.
static void choose_order() {
  const i64 count = runtime.block_count / runtime.launch.cluster;
  runtime.order.resize(static_cast<size_t>(count));
  for (i64 i = 0; i < count; ++i) {
    runtime.order[static_cast<size_t>(i)] = runtime.launch.schedule == kReverse ? count - 1 - i : i;
  }
  if (!runtime.randomised) return;
  for (size_t i = runtime.order.size(); i > 1; --i)
    std::swap(runtime.order[i - 1], runtime.order[random_bits() % i]);
}

// The blocks of a cluster take consecutive places, and start together when all of these are free. Returns how
// many of them run.
static size_t fill_places(size_t first) {
  const size_t size = cluster_size();
  size_t live = 0;
  for (size_t rank = 0; rank < size; ++rank) live += runtime.blocks[first + rank].live > 0;
  if (live > 0 || runtime.started == runtime.order.size()) return live;
  const i64 index = runtime.order[runtime.started++] * static_cast<i64>(size);
  start_cluster(first);
  for (size_t rank = 0; rank < size; ++rank) start_block(first + rank, index + static_cast<i64>(rank));
  return size;
}

static void run_grid() {
  while (!runtime.failed) {
    size_t live = 0;
    for (size_t place = 0; place < runtime.blocks.size() && !runtime.failed; ++place) {
      if (runtime.blocks[place].live == 0) check_surroundings(place);
    }
    if (runtime.failed) return;
    for (size_t place = 0; place < runtime.blocks.size(); place += cluster_size()) live += fill_places(place);
    if (live == 0) return;
    runtime.current = nullptr;
    Thread* next = wait_for_ready(nullptr);
    if (next == nullptr) return report_deadlock_of_grid();
    resume(*next);
  }
}

static bool refuse(const char* what, long long value) {
  FlashgenEmuReport& report = *runtime.report;
  snprintf(report.kind, sizeof report.kind, "launch refused");
  snprintf(report.what, sizeof report.what, what, value);
  runtime.failed = true;
  return false;
}

static bool prepare_shadows() {
  block_shadows.resize(runtime.blocks.size());
  for (size_t place = 0; place < block_shadows.size(); ++place) {
    std::unique_ptr<Shadow>& shadow = block_shadows[place];
    if (shadow == nullptr) shadow = std::make_unique<Shadow>();
    const u8* shared = shared_pool.slot(place, shared_bytes());
    if (!shadow->prepare(reinterpret_cast<u64>(shared), shared_bytes())) return false;
  }
  buffer_shadows.clear();
  for (const FlashgenEmuBuffer& buffer : runtime.buffers) {
    buffer_shadows.push_back(std::make_unique<Shadow>());
    if (buffer.writable && !buffer_shadows.back()->prepare(buffer.address, buffer.bytes)) return false;
  }
  return true;
}

static bool prepare_launch(const FlashgenEmuLaunch& launch) {
  if (launch.threads <= 0 || launch.threads > kMaxThreads || launch.threads % kWarpSize != 0)
    return refuse("threads=%lld is not a multiple of 32 from 32 to 1024", launch.threads);
  if (launch.shared_bytes < 0 || launch.shared_bytes > kMaxSharedBytes)
    return refuse("smem_bytes=%lld is more than the 232448 bytes of shared memory that a block can have",
                  launch.shared_bytes);
  if (launch.cluster < 1 || launch.cluster > kMostBlocksOfCluster)
    return refuse("cluster=%lld blocks; a cluster has 1 to 16", launch.cluster);
  if (launch.grid[0] % launch.cluster != 0)
    return refuse("%lld blocks along x are not a multiple of the blocks of a cluster", launch.grid[0]);
  if (launch.resident < 1) return refuse("resident=%lld is not a positive number of blocks", launch.resident);
  for (const int64_t blocks : launch.grid) {
    if (blocks < 0 || blocks > kMaxBlocks)
      return refuse("%lld blocks along one axis are not from 0 to 2^31 - 1", blocks);
  }
  const i64 blocks = launch.grid[0] * launch.grid[1] * launch.grid[2];
  if (blocks > kMaxBlocks) return refuse("%lld blocks; the emulator supports at most 2^31 - 1", blocks);
  runtime.block_count = blocks;
  const i64 resident = launch.cooperative || launch.resident > blocks ? blocks : launch.resident;
  const i64 occupied = (resident + launch.cluster - 1) / launch.cluster * launch.cluster;
  const auto places = static_cast<size_t>(occupied > 0 ? occupied : launch.cluster);
  const auto threads = static_cast<size_t>(launch.threads);
  if (!stacks.grow(places * threads) ||
      !shared_pool.prepare(places, static_cast<size_t>(launch.shared_bytes)))
    return refuse("not enough memory for the stacks of blocks of %lld threads", launch.threads);
  runtime.launch = launch;
  runtime.buffers.assign(launch.buffers, launch.buffers + launch.buffer_count);
  runtime.blocks.resize(places);
  runtime.blocks_synchronise = launch.cooperative || launch.cluster > 1;
  runtime.started = 0;
  clusters.resize(places / static_cast<size_t>(launch.cluster));
  polling = {};
  released.clear();
  for (Block& block : runtime.blocks) {
    block.live = 0;
    block.ready_warps = 0;
    block.started = false;
    block.threads.resize(threads);
    block.warps.resize(threads / kWarpSize);
    block.warpgroups.resize((threads + kWarpgroupSize - 1) / kWarpgroupSize);
  }
  if (launch.race && !prepare_shadows())
    return refuse("not enough memory for the race checks of %lld blocks", launch.resident);
  runtime.randomised = launch.schedule == kRandom || launch.schedule == kPriority;
  runtime.random_state = launch.seed * 0x9e3779b97f4a7c15ull + 0x1234567ull;
  if (runtime.random_state == 0) runtime.random_state = 1;
  runtime.try_waits = runtime.failed_try_waits = 0;
  runtime.overdue = false;
  runtime.async_clocks = false;
  forget_bulk_copies();
  choose_order();
  if (!poison_primary_buffers())
    return refuse(
        "a writable buffer from_primary is in read-only memory, and the emulator must fill it with NaN", 0);
  return true;
}

}  // namespace flashgen::emu

int flashgen_emu_launch(const FlashgenEmuLaunch* launch, FlashgenEmuReport* report) {
  using namespace flashgen::emu;
  memset(report, 0, sizeof *report);
  report->place.line = report->place.thread = -1;
  report->place.block = -1;
  runtime.report = report;
  runtime.failed = false;
  runtime.current = nullptr;
  if (!prepare_launch(*launch)) return 1;
  FaultGuard guard;
  Watchdog watchdog(*launch);
  if (sigsetjmp(fault_return, 1) == 0) {
    in_kernel = true;
    run_grid();
  } else {
    describe_fault();
  }
  in_kernel = false;
  restore_primary_buffers();
  runtime.current = nullptr;
  buffer_shadows.clear();
  return runtime.failed ? 1 : 0;
}
