"""Whether results are off by a factor: the regression slope of a result on the oracle, pooled over the cases of a run.

A bound of each element cannot see such an error where rounding alone may take elements further. The slope can: it
averages rounding errors out. A case gives the slope of weighted least squares through the origin, in which an element
weighs ``1 / bound**2``. Cases are pooled by how well each knows its slope, so that hostile values and loose bounds
count little. The test fails when the pooled slope is further from 1 than the tolerance and its noise.

The noise comes from how far the slopes of cases lie apart: those of a rounded run, which is the same computation in
the spec's dtype, with or without those of the result, whichever gives less. Few cases know little about that, so
Student's factor multiplies it. It is never more than the bounds allow. A bias of the rounded run itself, as LSE in
float32 has near a million, is no error of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: How far from 1 the slope of an output may be, noise aside.
SLOPE_TOLERANCE = 1e-3
#: The same of LSE, whose elements are held to a relative error of this.
LSE_SLOPE_TOLERANCE = 1e-5
#: Rounding errors of a case may share a sign: by this share of their bounds.
_ALIGNED_SHARE = 0.02
#: Standard errors that count as noise, where many cases tell what those are.
_STANDARD_ERRORS = 3.5
#: The most noise that the bounds of the cases allow, in standard errors by the bounds.
_MOST_BY_BOUNDS = 5.0
#: The smallest normal number of float32.
_SMALLEST = 2.0**-126
#: Where rounded values happen to be exact, a standard error is still this share of that by the bounds.
_LEAST_BY_BOUNDS = 0.05


@dataclass(frozen=True, slots=True)
class CaseSlope:
    """What one output of one case says about the slope."""

    #: The slope of the result, less 1.
    deviation: float
    #: The same of the rounded run.
    rounded_deviation: float
    #: The standard error of both, as far as the bounds tell: far more than it usually is.
    error_from_bounds: float
    #: Elements that are finite and not near zero.
    values: int


@dataclass(frozen=True, slots=True)
class Slope:
    """The slope of one output over the cases of a run."""

    value: float
    #: How far from 1 noise alone may take it.
    noise: float
    #: The slope of the rounded run.
    rounded_value: float
    values: int
    cases: int
    tolerance: float = SLOPE_TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether the slope is 1, or what the rounded run has instead, within tolerance and noise."""
        room = self.tolerance + self.noise
        return min(1.0, self.rounded_value) - room <= self.value <= max(1.0, self.rounded_value) + room


def case_slope(
    result: Any,
    exact: NDArray[np.float64],
    bound: float | NDArray[np.float64],
    rounded: Any,
    pairs: int | None = None,
) -> CaseSlope | None:
    """The slope of one output; None if no element can tell.

    ``rounded`` is the output of the rounded run. ``pairs`` is the number of pairs of a query and a key behind the
    output: with fewer pairs than elements, elements share the rounding errors of P.
    """
    actual, one_run = np.asarray(result), np.asarray(rounded)
    if actual.shape != exact.shape:
        return None
    with np.errstate(all="ignore"):
        actual, one_run = actual.astype(np.float64), one_run.astype(np.float64)
        limit = np.broadcast_to(np.asarray(bound, np.float64), exact.shape)
        finite = np.isfinite(exact) & np.isfinite(actual) & np.isfinite(one_run) & np.isfinite(limit)
        # What float32 cannot hold is no result of a kernel, and its square may be 0 in float64, too.
        usable = finite & (np.abs(exact) >= _SMALLEST) & (limit > 0.0)
        x, limit = exact[usable], limit[usable]
        size = x / limit
        weight = float(size @ size)
        if not 0.0 < weight < math.inf:
            return None
        # Equal elements are rounded alike, so they tell no more than one of them.
        first = first_of_equals(np.abs(x).astype(np.float32))
        shared = 1.0 if pairs is None else max(1.0, first.size / max(pairs, 1))
        independent = shared / float(np.square(size[first]).sum())
        aligned = _ALIGNED_SHARE * float(np.abs(size).sum()) / weight
        deviation, rounded_deviation = (float(size @ ((y[usable] - x) / limit)) / weight for y in (actual, one_run))
    return CaseSlope(deviation, rounded_deviation, math.sqrt(independent + aligned**2), x.size)


def first_of_equals(sizes: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Where each value that is not negative stands first, as np.unique returns it.

    Bits of such numbers sort like the numbers. With the place below them, plain integers sort, in a fraction of the
    time that NumPy takes to sort places by their values.
    """
    keys = sizes.view(np.uint32).astype(np.uint64) << np.uint64(32) | np.arange(sizes.size, dtype=np.uint64)
    keys.sort()
    values = keys >> np.uint64(32)
    is_first = np.append(True, values[1:] != values[:-1])
    first: NDArray[np.uint64] = keys[is_first] & np.uint64(2**32 - 1)
    return first


def pooled_slope(cases: Sequence[CaseSlope | None], tolerance: float = SLOPE_TOLERANCE) -> Slope | None:
    """The slope over these cases of one output; None if they cannot tell it from 0."""
    known = [case for case in cases if case is not None]
    if not known:
        return None
    deviations, rounded_deviations, errors = np.array(
        [(c.deviation, c.rounded_deviation, c.error_from_bounds) for c in known]
    ).T
    best = float(errors.min())
    weights = np.square(best / errors)
    total = float(weights.sum())
    weights /= total
    deviation, bias = float(weights @ deviations), float(weights @ rounded_deviations)
    # So many cases would know as much if all weighed the same.
    count = 1.0 / float(weights @ weights)
    own, others = (float(np.square(weights) @ np.square(x)) for x in (deviations - deviation, rounded_deviations))
    bounds_error = best / math.sqrt(total)
    least, most = _LEAST_BY_BOUNDS * bounds_error, _MOST_BY_BOUNDS * bounds_error
    # A factor in some of the cases also moves the slopes of the result apart, but not those of the rounded run.
    both, rounded = 2.0 * count - 1.0, count
    by_both = _students_factor(both) * max(math.sqrt((own + others) * count / both), least)
    by_rounded = _students_factor(rounded) * max(math.sqrt(others), least)
    noise = min(by_both, by_rounded, most)
    if not noise < 1.0:
        return None
    return Slope(1.0 + deviation, noise, 1.0 + bias, sum(c.values for c in known), len(known), tolerance)


def _students_factor(freedom: float) -> float:
    """Standard errors as rare as ``_STANDARD_ERRORS`` are, when the standard error is known by so many degrees of
    freedom: Wallace's approximation of Student's distribution."""
    return math.sqrt(freedom * math.expm1(_STANDARD_ERRORS**2 / freedom))
