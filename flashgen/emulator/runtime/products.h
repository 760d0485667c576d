// mma products. The lanes issue them one by one, and meet when a lane needs the results.
#pragma once
#include "warp.h"

namespace flashgen::emu {

// The first lane to issue a product records it. The other lanes must issue the same.
inline void note_product(const Thread& thread, Batch& batch, Product& product, const float* d,
                         FlashgenEmuProduct kind) {
  Batch::Side& side = batch.side();
  const u32 index = side.find(thread.lane, d);
  product.first_use = index == side.used;
  if (product.first_use) ++side.used;
  product.accumulators = index;
  product.kind = kind;
  product.site = thread.site;
  ++batch.issued;
}

inline void check_product(const Thread& thread, const Product& product, FlashgenEmuProduct kind) {
  if (product.kind == kind && same_site(product.site, thread.site)) return;
  fail("divergent collective", "this lane is at %s while other lanes of its warp were at %s (%s:%d)",
       name_of(WarpOp::mma), name_of(WarpOp::mma), base_name(product.site.file), product.site.line);
}

// All lanes must have issued the same number of products.
inline void check_counts(const Batch& batch, const Thread* lanes) {
  for (i32 lane = 0; lane < kWarpSize; ++lane) {
    const u32 issued = lanes[lane].issued;
    if (issued == batch.issued) continue;
    const Site& site = batch.products[issued].site;
    fail_for(lanes[lane], "divergent collective",
             "this lane has issued %u products while other lanes of its warp issued %u; the next is that of"
             " %s:%d",
             issued, batch.issued, base_name(site.file), site.line);
  }
}

inline void run_products(Warp& warp, Thread* lanes) {
  check_counts(*warp.batch, lanes);
  warp.batch->carry_out();
  for (i32 lane = 0; lane < kWarpSize; ++lane) lanes[lane].issued = 0;
}

// Computes the products of all lanes, and fetches the results of the running lane.
inline void finish_products() {
  Thread& thread = self();
  meet(WarpOp::mma, {});
  thread.warp->batch->other_side().fetch(thread.lane);
}

inline Batch& batch_of(Warp& warp) {
  if (warp.batch == nullptr) warp.batch = std::make_unique<Batch>();
  return *warp.batch;
}

inline void issue_product(Thread& thread, float* d, const u32* a, const u32* b, FlashgenEmuProduct kind) {
  require_all_lanes(*thread.warp, WarpOp::mma);
  Batch& batch = batch_of(*thread.warp);
  if (thread.issued == Batch::kCapacity) finish_products();
  const u32 index = thread.issued++;
  Product& product = batch.products[index];
  if (index == batch.issued) {
    note_product(thread, batch, product, d, kind);
  } else {
    check_product(thread, product, kind);
  }
  const auto lane = static_cast<u32>(thread.lane);
  if (kind == kFlashgenEmuM16N8K8Half) {
    product.operands.put<8>(lane, a, b);
  } else {
    product.operands.put<16>(lane, a, b);
  }
  float*& registers = batch.side().registers[product.accumulators][lane];
  if (product.first_use) {
    registers = d;
    batch.side().accumulators[product.accumulators].put(lane, d);
  } else if (registers != d) {
    fail("divergent collective",
         "this lane adds to other accumulators than before, and other lanes of its warp do not; call"
         " mma_finish in between");
  }
}

}  // namespace flashgen::emu

void flashgen_emu_mma(float* d, const unsigned* a, const unsigned* b, FlashgenEmuProduct kind,
                      FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  issue_product(self(), d, a, b, kind);
}

void flashgen_emu_mma_finish(FlashgenEmuSite site) {
  using namespace flashgen::emu;
  FLASHGEN_EMU_NOTE_SITE();
  finish_products();
}
