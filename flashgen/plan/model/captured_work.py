"""The work of kernels of captured gradients: what each load of a captured tensor adds to its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flashgen.common import identifiers
from flashgen.plan.model.expressions import CapturedTensor

if TYPE_CHECKING:
    from flashgen.expr import Load, Node

#: The element is the same for all pairs of a sequence and head, for those of a query, of a key, of a distance
#: k - q, or for none.
Over = Literal["block", "rows", "columns", "diagonals", "pairs"]
How = Literal["none", "tile", "sum"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one load of a captured tensor adds to its gradient: dS times the slope, at the element loaded."""

    tensor: CapturedTensor
    load: Load
    #: d score / d load.
    slope: Node
    #: Over which pairs the element is the same.
    over: Over

    def plain(self) -> tuple[object, ...]:
        """All of it as text."""
        from flashgen.expr import text

        return self.tensor.name, text(self.load), text(self.slope), self.over


@dataclass(frozen=True, slots=True)
class CapturedGradient:
    """How the gradient of one captured tensor is computed."""

    tensor: CapturedTensor
    pairs: tuple[Share, ...]
    sinks: tuple[Share, ...]
    #: none: zero; tile: summed in registers, one tile at a time; sum: added to sums in memory.
    how: How

    @property
    def parameter(self) -> str:
        """The kernel parameter that points to the gradient."""
        return identifiers.gradient(self.tensor.name)

    @property
    def sums(self) -> str:
        """The kernel parameter that points to the sums."""
        return identifiers.sums(self.tensor.name)

    @property
    def elements(self) -> str:
        """The kernel parameter that counts the gradient's elements."""
        return identifiers.elements(self.tensor.name)

    @property
    def cleared(self) -> str:
        """The kernel parameter that says how many of the gradient's elements have to be cleared: all, or none."""
        return identifiers.cleared(self.tensor.name)


@dataclass(frozen=True, slots=True)
class CapturedWork:
    """The work of one kernel of captured gradients."""

    shares: tuple[Share, ...] = ()
    summed: tuple[CapturedGradient, ...] = ()
    cleared: tuple[CapturedGradient, ...] = ()
