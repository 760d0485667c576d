// New keys and values in e4m3. They have the scale of the cache already: put() of rotary.cuh stores them in
// an e4m3 cache as they are.
#pragma once
#include "flashgen/convert.cuh"
#include "flashgen/eight_bits.cuh"

namespace flashgen {

FLASHGEN_DEVICE float to_float(e4m3_t x) {
  return to_float(half_t{static_cast<u16>(half_pair_by_bits(static_cast<u32>(x.bits) << 8))});
}
template <>
FLASHGEN_DEVICE e4m3_t element_from<e4m3_t>(float value) {
  return quantized<e4m3_t>(value);
}
FLASHGEN_DEVICE void put(e5m2_t& to, e4m3_t x, float /*scale*/) { to = quantized<e5m2_t>(to_float(x)); }

}  // namespace flashgen
