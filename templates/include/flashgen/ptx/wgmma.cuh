// Matrix products of a warpgroup (sm_90a): four consecutive warps, the first a multiple of 4.
//
// Products are asynchronous. Do not touch operands and accumulators until a wait completes the group in which
// they were committed. The left operand has 64 rows, the right one `n` columns, and one product sums over 32
// bytes of K. Thread t of the warpgroup holds in d[4j + 2h + c] row 16 (t / 32) + t % 32 / 4 + 8h, column
// 8j + 2 (t % 4) + c.
#pragma once
#include "flashgen/ptx/descriptor.cuh"
#include "flashgen/ptx/device.cuh"

namespace flashgen {

// Sets the number of registers per thread, a multiple of 8 from 24 to 256. All warps of a warpgroup call it.
// An increase waits until other warpgroups have released enough.
template <i32 registers>
FLASHGEN_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <i32 registers>
FLASHGEN_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Orders accesses of registers before later products that use them: before the first one, and again after
// accumulators or fragments of the left operand were modified.
FLASHGEN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FLASHGEN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` groups are in flight.
template <int pending>
FLASHGEN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// No instruction. The compiler does not know that a fence or a wait concerns the accumulators; this keeps it
// from moving accesses of them across.
template <i32 count>
FLASHGEN_DEVICE void wgmma_pin(float (&d)[count]) {
#pragma unroll
  for (i32 i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Makes the assembler compute `values` before the next wait. It moves waits up across arithmetic, which then
// no longer overlaps the products, but not into or across branches. So this branches if `not_negative` is
// negative, which never happens, and then stores the values to `scratch` in shared memory.
template <i32 count>
FLASHGEN_DEVICE void wgmma_compute_before_wait(const u32 (&values)[count][4], float not_negative,
                                               u32 scratch) {
  if (not_negative >= 0.0f) return;
#pragma unroll
  for (i32 i = 0; i < count; ++i)
    asm volatile("st.shared.v4.b32 [%4], {%0, %1, %2, %3};" ::"r"(values[i][0]), "r"(values[i][1]),
                 "r"(values[i][2]), "r"(values[i][3]), "r"(scratch + 16 * i)
                 : "memory");
}

FLASHGEN_DEVICE MatrixDescriptor matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes,
                                                   Swizzle swizzle) {
  return encode_descriptor(address, leading_bytes, stride_bytes, swizzle);
}

// The part of the instruction's name that begins with the depth.
template <class T>
struct WgmmaType;
template <>
struct WgmmaType<half_t> {
  static constexpr char name[] = "k16.f32.f16.f16";
};
template <>
struct WgmmaType<bfloat16_t> {
  static constexpr char name[] = "k16.f32.bf16.bf16";
};
template <>
struct WgmmaType<e4m3_t> {
  static constexpr char name[] = "k32.f32.e4m3.e4m3";
};
template <>
struct WgmmaType<e5m2_t> {
  static constexpr char name[] = "k32.f32.e5m2.e5m2";
};

// The immediates after the operands: signs and, for 16-bit types, the majors.
template <bool has_majors, Major... majors>
struct WgmmaTail {
  static constexpr char text[] = ", 1, 1";
  static_assert(((majors == Major::k) && ...), "8-bit operands of wgmma must be K-major");
};
template <Major b>
struct WgmmaTail<true, b> {
  static constexpr char text[] = {',', '1', ',', '1', ',', '0' + static_cast<char>(b), 0};
};
template <Major a, Major b>
struct WgmmaTail<true, a, b> {
  static constexpr char text[] = {
      ',', '1', ',', '1', ',', '0' + static_cast<char>(a), ',', '0' + static_cast<char>(b), 0};
};

// An instruction names each of its n / 2 accumulators, so there is one function for each n. The operands
// after the accumulators have the numbers from n / 2 on.
template <i32 n>
struct Wgmma {
  static_assert(n % 8 == 0 && n >= 8 && n <= 256, "wgmma has 8 to 256 columns, in steps of 8");
};

// The names of a product's n / 2 accumulators, ten at a time: %30, %31, ...
#define WGMMA_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define WGMMA_NAMES_8 "%0, %1, %2, %3"
#define WGMMA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_24 WGMMA_TEN() "%10, %11"
#define WGMMA_NAMES_32 WGMMA_TEN() "%10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_40 WGMMA_TEN() "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19"
#define WGMMA_NAMES_48 WGMMA_TEN() WGMMA_TEN(1) "%20, %21, %22, %23"
#define WGMMA_NAMES_56 WGMMA_TEN() WGMMA_TEN(1) "%20, %21, %22, %23, %24, %25, %26, %27"
#define WGMMA_NAMES_64 WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31"
#define WGMMA_NAMES_72 WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31, %32, %33, %34, %35"
#define WGMMA_NAMES_80 \
  WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_88 \
  WGMMA_NAMES_80       \
  ", "                 \
  "%40, %41, %42, %43"
#define WGMMA_NAMES_96 \
  WGMMA_NAMES_80       \
  ", "                 \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_104 WGMMA_NAMES_80 ", " WGMMA_TEN(4) "%50, %51"
#define WGMMA_NAMES_112 WGMMA_NAMES_80 ", " WGMMA_TEN(4) "%50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_120 WGMMA_NAMES_80 ", " WGMMA_TEN(4) "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59"
#define WGMMA_NAMES_128 WGMMA_NAMES_80 ", " WGMMA_TEN(4) WGMMA_TEN(5) "%60, %61, %62, %63"
#define WGMMA_NAMES_136 WGMMA_NAMES_80 ", " WGMMA_TEN(4) WGMMA_TEN(5) "%60, %61, %62, %63, %64, %65, %66, %67"
#define WGMMA_NAMES_144 WGMMA_NAMES_80 ", " WGMMA_TEN(4) WGMMA_TEN(5) WGMMA_TEN(6) "%70, %71"
#define WGMMA_NAMES_152 \
  WGMMA_NAMES_80 ", " WGMMA_TEN(4) WGMMA_TEN(5) WGMMA_TEN(6) "%70, %71, %72, %73, %74, %75"
#define WGMMA_NAMES_160                         \
  WGMMA_NAMES_80 ", " WGMMA_TEN(4) WGMMA_TEN(5) \
      WGMMA_TEN(6) "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_168 \
  WGMMA_NAMES_160       \
  ", "                  \
  "%80, %81, %82, %83"
#define WGMMA_NAMES_176 \
  WGMMA_NAMES_160       \
  ", "                  \
  "%80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_184 WGMMA_NAMES_160 ", " WGMMA_TEN(8) "%90, %91"
#define WGMMA_NAMES_192 WGMMA_NAMES_160 ", " WGMMA_TEN(8) "%90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_200 WGMMA_NAMES_160 ", " WGMMA_TEN(8) "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99"
#define WGMMA_NAMES_208 WGMMA_NAMES_160 ", " WGMMA_TEN(8) WGMMA_TEN(9) "%100, %101, %102, %103"
#define WGMMA_NAMES_216 \
  WGMMA_NAMES_160 ", " WGMMA_TEN(8) WGMMA_TEN(9) "%100, %101, %102, %103, %104, %105, %106, %107"
#define WGMMA_NAMES_224 WGMMA_NAMES_160 ", " WGMMA_TEN(8) WGMMA_TEN(9) WGMMA_TEN(10) "%110, %111"
#define WGMMA_NAMES_232 \
  WGMMA_NAMES_160 ", " WGMMA_TEN(8) WGMMA_TEN(9) WGMMA_TEN(10) "%110, %111, %112, %113, %114, %115"
#define WGMMA_NAMES_240                          \
  WGMMA_NAMES_160 ", " WGMMA_TEN(8) WGMMA_TEN(9) \
      WGMMA_TEN(10) "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_NAMES_248 \
  WGMMA_NAMES_240       \
  ", "                  \
  "%120, %121, %122, %123"
#define WGMMA_NAMES_256 \
  WGMMA_NAMES_240       \
  ", "                  \
  "%120, %121, %122, %123, %124, %125, %126, %127"

// The accumulators as operands with the constraint c.
#define WGMMA_FLOATS_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define WGMMA_FLOATS_16(c, i) \
  WGMMA_FLOATS_4(c, i), WGMMA_FLOATS_4(c, i + 4), WGMMA_FLOATS_4(c, i + 8), WGMMA_FLOATS_4(c, i + 12)
#define WGMMA_FLOATS_64(c, i) \
  WGMMA_FLOATS_16(c, i), WGMMA_FLOATS_16(c, i + 16), WGMMA_FLOATS_16(c, i + 32), WGMMA_FLOATS_16(c, i + 48)
#define WGMMA_REGISTERS_8(c) WGMMA_FLOATS_4(c, 0)
#define WGMMA_REGISTERS_16(c) WGMMA_FLOATS_4(c, 0), WGMMA_FLOATS_4(c, 4)
#define WGMMA_REGISTERS_24(c) WGMMA_FLOATS_4(c, 0), WGMMA_FLOATS_4(c, 4), WGMMA_FLOATS_4(c, 8)
#define WGMMA_REGISTERS_32(c) WGMMA_FLOATS_16(c, 0)
#define WGMMA_REGISTERS_40(c) WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_4(c, 16)
#define WGMMA_REGISTERS_48(c) WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_4(c, 16), WGMMA_FLOATS_4(c, 20)
#define WGMMA_REGISTERS_56(c) \
  WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_4(c, 16), WGMMA_FLOATS_4(c, 20), WGMMA_FLOATS_4(c, 24)
#define WGMMA_REGISTERS_64(c) WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_16(c, 16)
#define WGMMA_REGISTERS_72(c) WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_16(c, 16), WGMMA_FLOATS_4(c, 32)
#define WGMMA_REGISTERS_80(c) \
  WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_16(c, 16), WGMMA_FLOATS_4(c, 32), WGMMA_FLOATS_4(c, 36)
#define WGMMA_REGISTERS_88(c)                                                                  \
  WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_16(c, 16), WGMMA_FLOATS_4(c, 32), WGMMA_FLOATS_4(c, 36), \
      WGMMA_FLOATS_4(c, 40)
#define WGMMA_REGISTERS_96(c) WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_16(c, 16), WGMMA_FLOATS_16(c, 32)
#define WGMMA_REGISTERS_104(c) \
  WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_16(c, 16), WGMMA_FLOATS_16(c, 32), WGMMA_FLOATS_4(c, 48)
#define WGMMA_REGISTERS_112(c)                                                                  \
  WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_16(c, 16), WGMMA_FLOATS_16(c, 32), WGMMA_FLOATS_4(c, 48), \
      WGMMA_FLOATS_4(c, 52)
#define WGMMA_REGISTERS_120(c)                                                                  \
  WGMMA_FLOATS_16(c, 0), WGMMA_FLOATS_16(c, 16), WGMMA_FLOATS_16(c, 32), WGMMA_FLOATS_4(c, 48), \
      WGMMA_FLOATS_4(c, 52), WGMMA_FLOATS_4(c, 56)
#define WGMMA_REGISTERS_128(c) WGMMA_FLOATS_64(c, 0)
#define WGMMA_REGISTERS_136(c) WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_4(c, 64)
#define WGMMA_REGISTERS_144(c) WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_4(c, 64), WGMMA_FLOATS_4(c, 68)
#define WGMMA_REGISTERS_152(c) \
  WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_4(c, 64), WGMMA_FLOATS_4(c, 68), WGMMA_FLOATS_4(c, 72)
#define WGMMA_REGISTERS_160(c) WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64)
#define WGMMA_REGISTERS_168(c) WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_4(c, 80)
#define WGMMA_REGISTERS_176(c) \
  WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_4(c, 80), WGMMA_FLOATS_4(c, 84)
#define WGMMA_REGISTERS_184(c)                                                                 \
  WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_4(c, 80), WGMMA_FLOATS_4(c, 84), \
      WGMMA_FLOATS_4(c, 88)
#define WGMMA_REGISTERS_192(c) WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_16(c, 80)
#define WGMMA_REGISTERS_200(c) \
  WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_16(c, 80), WGMMA_FLOATS_4(c, 96)
#define WGMMA_REGISTERS_208(c)                                                                  \
  WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_16(c, 80), WGMMA_FLOATS_4(c, 96), \
      WGMMA_FLOATS_4(c, 100)
#define WGMMA_REGISTERS_216(c)                                                                  \
  WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_16(c, 80), WGMMA_FLOATS_4(c, 96), \
      WGMMA_FLOATS_4(c, 100), WGMMA_FLOATS_4(c, 104)
#define WGMMA_REGISTERS_224(c) \
  WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_16(c, 80), WGMMA_FLOATS_16(c, 96)
#define WGMMA_REGISTERS_232(c)                                                                   \
  WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_16(c, 80), WGMMA_FLOATS_16(c, 96), \
      WGMMA_FLOATS_4(c, 112)
#define WGMMA_REGISTERS_240(c)                                                                   \
  WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_16(c, 80), WGMMA_FLOATS_16(c, 96), \
      WGMMA_FLOATS_4(c, 112), WGMMA_FLOATS_4(c, 116)
#define WGMMA_REGISTERS_248(c)                                                                   \
  WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_16(c, 64), WGMMA_FLOATS_16(c, 80), WGMMA_FLOATS_16(c, 96), \
      WGMMA_FLOATS_4(c, 112), WGMMA_FLOATS_4(c, 116), WGMMA_FLOATS_4(c, 120)
#define WGMMA_REGISTERS_256(c) WGMMA_FLOATS_64(c, 0), WGMMA_FLOATS_64(c, 64)

// The numbers of the operands after the accumulators.
#define WGMMA_FROM_8 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26
#define WGMMA_FROM_16 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30
#define WGMMA_FROM_24 \
  12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34
#define WGMMA_FROM_32 \
  16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38
#define WGMMA_FROM_40 \
  20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42
#define WGMMA_FROM_48 \
  24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46
#define WGMMA_FROM_56 \
  28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50
#define WGMMA_FROM_64 \
  32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54
#define WGMMA_FROM_72 \
  36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58
#define WGMMA_FROM_80 \
  40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62
#define WGMMA_FROM_88 \
  44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66
#define WGMMA_FROM_96 \
  48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70
#define WGMMA_FROM_104 \
  52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74
#define WGMMA_FROM_112 \
  56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78
#define WGMMA_FROM_120 \
  60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82
#define WGMMA_FROM_128 \
  64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86
#define WGMMA_FROM_136 \
  68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90
#define WGMMA_FROM_144 \
  72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94
#define WGMMA_FROM_152 \
  76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98
#define WGMMA_FROM_160 \
  80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102
#define WGMMA_FROM_168 \
  84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106
#define WGMMA_FROM_176 \
  88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110
#define WGMMA_FROM_184 \
  92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114
#define WGMMA_FROM_192                                                                                      \
  96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 117, \
      118
#define WGMMA_FROM_200                                                                                     \
  100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 117, 118, 119, 120, \
      121, 122
#define WGMMA_FROM_208                                                                                     \
  104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124, \
      125, 126
#define WGMMA_FROM_216                                                                                     \
  108, 109, 110, 111, 112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, \
      129, 130
#define WGMMA_FROM_224                                                                                     \
  112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 131, 132, \
      133, 134
#define WGMMA_FROM_232                                                                                     \
  116, 117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 136, \
      137, 138
#define WGMMA_FROM_240                                                                                     \
  120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, \
      141, 142
#define WGMMA_FROM_248                                                                                     \
  124, 125, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143, 144, \
      145, 146
#define WGMMA_FROM_256                                                                                     \
  128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143, 144, 145, 146, 147, 148, \
      149, 150

// One product, and what goes before the first of some: p says whether it adds to the accumulators.
#define WGMMA_BEGIN(accumulate) "{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate ", 0;\n"
#define WGMMA_PRODUCT(n, a, b, type, tail) \
  "wgmma.mma_async.sync.aligned.m64n" #n "%" #type " {" WGMMA_NAMES_##n "}, " a ", %" #b ", p%" #tail ";\n"
#define WGMMA_LEFT(i0, i1, i2, i3) "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}"
#define WGMMA_LEFT_REGISTERS(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define WGMMA_FORM "C"(WgmmaType<T>::name), "C"(WgmmaTail<sizeof(T) == 2, majors...>::text)

#define WGMMA_SS(function, c, n, i0, i1, i2, i3, i4)                                                         \
  template <class T, Major... majors>                                                                        \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b, i32 add) { \
    asm volatile(WGMMA_BEGIN(i2) WGMMA_PRODUCT(n, "%" #i0, i1, i3, i4) "}"                                   \
                 : WGMMA_REGISTERS_##n(c)                                                                    \
                 : "l"(a.bits()), "l"(b.bits()), "r"(add), WGMMA_FORM);                                      \
  }
#define WGMMA_RS(function, c, n, i0, i1, i2, i3, i4, i5, i6, i7)                                           \
  template <class T, Major... majors>                                                                      \
  FLASHGEN_DEVICE static void function(float (&d)[n / 2], const u32(&a)[4], MatrixDescriptor b, i32 add) { \
    asm volatile(WGMMA_BEGIN(i5) WGMMA_PRODUCT(n, WGMMA_LEFT(i0, i1, i2, i3), i4, i6, i7) "}"              \
                 : WGMMA_REGISTERS_##n(c)                                                                  \
                 : WGMMA_LEFT_REGISTERS(a), "l"(b.bits()), "r"(add), WGMMA_FORM);                          \
  }
#define WGMMA_SHAPE_AT(n, i0, i1, i2, i3, i4, i5, i6, i7, ...) \
  template <>                                                  \
  struct Wgmma<n> {                                            \
    WGMMA_SS(add_ss, "+f", n, i0, i1, i2, i3, i4)              \
    WGMMA_SS(set_ss, "=f", n, i0, i1, i2, i3, i4)              \
    WGMMA_RS(add_rs, "+f", n, i0, i1, i2, i3, i4, i5, i6, i7)  \
    WGMMA_RS(set_rs, "=f", n, i0, i1, i2, i3, i4, i5, i6, i7)  \
  };
#define WGMMA_EXPANDED(macro, ...) macro(__VA_ARGS__)
#define WGMMA_SHAPE(n) WGMMA_EXPANDED(WGMMA_SHAPE_AT, n, WGMMA_FROM_##n)

// A kernel may define WGMMA_SHAPES to the shapes that it uses, because each takes some time to compile.
#ifdef WGMMA_SHAPES
WGMMA_SHAPES(WGMMA_SHAPE)
#else
WGMMA_SHAPE(8)
WGMMA_SHAPE(16)
WGMMA_SHAPE(24)
WGMMA_SHAPE(32)
WGMMA_SHAPE(40)
WGMMA_SHAPE(48)
WGMMA_SHAPE(56)
WGMMA_SHAPE(64)
WGMMA_SHAPE(72)
WGMMA_SHAPE(80)
WGMMA_SHAPE(88)
WGMMA_SHAPE(96)
WGMMA_SHAPE(104)
WGMMA_SHAPE(112)
WGMMA_SHAPE(120)
WGMMA_SHAPE(128)
WGMMA_SHAPE(136)
WGMMA_SHAPE(144)
WGMMA_SHAPE(152)
WGMMA_SHAPE(160)
WGMMA_SHAPE(168)
WGMMA_SHAPE(176)
WGMMA_SHAPE(184)
WGMMA_SHAPE(192)
WGMMA_SHAPE(200)
WGMMA_SHAPE(208)
WGMMA_SHAPE(216)
WGMMA_SHAPE(224)
WGMMA_SHAPE(232)
WGMMA_SHAPE(240)
WGMMA_SHAPE(248)
WGMMA_SHAPE(256)
#endif

// d = a * b, plus what d held if `accumulate`; both operands in shared memory.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b, bool accumulate) {
  Wgmma<n>::template add_ss<T, a_major, b_major>(d, a, b, accumulate);
}

// d = a * b. The compiler knows that the previous value of d is dead.
template <class T, i32 n, Major a_major = Major::k, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_ss_first(float (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b) {
  Wgmma<n>::template set_ss<T, a_major, b_major>(d, a, b, 0);
}

// The same with the left operand in registers. Each warp holds its 16 rows in the layout of mma_m16n8k16, or
// of mma_m16n8k32 for 8-bit types.
template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs(float (&d)[n / 2], const u32 (&a)[4], MatrixDescriptor b, bool accumulate) {
  Wgmma<n>::template add_rs<T, b_major>(d, a, b, accumulate);
}

template <class T, i32 n, Major b_major = Major::k>
FLASHGEN_DEVICE void wgmma_rs_first(float (&d)[n / 2], const u32 (&a)[4], MatrixDescriptor b) {
  Wgmma<n>::template set_rs<T, b_major>(d, a, b, 0);
}

}  // namespace flashgen
