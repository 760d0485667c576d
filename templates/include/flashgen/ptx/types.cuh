// Integer and element types, without any CUDA header.
#pragma once

namespace flashgen {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// IEEE binary16 and bfloat16 as bits. Arithmetic uses float or tensor cores.
struct half_t {
  u16 bits;
};
struct bfloat16_t {
  u16 bits;
};
// The element type of fp32 kernels. Sums and statistics are `float` in every kernel.
using float32_t = float;
// 8-bit floats. After the sign, e4m3 has 4 exponent and 3 mantissa bits; e5m2 has 5 and 2.
struct e4m3_t {
  u8 bits;
};
struct e5m2_t {
  u8 bits;
};

struct alignas(16) Vec16 {
  u32 words[4];
};

// Describes a tensor in global memory and the box that one bulk copy moves. The host encodes it, and a kernel
// gets it in its __grid_constant__ parameters.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

}  // namespace flashgen
