"""The fourth reading: a score differentiated by a float it is made of.

Where a function has a corner, one side counts: ``abs`` has slope 0 at 0, as in torch; of equal operands
``minimum`` and ``maximum`` pass everything to the first; ``where`` follows the branch that was taken. Conditions
and ints have no derivative.
"""

from __future__ import annotations

from flashgen.expr.tree.build import binary, select, unary
from flashgen.expr.tree.nodes import Binary, Const, Load, Node, Scalar, Select, Unary
from flashgen.expr.tree.visit import postorder

_ZERO, _ONE = Const(0.0), Const(1.0)


def derivative(root: Node, wrt: Node) -> Node:
    """d root / d wrt, where ``wrt`` is the score, a load of a float tensor, or a captured float."""
    slopes: dict[Node, Node] = {}
    for node in postorder(root):
        if node is wrt:
            slopes[node] = _ONE
        elif node.type == "float" and any(slopes.get(child, _ZERO) is not _ZERO for child in node.children):
            slopes[node] = _slope(node, [slopes.get(child, _ZERO) for child in node.children])
    return slopes.get(root, _ZERO)


def captured_gradients(score: Node) -> tuple[tuple[Load | Scalar, Node], ...]:
    """Each distinct load of a float tensor and each captured float, with the derivative of the score."""
    captured = [n for n in postorder(score) if isinstance(n, (Load, Scalar)) and n.type == "float"]
    return tuple((node, derivative(score, node)) for node in captured)


def _times(a: Node, b: Node) -> Node:
    """The product, simplified if a factor is exactly zero."""
    return _ZERO if a is _ZERO or b is _ZERO else binary("*", a, b)


def _plus(a: Node, b: Node) -> Node:
    return b if a is _ZERO else a if b is _ZERO else binary("+", a, b)


def _minus(a: Node, b: Node) -> Node:
    return a if b is _ZERO else unary("-", b) if a is _ZERO else binary("-", a, b)


def _slope(node: Node, slopes: list[Node]) -> Node:
    if isinstance(node, Unary):
        return _unary(node, slopes[0])
    if isinstance(node, Binary):
        return _binary(node, *slopes)
    assert isinstance(node, Select), f"{type(node).__name__} has no float operands"
    return select(node.condition, slopes[1], slopes[2])


def _unary(node: Unary, slope: Node) -> Node:
    x = node.operand
    if node.op == "-":
        return unary("-", slope)
    if node.op == "abs":
        sign = select(binary(">", x, 0.0), 1.0, select(binary("<", x, 0.0), -1.0, 0.0))
        return _times(slope, sign)
    if node.op == "exp":
        return _times(slope, node)
    if node.op == "log":
        return binary("/", slope, x)
    if node.op == "sqrt":
        return binary("/", _times(slope, Const(0.5)), node)
    if node.op == "sin":
        return _times(slope, unary("cos", x))
    if node.op == "cos":
        return _minus(_ZERO, _times(slope, unary("sin", x)))
    if node.op == "tan":
        return _times(slope, binary("+", 1.0, binary("*", node, node)))
    if node.op == "tanh":
        return _times(slope, binary("-", 1.0, binary("*", node, node)))
    assert node.op == "sigmoid", f"{node.op} has no float operand"
    return _times(slope, binary("*", node, binary("-", 1.0, node)))


def _binary(node: Binary, left: Node, right: Node) -> Node:
    a, b = node.children
    if node.op == "+":
        return _plus(left, right)
    if node.op == "-":
        return _minus(left, right)
    if node.op == "*":
        return _plus(_times(left, b), _times(a, right))
    if node.op == "/":
        by_dividend = _ZERO if left is _ZERO else binary("/", left, b)
        by_divisor = _ZERO if right is _ZERO else binary("/", _times(node, right), b)
        return _minus(by_dividend, by_divisor)
    assert node.op in ("min", "max"), f"{node.op} has no float operands"
    return select(binary("<=" if node.op == "min" else ">=", a, b), left, right)
