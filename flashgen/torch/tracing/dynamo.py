"""What torch.compile does not follow of an object with operators, and has to for placeholders and masks.

Two operators of an object never reach its class: ``~x`` before torch 2.14, and a comparison with a number that the
compiler leaves open, such as a size: it takes ``x == n`` for False. Handlers for some classes are added to its table,
as soon as the compiler is loaded. Loading it takes as long as torch itself, so nothing here does.
"""

from __future__ import annotations

import importlib.util
import operator
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_COMPARISONS = {
    operator.lt: ("__lt__", "__gt__"),
    operator.le: ("__le__", "__ge__"),
    operator.gt: ("__gt__", "__lt__"),
    operator.ge: ("__ge__", "__le__"),
    operator.eq: ("__eq__", "__eq__"),
    operator.ne: ("__ne__", "__ne__"),
}


_COMPILER = "torch._dynamo"


def once_compiler_is_loaded(function: Callable[[], object]) -> None:
    """Calls a function now if the compiler is loaded, else right after its import."""
    if _COMPILER in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _AfterImport(function))


class _AfterImport(MetaPathFinder):
    """Leaves the import of the compiler to others, and calls a function behind it."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The compiler's own spec, whose loader also calls the function."""
        if name != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def load_and_call(module: Any) -> None:
                load(module)
                self._function()

            loader.exec_module = load_and_call
        return spec


#: The classes whose operators the compiler calls.
_followed: set[type] = set()


def follow_operators(*kinds: type) -> bool:
    """Has torch.compile call these operators of objects of some classes; whether this torch can be asked to.

    An open number becomes a constant where one of them is compared with it.
    """
    _followed.update(kinds)
    return _add_handlers()


@lru_cache(maxsize=1)
def _add_handlers() -> bool:
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
            ((of_objects, of_numbers), _comparison(method)),
            ((of_numbers, of_objects), _swapped(_comparison(reflected))),
        ]
        handlers()[compare][:0] = first
    if not hasattr(builtin, "call_invert"):
        builtin.call_invert = lambda _, translator, value: (
            value.call_method(translator, "__invert__", [], {}) if _is_followed(value) else None
        )
    cache.clear()
    return True


def _is_followed(value: Any) -> bool:
    """Whether a variable of the compiler is an object of one of these classes."""
    return getattr(value, "value_type", None) in _followed


def _comparison(method: str) -> Any:
    """Compares an object with what a number is now; None leaves other objects to torch."""

    def compare(translator: Any, value: Any, number: Any) -> Any:
        from torch._dynamo.variables import ConstantVariable

        if not _is_followed(value):
            return None
        return value.call_method(translator, method, [ConstantVariable.create(number.evaluate_expr())], {})

    return compare


def _swapped(handler: Any) -> Any:
    return lambda translator, number, value: handler(translator, value, number)
