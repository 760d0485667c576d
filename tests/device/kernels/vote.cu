// Whether a condition holds for any lane of the warp, any thread of the block, and for which lanes.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 96;
constexpr i32 kRounds = 40;

struct Params {
  i32 variant;
  const u8* x;  // [round][thread]: the condition
  u32* out;     // [round][thread]
};

enum class Variant { kWarp, kBlock, kBallot, kLowestBit };

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  for (i32 round = 0; round < kRounds; ++round) {
    const i32 i = round * kThreads + thread_idx();
    const bool condition = params.x[i] != 0;
    u32 answer = 0;
    if constexpr (variant == Variant::kWarp) answer = warp_any(condition);
    if constexpr (variant == Variant::kBlock) answer = block_any(condition);
    if constexpr (variant == Variant::kBallot) answer = warp_ballot(condition);
    if constexpr (variant == Variant::kLowestBit)
      answer = static_cast<u32>(lowest_bit(warp_ballot(condition)));
    params.out[i] = answer;
  }
}
