"""Arithmetic on the bounds of tiles: it simplifies what can be known beforehand, and never wraps around.

A bound that would leave 32 bits is moved to the nearest number that fits. It bounds a query, a key or their
difference, all of which fit, so it stays as strong as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, reduce

from flashgen.expr.tree.build import MAX_INT, MIN_INT, as_node, binary, select, unary
from flashgen.expr.tree.nodes import Binary, Const, Index, Length, Node, Select, Unary
from flashgen.expr.tree.tile_nodes import Search, TileVar, Wide

#: Sequences are at most this long, so that a position plus a length fits 32 bits.
MAX_LENGTH = 2**30
#: Larger factors are not followed, so that sums of products fit 64 bits.
MAX_FACTOR = 2**20
_ALL = (MIN_INT, MAX_INT)

Terms = Iterable[tuple[int, Node]]


@lru_cache(maxsize=1 << 16)
def static_range(node: Node) -> tuple[int, int]:
    """The smallest and largest value an int can take, whatever the call."""
    if isinstance(node, Const):
        return int(node.value), int(node.value)
    if isinstance(node, (TileVar, Index)):
        return 0, MAX_INT if node.name in ("b", "h") else MAX_LENGTH - 1
    if isinstance(node, Length):
        return 0, MAX_LENGTH
    if isinstance(node, Binary):
        return _clip(_binary_range(node))
    if isinstance(node, Select):
        a, b = static_range(node.then), static_range(node.other)
        return min(a[0], b[0]), max(a[1], b[1])
    if isinstance(node, Wide) and node.op == "+":
        return _clip(_sum_range(zip(node.factors, node.terms, strict=True), 0))
    if isinstance(node, Unary) and node.op == "-":
        low, high = static_range(node.operand)
        return _clip((-high, -low))
    if isinstance(node, Unary) and node.op == "abs":
        return 0, MAX_INT
    if isinstance(node, Search):
        return (0, MAX_LENGTH) if node.kind == "first" else (-1, MAX_LENGTH - 1)
    return _ALL


def _clip(span: tuple[int, int]) -> tuple[int, int]:
    return max(span[0], MIN_INT), min(span[1], MAX_INT)


def _binary_range(node: Binary) -> tuple[int, int]:
    (a, b), (c, d) = static_range(node.left), static_range(node.right)
    if node.op == "+":
        return a + c, b + d
    if node.op == "-":
        return a - d, b - c
    if node.op == "*":
        corners = (a * c, a * d, b * c, b * d)
        return min(corners), max(corners)
    if node.op == "min":
        return min(a, c), min(b, d)
    if node.op == "max":
        return max(a, c), max(b, d)
    if node.op == "//" and c > 0:
        return min(a // c, a // d), max(b // c, b // d)
    if node.op == "%" and c > 0:
        return 0, d - 1
    return _bits_range(node.op, (a, b), (c, d))


def _bits_range(op: str, x: tuple[int, int], y: tuple[int, int]) -> tuple[int, int]:
    if op == "<<":
        return x[0] if x[0] >= 0 else MIN_INT, x[1] if x[1] <= 0 else MAX_INT
    if op == ">>":
        return min(x[0], 0), max(x[1], -1)
    positive = [span[1] for span in (x, y) if span[0] >= 0]
    if op == "&" and positive:
        return 0, min(positive)
    if op in ("|", "^") and len(positive) == 2:
        return 0, 2 ** max(positive).bit_length() - 1
    return _ALL


def _sum_range(terms: Terms, constant: int) -> tuple[int, int]:
    low = high = constant
    for factor, node in terms:
        a, b = static_range(node)
        low += min(factor * a, factor * b)
        high += max(factor * a, factor * b)
    return low, high


def _merged(terms: Terms, constant: int) -> tuple[dict[Node, int], int]:
    """Sums inside of the terms opened, equal terms added up, constants apart."""
    factors: dict[Node, int] = {}
    stack = list(terms)[::-1]
    while stack:
        factor, node = stack.pop()
        inside = _opened(node) if abs(factor) <= MAX_FACTOR else None
        if isinstance(node, Const):
            constant += factor * int(node.value)
        elif inside is not None:
            stack += [(factor * f, child) for f, child in reversed(inside)]
        else:
            factors[node] = factors.get(node, 0) + factor
    return {node: factor for node, factor in factors.items() if factor}, constant


def _opened(node: Node) -> list[tuple[int, Node]] | None:
    """The terms of a node that is a sum."""
    if isinstance(node, Wide) and node.op == "+":
        return list(zip(node.factors, node.terms, strict=True))
    if isinstance(node, Unary) and node.op == "-":
        return [(-1, node.operand)]
    if isinstance(node, Binary) and node.op in ("+", "-"):
        return [(1, node.left), (1 if node.op == "+" else -1, node.right)]
    if isinstance(node, Binary) and node.op == "*":
        for factor, rest in ((node.left, node.right), (node.right, node.left)):
            if isinstance(factor, Const) and abs(factor.value) <= MAX_FACTOR:
                return [(int(factor.value), rest)]
    return None


def total(terms: Terms, constant: int = 0) -> Node:
    """The sum of each term times its factor, and a constant; clamped to 32 bits, if it could leave them."""
    factors, constant = _merged(terms, constant)
    plain = _plain_sum(factors, constant)
    if plain is not None:
        return plain
    if not factors:
        return Const(min(max(constant, MIN_INT), MAX_INT))
    parts = list(factors.items())
    while constant:
        step = min(max(constant, MIN_INT + 1), MAX_INT)
        parts.append((Const(abs(step)), 1 if step > 0 else -1))
        constant -= step
    parts.sort(key=lambda part: part[1] < 0)
    return Wide("+", tuple(factor for _, factor in parts), tuple(node for node, _ in parts))


def _plain_sum(factors: dict[Node, int], constant: int) -> Node | None:
    """With ordinary 32-bit operations; None when some step of them could overflow."""
    steps = sorted(((factor, node) for node, factor in factors.items()), key=lambda step: step[0] < 0)
    if steps and steps[0][0] < 0:
        # Nothing to subtract from but the constant.
        steps.insert(0, (1, Const(min(max(constant, MIN_INT), MAX_INT))))
        constant = 0
    spans = [_sum_range(steps[: n + 1], 0) for n in range(len(steps))] + [_sum_range(steps, constant)]
    if not MIN_INT < constant <= MAX_INT or any(low < MIN_INT or high > MAX_INT for low, high in spans):
        return None
    result: Node | None = None
    for factor, node in steps:
        part = node if factor in (1, -1) else binary("*", node, abs(factor))
        result = part if result is None else binary("+" if factor > 0 else "-", result, part)
    if result is None:
        return Const(constant)
    return binary("+", result, constant) if constant else result


def times(a: Node, b: Node) -> Node:
    """The product, clamped to 32 bits if it could leave them."""
    corners = [x * y for x in static_range(a) for y in static_range(b)]
    if isinstance(a, Const) or isinstance(b, Const) or (min(corners) >= MIN_INT and max(corners) <= MAX_INT):
        factor, node = (a, b) if isinstance(a, Const) else (b, a)
        if not isinstance(factor, Const):
            return binary("*", a, b)
        if abs(factor.value) <= MAX_FACTOR:
            return total([(int(factor.value), node)])
    return Wide("*", (1, 1), (a, b))


def least(*nodes: Node) -> Node:
    """The smallest of some ints."""
    return reduce(_least, nodes)


def greatest(*nodes: Node) -> Node:
    """The largest of some ints."""
    return reduce(_greatest, nodes)


def _least(a: Node, b: Node) -> Node:
    (a_low, a_high), (b_low, b_high) = static_range(a), static_range(b)
    return a if a_high <= b_low else b if b_high <= a_low else binary("min", a, b)


def _greatest(a: Node, b: Node) -> Node:
    (a_low, a_high), (b_low, b_high) = static_range(a), static_range(b)
    return a if a_low >= b_high else b if b_low >= a_high else binary("max", a, b)


def at_most_zero(terms: Terms, constant: int = 0) -> Node:
    """Whether the sum of each term times its factor, and a constant, is zero or less."""
    factors, constant = _merged(terms, constant)
    low, high = _sum_range(((factor, node) for node, factor in factors.items()), constant)
    if high <= 0 or low > 0:
        return Const(high <= 0)
    left = {node: factor for node, factor in factors.items() if factor > 0}
    right = {node: -factor for node, factor in factors.items() if factor < 0}
    # With terms on both sides, a constant of one is a strict comparison.
    op, constant = ("<", 0) if constant == 1 and left and right else ("<=", constant)
    for on_left, on_right in ((0, -constant), (constant, 0)):
        a, b = _plain_sum(left, on_left), _plain_sum(right, on_right)
        if a is not None and b is not None:
            return binary(">=", b, a) if isinstance(a, Const) else binary(op, a, b)
    return _apart_compared(op, factors, constant)


def apart_at_most_zero(factor: int, node: Node, rest: Terms, constant: int) -> Node | None:
    """``factor * node + rest + constant <= 0`` with the node on one side; None when a side could leave 32 bits."""
    sign = 1 if factor > 0 else -1
    a = _plain_sum({node: abs(factor)}, 0)
    b = _plain_sum(*_merged([(-sign * f, term) for f, term in rest], -sign * constant))
    return None if a is None or b is None else binary("<=" if factor > 0 else ">=", a, b)


def _apart_compared(op: str, factors: dict[Node, int], constant: int) -> Node:
    """``sum op 0`` when moving terms to the other side is not enough to keep both within 32 bits."""
    for node, factor in factors.items():
        rest = _plain_sum({n: -factor * f for n, f in factors.items() if n is not node}, -factor * constant)
        # A term that can be anything stands alone on its side.
        if abs(factor) == 1 and rest is not None:
            return binary(op, node, rest) if factor > 0 else binary(op, rest, node)
    return binary(op, total(((f, n) for n, f in factors.items()), constant), 0)


def ordered(low: Node, high: Node) -> Node:
    """Whether ``low <= high``."""
    return at_most_zero([(1, low), (-1, high)])


def every(conditions: Iterable[Node]) -> Node:
    """Whether all hold."""
    return reduce(lambda a, b: binary("&", a, b), conditions, as_node(True))


def some(conditions: Iterable[Node]) -> Node:
    """Whether any holds."""
    return reduce(lambda a, b: binary("|", a, b), conditions, as_node(False))


def opposite(condition: Node) -> Node:
    """Whether a condition fails, without a negation around more than one comparison."""
    if isinstance(condition, Binary) and condition.op in ("&", "|"):
        return binary("|" if condition.op == "&" else "&", *(opposite(child) for child in condition.children))
    return unary("~", condition)


def where(condition: Node, then: Node | int, other: Node | int) -> Node:
    """``then`` where the condition holds, else ``other``."""
    return select(condition, as_node(then), as_node(other))
