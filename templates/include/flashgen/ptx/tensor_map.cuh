// Tensor maps: how bulk copies find boxes of tensors.
#pragma once

namespace flashgen {

// Describes a tensor in global memory and the box that one copy moves. The host encodes it, and a kernel gets
// it in its __grid_constant__ parameters.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

}  // namespace flashgen
