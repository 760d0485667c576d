// Asynchronous copies into shared memory: whole and partial ones, and waiting for some of their groups.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 64;
constexpr i32 kGroups = 4;

struct Params {
  i32 variant;
  const u8* x;         // [group][thread][bytes]
  const i32* valid;    // [group][thread]: how many of the bytes to copy
  const i32* missing;  // [group][thread]: the source is an address that does not exist
  u8* out;             // [group][thread][bytes]
};

struct Variant {
  i32 bytes;
  i32 pending;
};

template <i32 bytes>
FLASHGEN_DEVICE void copy(u8* destination, const u8* source, u32 valid_bytes) {
  const u32 address = shared_address(destination);
  if constexpr (bytes == 4) cp_async_4(address, source, valid_bytes);
  if constexpr (bytes == 8) cp_async_8(address, source, valid_bytes);
  if constexpr (bytes == 16) cp_async_16(address, source, valid_bytes);
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  constexpr i32 bytes = variant.bytes;
  FLASHGEN_SHARED_MEMORY(shared);
  for (i32 group = 0; group < kGroups; ++group) {
    const i32 i = group * kThreads + thread_idx();
    const u8* source = params.missing[i] ? reinterpret_cast<const u8*>(16) : params.x + i * bytes;
    copy<bytes>(shared + i * bytes, source, static_cast<u32>(params.valid[i]));
    cp_async_commit();
  }
  cp_async_wait<variant.pending>();
  for (i32 group = 0; group < kGroups; ++group) {
    // The groups that the first wait left under way.
    if (group == kGroups - variant.pending) cp_async_wait<0>();
    const i32 first = (group * kThreads + thread_idx()) * bytes;
    for (i32 k = first; k < first + bytes; ++k) params.out[k] = shared[k];
  }
}
