// Arithmetic of two 16-bit numbers in a word.
#include "flashgen/primitives_packed.cuh"
using namespace flashgen;

constexpr i32 kThreads = 256;

struct Params {
  i32 variant;
  i32 count;
  const u32* x;
  const u32* y;
  u32* out;
};

enum class Variant {
  kMultiplyBfloat16,
  kMinimum,
};

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  for (i32 i = thread_idx(); i < params.count; i += kThreads) {
    if constexpr (variant == Variant::kMultiplyBfloat16) {
      params.out[i] = multiply_packed(bfloat16_t{}, params.x[i], params.y[i]);
    }
    if constexpr (variant == Variant::kMinimum) params.out[i] = minimum_packed(params.x[i], params.y[i]);
  }
}
