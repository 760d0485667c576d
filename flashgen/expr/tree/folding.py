"""Operations of constants, done while an expression is traced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from flashgen.common.show import show
from flashgen.expr.tree.blame import fail

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
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
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
}
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def folded(op: str, left: Any, right: Any) -> Any:
    """The result of an operator."""
    try:
        return _OPERATORS[op](left, right)
    except OverflowError:  # of an int that no float holds
        fail(f"{show(left)} {op} {show(right)} does not fit a float; use smaller numbers")


def folded_function(op: str, value: float) -> float:
    """The result of a function of floats."""
    with np.errstate(all="ignore"):
        return float(_FUNCTIONS[op](value))
