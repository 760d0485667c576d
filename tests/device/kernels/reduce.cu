// Additions to global memory, by several blocks to the same places.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;
constexpr i32 kRounds = 4;

struct Params {
  i32 variant;
  const float* x;       // [block][round][thread][4]
  const i32* elements;  // [block][round][thread]: where to add, a multiple of 4
  float* out;
};

enum class Variant { kOne, kFour };

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  for (i32 round = 0; round < kRounds; ++round) {
    const i32 i = (block_idx_x() * kRounds + round) * kThreads + thread_idx();
    const float* x = params.x + 4 * i;
    float* out = params.out + params.elements[i];
    const float values[4] = {x[0], x[1], x[2], x[3]};
    if constexpr (variant == Variant::kFour) {
      reduce_add_x4(out, values);
    } else {
      reduce_add(out + 1, values[1]);
    }
  }
}
