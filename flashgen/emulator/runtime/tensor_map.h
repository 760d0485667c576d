// Tensor maps and the boxes that they describe. For the emulator, flashgen/launch/driver/tensor_map.py
// encodes maps in this layout instead of the driver's opaque one.
#pragma once
#include "memory.h"

namespace flashgen::emu {

enum class TensorElement : u8 { u8_, u16_, u32_, half, bfloat16, float32 };
enum class TensorFill : u8 { zero, nan };

constexpr i32 kMaxRank = 5;
constexpr u64 kMarkOfTensorMap = 0x70616d726f736e74ull;  // "tnsormap"

// The 128 bytes. Dimension 0 is the contiguous one; its stride is not stored.
struct TensorMapRecord {
  u64 mark;
  u64 address;
  u64 stride_bytes[kMaxRank - 1];  // of dimensions 1, 2, ...
  u64 dims[kMaxRank];              // in elements
  u16 box[kMaxRank];               // extent along each dimension
  u8 steps[kMaxRank];              // every how many-th of these elements is copied
  u8 rank;
  TensorElement element;
  u8 swizzle_bytes;  // 0, 32, 64 or 128
  TensorFill fill;   // what a load writes for elements outside of the tensor
  u8 unused[21];
};
static_assert(sizeof(TensorMapRecord) == 128);

inline u32 bytes_of(TensorElement element) {
  constexpr u32 bytes[] = {1, 2, 4, 2, 2, 4};
  return bytes[static_cast<i32>(element)];
}

// A box that is copied between a tensor and shared memory, where its rows are contiguous.
struct TensorBox {
  TensorMapRecord map;  // a copy: the kernel's parameter may be gone when the bytes move
  i32 at[kMaxRank];     // coordinates of its first element
  bool is_stored;       // shared memory is the source

  u32 element_bytes() const { return bytes_of(map.element); }
  u32 count(i32 dim) const {
    if (dim >= map.rank) return 1;
    return dim == 0 ? map.box[0] : (map.box[dim] + map.steps[dim] - 1u) / map.steps[dim];
  }
  u32 row_bytes() const { return count(0) * element_bytes(); }
  u32 rows() const { return count(1) * count(2) * count(3) * count(4); }
  u32 bytes() const { return rows() * row_bytes(); }

  // The swizzled offset of the byte at `offset` of the box at shared address `start`. The index of the line
  // of 128 bytes permutes the 16-byte chunks within each 32, 64 or 128 bytes.
  u32 swizzled(u32 start, u32 offset) const {
    const u32 address = start + offset;
    return (address ^ ((address >> 7 & (map.swizzle_bytes / 16u - 1u)) << 4)) - start;
  }
  u32 place(u32 start, u32 offset) const { return map.swizzle_bytes == 0 ? offset : swizzled(start, offset); }
};

// A row of a box. `valid` elements, from `first` on, lie in the tensor, at `memory`.
struct BoxRow {
  u32 offset;  // of the row in the box
  u32 first;
  u32 valid;
  u8* memory;
};

inline BoxRow row_of(const TensorBox& box, u32 row) {
  const TensorMapRecord& map = box.map;
  BoxRow found = {row * box.row_bytes(), 0, 0, nullptr};
  u64 address = map.address;
  for (i32 dim = 1; dim < map.rank; ++dim) {
    const i64 at = box.at[dim] + static_cast<i64>(row % box.count(dim)) * map.steps[dim];
    row /= box.count(dim);
    if (at < 0 || at >= static_cast<i64>(map.dims[dim])) return found;
    address += static_cast<u64>(at) * map.stride_bytes[dim - 1];
  }
  const i64 width = box.count(0);
  const i64 begin = box.at[0] < 0 ? -static_cast<i64>(box.at[0]) : 0;
  // A store is clipped at the next multiple of 16 bytes: an H200 writes into the gap between rows.
  const i64 unit = box.is_stored ? 16 / box.element_bytes() : 1;
  const i64 left = (static_cast<i64>(map.dims[0]) + unit - 1) / unit * unit - box.at[0];
  const i64 end = left < width ? left : width;
  if (begin >= end) return found;
  found.first = static_cast<u32>(begin);
  found.valid = static_cast<u32>(end - begin);
  found.memory = reinterpret_cast<u8*>(address) + (box.at[0] + begin) * box.element_bytes();
  return found;
}

// The tensor map at an address; a finding if there is none.
inline TensorMapRecord check_tensor_map(const void* map, const char* what) {
  if (reinterpret_cast<u64>(map) % 64 != 0)
    fail("misaligned", "%s needs a tensor map at a multiple of 64; this is %p", what, map);
  TensorMapRecord record;
  memcpy(&record, map, sizeof record);
  if (record.mark != kMarkOfTensorMap)
    fail("invalid operand", "%s of something that is not a tensor map; pass one that the host encoded", what);
  return record;
}

inline TensorBox box_of(const void* map, const i32* at, i32 rank, const char* what) {
  TensorBox box = {};
  box.map = check_tensor_map(map, what);
  if (box.map.rank != rank)
    fail("invalid operand", "%s takes a tensor of %d dimensions; this map has %d", what, rank, box.map.rank);
  for (i32 dim = 0; dim < rank; ++dim) box.at[dim] = at[dim];
  // An H200 stops with an illegal instruction here.
  if (box.at[0] * static_cast<i64>(box.element_bytes()) % 16 != 0) {
    fail("misaligned",
         "%s of a box that begins at element %d of its rows; its elements of %d bytes need a "
         "multiple of %d",
         what, box.at[0], box.element_bytes(), 16 / box.element_bytes());
  }
  return box;
}

// Fills in elements outside of the tensor. NaN is 0x7ff7 in every 16 bits, as on an H200.
inline void fill_outside(const TensorBox& box, u8* memory, u32 bytes) {
  const bool zero = box.map.fill == TensorFill::zero;
  for (u32 i = 0; i < bytes; ++i) memory[i] = zero ? 0 : i % 2 == 0 ? 0xf7 : 0x7f;
}

}  // namespace flashgen::emu
