// Additions of 64-bit integers to global memory, by several blocks to the same places.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;
constexpr i32 kRounds = 4;

struct Params {
  i32 variant;
  const u64* x;         // [block][round][thread]
  const i32* elements;  // [block][round][thread]: where to add
  u64* out;
};

enum class Variant { kAdd };

template <Variant>
FLASHGEN_DEVICE void run(const Params& params) {
  for (i32 round = 0; round < kRounds; ++round) {
    const i32 i = (block_idx_x() * kRounds + round) * kThreads + thread_idx();
    reduce_add(params.out + params.elements[i], params.x[i]);
  }
}
