"""How far from the oracle a result may be, and whether it is within that.

The rule: the largest error of a tensor is at most twice the largest error of the same computation done in the
spec's dtype with float32 softmax (one run, rounding to nearest: ``rounded.evaluate``), and two rounding steps of
the tensor's largest element, for small problems where that one run is right by accident. LSE is held to a
relative tolerance instead.

Where results hang on few roundings that one run is more of an accident than that, and a step is what such a rounding
does to them, if that is larger, which with values as they commonly are it is not: see ``reach``. In fp32 a whole row
of P hangs on how its LSE was rounded, which for an LSE between 4 and 8 is four steps; correct kernels needed up to
5.6 steps, so fp32 takes six.

With 8-bit queries, keys and values one step more is what roundings of P to 8 bits do to O, and LSE is held to what
tensor cores keep of sums of 8-bit products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.dtypes import E4M3, FP32
from flashgen.oracle.attention import backward, forward
from flashgen.oracle.problem import gradient_of_lse, read_problem
from flashgen.oracle.reach import largest, reach
from flashgen.oracle.rounded import Floats32, RoundedResult, evaluate
from flashgen.oracle.rules import Lengths, Rules
from flashgen.oracle.scales import Scales, scaled
from flashgen.spec import AttentionSpec, Dropout

LSE_TOLERANCE = 1e-5
FACTOR = 2.0
ROUNDING_STEPS = 2.0
FP32_ROUNDING_STEPS = 6.0
#: Tensor cores cut off each 8-bit product behind so much of the largest one that it is added to.
SUM_EPSILON = 2.0**-13


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """The largest allowed error of each tensor (of each element for ``lse``), and the rounded run behind it."""

    o: float
    lse: NDArray[np.float64]
    dq: float | None = None
    dk: float | None = None
    dv: float | None = None
    rounded: RoundedResult | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The largest error of a tensor and the bound of that element; ``note`` says what else is wrong.

    ``worst`` is the error and the bound of the element nearest to, or furthest beyond, its bound; None where that is
    the element with the largest error.
    """

    max_error: float
    bound: float
    ok: bool
    note: str = ""
    worst: tuple[float, float] | None = None

    @property
    def ratio(self) -> float:
        """The worst error over its bound; at most 1 when all is well."""
        error, bound = self.worst or (self.max_error, self.bound)
        if not self.ok and not np.isfinite(error):
            return float("inf")
        return _ratio(error, bound)


def bounds(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    do: Any = None,
    scale: float | None = None,
    *,
    exact: Sequence[NDArray[np.float64]] | None = None,
    captured: Mapping[str, Any] | None = None,
    dlse: Any = None,
    dropout: Dropout | None = None,
    lengths: Lengths | None = None,
    qv: Any = None,
    scales: Scales | None = None,
) -> Bounds:
    """The bounds for these inputs; ``exact`` is the oracle's (o, lse) or (o, lse, dq, dk, dv) where known."""
    if exact is None:
        shared: dict[str, Any] = {"scale": scale, "captured": captured, "dropout": dropout, "lengths": lengths}
        exact = forward(spec, q, k, v, qv=qv, **shared, **(scales or {}))
        if do is not None:
            exact = (*exact, *backward(spec, q, k, v, do, dlse=dlse, **shared))
    how: dict[str, Any] = {"captured": captured, "dropout": dropout, "lengths": lengths, "qv": qv, "scales": scales}
    result = evaluate(spec, q, k, v, do, scale=scale, dlse=dlse, **how)
    given = scaled(spec, read_problem(spec, q, k, v, do, scale=scale, qv=qv), scales or {})
    reached = reach(given, Rules(spec, given, captured, dropout, lengths), gradient_of_lse(given, dlse))
    step = spec.out_element.epsilon * (FP32_ROUNDING_STEPS if spec.element is FP32 else ROUNDING_STEPS)
    # Six steps are of these already.
    step32 = FP32.epsilon * (1.0 if spec.element is FP32 else ROUNDING_STEPS)
    limits: dict[str, float] = {}
    for name, reference in zip(("o", "lse", "dq", "dk", "dv"), exact, strict=False):
        if name != "lse":
            error = _largest_error(getattr(result, name), reference)
            steps = step * max(largest(reference), reached.of_o.get(name, 0.0))
            if spec.element.is_eight_bit:
                steps += ROUNDING_STEPS * E4M3.epsilon * reached.of_p
            limits[name] = FACTOR * error + max(steps, step32 * reached.of_float32[name])
    lse = exact[1]
    lse_limit = LSE_TOLERANCE * np.maximum(1.0, np.where(np.isfinite(lse), np.abs(lse), 1.0))
    lse_limit = np.maximum(lse_limit, step32 * reached.lse)
    if spec.element.is_eight_bit:
        of_sums = SUM_EPSILON * np.sqrt(spec.head_dim)
        lse_limit = np.maximum(lse_limit, ROUNDING_STEPS * of_sums * reached.largest_product)
    return Bounds(lse=lse_limit, rounded=result, **limits)


def check(
    result: Any,
    exact: NDArray[np.float64],
    bound: float | NDArray[np.float64],
    *,
    exact_infinity: bool = False,
) -> Check:
    """Compare a result with the oracle; anything but ``error <= bound`` everywhere fails, NaN included.

    Where the oracle is finite the result must be, unless the bound reaches beyond what its dtype can hold, and where
    it is not the result must not be either; with ``exact_infinity`` (for LSE) minus infinity must be minus infinity.
    """
    actual = np.asarray(result)
    largest_bound = float(np.max(bound, initial=0.0))
    if actual.shape != exact.shape:
        return Check(np.inf, largest_bound, False, f"shape {actual.shape} is not {exact.shape}")
    # bf16, which NumPy does not know of, reaches as far as float32.
    most = float(np.finfo(actual.dtype if actual.dtype.kind == "f" else np.float32).max)
    actual = actual.astype(np.float64)
    finite = np.isfinite(exact)
    overflown = finite & (np.abs(exact) + bound > most) & (actual == np.copysign(np.inf, exact))
    actual = np.where(overflown, exact, actual)
    if np.any(finite != np.isfinite(actual)):
        where = tuple(int(i) for i in np.argwhere(finite != np.isfinite(actual))[0])
        return Check(np.inf, largest_bound, False, f"at {where} it is {actual[where]}, the oracle {exact[where]}")
    if exact_infinity and np.any((exact == -np.inf) != (actual == -np.inf)):
        return Check(np.inf, largest_bound, False, "minus infinity is missing, or where it should not be")
    error = np.where(finite, np.abs(np.where(finite, actual, 0.0) - np.where(finite, exact, 0.0)), 0.0).ravel()
    if error.size == 0:
        return Check(0.0, largest_bound, True)
    limit = np.broadcast_to(bound, exact.shape).ravel()
    peak, nearest = (int(np.argmax(x)) for x in (error, error / np.maximum(limit, np.finfo(np.float64).tiny)))
    ok = not np.any(~(error <= limit))
    worst = (float(error[nearest]), float(limit[nearest])) if nearest != peak else None
    return Check(float(error[peak]), float(limit[peak]), bool(ok), worst=worst)


def _largest_error(actual: Floats32 | None, exact: NDArray[np.float64]) -> float:
    assert actual is not None
    both = np.isfinite(exact) & np.isfinite(actual)
    return float(np.abs(actual[both] - exact[both]).max(initial=0.0))


def _ratio(error: float, bound: float) -> float:
    return error / bound if bound > 0 else 0.0 if error == 0 else float("inf")
