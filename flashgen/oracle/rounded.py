"""Attention in the spec's dtype with float32 softmax: the computation whose error is the yardstick for kernels.

Every value that an eager implementation would keep in the dtype is rounded to it, to nearest: P, O, dP, dS, dQ,
dK and dV. The softmax is float32 from end to end: it takes the scores as the product accumulates them, since
rounding those first would leave fp16 without logits above 65504 and bf16 with errors of thousands near 1e6, and
its backward rebuilds P as exp(S - LSE) from an LSE rounded to float32, as every flash backward does (near 1e6
that rounding alone moves P by 3 %); both exponentiate in base two, as GPUs do.

For 8-bit queries, keys and values, P is rounded to e4m3 before it is divided by its row's sum: the largest P of a row
is stored as 2^8. Their products with V are divided by the sum, which is of numbers that were not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.dtypes import DType
from flashgen.oracle.attention import HeadRules
from flashgen.oracle.captured import CapturedSums, sink_column
from flashgen.oracle.problem import Array, gradient_of_lse, read_problem
from flashgen.oracle.rules import Floats, Lengths, Rules
from flashgen.oracle.scales import Scales, scaled
from flashgen.spec import AttentionSpec, Dropout

Floats32 = NDArray[np.float32]
LOG2_E = math.log2(math.e)
_SMALLEST_BUFFER = 16
#: What the largest P of a row is stored as in 8 bits.
LARGEST_P = np.float32(2.0**8)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedResult:
    """Outputs as float32 values; the gradients are None when no ``do`` was given."""

    o: Floats32
    lse: Floats32
    dq: Floats32 | None = None
    dk: Floats32 | None = None
    dv: Floats32 | None = None
    #: Gradients of captured float tensors by name, in float64.
    captured: Mapping[str, Floats] = field(default_factory=dict)
    #: Pairs of a query and a key that it may attend to, over all heads.
    pairs: int = 0


def rounded_forward(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    dropout: Dropout | None = None,
    lengths: Lengths | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[Array, Floats32]:
    """``(o, lse)``: o in the spec's dtype for O, lse in float32."""
    scales: Scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    result = evaluate(spec, q, k, v, scale=scale, dropout=dropout, lengths=lengths, scales=scales)
    with np.errstate(all="ignore"):
        return result.o.astype(spec.out_element.numpy()), result.lse


def rounded_backward(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    *,
    scale: float | None = None,
    dropout: Dropout | None = None,
    lengths: Lengths | None = None,
) -> tuple[Array, Array, Array]:
    """``(dq, dk, dv)`` in the spec's dtype; the sum over a group of heads is taken in float32."""
    result = evaluate(spec, q, k, v, do, scale=scale, dropout=dropout, lengths=lengths)
    assert result.dq is not None
    assert result.dk is not None
    assert result.dv is not None
    dtype = spec.element.numpy()
    with np.errstate(all="ignore"):
        return result.dq.astype(dtype), result.dk.astype(dtype), result.dv.astype(dtype)


def rounded_captured_gradients(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    *,
    scale: float | None = None,
    captured: Mapping[str, Any] | None = None,
    dlse: Any = None,
    dropout: Dropout | None = None,
    lengths: Lengths | None = None,
) -> Mapping[str, Floats]:
    """Gradients of the captured float tensors, by name, in float64: they are sums of rounded terms."""
    options: dict[str, Any] = {"captured": captured, "dlse": dlse, "dropout": dropout, "lengths": lengths}
    return evaluate(spec, q, k, v, do, scale=scale, **options).captured


def evaluate(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    do: Any = None,
    *,
    scale: float | None = None,
    captured: Mapping[str, Any] | None = None,
    dlse: Any = None,
    dropout: Dropout | None = None,
    lengths: Lengths | None = None,
    qv: Any = None,
    scales: Scales | None = None,
) -> RoundedResult:
    """One run of the whole computation."""
    element = spec.element
    # What a cache holds is scaled already, and may be no number of its dtype.
    dtype = np.float32 if element.is_eight_bit and spec.cache else element.numpy()
    given = read_problem(spec, q, k, v, do, scale=scale, dtype=dtype, qv=qv)
    if element.is_eight_bit:
        wide = {name: getattr(given, name).astype(np.float32) for name in "qkv"}
        given = scaled(spec, replace(given, **wide), scales or {})
    rules = Rules(spec, given, captured, dropout, lengths)
    of_lse = gradient_of_lse(given, dlse).astype(np.float32)
    q32, k32, v32 = (x.astype(np.float32) for x in (given.q, given.k, given.v))
    do32 = None if given.do is None else given.do.astype(np.float32)
    o = np.zeros((given.batch, given.len_q, given.heads, spec.head_dim_v), np.float32)
    lse = np.zeros((given.batch, given.heads, given.len_q), np.float32)
    dq, dk, dv = np.zeros_like(q32), np.zeros_like(k32), np.zeros_like(v32)
    sums, pairs = CapturedSums(spec, rules, captured), 0
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(given.batch, given.heads):
            h_kv = h // given.group
            operands = q32[b, :, h], k32[b, :, h_kv], v32[b, :, h_kv]
            head = _Head(element, *operands, given.scale, HeadRules(rules, b, h))
            o[b, :, h], lse[b, h] = head.forward(spec.out_element)
            pairs += int(head.allowed.sum())
            if do32 is not None:
                row_sum = (do32[b, :, h] * o[b, :, h]).sum(axis=1, dtype=np.float32) - of_lse[b, h]
                of_scores, p = head.score_gradients(do32[b, :, h], row_sum, lse[b, h])
                ds = _store(element, of_scores * head.slopes)
                dq[b, :, h] = dot(ds, _finite(head.k))
                dk[b, :, h_kv] = dot(ds.T, _finite(head.q), dk[b, :, h_kv])
                dv[b, :, h_kv] = dot(p.T, _finite(do32[b, :, h]), dv[b, :, h_kv])
                sums.add_pairs(head.logits, _store(element, of_scores).astype(np.float64), b, h)
                sums.add_sink(-sink_column(float(head.sink), lse[b, h].astype(np.float64)) * row_sum, b, h)
        if do32 is None:
            return RoundedResult(o, lse, pairs=pairs)
        factor = np.float32(given.scale)
        dq, dk, dv = (_store(element, x) for x in (dq * factor, dk * factor, dv))
        return RoundedResult(o, lse, dq, dk, dv, sums.values, pairs)


def dot(a: Floats32, b: Floats32, start: Floats32 | None = None) -> Floats32:
    """``start + a @ b`` as one chain of float32 fused multiply-adds per element, the order GPUs sum in.

    A BLAS product sums in an order of its own, in some shapes with a fraction of the error of a chain: it would
    make the bound a property of the machine.
    """
    total = np.zeros((a.shape[0], b.shape[1])) if start is None else start.astype(np.float64)
    left, right = a.astype(np.float64), b.astype(np.float64)  # the product of two float32 is exact in float64
    # Else NumPy copies what is broadcast into buffers first, which takes three times as long as the product.
    usual = np.setbufsize(_SMALLEST_BUFFER)
    try:
        for i in range(a.shape[1]):
            total += left[:, i : i + 1] * right[i]
            total = total.astype(np.float32).astype(np.float64)
    finally:
        np.setbufsize(usual)
    return total.astype(np.float32)


class _Head:
    """One head; ``dots`` are the products q k^T before the scale, or the scores where those are no logits."""

    def __init__(self, element: DType, q: Floats32, k: Floats32, v: Floats32, scale: float, rules: HeadRules) -> None:
        self.element, self.q, self.k, self.v, self.allowed = element, q, k, v, rules.allowed
        self.sink, self.slopes, self._keep = np.float32(rules.sink), np.float32(1), rules.keep
        # With the sign moved into q, the largest product is the largest logit, whatever the scale.
        self.dots = dot(q if scale >= 0 else -q, k.T)
        self.scale_log2 = np.float32(abs(scale) * LOG2_E)
        self.logits = (self.dots * np.float32(abs(scale))).astype(np.float64)
        if rules.changes_logits:
            self.dots = rules.scores(self.logits).astype(np.float32)
            self.slopes = np.where(self.allowed, rules.slopes(self.logits), 0.0).astype(np.float32)
            self.scale_log2 = np.float32(LOG2_E)

    def forward(self, out_element: DType) -> tuple[Floats32, Floats32]:
        """O and the LSE."""
        peak = np.where(self.allowed, self.dots, -np.inf).max(axis=1, initial=-np.inf).astype(np.float32)
        sink_log2 = self.sink * np.float32(LOG2_E)
        peak_log2 = np.maximum(np.where(peak == -np.inf, peak, peak * self.scale_log2), sink_log2)
        shift = np.where(peak_log2 == -np.inf, np.float32(0), peak_log2)
        weights = self._exponentials(shift)
        total = weights.sum(axis=1, dtype=np.float32) + np.exp2(sink_log2 - shift)
        lse = (shift + np.log2(total)) * np.float32(1 / LOG2_E)
        divisors = np.where(total == 0, np.float32(1), total)[:, None]
        if self.element.is_eight_bit:
            o = dot(_store(self.element, weights * LARGEST_P), _finite(self.v)) / (divisors * LARGEST_P)
        else:
            o = dot(_store(self.element, self.kept(weights / divisors)), _finite(self.v))
        return _store(out_element, o), lse.astype(np.float32)

    def score_gradients(self, do: Floats32, row_sum: Floats32, lse: Floats32) -> tuple[Floats32, Floats32]:
        """The gradient of the scores, in float32, and P of this head."""
        p = self._exponentials(np.where(lse == -np.inf, np.float32(0), lse * np.float32(LOG2_E)))
        dp = self.kept(_store(self.element, dot(do, self.v.T))) - row_sum[:, None]
        return np.where(self.allowed, p * dp, np.float32(0)), _store(self.element, self.kept(p))

    def kept(self, weights: Floats32) -> Floats32:
        """What dropout leaves of weights of pairs."""
        return self._keep(weights.astype(np.float64)).astype(np.float32)

    def _exponentials(self, shift: Floats32) -> Floats32:
        """``2 ** (scaled products - shift)`` where allowed; the exponent is one fused multiply-add."""
        exponents = self.dots * np.float64(self.scale_log2) - shift[:, None]
        exponentials: Floats32 = np.exp2(exponents.astype(np.float32))
        return np.where(self.allowed, exponentials, np.float32(0))


def _store(element: DType, x: Floats32) -> Floats32:
    """A value written in the spec's dtype, and read back."""
    return x.astype(element.numpy()).astype(np.float32)


def _finite(rows: Floats32) -> Floats32:
    """Rows with NaN and inf as zero: results they reach are not finite in the oracle, and no yardstick."""
    return np.where(np.isfinite(rows), rows, np.float32(0))
