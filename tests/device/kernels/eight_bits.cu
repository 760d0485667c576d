// Bytes of words, and 8-bit floats to and from others.
#include "flashgen/eight_bits.cuh"
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
  kSelectLow,
  kSelectHigh,
  kMultiplyHalf,
  kE4m3ByInstruction,
  kE4m3ByBits,
  kE5m2,
  kToE4m3,
  kToE5m2,
  kPackE4m3,
};

template <bool by_instruction, class E>
FLASHGEN_DEVICE void convert(const Params& params, i32 i) {
  u32 first, second;
  to_halves<by_instruction>(E{}, params.x[i], first, second);
  params.out[2 * i] = first;
  params.out[2 * i + 1] = second;
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  for (i32 i = thread_idx(); i < params.count; i += kThreads) {
    const u32 x = params.x[i];
    if constexpr (variant == Variant::kSelectLow) params.out[i] = select_bytes(x, params.y[i], 0x1404);
    if constexpr (variant == Variant::kSelectHigh) params.out[i] = select_bytes(x, params.y[i], 0x3726);
    if constexpr (variant == Variant::kMultiplyHalf)
      params.out[i] = multiply_halves(x, params.y[i]);
    if constexpr (variant == Variant::kE4m3ByInstruction) halves_of(e4m3_t{}, x, params.out[2 * i], params.out[2 * i + 1]);
    if constexpr (variant == Variant::kE4m3ByBits) convert<false, e4m3_t>(params, i);
    if constexpr (variant == Variant::kE5m2) convert<false, e5m2_t>(params, i);
    if constexpr (variant == Variant::kToE4m3) params.out[i] = quantized<e4m3_t>(float_of(x)).bits;
    if constexpr (variant == Variant::kPackE4m3) {
      // A number in each place of a word, beside others.
      const float a = float_of(x);
      params.out[i] = pack_four(e4m3_t{}, a, -a, 0.5f * a, a * 2.0f);
    }
    if constexpr (variant == Variant::kToE5m2) params.out[i] = quantized<e5m2_t>(float_of(x)).bits;
  }
}
