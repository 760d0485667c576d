// A cache of 8-bit floats: the CacheElement policy for e4m3 and e5m2.
//
// Copies bring half the bytes to shared memory, and tensor cores multiply 16-bit floats: every 8-bit float is
// one exactly. ldmatrix moves pairs of bytes. So a lane gets the elements 4c to 4c + 3 of 16, c = lane % 4,
// where an operand of 16-bit elements has 2c, 2c + 1, 2c + 8 and 2c + 9. A product may take the elements of a
// head in any order that Q and K share, so Q is loaded in this one. O comes in the same order, of columns.
#pragma once
#include "flashgen/contain.cuh"
#include "flashgen/decode/cache_element.cuh"
#include "flashgen/decode/eight_bit_queries.cuh"
#include "flashgen/decode/partials.cuh"
#include "flashgen/eight_bits.cuh"

namespace flashgen {

// ---- Keys and values

// Keys as the right operand of Q K^T.
template <class Slice, bool by_instruction>
struct RightEightBitTransposed {
  Cursor<Slice> cursor;

  FLASHGEN_DEVICE RightEightBitTransposed(Slice slice, i32 /*first_column*/, Thread thread)
      : cursor(origin_of(slice), thread.lane & 15, 0) {}
  FLASHGEN_DEVICE void load_pair(RightFragment<half_t> (&pair)[2], i32 block, i32 step) const {
    u32 words[2];
    ldmatrix_x2(words, cursor.template offset<true>(8 * block, step));
#pragma unroll
    for (i32 i = 0; i < 2; ++i)
      to_halves<by_instruction>(typename Slice::Element{}, words[i], pair[i].words[0], pair[i].words[1]);
  }
  // Not called: a product has an even number of blocks.
  FLASHGEN_DEVICE void load_one(RightFragment<half_t>&, i32, i32) const {}
};

// Values as that of P V. A lane gets columns 2u and 2u + 1 of two keys, u = lane / 4: one for either block.
template <class Slice, bool by_instruction>
struct RightEightBitRows {
  Cursor<Slice> cursor;

  FLASHGEN_DEVICE RightEightBitRows(Slice slice, i32 /*first_column*/, Thread thread)
      : cursor(origin_of(slice), thread.lane & 15, 0) {}
  FLASHGEN_DEVICE void load_pair(RightFragment<half_t> (&pair)[2], i32 block, i32 step) const {
    u32 words[2];
    ldmatrix_x2_trans(words, cursor.template offset<true>(16 * step, block / 2));
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      // The two keys of a column side by side.
      const u32 by_column = select_bytes(words[i], 0, 0x3120);
      to_halves<by_instruction>(typename Slice::Element{}, by_column, pair[0].words[i], pair[1].words[i]);
    }
  }
  // Not called, either.
  FLASHGEN_DEVICE void load_one(RightFragment<half_t>&, i32, i32) const {}
};

// ---- Scales

// One number for all keys of a head, and one for all values.
struct HeadScales {
  float k;
  float v;

  struct SliceScales {
    float k;

    template <i32 blocks, class Queries>
    FLASHGEN_DEVICE void apply_qk_scales(Accumulator<1, blocks>& scores, const Queries& queries) const {
      for_each_score(scores, [&](float& s, i32 h, i32) { s *= k * queries.product_scale[h]; });
    }
    template <class Scores>
    FLASHGEN_DEVICE void add_log_v_scales(Scores&) const {}
    FLASHGEN_DEVICE float weighted_sum(float a, float b, i32 /*n*/) const { return a + b; }
  };

  template <class Params>
  FLASHGEN_DEVICE static HeadScales of(const Params& p, const DecodeItem& item, u8*) {
    const i64 k_place = item.sequence * p.k_scale_batch + item.head_kv * p.k_scale_head;
    const i64 v_place = item.sequence * p.v_scale_batch + item.head_kv * p.v_scale_head;
    return {p.k_scale == nullptr ? 1.0f : p.k_scale[k_place],
            p.v_scale == nullptr ? 1.0f : p.v_scale[v_place]};
  }
  FLASHGEN_DEVICE void fetch_scales(i32, const RequestedLocations&, Thread) const {}
  FLASHGEN_DEVICE SliceScales slice_scales(i32, Thread) const { return {k}; }
  FLASHGEN_DEVICE float output_scale() const { return v; }
};

// A number for each page, for the keys and for the values in it. They arrive in shared memory with the keys,
// at `offset`.
//
// A value's scale v is a factor of its column of P. Adding log(v) to the logits puts it into the
// exponentials, whatever its size. The sum of a row must not contain it, so weighted_sum() divides it out
// again.
template <i32 slice_keys, u32 offset>
struct PageScales {
  const float* k;
  const float* v;
  i64 k_row;
  i64 v_row;
  float* shared;

  struct SliceScales {
    static constexpr i32 blocks = slice_keys / 8;
    FloatPair k[blocks];
    FloatPair v[blocks];

    template <class Queries>
    FLASHGEN_DEVICE void apply_qk_scales(Accumulator<1, blocks>& scores, const Queries& queries) const {
      for_each_score(scores, [&](float& s, i32 h, i32 column) {
        s *= k[column / 8].values[column % 2] * queries.product_scale[h];
      });
    }
    FLASHGEN_DEVICE void add_log_v_scales(Accumulator<1, blocks>& logits) const {
      for_each_score(logits, [&](float& s, i32, i32 column) {
        s += log2_approx(v[column / 8].values[column % 2]) * kLn2;
      });
    }
    FLASHGEN_DEVICE float weighted_sum(float a, float b, i32 n) const {
      return fused_multiply_add(a, reciprocal_approx(v[n].values[0]), b * reciprocal_approx(v[n].values[1]));
    }
  };

  template <class Params>
  FLASHGEN_DEVICE static PageScales of(const Params& p, const DecodeItem& item, u8* base) {
    return {p.k_scale + item.head_kv * p.k_scale_head, p.v_scale + item.head_kv * p.v_scale_head,
            p.k_scale_page, p.v_scale_page, reinterpret_cast<float*>(base + offset)};
  }
  // Copies the scales of the slice's keys, then those of its values.
  FLASHGEN_DEVICE void fetch_scales(i32 slot, const RequestedLocations& requested, Thread thread) const {
#pragma unroll
    for (i32 first = 0; first < 2 * slice_keys; first += kWarpSize) {
      const i32 i = first + thread.lane, page = requested.locations[i % slice_keys].page;
      const bool exists = page >= 0;
      const i64 place = exists ? page : 0;
      const float* const from = i < slice_keys ? k + place * k_row : v + place * v_row;
      cp_async_4(shared_address(shared + slot * 2 * slice_keys + i), from,
                 exists ? static_cast<u32>(sizeof(float)) : 0u);
    }
  }
  FLASHGEN_DEVICE SliceScales slice_scales(i32 slot, Thread thread) const {
    const float* const first = shared + slot * 2 * slice_keys + thread.column();
    SliceScales found;
#pragma unroll
    for (i32 n = 0; n < SliceScales::blocks; ++n) {
      found.k[n] = *reinterpret_cast<const FloatPair*>(first + 8 * n);
      found.v[n] = *reinterpret_cast<const FloatPair*>(first + slice_keys + 8 * n);
      // A page of zeros may have the scale 0, which has no logarithm.
#pragma unroll
      for (i32 i = 0; i < 2; ++i) found.v[n].values[i] = maximum(found.v[n].values[i], 0x1p-100f);
    }
    return found;
  }
  FLASHGEN_DEVICE float output_scale() const { return 1.0f; }
};

// ---- The policy

template <DecodeConfig cfg, class T, class E, class Scales, bool by_instruction>
struct EightBitElement {
  using Stored = E;
  using Operand = half_t;
  static constexpr i32 dim = eight_bit_columns(cfg.head_dim);
  static constexpr i32 dim_v = eight_bit_columns(cfg.head_dim_v);
  using KSlice = SharedTile<E, cfg.slice_keys(), dim>;
  using VSlice = SharedTile<E, cfg.slice_keys(), dim_v>;
  using Keys = RightEightBitTransposed<KSlice, by_instruction>;
  using Values = RightEightBitRows<VSlice, by_instruction>;
  using Queries = EightBitQueries<cfg, T, cfg.holds_queries>;

  Scales scales;

  template <class Params>
  FLASHGEN_DEVICE static EightBitElement of(const Params& p, const DecodeItem& item, u8* base) {
    return {Scales::of(p, item, base)};
  }
  FLASHGEN_DEVICE void fetch_scales(i32 slot, const RequestedLocations& requested, Thread thread) const {
    scales.fetch_scales(slot, requested, thread);
  }
  FLASHGEN_DEVICE typename Scales::SliceScales slice_scales(i32 slot, Thread thread) const {
    return scales.slice_scales(slot, thread);
  }
  // Of each two blocks the first has the even columns of 16, and the second the odd ones. Neighbors belong
  // into one block.
  template <i32 blocks>
  FLASHGEN_DEVICE void scale_and_reorder(Accumulator<1, blocks>& out) const {
    const float factor = scales.output_scale();
#pragma unroll
    for (i32 n = 0; n < blocks; n += 2) {
#pragma unroll
      for (i32 h = 0; h < 2; ++h) {
        const float even = out[0][n][2 * h + 1] * factor;
        out[0][n][2 * h] *= factor;
        out[0][n][2 * h + 1] = out[0][n + 1][2 * h] * factor;
        out[0][n + 1][2 * h] = even;
        out[0][n + 1][2 * h + 1] *= factor;
      }
    }
  }
  FLASHGEN_DEVICE static i32 column(i32 n, Thread thread) {
    return 16 * (n / 2) + 2 * thread.column() + 2 * (n % 2);
  }
};

}  // namespace flashgen
