// Four products of a warpgroup, which add to the same accumulators, as one asm statement: most of the compile
// time goes into accumulators that enter and leave statements. Left operands and, in shared memory, right
// ones are K-major.
#pragma once
#include "flashgen/ptx/wgmma.cuh"

namespace flashgen {

template <i32 n>
struct WgmmaFours {
  static_assert(n == 0,
                "a kernel says which shapes it uses: #define WGMMA_SHAPES(shape) shape(64) shape(128)");
};

// The products after the first one accumulate.
#define WGMMA_ADD "setp.eq.b32 p, 0, 0;\n"
#define WGMMA_SS_FOUR(function, c, n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10)                           \
  template <class T, Major... majors>                                                                        \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], const u64(&a)[4], const u64(&b)[4], i32 add) {     \
    asm volatile(WGMMA_BEGIN(i8) WGMMA_PRODUCT(n, "%" #i0, i1, i9, i10)                                      \
                     WGMMA_ADD WGMMA_PRODUCT(n, "%" #i2, i3, i9, i10) WGMMA_PRODUCT(n, "%" #i4, i5, i9, i10) \
                         WGMMA_PRODUCT(n, "%" #i6, i7, i9, i10) "}"                                          \
                 : WGMMA_REGISTERS_##n(c)                                                                    \
                 : "l"(a[0]), "l"(b[0]), "l"(a[1]), "l"(b[1]), "l"(a[2]), "l"(b[2]), "l"(a[3]), "l"(b[3]),   \
                   "r"(add), WGMMA_FORM);                                                                    \
  }
// The last product is issued first.
#define WGMMA_RS_FOUR(function, c, n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i15, \
                      i16, i17, i18, i19, i20, i21, i22)                                                    \
  template <class T, Major... majors>                                                                       \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], const u32(&a)[4][4], const u64(&b)[4], i32 add) { \
    asm volatile(WGMMA_BEGIN(i20) WGMMA_PRODUCT(n, WGMMA_LEFT(i0, i1, i2, i3), i16, i21, i22)               \
                     WGMMA_ADD WGMMA_PRODUCT(n, WGMMA_LEFT(i4, i5, i6, i7), i17, i21, i22)                  \
                         WGMMA_PRODUCT(n, WGMMA_LEFT(i8, i9, i10, i11), i18, i21, i22)                      \
                             WGMMA_PRODUCT(n, WGMMA_LEFT(i12, i13, i14, i15), i19, i21, i22) "}"            \
                 : WGMMA_REGISTERS_##n(c)                                                                   \
                 : WGMMA_LEFT_REGISTERS(a[3]), WGMMA_LEFT_REGISTERS(a[2]), WGMMA_LEFT_REGISTERS(a[1]),      \
                   WGMMA_LEFT_REGISTERS(a[0]), "l"(b[3]), "l"(b[2]), "l"(b[1]), "l"(b[0]), "r"(add),        \
                   WGMMA_FORM);                                                                             \
  }
#define WGMMA_FOURS_AT(n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, ...)                  \
  template <>                                                                                \
  struct WgmmaFours<n> {                                                                     \
    WGMMA_SS_FOUR(add_ss, "+f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10)              \
    WGMMA_SS_FOUR(set_ss, "=f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10)              \
    WGMMA_RS_FOUR(add_rs, "+f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, __VA_ARGS__) \
    WGMMA_RS_FOUR(set_rs, "=f", n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, __VA_ARGS__) \
  };
#define WGMMA_FOURS(n) WGMMA_EXPANDED(WGMMA_FOURS_AT, n, WGMMA_FROM_##n)
#ifdef WGMMA_SHAPES
WGMMA_SHAPES(WGMMA_FOURS)
#endif

// d = the sum of four products a * b, plus what d held.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_four(float (&d)[n / 2], const MatrixDescriptor (&a)[4],
                                   const MatrixDescriptor (&b)[4]) {
  const u64 left[4] = {a[0].bits(), a[1].bits(), a[2].bits(), a[3].bits()};
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template add_ss<T, a_major, b_major>(d, left, right, 1);
}
// The same without what d held. The compiler knows that the previous value of d is dead.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_first_four(float (&d)[n / 2], const MatrixDescriptor (&a)[4],
                                         const MatrixDescriptor (&b)[4]) {
  const u64 left[4] = {a[0].bits(), a[1].bits(), a[2].bits(), a[3].bits()};
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template set_ss<T, a_major, b_major>(d, left, right, 0);
}
// With the left operands in registers, plus what d held if `accumulate`.
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs_four(float (&d)[n / 2], const u32 (&a)[4][4], const MatrixDescriptor (&b)[4],
                                   bool accumulate) {
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template add_rs<T, b_major>(d, a, right, accumulate);
}
// The same without what d held.
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs_first_four(float (&d)[n / 2], const u32 (&a)[4][4],
                                         const MatrixDescriptor (&b)[4]) {
  const u64 right[4] = {b[0].bits(), b[1].bits(), b[2].bits(), b[3].bits()};
  WgmmaFours<n>::template set_rs<T, b_major>(d, a, right, 0);
}

}  // namespace flashgen
