// The functions of ptx/wgmma.cuh on a CPU; included by primitives.h.
#pragma once
#include "flashgen/emu/abi.h"
#include "flashgen/ptx/descriptor.cuh"

namespace flashgen {

FLASHGEN_DEVICE void wgmma_fence(FLASHGEN_EMU_SITE) { flashgen_emu_wgmma_fence(site); }
FLASHGEN_DEVICE void wgmma_commit(FLASHGEN_EMU_SITE) { flashgen_emu_wgmma_commit(site); }
template <int pending>
FLASHGEN_DEVICE void wgmma_wait(FLASHGEN_EMU_SITE) {
  flashgen_emu_wgmma_wait(pending, site);
}
template <i32 count>
FLASHGEN_DEVICE void wgmma_pin(float (&d)[count]) {
  asm volatile("" ::"r"(d) : "memory");
}
template <i32 count>
FLASHGEN_DEVICE void wgmma_compute_before_wait(const u32 (&)[count][4], float, u32) {}
FLASHGEN_DEVICE MatrixDescriptor matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes,
                                                   Swizzle swizzle, FLASHGEN_EMU_SITE) {
  flashgen_emu_check_descriptor(address, leading_bytes, stride_bytes, site);
  return encode_descriptor(address, leading_bytes, stride_bytes, swizzle);
}

namespace emu {

template <class T>
constexpr FlashgenEmuElement kElement = kFlashgenEmuHalf;
template <>
constexpr FlashgenEmuElement kElement<bfloat16_t> = kFlashgenEmuBfloat16;
template <>
constexpr FlashgenEmuElement kElement<e4m3_t> = kFlashgenEmuE4m3;
template <>
constexpr FlashgenEmuElement kElement<e5m2_t> = kFlashgenEmuE5m2;

// Refuses what the instruction set has no form for.
template <class T, i32 n, Major... majors>
constexpr void require_form() {
  static_assert(n % 8 == 0 && n >= 8 && n <= 256, "wgmma has 8 to 256 columns, in steps of 8");
  static_assert(sizeof(T) == 2 || ((majors == Major::k) && ...), "8-bit operands of wgmma must be K-major");
}

}  // namespace emu

template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b, bool accumulate,
                              FLASHGEN_EMU_SITE) {
  emu::require_form<T, n, a_major, b_major>();
  const FlashgenEmuWgmma form = {
      emu::kElement<T>, n,       a_major == Major::mn, b_major == Major::mn, accumulate, nullptr,
      a.bits(),         b.bits()};
  flashgen_emu_wgmma(d, &form, site);
}
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_first(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b,
                                    FLASHGEN_EMU_SITE) {
  wgmma_ss<T, n, a_major, b_major>(d, a, b, false, site);
}
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs(float (&d)[n / 2], const u32 (&a)[4], MatrixDescriptor b, bool accumulate,
                              FLASHGEN_EMU_SITE) {
  emu::require_form<T, n, b_major>();
  const FlashgenEmuWgmma form = {emu::kElement<T>, n, false, b_major == Major::mn,
                                 accumulate,       a, 0,     b.bits()};
  flashgen_emu_wgmma(d, &form, site);
}
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs_first(float (&d)[n / 2], const u32 (&a)[4], MatrixDescriptor b,
                                    FLASHGEN_EMU_SITE) {
  wgmma_rs<T, n, b_major>(d, a, b, false, site);
}

template <i32 registers>
FLASHGEN_DEVICE void setmaxnreg_inc(FLASHGEN_EMU_SITE) {
  flashgen_emu_setmaxnreg(registers, true, site);
}
template <i32 registers>
FLASHGEN_DEVICE void setmaxnreg_dec(FLASHGEN_EMU_SITE) {
  flashgen_emu_setmaxnreg(registers, false, site);
}

template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_four(float (&d)[n / 2], const MatrixDescriptor (&a)[4],
                                   const MatrixDescriptor (&b)[4], FLASHGEN_EMU_SITE) {
  for (i32 i = 0; i < 4; ++i) wgmma_ss<T, n, a_major, b_major>(d, a[i], b[i], true, site);
}

template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_first_four(float (&d)[n / 2], const MatrixDescriptor (&a)[4],
                                         const MatrixDescriptor (&b)[4], FLASHGEN_EMU_SITE) {
  for (i32 i = 0; i < 4; ++i) wgmma_ss<T, n, a_major, b_major>(d, a[i], b[i], i > 0, site);
}

template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs_four(float (&d)[n / 2], const u32 (&a)[4][4], const MatrixDescriptor (&b)[4],
                                   bool accumulate, FLASHGEN_EMU_SITE) {
  for (i32 i = 3; i >= 0; --i) wgmma_rs<T, n, b_major>(d, a[i], b[i], i < 3 || accumulate, site);
}

template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs_first_four(float (&d)[n / 2], const u32 (&a)[4][4],
                                         const MatrixDescriptor (&b)[4], FLASHGEN_EMU_SITE) {
  wgmma_rs_four<T, n, b_major>(d, a, b, false, site);
}

}  // namespace flashgen
