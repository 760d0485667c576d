"""Trees over a rectangle of queries and keys: the interval of an int, and whether a condition may hold in it.

Both are trees again, over the rectangle's bounds. An end of an interval is None when nothing is known. A divisor
that is the same for all pairs is taken to be positive; ``divisors`` lists those for which that is to be checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from flashgen.expr.analysis.bitwise_intervals import End, Interval, Known, bits_interval
from flashgen.expr.analysis.bounds import (
    at_most_zero,
    every,
    greatest,
    least,
    ordered,
    some,
    static_range,
    times,
    total,
    where,
)
from flashgen.expr.analysis.linear import VARYING, Linear, linear
from flashgen.expr.tree.build import NEGATED, binary, unary
from flashgen.expr.tree.nodes import USES, Binary, Const, Index, Load, Node, Select, Unary
from flashgen.expr.tree.tile_nodes import Range
from flashgen.expr.tree.visit import postorder

_UNKNOWN: Interval = (None, None)
_TRUE = Const(True)


@dataclass(frozen=True, slots=True)
class Region:
    """What is known of q, k and k - q. ``tile`` holds the rectangle's own bounds: tensors are read over those.

    A sequence in ``unread`` spans more than a tile, so that no tensor is read over it.
    """

    q: tuple[Node, Node]
    k: tuple[Node, Node]
    difference: Interval
    tile: dict[str, tuple[Node, Node]]
    unread: Literal["", "q", "k"] = ""
    intervals: dict[Node, Interval] = field(default_factory=dict)

    def interval(self, node: Node) -> Interval:
        """The smallest and largest value of an int in the region."""
        if not node.uses & VARYING:
            return node, node
        if node not in self.intervals:
            as_sum = linear(node)
            self.intervals[node] = self._term(node) if as_sum.is_only(node) else self.of_sum(as_sum)
        return self.intervals[node]

    def of_sum(self, x: Linear) -> Interval:
        """The interval of a sum."""
        return self.lower(x), self.upper(x)

    def upper(self, x: Linear) -> End:
        """The largest value of a sum; negated, the smallest of its opposite."""
        lowest = self._lowest(-x)
        return None if lowest is None else total([(-f, n) for f, n in lowest[0]], -lowest[1])

    def lower(self, x: Linear) -> End:
        """The smallest value of a sum."""
        lowest = self._lowest(x)
        return None if lowest is None else total(*lowest)

    def may_be_at_most_zero(self, x: Linear) -> Node:
        """Whether a sum is zero or less somewhere."""
        lowest = self._lowest(x)
        return _TRUE if lowest is None else at_most_zero(*lowest)

    def _lowest(self, x: Linear) -> tuple[list[tuple[int, Node]], int] | None:
        terms: list[tuple[int, Node]] = []
        q, k = x.q, x.k
        # What q and k have in common is a multiple of their difference, which may be known better.
        shared = min(abs(q), abs(k)) if q * k < 0 else 0
        if shared:
            sign = 1 if k > 0 else -1
            end = self.difference[0 if sign > 0 else 1]
            if end is not None:
                terms.append((sign * shared, end))
                q, k = q + sign * shared, k - sign * shared
        terms += [(factor, span[0 if factor > 0 else 1]) for factor, span in ((q, self.q), (k, self.k)) if factor]
        for factor, node in x.others:
            end = self.interval(node)[0 if factor > 0 else 1]
            if end is None:
                return None
            terms.append((factor, end))
        return terms, x.constant

    def _term(self, node: Node) -> Interval:
        if isinstance(node, Binary):
            return self._binary(node)
        if isinstance(node, Unary) and node.op == "abs":
            return _magnitudes(*self.interval(node.operand))
        if isinstance(node, Select):
            return self._select(node)
        if isinstance(node, Load) and node.type == "int":
            return self.extremes(node)
        return _UNKNOWN

    def _select(self, node: Select) -> Interval:
        a, b = self.interval(node.then), self.interval(node.other)
        if not node.condition.uses & VARYING:
            return _both(lambda x, y: where(node.condition, x, y), a[0], b[0]), _both(
                lambda x, y: where(node.condition, x, y), a[1], b[1]
            )
        return _both(least, a[0], b[0]), _both(greatest, a[1], b[1])

    def _binary(self, node: Binary) -> Interval:
        a, b = self.interval(node.left), self.interval(node.right)
        if node.op in ("&", "|", "^", "<<", ">>"):
            return bits_interval(node.op, a, b)
        if node.op in ("min", "max"):
            pick = least if node.op == "min" else greatest
            return _both(pick, a[0], b[0]), _both(pick, a[1], b[1])
        if a[0] is None or a[1] is None or b[0] is None or b[1] is None:
            return _remainders_of_anything(b) if node.op == "%" else _UNKNOWN
        x, y = (a[0], a[1]), (b[0], b[1])
        if node.op == "*":
            return _products(x, y)
        if node.op == "//":
            return _quotients(x, y[0]) if y[0] is y[1] else _quotients_by_anything(x)
        assert node.op == "%", f"{node.op} makes no int"
        return _remainders(x, y[0]) if y[0] is y[1] else _remainders_of_anything(b)

    def extremes(self, node: Load) -> Interval:
        """The smallest and largest element that a load meets."""
        spans = [self._index_span(index) for index in node.indices]
        known = [span for span in spans if span is not None]
        if len(known) < len(spans) or _reads_too_much(node):
            return _UNKNOWN
        low, high = tuple(a for a, _ in known), tuple(b for _, b in known)
        whole = _whole(node)
        return Range("min", node.tensor, low, high, whole), Range("max", node.tensor, low, high, whole)

    def _index_span(self, index: Node) -> tuple[Node, Node] | None:
        if self.unread and index.uses & USES[self.unread]:
            return None
        # A table per tile has the answer when nothing is cut off, so bare indices keep the whole tile.
        span = self.tile[index.name] if isinstance(index, Index) and index.name in "qk" else self.interval(index)
        return None if span[0] is None or span[1] is None else (span[0], span[1])

    def may_hold(self, node: Node, *, positive: bool = True) -> Node:
        """Whether a condition may hold (or fail) for some pair; never false when it does."""
        if not node.uses & VARYING:
            return node if positive else unary("~", node)
        if isinstance(node, Unary) and node.op == "~":
            return self.may_hold(node.operand, positive=not positive)
        if isinstance(node, Load):
            low, high = self.extremes(node)
            end, wanted = (high, 1) if positive else (low, 0)
            return _TRUE if end is None else binary("==", end, wanted)
        if isinstance(node, Select):
            then, other = (self.may_hold(x, positive=positive) for x in (node.then, node.other))
            condition = (self.may_hold(node.condition, positive=way) for way in (True, False))
            return some(every(pair) for pair in zip(condition, (then, other), strict=True))
        if isinstance(node, Binary) and node.op in ("&", "|"):
            parts = [self.may_hold(child, positive=positive) for child in node.children]
            return every(parts) if (node.op == "&") == positive else some(parts)
        if isinstance(node, Binary) and node.left.type == "int":
            return self._compared(node if positive else binary(NEGATED[node.op], *node.children))
        return _TRUE

    def _compared(self, node: Node) -> Node:
        if not isinstance(node, Binary) or not node.uses & VARYING:
            return self.may_hold(node)
        a, b = node.children
        if node.op == "==" and isinstance(a, Binary) and a.op == "%":
            hit = self._multiple(a, b)
            if hit is not None:
                return hit
        difference = linear(a) + -linear(b)
        if node.op in ("<", "<="):
            return self.may_be_at_most_zero(difference.plus(int(node.op == "<")))
        if node.op in (">", ">="):
            return self.may_be_at_most_zero((-difference).plus(int(node.op == ">")))
        if node.op == "==":
            return self.may_be_at_most_zero(difference) & self.may_be_at_most_zero(-difference)
        return self.may_be_at_most_zero(difference.plus(1)) | self.may_be_at_most_zero((-difference).plus(1))

    def _multiple(self, a: Binary, rest: Node) -> Node | None:
        """``x % m == rest`` somewhere: some number of the interval of x has that remainder."""
        low, high = self.interval(a.left)
        m = a.right
        if low is None or high is None or (m.uses | rest.uses) & VARYING:
            return None
        # The last number up to `high` with that remainder must not lie before `low`.
        last = total([(1, high), (-1, binary("%", total([(1, high), (-1, rest)]), m))])
        return every([ordered(low, last), ordered(Const(0), rest), at_most_zero([(1, rest), (-1, m)], 1)])


def divisors(mask: Node) -> list[Node]:
    """Divisors that the intervals assume to be positive, but that may not be."""
    found = [
        node.right
        for node in postorder(mask)
        if isinstance(node, Binary) and node.op in ("//", "%") and node.uses & VARYING
    ]
    return [x for x in dict.fromkeys(found) if not x.uses & VARYING and static_range(x)[0] <= 0]


def _both(pick: Callable[[Node, Node], Node], a: End, b: End) -> End:
    return None if a is None or b is None else pick(a, b)


def _magnitudes(low: End, high: End) -> Interval:
    zero = Const(0)
    if low is None or high is None:
        return zero, None
    opposite = total([(-1, low)])
    return greatest(zero, low, total([(-1, high)])), greatest(high, opposite)


def _products(a: Known, b: Known) -> Interval:
    corners = [times(x, y) for x in dict.fromkeys(a) for y in dict.fromkeys(b)]
    return least(*corners), greatest(*corners)


def _quotients(a: Known, divisor: Node) -> Interval:
    """By one positive number."""
    low, high = (binary("//", end, divisor) for end in a)
    return low, high


def _quotients_by_anything(a: Known) -> Interval:
    """A quotient of whole numbers is no larger than the dividend, whatever the divisor."""
    reach = greatest(a[1], total([(-1, a[0])]))
    return total([(-1, reach)]), reach


def _remainders(a: Known, divisor: Node) -> Interval:
    """By one positive number: all remainders, unless the interval lies between two multiples."""
    low, high = a
    first, last = binary("%", low, divisor), binary("%", high, divisor)
    between = every([at_most_zero([(1, high), (-1, low), (-1, divisor)], 1), ordered(first, last)])
    smallest, largest = where(between, first, 0), where(between, last, total([(1, divisor)], -1))
    return smallest, largest


def _remainders_of_anything(divisor: Interval) -> Interval:
    low, high = divisor
    zero = Const(0)
    return None if low is None else least(zero, low), None if high is None else greatest(zero, high)


def _whole(node: Load) -> Literal["", "q", "k"]:
    varying = [index for index in node.indices if index.uses & VARYING]
    if len(varying) == 1 and isinstance(varying[0], Index):
        return "q" if varying[0].name == "q" else "k"
    return ""


def _reads_too_much(node: Load) -> bool:
    """Whether the extremes would need one load per pair of the tile."""
    varying = [index for index in node.indices if index.uses & VARYING]
    direct = [index for index in varying if linear(index).q or linear(index).k]
    return len(varying) > 1 and bool(direct)
