// Bits that tell which of two 16-bit numbers in a word are infinite or NaN.
#include "flashgen/primitives_packed.cuh"
using namespace flashgen;

constexpr i32 kThreads = 256;

struct Params {
  i32 variant;
  i32 count;
  const u32* x;
  u32* out;
};

enum class Variant { kBfloat16, kHalf };

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  for (i32 i = thread_idx(); i < params.count; i += kThreads) {
    if constexpr (variant == Variant::kBfloat16) params.out[i] = not_finite_packed(bfloat16_t{}, params.x[i]);
    if constexpr (variant == Variant::kHalf) params.out[i] = not_finite_packed(half_t{}, params.x[i]);
  }
}
