// Bulk stores and reductions, as late as possible. Shared memory is read when the thread waits for the reads
// of its groups. Global memory is written when the thread waits for the groups themselves, or returns. Under
// the random schedules either may happen earlier. A buffer that is reused too early shows in the results.
#pragma once
#include "copies.h"
#include "bulk.h"
#include "reduction.h"

namespace flashgen::emu {

struct BulkStore {
  Transfer transfer;
  bool adds;
  Thread* thread;
  u32 group;  // index among the thread's groups
  Site site;
  const void* code;
  bool has_read;
  bool has_written;
  bool known_to_have_read;
  std::vector<u8> data;

  TransferAccess access() const { return {transfer, *thread, call_before(code)}; }
  How how() const { return adds ? How::bulk_reduce_add : How::bulk_store; }
};

// Not waited for yet, oldest first.
inline std::vector<BulkStore> bulk_stores;

inline void issue_store(const Transfer& transfer, bool adds, const char* what) {
  Thread& thread = self();
  if (transfer.shared >> kRankShift != 0)
    fail("invalid operand", "%s from the shared memory of another block", what);
  block_of(transfer, transfer.shared, what);
  if (adds && transfer.boxed && !can_add(transfer.box.map.element))
    fail("invalid operand", "%s of elements that cannot be added; use 32-bit or floating-point ones", what);
  // An H200 stops with an illegal instruction here. It clips boxes that reach beyond the end.
  for (i32 dim = 0; transfer.boxed && dim < transfer.box.map.rank; ++dim) {
    if (transfer.box.at[dim] < 0) {
      fail("invalid operand", "%s of a box that begins before the tensor, at %d in dimension %d", what,
           transfer.box.at[dim], dim);
    }
  }
  check_global_side(transfer, true, what);
  BulkStore store = {transfer, adds,  &thread, thread.store_groups, thread.site, thread.code, false,
                     false,    false, {}};
  if (runtime.launch.race) {
    store.access().visit_shared_runs(*thread.block, How::bulk_source,
                                     [](const AsyncAccess& a) { begin_async_read(a); });
    store.access().visit_global(
        store.how(), [&](const AsyncAccess& a) { store.adds ? begin_adding(a) : begin_async_write(a); });
  }
  bulk_stores.push_back(store);
}

inline void read_source(BulkStore& store) {
  if (store.has_read) return;
  store.has_read = true;
  gather_from_shared(store.transfer, *store.thread->block, store.data);
}

inline void write_destination(BulkStore& store) {
  if (store.has_written) return;
  read_source(store);
  store.has_written = true;
  const TensorElement element =
      store.transfer.boxed ? store.transfer.box.map.element : TensorElement::float32;
  store.transfer.visit_runs([&](const Run& run) {
    const u8* data = store.data.data() + run.offset;
    if (store.adds) {
      add_elements(element, run.memory, data, run.bytes);
    } else {
      memcpy(run.memory, data, run.bytes);
    }
  });
}

// The thread has waited for the read.
inline void learn_of_read(BulkStore& store) {
  read_source(store);
  if (store.known_to_have_read) return;
  store.known_to_have_read = true;
  if (!runtime.launch.race) return;
  store.access().visit_shared_runs(*store.thread->block, How::bulk_source,
                                   [](const AsyncAccess& a) { end_async_read(a); });
}

// The thread has waited for the read and the write.
inline void finish_store(BulkStore& store) {
  learn_of_read(store);
  write_destination(store);
  if (!runtime.launch.race) return;
  store.access().visit_global(store.how(),
                              [&](const AsyncAccess& a) { store.adds ? end_adding(a) : end_async_write(a); });
}

// Waits until at most `pending` groups of the running thread are in flight or, with `reads_only`, have yet to
// read.
inline void wait_for_stores(u32 pending, bool reads_only) {
  Thread& thread = self();
  const auto is_due = [&](const BulkStore& store) {
    return store.thread == &thread && store.group + pending < thread.store_groups;
  };
  for (BulkStore& store : bulk_stores) {
    if (!is_due(store)) continue;
    reads_only ? learn_of_read(store) : finish_store(store);
  }
  if (!reads_only) std::erase_if(bulk_stores, is_due);
}

// The running thread returns. Its stores may still write, but must have read: shared memory is gone.
inline void finish_stores_of(Thread& thread) {
  for (BulkStore& store : bulk_stores) {
    if (store.thread != &thread) continue;
    if (!store.known_to_have_read) {
      thread.site = store.site;
      thread.code = store.code;
      fail("missing wait",
           "this thread returned from the kernel without waiting until its %s had read shared memory; call "
           "bulk_commit and bulk_wait_read",
           name_of(store.how()));
    }
    finish_store(store);
  }
  std::erase_if(bulk_stores, [&](const BulkStore& store) { return store.thread == &thread; });
}

// ---- Asynchronous progress

inline bool complete_something() {
  if (bulk_loads.empty()) return fail_a_try_wait();
  deliver_load(runtime.randomised ? random_bits() % bulk_loads.size() : 0);
  return true;
}

// Rarely: threads call this often, and most bugs show when copies are late.
inline void maybe_deliver_a_bulk_copy() {
  if (!bulk_loads.empty() && one_in(16)) deliver_load(random_bits() % bulk_loads.size());
  if (bulk_stores.empty() || !one_in(16)) return;
  BulkStore& store = bulk_stores[random_bits() % bulk_stores.size()];
  store.has_read ? write_destination(store) : read_source(store);
}

inline void maybe_deliver_a_copy(Thread& thread) {
  if (!thread.copies.empty()) deliver(thread.copies[random_bits() % thread.copies.size()]);
  maybe_deliver_a_bulk_copy();
}

inline void forget_bulk_copies() {
  bulk_loads.clear();
  bulk_stores.clear();
}

}  // namespace flashgen::emu

void flashgen_emu_tma_store(const void* map, unsigned source, int adds, const int* at, int rank,
                            FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  const char* what = adds ? "tma_reduce_add" : "tma_store";
  Transfer transfer = transfer_of_box(source, map, at, rank, what);
  transfer.box.is_stored = true;
  issue_store(transfer, adds != 0, what);
  made_progress();
  maybe_yield();
}

void flashgen_emu_bulk_store(void* destination, unsigned source, unsigned bytes, int adds,
                             FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  const char* what = adds ? "bulk_reduce_add" : "bulk_store";
  issue_store(transfer_of_bytes(source, destination, bytes, what), adds != 0, what);
  made_progress();
  maybe_yield();
}

void flashgen_emu_bulk_commit(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  ++self().store_groups;
  maybe_yield();
}

void flashgen_emu_bulk_wait(int pending, int reads_only, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  wait_for_stores(static_cast<unsigned>(pending), reads_only != 0);
  maybe_yield();
}
