// Scalar arithmetic and conversions, on bits.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 256;

struct Params {
  i32 variant;
  i32 count;
  const u32* x;
  const u32* y;
  const u32* z;
  u32* out;
};

enum class Variant {
  kExp2,
  kLog2,
  kReciprocal,
  kMaximum,
  kMaximumMagnitude,
  kFusedMultiplyAdd,
  kFusedMultiplyAddClipped,
  kPackBfloat16,
  kToHalf,
  kHalfToFloat,
};

template <Variant variant>
FLASHGEN_DEVICE u32 compute(u32 x, u32 y, u32 z) {
  const float a = float_of(x);
  const float b = float_of(y);
  if constexpr (variant == Variant::kExp2) return bits_of(exp2_approx(a));
  if constexpr (variant == Variant::kLog2) return bits_of(log2_approx(a));
  if constexpr (variant == Variant::kReciprocal) return bits_of(reciprocal_approx(a));
  if constexpr (variant == Variant::kMaximum) return bits_of(maximum(a, b));
  if constexpr (variant == Variant::kMaximumMagnitude) return bits_of(maximum_magnitude(a, b));
  if constexpr (variant == Variant::kFusedMultiplyAdd) return bits_of(fused_multiply_add(a, b, float_of(z)));
  if constexpr (variant == Variant::kFusedMultiplyAddClipped)
    return bits_of(fused_multiply_add_clipped(a, b, float_of(z)));
  if constexpr (variant == Variant::kPackBfloat16) return pack(bfloat16_t{}, a, b);
  if constexpr (variant == Variant::kToHalf) return to_half_bits(a);
  if constexpr (variant == Variant::kHalfToFloat) return bits_of(half_to_float(static_cast<u16>(x)));
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  for (i32 i = thread_idx(); i < params.count; i += kThreads) {
    params.out[i] = compute<variant>(params.x[i], params.y[i], params.z[i]);
  }
}
