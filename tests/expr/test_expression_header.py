"""What printed C++ calls, ``flashgen/expression.cuh``: functions, divisions, loads and extremes of rectangles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]


FLOATS = np.unique(
    np.concatenate(
        [sign * np.geomspace(1e-30, reach, 20_001) for reach in (80.0, 1.0) for sign in (1, -1)]
        + [np.linspace(-20, 20, 20_001), np.linspace(0.4, 2.1, 5_001)]
    ).astype(np.float32)
)
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "exponential": np.exp,
    "logarithm": lambda x: np.log(np.where(x > 0, x, 1)),
    "hyperbolic_tangent": np.tanh,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_right_to_a_few_units_in_the_last_place(column: Any, name: str) -> None:
    x = np.where(FLOATS > 0, FLOATS, 1).astype(np.float32) if name == "logarithm" else FLOATS
    out = np.zeros_like(x)
    column(f"params.out[i] = {name}(params.x[i]);", x, out)
    expected = FUNCTIONS[name](x.astype(np.float64))
    ulp = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    worst = np.max(abs(out - expected) / ulp)
    assert worst < 3, f"{worst:.2f} ulp at {x[np.argmax(abs(out - expected) / ulp)]}"


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("exponential", (0.0, np.inf, 1.0)),
        ("logarithm", (np.nan, np.inf, -np.inf)),
        ("hyperbolic_tangent", (-1.0, 1.0, 0.0)),
        ("logistic", (0.0, 1.0, 0.5)),
        ("magnitude", (np.inf, np.inf, 0.0)),
    ],
)
def test_functions_are_right_at_infinities_zero_and_nan(
    column: Any, name: str, limits: tuple[float, float, float]
) -> None:
    x = np.float32([-np.inf, np.inf, 0.0, np.nan])
    out = np.zeros_like(x)
    column(f"params.out[i] = {name}(params.x[i]);", x, out)
    np.testing.assert_array_equal(out, np.float32([*limits, np.nan]))


def test_near_zero_a_tangent_is_the_same_number_by_less(column: Any) -> None:
    x = FLOATS[np.square(FLOATS) < np.float32(0.36)]
    both = np.zeros((2, x.size), np.float32)
    column("params.out[i] = hyperbolic_tangent(params.x[i]);", x, both[0])
    column("params.out[i] = hyperbolic_tangent<true>(params.x[i]);", x, both[1])
    assert both[0].tobytes() == both[1].tobytes()


def test_a_tangent_has_no_step_where_its_polynomial_ends(column: Any) -> None:
    edge = np.sqrt(np.float32(0.36)).view(np.int32) + np.arange(-2000, 2000, dtype=np.int32)
    x = np.concatenate([edge.view(np.float32), -edge.view(np.float32)])
    out = np.zeros_like(x)
    column("params.out[i] = hyperbolic_tangent(params.x[i]);", x, out)
    is_near = np.square(x) < np.float32(0.36)
    assert is_near.any()
    assert not is_near.all()
    exact = np.tanh(x.astype(np.float64))
    # What either side is off by, in units of the last place, and so the most that the two can be apart.
    error = (out - exact) / np.spacing(np.float32(0.537))
    assert abs(error[is_near]).max() < 0.75
    assert abs(error[~is_near]).max() < 2.5


def test_minimum_and_maximum_keep_nan_from_either_side(column: Any) -> None:
    values = np.float32([np.nan, -np.inf, -1.5, 0, 2, np.inf])
    x = np.stack([g.ravel() for g in np.meshgrid(values, values)])
    for name, function in (("smaller", np.minimum), ("larger", np.maximum)):
        out = np.zeros(x.shape[1], np.float32)
        column(f"params.out[i] = {name}(params.x[i], params.x[i + {x.shape[1]}]);", x, out)
        np.testing.assert_array_equal(out, function(*x))


INTS = np.int32([-(2**31), -(2**31) + 1, -1000, -64, -7, -2, -1, 0, 1, 2, 6, 7, 63, 64, 1000, 2**31 - 1])


def test_integer_division_is_pythons(column: Any) -> None:
    a, b = (g.ravel() for g in np.meshgrid(INTS, INTS))
    x = np.stack([a, b])
    for name, function in (("floor_div", np.floor_divide), ("floor_mod", np.remainder)):
        out = np.zeros(a.size, np.int32)
        column(f"params.out[i] = {name}(params.x[i], params.x[i + {a.size}]);", x, out)
        wide = function(a.astype(np.int64), np.where(b == 0, 1, b))
        # The smallest int over -1 is one too large, and wraps around.
        np.testing.assert_array_equal(out, wide.astype(np.int32))


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 64, 100, 2**30, 2**31 - 1])
def test_division_by_a_constant_is_pythons(column: Any, divisor: int) -> None:
    # Without the few dividends for which rounding down would leave 32 bits on the way.
    x = INTS[INTS.astype(np.int64) >= -(2**31) + divisor]
    for name, function in (("floor_div", np.floor_divide), ("floor_mod", np.remainder)):
        out = np.zeros_like(x)
        column(f"params.out[i] = {name}<{divisor}>(params.x[i]);", x, out)
        np.testing.assert_array_equal(out, function(x.astype(np.int64), divisor))


def test_loads_outside_of_a_tensor_are_moved_into_it(column: Any) -> None:
    x, out = np.int32([10, 11, 12]), np.zeros(6, np.int32)
    body = "const Captured<i32, 1> x{params.x, {1}, {3}}; params.out[i] = load(x, 2 * i - 4);"
    column(body, x, out)
    np.testing.assert_array_equal(out, [10, 10, 10, 12, 12, 12])


def test_extremes_over_rectangles(column: Any) -> None:
    x = np.arange(12, dtype=np.int32) * 5 % 12
    table, out = x.reshape(3, 4), np.zeros(4, np.int32)
    column(
        "const Captured<i32, 2> x{params.x, {4, 1}, {3, 4}};"
        "params.out[0] = smallest_in(x, {1, 1}, {2, 2}); params.out[1] = largest_in(x, {0, -5}, {1, 9});"
        "params.out[2] = smallest_in(x, {1, 2}, {0, 3}); params.out[3] = largest_in(x, {0, 3}, {2, 2});",
        x,
        out,
    )
    assert out.tolist() == [table[1:3, 1:3].min(), table[:2].max(), 2**31 - 1, -(2**31)]
