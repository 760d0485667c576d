// Where a thread stands, and what it knows of its shared memory.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;

struct Params {
  i32 variant;
  i32* out;  // [block][thread][8]
};

enum class Variant { kThreadAndBlock };

template <Variant>
FLASHGEN_DEVICE void run(const Params& params) {
  FLASHGEN_SHARED_MEMORY(shared);
  const i32 thread = thread_idx();
  const i32 block = (block_idx_z() * 2 + block_idx_y()) * 3 + block_idx_x();
  i32* out = params.out + (block * kThreads + thread) * 8;
  out[0] = thread;
  out[1] = block_idx_x();
  out[2] = block_idx_y();
  out[3] = block_idx_z();
  out[4] = opaque(thread * 1000003);
  // The base differs between machines; its alignment and the distances do not.
  out[5] = static_cast<i32>(shared_address(shared) % 1024);
  out[6] = static_cast<i32>(shared_address(shared + thread * 20) - shared_address(shared));
  out[7] = static_cast<i32>(bits_of(float_of(0x7fc00000u + static_cast<u32>(thread))));
}
