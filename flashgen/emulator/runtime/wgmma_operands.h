// Operands of wgmma in shared memory. flashgen/ptx/descriptor.cuh explains the fields of their descriptors.
#pragma once
#include "eight_bit.h"
#include "flashgen/ptx/descriptor.cuh"
#include "memory.h"
#include "warpgroup.h"

namespace flashgen::emu {

constexpr i32 kChunkBytes = 16;
constexpr i32 kMaxDepth = 32;

inline bool is_eight_bit(FlashgenEmuElement element) {
  return element == kFlashgenEmuE4m3 || element == kFlashgenEmuE5m2;
}
inline i32 depth_of(FlashgenEmuElement element) { return is_eight_bit(element) ? 32 : 16; }

// One operand: lines of chunks of 16 bytes. A line is a row of a K-major operand, or one step along K of an
// MN-major one.
struct Operand {
  u64 bits;
  bool mn_major;
  i32 lines;
  i32 chunks;

  u32 address() const { return static_cast<u32>(bits & 0x3fff) << 4; }
  u32 leading_bytes() const { return static_cast<u32>(bits >> 16 & 0x3fff) << 4; }
  u32 stride_bytes() const { return static_cast<u32>(bits >> 32 & 0x3fff) << 4; }
  Swizzle swizzle() const { return static_cast<Swizzle>(bits >> 62); }
  // Contiguous bytes of a line. Eight such lines are one repetition of the swizzle.
  u32 width() const {
    constexpr u32 widths[] = {16, 128, 64, 32};
    return widths[bits >> 62];
  }

  u32 chunk_address(u32 line, u32 chunk) const {
    const u32 within = address() + line % 8 * width();
    if (swizzle() == Swizzle::none) {
      return mn_major ? within + chunk * stride_bytes() + line / 8 * leading_bytes()
                      : within + chunk * leading_bytes() + line / 8 * stride_bytes();
    }
    const u32 per_width = width() / kChunkBytes;
    const u32 plain = within + line / 8 * stride_bytes() + chunk % per_width * kChunkBytes +
                      (mn_major ? chunk / per_width * leading_bytes() : 0);
    // The swizzle XORs bits of the line's index, from bit 7 on, into the chunk's index.
    return plain ^ (plain >> 7 & (per_width - 1)) << 4;
  }

  template <class Visit>
  void each_chunk(u32 first_line, u32 line_count, u32 first_chunk, u32 chunk_count,
                  const Visit& visit) const {
    for (u32 line = first_line; line < first_line + line_count; ++line) {
      for (u32 chunk = first_chunk; chunk < first_chunk + chunk_count; ++chunk) {
        visit(line, chunk, chunk_address(line, chunk));
      }
    }
  }
};

inline Operand make_operand(u64 bits, bool mn_major, i32 rows, FlashgenEmuElement element) {
  const i32 depth = depth_of(element);
  return mn_major ? Operand{bits, true, depth, rows / 8} : Operand{bits, false, rows, 2};
}
inline Operand left_operand(const FlashgenEmuWgmma& form) {
  return make_operand(form.a_descriptor, form.a_is_mn_major != 0, kWarpgroupRows, form.element);
}
inline Operand right_operand(const FlashgenEmuWgmma& form) {
  return make_operand(form.b_descriptor, form.b_is_mn_major != 0, form.columns, form.element);
}

// Checks a descriptor and the memory that it refers to. `which` is "left" or "right".
inline void check_operand(const Thread& thread, const Operand& operand, const char* which) {
  constexpr u64 unused = 0xffffull << 46 | 3ull << 30 | 3ull << 14;
  if ((operand.bits & unused) != 0) {
    fail_for(thread, "invalid operand",
             "the %s operand's descriptor 0x%llx has bits set outside of its fields; make it with"
             " matrix_descriptor and move it within shared memory",
             which, static_cast<unsigned long long>(operand.bits));
  }
  const u32 offset = operand.address() - kSharedBase;
  const u32 width = operand.width();
  if (width > kChunkBytes) {
    const u32 start = operand.address() % (8 * width);
    if (start >= width) {
      fail_for(thread, "misaligned",
               "the %s operand starts at offset %u of shared memory, in line %u of its %u-byte swizzle; the"
               " first line is at a multiple of %u",
               which, offset, start / width, width, 8 * width);
    }
    const u32 used = static_cast<u32>(operand.chunks) * kChunkBytes;
    if (start != 0 && start + used > width) {
      fail_for(thread, "misaligned",
               "the %s operand starts %u bytes into the lines of its %u-byte swizzle, and its own lines of %u"
               " bytes do not fit behind that",
               which, start, width, used);
    }
  }
  operand.each_chunk(0, static_cast<u32>(operand.lines), 0, static_cast<u32>(operand.chunks),
                     [&](u32, u32, u32 address) {
                       shared_range(thread, address, kChunkBytes, kChunkBytes,
                                    which[0] == 'l' ? "wgmma's left operand" : "wgmma's right operand");
                     });
}

// The elements of one chunk: 8 or 16.
inline void decode(const u8* source, FlashgenEmuElement element, float* values) {
  if (is_eight_bit(element)) {
    const EightBitFloats& floats = element == kFlashgenEmuE4m3 ? e4m3_floats() : e5m2_floats();
    for (i32 i = 0; i < kChunkBytes; ++i) values[i] = floats.values[source[i]];
    return;
  }
  const auto* halves = reinterpret_cast<const u16*>(source);
  const Floats wide = element == kFlashgenEmuBfloat16 ? widen<true>(halves) : widen<false>(halves);
  memcpy(values, &wide, sizeof wide);
}

// Calls put(row, k, value) for each element of an operand in shared memory.
template <class Put>
inline void read_operand(const Operand& operand, FlashgenEmuElement element, const u8* shared,
                         const Put& put) {
  const u32 count = is_eight_bit(element) ? 16 : 8;
  operand.each_chunk(0, static_cast<u32>(operand.lines), 0, static_cast<u32>(operand.chunks),
                     [&](u32 line, u32 chunk, u32 address) {
                       float values[kChunkBytes];
                       decode(shared + (address - kSharedBase), element, values);
                       for (u32 i = 0; i < count; ++i) {
                         const u32 along = chunk * count + i;
                         operand.mn_major ? put(along, line, values[i]) : put(line, along, values[i]);
                       }
                     });
}

}  // namespace flashgen::emu
