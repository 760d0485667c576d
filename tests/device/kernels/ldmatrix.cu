// 8x8 matrices of 16-bit elements from shared memory, rows in any order.
#include "flashgen/primitives.cuh"
using namespace flashgen;

constexpr i32 kThreads = 32;

struct Params {
  i32 variant;
  i32 count;        // 16-byte rows in shared memory
  const u32* x;     // [row][4]
  const i32* rows;  // [lane]: the row that this lane gives the address of
  u32* out;         // [lane][4]
};

struct Variant {
  i32 matrices;
  bool transposed;
};

template <Variant variant>
FLASHGEN_DEVICE void load(u32 (&r)[variant.matrices], u32 address) {
  if constexpr (variant.matrices == 1)
    variant.transposed ? ldmatrix_x1_trans(r, address) : ldmatrix_x1(r, address);
  if constexpr (variant.matrices == 2)
    variant.transposed ? ldmatrix_x2_trans(r, address) : ldmatrix_x2(r, address);
  if constexpr (variant.matrices == 4)
    variant.transposed ? ldmatrix_x4_trans(r, address) : ldmatrix_x4(r, address);
}

template <Variant variant>
FLASHGEN_DEVICE void run(const Params& params) {
  FLASHGEN_SHARED_MEMORY(shared);
  const i32 lane = thread_idx();
  for (i32 i = lane; i < 4 * params.count; i += kThreads) reinterpret_cast<u32*>(shared)[i] = params.x[i];
  block_sync();
  u32 r[variant.matrices];
  load<variant>(r, shared_address(shared + 16 * params.rows[lane]));
  for (i32 i = 0; i < variant.matrices; ++i) params.out[4 * lane + i] = r[i];
}
