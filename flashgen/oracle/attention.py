"""What attention means: forward and backward for one head in a few lines each, in NumPy float64.

Every kernel is tested against this file. It favours the formula over speed: scores are whole matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.oracle.problem import Problem, gradient_of_lse, read_problem
from flashgen.oracle.rules import Floats, Lengths, Pairs, Rules, allowed_pairs
from flashgen.oracle.scales import scaled
from flashgen.spec import AttentionSpec, Dropout

__all__ = ["HeadRules", "allowed_pairs", "backward", "backward_head", "contract", "forward", "forward_head"]


def forward(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    captured: Mapping[str, Any] | None = None,
    dropout: Dropout | None = None,
    lengths: Lengths | None = None,
    qv: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[Floats, Floats]:
    """``O = softmax(score(scale * Q K^T)) V`` and the row-wise log-sum-exp, as float64 ``(o, lse)``.

    q is (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv); o is (B, Sq, H, Dv), lse (B, H, Sq). ``captured``
    replaces tensors that the spec's mask or score was made with. With ``qv`` scores are of ``Q K^T + Qv V^T``. Scales
    multiply 8-bit q, k and v.
    """
    given = read_problem(spec, q, k, v, scale=scale, qv=qv)
    problem = scaled(spec, given, {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale})
    rules = Rules(spec, problem, captured, dropout, lengths)
    o = np.zeros((problem.batch, problem.len_q, problem.heads, spec.head_dim_v))
    lse = np.zeros((problem.batch, problem.heads, problem.len_q))
    for b, h in np.ndindex(problem.batch, problem.heads):
        head = forward_head(*_head_inputs(problem, b, h), problem.scale, HeadRules(rules, b, h))
        o[b, :, h], lse[b, h] = head.o, head.lse
        if lengths is not None:  # a row that is not there has no sink either
            lse[b, h, lengths[b][0] :] = -np.inf
    return o, lse


def backward(
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
) -> tuple[Floats, Floats, Floats]:
    """Gradients ``(dq, dk, dv)`` of ``sum(do * o) + sum(dlse * lse)`` in float64, ``dlse`` being zero if left out.

    A k/v head sums over its query heads.
    """
    problem = read_problem(spec, q, k, v, do, scale=scale)
    assert problem.do is not None, "do was given"
    rules, of_lse = Rules(spec, problem, captured, dropout, lengths), gradient_of_lse(problem, dlse)
    dq, dk, dv = (np.zeros_like(x) for x in (problem.q, problem.k, problem.v))
    for b, h in np.ndindex(problem.batch, problem.heads):
        inputs = _head_inputs(problem, b, h)
        head_dq, head_dk, head_dv = backward_head(
            *inputs, problem.do[b, :, h], of_lse[b, h], problem.scale, HeadRules(rules, b, h)
        )
        h_kv = h // problem.group
        dq[b, :, h] = head_dq
        with np.errstate(invalid="ignore"):
            dk[b, :, h_kv] += head_dk
            dv[b, :, h_kv] += head_dv
    return dq, dk, dv


class HeadRules:
    """The rules of one head of one sequence."""

    def __init__(self, rules: Rules, b: int, h: int) -> None:
        self._rules, self._place = rules, (b, h)
        self.allowed = rules.allowed(b, h)
        self.sink = rules.sink(b, h)
        self._kept = rules.kept(b, h)

    def scores(self, logits: Floats) -> Floats:
        """The scores of scaled logits."""
        return self._rules.scores(logits, *self._place)

    def slopes(self, logits: Floats) -> Floats:
        """Their derivatives with respect to the logits."""
        return self._rules.slopes(logits, *self._place)

    def angles(self, logits: Floats) -> Floats:
        """How the angles of sines, cosines and tangents, rounded, change the scores."""
        return self._rules.angles(logits, *self._place)

    def keep(self, weights: Floats) -> Floats:
        """Of weights of pairs what dropout leaves of them, and as often as it counts."""
        return weights if self._kept is None else np.where(self._kept == 0.0, 0.0, weights * self._kept)

    @property
    def changes_logits(self) -> bool:
        """Whether scores differ from logits."""
        return self._rules.changes_logits


@dataclass(frozen=True, slots=True, eq=False)
class HeadForward:
    """The forward pass of one head, with the probabilities that the backward pass needs."""

    p: Floats
    o: Floats
    lse: Floats


def forward_head(q: Floats, k: Floats, v: Floats, scale: float, rules: HeadRules) -> HeadForward:
    """One head: ``S = score(scale Q K^T)``, minus infinity where not allowed; ``P = softmax(S)``; ``O = P V``.

    A sink is one more column of S, whose value is 0. Dropout is of the P that multiplies V, after its sum.
    """
    allowed = rules.allowed
    with np.errstate(all="ignore"):
        scores = np.where(allowed, rules.scores(scale * (q @ k.T)), -np.inf)
        peak = scores.max(axis=1, initial=rules.sink)
        peak = np.where(peak == -np.inf, 0.0, peak)  # an empty row: exp(-inf - 0) = 0
        weights = np.exp(scores - peak[:, None])
        total = weights.sum(axis=1) + np.exp(rules.sink - peak)
        total_or_one = np.where(total == 0.0, 1.0, total)[:, None]
        p = np.where(allowed, weights / total_or_one, 0.0)
        # Divided by the total afterwards: where that is NaN, so is O, whichever pairs are dropped.
        o = contract(rules.keep(np.where(allowed, weights, 0.0)), v, allowed) / total_or_one
        return HeadForward(p, o, lse=peak + np.log(total))


def backward_head(
    q: Floats, k: Floats, v: Floats, do: Floats, dlse: Floats, scale: float, rules: HeadRules
) -> tuple[Floats, Floats, Floats]:
    """One head: ``dV = P^T dO; dS = P (dO V^T - D) score'; dQ = scale dS K; dK = scale dS^T Q``.

    ``D = rowsum(dO O) - dL``, since the slope of L is P.
    """
    head, allowed = forward_head(q, k, v, scale, rules), rules.allowed
    with np.errstate(all="ignore"):
        row_sum = (do * head.o).sum(axis=1) - dlse
        dp = rules.keep(do @ v.T)
        ds = np.where(allowed, head.p * (dp - row_sum[:, None]) * rules.slopes(scale * (q @ k.T)), 0.0)
        dv = contract(rules.keep(head.p).T, do, allowed.T)
        dq = scale * contract(ds, k, allowed)
        dk = scale * contract(ds.T, q, allowed.T)
    return dq, dk, dv


def contract(weights: Floats, rows: Floats, allowed: Pairs) -> Floats:
    """``weights @ rows`` over allowed pairs only.

    A plain product would let a NaN or inf in ``rows`` through a weight of zero (0 * NaN is NaN), so rows
    that are not finite are left out of it and added where they are allowed.
    """
    finite: Pairs = np.all(np.isfinite(rows), axis=1)
    total = weights @ np.where(finite[:, None], rows, 0.0)
    for j in np.flatnonzero(~finite):
        total += np.where(allowed[:, j, None], weights[:, j, None] * rows[j], 0.0)
    return np.asarray(total, dtype=np.float64)


def _head_inputs(problem: Problem, b: int, h: int) -> tuple[Floats, Floats, Floats]:
    h_kv = h // problem.group
    return problem.q[b, :, h], problem.k[b, :, h_kv], problem.v[b, :, h_kv]
