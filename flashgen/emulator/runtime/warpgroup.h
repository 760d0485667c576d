// The state of a warpgroup's products in flight. The lanes issue them one by one, and the first lane that
// waits for them executes them.
#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "flashgen/emu/abi.h"
#include "flashgen/ptx/types.cuh"

namespace flashgen::emu {

constexpr i32 kWarpgroupSize = 128;
constexpr i32 kWarpgroupRows = 64;
constexpr i32 kMaxColumns = 256;

// One wgmma. All lanes must issue it with the same operands as the first one.
struct WarpgroupProduct {
  FlashgenEmuWgmma form;
  FlashgenEmuSite site;
  size_t accumulators;  // index in the warpgroup
  i32 lanes;            // number that have issued it
  u32 a[kWarpgroupSize][4];
};

// Accumulators of products in flight. Meanwhile the lanes' registers are NaN.
struct WarpgroupAccumulators {
  bool in_use = false;
  i32 columns;
  i32 fetched;  // lanes that have their results
  u64 first_product;
  u64 last_product;
  float* registers[kWarpgroupSize];  // null: not issued by this lane yet, or fetched
  alignas(32) float values[kWarpgroupRows][kMaxColumns];
};

struct Warpgroup {
  Warpgroup() = default;
  Warpgroup(Warpgroup&&) noexcept = default;

  // Products are numbered from the block's start. Those before `done` are executed, and `products` has the
  // others.
  u64 done = 0;
  std::deque<WarpgroupProduct> products;
  // The number of the product after each committed group.
  std::vector<u64> groups;
  std::vector<std::unique_ptr<WarpgroupAccumulators>> accumulators;
  i32 waiting = 0;  // lanes
  // The arguments of setmaxnreg, in order, and the number of calls by each warp.
  std::vector<i32> register_counts;
  size_t register_changes[4] = {};

  void forget() {
    done = 0;
    products.clear();
    groups.clear();
    for (const auto& chain : accumulators) chain->in_use = false;
    waiting = 0;
    register_counts.clear();
    for (size_t& changes : register_changes) changes = 0;
  }
  WarpgroupProduct& product(u64 number) { return products[number - done]; }
  u64 issued() const { return done + products.size(); }
};

// Registers that products have used, to detect changes between a fence and a product.
struct WatchedRegisters {
  const void* registers;
  u32 bytes;
  u64 digest;  // at the last fence
};

// A lane's part in its warpgroup's products.
struct WarpgroupLane {
  u64 issued = 0;
  size_t committed = 0;  // groups
  size_t retired = 0;
  bool fenced = false;
  u64 target = 0;  // waits until all lanes have issued the products before this one
  std::vector<WatchedRegisters> watched;
};

}  // namespace flashgen::emu
