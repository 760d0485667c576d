"""How far results move when what is rounded on the way to them is rounded otherwise, to first order.

The error of one run is a yardstick where it is made of many roundings. It is an accident where a few decide:

- dQ and dK may all but vanish where dS = P (dP - D) cancels; they hang on how each element of O was rounded, through
  D = rowsum(dO O). Elements are rounded at random, but what is alike is rounded alike.
- The backward pass makes all of a row's P of one LSE, and a score makes each logit by roundings of its own. In float32
  these are nothing where logits are small; near a million they are a few parts in a hundred.
- A score of a large angle hangs on how that was rounded.
- LSE hangs on how the products of its largest logits were summed, whose terms may be far larger than the sum, and in
  fp32 so does dS.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashgen.oracle.attention import HeadForward, HeadRules, forward_head
from flashgen.oracle.problem import Array, Problem
from flashgen.oracle.rules import Floats, Pairs, Rules

#: Two elements that differ by less are rounded alike.
_ALIKE = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """Changes in roundings, relative to what is rounded: the largest of a tensor, and of ``lse`` each row's."""

    #: Of dQ and dK, in roundings of O.
    of_o: dict[str, float]
    #: Of O, dQ, dK and dV, in roundings to float32.
    of_float32: dict[str, float]
    lse: Floats
    #: Of O, in roundings of P.
    of_p: float = 0.0
    #: Of each row the largest term of the products that are its logits, times the scale.
    largest_product: Floats | float = 0.0


def reach(given: Problem, rules: Rules, of_lse: Array) -> Reach:
    """Of these inputs; ``of_lse`` is the gradient of LSE. Without ``do`` there is nothing to say of gradients."""
    names = ("o",) if given.do is None else ("o", "dq", "dk", "dv")
    like = {"o": (*given.q.shape[:3], given.v.shape[3]), "dq": given.q.shape, "dk": given.k.shape, "dv": given.v.shape}
    squares = {name: np.zeros(like[name]) for name in names}
    of_o = {name: np.zeros(like[name]) for name in names if name in ("dq", "dk")}
    lse = np.zeros((given.batch, given.heads, given.len_q))
    of_p, largest_product = 0.0, np.zeros_like(lse)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(given.batch, given.heads):
            h_kv = h // given.group
            head = _Head(given, HeadRules(rules, b, h), b, h)
            lse[b, h] = _finite(head.lse)
            squares["o"][b, :, h] = head.of_o
            of_p = max(of_p, head.of_p)
            largest_product[b, h] = head.largest_product
            if given.do is not None:
                gradients = head.gradients(given.do[b, :, h], of_lse[b, h])
                squares["dq"][b, :, h] = gradients[0]
                squares["dk"][b, :, h_kv] += gradients[1]
                squares["dv"][b, :, h_kv] += gradients[2]
                of_rows, of_keys = head.of_rounding_o(given.do[b, :, h])
                of_o["dq"][b, :, h] = of_rows
                of_o["dk"][b, :, h_kv] += of_keys
    return Reach(
        {name: largest(x) for name, x in of_o.items()},
        {name: float(np.sqrt(largest(x))) for name, x in squares.items()},
        lse,
        of_p,
        largest_product,
    )


class _Head:
    """One head. What is not finite is left out with all that it reaches, which is not finite in the oracle either."""

    def __init__(self, given: Problem, rules: HeadRules, b: int, h: int) -> None:
        q, k, v = given.q[b, :, h], given.k[b, :, h // given.group], given.v[b, :, h // given.group]
        self.scale, self.q, self.k, self.v = given.scale, _finite(q), _finite(k), _finite(v)
        self.forward: HeadForward = forward_head(q, k, v, given.scale, rules)
        rows = _are_finite(self.forward.p)
        self.p, self.o = np.where(rows, self.forward.p, 0.0), np.where(rows, _finite(self.forward.o), 0.0)
        #: Rows that have gradients: D is of all of O.
        self.good = rows & _are_finite(self.forward.o)
        self.kept = rules.keep(np.ones_like(self.p))
        logits = given.scale * (q @ k.T)
        self.slopes = np.where(self.p == 0.0, 0.0, rules.slopes(logits))
        # What is rounded of each pair: what its exponential is taken of, and where it is not just the product, the
        # score, once as it is and once as a power of two.
        sizes = np.abs(np.log(self.p))
        if rules.changes_logits:
            sizes += np.abs(rules.slopes(logits) * logits) + 2.0 * np.abs(rules.scores(logits))
            # An angle is rounded as a float made of whole numbers, by its constant factor, and as their product.
            sizes += 3.0 * rules.angles(logits)
        of_scores = np.square(self.p * np.where(self.p == 0.0, 0.0, sizes))
        of_sink = np.square(np.nan_to_num(np.exp(rules.sink - self.forward.lse) * rules.sink, nan=0.0, neginf=0.0))
        #: Squares of what they change: of each P before its row is divided by its sum, and of the logarithm of that.
        self.own, self.shared = of_scores, of_scores.sum(axis=1) + of_sink
        of_products = np.square(given.scale) * _of_products(self.q, self.k)
        self.lse = np.sqrt(self.shared + (np.square(self.p * self.slopes) * of_products).sum(axis=1))
        # O moves by each of its values less itself.
        self.of_o = np.maximum(
            (of_scores * np.square(self.kept)) @ np.square(self.v)
            - 2.0 * self.o * ((of_scores * self.kept) @ self.v)
            + np.square(self.o) * self.shared[:, None],
            0.0,
        )
        #: Sums of what is alike are rounded alike; others are of so many roundings that one run tells.
        self.alike = _are_alike(self.v)
        if self.alike:
            self.of_o += _of_products(self.p * self.kept, self.v.T)
            self.of_o += np.square(self.o) * _of_products(self.p, np.ones((1, len(self.v))))

    @property
    def of_p(self) -> float:
        """The largest change of O by roundings of P. The largest P of a row is a power of two, and is not rounded."""
        others = np.where(self.p == self.p.max(axis=1, initial=0.0, keepdims=True), 0.0, self.p)
        return largest(np.sqrt(np.square(others) @ np.square(self.v)))

    @property
    def largest_product(self) -> Floats:
        """Of each row, the bound of the terms of its logits' products."""
        most: Floats = np.abs(self.q) * np.abs(self.k).max(axis=0, initial=0.0)
        terms: Floats = abs(self.scale) * most.max(axis=1, initial=0.0)
        return terms

    def gradients(self, do: Floats, of_lse: Floats) -> tuple[Floats, Floats, Floats]:
        """Squares of the changes of dQ, dK and dV by roundings of scores, of LSE and of sums of products."""
        do = _finite(do)
        of_row = self.shared + np.square(_finite(self.forward.lse))
        # As the sum that its row is divided by has changed with it, a P of nearly 1 keeps its own change to itself.
        of_p = self.own * (1.0 - 2.0 * self.p) + np.square(self.p) * of_row[:, None]
        all_alike = self.alike and _are_alike(do)
        dv = _sum(np.square(self.kept).T * of_p.T, do, all_alike)
        # Where O is not finite, neither is D, of which dS is made.
        p, own, of_p = (np.where(self.good, x, 0.0) for x in (self.p, self.own, of_p))
        row_sum = (do * self.o).sum(axis=1)
        dp = np.where(p == 0.0, 0.0, self.kept * (do @ self.v.T) - (row_sum - of_lse)[:, None])
        of_row_sum, of_dp = (np.square(do) * self.of_o).sum(axis=1), np.zeros_like(p)
        if self.alike:
            of_row_sum = np.square((np.abs(do) * np.sqrt(self.of_o)).sum(axis=1))
            of_row_sum += np.diagonal(_of_products(do, self.o))
            of_dp = np.square(self.kept) * _of_products(do, self.v)
        # A row's dQ, like O, moves by what each pair has of it less itself, and by what all pairs have in common.
        terms = self.slopes * dp
        dq = (p * terms) @ self.k
        of_dq = (own * np.square(terms)) @ np.square(self.k) - 2.0 * dq * ((own * terms) @ self.k)
        of_dq = np.maximum(of_dq + np.square(dq) * of_row[:, None], 0.0)
        of_dq += np.square((p * self.slopes) @ self.k) * of_row_sum[:, None]
        of_dq += _sum(np.square(p * self.slopes) * of_dp, self.k, self.alike)
        of_ds = np.square(terms) * of_p + np.square(p * self.slopes) * (of_dp + of_row_sum[:, None])
        scale = np.square(self.scale)
        return scale * of_dq, scale * _sum(of_ds.T, self.q, all_alike), dv

    def of_rounding_o(self, do: Floats) -> tuple[Floats, Floats]:
        """The changes of dQ and dK when each element of O is rounded."""
        terms = _finite(do) * self.o
        alike = np.all(np.abs(self.o - self.o[:, :1]) <= _ALIKE * np.abs(self.o[:, :1]), axis=1)
        of_row_sum = np.where(alike, np.abs(terms.sum(axis=1)), np.sqrt(np.square(terms).sum(axis=1)))
        ds = np.where(self.good, self.p, 0.0) * np.abs(self.slopes) * of_row_sum[:, None]
        return self.scale * (ds @ self.k), self.scale * (ds.T @ self.q)


def _sum(squares: Floats, factors: Floats, alike: bool) -> Floats:
    """Squares of the changes of sums of what changes by so much, times factors; what is alike changes alike."""
    total: Floats = np.square(np.sqrt(squares) @ np.abs(factors)) if alike else squares @ np.square(factors)
    return total


def _are_alike(rows: Floats) -> bool:
    return len(rows) > 1 and bool(np.all(np.abs(rows - rows[:1]) <= _ALIKE * np.abs(rows[:1])))


def _of_products(rows: Floats, columns: Floats) -> Floats:
    """Squares of the changes of sums of products: as many roundings as terms, each of a third in the mean, of what the
    sum is on the way: half of the terms at random, a third of them where they are of one sign."""
    at_random = (np.square(rows) @ np.square(columns).T) / 2.0
    squares: Floats = rows.shape[1] / 3.0 * (at_random + np.square(rows @ columns.T) / 3.0)
    return squares


def _are_finite(rows: Floats) -> Pairs:
    return np.asarray(np.isfinite(rows).all(axis=1, keepdims=True))


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, 0.0)


def largest(values: NDArray[np.float64]) -> float:
    """The largest magnitude of those that are finite."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
