"""Functions of the language; each takes traced values and plain numbers alike."""

from __future__ import annotations

from flashgen.expr.build import binary, select, unary
from flashgen.expr.nodes import Length, Node

#: The number of queries and of keys of the sequence, known at the call.
q_len = Length("q_len")
k_len = Length("k_len")


def where(condition: object, then: object, other: object) -> Node:
    """``then`` where the condition holds, else ``other``; both are always computed."""
    return select(condition, then, other)


def minimum(a: object, b: object) -> Node:
    """The smaller of two."""
    return binary("min", a, b)


def maximum(a: object, b: object) -> Node:
    """The larger of two."""
    return binary("max", a, b)


def abs_(x: object) -> Node:
    """The magnitude."""
    return unary("abs", x)


def exp(x: object) -> Node:
    """e to the power of x."""
    return unary("exp", x)


def log(x: object) -> Node:
    """The natural logarithm."""
    return unary("log", x)


def tanh(x: object) -> Node:
    """The hyperbolic tangent."""
    return unary("tanh", x)


def sigmoid(x: object) -> Node:
    """``1 / (1 + exp(-x))``."""
    return unary("sigmoid", x)
