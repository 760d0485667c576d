// What the printed text of a mask or score is made of: integer division as Python has it, functions that are
// right at infinities and NaN, and captured tensors.
#pragma once
#include "flashgen/element.cuh"

namespace flashgen {

// ---- whole numbers

constexpr i32 kSmallestInt = -2147483647 - 1;
constexpr i32 kLargestInt = 2147483647;

// Towards minus infinity. A divisor of zero counts as one: the result is meaningless, but nothing traps.
FLASHGEN_DEVICE i32 floor_div(i32 a, i32 b) {
  if (b == -1) return static_cast<i32>(0u - static_cast<u32>(a));
  const i32 divisor = b == 0 ? 1 : b;
  const i32 quotient = a / divisor;
  return quotient - static_cast<i32>((quotient * divisor != a) & ((a < 0) != (divisor < 0)));
}

// With the sign of the divisor.
FLASHGEN_DEVICE i32 floor_mod(i32 a, i32 b) {
  if (b == -1) return 0;
  const i32 divisor = b == 0 ? 1 : b;
  const i32 rest = a % divisor;
  return rest + ((rest != 0) & ((rest < 0) != (divisor < 0)) ? divisor : 0);
}

// By a positive constant: shifts and masks for powers of two, otherwise multiplications.
template <i32 divisor>
FLASHGEN_DEVICE i32 floor_div(i32 a) {
  static_assert(divisor > 0, "only positive constants have a fast division");
  if constexpr ((divisor & (divisor - 1)) == 0) {
    i32 shift = 0;
    for (i32 power = divisor; power > 1; power /= 2) ++shift;
    return a >> shift;
  }
  return (a < 0 ? a - (divisor - 1) : a) / divisor;
}
template <i32 divisor>
FLASHGEN_DEVICE i32 floor_mod(i32 a) {
  static_assert(divisor > 0, "only positive constants have a fast remainder");
  if constexpr ((divisor & (divisor - 1)) == 0) return a & (divisor - 1);
  const i32 rest = a % divisor;
  return rest < 0 ? rest + divisor : rest;
}

// The next number, if there is one.
FLASHGEN_DEVICE i32 after(i32 x) { return x < kLargestInt ? x + 1 : x; }

// a * 2^count, which should fit: of what does not, the low 32 bits are kept. A negative count counts as zero.
FLASHGEN_DEVICE i32 shift_left(i32 a, i32 count) {
  return count < 32 ? static_cast<i32>(static_cast<u32>(a) << larger(0, count)) : 0;
}

// a / 2^count, towards minus infinity. A negative count counts as zero.
FLASHGEN_DEVICE i32 shift_right(i32 a, i32 count) { return a >> larger(0, smaller(count, 31)); }

FLASHGEN_DEVICE u32 every_bit(bool value) { return value ? ~0u : 0u; }

FLASHGEN_DEVICE i32 magnitude(i32 x) { return x < 0 ? -x : x; }

// An exact result moved to the nearest 32-bit number: bounds of tiles must not wrap around.
FLASHGEN_DEVICE i32 clamped(i64 x) {
  return x < kSmallestInt ? kSmallestInt : x > kLargestInt ? kLargestInt : static_cast<i32>(x);
}

FLASHGEN_DEVICE bool shuffle(bool value, i32 source_lane) {
  return shuffle(static_cast<i32>(value), source_lane) != 0;
}

template <class T>
FLASHGEN_DEVICE T select(bool condition, T then, T other) {
  return condition ? then : other;
}

// ---- floats; a NaN in gives a NaN out

FLASHGEN_DEVICE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
FLASHGEN_DEVICE float smaller(float a, float b) { return (a < b) | (a != a) ? a : b; }
FLASHGEN_DEVICE float larger(float a, float b) { return (a > b) | (a != a) ? a : b; }
FLASHGEN_DEVICE float reciprocal(float x) { return 1.0f / x; }

// e^x as 2^(x log2 e). The product is rounded, and what it lost is added afterwards: 2^(t + d) = 2^t + 2^t d
// ln 2.
FLASHGEN_DEVICE float exponential(float x) {
  constexpr float kLog2ERest = 0x1.4ae0cp-26f;  // log2 e - kLog2E
  const float exponent = x * kLog2E;
  const float rest = fused_multiply_add(x, kLog2ERest, fused_multiply_add(x, kLog2E, -exponent));
  const float power = exp2_approx(exponent);
  // At zero and infinity there is nothing to add, and `rest` may be NaN.
  return (power > 0.0f) & (power < kInfinity) ? fused_multiply_add(power, rest * kLn2, power) : power;
}

// Natural. Near one, where log2_approx is only absolutely exact, log x = 2 artanh((x - 1) / (x + 1)).
FLASHGEN_DEVICE float logarithm(float x) {
  const float t = (x - 1.0f) / (x + 1.0f);
  const float z = t * t;
  float series = 0x1.3b13b2p-4f;                           // 1/13
  series = fused_multiply_add(series, z, 0x1.745d18p-4f);  // 1/11
  series = fused_multiply_add(series, z, 0x1.c71c72p-4f);  // 1/9
  series = fused_multiply_add(series, z, 0x1.24924ap-3f);  // 1/7
  series = fused_multiply_add(series, z, 0x1.99999ap-3f);  // 1/5
  series = fused_multiply_add(series, z, 0x1.555556p-2f);  // 1/3
  series = 2.0f * fused_multiply_add(series * z, t, t);
  return (x > 0.5f) & (x < 2.0f) ? series : log2_approx(x) * kLn2;
}

// Half of the logarithm gives the root to 17 bits or more, and a step of Newton's the rest: 1 ulp. Numbers
// whose rest would be subnormal are multiplied by 2^64 first.
FLASHGEN_DEVICE float square_root(float x) {
  const bool is_small = x < 0x1p-64f;
  const float scaled = is_small ? x * 0x1p64f : x;
  const float near = exp2_approx(0.5f * log2_approx(scaled));
  const float rest = fused_multiply_add(-near, near, scaled);
  const float root = fused_multiply_add(rest, 0.5f * reciprocal_approx(near), near);
  // Zero and infinity are their own roots, and there `rest` is NaN.
  const bool is_own = (scaled == 0.0f) | (scaled == kInfinity);
  return is_own ? x : is_small ? root * 0x1p-32f : root;
}

// 1 / (1 + e^-x)
FLASHGEN_DEVICE float logistic(float x) { return reciprocal_approx(1.0f + exponential(-x)); }

// Numbers whose squares are below this are near zero, where some functions cost less.
constexpr float kNearZero = 0.36f;

FLASHGEN_DEVICE float squared(float x) { return x * x; }

// 1 - 2 / (e^2x + 1) for |x|, which loses digits near zero; there a polynomial (fitted; 0.1 ulp), which is
// all that is computed if it is known that x is there.
template <bool is_near = false>
FLASHGEN_DEVICE float hyperbolic_tangent(float x) {
  const float z = x * x;
  float series = -0x1.83f79ep-8f;
  series = fused_multiply_add(series, z, 0x1.55163ep-6f);
  series = fused_multiply_add(series, z, -0x1.b8a78ep-5f);
  series = fused_multiply_add(series, z, 0x1.110a24p-3f);
  series = fused_multiply_add(series, z, -0x1.555540p-2f);
  const float near = fused_multiply_add(series * z, x, x);
  if constexpr (is_near) return near;
  const float power = exp2_approx(magnitude(x) * (2.0f * kLog2E));
  const float far = fused_multiply_add(-2.0f, reciprocal_approx(power + 1.0f), 1.0f);
  return z < kNearZero ? near : float_of(bits_of(far) | (bits_of(x) & 0x80000000u));
}

// ---- captured tensors

// Strides count elements. Indices are moved into the tensor: rows and columns that pad a tile read something,
// and what it is does not matter.
template <class T, i32 rank>
struct Captured {
  static constexpr i32 kSlots = rank > 0 ? rank : 1;
  const T* pointer;
  i64 strides[kSlots];
  i32 sizes[kSlots];

  FLASHGEN_DEVICE i64 offset(i32 axis, i32 index) const {
    return strides[axis] * static_cast<i64>(larger(0, smaller(index, sizes[axis] - 1)));
  }
};

// An element as expressions see it: whole numbers and bools have 32 bits, all floats are float.
FLASHGEN_DEVICE i32 element_value(u8 x) { return x; }
FLASHGEN_DEVICE i32 element_value(signed char x) { return x; }
FLASHGEN_DEVICE i32 element_value(short x) { return x; }
FLASHGEN_DEVICE i32 element_value(i32 x) { return x; }
FLASHGEN_DEVICE i32 element_value(i64 x) { return static_cast<i32>(x); }
FLASHGEN_DEVICE float element_value(half_t x) { return to_float(x); }
FLASHGEN_DEVICE float element_value(bfloat16_t x) { return to_float(x); }
FLASHGEN_DEVICE float element_value(float x) { return x; }
FLASHGEN_DEVICE float element_value(double x) { return static_cast<float>(x); }

// Where a row along the last dimension begins.
template <class T, i32 rank, class... Indices>
FLASHGEN_DEVICE const T* row_of(const Captured<T, rank>& tensor, Indices... indices) {
  static_assert(sizeof...(Indices) + 1 == rank,
                "a row of a captured tensor takes one index per other dimension");
  i64 offset = 0;
  i32 axis = 0;
  ((offset += tensor.offset(axis++, indices)), ...);
  return tensor.pointer + offset;
}

template <class T, i32 rank, class... Indices>
FLASHGEN_DEVICE auto load(const Captured<T, rank>& tensor, Indices... indices) {
  static_assert(sizeof...(Indices) == rank, "a captured tensor takes one index per dimension");
  i64 offset = 0;
  i32 axis = 0;
  ((offset += tensor.offset(axis++, indices)), ...);
  return element_value(tensor.pointer[offset]);
}

// The extreme element over a rectangle of indices, both ends included; from `axis` on.
template <bool largest, i32 axis, class T, i32 rank>
FLASHGEN_DEVICE i32 extreme_in(const Captured<T, rank>& tensor, i64 offset, const i32 (&low)[rank],
                               const i32 (&high)[rank]) {
  if constexpr (axis == rank) {
    return element_value(tensor.pointer[offset]);
  } else {
    i32 found = largest ? kSmallestInt : kLargestInt;
    if (low[axis] > high[axis]) return found;
    const i32 last = tensor.sizes[axis] - 1;
    const i32 begin = larger(0, smaller(low[axis], last)), end = larger(0, smaller(high[axis], last));
    // Rectangles are a few elements wide, which are fetched together, the last one more than once perhaps: of
    // loops that fetch one after another, so that it takes no time, assemblers make eight copies.
    constexpr i32 together = axis + 1 == rank ? 4 : 1;
#pragma unroll 1
    for (i32 i = begin; i <= end; i += together) {
#pragma unroll
      for (i32 n = 0; n < together; ++n) {
        const i64 there = offset + tensor.strides[axis] * smaller(i + n, end);
        const i32 other = extreme_in<largest, axis + 1>(tensor, there, low, high);
        found = largest ? larger(found, other) : smaller(found, other);
      }
    }
    return found;
  }
}
template <class T, i32 rank>
FLASHGEN_DEVICE i32 smallest_in(const Captured<T, rank>& tensor, const i32 (&low)[rank],
                                const i32 (&high)[rank]) {
  return extreme_in<false, 0>(tensor, 0, low, high);
}
template <class T, i32 rank>
FLASHGEN_DEVICE i32 largest_in(const Captured<T, rank>& tensor, const i32 (&low)[rank],
                               const i32 (&high)[rank]) {
  return extreme_in<true, 0>(tensor, 0, low, high);
}

// The index along a dimension of the first element that is not less than a value, the dimension's size if
// there is none; and of the last one that is not more, or -1. By looking at one after another.
template <i32 axis, class T, i32 rank, class... Indices>
FLASHGEN_DEVICE Captured<T, 1> along(const Captured<T, rank>& tensor, Indices... others) {
  static_assert(sizeof...(Indices) + 1 == rank,
                "what lies along a dimension takes an index for each other one");
  i64 offset = 0;
  i32 dimension = 0;
  ((dimension += dimension == axis, offset += tensor.offset(dimension++, others)), ...);
  return {tensor.pointer + offset, {tensor.strides[axis]}, {tensor.sizes[axis]}};
}
template <i32 axis, class T, i32 rank, class... Indices>
FLASHGEN_DEVICE i32 first_at_least(const Captured<T, rank>& tensor, i32 value, Indices... others) {
  const Captured<T, 1> elements = along<axis>(tensor, others...);
  i32 i = 0;
  while (i < elements.sizes[0] && load(elements, i) < value) ++i;
  return i;
}
template <i32 axis, class T, i32 rank, class... Indices>
FLASHGEN_DEVICE i32 last_at_most(const Captured<T, rank>& tensor, i32 value, Indices... others) {
  const Captured<T, 1> elements = along<axis>(tensor, others...);
  i32 i = elements.sizes[0] - 1;
  while (i >= 0 && load(elements, i) > value) --i;
  return i;
}

// The extremes of the stretches of a row from `begin` to before `end`.
struct Extremes {
  const i32* entries;
  i32 begin, end;

  FLASHGEN_DEVICE i32 smallest() const {
    i32 found = kLargestInt;
#pragma unroll 1
    for (i32 i = begin; i < end; ++i) found = smaller(found, entries[2 * i]);
    return found;
  }
  FLASHGEN_DEVICE i32 largest() const {
    i32 found = kSmallestInt;
#pragma unroll 1
    for (i32 i = begin; i < end; ++i) found = larger(found, entries[2 * i + 1]);
    return found;
  }
};

// Rows of up to so many stretches are not searched: walks look at all of their tiles in less time.
constexpr i32 kFewStretches = 512;

// How many rows a tensor has along `axis`.
template <i32 axis, class T, i32 rank>
FLASHGEN_DEVICE i64 rows_along(const Captured<T, rank>& tensor) {
  i64 rows = 1;
#pragma unroll
  for (i32 i = 0; i < rank; ++i) rows *= i == axis ? 1 : tensor.sizes[i];
  return rows;
}

// What a survey has found out about a tensor along one dimension, for each `stretch` of elements of each row:
// the smallest and the largest of them; and behind those of all rows, if it is searched, the largest so far,
// and the smallest from there on, which never decrease from stretch to stretch.
template <class T, i32 rank, i32 axis, i32 stretch>
struct Survey {
  Captured<T, rank> tensor;
  const i32* table;

  FLASHGEN_DEVICE i32 stretches() const { return ceil_div(tensor.sizes[axis], stretch); }
  // The entries of one row, at the indices of the other dimensions.
  template <class... Indices>
  FLASHGEN_DEVICE const i32* entries(Indices... others) const {
    static_assert(sizeof...(Indices) + 1 == rank,
                  "a surveyed tensor takes one index for each other dimension");
    i64 row = 0;
    i32 dimension = 0;
    ((row = within(dimension, row, others)), ...);
    return table + 2 * row * stretches();
  }

  // Between two indices, both included. A stretch that is partly inside counts as a whole.
  template <class... Indices>
  FLASHGEN_DEVICE Extremes between(i32 low, i32 high, Indices... others) const {
    const i32 last = tensor.sizes[axis] - 1;
    const i32 begin = larger(0, smaller(low, last)) / stretch, end = larger(0, smaller(high, last)) / stretch;
    return {entries(others...), begin, low <= high ? end + 1 : begin};
  }
  // As first_at_least, but where the stretch begins that the element is in, or before that, ...
  template <class... Indices>
  FLASHGEN_DEVICE i32 first(i32 value, Indices... others) const {
    if (stretches() <= kFewStretches) return 0;
    const i32* const entry = entries(others...) + 2 * rows_along<axis>(tensor) * stretches();
    const i32 found = bisect([&](i32 i) { return entry[2 * i] >= value; });
    return smaller(found * stretch, tensor.sizes[axis]);
  }
  // ... and as last_at_most, but where it ends, or behind that.
  template <class... Indices>
  FLASHGEN_DEVICE i32 last(i32 value, Indices... others) const {
    if (stretches() <= kFewStretches) return tensor.sizes[axis] - 1;
    const i32* const entry = entries(others...) + 2 * rows_along<axis>(tensor) * stretches();
    const i32 found = bisect([&](i32 i) { return entry[2 * i + 1] > value; });
    return smaller(found * stretch, tensor.sizes[axis]) - 1;
  }

 private:
  FLASHGEN_DEVICE i64 within(i32& dimension, i64 row, i32 index) const {
    if (dimension == axis) ++dimension;
    const i32 size = tensor.sizes[dimension++];
    return row * size + larger(0, smaller(index, size - 1));
  }
  // The first stretch for which `reached(i)`, which holds for all that follow; as many as there are if for
  // none.
  FLASHGEN_DEVICE i32 bisect(const auto& reached) const {
    i32 begin = 0, end = stretches();
#pragma unroll 1
    while (begin < end) {
      const i32 middle = (begin + end) / 2;
      if (reached(middle)) {
        end = middle;
      } else {
        begin = middle + 1;
      }
    }
    return begin;
  }
};

}  // namespace flashgen
