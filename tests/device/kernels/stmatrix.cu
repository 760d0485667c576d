// 8x8 matrices of 16-bit elements into shared memory, rows in any order.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 32;

struct Params {
  i32 variant;
  i32 count;        // 16-byte rows in shared memory
  const u32* x;     // [lane][4]
  const i32* rows;  // [lane]: the row that this lane gives the address of
  u32* out;         // [row][4]
};

struct Variant {
  i32 matrices;
  bool transposed;
};

template <Variant variant>
FLASHGEN_DEVICE void store(u32 address, const u32 (&r)[variant.matrices]) {
  if constexpr (variant.matrices == 1)
    variant.transposed ? stmatrix_x1_trans(address, r) : stmatrix_x1(address, r);
  if constexpr (variant.matrices == 2)
    variant.transposed ? stmatrix_x2_trans(address, r) : stmatrix_x2(address, r);
  if constexpr (variant.matrices == 4)
    variant.transposed ? stmatrix_x4_trans(address, r) : stmatrix_x4(address, r);
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  FLASHGEN_SHARED_MEMORY(shared);
  const i32 lane = thread_idx();
  for (i32 i = lane; i < 4 * params.count; i += kThreads) reinterpret_cast<u32*>(shared)[i] = 0;
  block_sync();
  u32 r[variant.matrices];
  for (i32 i = 0; i < variant.matrices; ++i) r[i] = params.x[4 * lane + i];
  store<variant>(shared_address(shared + 16 * params.rows[lane]), r);
  block_sync();
  for (i32 i = lane; i < 4 * params.count; i += kThreads) params.out[i] = reinterpret_cast<u32*>(shared)[i];
}
