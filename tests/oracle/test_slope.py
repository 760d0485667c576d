from __future__ import annotations

import math

import numpy as np
import pytest

from flashgen import oracle
from flashgen.oracle import CaseSlope, case_slope, pooled_slope
from flashgen.oracle.slope import first_of_equals

BOUND = 0.05
#: Of the errors below: far less than the bound, as errors of kernels are.
SPREAD = 0.005


def case(seed, factor=1.0, count=4000, size=1.0, bound=BOUND, spread=SPREAD, rounded_factor=1.0):
    """Results with random errors, times a factor."""
    random = np.random.default_rng(seed)
    exact = size * random.standard_normal(count)
    result, rounded = (f * exact + spread * random.standard_normal(count) for f in (factor, rounded_factor))
    return case_slope(result, exact, bound, rounded)


def test_exact_results_have_the_slope_1():
    exact = np.random.default_rng(0).standard_normal((2, 30, 3, 16))
    slope = pooled_slope([case_slope(exact, exact, BOUND, exact)])
    assert (slope.value, slope.rounded_value, slope.values, slope.cases) == (1.0, 1.0, exact.size, 1)
    assert slope.ok


@pytest.mark.parametrize("factor", [1.002, 0.998, 1.03, 0.5, 0.0, -1.0])
def test_a_factor_fails_though_every_element_is_within_its_bound(factor):
    slope = pooled_slope([case(seed, factor) for seed in range(20)])
    assert not slope.ok
    assert slope.value == pytest.approx(factor, abs=1e-4)
    assert slope.noise < 5e-4
    assert (slope.cases, slope.values) == (20, 80_000)


@pytest.mark.parametrize("factor", [1.0, 1.0008, 0.9992])
def test_a_slope_within_the_tolerance_passes(factor):
    assert pooled_slope([case(seed, factor) for seed in range(20)]).ok


def test_correct_results_pass_however_few_or_noisy_the_cases_are():
    random = np.random.default_rng(7)
    for seed in range(300):
        count, spread = int(random.choice((1, 3, 40, 2000))), float(random.choice((0.001, 0.01, 0.015)))
        cases = [case((seed, i), count=count, spread=spread) for i in range(random.integers(1, 12))]
        slope = pooled_slope(cases)
        assert slope is None or slope.ok, (seed, slope)


def test_hostile_cases_with_loose_bounds_neither_hide_a_factor_nor_look_like_one():
    # As where logits are near a million: values of thousands, bounds beyond them, and all results of a case too large.
    hostile = [case(seed, 1.02, size=1e3, bound=2e3, spread=10.0) for seed in range(50)]
    assert pooled_slope([*hostile, *(case(seed) for seed in range(20))]).ok
    assert not pooled_slope([*hostile, *(case(seed, 1.002) for seed in range(20))]).ok


def test_one_of_many_cases_that_is_far_off_is_seen():
    assert not pooled_slope([case(0, 1.2), *(case(seed) for seed in range(1, 40))]).ok


def test_equal_elements_count_once():
    alike = case_slope(np.full(5000, 0.5 * (1 + 2.0**-9)), np.full(5000, 0.5), 2.0**-7, np.full(5000, 0.5))
    one = case_slope(np.full(1, 0.5 * (1 + 2.0**-9)), np.full(1, 0.5), 2.0**-7, np.full(1, 0.5))
    assert alike.deviation == one.deviation == 2.0**-9
    assert alike.error_from_bounds == pytest.approx(one.error_from_bounds, rel=1e-12)
    assert pooled_slope([alike]).ok


def test_elements_of_fewer_pairs_share_their_errors():
    random = np.random.default_rng(3)
    p, do = random.random((40, 1)), random.standard_normal((1, 256))  # dV of one query
    result = p * (1 + 2.0**-8 * random.uniform(-1, 1, p.shape)) @ do
    bound = 2.0**-8 * np.abs(p @ do).max()
    few, many = (case_slope(result, p @ do, bound, result, pairs) for pairs in (40, None))
    assert few.error_from_bounds > 9 * many.error_from_bounds
    assert case_slope(result, p @ do, bound, result, 40 * 256).error_from_bounds == many.error_from_bounds


def test_a_bias_of_the_rounded_value_is_no_error_of_the_result():
    biased = [case(seed, 1.01, rounded_factor=1.0095) for seed in range(20)]
    assert pooled_slope(biased).ok
    # Only in its direction, and only as far.
    assert not pooled_slope([case(seed, 0.99, rounded_factor=1.0095) for seed in range(20)]).ok
    assert not pooled_slope([case(seed, 1.03, rounded_factor=1.0095) for seed in range(20)]).ok


def test_the_noise_is_never_more_than_the_bounds_allow():
    slope = pooled_slope([CaseSlope(0.3, -0.2, 0.01, 100), CaseSlope(-0.3, 0.2, 0.01, 100)])
    assert slope.noise == pytest.approx(5 * 0.01 / math.sqrt(2))


def test_errors_that_happen_to_be_0_do_not_make_the_noise_0():
    # A single element of bf16 is off by up to 2^-9 of itself, and the rounded run may have rounded it exactly.
    assert pooled_slope([CaseSlope(2.0**-9, 0.0, 2.0**-6, 1)]).ok


def test_cases_weigh_by_what_they_know():
    slope = pooled_slope([CaseSlope(0.01, 0.0, 0.001, 10), CaseSlope(-0.01, 0.0, 0.01, 10)])
    assert slope.value == pytest.approx(1 + (0.01 - 0.01 / 100) / 1.01)


def test_the_tolerance_of_lse_is_its_own():
    cases = [case(seed, 1 + 2e-5, bound=1e-5, spread=1e-7) for seed in range(5)]
    assert pooled_slope(cases).ok
    assert not pooled_slope(cases, oracle.LSE_SLOPE_TOLERANCE).ok


def test_values_that_are_not_finite_or_zero_say_nothing():
    exact = np.array([1.0, np.inf, np.nan, 0.0, 2.0, 3.0, 4.0])
    result = np.array([1.5, np.inf, np.nan, 9.0, np.nan, 3.0, 4.0])
    bound = np.array([1.0, 1.0, 1.0, 1.0, 1.0, np.inf, 0.0])
    found = case_slope(result, exact, bound, exact)
    assert (found.deviation, found.values) == (0.5, 1)


@pytest.mark.parametrize(
    ("result", "exact", "bound"),
    [
        (np.zeros((0, 3)), np.zeros((0, 3)), 1.0),
        (np.ones((2, 3)), np.ones((3, 2)), 1.0),
        (np.ones(3), np.zeros(3), 1.0),
        (np.ones(3), np.ones(3), 0.0),
        (np.full(3, 1e-16), np.full(3, 1e-16), 1e300),
        (np.array(None), np.ones(3), 1.0),
    ],
    ids=["empty", "shapes", "zeros", "no bound", "bound too loose for floating point", "no result"],
)
def test_what_cannot_tell_has_no_slope(result, exact, bound):
    assert case_slope(result, exact, bound, exact) is None


def test_a_run_whose_cases_cannot_tell_1_from_0_has_no_slope():
    assert pooled_slope([]) is None
    assert pooled_slope([None, None]) is None
    assert pooled_slope([CaseSlope(3e12, -2e12, 1e13, 100)]) is None


def test_elements_below_the_range_of_float32_tell_nothing():
    exact = np.array([1e-200, 1e-150])
    assert case_slope(np.zeros(2), exact, 1.0, np.zeros(2)) is None
    with_one = case_slope(np.array([0.0, 0.0, 1.0]), np.array([*exact, 1.0]), 1.0, np.array([0.0, 0.0, 1.0]))
    assert (with_one.values, with_one.deviation) == (1, 0.0)


@pytest.mark.parametrize("count", [1, 2, 5, 3000])
def test_of_equal_elements_the_first_one_counts(count):
    # As fp16 has them: many are equal, some are 0 or too large for float32.
    sizes = np.abs(np.random.default_rng(count).standard_normal(count)).astype(np.float16).astype(np.float32)
    sizes[::7], sizes[::11] = 0.0, np.inf
    assert first_of_equals(sizes).tolist() == np.unique(sizes, return_index=True)[1].tolist()
