"""16-bit rows as e4m3 codes and scales of blocks: the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import oracle
from flashgen.oracle.eight_bits import values_of

DIMS = (16, 48, 80, 128, 256)


def rows_of(seed: int, *shape: int, spread: float = 0.0) -> Any:
    """Normal numbers, each row of a size of its own."""
    random = np.random.default_rng(seed)
    size = np.exp(random.uniform(-spread, spread, (*shape[:-1], 1)))
    return (size * random.standard_normal(shape)).astype(np.float16)


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_is_orthogonal_and_spreads_an_outlier_evenly_over_its_group(dim: int) -> None:
    rotation, group = oracle.rotation(dim), dim & -dim
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(dim), atol=1e-14)
    spread = np.abs(rotation[3])
    assert set(np.round(spread[:group] * np.sqrt(group), 12)) == {1.0}
    assert not spread[group:].any()


@pytest.mark.parametrize("dim", DIMS)
def test_a_row_of_equal_elements_does_not_become_an_outlier(dim: int) -> None:
    turned = np.ones(dim) @ oracle.rotation(dim)
    assert np.abs(turned).max() <= 0.75 * np.sqrt(dim & -dim)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(DIMS), st.sampled_from((64, 128)), st.booleans(), st.integers(1, 200), st.integers(0, 99))
def test_codes_times_scales_are_within_the_bound(dim: int, block: int, rotate: bool, rows: int, seed: int) -> None:
    x = rows_of(seed, 2, rows, 3, dim, spread=4.0)
    codes, scales = oracle.quantized_rows(x, block, rotate=rotate)
    exact = x.astype(np.float64) @ oracle.rotation(dim) if rotate else x.astype(np.float64)
    error = np.abs(oracle.dequantized_rows(codes, scales, block) - exact)
    assert (error <= oracle.quantization_error(x, scales, block, rotate=rotate)).all()


@pytest.mark.parametrize("rotate", [False, True])
def test_the_largest_magnitude_of_a_block_has_the_largest_code(rotate: bool) -> None:
    x = rows_of(1, 1, 300, 2, 64, spread=3.0)
    codes, scales = oracle.quantized_rows(x, 128, rotate=rotate)
    assert scales.shape == (1, 2, 3)
    for block in range(3):
        magnitudes = np.abs(values_of("e4m3")[codes[:, 128 * block : 128 * (block + 1)]])
        assert (magnitudes.max((0, 1, 3)) == 448).all()


def test_products_of_rotated_rows_are_those_of_the_rows() -> None:
    q, k = rows_of(2, 40, 128).astype(np.float64), rows_of(3, 50, 128).astype(np.float64)
    rotation = oracle.rotation(128)
    np.testing.assert_allclose((q @ rotation) @ (k @ rotation).T, q @ k.T, atol=1e-11)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rotate", [False, True])
def test_what_is_not_finite_becomes_nan_and_changes_no_other_row(bad: float, rotate: bool) -> None:
    x = rows_of(4, 1, 128, 1, 64)
    codes, scales = oracle.quantized_rows(x, 128, rotate=rotate)
    x[0, 7, 0, 9] = bad
    changed, same_scales = oracle.quantized_rows(x, 128, rotate=rotate)
    others = np.arange(128) != 7
    np.testing.assert_array_equal(changed[0, others], codes[0, others])
    np.testing.assert_array_equal(same_scales, scales)
    assert (changed[0, 7, 0] == 0x7F).sum() == (64 if rotate else 1)


def test_a_block_of_zeros_has_codes_of_zero_and_a_finite_positive_scale() -> None:
    codes, scales = oracle.quantized_rows(np.zeros((1, 64, 1, 16), np.float16), 64, rotate=True)
    assert not (codes & 0x7F).any()
    assert (scales > 0).all()
    assert np.isfinite(1 / scales).all()


def test_each_packed_sequence_begins_a_block() -> None:
    x, starts = rows_of(5, 300, 2, 32), np.array([3, 80, 80, 290], np.int32)
    codes, scales = oracle.quantized_packed_rows(x, starts, 64, rotate=True)
    assert scales.shape == (2, 300 // 64 + 3)
    for i, number in ((0, 0), (2, 80 // 64 + 2)):
        first, last = starts[i], starts[i + 1]
        alone, its_scales = oracle.quantized_rows(x[None, first:last], 64, rotate=True)
        np.testing.assert_array_equal(codes[first:last], alone[0])
        np.testing.assert_array_equal(scales[:, number : number + its_scales.shape[2]], its_scales[0])
    assert (codes[:3] == 0x7F).all()
    assert (codes[290:] == 0x7F).all()
