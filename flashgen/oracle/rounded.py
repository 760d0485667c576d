"""Attention as a good kernel computes it: operands in the spec's dtype, products and softmax in float32.

The distance of this computation from the oracle is the yardstick for kernels. What is rounded to the dtype
is what must be a tensor-core operand or an output: P, dS, O, dQ, dK and dV. The backward pass rebuilds P from
the float32 LSE, as FlashAttention does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.dtypes import DType
from flashgen.oracle.attention import Pairs, allowed_pairs
from flashgen.oracle.problem import Array, read_problem
from flashgen.spec import AttentionSpec

Floats32 = NDArray[np.float32]
LOG2_E = np.float32(math.log2(math.e))


class Arithmetic:
    """The rounding steps of the computation; round to nearest at each."""

    def __init__(self, element: DType) -> None:
        self.element = element

    def store(self, x: Floats32) -> Floats32:
        """A value written in the spec's dtype, and read back."""
        return x.astype(self.element.numpy()).astype(np.float32)

    def dot(self, a: Floats32, b: Floats32) -> Floats32:
        """A matrix product accumulated in float32."""
        return np.asarray(a @ b, dtype=np.float32)

    def row_sum(self, x: Floats32) -> Floats32:
        """The sum of each row in float32."""
        return np.asarray(x.sum(axis=1, dtype=np.float32))

    def single(self, x: Floats32) -> Floats32:
        """An elementwise float32 result."""
        return x.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedResult:
    """Outputs as float32 values; the gradients are None when no ``do`` was given."""

    o: Floats32
    lse: Floats32
    dq: Floats32 | None = None
    dk: Floats32 | None = None
    dv: Floats32 | None = None


def rounded_forward(
    spec: AttentionSpec, q: Any, k: Any, v: Any, *, scale: float | None = None
) -> tuple[Array, Floats32]:
    """``(o, lse)``: o in the spec's dtype, lse in float32."""
    result = evaluate(Arithmetic(spec.element), spec, q, k, v, scale=scale)
    with np.errstate(all="ignore"):
        return result.o.astype(spec.element.numpy()), result.lse


def rounded_backward(
    spec: AttentionSpec, q: Any, k: Any, v: Any, do: Any, *, scale: float | None = None
) -> tuple[Array, Array, Array]:
    """``(dq, dk, dv)`` in the spec's dtype; the sum over a group of heads is taken in float32."""
    result = evaluate(Arithmetic(spec.element), spec, q, k, v, do, scale=scale)
    assert result.dq is not None
    assert result.dk is not None
    assert result.dv is not None
    dtype = spec.element.numpy()
    with np.errstate(all="ignore"):
        return result.dq.astype(dtype), result.dk.astype(dtype), result.dv.astype(dtype)


def evaluate(
    arithmetic: Arithmetic,
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    do: Any = None,
    *,
    scale: float | None = None,
) -> RoundedResult:
    """The whole computation under the given rounding."""
    given = read_problem(spec, q, k, v, do, scale=scale, dtype=spec.element.numpy())
    allowed = allowed_pairs(spec.mask, given.len_q, given.len_kv)
    q32, k32, v32 = (x.astype(np.float32) for x in (given.q, given.k, given.v))
    do32 = None if given.do is None else given.do.astype(np.float32)
    o = np.zeros((given.batch, given.len_q, given.heads, spec.head_dim_v), np.float32)
    lse = np.zeros((given.batch, given.heads, given.len_q), np.float32)
    dq, dk, dv = np.zeros_like(q32), np.zeros_like(k32), np.zeros_like(v32)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(given.batch, given.heads):
            h_kv = h // given.group
            inputs = q32[b, :, h], k32[b, :, h_kv], v32[b, :, h_kv]
            head = _Head(arithmetic, *inputs, allowed, given.scale)
            o[b, :, h], lse[b, h] = head.forward()
            if do32 is not None:
                grads = head.backward(do32[b, :, h], o[b, :, h], lse[b, h])
                dq[b, :, h] = arithmetic.store(grads[0])
                dk[b, :, h_kv] += grads[1]
                dv[b, :, h_kv] += grads[2]
        if do32 is None:
            return RoundedResult(o, lse)
        return RoundedResult(o, lse, dq, arithmetic.store(dk), arithmetic.store(dv))


class _Head:
    """One head; ``dots`` are the products q k^T before the scale."""

    def __init__(
        self, arithmetic: Arithmetic, q: Floats32, k: Floats32, v: Floats32, allowed: Pairs, scale: float
    ) -> None:
        self.arithmetic, self.q, self.k, self.v, self.allowed = arithmetic, q, k, v, allowed
        self.scale = np.float32(scale)
        # With the sign moved into q, the largest product is the largest logit, whatever the scale.
        self.dots = arithmetic.dot(q if scale >= 0 else -q, k.T)
        self.factor = np.abs(self.scale)

    def forward(self) -> tuple[Floats32, Floats32]:
        """O and the LSE; the peak is subtracted before the scale, so large logits lose nothing."""
        a = self.arithmetic
        peak = np.where(self.allowed, self.dots, -np.inf).max(axis=1, initial=-np.inf).astype(np.float32)
        peak = np.where(peak == -np.inf, np.float32(0), peak)
        exponents = a.single((self.dots - peak[:, None]) * self.factor)
        weights = np.where(self.allowed, a.single(np.exp(exponents)), np.float32(0))
        total = a.row_sum(weights)
        divisor = np.where(total == 0, np.float32(1), total)
        p = a.store((weights / divisor[:, None]).astype(np.float32))
        return a.store(a.dot(p, _finite(self.v))), a.single(peak * self.factor + np.log(total))

    def backward(self, do: Floats32, o: Floats32, lse: Floats32) -> tuple[Floats32, Floats32, Floats32]:
        """DQ, dK, dV of this head in float32, before they are stored."""
        a = self.arithmetic
        shift = a.single(lse * LOG2_E)[:, None]
        exponents = self.dots * np.float64(self.factor * LOG2_E) - shift  # one fused multiply-add
        attended = self.allowed & (lse != -np.inf)[:, None]
        p = np.where(attended, a.single(np.exp2(exponents.astype(np.float32))), np.float32(0))
        dp = a.dot(do, self.v.T) - a.row_sum(do * o)[:, None]
        ds = a.store(np.where(attended, p * dp, np.float32(0)).astype(np.float32))
        dq = a.dot(ds, _finite(self.k)) * self.scale
        dk = a.dot(ds.T, _finite(self.q)) * self.scale
        dv = a.dot(a.store(p).T, _finite(do))
        return dq, dk, dv


def _finite(rows: Floats32) -> Floats32:
    """Rows with NaN and inf as zero: results they reach are not finite in the oracle, and no yardstick."""
    return np.where(np.isfinite(rows), rows, np.float32(0))
