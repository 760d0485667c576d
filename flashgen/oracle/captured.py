"""Gradients of captured float tensors: what a loss gains by each element of a bias, a slope, a sink.

A score changes by ``d score / d load`` where a captured element is loaded, and the loss by that times
``dS = P (dP - D)``, of each pair that is allowed. A sink's column of dS is ``-P_sink D``: its dP is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashgen.oracle.attention import HeadRules, forward_head
from flashgen.oracle.problem import gradient_of_lse, read_problem
from flashgen.oracle.rules import Floats, Lengths, Rules
from flashgen.spec import AttentionSpec, Dropout

if TYPE_CHECKING:
    from flashgen.expr import Load, Node


def captured_gradients(
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
) -> dict[str, Floats]:
    """Gradients of ``sum(do * o) + sum(dlse * lse)`` by the captured float tensors, in float64, by name."""
    given = read_problem(spec, q, k, v, do, scale=scale)
    assert given.do is not None, "do was given"
    rules, of_lse = Rules(spec, given, captured, dropout, lengths), gradient_of_lse(given, dlse)
    gradients = CapturedSums(spec, rules, captured)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(given.batch, given.heads):
            h_kv = h // given.group
            q_h, k_h, v_h, do_h = given.q[b, :, h], given.k[b, :, h_kv], given.v[b, :, h_kv], given.do[b, :, h]
            of_head = HeadRules(rules, b, h)
            head = forward_head(q_h, k_h, v_h, given.scale, of_head)
            row_sum = (do_h * head.o).sum(axis=1) - of_lse[b, h]
            ds = np.where(of_head.allowed, head.p * (of_head.keep(do_h @ v_h.T) - row_sum[:, None]), 0.0)
            gradients.add_pairs(given.scale * (q_h @ k_h.T), ds, b, h)
            gradients.add_sink(-sink_column(of_head.sink, head.lse) * row_sum, b, h)
    return gradients.values


def sink_column(sink: float, lse: Floats) -> Floats:
    """The probability of each row's sink; 0 for a row that attends to nothing, not even a sink."""
    return np.exp(sink - np.where(lse == -np.inf, np.inf, lse))


class CapturedSums:
    """For each element of each captured float tensor, the sum of what pairs and sinks contribute.

    Or of ``magnitudes``, with slopes of at least one: what the roundings of float32 are in proportion to, since a
    small slope may be the difference of numbers near one, as that of tanh is.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        rules: Rules,
        captured: Mapping[str, Any] | None = None,
        *,
        magnitudes: bool = False,
    ) -> None:
        from flashgen.expr.readings.numpy import as_numpy

        tensors = {**spec.tensors, **(captured or {})}
        self.values: dict[str, Floats] = {
            name: np.zeros(as_numpy(tensors[name]).shape) for name in differentiable(spec)
        }
        self._rules, self._magnitudes = rules, magnitudes
        self._score = () if spec.score is None else _slopes(spec.score.traced.root)
        self._sink = () if spec.score is None or spec.score.sink is None else _slopes(spec.score.sink.root)

    def add_pairs(self, logits: Floats, ds: Floats, b: int, h: int) -> None:
        """``ds`` is the gradient of the scores of a head; where it is 0, nothing is added."""
        for sums, at, terms in self._terms(self._score, logits, ds, b, h):
            np.add.at(sums, at, terms)

    def add_squares(self, logits: Floats, ds: Floats, b: int, h: int, *, by_row: bool = False) -> None:
        """Squares instead, of each term or of the sum of those of a row."""
        for sums, at, terms in self._terms(self._score, logits, ds, b, h):
            if by_row:
                keys = at + sums.size * np.arange(logits.shape[0])[:, None]
                unique, inverse = np.unique(keys, return_inverse=True)
                np.add.at(sums, unique % sums.size, np.bincount(inverse.ravel(), terms.ravel()) ** 2)
            else:
                np.add.at(sums, at, terms**2)

    def add_sink(self, column: Floats, b: int, h: int, *, squares: bool = False) -> None:
        """``column`` is the gradient of the sink's scores of a head."""
        for sums, at, terms in self._terms(self._sink, column[:, None], column[:, None], b, h):
            np.add.at(sums, at, terms**2 if squares else terms)

    def _terms(
        self, slopes: tuple[tuple[Load, Node], ...], logits: Floats, ds: Floats, b: int, h: int
    ) -> Iterator[tuple[Floats, NDArray[np.int64], Floats]]:
        """The sums of a tensor as one row of elements, which of them each term belongs to, and the terms."""
        for load, slope in slopes if logits.size else ():
            sums = self.values[load.tensor.name]
            *indices, factor = self._rules.evaluated([*load.indices, slope], logits, b, h)
            at = np.zeros(logits.shape, np.int64)
            for index, size in zip(indices, sums.shape, strict=True):
                at = at * size + index
            if self._magnitudes:
                ds, factor = np.abs(ds), np.maximum(np.abs(factor), 1.0)
            yield sums.reshape(-1), at, np.where(ds == 0.0, 0.0, ds * factor)


def differentiable(spec: AttentionSpec) -> tuple[str, ...]:
    """The names of the captured float tensors."""
    from flashgen.expr import element_type
    from flashgen.expr.trace.capture import TYPES

    return tuple(name for name, value in sorted(spec.tensors.items()) if TYPES[element_type(value)] == "float")


def _slopes(root: Node) -> tuple[tuple[Load, Node], ...]:
    from flashgen.expr import Load, captured_gradients

    return tuple((load, slope) for load, slope in captured_gradients(root) if isinstance(load, Load))
