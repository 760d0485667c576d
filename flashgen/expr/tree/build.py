"""How nodes are made: types are checked, constants folded, and trees brought into one form.

Making a node again from its own operands gives the same node, so text can be read back to the same tree.
"""

from __future__ import annotations

import math
import numbers

import numpy as np

from flashgen.common.show import shortened, show
from flashgen.expr.tree.blame import PARENTHESES, fail
from flashgen.expr.tree.folding import folded, folded_function
from flashgen.expr.tree.nodes import COMPARISONS, FLOAT_FUNCTIONS, Binary, Const, Node, Select, Type, Unary
from flashgen.expr.tree.operators import BUILDER, Operators

MIN_INT, MAX_INT = -(2**31), 2**31 - 1
#: The comparison that holds exactly when this one does not (of numbers without NaN).
NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
#: A power of two with this exponent is a whole number of 32 bits, and no larger one is.
_LARGEST_SHIFT = 30


def as_node(value: object) -> Node:
    """A node as it is, a number as a constant."""
    if isinstance(value, Node):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Const(bool(value))
    if isinstance(value, numbers.Integral):
        return _integer(int(value))
    if isinstance(value, numbers.Real):
        return _float(_as_float(value))
    if isinstance(value, Operators):
        fail(value.advice)
    fail(
        f"{show(value)} ({shortened(type(value).__name__)}) has no meaning here; "
        "use numbers, b, h, q, k, and captured numbers and tensors"
    )


def _integer(value: int) -> Const:
    if not MIN_INT <= value <= MAX_INT:
        remedy = f"write it as a float, {float(value)!r}" if abs(value) < 2**127 else "nor would it fit a float"
        fail(f"{show(value)} does not fit the 32-bit integers of the language; {remedy}")
    return Const(value)


def _as_float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:
        fail(f"{show(value)} does not fit a float; write inf, or a smaller number")


def _float(value: float) -> Const:
    if math.isnan(value):
        fail(
            "nan is not a constant of the language (log of a negative number?); "
            "a NaN that comes out of the scores passes through by itself"
        )
    return Const(value)


def unary(op: str, value: object) -> Node:
    """The node of ``-``, ``~``, ``abs``, a function of floats, or ``float``."""
    x = as_node(value)
    if op == "~":
        return _not(x)
    x = number(x)
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
    if x.type == "float":
        fail("`~` negates conditions and whole numbers, and this is a float; compare it with something first")
    if x.type == "int":
        return binary("-", -1, x)
    if isinstance(x, Const):
        return Const(not x.value)
    if isinstance(x, Unary):
        return x.operand
    if isinstance(x, Binary) and x.op in NEGATED and (x.left.type != "float" or x.op in ("==", "!=")):
        return binary(NEGATED[x.op], x.left, x.right)
    return Unary("~", x)


def to_float(x: Node) -> Node:
    """An int as a float; a float as it is."""
    x = number(x)
    if x.type == "float":
        return x
    return Const(float(x.value)) if isinstance(x, Const) else Unary("float", x)


def number(x: Node) -> Node:
    """A condition in arithmetic counts as 1 or 0."""
    return select(x, 1, 0) if x.type == "bool" else x


def _folded_unary(op: str, x: Const) -> Node:
    value = x.value
    if op == "-":
        return as_node(-value)
    if op == "abs":
        return as_node(abs(value))
    return _float(folded_function(op, value))


def binary(op: str, left: object, right: object) -> Node:
    """The node of an operator, ``min`` and ``max``, brought to canonical form."""
    a = left if isinstance(left, Node) else as_node(left)
    b = right if isinstance(right, Node) else as_node(right)
    if op in ("&", "|", "^"):
        return bits(op, a, b) if a.type == b.type == "int" else _logical(op, a, b)
    if op in ("<<", ">>"):
        return shifted(op, number(a), number(b))
    if op in ("==", "!=") and a.type == b.type == "bool":
        return _comparison(op, a, b)
    if a.type == "bool" or b.type == "bool":
        a, b = number(a), number(b)
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
                f"`{op}` combines two conditions or two whole numbers, and one side is {article(x.type)}; "
                f"compare that with something, and {PARENTHESES}"
            )
    if op == "^":
        return _comparison("!=", a, b)
    neutral = op == "&"
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return y if x.value is neutral else x
    return a if a is b else Binary(op, a, b)


def bits(op: str, a: Node, b: Node) -> Node:
    """``& | ^`` of whole numbers, in two's complement as Python has it."""
    if isinstance(a, Const):
        a, b = b, a
    if isinstance(b, Const):
        value = int(b.value)
        if isinstance(a, Const):
            return Const(folded(op, a.value, value))
        if value == 0:
            return b if op == "&" else a
        if value == -1 and op != "^":
            return a if op == "&" else b
        # Tile rules know remainders better.
        if op == "&" and 0 < value < MAX_INT and not value & (value + 1):
            return binary("%", a, value + 1)
    if a is b:
        return Const(0) if op == "^" else a
    return Binary(op, a, b)


def shifted(op: str, a: Node, count: Node) -> Node:
    """``<< >>`` of whole numbers. A constant count makes it a product or a quotient, which tile rules know better."""
    for x in (a, count):
        if x.type != "int":
            fail(f"`{op}` shifts whole numbers by whole numbers, and one of them is {article(x.type)}")
    if isinstance(count, Const):
        return _shifted_by(op, a, int(count.value))
    return a if isinstance(a, Const) and a.value == 0 else Binary(op, a, count)


def _shifted_by(op: str, a: Node, count: int) -> Node:
    if count < 0:
        fail(f"`{op} {count}` has a negative count; shift the other way by {-count}")
    if op == "<<" and count > _LARGEST_SHIFT and a is not Const(0):
        fail(f"`<< {count}` leaves the 32 bits of whole numbers; shift by at most {_LARGEST_SHIFT}")
    if count > _LARGEST_SHIFT:
        return select(binary("<", a, 0), -1, 0) if op == ">>" else a
    return binary("*" if op == "<<" else "//", a, 2**count)


def _comparison(op: str, a: Node, b: Node) -> Node:
    if isinstance(a, Const) and isinstance(b, Const):
        return Const(bool(folded(op, a.value, b.value)))
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
        return as_node(folded(op, a.value, b.value))
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
        a, b = number(a), number(b)
    if "float" in (a.type, b.type):
        a, b = to_float(a), to_float(b)
    if isinstance(c, Const):
        return a if c.value else b
    if a is b:
        return a
    if a.type == "bool" and isinstance(a, Const) and isinstance(b, Const):
        return c if a.value else _not(c)
    return Select(c, a, b)


def article(type_: Type) -> str:
    """A type in words."""
    return {"bool": "a condition", "int": "a whole number", "float": "a float"}[type_]


BUILDER.unary = unary
BUILDER.binary = binary
