"""How far rounding alone may take a result, for any values: what drawn cases are held to as well.

The oracle's bounds compare with one run in the spec's dtype. On a handful of elements that run can be right by
accident, most of all where large terms cancel; here every element gets the sum of the errors of its terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flashgen.dtypes import E4M3, FP16
from flashgen.oracle import Rules
from flashgen.oracle.bounds import SUM_EPSILON
from flashgen.oracle.problem import read_problem
from flashgen.oracle.rules import Lengths
from flashgen.oracle.scales import Scales, scaled
from flashgen.spec import AttentionSpec, Dropout
from flashgen.verify.cases.case import TENSORS, Inputs

Floats: TypeAlias = NDArray[np.float64]
SINGLE = 2.0**-24
#: The least step of an fp16 result, whatever its size.
FP16_STEP = 2.0**-25
#: Roundings that a term meets on its way: conversions of both operands, sums over tiles, the hardware's exp2.
STEPS = 4.0


def rounding_errors(
    spec: AttentionSpec,
    inputs: Inputs,
    scale: float,
    exact: Sequence[Floats],
    dropout: Dropout | None = None,
    lengths: Lengths | None = None,
    scales: Scales | None = None,
) -> dict[str, Floats]:
    """Per tensor of ``exact`` and element, how far rounding may take it.

    Zero where the spec has a score, which may enlarge errors or make them smaller.
    """
    if spec.score is not None:
        return {name: np.zeros(x.shape) for name, x in zip(TENSORS, exact, strict=False)}
    with np.errstate(all="ignore"):
        given = read_problem(spec, inputs.q, inputs.k, inputs.v, scale=scale, qv=inputs.qv)
        wide = scaled(spec, given, scales or {})
        q, k, v, do = (_finite(x) for x in (wide.q, wide.k, wide.v, inputs.do))
        shapes = (do.shape, (q.shape[0], q.shape[2], q.shape[1]), q.shape, k.shape, v.shape)
        found = {name: np.zeros(shape) for name, shape in zip(TENSORS, shapes, strict=True)}
        rules = Rules(spec, given, dropout=dropout, lengths=lengths)
        for b, h in np.ndindex(q.shape[0], q.shape[2]):
            h_kv = h * k.shape[2] // q.shape[2]
            kept = rules.kept(b, h)
            inputs_of = q[b, :, h], k[b, :, h_kv], v[b, :, h_kv], do[b, :, h]
            dlse = np.zeros(q.shape[1]) if inputs.dlse is None else inputs.dlse[b, h].astype(np.float64)
            head = _Head(spec, *inputs_of, dlse[:, None], rules.allowed(b, h), scale, 1.0 if kept is None else kept)
            o, lse, dq, dk, dv = head.errors()
            found["o"][b, :, h], found["lse"][b, h], found["dq"][b, :, h] = o, lse, dq
            found["dk"][b, :, h_kv] += dk
            found["dv"][b, :, h_kv] += dv
        for name, x in zip(TENSORS, exact, strict=False):
            if name != "lse":
                found[name] += STEPS * spec.out_element.epsilon * np.abs(_finite(x)) + STEPS * FP16_STEP
    return {name: found[name] for name in TENSORS[: len(exact)]}


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """The inputs of one head in float64, and the pairs that are allowed."""

    spec: AttentionSpec
    q: Floats
    k: Floats
    v: Floats
    do: Floats
    dlse: Floats
    allowed: NDArray[np.bool_]
    scale: float
    #: How often each pair counts.
    kept: Floats | float

    def errors(self) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """The largest errors of O, LSE, dQ, dK and dV if the roundings of all terms add up."""
        eps, eight_bits = self.spec.out_element.epsilon, self.spec.element.is_eight_bit
        least = FP16_STEP if self.spec.out_element is FP16 else 0.0
        size = abs(self.scale) * np.abs(self.q) @ np.abs(self.k).T
        scores = np.where(self.allowed, self.scale * (self.q @ self.k.T), -np.inf)
        peak = scores.max(axis=1, initial=-np.inf, keepdims=True)
        weights = np.exp(scores - np.where(peak == -np.inf, 0.0, peak))
        total = weights.sum(axis=1, keepdims=True)
        p = weights / np.where(total == 0.0, 1.0, total)
        # A logit's rounding is relative to its size, and the exponential makes it the probability's relative one.
        largest = np.where(self.allowed, size, 0.0).max(axis=1, initial=0.0, keepdims=True)
        relative = eps + SINGLE * (largest + sum(self.k.shape) + 4)
        p_error = STEPS * p * np.expm1(np.minimum(relative, 1.0)) + least
        if eight_bits:
            # Half of the smallest number, where the largest P of a row is stored as 2^8.
            p_error += E4M3.epsilon * p + 2.0**-18 / np.where(total == 0.0, 1.0, total)
        p_error = np.where(self.allowed, p_error, 0.0)
        o = (p * self.kept) @ self.v
        o_error = (p_error * self.kept) @ np.abs(self.v) + eps * np.abs(o) + least
        dp = self.do @ self.v.T * self.kept
        dp_size = np.abs(self.do) @ np.abs(self.v).T * self.kept
        d = (self.do * o).sum(axis=1, keepdims=True) - self.dlse
        d_error = (np.abs(self.do) * o_error).sum(axis=1, keepdims=True) + STEPS * SINGLE * np.abs(self.dlse)
        ds = p * (dp - d)
        ds_error = p_error * np.abs(dp - d) + p * (d_error + STEPS * SINGLE * self.v.shape[1] * dp_size)
        ds_error = np.where(self.allowed, ds_error + STEPS * eps * np.abs(ds) + least, 0.0)
        dq = abs(self.scale) * ds_error @ np.abs(self.k)
        dk = abs(self.scale) * ds_error.T @ np.abs(self.q)
        dv = ((p_error + eps * p) * self.kept).T @ np.abs(self.do)
        of_sums = SUM_EPSILON * np.sqrt(self.spec.head_dim) if eight_bits else SINGLE
        return o_error, STEPS * (of_sums * largest[:, 0] + 4 * SINGLE), dq, dk, dv


def _finite(x: NDArray[Any]) -> Floats:
    return np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
