from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

Array = np.ndarray[Any, Any]
#: Without the compiler's own 16-bit type, the header converts by hand.
PRELUDES = {"native": "", "by hand": "#undef __FLT16_MAX__"}
LOOP = "for (int i = thread_idx(); i < {n}; i += 32) "


def hard_floats() -> Array:
    """Every half value, the midpoints between them, arbitrary bit patterns, and all their neighbours."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.unique(halves[np.isfinite(halves)])
    middles = (finite[1:] + finite[:-1]) / 2
    arbitrary = np.random.default_rng(0).integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
    base = np.concatenate([halves, middles, arbitrary, np.float32([65504, 65519.996, 65520, 65536, np.inf])])
    with np.errstate(over="ignore", invalid="ignore"):
        return np.concatenate([base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(-np.inf))])


@pytest.mark.parametrize("prelude", PRELUDES.values(), ids=PRELUDES.keys())
def test_to_half_bits_rounds_to_nearest_even(run: Any, prelude: str) -> None:
    x = hard_floats()
    out = np.zeros(x.size, np.uint16)
    run(LOOP.format(n=x.size) + "out[i] = to_half_bits(x[i]);", prelude=prelude, x=x, out=out)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    expected[np.isnan(x)] = 0x7FFF
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("prelude", PRELUDES.values(), ids=PRELUDES.keys())
def test_half_to_float_is_exact(run: Any, prelude: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    out = np.zeros(bits.size, np.float32)
    run(LOOP.format(n=bits.size) + "out[i] = half_to_float(x[i]);", prelude=prelude, x=bits, out=out)
    expected = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(expected))


def test_pack_bfloat16_puts_the_first_value_low_and_rounds_to_nearest_even(run: Any) -> None:
    x = hard_floats()
    out = np.zeros(x.size, np.uint32)
    run(LOOP.format(n=x.size) + "out[i] = pack(bfloat16_t{}, x[i], -x[i]);", x=x, out=out)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    low, high = out & 0xFFFF, out >> 16
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(low[numbers], expected[numbers])
    np.testing.assert_array_equal(high[numbers], expected[numbers] ^ 0x8000)
    assert (low[~numbers] == 0x7FFF).all()


def test_packed_products_are_rounded_to_nearest_even(run: Any) -> None:
    bits = np.random.default_rng(1).integers(0, 2**16, (4, 20_000), dtype=np.uint16)
    numbers = bits.view(ml_dtypes.bfloat16)
    numbers[~np.isfinite(numbers.astype(np.float32))] = 1
    a, b = (low.astype(np.uint32) | high.astype(np.uint32) << 16 for low, high in (bits[:2], bits[2:]))
    out = np.zeros(a.size, np.uint32)
    run(LOOP.format(n=a.size) + "out[i] = multiply_packed(bfloat16_t{}, a[i], b[i]);", a=a, b=b, out=out)
    with np.errstate(over="ignore"):
        expected = (numbers[:2].astype(np.float32) * numbers[2:].astype(np.float32)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(out & 0xFFFF, expected[0].view(np.uint16))
    np.testing.assert_array_equal(out >> 16, expected[1].view(np.uint16))


def test_the_lower_of_packed_whole_numbers_is_found_for_each_half(run: Any) -> None:
    halves = np.random.default_rng(3).integers(-(2**15), 2**15, (2, 20_000, 2), dtype=np.int16)
    halves[0, :4] = halves[1, 2:6] = [[-(2**15), 0], [2**15 - 1, -1], [0, -(2**15)], [-1, 2**15 - 1]]
    a, b = (np.ascontiguousarray(x).view(np.uint32)[:, 0] for x in halves)
    out = np.zeros(a.size, np.uint32)
    run(LOOP.format(n=a.size) + "out[i] = minimum_packed(a[i], b[i]);", a=a, b=b, out=out)
    np.testing.assert_array_equal(out.view(np.int16).reshape(-1, 2), halves.min(0))


@pytest.mark.parametrize(("element", "dtype"), [("bfloat16_t", ml_dtypes.bfloat16), ("half_t", np.float16)])
def test_numbers_that_are_not_finite_are_found_in_each_half(run: Any, element: str, dtype: Any) -> None:
    every = np.arange(2**16, dtype=np.uint16)
    others = np.random.default_rng(4).permutation(every)
    halves = np.concatenate([np.stack([every, others], 1), np.stack([others, every], 1)])
    out = np.zeros(len(halves), np.uint32)
    x = halves.view(np.uint32)[:, 0]
    run(LOOP.format(n=x.size) + f"out[i] = not_finite_packed({element}{{}}, x[i]);", x=x, out=out)
    with np.errstate(invalid="ignore"):
        expected = np.where(np.isfinite(halves.view(dtype)), 0, 0x7FFF)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(-1, 2), expected)


def test_packed_products_of_probabilities_are_three_roundings_from_the_truth_at_most(run: Any) -> None:
    """However small the probability and however large the other factor: bf16 has the exponents of float32."""
    random = np.random.default_rng(2)
    p = np.exp2(-random.uniform(0, 126, 40_000) * (random.random(40_000) < 0.7)).astype(np.float32)
    x = (random.standard_normal(p.size) * np.exp2(random.uniform(-60, 124, p.size))).astype(np.float32)
    x[:200], p[:100] = np.float32(3.3895e38), 0
    out = np.zeros(p.size, np.uint32)
    product = "multiply_packed(bfloat16_t{}, pack(bfloat16_t{}, x[i], -x[i]), pack(bfloat16_t{}, p[i], p[i]))"
    run(LOOP.format(n=p.size) + f"out[i] = {product};", p=p, x=x, out=out)
    exact, step = p.astype(np.float64) * x, 2.0**-7
    for sign, bits in ((1, out << 16), (-1, out & 0xFFFF0000)):
        found = bits.astype(np.uint32).view(np.float32).astype(np.float64)
        assert np.isfinite(found).all()
        # Half a step each, and below the smallest normal number a step of those there.
        assert (np.abs(found - sign * exact) <= ((1 + step / 2) ** 3 - 1) * np.abs(exact) + 2.0**-133).all()


def test_exp2_is_close_and_flushes_subnormals(run: Any) -> None:
    x = np.concatenate([np.linspace(-160, 129, 30_001), [0.0, -np.inf, np.inf, np.nan]]).astype(np.float32)
    out = np.zeros_like(x)
    run(LOOP.format(n=x.size) + "out[i] = exp2_approx(x[i]);", x=x, out=out)
    with np.errstate(over="ignore"):
        expected = np.exp2(x.astype(np.float64))
    normal = (expected >= 2.0**-126) & (expected < 2.0**128)
    np.testing.assert_allclose(out[normal], expected[normal], rtol=2 * 2.0**-23)
    assert (out[expected < 2.0**-126] == 0).all()
    assert np.isposinf(out[expected >= 2.0**128]).all()
    assert np.isnan(out[-1])


def test_log2_is_close_and_log2_of_zero_is_minus_infinity(run: Any) -> None:
    x = np.concatenate([np.geomspace(1e-42, 1e38, 10_001), [0.0, np.inf, -1.0]]).astype(np.float32)
    out = np.zeros_like(x)
    run(LOOP.format(n=x.size) + "out[i] = log2_approx(x[i]);", x=x, out=out)
    np.testing.assert_allclose(out[:-3], np.log2(x[:-3].astype(np.float64)), rtol=2e-7, atol=2.0**-22)
    assert np.isneginf(out[-3])
    assert np.isposinf(out[-2])
    assert np.isnan(out[-1])


def test_reciprocal_is_close_and_flushes_subnormals(run: Any) -> None:
    x = np.concatenate([np.geomspace(2.0**-126, 3e38, 10_001), [0.0, np.inf, 1e-40]]).astype(np.float32)
    x = np.concatenate([x, -x, np.float32([np.nan])])
    out = np.zeros_like(x)
    run(LOOP.format(n=x.size) + "out[i] = reciprocal_approx(x[i]);", x=x, out=out)
    with np.errstate(divide="ignore", over="ignore"):
        expected = 1 / np.where(abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float64)
    expected[abs(expected) < 2.0**-126] = 0
    np.testing.assert_allclose(out, expected, rtol=2.0**-23)


def test_maximum_prefers_numbers_to_nan_and_plus_zero_to_minus_zero(run: Any) -> None:
    values = np.float32([np.nan, -np.inf, -1, -0.0, 0.0, 1, np.inf])
    a, b = (grid.ravel().copy() for grid in np.meshgrid(values, values))
    out = np.zeros_like(a)
    run(LOOP.format(n=a.size) + "out[i] = maximum(a[i], b[i]);", a=a, b=b, out=out)
    np.testing.assert_array_equal(out, np.fmax(a, b))
    zeros = (a == 0) & (b == 0)
    np.testing.assert_array_equal(np.signbit(out[zeros]), np.signbit(a[zeros]) & np.signbit(b[zeros]))


def test_maximum_magnitude_ignores_the_second_sign_and_keeps_nan(run: Any) -> None:
    values = np.float32([np.nan, -np.inf, -1, -0.0, 0.0, 1, np.inf])
    a, b = (grid.ravel().copy() for grid in np.meshgrid(values, values))
    out = np.zeros_like(a)
    run(LOOP.format(n=a.size) + "out[i] = maximum_magnitude(a[i], b[i]);", a=a, b=b, out=out)
    np.testing.assert_array_equal(out, np.maximum(a, np.abs(b)))
    assert not np.signbit(out[(a == 0) & (b == 0)]).any()


def test_fused_multiply_add_rounds_once(run: Any) -> None:
    x = np.float32([1 + 2.0**-12, 3.0])
    out = np.zeros(2, np.float32)
    run(
        "const int i = thread_idx() % 2; out[i] = fused_multiply_add(x[i], x[i], -1.0f);",
        x=x,
        out=out,
    )
    np.testing.assert_array_equal(out, np.float32([2.0**-11 + 2.0**-24, 8.0]))


def test_fused_multiply_add_clipped_rounds_once_and_clips_to_zero_and_one(run: Any) -> None:
    x = np.float32([-np.inf, -1, -1e-30, 0, 1e-30, 1 / 3, 0.5, 1 - 2.0**-24, 1, 1 + 2.0**-23, 3, np.inf, np.nan])
    a, b, c = (grid.ravel().copy() for grid in np.meshgrid(x, x, x))
    out = np.zeros_like(a)
    run(LOOP.format(n=a.size) + "out[i] = fused_multiply_add_clipped(a[i], b[i], c[i]);", a=a, b=b, c=c, out=out)
    unclipped = np.zeros_like(a)
    run(LOOP.format(n=a.size) + "out[i] = fused_multiply_add(a[i], b[i], c[i]);", a=a, b=b, c=c, out=unclipped)
    expected = np.where(np.isnan(unclipped), 0, np.clip(unclipped, 0, 1))
    np.testing.assert_array_equal(out, expected)
    assert not np.signbit(out).any()


def test_bits_of_and_float_of_keep_every_bit(run: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    out = np.zeros_like(bits)
    run(LOOP.format(n=bits.size) + "out[i] = bits_of(float_of(x[i]));", x=bits, out=out)
    np.testing.assert_array_equal(out, bits)
