"""Whole numbers that become floats, in scores of pairs near one another: turned into a float once, and added to.

To turn a whole number into a float takes a GPU as long as several additions do. But multiples of q and k, plus what is
the same for all pairs, are at each pair what they are at the first one and a constant more. So they are turned into
floats at the first pair alone: these are the *starts*.

Up to 2**24, which floats count exactly, the result is the same. Above, the start is rounded and then the sum, where the
number itself would be rounded once: an error of at most twice as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.expr.analysis.linear import VARYING, Linear, linear
from flashgen.expr.tree.build import binary, to_float, unary
from flashgen.expr.tree.nodes import Binary, Const, Node, Unary
from flashgen.expr.tree.pair_nodes import Start, Step
from flashgen.expr.tree.rebuild import substitute
from flashgen.expr.tree.visit import postorder

#: Of larger factors the constants that are added, for up to 256 queries and keys, might not be exact.
_MAX_FACTOR = 2**15
#: A sum with a larger constant may be smaller by so much than its terms, that their rounding shows.
_MAX_CONSTANT = 2**23


@dataclass(frozen=True, slots=True)
class Started:
    """Trees for a pair at an offset from the first pair, and the starts by name."""

    roots: Mapping[str, Node]
    starts: Mapping[str, Node]


def with_starts(roots: Mapping[str, Node]) -> Started:
    """The trees with starts in place of per-pair int-to-float conversions."""
    starts: dict[Node, Start] = {}
    moved: dict[Node, Node] = {}
    for node in postorder(*roots.values()):
        if isinstance(node, Unary) and node.op == "float" and (found := _as_float(node.operand, starts)) is not None:
            moved[node] = found
    names = {start.name: number for number, start in starts.items()}
    return Started({name: substitute(root, moved) for name, root in roots.items()}, names)


def _slope_of(number: Node) -> Linear | None:
    """An int as multiples of q and k plus a term that is the same for all pairs; None if it has no such form."""
    if number.type != "int" or not number.uses & VARYING:
        return None
    found = linear(number)
    return None if found.varying or max(abs(found.q), abs(found.k)) > _MAX_FACTOR else found


def _step_of(found: Linear) -> Node:
    """How much a sum changes from the first pair to this one, as a float."""
    factors = ((found.q, Step("q")), (found.k, Step("k")))
    terms = sorted((term for term in factors if term[0]), key=lambda term: term[0] < 0)
    total: Node = Const(0)
    for factor, step in terms:
        total = binary("+" if factor > 0 else "-", total, binary("*", step, abs(factor)))
    return to_float(total)


def _as_float(number: Node, starts: dict[Node, Start]) -> Node | None:
    """The float without per-pair int-to-float conversions; None if that is impossible."""
    if not number.uses & VARYING:
        return to_float(number)
    if (found := _slope_of(number)) is not None:
        start = starts.setdefault(to_float(number), Start(f"first.start{len(starts) + 1 if starts else ''}"))
        return binary("+", start, _step_of(found))
    if isinstance(number, Unary) and number.op in ("abs", "-"):
        inner = _as_float(number.operand, starts)
        return None if inner is None else unary(number.op, inner)
    if isinstance(number, Binary) and (number.op == "*" or _is_moved(number)):
        parts = [_as_float(child, starts) for child in number.children]
        return None if any(part is None for part in parts) else binary(number.op, *parts)
    return None


def _is_moved(number: Binary) -> bool:
    """Whether the sum is with a small constant."""
    constants = [child.value for child in number.children if isinstance(child, Const)]
    return number.op in ("+", "-") and any(abs(value) <= _MAX_CONSTANT for value in constants)
