// Warp-wide matrix instructions: ldmatrix, stmatrix and mma.sync.
#pragma once
#include "flashgen/ptx/device.cuh"

namespace flashgen {

// Four 8x8 matrices of 16-bit elements. Lane 8i+r passes the address of row r of matrix i.
FLASHGEN_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

FLASHGEN_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

FLASHGEN_DEVICE void ldmatrix_x2(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

FLASHGEN_DEVICE void ldmatrix_x2_trans(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

FLASHGEN_DEVICE void ldmatrix_x1(u32 (&r)[1], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
}

FLASHGEN_DEVICE void ldmatrix_x1_trans(u32 (&r)[1], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(address)
               : "memory");
}

// From registers to shared memory (sm_90 and later).
FLASHGEN_DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

FLASHGEN_DEVICE void stmatrix_x4_trans(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

FLASHGEN_DEVICE void stmatrix_x2(u32 address, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1])
               : "memory");
}

FLASHGEN_DEVICE void stmatrix_x2_trans(u32 address, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]),
               "r"(r[1])
               : "memory");
}

FLASHGEN_DEVICE void stmatrix_x1(u32 address, const u32 (&r)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0]) : "memory");
}

FLASHGEN_DEVICE void stmatrix_x1_trans(u32 address, const u32 (&r)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0])
               : "memory");
}

// d += a * b, fp32 accumulation.
FLASHGEN_DEVICE void mma_m16n8k16(bfloat16_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

FLASHGEN_DEVICE void mma_m16n8k16(half_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Half the depth, for sm_75.
FLASHGEN_DEVICE void mma_m16n8k8(half_t, float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// The same, but d must not be read before mma_finish(). The hardware needs no such call. The emulator then
// computes all products of a batch at once, after a single rendezvous of the lanes.
FLASHGEN_DEVICE void mma_m16n8k16_batched(bfloat16_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16(bfloat16_t{}, d, a, b);
}

FLASHGEN_DEVICE void mma_m16n8k16_batched(half_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16(half_t{}, d, a, b);
}

FLASHGEN_DEVICE void mma_m16n8k8_batched(half_t, float (&d)[4], u32 a0, u32 a1, u32 b) {
  mma_m16n8k8(half_t{}, d, a0, a1, b);
}

FLASHGEN_DEVICE void mma_finish() {}

// Adds, for each row of a and column of b, the number of bits that both have set, of 128 (sm_80 and later).
// Each word has 32 of them.
FLASHGEN_DEVICE void mma_m16n8k128_bits(i32 (&d)[4], const u32 (&a)[2], u32 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// 8-bit elements, twice the depth (sm_89 and later).
FLASHGEN_DEVICE void mma_m16n8k32(e4m3_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

FLASHGEN_DEVICE void mma_m16n8k32_batched(e4m3_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k32(e4m3_t{}, d, a, b);
}

FLASHGEN_DEVICE void mma_m16n8k32(e5m2_t, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace flashgen
