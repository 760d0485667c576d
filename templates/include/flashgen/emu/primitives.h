// The functions of flashgen/ptx on a CPU. They have the same names and meaning, and call the emulator's
// runtime. A hidden last argument is the place of the call, so that every finding names its line.
#pragma once
#include "flashgen/emu/abi.h"
#include "flashgen/ptx/types.cuh"

#define FLASHGEN_DEVICE inline __attribute__((always_inline))
#define FLASHGEN_KERNEL(threads, min_blocks) extern "C" void
#define FLASHGEN_GRID_CONSTANT const
#define FLASHGEN_SHARED_MEMORY(name) flashgen::u8* const name = flashgen_emu_thread->shared_memory

#define FLASHGEN_EMU_SITE FlashgenEmuSite site = {__builtin_FILE(), __builtin_LINE()}

#include "flashgen/emu/barrier.h"
#include "flashgen/emu/bulk.h"

namespace flashgen {

// ---- device.cuh

FLASHGEN_DEVICE i32 thread_idx() { return flashgen_emu_thread->thread_idx; }
FLASHGEN_DEVICE i32 block_idx_x() { return flashgen_emu_thread->block_idx_x; }
FLASHGEN_DEVICE i32 block_idx_y() { return flashgen_emu_thread->block_idx_y; }
FLASHGEN_DEVICE i32 block_idx_z() { return flashgen_emu_thread->block_idx_z; }
FLASHGEN_DEVICE i32 grid_dim_x() { return flashgen_emu_thread->grid_dim_x; }
FLASHGEN_DEVICE void block_sync(FLASHGEN_EMU_SITE) { flashgen_emu_block_sync(site); }
FLASHGEN_DEVICE bool block_any(bool condition, FLASHGEN_EMU_SITE) {
  return flashgen_emu_block_any(condition, site) != 0;
}
FLASHGEN_DEVICE void warp_sync(FLASHGEN_EMU_SITE) { flashgen_emu_warp_sync(site); }
FLASHGEN_DEVICE bool warp_any(bool condition, FLASHGEN_EMU_SITE) {
  return flashgen_emu_warp_any(condition, site) != 0;
}
FLASHGEN_DEVICE u32 warp_ballot(bool condition, FLASHGEN_EMU_SITE) {
  return flashgen_emu_warp_ballot(condition, site);
}
FLASHGEN_DEVICE i32 lowest_bit(u32 bits) { return __builtin_ffs(static_cast<int>(bits)) - 1; }
FLASHGEN_DEVICE u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
FLASHGEN_DEVICE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
FLASHGEN_DEVICE i32 opaque(i32 value) { return value; }
FLASHGEN_DEVICE i32 shuffle(i32 value, i32 source_lane, FLASHGEN_EMU_SITE) {
  return static_cast<i32>(flashgen_emu_shuffle(static_cast<u32>(value), source_lane & 31, site));
}
FLASHGEN_DEVICE float shuffle(float value, i32 source_lane, FLASHGEN_EMU_SITE) {
  return float_of(flashgen_emu_shuffle(bits_of(value), source_lane & 31, site));
}
FLASHGEN_DEVICE float shuffle_xor(float value, i32 lane_mask, FLASHGEN_EMU_SITE) {
  return float_of(flashgen_emu_shuffle(bits_of(value), (thread_idx() & 31) ^ lane_mask, site));
}
FLASHGEN_DEVICE u32 shared_address(const void* pointer, FLASHGEN_EMU_SITE) {
  return flashgen_emu_shared_address(pointer, site);
}

// ---- copy.cuh

FLASHGEN_DEVICE void cp_async_16(u32 destination, const void* source, u32 valid_bytes, FLASHGEN_EMU_SITE) {
  flashgen_emu_cp_async(destination, source, 16, valid_bytes, site);
}
FLASHGEN_DEVICE void cp_async_8(u32 destination, const void* source, u32 valid_bytes, FLASHGEN_EMU_SITE) {
  flashgen_emu_cp_async(destination, source, 8, valid_bytes, site);
}
FLASHGEN_DEVICE void cp_async_4(u32 destination, const void* source, u32 valid_bytes, FLASHGEN_EMU_SITE) {
  flashgen_emu_cp_async(destination, source, 4, valid_bytes, site);
}
FLASHGEN_DEVICE void cp_async_commit(FLASHGEN_EMU_SITE) { flashgen_emu_cp_async_commit(site); }
template <int pending>
FLASHGEN_DEVICE void cp_async_wait(FLASHGEN_EMU_SITE) {
  flashgen_emu_cp_async_wait(pending, site);
}
FLASHGEN_DEVICE void reduce_add(float* address, float value, FLASHGEN_EMU_SITE) {
  flashgen_emu_reduce_add(address, &value, 1, site);
}
FLASHGEN_DEVICE void reduce_add(u64* address, u64 value, FLASHGEN_EMU_SITE) {
  flashgen_emu_reduce_add_u64(address, value, site);
}
FLASHGEN_DEVICE void reduce_add_x4(float* address, const float (&value)[4], FLASHGEN_EMU_SITE) {
  flashgen_emu_reduce_add(address, value, 4, site);
}

// ---- matrix.cuh

FLASHGEN_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address, FLASHGEN_EMU_SITE) {
  flashgen_emu_ldmatrix(r, address, 4, false, site);
}
FLASHGEN_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address, FLASHGEN_EMU_SITE) {
  flashgen_emu_ldmatrix(r, address, 4, true, site);
}
FLASHGEN_DEVICE void ldmatrix_x2(u32 (&r)[2], u32 address, FLASHGEN_EMU_SITE) {
  flashgen_emu_ldmatrix(r, address, 2, false, site);
}
FLASHGEN_DEVICE void ldmatrix_x2_trans(u32 (&r)[2], u32 address, FLASHGEN_EMU_SITE) {
  flashgen_emu_ldmatrix(r, address, 2, true, site);
}
FLASHGEN_DEVICE void ldmatrix_x1(u32 (&r)[1], u32 address, FLASHGEN_EMU_SITE) {
  flashgen_emu_ldmatrix(r, address, 1, false, site);
}
FLASHGEN_DEVICE void ldmatrix_x1_trans(u32 (&r)[1], u32 address, FLASHGEN_EMU_SITE) {
  flashgen_emu_ldmatrix(r, address, 1, true, site);
}
FLASHGEN_DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4], FLASHGEN_EMU_SITE) {
  flashgen_emu_stmatrix(address, r, 4, false, site);
}
FLASHGEN_DEVICE void stmatrix_x4_trans(u32 address, const u32 (&r)[4], FLASHGEN_EMU_SITE) {
  flashgen_emu_stmatrix(address, r, 4, true, site);
}
FLASHGEN_DEVICE void stmatrix_x2(u32 address, const u32 (&r)[2], FLASHGEN_EMU_SITE) {
  flashgen_emu_stmatrix(address, r, 2, false, site);
}
FLASHGEN_DEVICE void stmatrix_x2_trans(u32 address, const u32 (&r)[2], FLASHGEN_EMU_SITE) {
  flashgen_emu_stmatrix(address, r, 2, true, site);
}
FLASHGEN_DEVICE void stmatrix_x1(u32 address, const u32 (&r)[1], FLASHGEN_EMU_SITE) {
  flashgen_emu_stmatrix(address, r, 1, false, site);
}
FLASHGEN_DEVICE void stmatrix_x1_trans(u32 address, const u32 (&r)[1], FLASHGEN_EMU_SITE) {
  flashgen_emu_stmatrix(address, r, 1, true, site);
}
FLASHGEN_DEVICE void mma_m16n8k16_batched(bfloat16_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                          FLASHGEN_EMU_SITE) {
  flashgen_emu_mma(d, a, b, kFlashgenEmuM16N8K16Bfloat16, site);
}
FLASHGEN_DEVICE void mma_m16n8k16_batched(half_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                          FLASHGEN_EMU_SITE) {
  flashgen_emu_mma(d, a, b, kFlashgenEmuM16N8K16Half, site);
}
FLASHGEN_DEVICE void mma_m16n8k8_batched(half_t, float (&d)[4], u32 a0, u32 a1, u32 b, FLASHGEN_EMU_SITE) {
  const u32 a[2] = {a0, a1};
  flashgen_emu_mma(d, a, &b, kFlashgenEmuM16N8K8Half, site);
}
FLASHGEN_DEVICE void mma_finish(FLASHGEN_EMU_SITE) { flashgen_emu_mma_finish(site); }
FLASHGEN_DEVICE void mma_m16n8k16(bfloat16_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                  FLASHGEN_EMU_SITE) {
  mma_m16n8k16_batched(bfloat16_t{}, d, a, b, site);
  mma_finish(site);
}
FLASHGEN_DEVICE void mma_m16n8k16(half_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                  FLASHGEN_EMU_SITE) {
  mma_m16n8k16_batched(half_t{}, d, a, b, site);
  mma_finish(site);
}
FLASHGEN_DEVICE void mma_m16n8k128_bits(i32 (&d)[4], const u32 (&a)[2], u32 b, FLASHGEN_EMU_SITE) {
  flashgen_emu_count(d, a, b, site);
}
FLASHGEN_DEVICE void mma_m16n8k8(half_t, float (&d)[4], u32 a0, u32 a1, u32 b, FLASHGEN_EMU_SITE) {
  mma_m16n8k8_batched(half_t{}, d, a0, a1, b, site);
  mma_finish(site);
}
FLASHGEN_DEVICE void mma_m16n8k32_batched(e4m3_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                          FLASHGEN_EMU_SITE) {
  flashgen_emu_mma(d, a, b, kFlashgenEmuM16N8K32E4m3, site);
}
FLASHGEN_DEVICE void mma_m16n8k32(e4m3_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                  FLASHGEN_EMU_SITE) {
  mma_m16n8k32_batched(e4m3_t{}, d, a, b, site);
  mma_finish(site);
}
FLASHGEN_DEVICE void mma_m16n8k32(e5m2_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                  FLASHGEN_EMU_SITE) {
  flashgen_emu_mma(d, a, b, kFlashgenEmuM16N8K32E5m2, site);
  mma_finish(site);
}

// ---- math.cuh

FLASHGEN_DEVICE float exp2_approx(float x) {
  const float y = __builtin_exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}
FLASHGEN_DEVICE float log2_approx(float x) { return __builtin_log2f(x); }
FLASHGEN_DEVICE float reciprocal_approx(float x) {
  const float y = 1.0f / (__builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x);
  return __builtin_fabsf(y) < 0x1p-126f ? __builtin_copysignf(0.0f, y) : y;
}
FLASHGEN_DEVICE float maximum(float a, float b) {
  if (a != a) return b;
  if (a == b) return float_of(bits_of(a) & bits_of(b));  // +0 is larger than -0
  return b > a ? b : a;                                  // a NaN in b compares false
}
FLASHGEN_DEVICE float maximum_magnitude(float a, float b) {
  if (a != a || b != b) return float_of(0x7fffffffu);
  return maximum(a, __builtin_fabsf(b));
}
FLASHGEN_DEVICE float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FLASHGEN_DEVICE float fused_multiply_add_clipped(float a, float b, float c) {
  const float d = __builtin_fmaf(a, b, c);
  return d > 0.0f ? d < 1.0f ? d : 1.0f : 0.0f;
}

FLASHGEN_DEVICE u16 to_bfloat16_bits(float value) {
  const u32 bits = bits_of(value);
  if (value != value) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
FLASHGEN_DEVICE u32 pack(bfloat16_t, float low, float high) {
  return to_bfloat16_bits(low) | static_cast<u32>(to_bfloat16_bits(high)) << 16;
}

FLASHGEN_DEVICE u32 multiply_packed(bfloat16_t, u32 a, u32 b) {
  const float low = float_of(a << 16) * float_of(b << 16);
  const float high = float_of(a & 0xffff0000u) * float_of(b & 0xffff0000u);
  return pack(bfloat16_t{}, low, high);
}
// `to_infinity` has, for each number, 1 in the exponent's lowest bit. Adding it to the magnitude of a number
// that is not finite carries into the sign bit.
FLASHGEN_DEVICE u32 not_finite_packed(u32 pair, u32 to_infinity) {
  return (((pair & 0x7fff7fffu) + to_infinity) >> 15 & 0x10001u) * 0x7fffu;
}
FLASHGEN_DEVICE u32 not_finite_packed(bfloat16_t, u32 pair) { return not_finite_packed(pair, 0x00800080u); }
FLASHGEN_DEVICE u32 not_finite_packed(half_t, u32 pair) { return not_finite_packed(pair, 0x04000400u); }
FLASHGEN_DEVICE u32 minimum_packed(u32 a, u32 b) {
  // Shifted up, the low halves compare as signed integers.
  const u32 low = static_cast<i32>(a << 16) < static_cast<i32>(b << 16) ? a : b;
  const u32 high = static_cast<i32>(a & 0xffff0000u) < static_cast<i32>(b & 0xffff0000u) ? a : b;
  return (low & 0xffffu) | (high & 0xffff0000u);
}

// GCC defines the macro wherever C has the type. In C++ only version 13 has the type on processors other than
// x86.
#if defined(__FLT16_MAX__) && (defined(__clang__) || defined(__x86_64__) || __GNUC__ >= 13)
#define FLASHGEN_EMU_HAS_FLOAT16
#endif

// Round to nearest even. Adding 2^(13 + exponent) or, below the normal range, 2^-1 leaves the rounded
// mantissa in the low bits, because the sum is rounded at the wanted place.
FLASHGEN_DEVICE u16 to_half_bits(float value) {
#if defined(FLASHGEN_EMU_HAS_FLOAT16)
  if (value != value) return 0x7fff;
  return __builtin_bit_cast(u16, static_cast<_Float16>(value));
#else
  const u32 bits = bits_of(value);
  const u32 sign = bits >> 16 & 0x8000u;
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u)                                            // below 2^-14: subnormal or zero
    return static_cast<u16>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
  return static_cast<u16>(sign | (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13);
#endif
}
FLASHGEN_DEVICE u32 pack(half_t, float low, float high) {
  return to_half_bits(low) | static_cast<u32>(to_half_bits(high)) << 16;
}

FLASHGEN_DEVICE float half_to_float(u16 bits) {
#if defined(FLASHGEN_EMU_HAS_FLOAT16)
  return static_cast<float>(__builtin_bit_cast(_Float16, bits));
#else
  const u32 magnitude = bits & 0x7fffu;
  const u32 sign = static_cast<u32>(bits & 0x8000u) << 16;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
#endif
}

}  // namespace flashgen

#include "flashgen/emu/cluster.h"
#include "flashgen/emu/eight_bits.h"
#include "flashgen/emu/grid.h"
#include "flashgen/emu/wgmma.h"

#undef FLASHGEN_EMU_SITE

// The entry point that the runtime calls for each CUDA thread. The build appends it to a kernel's text.
#define FLASHGEN_EMU_ENTRY(kernel)                                                                \
  namespace flashgen::emu {                                                                       \
  template <class Params>                                                                         \
  constexpr unsigned params_bytes(void (*)(Params)) {                                             \
    return sizeof(Params);                                                                        \
  }                                                                                               \
  template <class Params>                                                                         \
  void call(void (*function)(Params), const void* params) {                                       \
    function(*static_cast<const Params*>(params));                                                \
  }                                                                                               \
  }                                                                                               \
  extern "C" __attribute__((visibility("default"))) void flashgen_emu_entry(const void* params) { \
    flashgen::emu::call(&kernel, params);                                                         \
  }                                                                                               \
  extern "C" __attribute__((visibility("default"))) const unsigned flashgen_emu_params_bytes =    \
      flashgen::emu::params_bytes(&kernel);
