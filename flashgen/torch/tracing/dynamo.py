"""What torch.compile does not follow of an object with operators, and has to for placeholders.

Two operators of an object never reach its class: ``~x`` before torch 2.14, and a comparison with a number that the
compiler leaves open, such as a size: it takes ``x == n`` for False. Handlers for some classes are added to its table.
"""

from __future__ import annotations

import operator
from typing import Any

_COMPARISONS = {
    operator.lt: ("__lt__", "__gt__"),
    operator.le: ("__le__", "__ge__"),
    operator.gt: ("__gt__", "__lt__"),
    operator.ge: ("__ge__", "__le__"),
    operator.eq: ("__eq__", "__eq__"),
    operator.ne: ("__ne__", "__ne__"),
}


def follow_operators(*kinds: type) -> bool:
    """Has torch.compile call these operators of objects of some classes; whether this torch can be asked to.

    An open number becomes a constant where one of them is compared with it.
    """
    from torch._dynamo import variables

    variable: Any = variables
    builtin = variable.BuiltinVariable
    handlers = getattr(builtin, "_binop_handlers", None)
    cache = getattr(builtin, "call_function_handler_cache", None)
    if handlers is None or cache is None:
        return False
    of_objects, of_numbers = variable.UserDefinedObjectVariable, variable.SymNodeVariable
    for compare, (method, reflected) in _COMPARISONS.items():
        first = [
            ((of_objects, of_numbers), _comparison(kinds, method)),
            ((of_numbers, of_objects), _swapped(_comparison(kinds, reflected))),
        ]
        handlers()[compare][:0] = first
    if not hasattr(builtin, "call_invert"):
        builtin.call_invert = lambda _, translator, value: (
            value.call_method(translator, "__invert__", [], {}) if _is(value, kinds) else None
        )
    cache.clear()
    return True


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a variable of the compiler is an object of one of these classes."""
    return getattr(value, "value_type", None) in kinds


def _comparison(kinds: tuple[type, ...], method: str) -> Any:
    """Compares an object with what a number is now; None leaves other objects to torch."""

    def compare(translator: Any, value: Any, number: Any) -> Any:
        from torch._dynamo.variables import ConstantVariable

        if not _is(value, kinds):
            return None
        return value.call_method(translator, method, [ConstantVariable.create(number.evaluate_expr())], {})

    return compare


def _swapped(handler: Any) -> Any:
    return lambda translator, number, value: handler(translator, value, number)
