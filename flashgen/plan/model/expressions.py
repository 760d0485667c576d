"""The trees that a kernel evaluates, and the captured tensors and tables that they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.common import identifiers

if TYPE_CHECKING:
    from flashgen.expr import Load, Node, TileRule


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    """A tensor that an expression reads: its name there, its elements' C++ type, and its rank."""

    name: str
    element: str
    rank: int

    @property
    def identifier(self) -> str:
        """The kernel parameter that points to its elements, and the function that reads it."""
        return identifiers.captured(self.name)

    @property
    def strides(self) -> tuple[str, ...]:
        """The kernel parameters that hold its strides, in elements."""
        return tuple(identifiers.stride(self.name, axis) for axis in range(self.rank))

    @property
    def sizes(self) -> tuple[str, ...]:
        """The kernel parameters that hold its sizes."""
        return tuple(identifiers.size(self.name, axis) for axis in range(self.rank))


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the extremes of a captured tensor: one entry per ``stretch`` elements along one dimension."""

    tensor: str
    axis: int
    #: The tiles that it is indexed by: of queries (q), of keys (k), or both.
    sides: str
    #: Whether it is also searched for where elements first reach a value, or are last within it.
    is_searched: bool = False

    @property
    def captured(self) -> str:
        """The function that reads the tensor."""
        return identifiers.captured(self.tensor)

    @property
    def numbers(self) -> int:
        """Numbers per entry."""
        return 4 if self.is_searched else 2

    @property
    def parameter(self) -> str:
        """The kernel parameter that points to it, and the function that reads it."""
        return identifiers.survey(self.tensor, self.axis)


@dataclass(frozen=True, slots=True)
class Expressions:
    """The trees that a kernel of a spec evaluates; what is None needs no evaluating."""

    mask: Node | None
    rule: TileRule | None
    score: Node | None
    #: The derivative of the score with respect to its logit.
    slope: Node | None
    sink: Node | None
    scalars: tuple[tuple[str, str], ...]
    tensors: tuple[CapturedTensor, ...]
    tables: tuple[Table, ...]
    #: Elements per entry of the tables.
    stretch: int = 0

    def plain(self) -> tuple[object, ...]:
        """All of it as text and numbers; the rule and the slope follow from the trees."""
        from flashgen.expr import text

        trees = [None if tree is None else text(tree) for tree in (self.mask, self.score, self.sink)]
        tensors = tuple((t.name, t.element, t.rank) for t in self.tensors)
        return (*trees, self.scalars, tensors, self.stretch)

    @property
    def has_mask(self) -> bool:
        """Whether the mask is an expression, not a band."""
        return self.mask is not None


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """The score as one kernel computes it."""

    #: The score of a pair, as a tree over its logit or over its product.
    value: Node
    #: The derivative of the score with respect to its logit; None in kernels that do not need it.
    slope: Node | None
    #: The loads that are issued before the products of their pairs are known.
    ahead: tuple[Load, ...] = ()
    #: Whether there are registers for the constants of a tile, and for a second way to compute functions near zero.
    has_spare_registers: bool = False
    #: Whether it adds to products, before they are multiplied by the scale.
    in_products: bool = False

    def plain(self) -> tuple[object, ...]:
        """All that differs from kernel to kernel; the trees follow from those of the expressions."""
        from flashgen.expr import text

        ahead = tuple(text(load) for load in self.ahead)
        return self.slope is not None, ahead, self.has_spare_registers, self.in_products


NO_EXPRESSIONS = Expressions(None, None, None, None, None, (), (), ())
