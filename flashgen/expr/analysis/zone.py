"""Bounds on q, k and k - q that a conjunction states, and what follows from them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard

from flashgen.expr.analysis.bitwise_intervals import End
from flashgen.expr.analysis.bounds import at_most_zero, every, greatest, least, ordered, times, total
from flashgen.expr.analysis.intervals import Region
from flashgen.expr.analysis.linear import VARYING, Linear, forms, linear
from flashgen.expr.tree.build import binary
from flashgen.expr.tree.nodes import Binary, Const, Index, Load, Node
from flashgen.expr.tree.tile_nodes import Search

Span = tuple[Node, Node]


@dataclass(slots=True)
class Bounds:
    """Lower and upper bounds of one quantity."""

    lower: list[Node] = field(default_factory=list)
    upper: list[Node] = field(default_factory=list)

    def limit(self, factor: int, most: Node) -> None:
        """``factor * quantity <= most``, solved for the quantity in whole numbers."""
        quotient = most if abs(factor) == 1 else binary("//", most, abs(factor))
        if factor > 0:
            self.upper.append(quotient)
        else:
            self.lower.append(total([(-1, quotient)]))

    @property
    def stated(self) -> bool:
        """Whether there is any bound."""
        return bool(self.lower or self.upper)

    def copy(self) -> Bounds:
        """Bounds to which more can be added."""
        return Bounds(list(self.lower), list(self.upper))

    def tightest(self) -> tuple[End, End]:
        """The largest lower and the smallest upper bound."""
        return greatest(*self.lower) if self.lower else None, least(*self.upper) if self.upper else None

    def within(self, span: Span) -> Span:
        """A span clipped to the bounds."""
        return greatest(span[0], *self.lower), least(span[1], *self.upper)


@dataclass(slots=True)
class Zone:
    """A conjunction, sorted: bounds of q, k and k - q, conditions with neither q nor k, and all that remains."""

    q: Bounds = field(default_factory=Bounds)
    k: Bounds = field(default_factory=Bounds)
    difference: Bounds = field(default_factory=Bounds)
    fixed: list[Node] = field(default_factory=list)
    rest: list[Node] = field(default_factory=list)

    @classmethod
    def of(cls, literals: Iterable[Node]) -> Zone:
        """The zone of a conjunction; an interval of a quantity becomes a bound, everything else stays as it is."""
        zone = cls()
        for literal in literals:
            if not literal.uses & VARYING:
                zone.fixed.append(literal)
            elif not (_is_order(literal) and zone._all_stated(literal)):
                zone.rest.append(literal)
        return zone

    @property
    def is_pure(self) -> bool:
        """Whether the bounds are the whole conjunction."""
        return not self.rest

    def _all_stated(self, literal: Binary) -> bool:
        parts = list(forms(literal))
        if not parts or any(x.varying or not _is_bound(x) for x in parts):
            return False
        for x in parts:
            self._state(x.q, x.k, total([(-f, n) for f, n in x.others], -x.constant))
        return True

    def _state(self, q: int, k: int, most: Node) -> None:
        """``q * query + k * key <= most``."""
        if not q and not k:
            self.fixed.append(ordered(Const(0), most))
        elif not q:
            self.k.limit(k, most)
        elif not k:
            self.q.limit(q, most)
        else:
            self.difference.limit(k, most)

    def region(self, q: Span, k: Span, unread: Literal["", "q", "k"] = "") -> Region:
        """What the bounds leave of a rectangle: the shortest paths between q, k and zero."""
        tile = {"q": q, "k": k}
        q, k = self.q.within(q), self.k.within(k)
        low, high = self.difference.tightest()
        q_low = q[0] if high is None else greatest(q[0], total([(1, k[0]), (-1, high)]))
        q_high = q[1] if low is None else least(q[1], total([(1, k[1]), (-1, low)]))
        k_low = k[0] if low is None else greatest(k[0], total([(1, q[0]), (1, low)]))
        k_high = k[1] if high is None else least(k[1], total([(1, q[1]), (1, high)]))
        least_step, most_step = total([(1, k[0]), (-1, q[1])]), total([(1, k[1]), (-1, q[0])])
        difference = (
            least_step if low is None else greatest(least_step, low),
            most_step if high is None else least(most_step, high),
        )
        return Region((q_low, q_high), (k_low, k_high), difference, tile, unread)

    def feasible(self, q: Span, k: Span) -> list[Node]:
        """Conditions that hold together exactly when some pair of the rectangle is within the bounds."""
        found = []
        for span, bounds in ((q, self.q), (k, self.k)):
            found += [ordered(span[0], high) for high in bounds.upper]
            found += [ordered(low, high) for low in bounds.lower for high in (span[1], *bounds.upper)]
        (q_low, q_high), (k_low, k_high) = self.q.within(q), self.k.within(k)
        for high in self.difference.upper:
            found.append(at_most_zero([(1, k_low), (-1, q_high), (-1, high)]))
        for low in self.difference.lower:
            found.append(at_most_zero([(1, low), (-1, k_high), (1, q_low)]))
        found += [ordered(low, high) for low in self.difference.lower for high in self.difference.upper]
        return found

    def may_hold(self, q: Span, k: Span) -> Node:
        """Whether some pair of the rectangle may satisfy the conjunction; exact when it is pure."""
        region = self.region(q, k)
        return every([*self.fixed, *self.feasible(q, k), *(region.may_hold(literal) for literal in self.rest)])

    def loosened(self, q: Span, k: Span, unread: Literal["q", "k"], *, searches: bool) -> Zone:
        """With bounds of ``unread`` that follow from what remains, over a rectangle that spans all of it; by searches
        in tensors, too, or without."""
        region = self.region(q, k, unread)
        found = Zone(self.q.copy(), self.k.copy(), self.difference.copy(), self.fixed.copy(), self.rest)
        for literal in self.rest:
            if _is_order(literal):
                for x in forms(literal):
                    found._imply(x, region, searches)
        # Of the other index the rectangle says enough.
        kept = self.q if unread == "k" else self.k
        return replace(found, q=kept) if unread == "k" else replace(found, k=kept)

    def _imply(self, x: Linear, region: Region, searches: bool) -> None:
        """Bounds that hold wherever ``x <= 0``."""
        free = Linear(0, 0, x.constant, x.others)
        self._imply_sum(x.q, x.k, _opposite(region.lower(free)), region)
        for factor, node in x.varying:
            if isinstance(node, Binary) and node.op == "//" and abs(factor) == 1 and not node.right.uses & VARYING:
                self._imply_quotient(node, factor, _opposite(region.lower(x.without(node))), region)
            if searches and isinstance(node, Load) and (axis := _axis_along(node, region.unread)) is not None:
                self._imply_element(node, axis, factor, _opposite(region.lower(x.without(node))), region)

    def _imply_sum(self, q: int, k: int, most: End, region: Region) -> None:
        if most is None or (not q and not k):
            return
        if q == -k or not q or not k:
            self._state(q, k, most)
            return
        for factor, other, bounds, span in ((q, k, self.q, region.k), (k, q, self.k, region.q)):
            bounds.limit(factor, total([(1, most), (-other, span[0 if other > 0 else 1])]))

    def _imply_element(self, node: Load, axis: int, factor: int, most: End, region: Region) -> None:
        """``factor * element <= most``: no such element lies before the first one, or after the last."""
        if most is None:
            return
        bounds = self.q if region.unread == "q" else self.k
        others = (*node.indices[:axis], *node.indices[axis + 1 :])
        quotient = most if abs(factor) == 1 else binary("//", most, abs(factor))
        if factor > 0:
            bounds.upper.append(Search("last", node.tensor, axis, others, quotient))
        else:
            bounds.lower.append(Search("first", node.tensor, axis, others, total([(-1, quotient)])))

    def _imply_quotient(self, node: Binary, factor: int, most: End, region: Region) -> None:
        """``factor * (x // m) <= most`` as a bound of x: ``x <= most * m + m - 1`` or ``x >= -most * m``."""
        x = linear(node.left)
        if most is None or x.varying or not (x.q or x.k):
            return
        divisor = node.right
        end = times(most, divisor) if factor > 0 else times(total([(-1, most)]), divisor)
        limit = total([(1, end), (1, divisor)], -1) if factor > 0 else end
        x = x.scaled(factor)
        self._imply_sum(x.q, x.k, total([(factor, limit), *((-f, n) for f, n in x.others)], -x.constant), region)


def _is_order(literal: Node) -> TypeGuard[Binary]:
    return isinstance(literal, Binary) and literal.left.type == "int"


def _is_bound(x: Linear) -> bool:
    return not x.q or not x.k or x.q == -x.k


def _axis_along(node: Load, name: str) -> int | None:
    """The dimension that a whole sequence of elements is loaded along, by an index that stands alone there."""
    varying = [i for i, index in enumerate(node.indices) if index.uses & VARYING]
    index = node.indices[varying[0]] if len(varying) == 1 else None
    return varying[0] if isinstance(index, Index) and index.name == name and node.type == "int" else None


def _opposite(end: End) -> End:
    return None if end is None else total([(-1, end)])
