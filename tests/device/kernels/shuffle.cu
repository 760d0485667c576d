// What one lane holds, seen by another. Lanes are counted modulo 32.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;
constexpr i32 kRounds = 32;

struct Params {
  i32 variant;
  const u32* x;        // [thread]
  const i32* sources;  // [round][lane]: a source lane, or a lane mask
  u32* out;            // [round][thread]
};

enum class Variant { kFloat, kInteger, kXor };

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  const i32 thread = thread_idx();
  const u32 own = params.x[thread];
  for (i32 round = 0; round < kRounds; ++round) {
    const i32 source = params.sources[round * 32 + thread % 32];
    u32 received = 0;
    if constexpr (variant == Variant::kFloat) received = bits_of(shuffle(float_of(own), source));
    if constexpr (variant == Variant::kInteger)
      received = static_cast<u32>(shuffle(static_cast<i32>(own), source));
    if constexpr (variant == Variant::kXor) received = bits_of(shuffle_xor(float_of(own), source));
    params.out[round * kThreads + thread] = received;
  }
}
