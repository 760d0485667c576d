"""How nodes are made: types are checked, constants folded, and trees brought into one form.

Making a node again from its own operands gives the same node, so text can be read back to the same tree.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from flashgen.expr.blame import fail
from flashgen.expr.nodes import COMPARISONS, Binary, Const, Node, Select, Type, Unary
from flashgen.expr.operators import Operators

MIN_INT, MAX_INT = -(2**31), 2**31 - 1
#: The comparison that holds exactly when this one does not (of numbers without NaN).
NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
FLOAT_FUNCTIONS = ("exp", "log", "tanh", "sigmoid")
_LARGEST_POWER = 8
_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&": operator.and_,
    "|": operator.or_,
}
_FOLD_FUNCTION: dict[str, Callable[[float], float]] = {
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def can_be_node(value: object) -> bool:
    """Whether ``as_node`` takes it."""
    return isinstance(value, (Node, bool, np.bool_, numbers.Real))


def as_node(value: object) -> Node:
    """A node as it is, a number as a constant."""
    if isinstance(value, Node):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Const(bool(value))
    if isinstance(value, numbers.Integral):
        return _integer(int(value))
    if isinstance(value, numbers.Real):
        return _float(float(value))
    if isinstance(value, Operators):
        fail(value.advice)
    fail(f"{_shown(value)} has no meaning here; use numbers, b, h, q, k, and captured numbers and tensors")


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) < 60 else text[:57] + '...'} ({type(value).__name__})"


def _integer(value: int) -> Const:
    if not MIN_INT <= value <= MAX_INT:
        fail(f"{value} does not fit the 32-bit integers of the language; write it as a float, {float(value)!r}")
    return Const(value)


def _float(value: float) -> Const:
    if math.isnan(value):
        fail(
            "nan is not a constant of the language (log of a negative number?); "
            "a NaN that comes out of the scores passes through by itself"
        )
    return Const(value)


def unary(op: str, value: object) -> Node:
    """The node of ``- ~ abs exp log tanh sigmoid float``."""
    x = as_node(value)
    if op == "~":
        return _not(x)
    x = _number(x)
    if op in FLOAT_FUNCTIONS:
        x = to_float(x)
    if op == "float":
        return to_float(x)
    if isinstance(x, Const):
        return _folded_unary(op, x)
    if op == "-" and isinstance(x, Unary) and x.op == "-":
        return x.operand
    if op == "abs" and isinstance(x, Unary) and x.op in ("abs", "-"):
        return unary("abs", x.operand)
    return Unary(op, x)


def _not(x: Node) -> Node:
    if x.type != "bool":
        fail(f"`~` negates conditions, and this is {article(x.type)}; compare it with something first")
    if isinstance(x, Const):
        return Const(not x.value)
    if isinstance(x, Unary):
        return x.operand
    if isinstance(x, Binary) and x.op in NEGATED and (x.left.type != "float" or x.op in ("==", "!=")):
        return binary(NEGATED[x.op], x.left, x.right)
    return Unary("~", x)


def to_float(x: Node) -> Node:
    """An int as a float; a float as it is."""
    x = _number(x)
    if x.type == "float":
        return x
    return Const(float(x.value)) if isinstance(x, Const) else Unary("float", x)


def _number(x: Node) -> Node:
    """A condition in arithmetic counts as 1 or 0."""
    return select(x, 1, 0) if x.type == "bool" else x


def _folded_unary(op: str, x: Const) -> Node:
    value = x.value
    if op == "-":
        return as_node(-value)
    if op == "abs":
        return as_node(abs(value))
    with np.errstate(all="ignore"):
        return _float(float(_FOLD_FUNCTION[op](value)))


def binary(op: str, left: object, right: object) -> Node:
    """The node of an operator, ``min`` and ``max``, brought to canonical form."""
    a = left if isinstance(left, Node) else as_node(left)
    b = right if isinstance(right, Node) else as_node(right)
    if op in ("&", "|", "^"):
        return _logical(op, a, b)
    if op in ("==", "!=") and a.type == b.type == "bool":
        return _comparison(op, a, b)
    if a.type == "bool" or b.type == "bool":
        a, b = _number(a), _number(b)
    if op in ("//", "%") and "float" in (a.type, b.type):
        fail(f"`{op}` takes whole numbers; with floats write a / b, or keep both sides ints")
    if op == "/" or "float" in (a.type, b.type):
        a, b = to_float(a), to_float(b)
    if op in COMPARISONS:
        return _comparison(op, a, b)
    return _arithmetic(op, a, b)


def _logical(op: str, a: Node, b: Node) -> Node:
    for x in (a, b):
        if x.type != "bool":
            fail(
                f"`{op}` combines conditions, and one side is {article(x.type)}; "
                "put each comparison in parentheses: (q >= k) & (q - k < n)"
            )
    if op == "^":
        return _comparison("!=", a, b)
    neutral = op == "&"
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return y if x.value is neutral else x
    return a if a is b else Binary(op, a, b)


def _comparison(op: str, a: Node, b: Node) -> Node:
    if isinstance(a, Const) and isinstance(b, Const):
        return Const(bool(_FOLD[op](a.value, b.value)))
    if a is b and a.type != "float":
        return Const(op in ("==", "<=", ">="))
    if a.type == "bool":
        for x, y in ((a, b), (b, a)):
            if isinstance(x, Const):
                return y if x.value is (op == "==") else _not(y)
    return Binary(op, a, b)


def _arithmetic(op: str, a: Node, b: Node) -> Node:
    if isinstance(b, Const) and b.value == 0 and op in ("/", "//", "%"):
        fail(f"division by zero: `{op} {b.value}`")
    if isinstance(a, Const) and isinstance(b, Const):
        return as_node(_FOLD[op](a.value, b.value))
    if op in ("min", "max") and a is b:
        return a
    simpler = _with_constant_right(op, a, b) if isinstance(b, Const) else None
    if simpler is None and isinstance(a, Const):
        simpler = _with_constant_left(op, a, b)
    if simpler is None and a is b and a.type == "int" and op == "-":
        simpler = Const(0)
    return Binary(op, a, b) if simpler is None else simpler


def _with_constant_right(op: str, a: Node, b: Const) -> Node | None:
    value = b.value
    if value == 0 and op in ("+", "-"):
        return a
    if value == 1 and op in ("*", "/", "//"):
        return a
    if a.type == "int" and ((value == 0 and op == "*") or (value == 1 and op == "%")):
        return Const(0)
    if value == -1 and op == "*":
        return unary("-", a)
    if value < 0 and op in ("+", "-") and value != MIN_INT:
        return _arithmetic("-" if op == "+" else "+", a, Const(-value))
    if a.type == "int" and op in ("+", "-") and isinstance(a, Binary) and isinstance(a.right, Const):
        return _merged_constants(op, a, int(value))
    return None


def _merged_constants(op: str, a: Binary, value: int) -> Node | None:
    """``(x + 2) - 5`` is ``x - 3``."""
    if a.op not in ("+", "-"):
        return None
    assert isinstance(a.right, Const), "the caller looked"
    total = (a.right.value if a.op == "+" else -a.right.value) + (value if op == "+" else -value)
    return _arithmetic("+", a.left, Const(total)) if MIN_INT < total <= MAX_INT else None


def _with_constant_left(op: str, a: Const, b: Node) -> Node | None:
    if op == "+" and a.value == 0:
        return b
    if op == "*" and a.value == 1:
        return b
    if op == "*" and a.value == -1:
        return unary("-", b)
    if b.type == "int" and a.value == 0:
        return unary("-", b) if op == "-" else Const(0) if op == "*" else None
    return None


def select(condition: object, then: object, other: object) -> Node:
    """``then`` where the condition holds, else ``other``."""
    c, a, b = as_node(condition), as_node(then), as_node(other)
    if c.type != "bool":
        fail(f"where() wants a condition first, and this is {article(c.type)}; compare it with something")
    if a.type != b.type:
        a, b = _number(a), _number(b)
    if "float" in (a.type, b.type):
        a, b = to_float(a), to_float(b)
    if isinstance(c, Const):
        return a if c.value else b
    if a is b:
        return a
    if a.type == "bool" and isinstance(a, Const) and isinstance(b, Const):
        return c if a.value else _not(c)
    return Select(c, a, b)


def power(base: object, exponent: object) -> Node:
    """A product of the base with itself; the exponent is a small whole number."""
    if not isinstance(exponent, int) or not 1 <= exponent <= _LARGEST_POWER:
        fail(f"`**` takes exponents from 1 to {_LARGEST_POWER}; write fg.exp(y * fg.log(x)) for other powers")
    result = as_node(base)
    for _ in range(exponent - 1):
        result = binary("*", result, base)
    return result


def same_node(node: object) -> bool | None:
    """Outside of tracing: the truth of ``a == b``, which is whether they are one node; None if it is something else."""
    if isinstance(node, Const) and node.type == "bool":
        return bool(node.value)
    if isinstance(node, Binary) and node.op in ("==", "!="):
        return (node.left is node.right) == (node.op == "==")
    return None


def article(type_: Type) -> str:
    """A type in words."""
    return {"bool": "a condition", "int": "a whole number", "float": "a float"}[type_]
