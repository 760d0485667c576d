"""A spec's mask, score, sink and dropout for one head of one sequence: evaluated in NumPy, pair by pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.oracle.dropout import kept_pairs
from flashgen.oracle.problem import Problem, refuse_masked
from flashgen.spec import AttentionSpec, Dropout, Mask

if TYPE_CHECKING:
    from flashgen.expr import Node

Floats = NDArray[np.float64]
Pairs = NDArray[np.bool_]
#: Of each sequence how many queries and keys there are; the rest of a batch's rows is padding.
Lengths = Sequence[tuple[int, int]]


class Rules:
    """What a spec says of the pairs of a call; ``captured`` replaces tensors that the spec was made with."""

    def __init__(
        self,
        spec: AttentionSpec,
        problem: Problem,
        captured: Mapping[str, Any] | None = None,
        dropout: Dropout | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self._spec, self._dropout, self._lengths = spec, dropout, lengths
        self._shape = (problem.len_q, problem.len_kv)
        for name, value in (captured or {}).items():
            refuse_masked(f"captured[{name!r}]", value)
        self._env: dict[str, Any] = {**spec.scalars, **spec.tensors, **(captured or {})}
        self._env |= {"q_len": problem.len_q, "k_len": problem.len_kv}
        self._env |= {"q": np.arange(problem.len_q)[:, None], "k": np.arange(problem.len_kv)[None, :]}

    @property
    def changes_logits(self) -> bool:
        """Whether scores differ from logits."""
        return self._spec.score is not None and self._spec.score.changes_logits

    def allowed(self, b: int, h: int) -> Pairs:
        """``[q, k]`` is true where query q may attend to key k."""
        len_q, len_kv = self._shape if self._lengths is None else self._lengths[b]
        allowed = np.zeros(self._shape, np.bool_)
        if self._spec.mask.is_band:
            allowed[:len_q, :len_kv] = allowed_pairs(self._spec.mask, len_q, len_kv)
        else:
            every = self._evaluate(self._spec.mask.traced.root, b, h).astype(bool)
            allowed[:len_q, :len_kv] = every[:len_q, :len_kv]
        return allowed

    def scores(self, logits: Floats, b: int, h: int) -> Floats:
        """The scores of scaled logits."""
        if self._spec.score is None or not self.changes_logits:
            return logits
        return self._evaluate(self._spec.score.traced.root, b, h, s=logits)

    def slopes(self, logits: Floats, b: int, h: int) -> Floats:
        """The derivatives of the scores with respect to the logits."""
        if self._spec.score is None or not self.changes_logits:
            return np.ones_like(logits)
        from flashgen.expr import Score, derivative

        return self._evaluate(derivative(self._spec.score.traced.root, Score()), b, h, s=logits)

    def angles(self, logits: Floats, b: int, h: int) -> Floats:
        """Of each sine, cosine and tangent the angle, times what the score changes by with it, summed up.

        A large angle is rounded by more than the score is, which other functions do not do to their operands. An
        element of a tensor is an angle as it is.
        """
        if self._spec.score is None:
            return np.zeros_like(logits)
        from flashgen.expr import derivative, postorder
        from flashgen.expr.tree.nodes import Unary

        root = self._spec.score.traced.root
        nodes = [n for n in postorder(root) if isinstance(n, Unary) and n.op in ("sin", "cos", "tan")]
        total = np.zeros_like(logits)
        for angle in dict.fromkeys(node.operand for node in nodes if not self._is_float32(node.operand)):
            total += np.abs(self._evaluate(derivative(root, angle) * angle, b, h, s=logits))
        return total

    def _is_float32(self, node: Node) -> bool:
        """Whether it is an element of a tensor whose floats have at most 32 bits."""
        from flashgen.expr import Load, element_type

        return isinstance(node, Load) and element_type(self._env[node.tensor.name]) != "float64"

    def sink(self, b: int, h: int) -> float:
        """The logit that takes part in every row's softmax without a value; minus infinity for none."""
        if self._spec.score is None or self._spec.score.sink is None:
            return -np.inf
        from flashgen.expr import evaluate

        return float(evaluate(self._spec.score.sink.root, {**self._env, **self._of(b), "b": b, "h": h}))

    def kept(self, b: int, h: int) -> Floats | None:
        """How often each pair counts: 1 / (1 - p) times, or not at all; None without dropout."""
        check_dropout(self._spec, self._dropout)
        if self._dropout is None:
            return None
        return np.where(kept_pairs(self._dropout, b, h, *self._shape), self._dropout.factor, 0.0)

    def evaluated(self, roots: list[Node], logits: Floats, b: int, h: int) -> list[NDArray[Any]]:
        """The values of trees over scaled logits."""
        from flashgen.expr import evaluate_all

        if self._is_empty(b):
            return [np.zeros(self._shape, np.int64) for _ in roots]
        return evaluate_all(roots, {**self._env, **self._of(b), "b": b, "h": h, "s": logits})

    def _evaluate(self, root: Any, b: int, h: int, **more: Any) -> NDArray[Any]:
        from flashgen.expr import evaluate

        if self._is_empty(b):
            return np.zeros(self._shape)
        return np.broadcast_to(evaluate(root, {**self._env, **self._of(b), "b": b, "h": h, **more}), self._shape)

    def _is_empty(self, b: int) -> bool:
        """Whether a sequence has no pair of a query and a key."""
        return 0 in self._shape or (self._lengths is not None and 0 in self._lengths[b])

    def _of(self, b: int) -> dict[str, Any]:
        """What expressions see of a sequence: its last row for those not used, which tensors need no elements for."""
        if self._lengths is None:
            return {}
        len_q, len_kv = self._lengths[b]
        last = {"q": max(len_q - 1, 0), "k": max(len_kv - 1, 0)}
        return {"q_len": len_q, "k_len": len_kv, **{name: np.minimum(self._env[name], n) for name, n in last.items()}}


def check_dropout(spec: AttentionSpec, dropout: Dropout | None) -> None:
    """Dropout comes with calls of specs that have it, and with no others."""
    if spec.dropout and not isinstance(dropout, Dropout):
        raise ArgumentError(f"dropout={show(dropout)}: a spec with dropout=True needs flashgen.Dropout(p, seed)")
    if dropout is not None and not spec.dropout:
        raise ArgumentError("dropout was given, but the spec has none; make one with dropout=True")


def allowed_pairs(mask: Mask, len_q: int, len_kv: int) -> Pairs:
    """``[q, k]`` is true where query q may attend to key k, for a mask that is a band."""
    if not mask.is_band:
        raise ArgumentError(f"the mask {mask.describe()} is no band; it needs a sequence and a head: use oracle.Rules")
    lower, upper = mask.diagonals(len_q, len_kv)
    distance = np.arange(len_kv)[None, :] - np.arange(len_q)[:, None]
    return np.asarray((lower <= distance) & (distance <= upper))
