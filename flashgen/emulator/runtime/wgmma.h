// Products of a warpgroup. Accumulators are NaN from the issue on, and shared memory is read only when a lane
// waits for the results. A missing wait, or a buffer that is reused too early, shows in the results. Under
// the random schedules some products are executed as soon as all lanes have issued them.
#pragma once
#include "fences.h"
#include "scheduler.h"
#include "wgmma_multiply.h"

namespace flashgen::emu {

inline i32 lane_in_warpgroup(const Thread& thread) { return thread.thread_idx % kWarpgroupSize; }

inline Warpgroup& warpgroup_of(const Thread& thread) {
  return thread.block->warpgroups[static_cast<size_t>(thread.thread_idx / kWarpgroupSize)];
}
inline Thread* lanes_of_warpgroup(const Thread& thread) {
  return &thread.block->threads[static_cast<size_t>(thread.thread_idx - lane_in_warpgroup(thread))];
}

inline void require_whole_warpgroup(const Thread& thread, const char* what) {
  const auto threads = static_cast<i32>(thread.block->threads.size());
  if (thread.thread_idx - lane_in_warpgroup(thread) + kWarpgroupSize <= threads) return;
  fail("divergent warpgroup", "%s needs four warps; the block's last warpgroup has only %d", what,
       threads % kWarpgroupSize / kWarpSize);
}

// Executes the products before the one with this number.
inline void carry_out_before(const Block& block, Warpgroup& warpgroup, u64 number) {
  while (warpgroup.done < number) {
    const WarpgroupProduct& product = warpgroup.products.front();
    carry_out(block.shared, product, *warpgroup.accumulators[product.accumulators]);
    warpgroup.products.pop_front();
    ++warpgroup.done;
  }
}

// ---- Issuing

// The index of the accumulators that hold a lane's registers, or the number of accumulators if there are
// none.
inline size_t find_accumulators(const Warpgroup& warpgroup, i32 lane, const float* d) {
  size_t index = 0;
  for (; index < warpgroup.accumulators.size(); ++index) {
    const WarpgroupAccumulators& accumulators = *warpgroup.accumulators[index];
    if (accumulators.in_use && accumulators.registers[lane] == d) break;
  }
  return index;
}

// The accumulators for the product with this number: those that hold the lane's registers, or new ones.
inline size_t choose_accumulators(Warpgroup& warpgroup, i32 lane, const float* d, i32 columns, u64 number) {
  size_t index = find_accumulators(warpgroup, lane, d);
  if (index != warpgroup.accumulators.size()) {
    const i32 before = warpgroup.accumulators[index]->columns;
    if (before == columns) return index;
    fail("missing wait",
         "these accumulators still belong to a wgmma of %d columns that has not been waited for; this one has"
         " %d",
         before, columns);
  }
  index = 0;
  while (index < warpgroup.accumulators.size() && warpgroup.accumulators[index]->in_use) ++index;
  if (index == warpgroup.accumulators.size())
    warpgroup.accumulators.push_back(std::make_unique<WarpgroupAccumulators>());
  WarpgroupAccumulators& fresh = *warpgroup.accumulators[index];
  fresh.in_use = true;
  fresh.columns = columns;
  fresh.fetched = 0;
  fresh.first_product = number;
  memset(fresh.registers, 0, sizeof fresh.registers);
  return index;
}

// The first lane to issue a product records it.
inline void note_product(const Thread& thread, Warpgroup& warpgroup, float* d, const FlashgenEmuWgmma& form) {
  if (form.a == nullptr) check_operand(thread, left_operand(form), "left");
  check_operand(thread, right_operand(form), "right");
  const u64 number = warpgroup.issued();
  const size_t index = choose_accumulators(warpgroup, lane_in_warpgroup(thread), d, form.columns, number);
  warpgroup.accumulators[index]->last_product = number;
  warpgroup.products.push_back({form, thread.site, index, 0, {}});
}

// The other lanes must issue the same product.
inline void check_product(const WarpgroupProduct& product, const FlashgenEmuWgmma& form, const Site& site) {
  const FlashgenEmuWgmma& other = product.form;
  if (!same_site(product.site, site) || other.element != form.element || other.columns != form.columns ||
      other.a_is_mn_major != form.a_is_mn_major || other.b_is_mn_major != form.b_is_mn_major ||
      (other.a == nullptr) != (form.a == nullptr)) {
    fail("divergent warpgroup",
         "this lane is at wgmma while other lanes of its warpgroup were at another (%s:%d)",
         base_name(product.site.file), product.site.line);
  }
  if (other.accumulate != form.accumulate) {
    fail("divergent warpgroup", "accumulate is %s in this lane and %s in others of its warpgroup",
         form.accumulate ? "true" : "false", other.accumulate ? "true" : "false");
  }
  if (other.a_descriptor != form.a_descriptor || other.b_descriptor != form.b_descriptor) {
    const bool left = other.a_descriptor != form.a_descriptor;
    fail("divergent warpgroup",
         "the %s operand's descriptor is 0x%llx in this lane and 0x%llx in others of its warpgroup",
         left ? "left" : "right", left ? form.a_descriptor : form.b_descriptor,
         left ? other.a_descriptor : other.b_descriptor);
  }
}

// Moves the lane's registers to the product's accumulators.
inline void hand_over(Warpgroup& warpgroup, const WarpgroupProduct& product, i32 lane, float* d, u64 number) {
  WarpgroupAccumulators& accumulators = *warpgroup.accumulators[product.accumulators];
  const size_t before = find_accumulators(warpgroup, lane, d);
  if (before == product.accumulators) return;
  if (before != warpgroup.accumulators.size() || accumulators.registers[lane] != nullptr ||
      accumulators.first_product != number) {
    fail("divergent warpgroup",
         "this lane adds to other accumulators than before, and other lanes of its warpgroup do not");
  }
  accumulators.registers[lane] = d;
  put_registers(accumulators, lane, d);
  memset(d, kPoisonByte, static_cast<size_t>(accumulators.columns) / 2 * sizeof *d);
}

inline bool all_have_issued(Warpgroup& warpgroup, u64 number) {
  return number <= warpgroup.done ||
         (number <= warpgroup.issued() && warpgroup.product(number - 1).lanes == kWarpgroupSize);
}

inline void describe_wgmma_wait(const Thread& thread, char* text, size_t size) {
  Warpgroup& warpgroup = warpgroup_of(thread);
  i32 lanes = 0;
  const Thread* first = lanes_of_warpgroup(thread);
  for (i32 lane = 0; lane < kWarpgroupSize; ++lane)
    lanes += first[lane].warpgroup_lane.issued >= thread.warpgroup_lane.target;
  const u64 last = thread.warpgroup_lane.target - 1;
  const Site site =
      last >= warpgroup.done && last < warpgroup.issued() ? warpgroup.product(last).site : Site{"", 0};
  snprintf(text, size, "wgmma_wait (%d of its warpgroup's 128 lanes have issued the wgmma at %s:%d)", lanes,
           base_name(site.file), site.line);
}

inline void wake_waiting_lanes(const Thread& thread, Warpgroup& warpgroup) {
  Thread* lanes = lanes_of_warpgroup(thread);
  for (i32 lane = 0; lane < kWarpgroupSize; ++lane) {
    Thread& other = lanes[lane];
    if (other.state == State::waiting && other.describe == describe_wgmma_wait &&
        all_have_issued(warpgroup, other.warpgroup_lane.target)) {
      make_ready(other);
    }
  }
}

inline void issue_wgmma(float* d, const FlashgenEmuWgmma& form) {
  Thread& thread = self();
  require_whole_warpgroup(thread, "wgmma");
  const i32 lane = lane_in_warpgroup(thread);
  Warpgroup& warpgroup = warpgroup_of(thread);
  const u64 number = thread.warpgroup_lane.issued++;
  if (number == warpgroup.issued()) {
    note_product(thread, warpgroup, d, form);
  } else {
    check_product(warpgroup.product(number), form, thread.site);
  }
  WarpgroupProduct& product = warpgroup.product(number);
  const bool continues = find_accumulators(warpgroup, lane, d) == product.accumulators;
  require_fence(thread, form, continues ? nullptr : d);
  if (form.a != nullptr) memcpy(product.a[lane], form.a, sizeof product.a[lane]);
  hand_over(warpgroup, product, lane, d, number);
  if (runtime.launch.race) watch_operands(thread, form, static_cast<u32>(number));
  if (++product.lanes < kWarpgroupSize) return;
  if (warpgroup.waiting > 0) wake_waiting_lanes(thread, warpgroup);
  if (runtime.randomised && one_in(4)) carry_out_before(*thread.block, warpgroup, number + 1);
}

// ---- Waiting

inline void commit_group() {
  Thread& thread = self();
  require_whole_warpgroup(thread, "wgmma_commit");
  WarpgroupLane& lane = thread.warpgroup_lane;
  std::vector<u64>& groups = warpgroup_of(thread).groups;
  const size_t index = lane.committed++;
  if (index == groups.size()) {
    groups.push_back(lane.issued);
  } else if (groups[index] != lane.issued) {
    fail("divergent warpgroup",
         "this lane commits its group %zu after %llu wgmma, other lanes of its warpgroup after %llu",
         index + 1, static_cast<unsigned long long>(lane.issued),
         static_cast<unsigned long long>(groups[index]));
  }
}

// Returns to the lane its registers of accumulators that are complete.
inline void fetch_results(Warpgroup& warpgroup, i32 lane, u64 target) {
  for (const auto& accumulators : warpgroup.accumulators) {
    if (!accumulators->in_use || accumulators->last_product >= target) continue;
    float*& d = accumulators->registers[lane];
    if (d == nullptr) continue;
    get_registers(*accumulators, lane, d);
    d = nullptr;
    if (++accumulators->fetched == kWarpgroupSize) accumulators->in_use = false;
  }
}

inline void wait_for_groups(size_t pending) {
  Thread& thread = self();
  WarpgroupLane& lane = thread.warpgroup_lane;
  if (lane.committed - lane.retired <= pending) return;
  Warpgroup& warpgroup = warpgroup_of(thread);
  lane.retired = lane.committed - pending;
  lane.target = warpgroup.groups[lane.retired - 1];
  ++warpgroup.waiting;
  while (!all_have_issued(warpgroup, lane.target)) park(describe_wgmma_wait);
  --warpgroup.waiting;
  carry_out_before(*thread.block, warpgroup, lane.target);
  fetch_results(warpgroup, lane_in_warpgroup(thread), lane.target);
  lane.fenced = false;
  if (runtime.launch.race) note_operands_read(thread, static_cast<u32>(lane.target));
  maybe_yield();
}

// A thread must not return while its products are in flight.
inline void require_no_wgmma(const Thread& thread) {
  const WarpgroupLane& lane = thread.warpgroup_lane;
  if (lane.issued == 0) return;
  const u64 retired = lane.retired == 0 ? 0 : warpgroup_of(thread).groups[lane.retired - 1];
  if (retired == lane.issued) return;
  fail_for(thread, "missing wait", "this lane returned from the kernel with %llu wgmma in flight",
           static_cast<unsigned long long>(lane.issued - retired));
}

}  // namespace flashgen::emu

void flashgen_emu_check_descriptor(unsigned address, unsigned leading_bytes, unsigned stride_bytes,
                                   FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  if (address % kChunkBytes != 0) {
    fail("misaligned", "a matrix descriptor needs an address that is a multiple of 16; this is offset %d",
         static_cast<int>(address - kSharedBase));
  }
  for (const unsigned bytes : {leading_bytes, stride_bytes}) {
    if (bytes % kChunkBytes != 0 || bytes >= 1u << 18) {
      fail("invalid operand", "%s=%u of a matrix descriptor is not a multiple of 16 below 262144",
           bytes == leading_bytes ? "leading_bytes" : "stride_bytes", bytes);
    }
  }
}

void flashgen_emu_wgmma(float* d, const FlashgenEmuWgmma* form, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  issue_wgmma(d, *form);
}

void flashgen_emu_wgmma_fence(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  note_fence(self());
}

void flashgen_emu_wgmma_commit(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  commit_group();
}

void flashgen_emu_wgmma_wait(int pending, FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  wait_for_groups(static_cast<size_t>(pending));
}
