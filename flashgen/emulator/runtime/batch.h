// Products that the lanes of a warp have issued, but whose results no lane has read. A batch needs only one
// rendezvous of the lanes, where separate products would need one each.
#pragma once
#include "flashgen/emu/abi.h"
#include "eight_bit.h"
#include "matrix.h"

namespace flashgen::emu {

struct Product {
  Operands operands;
  u32 accumulators;  // index in the batch
  bool first_use;    // of these accumulators
  FlashgenEmuProduct kind;
  FlashgenEmuSite site;
};

struct Batch {
  static constexpr u32 kCapacity = 64;

  // One side is filled while lanes still fetch results from the other.
  struct Side {
    u32 used = 0;
    Accumulators accumulators[kCapacity];
    // Each lane's registers, which hold the sums before and afterwards.
    float* registers[kCapacity][kWarpSize];

    // The index of the accumulators that hold a lane's registers, or `used` if there are none.
    u32 find(i32 lane, const float* wanted) const {
      u32 index = 0;
      while (index < used && registers[index][lane] != wanted) ++index;
      return index;
    }
    void fetch(i32 lane) {
      for (u32 i = 0; i < used; ++i) accumulators[i].get(lane, registers[i][lane]);
    }
  };

  u32 issued = 0;  // by the lane that has issued most
  u32 current = 0;
  Product products[kCapacity];
  Side sides[2];

  Side& side() { return sides[current]; }
  Side& other_side() { return sides[1 - current]; }
  void forget() { issued = sides[0].used = sides[1].used = 0; }

  void carry_out() {
    for (u32 i = 0; i < issued; ++i) carry_out(products[i]);
    issued = 0;
    current = 1 - current;
    side().used = 0;
  }

 private:
  void carry_out(const Product& product) {
    Accumulators& accumulators = side().accumulators[product.accumulators];
    switch (product.kind) {
      case kFlashgenEmuM16N8K8Half:
        return multiply_add<8, false>(product.operands, accumulators);
      case kFlashgenEmuM16N8K16Half:
        return multiply_add<16, false>(product.operands, accumulators);
      case kFlashgenEmuM16N8K16Bfloat16:
        return multiply_add<16, true>(product.operands, accumulators);
      case kFlashgenEmuM16N8K32E4m3:
        return multiply_add_eight_bit(product.operands, accumulators, e4m3_floats());
      case kFlashgenEmuM16N8K32E5m2:
        return multiply_add_eight_bit(product.operands, accumulators, e5m2_floats());
    }
  }
};

}  // namespace flashgen::emu
