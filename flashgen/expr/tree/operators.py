"""The base of all nodes: Python's operators and torch's methods build trees, or say what to write instead.

Values have methods by the names that torch gives those of tensors: ``(q - k).abs()`` is ``abs(q - k)``.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np

from flashgen.expr.tree.advice import advice_for_call, advice_for_number, advice_for_truth
from flashgen.expr.tree.blame import called_name, construct_in_question, fail, is_tracing

Type = Literal["bool", "int", "float"]

#: NumPy scalars reach nodes through these when they stand on the left.
_UFUNCS = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "true_divide": "/",
    "floor_divide": "//",
    "remainder": "%",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
    "equal": "==",
    "not_equal": "!=",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "left_shift": "<<",
    "right_shift": ">>",
}


class Builder:
    """What operators and methods call; modules above this one, which know the kinds of nodes, set it as they load.

    ``flashgen.expr`` loads all of them, and Python loads it before any module inside of it.
    """

    unary: Callable[[str, object], Node]
    binary: Callable[[str, object, object], Node]
    power: Callable[[object, object], Node]
    to_int: Callable[[object], Node]
    text: Callable[[Node], str]


BUILDER = Builder()


class Methods:
    """What torch users type behind a value, where the language has a function for it."""

    __slots__ = ()

    def abs(self) -> Node:
        """The magnitude."""
        return BUILDER.unary("abs", self)

    def exp(self) -> Node:
        """e to the power of the value."""
        return BUILDER.unary("exp", self)

    def log(self) -> Node:
        """The natural logarithm."""
        return BUILDER.unary("log", self)

    def sqrt(self) -> Node:
        """The square root."""
        return BUILDER.unary("sqrt", self)

    def sin(self) -> Node:
        """The sine of an angle in radians."""
        return BUILDER.unary("sin", self)

    def cos(self) -> Node:
        """The cosine of an angle in radians."""
        return BUILDER.unary("cos", self)

    def tan(self) -> Node:
        """The tangent of an angle in radians."""
        return BUILDER.unary("tan", self)

    def tanh(self) -> Node:
        """The hyperbolic tangent."""
        return BUILDER.unary("tanh", self)

    def sigmoid(self) -> Node:
        """``1 / (1 + exp(-x))``."""
        return BUILDER.unary("sigmoid", self)

    def minimum(self, other: object) -> Node:
        """The smaller of two."""
        return BUILDER.binary("min", self, other)

    def maximum(self, other: object) -> Node:
        """The larger of two."""
        return BUILDER.binary("max", self, other)

    def min(self, other: object) -> Node:
        """The smaller of two."""
        return BUILDER.binary("min", self, other)

    def max(self, other: object) -> Node:
        """The larger of two."""
        return BUILDER.binary("max", self, other)

    def clamp(self, min: object = None, max: object = None) -> Node:
        """The value, moved to the nearer of two limits where it lies beyond it; None is no limit."""
        if min is None and max is None:
            fail("clamp() without limits does nothing; write x.clamp(0, 63), x.clamp(min=0) or x.clamp(max=63)")
        if min is None:
            return BUILDER.binary("min", self, max)
        at_least = BUILDER.binary("max", self, min)
        return at_least if max is None else BUILDER.binary("min", at_least, max)

    def clip(self, min: object = None, max: object = None) -> Node:
        """The same as ``clamp``."""
        return self.clamp(min, max)

    def pow(self, exponent: object) -> Node:
        """A power with a small whole exponent."""
        return BUILDER.power(self, exponent)

    def float(self) -> Node:
        """A whole number or a condition as a float."""
        return BUILDER.unary("float", self)

    def int(self) -> Node:
        """A condition as 1 or 0; a whole number as it is."""
        return BUILDER.to_int(self)


#: By name, for texts.
METHODS: Mapping[str, Callable[..., Any]] = {n: f for n, f in vars(Methods).items() if not n.startswith("_")}


def _binary(op: str, left: object, right: object) -> Node:
    if op in ("==", "!=") and not is_tracing() and not (can_be_node(left) and can_be_node(right)):
        return NotImplemented  # type: ignore[no-any-return]
    return BUILDER.binary(op, left, right)


def _left(op: str) -> Callable[[Operators, object], Node]:
    """The method of an operator whose left operand has it."""

    def method(self: Operators, other: object) -> Node:
        return _binary(op, self, other)

    return method


def _right(op: str) -> Callable[[Operators, object], Node]:
    """The method of an operator whose right operand has it."""

    def method(self: Operators, other: object) -> Node:
        return _binary(op, other, self)

    return method


class Operators(Methods):
    """Python's operators as tree builders; everything that needs a number now is an error with a remedy."""

    __slots__ = ()

    @property
    def advice(self) -> str:
        """What to do with an operand that is no node."""
        return f"{type(self).__name__} has no meaning here; use numbers, b, h, q, k, and captured numbers and tensors"

    __add__ = _left("+")
    __radd__ = _right("+")
    __sub__ = _left("-")
    __rsub__ = _right("-")
    __mul__ = _left("*")
    __rmul__ = _right("*")
    __truediv__ = _left("/")
    __rtruediv__ = _right("/")
    __floordiv__ = _left("//")
    __rfloordiv__ = _right("//")
    __mod__ = _left("%")
    __rmod__ = _right("%")
    __and__ = _left("&")
    __rand__ = _right("&")
    __or__ = _left("|")
    __ror__ = _right("|")
    __xor__ = _left("^")
    __rxor__ = _right("^")
    __lshift__ = _left("<<")
    __rlshift__ = _right("<<")
    __rshift__ = _left(">>")
    __rrshift__ = _right(">>")
    __lt__ = _left("<")
    __le__ = _left("<=")
    __gt__ = _left(">")
    __ge__ = _left(">=")
    __eq__ = _left("==")  # type: ignore[assignment]
    __ne__ = _left("!=")  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __neg__(self) -> Node:
        return BUILDER.unary("-", self)

    def __pos__(self) -> Operators:
        return self

    def __invert__(self) -> Node:
        return BUILDER.unary("~", self)

    def __abs__(self) -> Node:
        return BUILDER.unary("abs", self)

    def __pow__(self, exponent: object) -> Node:
        return BUILDER.power(self, exponent)

    def __rpow__(self, base: object) -> NoReturn:
        fail("a power with a traced exponent is not in the language; write fg.exp(y * fg.log(x)) for x ** y")

    def __bool__(self) -> bool:
        answer = None if is_tracing() else self._truth()
        if answer is not None:
            return answer
        fail(advice_for_truth(construct_in_question()))

    def _truth(self) -> bool | None:
        """Outside of tracing: the truth of ``a == b``, which is whether they are one node; None if it is no such."""
        return None

    def __iter__(self) -> NoReturn:
        fail("a traced value cannot be looped over or unpacked; index the captured tensor itself: table[h]")

    def __getitem__(self, indices: object) -> NoReturn:
        fail("a traced value is one number and takes no index; index the captured tensor itself: table[h, k]")

    def __index__(self) -> NoReturn:
        fail(advice_for_number("a whole number"))

    def __int__(self) -> NoReturn:
        fail(advice_for_number("a whole number"))

    def __float__(self) -> NoReturn:
        fail(advice_for_number("a number"))

    def __array__(self, *args: object, **options: object) -> NoReturn:
        fail(advice_for_number("an array"))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "__call__" and ufunc.__name__ in _UFUNCS and len(inputs) == 2 and not options:
            # NumPy hands over its own scalars as arrays without dimensions.
            numbers = [x.item() if getattr(x, "ndim", None) == 0 and hasattr(x, "item") else x for x in inputs]
            return _binary(_UFUNCS[ufunc.__name__], *numbers)
        fail(advice_for_call(f"np.{ufunc.__name__}"))

    def __array_function__(self, function: Any, *rest: object) -> NoReturn:
        fail(advice_for_call(f"np.{function.__name__}"))

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        fail(advice_for_call(called_name() or f"torch.{getattr(function, '__name__', 'function')}"))


class Node(Operators):
    """A value of the language; ``type`` is bool, int or float, ``children`` are its operands."""

    __slots__ = ("__weakref__", "children", "depth", "type", "uses")
    _fields: ClassVar[tuple[str, ...]] = ()
    type: Type
    children: tuple[Node, ...]
    depth: int
    uses: int

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set; nodes never change")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted; nodes never change")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in self._fields)

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: object) -> Node:
        return self

    def __repr__(self) -> str:
        return f"<{BUILDER.text(self)}>"


def can_be_node(value: object) -> bool:
    """Whether ``as_node`` takes it."""
    return isinstance(value, (Node, bool, np.bool_, numbers.Real))
