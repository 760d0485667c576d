"""Sums of floats that are exact, whatever the order in which they are added."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

PRELUDE = '#include "flashgen/accumulator.cuh"'
WORDS = 13
#: Every thread adds the terms of all sums, from a place of its own on.
BODY = """
const Accumulators sums{reinterpret_cast<u64*>(words), elements[0]};
if (block_idx_x() == 0 && thread_idx() == 0) counts[0] = kAccumulatorWords;
for (i32 i = block_idx_x() * 64 + thread_idx(); i < terms[0]; i += 192) {
  for (i32 element = 0; element < elements[0]; ++element) sums.add(element, x[element * terms[0] + i]);
}
"""
STORE = """
const Accumulators sums{reinterpret_cast<u64*>(words), elements[0]};
const i32 element = thread_idx();
if (element < elements[0]) out[element] = static_cast<float>(sums.sum(element));
"""
CLEAR = "Accumulators{reinterpret_cast<u64*>(words), 4}.clear(thread_idx() % 4);"


def sums(run: Any, x: np.ndarray[Any, Any], **options: Any) -> np.ndarray[Any, Any]:
    """What three blocks make of the rows of x."""
    elements, terms = (np.array([n], np.int32) for n in x.shape)
    words = np.zeros(2 * WORDS * x.shape[0], np.uint32)
    out, counts = np.full(x.shape[0], np.nan, np.float32), np.zeros(1, np.int32)
    common = {"prelude": PRELUDE, "words": words, "elements": elements}
    run(BODY, threads=64, blocks=3, x=x, terms=terms, counts=counts, **common, **options)
    assert counts[0] == WORDS
    run(STORE, threads=64, out=out, **common)
    return out


def exact(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Each row's sum, rounded once."""
    with np.errstate(over="ignore"):
        return np.array([rounded(row) for row in x], np.float32)


def rounded(row: np.ndarray[Any, Any]) -> np.float32:
    """``math.fsum`` rounds to float64; a scale keeps that from being a second rounding that matters."""
    total = math.fsum(float(value) for value in row)
    near = np.float32(total)
    if not np.isfinite(near):
        return near
    # Of the floats around it, the one nearest to the exact sum: the differences are summed exactly.
    around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(around, key=lambda f: abs(math.fsum([*map(float, row), -float(f)])))


def wild(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Floats of every exponent, subnormal ones included."""
    bits = rng.integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(0)).astype(np.float32)


@pytest.mark.parametrize("schedule", ["sequential", "reverse", "random"])
def test_floats_of_all_magnitudes_add_up_exactly(run: Any, schedule: str) -> None:
    rng = np.random.default_rng(0)
    x = wild(rng, (48, 90))
    # Some rows of narrow magnitudes, some that cancel but for a little, and some that are tiny.
    x[8:16] = rng.standard_normal((8, 90))
    x[16:24, 45:] = -x[16:24, :45]
    x[16:20, 0] = np.float32(1e-42)
    x[24:32] = (rng.standard_normal((8, 90)) * 1e-41).astype(np.float32)
    x[32:40] = np.abs(x[32:40])
    x[40] = 0
    np.testing.assert_array_equal(sums(run, x, schedule=schedule, seed=1), exact(x))


def test_the_order_of_the_terms_is_of_no_importance(run: Any) -> None:
    rng = np.random.default_rng(1)
    x = wild(rng, (8, 64))
    expected = sums(run, x)
    for seed in range(3):
        shuffled = rng.permuted(x, axis=1)
        found = sums(run, shuffled, schedule="random", seed=seed)
        assert found.tobytes() == expected.tobytes()


def test_a_tie_goes_to_the_even_float_unless_a_crumb_decides(run: Any) -> None:
    tiny = np.float32(2.0**-149)
    x = np.zeros((6, 3), np.float32)
    x[0] = 1, 2.0**-24, 0
    x[1] = 1, 2.0**-24, tiny
    x[2] = 1, 2.0**-24, -tiny
    x[3] = 1 + 2.0**-23, 2.0**-24, 0
    x[4] = -1, -(2.0**-24), -tiny
    x[5] = 2.0**127, 2.0**127 * (1 - 2.0**-24), -tiny
    one = np.float32(1)
    above = np.nextafter(one, np.float32(2))
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(sums(run, x), [one, above, one, np.float32(1 + 2.0**-22), -above, largest])


def test_what_no_float_holds_becomes_infinite_and_comes_back(run: Any) -> None:
    x = np.zeros((3, 64), np.float32)
    largest = np.finfo(np.float32).max
    x[0] = largest
    x[1] = -largest
    x[2, :32], x[2, 32:] = largest, -largest
    np.testing.assert_array_equal(sums(run, x), [np.inf, -np.inf, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_own_sum_nan(run: Any, bad: float) -> None:
    x = np.ones((3, 10), np.float32)
    x[1, 4] = bad
    found = sums(run, x)
    assert found[0] == found[2] == 10
    assert np.isnan(found[1])


def test_clearing_leaves_nothing(run: Any) -> None:
    words = np.full(2 * WORDS * 4, 0xABCD, np.uint32)
    run(CLEAR, prelude=PRELUDE, words=words)
    assert not words.any()


def test_two_blocks_may_add_at_once(run: Any) -> None:
    x = np.ones((2, 96), np.float32)
    np.testing.assert_array_equal(sums(run, x, race=True), [96, 96])
