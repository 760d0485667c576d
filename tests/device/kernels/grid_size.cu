// How many blocks there are.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 32;

struct Params {
  i32 variant;
  i32* out;  // [block][thread]
};

enum class Variant { kAlongX };

template <Variant>
FLASHGEN_DEVICE void run(const Params& params) {
  const i32 block = block_idx_y() * grid_dim_x() + block_idx_x();
  params.out[block * kThreads + thread_idx()] = grid_dim_x() * 100 + block;
}
