// Matrix products of a warpgroup. Shared memory holds arbitrary numbers, and what a descriptor makes of them
// is the question: strides, swizzles and steps along K come with the launch.
#define WGMMA_SHAPES(shape) shape(8) shape(16) shape(32) shape(64) shape(96) shape(128) shape(192) shape(256)
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;

constexpr i32 kThreads = 128;
constexpr i32 kSteps = 4;

struct Params {
  i32 variant;
  i32 swizzle;
  i32 a_leading;
  i32 a_stride;
  i32 b_leading;
  i32 b_stride;
  i32 a_words;  // of 4 bytes
  i32 b_words;
  const u32* a;  // what shared memory holds of the left operand, and behind that of the right one
  const u32* b;
  const i32* a_offsets;  // [step], in bytes
  const i32* b_offsets;
  const u32* registers;  // [step][thread][4]: the left operand, where it comes from registers
  float* d;              // [thread][n / 2]
};

enum class Type { kHalf, kBfloat16, kE4m3, kE5m2 };
enum class Left { kShared, kSharedMn, kRegisters };
// What becomes of the accumulators' old contents: kept, dropped at run time, dropped by the function that
// takes none; kept with the next product issued before the last one is waited for; and kept or dropped with
// all four products as one statement.
enum class Start { kKeep, kDrop, kFirst, kKeepPipelined, kKeepFour, kFirstFour };

struct Variant {
  Type type;
  i32 n;
  Left left;
  Major right;
  Start start;
};

template <Type type>
struct ElementOf {
  using type_ = half_t;
};
template <>
struct ElementOf<Type::kBfloat16> {
  using type_ = bfloat16_t;
};
template <>
struct ElementOf<Type::kE4m3> {
  using type_ = e4m3_t;
};
template <>
struct ElementOf<Type::kE5m2> {
  using type_ = e5m2_t;
};

FLASHGEN_DEVICE void fill(u8* shared, const u32* words, i32 count) {
  for (i32 i = thread_idx(); i < count; i += kThreads) reinterpret_cast<u32*>(shared)[i] = words[i];
}

template <Variant variant>
FLASHGEN_DEVICE void multiply(float (&d)[variant.n / 2], const u32 (&registers)[4], MatrixDescriptor a,
                              MatrixDescriptor b, i32 step) {
  using T = typename ElementOf<variant.type>::type_;
  constexpr Major left = variant.left == Left::kSharedMn ? Major::mn : Major::k;
  const bool keep = variant.start != Start::kDrop || step > 0;
  if (variant.start == Start::kFirst && step == 0) {
    if constexpr (variant.left == Left::kRegisters) {
      wgmma_rs_first<T, variant.n, variant.right>(d, registers, b);
    } else {
      wgmma_ss_first<T, variant.n, left, variant.right>(d, a, b);
    }
  } else if constexpr (variant.left == Left::kRegisters) {
    wgmma_rs<T, variant.n, variant.right>(d, registers, b, keep);
  } else {
    wgmma_ss<T, variant.n, left, variant.right>(d, a, b, keep);
  }
}

template <Variant variant>
FLASHGEN_DEVICE void multiply_four(float (&d)[variant.n / 2], const u32 (&registers)[kSteps][4],
                                   const MatrixDescriptor (&a)[kSteps], const MatrixDescriptor (&b)[kSteps]) {
  using T = typename ElementOf<variant.type>::type_;
  constexpr Major left = variant.left == Left::kSharedMn ? Major::mn : Major::k;
  constexpr bool keep = variant.start == Start::kKeepFour;
  if constexpr (variant.left == Left::kRegisters && !keep && sizeof(T) == 1) {
    wgmma_rs_first_four<T, variant.n, variant.right>(d, registers, b);
  } else if constexpr (variant.left == Left::kRegisters) {
    wgmma_rs_four<T, variant.n, variant.right>(d, registers, b, keep);
  } else if constexpr (keep) {
    wgmma_ss_four<T, variant.n, left, variant.right>(d, a, b);
  } else {
    wgmma_ss_first_four<T, variant.n, left, variant.right>(d, a, b);
  }
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  FLASHGEN_SHARED_MEMORY(shared);
  u8* shared_b = shared + 4 * params.a_words;
  fill(shared, params.a, params.a_words);
  fill(shared_b, params.b, params.b_words);
  fence_proxy_async();
  block_sync();

  const auto swizzle = static_cast<Swizzle>(params.swizzle);
  const MatrixDescriptor a =
      matrix_descriptor(shared_address(shared), params.a_leading, params.a_stride, swizzle);
  const MatrixDescriptor b =
      matrix_descriptor(shared_address(shared_b), params.b_leading, params.b_stride, swizzle);
  u32 registers[kSteps][4] = {};
  if constexpr (variant.left == Left::kRegisters) {
    for (i32 step = 0; step < kSteps; ++step) {
      for (i32 i = 0; i < 4; ++i)
        registers[step][i] = params.registers[(step * kThreads + thread_idx()) * 4 + i];
    }
  }

  constexpr i32 count = variant.n / 2;
  float d[count];
  for (i32 i = 0; i < count; ++i) d[i] = 7.0f;
  wgmma_pin(d);
  wgmma_fence();
  if constexpr (variant.start == Start::kKeepFour || variant.start == Start::kFirstFour) {
    MatrixDescriptor four_a[kSteps], four_b[kSteps];
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      four_a[step] = a.advanced(params.a_offsets[step]);
      four_b[step] = b.advanced(params.b_offsets[step]);
    }
    multiply_four<variant>(d, registers, four_a, four_b);
    wgmma_commit();
  } else {
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      multiply<variant>(d, registers[step], a.advanced(params.a_offsets[step]),
                        b.advanced(params.b_offsets[step]), step);
      wgmma_commit();
      if constexpr (variant.start == Start::kKeepPipelined) {
        wgmma_wait<1>();
        wgmma_fence();
      }
    }
  }
  wgmma_wait<0>();
  wgmma_pin(d);
  for (i32 i = 0; i < count; ++i) params.d[thread_idx() * count + i] = d[i];
}
