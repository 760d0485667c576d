// Queries for a cache of 8-bit floats. eight_bits.cuh says which elements of a row a lane multiplies.
#pragma once
#include "flashgen/decode/rows.cuh"
#include "flashgen/softmax.cuh"

namespace flashgen {

// Columns of a row in shared memory: an even number of 16-byte chunks.
constexpr i32 eight_bit_columns(i32 head_dim) { return round_up(head_dim, 32); }

// How elements of a row become words of fp16. For e4m3 queries see e4m3_queries.cuh.
template <class T>
struct QueryWords {
  // Reads the four elements of two rows that a lane multiplies in a step. Those beyond the head are zeros.
  template <i32 head_dim>
  FLASHGEN_DEVICE static LeftFragment<half_t> read(const T* const (&rows)[2], i32 step, Thread thread) {
    LeftFragment<half_t> fragment = {};
    const i32 first = 16 * step + 2 * thread.column();
    if (16 * step + 16 <= head_dim || first < head_dim) {
#pragma unroll
      for (i32 i = 0; i < 4; ++i)
        fragment.words[i] = *reinterpret_cast<const u32*>(rows[i % 2] + first + 2 * (i / 2));
    }
    return fragment;
  }
  // What the products of a row are multiplied by, where its elements become fp16 as they are.
  template <class Params>
  FLASHGEN_DEVICE static float scale(const Params&, const DecodeItem&, RowPlace) {
    return 1.0f;
  }
};

// The factor that brings a row into the range of fp16, and its inverse for the row's products.
struct RowScaling {
  float down;
  float back;
};

// The largest magnitude among the elements that a lane holds of row h.
FLASHGEN_DEVICE float largest_in_row(const LeftFragment<half_t>& fragment, i32 h, float so_far) {
#pragma unroll
  for (i32 i = h; i < 4; i += 2) {
    const u32 word = fragment.words[i];
    so_far = maximum(so_far, float_of(word << 16 & 0x7fff0000u));
    so_far = maximum(so_far, float_of(word & 0x7fff0000u));
  }
  return so_far;
}
FLASHGEN_DEVICE RowScaling scaling_of(float largest) {
  const i32 exponent = static_cast<i32>(bits_of(row_maximum(largest)) >> 23);
  // A row of zeros has exponent 0, and counts as 41: `back` is then 2^-100, and does not underflow when it is
  // multiplied by a scale of K. Infinity has 255, and counts as the largest finite number.
  const i32 bounded = smaller(larger(exponent, 41), 254);
  return {float_of(static_cast<u32>(268 - bounded) << 23), float_of(static_cast<u32>(bounded - 14) << 23)};
}
FLASHGEN_DEVICE void to_half_rows(LeftFragment<half_t>& fragment, const RowScaling (&scaling)[2]) {
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    const u32 word = fragment.words[i];
    const float down = scaling[i % 2].down;
    fragment.words[i] = pack(half_t{}, float_of(word << 16) * down, float_of(word & 0xffff0000u) * down);
  }
}

template <DecodeConfig cfg, class T>
struct QuerySource {
  static constexpr i32 steps = eight_bit_columns(cfg.head_dim) / 16;
  const T* rows[2];

  template <class Params>
  FLASHGEN_DEVICE static QuerySource of(const Params& p, const DecodeItem& item, const LaneRows& own) {
    const auto source = QueryRows<T>::of(p, item);
    return {{source.at(own.places[0]), source.at(own.places[1])}};
  }
  FLASHGEN_DEVICE LeftFragment<half_t> read(i32 step, Thread thread) const {
    return QueryWords<T>::template read<cfg.head_dim>(rows, step, thread);
  }
};

// The rows of Q in fp16, because every 8-bit float is exact in fp16. bfloat16 has a wider range. So each of
// its rows is divided by a power of two that brings its largest element between 2^14 and 2^15. Elements down
// to 2^-29 times the largest are still exact.
template <DecodeConfig cfg, class T, bool in_registers>
struct EightBitQueries;

// Queries in registers.
template <DecodeConfig cfg, class T>
struct EightBitQueries<cfg, T, true> {
  using Source = QuerySource<cfg, T>;
  LeftHeld<half_t, 1, Source::steps> held;
  // What the products of the lane's two rows are multiplied by.
  float product_scale[2];

  template <class Params>
  FLASHGEN_DEVICE static EightBitQueries load(const Params& p, const DecodeItem& item, const LaneRows& rows,
                                              u8*, i32, Thread thread) {
    const Source source = Source::of(p, item, rows);
    EightBitQueries queries = {
        {}, {QueryWords<T>::scale(p, item, rows.places[0]), QueryWords<T>::scale(p, item, rows.places[1])}};
    auto& fragments = queries.held.fragments[0];
#pragma unroll
    for (i32 step = 0; step < Source::steps; ++step) fragments[step] = source.read(step, thread);
    if constexpr (kIsBfloat16<T>) {
      float largest[2] = {};
      RowScaling scaling[2];
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
#pragma unroll
        for (i32 step = 0; step < Source::steps; ++step)
          largest[h] = largest_in_row(fragments[step], h, largest[h]);
        scaling[h] = scaling_of(largest[h]);
        queries.product_scale[h] = scaling[h].back;
      }
#pragma unroll
      for (i32 step = 0; step < Source::steps; ++step) to_half_rows(fragments[step], scaling);
    }
    return queries;
  }
  FLASHGEN_DEVICE const LeftHeld<half_t, 1, Source::steps>& left(Thread) const { return held; }
};

// Queries in shared memory. Each lane writes the fragments that it multiplies, and no other lane reads them.
// So no barrier is needed.
template <DecodeConfig cfg, class T>
struct EightBitQueries<cfg, T, false> {
  using Source = QuerySource<cfg, T>;
  struct Stored {
    static constexpr bool in_registers = false;
    const Vec16* fragments;

    FLASHGEN_DEVICE void load(LeftFragment<half_t>& fragment, i32 /*block*/, i32 step) const {
      const Vec16 words = fragments[step * kWarpSize];
#pragma unroll
      for (i32 i = 0; i < 4; ++i) fragment.words[i] = words.words[i];
    }
  };
  Vec16* fragments;
  // What the products of the lane's two rows are multiplied by.
  float product_scale[2];

  template <class Params>
  FLASHGEN_DEVICE static EightBitQueries load(const Params& p, const DecodeItem& item, const LaneRows& rows,
                                              u8* base, i32, Thread thread) {
    const Source source = Source::of(p, item, rows);
    Vec16* const own = reinterpret_cast<Vec16*>(base) + thread.warp * Source::steps * kWarpSize + thread.lane;
    EightBitQueries queries = {
        own, {QueryWords<T>::scale(p, item, rows.places[0]), QueryWords<T>::scale(p, item, rows.places[1])}};
    RowScaling scaling[2] = {};
    if constexpr (kIsBfloat16<T>) {
      float largest[2] = {};
#pragma unroll 1
      for (i32 step = 0; step < Source::steps; ++step) {
        const LeftFragment<half_t> fragment = source.read(step, thread);
#pragma unroll
        for (i32 h = 0; h < 2; ++h) largest[h] = largest_in_row(fragment, h, largest[h]);
      }
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        scaling[h] = scaling_of(largest[h]);
        queries.product_scale[h] = scaling[h].back;
      }
    }
#pragma unroll 1
    for (i32 step = 0; step < Source::steps; ++step) {
      LeftFragment<half_t> fragment = source.read(step, thread);
      if constexpr (kIsBfloat16<T>) to_half_rows(fragment, scaling);
      own[step * kWarpSize] =
          Vec16{{fragment.words[0], fragment.words[1], fragment.words[2], fragment.words[3]}};
    }
    return queries;
  }
  FLASHGEN_DEVICE Stored left(Thread) const { return {fragments}; }
};

}  // namespace flashgen
