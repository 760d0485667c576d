// Element-wise additions of bulk reductions. Sums of 16-bit floats are rounded to float and then to 16 bits.
// That equals a single rounding, because float has more than twice the bits.
#pragma once
#include "tensor_map.h"

namespace flashgen::emu {

inline u32 float_bits(float value) { return __builtin_bit_cast(u32, value); }
inline float float_from(u32 bits) { return __builtin_bit_cast(float, bits); }

inline float widen_bfloat16(u16 bits) { return float_from(static_cast<u32>(bits) << 16); }
inline u16 round_to_bfloat16(float value) {
  if (value != value) return 0x7fff;
  const u32 bits = float_bits(value);
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float widen_half(u16 bits) {
  const u32 sign = (bits & 0x8000u) << 16;
  const u32 magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from(sign | 0x7f800000u | magnitude << 13);
  return float_from(sign | float_bits(float_from(magnitude << 13) * 0x1p112f));
}
inline u16 round_to_half(float value) {
  if (value != value) return 0x7fff;
  const u32 sign = float_bits(value) >> 16 & 0x8000u;
  const u32 magnitude = float_bits(value) & 0x7fffffffu;
  if (magnitude >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);  // from 65520 on: infinity
  // Below 2^-14: adding 0.5 leaves the rounded mantissa in the low bits.
  if (magnitude < 0x38800000u)
    return static_cast<u16>(sign | (float_bits(float_from(magnitude) + 0.5f) - 0x3f000000u));
  return static_cast<u16>(sign | (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

template <class T, class Add>
inline void add_each(u8* target, const u8* source, u32 bytes, const Add& add) {
  for (u32 i = 0; i < bytes; i += sizeof(T)) {
    T a, b;
    memcpy(&a, target + i, sizeof a);
    memcpy(&b, source + i, sizeof b);
    a = add(a, b);
    memcpy(target + i, &a, sizeof a);
  }
}

inline bool can_add(TensorElement element) {
  return element != TensorElement::u8_ && element != TensorElement::u16_;
}

inline void add_elements(TensorElement element, u8* target, const u8* source, u32 bytes) {
  switch (element) {
    case TensorElement::half:
      return add_each<u16>(target, source, bytes,
                           [](u16 a, u16 b) { return round_to_half(widen_half(a) + widen_half(b)); });
    case TensorElement::bfloat16:
      return add_each<u16>(target, source, bytes, [](u16 a, u16 b) {
        return round_to_bfloat16(widen_bfloat16(a) + widen_bfloat16(b));
      });
    case TensorElement::float32:
      return add_each<float>(target, source, bytes, [](float a, float b) { return a + b; });
    default:
      return add_each<u32>(target, source, bytes, [](u32 a, u32 b) { return a + b; });
  }
}

}  // namespace flashgen::emu
