"""Gradients of captured float tensors, as results of a call: what is allocated, and which arguments kernels get."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.prepared import Output
from flashgen.plan.captured.gradients import DTYPES, gradients_of
from flashgen.plan.captured.load_dependence import tile_places
from flashgen.plan.model.expressions import Expressions
from flashgen.plan.model.plans import Problem

#: 32-bit words of an exact sum: as many 64-bit ones as ``kAccumulatorWords`` says.
_SUM_WORDS = 2 * 13


class Gradients:
    """The captured gradients of one spec."""

    def __init__(self, expressions: Expressions | None) -> None:
        self._gradients = gradients_of(expressions)
        self.names = tuple(g.tensor.name for g in self._gradients)

    def outputs(self, captured: Sequence[ArrayInfo]) -> tuple[tuple[Output, ...], tuple[Output, ...]]:
        """The gradients, and the workspaces in which those that take sums are summed."""
        shapes = {info.name: info.shape for info in captured}
        results = [Output(g.parameter, shapes[g.tensor.name], DTYPES[g.tensor.element]) for g in self._gradients]
        workspaces = [
            Output(g.sums, (_SUM_WORDS * math.prod(shapes[g.tensor.name]),), "fp32")
            for g in self._gradients
            if g.how == "sum"
        ]
        return tuple(results), tuple(workspaces)

    def values(self, captured: Sequence[ArrayInfo], problem: Problem) -> dict[str | None, float]:
        """How many elements gradients have, and how many of them no kernel would write."""
        shapes = {info.name: info.shape for info in captured}
        values: dict[str | None, float] = {}
        reached = {"b": problem.batch, "h": problem.heads_q, "q": problem.len_q, "k": problem.len_kv, "": 1}
        for g in self._gradients:
            shape = shapes[g.tensor.name]
            values[g.elements] = values[g.cleared] = math.prod(shape)
            if g.how == "tile":
                places = tile_places(g.pairs[0].load.indices) or ()
                # A tensor may have more elements than this call has queries, keys ... to reach them.
                if all(size == reached[place] for size, place in zip(shape, places, strict=True)):
                    values[g.cleared] = 0
        return values
