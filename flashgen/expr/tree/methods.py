"""Methods of traced values, named as torch names those of tensors: ``(q - k).abs()`` is ``abs(q - k)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flashgen.expr.tree.blame import fail

if TYPE_CHECKING:
    from flashgen.expr.tree.nodes import Node


def _unary(op: str, operand: object) -> Any:
    from flashgen.expr.tree.build import unary

    return unary(op, operand)


def _binary(op: str, left: object, right: object) -> Any:
    from flashgen.expr.tree.build import binary

    return binary(op, left, right)


class Methods:
    """What torch users type behind a value, where the language has a function for it."""

    __slots__ = ()

    def abs(self) -> Node:
        """The magnitude."""
        return _unary("abs", self)  # type: ignore[no-any-return]

    def exp(self) -> Node:
        """e to the power of the value."""
        return _unary("exp", self)  # type: ignore[no-any-return]

    def log(self) -> Node:
        """The natural logarithm."""
        return _unary("log", self)  # type: ignore[no-any-return]

    def sqrt(self) -> Node:
        """The square root."""
        return _unary("sqrt", self)  # type: ignore[no-any-return]

    def sin(self) -> Node:
        """The sine of an angle in radians."""
        return _unary("sin", self)  # type: ignore[no-any-return]

    def cos(self) -> Node:
        """The cosine of an angle in radians."""
        return _unary("cos", self)  # type: ignore[no-any-return]

    def tan(self) -> Node:
        """The tangent of an angle in radians."""
        return _unary("tan", self)  # type: ignore[no-any-return]

    def tanh(self) -> Node:
        """The hyperbolic tangent."""
        return _unary("tanh", self)  # type: ignore[no-any-return]

    def sigmoid(self) -> Node:
        """``1 / (1 + exp(-x))``."""
        return _unary("sigmoid", self)  # type: ignore[no-any-return]

    def minimum(self, other: object) -> Node:
        """The smaller of two."""
        return _binary("min", self, other)  # type: ignore[no-any-return]

    def maximum(self, other: object) -> Node:
        """The larger of two."""
        return _binary("max", self, other)  # type: ignore[no-any-return]

    def min(self, other: object) -> Node:
        """The smaller of two."""
        return _binary("min", self, other)  # type: ignore[no-any-return]

    def max(self, other: object) -> Node:
        """The larger of two."""
        return _binary("max", self, other)  # type: ignore[no-any-return]

    def clamp(self, min: object = None, max: object = None) -> Node:
        """The value, moved to the nearer of two limits where it lies beyond it; None is no limit."""
        if min is None and max is None:
            fail("clamp() without limits does nothing; write x.clamp(0, 63), x.clamp(min=0) or x.clamp(max=63)")
        at_least: Any = self if min is None else _binary("max", self, min)
        return at_least if max is None else _binary("min", at_least, max)  # type: ignore[no-any-return]

    def clip(self, min: object = None, max: object = None) -> Node:
        """The same as ``clamp``."""
        return self.clamp(min, max)

    def pow(self, exponent: object) -> Node:
        """A power with a small whole exponent."""
        from flashgen.expr.tree.functions import power

        return power(self, exponent)

    def float(self) -> Node:
        """A whole number or a condition as a float."""
        return _unary("float", self)  # type: ignore[no-any-return]

    def int(self) -> Node:
        """A condition as 1 or 0; a whole number as it is."""
        from flashgen.expr.tree.functions import to_int

        return to_int(self)


#: By name, for texts.
METHODS: Mapping[str, Callable[..., Any]] = {n: f for n, f in vars(Methods).items() if not n.startswith("_")}
