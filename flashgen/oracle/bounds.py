"""How far from the oracle a result may be, and whether it is within that.

The rule: the largest error of a tensor is at most twice the largest error of the same computation done in
the spec's dtype with float32 softmax. Any one run of that computation may be right by luck, and its largest
error hangs on a few elements; so it is run several times, with roundings that go the way another order of
summation could have sent them, and the worst run counts. Small problems get one rounding on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.dtypes import FP32, DType
from flashgen.oracle.attention import backward, forward
from flashgen.oracle.rounded import Arithmetic, Floats32, evaluate
from flashgen.spec import AttentionSpec

LSE_TOLERANCE = 1e-5
FACTOR = 2.0
#: Jittered runs of the yardstick: many while that is cheap, and luck likely.
SMALL_PROBLEM = 2**15
SMALL_RUNS, LARGE_RUNS = 8, 1


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """The largest allowed error of each tensor (of each element for ``lse``)."""

    o: float
    lse: NDArray[np.float64]
    dq: float | None = None
    dk: float | None = None
    dv: float | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The error and the bound where their ratio is worst; ``note`` says what else is wrong."""

    max_error: float
    bound: float
    ok: bool
    note: str = ""

    @property
    def ratio(self) -> float:
        """Error over bound; at most 1 when all is well."""
        if not self.ok and not np.isfinite(self.max_error):
            return float("inf")
        return _ratio(self.max_error, self.bound)


def bounds(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    do: Any = None,
    scale: float | None = None,
    *,
    exact: Sequence[NDArray[np.float64]] | None = None,
) -> Bounds:
    """The bounds for these inputs; ``exact`` is the oracle's (o, lse) or (o, lse, dq, dk, dv) where known."""
    if exact is None:
        exact = forward(spec, q, k, v, scale=scale)
        exact = exact if do is None else (*exact, *backward(spec, q, k, v, do, scale=scale))
    small = max(x.size for x in exact) <= SMALL_PROBLEM
    runs = SMALL_RUNS if small else LARGE_RUNS
    kinds = [Arithmetic(spec.element), *(JitteredArithmetic(spec.element, seed) for seed in range(runs))]
    results = [evaluate(arithmetic, spec, q, k, v, do, scale=scale) for arithmetic in kinds]
    limits: dict[str, float] = {}
    for name, reference in zip(("o", "lse", "dq", "dk", "dv"), exact, strict=False):
        if name != "lse":
            worst = max(_largest_error(getattr(result, name), reference) for result in results)
            largest = float(np.abs(reference[np.isfinite(reference)]).max(initial=0.0))
            one_rounding = spec.element.epsilon * largest
            limits[name] = FACTOR * worst + one_rounding if small else max(FACTOR * worst, one_rounding)
    lse = exact[1]
    lse_limit = LSE_TOLERANCE * np.maximum(1.0, np.where(np.isfinite(lse), np.abs(lse), 1.0))
    return Bounds(lse=lse_limit, **limits)


def check(
    result: Any,
    exact: NDArray[np.float64],
    bound: float | NDArray[np.float64],
    *,
    exact_infinity: bool = False,
) -> Check:
    """Compare a result with the oracle; anything but ``error <= bound`` everywhere fails, NaN included.

    Where the oracle is finite the result must be, and where it is not the result must not be either; with
    ``exact_infinity`` (for LSE) minus infinity must be minus infinity.
    """
    actual = np.asarray(result)
    largest_bound = float(np.max(bound, initial=0.0))
    if actual.shape != exact.shape:
        return Check(np.inf, largest_bound, False, f"shape {actual.shape} is not {exact.shape}")
    actual = actual.astype(np.float64)
    finite = np.isfinite(exact)
    if np.any(finite != np.isfinite(actual)):
        where = tuple(int(i) for i in np.argwhere(finite != np.isfinite(actual))[0])
        return Check(np.inf, largest_bound, False, f"at {where} it is {actual[where]}, the oracle {exact[where]}")
    if exact_infinity and np.any((exact == -np.inf) != (actual == -np.inf)):
        return Check(np.inf, largest_bound, False, "minus infinity is missing, or where it should not be")
    error = np.where(finite, np.abs(np.where(finite, actual, 0.0) - np.where(finite, exact, 0.0)), 0.0).ravel()
    if error.size == 0:
        return Check(0.0, largest_bound, True)
    limit = np.broadcast_to(bound, exact.shape).ravel()
    worst = int(np.argmax(error / np.maximum(limit, np.finfo(np.float64).tiny)))
    ok = not np.any(~(error <= limit))
    return Check(float(error[worst]), float(limit[worst]), bool(ok))


class JitteredArithmetic(Arithmetic):
    """Moves every result at random within one rounding: the errors that another order could make."""

    def __init__(self, element: DType, seed: int) -> None:
        super().__init__(element)
        self.random = np.random.default_rng(seed)

    def store(self, x: Floats32) -> Floats32:
        """Anywhere within half a step of the dtype, as rounding to nearest leaves it."""
        half_step = np.ldexp(np.float32(self.element.epsilon), np.frexp(x)[1] - 1)
        if self.element.name == "fp16":  # steps shrink no more below the smallest normal number
            half_step = np.maximum(half_step, np.float32(2.0**-25))
        return self._jitter(x, np.where(x == 0, np.float32(0), half_step))

    def dot(self, a: Floats32, b: Floats32) -> Floats32:
        """Within two float32 roundings of the sum of magnitudes, unless float32 gives the product exactly."""
        product = super().dot(a, b)
        if np.array_equal(product, a.astype(np.float64) @ b.astype(np.float64), equal_nan=True):
            return product
        return self._jitter(product, np.float32(2 * FP32.epsilon) * (np.abs(a) @ np.abs(b)))

    def row_sum(self, x: Floats32) -> Floats32:
        """Within one float32 rounding of the sum of magnitudes."""
        return self._jitter(super().row_sum(x), np.float32(FP32.epsilon) * np.abs(x).sum(axis=1))

    def single(self, x: Floats32) -> Floats32:
        """Within a few roundings, as products with log2(e) and the hardware's exponential are."""
        return self._jitter(x, np.float32(6 * FP32.epsilon) * np.abs(x))

    def _jitter(self, x: Floats32, amplitude: Floats32) -> Floats32:
        noise = amplitude * self.random.uniform(-1.0, 1.0, x.shape)
        return np.asarray(x + np.where(np.isfinite(noise), noise, 0.0), dtype=np.float32)


def _largest_error(actual: Floats32 | None, exact: NDArray[np.float64]) -> float:
    assert actual is not None
    both = np.isfinite(exact) & np.isfinite(actual)
    return float(np.abs(actual[both] - exact[both]).max(initial=0.0))


def _ratio(error: float, bound: float) -> float:
    return error / bound if bound > 0 else 0.0 if error == 0 else float("inf")
