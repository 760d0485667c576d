"""8-bit floats in the oracle: the values of the codes, and the code that a number is stored as."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashgen import oracle

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
CODES = np.arange(256, dtype=np.uint8)
HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_worth_what_another_library_says(dtype: str) -> None:
    values, theirs = oracle.values_of(dtype), CODES.view(DTYPES[dtype]).astype(np.float64)
    np.testing.assert_array_equal(values, theirs)
    numbers = ~np.isnan(theirs)
    assert np.array_equal(np.signbit(values[numbers]), np.signbit(theirs[numbers]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_float_in_range_is_rounded_to_the_nearest_even(dtype: str) -> None:
    x = HALVES[np.abs(HALVES.astype(np.float64)) <= LARGEST[dtype]]
    np.testing.assert_array_equal(oracle.quantized(dtype, x), x.astype(DTYPES[dtype]).view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_too_large_is_the_largest_and_nan_stays_nan(dtype: str) -> None:
    x = np.array([1e30, np.inf, LARGEST[dtype] * 1.2, -np.inf, -1e9, np.nan], np.float32)
    found = oracle.values_of(dtype)[oracle.quantized(dtype, x)]
    np.testing.assert_array_equal(found, LARGEST[dtype] * np.array([1, 1, 1, -1, -1, np.nan]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-9])
def test_a_stored_number_is_within_the_bound(dtype: str, scale: float) -> None:
    random = np.random.default_rng(0)
    x = (random.standard_normal(20000) * np.exp2(random.uniform(-12, 6, 20000))).astype(np.float32) * scale
    x = x[np.abs(x) <= LARGEST[dtype] * scale]
    scale32 = np.float32(scale)
    found = oracle.values_of(dtype)[oracle.quantized(dtype, x, scale32)] * scale32
    error, bound = np.abs(found - x), oracle.rounding_error(dtype, x, scale32)
    assert (error <= bound).all()
    # The bound is not a loose one.
    assert (error / bound).max() > 0.99


def test_a_zero_keeps_its_sign() -> None:
    assert oracle.quantized("e4m3", np.array([0.0, -0.0], np.float32)).tolist() == [0x00, 0x80]
