// Registers move from one warpgroup to two others, and what they hold stays.
#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;

constexpr i32 kThreads = 384;

struct Params {
  i32 variant;
  const u32* x;  // [thread][4]
  u32* out;      // [thread][4]
};

enum class Variant { kGiveAndTake };

template <Variant>
FLASHGEN_DEVICE void run(const Params& params) {
  const i32 first = 4 * thread_idx();
  u32 held[4];
  for (i32 i = 0; i < 4; ++i) held[i] = params.x[first + i];
  if (thread_idx() / 128 == 0) {
    setmaxnreg_dec<24>();
  } else {
    setmaxnreg_inc<240>();
  }
  for (i32 i = 0; i < 4; ++i) params.out[first + i] = held[i] * 5 + held[(i + 1) % 4];
}
