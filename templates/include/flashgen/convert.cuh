// Single elements from floats.
#pragma once
#include "flashgen/element.cuh"

namespace flashgen {

template <class T>
FLASHGEN_DEVICE T element_from(float value) {
  if constexpr (kIsFloat<T>) {
    return value;
  } else {
    return T{static_cast<u16>(pack(T{}, value, 0.0f))};
  }
}

}  // namespace flashgen
