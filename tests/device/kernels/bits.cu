// Products of bits, from registers to registers, several steps into one accumulator.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 32;

struct Params {
  i32 variant;
  i32 steps;
  const u32* a;  // [step][lane][2]
  const u32* b;  // [step][lane]
  const i32* c;  // [lane][4]
  i32* d;        // [lane][4]
};

enum class Variant { kCommonBits };

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  const i32 lane = thread_idx();
  i32 d[4];
  for (i32 i = 0; i < 4; ++i) d[i] = params.c[4 * lane + i];
  for (i32 step = 0; step < params.steps; ++step) {
    const i32 place = step * kThreads + lane;
    const u32 a[2] = {params.a[2 * place], params.a[2 * place + 1]};
    mma_m16n8k128_bits(d, a, params.b[place]);
  }
  for (i32 i = 0; i < 4; ++i) params.d[4 * lane + i] = d[i];
}
