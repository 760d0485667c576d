"""How far rounding alone may take a result, for any values: what the random cases are held to.

The oracle's bounds compare with one run in the spec's dtype. On a handful of elements that run can be right by
accident, most of all where large terms cancel; here every element gets the sum of the errors of its terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flashgen as fg
from flashgen import oracle
from flashgen.oracle import allowed_pairs

Floats = NDArray[np.float64]
NAMES = ("o", "lse", "dq", "dk", "dv")
SINGLE = 2.0**-24
#: The least step of an fp16 result, whatever its size.
FP16_STEP = 2.0**-25
#: Roundings that a term meets on its way: conversions of both operands, sums over tiles, the hardware's exp2.
STEPS = 4.0


@dataclass
class Head:
    """The inputs of one head in float64, and the pairs that are allowed."""

    spec: fg.AttentionSpec
    q: Floats
    k: Floats
    v: Floats
    do: Floats
    allowed: NDArray[np.bool_]
    scale: float

    def errors(self) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """The largest errors of O, LSE, dQ, dK and dV that rounding of every term can add up to."""
        eps = self.spec.element.epsilon
        least = FP16_STEP if self.spec.dtype == "fp16" else 0.0
        size = abs(self.scale) * np.abs(self.q) @ np.abs(self.k).T
        scores = np.where(self.allowed, self.scale * (self.q @ self.k.T), -np.inf)
        peak = scores.max(axis=1, initial=-np.inf, keepdims=True)
        weights = np.exp(scores - np.where(peak == -np.inf, 0.0, peak))
        total = weights.sum(axis=1, keepdims=True)
        p = weights / np.where(total == 0.0, 1.0, total)
        # A logit's rounding is relative to its size, and the exponential makes it the probability's relative one.
        largest = np.where(self.allowed, size, 0.0).max(axis=1, initial=0.0, keepdims=True)
        relative = eps + SINGLE * (largest + sum(self.k.shape) + 4)
        p_error = np.where(self.allowed, STEPS * p * np.expm1(np.minimum(relative, 1.0)) + least, 0.0)
        o = p @ self.v
        o_error = p_error @ np.abs(self.v) + eps * np.abs(o) + least
        dp = self.do @ self.v.T
        dp_size = np.abs(self.do) @ np.abs(self.v).T
        d = (self.do * o).sum(axis=1, keepdims=True)
        d_error = (np.abs(self.do) * o_error).sum(axis=1, keepdims=True)
        ds = p * (dp - d)
        ds_error = p_error * np.abs(dp - d) + p * (d_error + STEPS * SINGLE * self.v.shape[1] * dp_size)
        ds_error = np.where(self.allowed, ds_error + STEPS * eps * np.abs(ds) + least, 0.0)
        dq = abs(self.scale) * ds_error @ np.abs(self.k)
        dk = abs(self.scale) * ds_error.T @ np.abs(self.q)
        dv = (p_error + eps * p).T @ np.abs(self.do)
        return o_error, STEPS * SINGLE * (largest[:, 0] + 4), dq, dk, dv


def finite(x: NDArray[Any]) -> Floats:
    return np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def rounding_errors(
    spec: fg.AttentionSpec, inputs: Sequence[NDArray[Any]], scale: float, exact: Sequence[Floats]
) -> dict[str, Floats]:
    """Per tensor and element, how far rounding may take it."""
    with np.errstate(all="ignore"):
        q, k, v, do = (finite(x) for x in inputs)
        found = {name: np.zeros_like(x) for name, x in zip(NAMES, exact, strict=True)}
        allowed = allowed_pairs(spec.mask, q.shape[1], k.shape[1])
        for b, h in np.ndindex(q.shape[0], q.shape[2]):
            h_kv = h * k.shape[2] // q.shape[2]
            head = Head(spec, q[b, :, h], k[b, :, h_kv], v[b, :, h_kv], do[b, :, h], allowed, scale)
            o, lse, dq, dk, dv = head.errors()
            found["o"][b, :, h], found["lse"][b, h], found["dq"][b, :, h] = o, lse, dq
            found["dk"][b, :, h_kv] += dk
            found["dv"][b, :, h_kv] += dv
        for name, x in zip(NAMES, exact, strict=True):
            if name != "lse":
                found[name] += STEPS * spec.element.epsilon * np.abs(finite(x)) + STEPS * FP16_STEP
    return found


Judge = Callable[..., None]


@pytest.fixture(scope="session")
def judge() -> Judge:
    """Runs both passes and fails unless the named results are within their bounds."""

    def run(
        kernel: fg.Kernel,
        inputs: Sequence[NDArray[Any]],
        scale: float | None = None,
        names: tuple[str, ...] = NAMES,
    ) -> None:
        spec, (q, k, v, do) = kernel.spec, inputs
        o, lse = kernel(q, k, v, scale=scale)
        results = (o, lse, *kernel.backward(do, q, k, v, o, lse, scale=scale))
        exact = (
            *oracle.forward(spec, q, k, v, scale=scale),
            *oracle.backward(spec, q, k, v, do, scale=scale),
        )
        limits = oracle.bounds(spec, q, k, v, do, scale, exact=exact)
        roundings = rounding_errors(spec, inputs, spec.default_scale if scale is None else scale, exact)
        for name, result, reference in zip(NAMES, results, exact, strict=True):
            if name in names:
                limit = np.maximum(getattr(limits, name), roundings[name])
                found = oracle.check(result, reference, limit, exact_infinity=name == "lse")
                assert found.ok, f"{name}: {found}"

    return run
