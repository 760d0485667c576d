"""Sine, cosine, tangent and square root of the kernels are right for every float, however large."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]
FUNCTIONS: dict[str, tuple[Callable[[float], float], float]] = {
    "sine": (math.sin, 3.0),
    "cosine": (math.cos, 3.0),
    "tangent": (math.tan, 5.0),
}


def angles() -> Array:
    """Floats of every size, multiples of a right angle, and where one way to reduce an angle follows another."""
    rng = np.random.default_rng(11)
    any_bits = rng.integers(0, 0x7F800000, 20_000).astype(np.uint32).view(np.float32)
    right = (np.arange(1, 20_000) * (np.pi / 2)).astype(np.float32)
    large = (np.arange(1, 2_000) * (np.pi / 2) * 2.0**40).astype(np.float32)
    edge = (np.float32(2**20).view(np.int32) + np.arange(-500, 500, dtype=np.int32)).view(np.float32)
    positive = np.concatenate([any_bits, right, large, edge, rng.uniform(0, 1000, 20_000).astype(np.float32)])
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_angles_are_right_to_a_few_units_in_the_last_place(column: Any, name: str) -> None:
    function, most = FUNCTIONS[name]
    x = angles()
    out = np.zeros_like(x)
    column(f"params.out[i] = {name}(params.x[i]);", x, out)
    exact = np.array([function(angle) for angle in x.astype(np.float64)])
    ulp = np.maximum(np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64), 2.0**-149)
    error = abs(out - exact) / ulp
    assert error.max() < most, f"{error.max():.2f} ulp at {x[np.argmax(error)]}"


def test_square_roots_are_right_to_a_unit_in_the_last_place(column: Any) -> None:
    rng = np.random.default_rng(12)
    x = rng.integers(0, 0x7F800000, 50_000).astype(np.uint32).view(np.float32)
    x = np.concatenate([x, np.arange(1, 500, dtype=np.uint32).view(np.float32), np.float32(np.arange(500)) ** 2])
    out = np.zeros_like(x)
    column("params.out[i] = square_root(params.x[i]);", x, out)
    exact = np.sqrt(x.astype(np.float64))
    assert np.max(abs(out - exact) / np.spacing(exact.astype(np.float32))) < 1.0


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("sine", (np.nan, np.nan, 0.0)),
        ("cosine", (np.nan, np.nan, 1.0)),
        ("tangent", (np.nan, np.nan, 0.0)),
        ("square_root", (np.nan, np.inf, 0.0)),
    ],
)
def test_functions_are_right_at_infinities_zero_and_nan(
    column: Any, name: str, limits: tuple[float, float, float]
) -> None:
    x = np.float32([-np.inf, np.inf, 0.0, np.nan])
    out = np.zeros_like(x)
    column(f"params.out[i] = {name}(params.x[i]);", x, out)
    np.testing.assert_array_equal(out, np.float32([*limits, np.nan]))
