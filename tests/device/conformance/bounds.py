"""How far the approximate instructions may be from the truth.

The CUDA programming guide allows the functions that are these instructions two units in the last place for 2^x, and
for the logarithm an absolute error of 2^-22 where x is between 0.5 and 2 and two units elsewhere; the PTX ISA allows
the reciprocal one unit. Both answers are held against the true value, computed in float64, so that the bound does not
depend on how good the emulator is.
"""

from __future__ import annotations

import numpy as np

from conformance.case import Array, Case, report

_NEAR_ONE = 2.0**-22
_LEAST_NORMAL = 2.0**-126
_OVERFLOW = 2.0**128


def close_exp2(case: Case, name: str, gpu: Array, emulated: Array) -> str | None:
    """Both within the bound; results below the normal range are zero on both sides."""
    x = _flushed(case)
    with np.errstate(over="ignore", invalid="ignore"):
        truth = np.exp2(x)
    wrong = _wrong_flushed(gpu, truth, 2) | _wrong_flushed(emulated, truth, 2)
    return report(name, gpu, emulated, wrong)


def close_log2(case: Case, name: str, gpu: Array, emulated: Array) -> str | None:
    """Both within the bound; zero, negative numbers, infinity and NaN give the same on both sides."""
    x = _inputs(case)
    with np.errstate(divide="ignore", invalid="ignore"):
        truth = np.log2(x)
    bound = np.where((x > 0.5) & (x < 2), _NEAR_ONE, _units(2, truth))
    return report(name, gpu, emulated, _wrong(gpu, truth, bound) | _wrong(emulated, truth, bound))


def close_reciprocal(case: Case, name: str, gpu: Array, emulated: Array) -> str | None:
    """Both within the bound, and of the same sign; results below the normal range are zero on both sides."""
    with np.errstate(divide="ignore", invalid="ignore"):
        truth = 1 / _flushed(case)
    sign = (np.signbit(gpu) != np.signbit(emulated)) & ~np.isnan(truth)
    return report(name, gpu, emulated, sign | _wrong_flushed(gpu, truth, 1) | _wrong_flushed(emulated, truth, 1))


def _wrong_flushed(result: Array, truth: Array, units: int) -> Array:
    size, bound = np.abs(truth), _units(units, truth)
    # Where the bound reaches over an edge of the range, either side of it will do.
    small = (size - bound < _LEAST_NORMAL) & (result == 0)
    large = (size + bound >= _OVERFLOW) & (result == np.copysign(np.inf, truth))
    subnormal = (result != 0) & (np.abs(result) < _LEAST_NORMAL)
    return (_wrong(result, truth, bound) & ~small & ~large) | subnormal


def _wrong(result: Array, truth: Array, bound: Array) -> Array:
    with np.errstate(invalid="ignore"):
        close = np.abs(result.astype(np.float64) - truth) <= bound
    return ~(close | (result == truth) | (np.isnan(result) & np.isnan(truth)))


def _units(count: int, truth: Array) -> Array:
    """So many units in the last place of a float."""
    with np.errstate(invalid="ignore"):
        _, exponent = np.frexp(truth)
    return np.where(np.isfinite(truth), count * np.ldexp(1.0, np.maximum(exponent, -125) - 24), 0.0)


def _inputs(case: Case) -> Array:
    with np.errstate(invalid="ignore"):
        return case.inputs["x"].view(np.float32).astype(np.float64)


def _flushed(case: Case) -> Array:
    """The inputs with subnormal ones taken for zero, as ``.ftz`` does."""
    x = _inputs(case)
    return np.where(np.abs(x) < _LEAST_NORMAL, np.copysign(0.0, x), x)
