"""A condition as alternatives of conjunctions, with comparisons of abs, min, max and where taken apart."""

from __future__ import annotations

from flashgen.expr.analysis.linear import VARYING
from flashgen.expr.tree.build import NEGATED, binary, unary
from flashgen.expr.tree.nodes import ORDERS, Binary, Const, Node, Select, Unary

#: Literals that hold together, in the order they were met.
Conjunction = dict[Node, None]
#: A condition that would need more alternatives is kept as one literal where it gets too many.
MAX_ALTERNATIVES = 16


def alternatives(condition: Node, *, positive: bool = True) -> list[Conjunction]:
    """Conjunctions of which at least one holds exactly when the condition does (or, not positive, does not)."""
    return _without_repeats(_alternatives(condition, positive))


def negated(condition: Node) -> Node:
    """The opposite."""
    return unary("~", condition)


def _alternatives(node: Node, positive: bool) -> list[Conjunction]:
    if isinstance(node, Const):
        return [{}] if node.value is positive else []
    if isinstance(node, Unary) and node.op == "~":
        return _alternatives(node.operand, not positive)
    if isinstance(node, Binary) and node.op in ("&", "|"):
        parts = [_alternatives(child, positive) for child in node.children]
        if (node.op == "&") == positive:
            return _product(node, parts, positive)
        return _kept_small(parts[0] + parts[1], node, positive)
    apart = _taken_apart(node, positive)
    if apart is not None:
        return _kept_small(_alternatives(apart, True), node, positive)
    return [{_literal(node, positive): None}]


def _literal(node: Node, positive: bool) -> Node:
    return node if positive else negated(node)


def _kept_small(found: list[Conjunction], node: Node, positive: bool) -> list[Conjunction]:
    found = _without_repeats(found)
    return found if len(found) <= MAX_ALTERNATIVES else [{_literal(node, positive): None}]


def _product(node: Binary, parts: list[list[Conjunction]], positive: bool) -> list[Conjunction]:
    if len(parts[0]) * len(parts[1]) > MAX_ALTERNATIVES:
        larger = 0 if len(parts[0]) > len(parts[1]) else 1
        parts[larger] = [{_literal(node.children[larger], positive): None}]
    return _without_repeats([{**a, **b} for a in parts[0] for b in parts[1]])


def _without_repeats(found: list[Conjunction]) -> list[Conjunction]:
    """Without conjunctions that cannot hold, or that hold only where another one does."""
    possible = [c for c in found if not any(negated(literal) in c for literal in c)]
    kept: list[Conjunction] = []
    for number, c in enumerate(possible):
        implied = any(
            other.keys() <= c.keys() and (len(other) < len(c) or i < number)
            for i, other in enumerate(possible)
            if i != number
        )
        if not implied:
            kept.append(c)
    return kept


def _taken_apart(node: Node, positive: bool) -> Node | None:
    """The same condition made of simpler ones; None for what has no simpler form."""
    if not node.uses & VARYING:
        return None
    if isinstance(node, Select):
        return _chosen(node.condition, _literal(node.then, positive), _literal(node.other, positive))
    if not isinstance(node, Binary) or node.left.type == "float":
        return None
    a, b = node.children
    op = node.op if positive else NEGATED[node.op]
    if a.type == "bool":
        same, other = (a & b) | (negated(a) & negated(b)), (a & negated(b)) | (negated(a) & b)
        return same if op == "==" else other
    if op in ORDERS:
        small, big = (a, b) if op in ("<", "<=") else (b, a)
        return _order_apart("<" if op in ("<", ">") else "<=", small, big)
    return _equality_apart(op, a, b)


def _chosen(condition: Node, then: Node, other: Node) -> Node:
    return (condition & then) | (negated(condition) & other)


def _order_apart(op: str, small: Node, big: Node) -> Node | None:
    """``small op big``, op being < or <=, when one side is a choice."""

    def ordered(x: Node, y: Node) -> Node:
        return binary(op, x, y)

    if small.uses & VARYING:
        if isinstance(small, Unary) and small.op == "abs":
            return ordered(small.operand, big) & ordered(-small.operand, big)
        if isinstance(small, Binary) and small.op in ("min", "max"):
            x, y = ordered(small.left, big), ordered(small.right, big)
            return x | y if small.op == "min" else x & y
        if isinstance(small, Select):
            return _chosen(small.condition, ordered(small.then, big), ordered(small.other, big))
    if big.uses & VARYING:
        if isinstance(big, Unary) and big.op == "abs":
            return ordered(small, big.operand) | ordered(small, -big.operand)
        if isinstance(big, Binary) and big.op in ("min", "max"):
            x, y = ordered(small, big.left), ordered(small, big.right)
            return x & y if big.op == "min" else x | y
        if isinstance(big, Select):
            return _chosen(big.condition, ordered(small, big.then), ordered(small, big.other))
    return None


def _equality_apart(op: str, a: Node, b: Node) -> Node | None:
    if _is_mod(a) and _is_mod(b) and a.children[1] is b.children[1]:
        # Equal remainders: the difference is a multiple.
        return binary(op, binary("%", a.children[0] - b.children[0], a.children[1]), 0)
    if any(_is_choice(x) for x in (a, b)):
        return (a <= b) & (a >= b) if op == "==" else (a < b) | (a > b)
    return None


def _is_mod(node: Node) -> bool:
    return isinstance(node, Binary) and node.op == "%"


def _is_choice(node: Node) -> bool:
    if not node.uses & VARYING:
        return False
    return (
        isinstance(node, Select)
        or (isinstance(node, Unary) and node.op == "abs")
        or (isinstance(node, Binary) and node.op in ("min", "max"))
    )
