// How tensor maps describe tensors to bulk copies of boxes.
#pragma once

namespace flashgen {

// A tensor in global memory and the box that is copied of it. The host makes it, and a kernel takes it in its
// __grid_constant__ parameters.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

}  // namespace flashgen
