"""Functions of the language; each takes traced values and plain numbers alike."""

from __future__ import annotations

from flashgen.expr.tree.blame import fail
from flashgen.expr.tree.build import as_node, binary, number, select, unary
from flashgen.expr.tree.nodes import Const, Length, Node
from flashgen.expr.tree.operators import BUILDER

#: The number of queries and of keys of the sequence, known at the call.
q_len = Length("q_len")
k_len = Length("k_len")
_LARGEST_POWER = 8


def where(condition: object, then: object, other: object) -> Node:
    """``then`` where the condition holds, else ``other``; both are always computed."""
    return select(condition, then, other)


def minimum(a: object, b: object) -> Node:
    """The smaller of two values."""
    return binary("min", a, b)


def maximum(a: object, b: object) -> Node:
    """The larger of two values."""
    return binary("max", a, b)


# It hides Python's own in this module, which does not use that.
def abs(x: object) -> Node:
    """The absolute value."""
    return unary("abs", x)


def exp(x: object) -> Node:
    """e to the power of x."""
    return unary("exp", x)


def log(x: object) -> Node:
    """The natural logarithm."""
    return unary("log", x)


def sqrt(x: object) -> Node:
    """The square root."""
    return unary("sqrt", x)


def sin(x: object) -> Node:
    """The sine of an angle in radians."""
    return unary("sin", x)


def cos(x: object) -> Node:
    """The cosine of an angle in radians."""
    return unary("cos", x)


def tan(x: object) -> Node:
    """The tangent of an angle in radians."""
    return unary("tan", x)


def tanh(x: object) -> Node:
    """The hyperbolic tangent."""
    return unary("tanh", x)


def sigmoid(x: object) -> Node:
    """``1 / (1 + exp(-x))``."""
    return unary("sigmoid", x)


def power(base: object, exponent: object) -> Node:
    """A product of the base with itself, whose exponent is a small whole number, or the square root."""
    exponent = exponent.value if isinstance(exponent, Const) else exponent
    if isinstance(exponent, float) and exponent == 0.5:
        return unary("sqrt", base)
    if not isinstance(exponent, int) or not 1 <= exponent <= _LARGEST_POWER:
        fail(f"`**` takes exponents from 1 to {_LARGEST_POWER}; write fg.exp(y * fg.log(x)) for other powers")
    result = as_node(base)
    for _ in range(exponent - 1):
        result = binary("*", result, base)
    return result


def to_int(value: object) -> Node:
    """A condition as 1 or 0, a whole number as it is."""
    x = number(as_node(value))
    if x.type == "float":
        fail("a float does not become a whole number; compute it with whole numbers, with // in place of /")
    return x


BUILDER.power = power
BUILDER.to_int = to_int
