// Transfers by bulk copies: a run of bytes or a box of a tensor, between global memory and shared memory.
#pragma once
#include "mbarrier.h"
#include "tensor_map.h"

namespace flashgen::emu {

constexpr u32 kTransferUnit = 16;
constexpr u32 kSwizzleLine = 128;

// Contiguous bytes that exist in both memories.
struct Run {
  u32 offset;  // in shared memory, before swizzling
  u8* memory;
  u32 bytes;
};

struct Transfer {
  bool boxed;
  TensorBox box;
  u8* memory;  // of a run of bytes
  u32 bytes;   // in shared memory
  u32 shared;  // the 32-bit address there

  template <class Visit>
  void visit_runs(const Visit& visit) const {
    if (!boxed) return visit(Run{0, memory, bytes});
    for (u32 row = 0; row < box.rows(); ++row) {
      const BoxRow found = row_of(box, row);
      if (found.valid == 0) continue;
      const u32 size = box.element_bytes();
      visit(Run{found.offset + found.first * size, found.memory, found.valid * size});
    }
  }

  // Calls visit(offset, place, bytes) for contiguous parts of [begin, begin + count). `offset` is the
  // position in the box, and `place` the swizzled position in shared memory.
  template <class Visit>
  void visit_places(u32 begin, u32 count, const Visit& visit) const {
    if (!boxed || box.map.swizzle_bytes == 0) return visit(begin, begin, count);
    for (u32 offset = begin; offset < begin + count;) {
      const u32 chunk_end = offset / kTransferUnit * kTransferUnit + kTransferUnit;
      const u32 end = chunk_end < begin + count ? chunk_end : begin + count;
      visit(offset, box.swizzled(shared, offset), end - offset);
      offset = end;
    }
  }

  // A swizzled box that ends inside of a line may use any chunks of that line.
  u32 shared_extent() const {
    return boxed && box.map.swizzle_bytes != 0 ? (bytes + kSwizzleLine - 1) / kSwizzleLine * kSwizzleLine
                                               : bytes;
  }
  u32 shared_alignment() const { return boxed ? kSwizzleLine : kTransferUnit; }

  u8* in(const Block& block) const { return block.shared + (address_in_block(shared) - kSharedBase); }
};

// ---- Making transfers

inline Transfer transfer_of_bytes(u32 shared, const void* memory, u32 bytes, const char* what) {
  if (bytes % kTransferUnit != 0)
    fail("invalid operand", "%s of %u bytes, which is not a multiple of 16", what, bytes);
  Transfer transfer = {};
  transfer.memory = static_cast<u8*>(const_cast<void*>(memory));
  transfer.bytes = bytes;
  transfer.shared = shared;
  return transfer;
}

inline Transfer transfer_of_box(u32 shared, const void* map, const i32* at, i32 rank, const char* what) {
  Transfer transfer = {};
  transfer.boxed = true;
  transfer.box = box_of(map, at, rank, what);
  transfer.bytes = transfer.box.bytes();
  transfer.shared = shared;
  return transfer;
}

// Checks the range in shared memory, and returns its block.
inline Block& block_of(const Transfer& transfer, u32 address, const char* what) {
  return cluster_range(self(), address, transfer.shared_extent(), transfer.shared_alignment(), what).block;
}

inline void check_global_side(const Transfer& transfer, bool writes, const char* what) {
  if (!transfer.boxed && transfer.bytes != 0)
    return check_global(transfer.memory, transfer.bytes, kTransferUnit, writes, what);
  transfer.visit_runs([&](const Run& run) { check_global(run.memory, run.bytes, 1, writes, what); });
}

// ---- Moving the bytes; `data` holds them in order

inline void gather_from_global(const Transfer& transfer, std::vector<u8>& data) {
  data.resize(transfer.bytes);
  if (transfer.boxed) {
    const TensorBox& box = transfer.box;
    fill_outside(box, data.data(), transfer.bytes);
  }
  transfer.visit_runs([&](const Run& run) { memcpy(data.data() + run.offset, run.memory, run.bytes); });
}

inline void scatter_to_shared(const Transfer& transfer, const std::vector<u8>& data, Block& block) {
  u8* target = transfer.in(block);
  transfer.visit_places(0, transfer.bytes, [&](u32 offset, u32 place, u32 bytes) {
    memcpy(target + place, data.data() + offset, bytes);
  });
}

inline void poison_shared(const Transfer& transfer, Block& block) {
  u8* target = transfer.in(block);
  transfer.visit_places(0, transfer.bytes,
                        [&](u32, u32 place, u32 bytes) { memset(target + place, kPoisonByte, bytes); });
}

inline void gather_from_shared(const Transfer& transfer, const Block& block, std::vector<u8>& data) {
  data.resize(transfer.bytes);
  const u8* source = transfer.in(block);
  transfer.visit_places(0, transfer.bytes, [&](u32 offset, u32 place, u32 bytes) {
    memcpy(data.data() + offset, source + place, bytes);
  });
}

// ---- Race mode: the accessed ranges of both memories

struct TransferAccess {
  const Transfer& transfer;
  Thread& thread;
  const void* code;

  AsyncAccess global(const Run& run, How how) const {
    return {thread, nullptr, run.memory, run.bytes, how, code};
  }
  AsyncAccess shared(Block& block, u32 place, u32 bytes, How how) const {
    return {thread, &block, transfer.in(block) + place, bytes, how, code};
  }
  template <class Visit>
  void visit_global(How how, const Visit& visit) const {
    transfer.visit_runs([&](const Run& run) { visit(global(run, how)); });
  }
  // A load writes the whole box.
  template <class Visit>
  void visit_shared(Block& block, How how, const Visit& visit) const {
    if (transfer.bytes == transfer.shared_extent()) return visit(shared(block, 0, transfer.bytes, how));
    transfer.visit_places(0, transfer.bytes,
                          [&](u32, u32 place, u32 bytes) { visit(shared(block, place, bytes, how)); });
  }
  // A store reads the part of the box that lies in the tensor.
  template <class Visit>
  void visit_shared_runs(Block& block, How how, const Visit& visit) const {
    transfer.visit_runs([&](const Run& run) {
      transfer.visit_places(run.offset, run.bytes,
                            [&](u32, u32 place, u32 bytes) { visit(shared(block, place, bytes, how)); });
    });
  }
};

}  // namespace flashgen::emu
