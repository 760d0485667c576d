"""Scores: what becomes of a logit before the softmax.

A score is an expression over the scaled logit ``s`` and b, h, q and k (``flashgen.expr``). ``one >> two`` applies
one and then two. A *sink* is a learned logit per head that takes part in every row's softmax and has no value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from flashgen.common.checks import as_float
from flashgen.common.show import show
from flashgen.errors import SpecError
from flashgen.expr import Const, Traced, derivative, k_len, maximum, minimum, q_len, tanh, text, trace_score
from flashgen.expr import Score as Logit
from flashgen.spec.form import Form, form_of
from flashgen.spec.masks.mask import Mask
from flashgen.spec.tensors import check_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """What the softmax takes in place of the scaled logit, and optionally a sink.

    Two scores are equal when their expressions are equal; the tensors that it captured are
    arguments of a call, so only their names and types count.
    """

    traced: Traced
    sink: Traced | None = None
    #: The same object for equal scores.
    form: Form = field(init=False, repr=False)
    form_name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        form = form_of(self._key())
        object.__setattr__(self, "form", form)
        object.__setattr__(self, "form_name", form.name)

    @classmethod
    def of(cls, score: Score | Callable[..., Any]) -> Score:
        """A score as it is, or the score of a function ``(s, b, h, q, k) -> number``."""
        return score if isinstance(score, Score) else cls(trace_score(score))

    def __rshift__(self, other: Score) -> Score:
        if not isinstance(other, Score):
            raise SpecError(f"`>>` applies one score after another, and {show(other)} is none; use Score.of(function)")
        if self.sink is not None and other.sink is not None:
            raise SpecError("both scores have a sink, and a row of scores can have one; add their logits instead")
        sink = self.sink or other.sink
        return Score(self.traced.then(other.traced), sink)

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        """Not meant to be called: the error says what to write instead."""
        raise SpecError(
            f"{self.describe()} is a Score, and is not called inside of another; combine scores with >>: "
            "fg.softcap(30.0) >> fg.alibi(slopes)"
        )

    def _key(self) -> tuple[object, ...]:
        return self.traced.key, None if self.sink is None else self.sink.key

    def plain(self) -> tuple[object, ...]:
        """The code as text: all but the values that it captured."""
        return self.traced.plain(), None if self.sink is None else self.sink.plain()

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Score) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def apart_from(self, mask: Mask) -> Score:
        """The same with names for what it captured that clash neither with the mask's nor with each other."""
        traced, sink = self.traced, self.sink
        if mask.rest is not None:
            traced = traced.renamed(mask.traced)
        if sink is not None:
            taken = Traced(traced.root, traced.scalars, traced.tensors)
            if mask.rest is not None:
                other = mask.traced
                taken = Traced(traced.root, {**other.scalars, **traced.scalars}, {**other.tensors, **traced.tensors})
            sink = sink.renamed(taken)
        return Score(traced, sink)

    @property
    def changes_logits(self) -> bool:
        """Whether a score differs from its logit."""
        return self.traced.root is not Logit()

    @property
    def only_adds(self) -> bool:
        """Whether it adds a term that does not depend on the logit, so that its slope is 1 everywhere."""
        return derivative(self.traced.root, Logit()) is Const(1.0)

    def describe(self) -> str:
        """The score as text."""
        parts = [text(self.traced.root)] if self.changes_logits else []
        if self.sink is not None:
            parts.append(f"sink({text(self.sink.root)})")
        return " and ".join(parts) or "s"


def softcap(cap: float) -> Score:
    """Logits squeezed into (-cap, cap): ``tanh(s / cap) * cap``."""
    limit = as_float(cap)
    if limit is None or not 0.0 < limit < math.inf:
        raise SpecError(f"cap={show(cap)} is not a limit for logits; use a positive number, such as 30.0")
    return _softcap(limit)


@lru_cache(maxsize=256)
def _softcap(limit: float) -> Score:
    """Traced once for each limit: a score never changes, and makes no difference between calls."""
    return Score.of(lambda s, b, h, q, k: tanh(s / limit) * limit)


def alibi(slopes: Any) -> Score:
    """A penalty in proportion to the distance; ``slopes`` is (heads,) or (batch, heads).

    Where lengths differ, the last query stands at the last key.
    """
    if check_tensor("slopes", slopes, 1, 2) == 1:
        return Score.of(lambda s, b, h, q, k: s - slopes[h] * abs(q + (k_len - q_len) - k))
    return Score.of(lambda s, b, h, q, k: s - slopes[b, h] * abs(q + (k_len - q_len) - k))


def bias(tensor: Any) -> Score:
    """``s + tensor[b, h, q, k]``; leading dimensions may be missing, and dimensions of 1 are broadcast."""
    rank = check_tensor("tensor", tensor, 1, 2, 3, 4)
    axes = ["0" if size == 1 else name for size, name in zip(tensor.shape, "bhqk"[4 - rank :], strict=True)]
    order = "".join(axes)

    def added(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        places = {"b": b, "h": h, "q": q, "k": k, "0": 0}
        return s + tensor[tuple(places[axis] for axis in order)]

    return Score.of(added)


def relative_bias(table: Any) -> Score:
    """A bias by distance: ``table[h, k - q + n]`` with distances limited to ``-n .. n``.

    ``table`` is (heads, 2 n + 1) or (2 n + 1,). Where lengths differ, the last query stands at the last key.
    """
    rank = check_tensor("table", table, 1, 2)
    width = int(table.shape[-1])
    if width % 2 == 0:
        raise SpecError(f"table has {width} entries per head; it needs an odd number: distances -n to n")
    farthest = width // 2

    def entry(q: Any, k: Any) -> Any:
        return minimum(maximum(k - (q + (k_len - q_len)), -farthest), farthest) + farthest

    if rank == 1:
        return Score.of(lambda s, b, h, q, k: s + table[entry(q, k)])
    return Score.of(lambda s, b, h, q, k: s + table[h, entry(q, k)])


def sink(logits: Any) -> Score:
    """A learned logit per head that competes in every row's softmax and contributes no value (gpt-oss)."""
    check_tensor("logits", logits, 1)
    traced = trace_score(lambda s, b, h, q, k: logits[h])
    return Score(Traced(Logit()), traced)


def identity() -> Score:
    """The logit as it is."""
    return Score(Traced(Logit()))
