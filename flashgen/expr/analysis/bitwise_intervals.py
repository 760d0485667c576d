"""Intervals of ``& | ^ << >>``: trees over the ends of the operands' intervals. None is an end without a limit."""

from __future__ import annotations

from flashgen.expr.analysis.bounds import greatest, least, static_range, total
from flashgen.expr.tree.build import binary
from flashgen.expr.tree.nodes import Const, Node

End = Node | None
Interval = tuple[End, End]
Known = tuple[Node, Node]
_ZERO, _MINUS_ONE = Const(0), Const(-1)


def bits_interval(op: str, a: Interval, b: Interval) -> Interval:
    """The interval of ``x op y``, where x lies in ``a`` and y in ``b``."""
    if op == "<<":
        return _shifted_left(a)
    if op == "&" and (positive := [x for x in (a, b) if _is_positive(x)]):
        # Neither has a bit that the other one lacks.
        highs = [high for _, high in positive if high is not None]
        return _ZERO, least(*highs) if highs else None
    if a[0] is None or a[1] is None or b[0] is None or b[1] is None:
        return None, None
    x, y = (a[0], a[1]), (b[0], b[1])
    if op == ">>":
        return _shifted_right(x, y)
    if op == "|":
        pick = greatest if _is_positive(x) and _is_positive(y) else least
        return pick(x[0], y[0]), total([(1, greatest(x[1], _ZERO)), (1, greatest(y[1], _ZERO))])
    # No bit is above the highest of either, where those of a negative number are the ones that are not set.
    reach = [(1, _reach(x)), (1, _reach(y))]
    lowest = total([(-1, node) for _, node in reach], -1)
    if op == "&":
        return lowest, greatest(x[1], y[1])
    return _ZERO if _is_positive(x) and _is_positive(y) else lowest, total(reach)


def _is_positive(x: Interval) -> bool:
    """Whether it holds no negative number, whatever the call."""
    return x[0] is not None and static_range(x[0])[0] >= 0


def _reach(x: Known) -> Node:
    """The largest number of an interval, or of the complements of its numbers."""
    return greatest(x[1], total([(-1, x[0])], -1))


def _shifted_left(a: Interval) -> Interval:
    """The result fits 32 bits, so it lies at least as far from zero, on the same side."""
    low, high = a
    return (
        low if low is not None and static_range(low)[0] >= 0 else None,
        high if high is not None and static_range(high)[1] <= 0 else None,
    )


def _shifted_right(x: Known, count: Known) -> Interval:
    if count[0] is count[1]:
        return binary(">>", x[0], count[0]), binary(">>", x[1], count[0])
    return least(x[0], _ZERO), greatest(x[1], _MINUS_ONE)
