// Bulk loads. The destination is NaN from the issue on. The bytes arrive, and the mbarrier counts them, as
// late as possible: when no thread can run without them. Under the random schedules they may arrive at any
// time.
#pragma once
#include "transfer.h"

namespace flashgen::emu {

struct BulkLoad {
  // A block that receives the bytes, and the index of its mbarrier that counts them.
  struct Target {
    Block* block;
    u32 mbarrier;
  };
  Transfer transfer;
  std::vector<Target> targets;
  Thread* thread;
  Site site;
  const void* code;

  TransferAccess access() const { return {transfer, *thread, call_before(code)}; }
};

// In flight, oldest first.
inline std::vector<BulkLoad> bulk_loads;

inline void begin_load(const BulkLoad& load, Block& block, MBarrier& barrier, const char* what) {
  if (barrier.bytes < static_cast<i32>(load.transfer.bytes) - kMaxPendingBytes) {
    fail("mbarrier overflow",
         "%s for the mbarrier at offset %u, where %d bytes have arrived that no thread expected", what,
         barrier.offset, -barrier.bytes);
  }
  if (runtime.launch.race)
    load.access().visit_shared(block, How::bulk_load, [](const AsyncAccess& a) { begin_async_write(a); });
  poison_shared(load.transfer, block);
}

// `blocks`: a bit for each rank that receives the bytes; 0: the block of the destination address.
inline void issue_load(const Transfer& transfer, u32 barrier, u32 blocks, const char* what) {
  Thread& thread = self();
  check_global_side(transfer, false, what);
  if (transfer.shared >> kRankShift != barrier >> kRankShift)
    fail("invalid operand", "%s into one block, counted by the mbarrier of another", what);
  BulkLoad load = {transfer, {}, &thread, thread.site, thread.code};
  if (runtime.launch.race)
    load.access().visit_global(How::bulk_source, [](const AsyncAccess& a) { begin_async_read(a); });
  const auto take = [&](u32 rank_bits) {
    Block& block = block_of(transfer, transfer.shared | rank_bits, what);
    MBarrier& counter = use_mbarrier_of_cluster(barrier | rank_bits, what, true).barrier;
    begin_load(load, block, counter, what);
    load.targets.push_back({&block, index_of(block, counter)});
  };
  if (blocks == 0) take(0);
  if (blocks != 0 && transfer.shared >> kRankShift != 0)
    fail("invalid operand",
         "%s to several blocks at address 0x%x of map_to_rank; use the address in this block", what,
         transfer.shared);
  for (u32 rest = blocks; rest != 0; rest &= rest - 1)
    take((static_cast<u32>(lowest(rest)) + 1) << kRankShift);
  bulk_loads.push_back(load);
}

inline void deliver_to(const BulkLoad& load, const BulkLoad::Target& target, const std::vector<u8>& data) {
  MBarrier& barrier = target.block->mbarriers[target.mbarrier];
  scatter_to_shared(load.transfer, data, *target.block);
  if (runtime.launch.race) {
    load.access().visit_shared(*target.block, How::bulk_load, [&](const AsyncAccess& a) {
      end_async_write_at(a, number_of(*target.block, target.mbarrier), barrier.ended + 1);
    });
  }
  complete_bytes(*target.block, barrier, load.transfer.bytes);
}

inline void deliver_load(size_t index) {
  static std::vector<u8> data;
  const BulkLoad load = bulk_loads[index];
  bulk_loads.erase(bulk_loads.begin() + static_cast<std::ptrdiff_t>(index));
  gather_from_global(load.transfer, data);
  if (runtime.launch.race)
    load.access().visit_global(How::bulk_source, [](const AsyncAccess& a) { drop_async_read(a); });
  for (const BulkLoad::Target& target : load.targets) deliver_to(load, target, data);
}

// Other blocks get the shared memory of a block whose threads have all returned.
inline void check_no_load_is_in_flight(const Block& block) {
  for (const BulkLoad& load : bulk_loads) {
    for (const BulkLoad::Target& target : load.targets) {
      if (target.block != &block) continue;
      load.thread->site = load.site;
      load.thread->code = load.code;
      fail_for(
          *load.thread, "missing wait",
          "all threads of block %lld have returned while a bulk load into its shared memory is in flight",
          static_cast<long long>(block.index));
    }
  }
}

}  // namespace flashgen::emu

void flashgen_emu_tma_load(unsigned destination, const void* map, unsigned barrier, unsigned blocks,
                           const int* at, int rank, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  made_progress();
  issue_load(transfer_of_box(destination, map, at, rank, "tma_load"), barrier, blocks, "tma_load");
  maybe_yield();
}

void flashgen_emu_bulk_load(unsigned destination, const void* source, unsigned bytes, unsigned barrier,
                            FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  made_progress();
  issue_load(transfer_of_bytes(destination, source, bytes, "bulk_load"), barrier, 0, "bulk_load");
  maybe_yield();
}

void flashgen_emu_prefetch_tensormap(const void* map, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  check_tensor_map(map, "prefetch_tensormap");
}
