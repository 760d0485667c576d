"""What a mask or score function takes from around itself, looked up cheaply on every call.

A function is traced once for its code and for what it holds: numbers by value, tensors by type and shape. The next
call with the same finds the tree in a dictionary, and only looks where its tensors are now.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch

from flashgen.expr import Node, Traced, is_tensor, trace_mask, trace_score

#: How many functions, with numbers of their own each, are remembered.
_TRACES_KEPT = 1024
#: Modules, classes and functions of these hold nothing that would change; those of users may.
_LIBRARIES = ("flashgen", "torch", "numpy", "math", "builtins")

_traces: dict[Any, tuple[Traced, dict[str, int], tuple[Any, ...]]] = {}


def traced(function: Callable[..., Any], what: str) -> Traced:
    """The tree of a mask's or a score's function, and the values that it holds now."""
    trace = trace_mask if what == "mask" else trace_score
    values = slots(function)
    described = None if values is None else _described(values)
    if described is None:
        return trace(function)
    key = (what, function.__code__, described)  # type: ignore[attr-defined]
    found = _traces.get(key)
    if found is None:
        assert values is not None
        fresh = trace(function)
        where = {name: _position(tensor, values) for name, tensor in fresh.tensors.items()}
        if len(_traces) >= _TRACES_KEPT:
            _traces.clear()
        # The tensors themselves are not kept alive; what the key knows by its address is.
        constants = tuple(v for v in values if not is_tensor(v))
        _traces[key] = Traced(fresh.root, fresh.scalars), where, constants
        return fresh
    tree, where, _ = found
    assert values is not None
    if not where:
        return tree
    return Traced(tree.root, tree.scalars, {name: values[i] for name, i in where.items()})


def slots(function: Callable[..., Any]) -> list[Any] | None:
    """All that a plain function may capture, in a fixed order; None for other callables."""
    if not isinstance(function, FunctionType):
        return None
    try:
        values = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable that is not assigned yet
        return None
    scope = function.__globals__
    values += [scope[name] for name in global_names(function.__code__) if name in scope]
    values += function.__defaults__ or ()
    values += (function.__kwdefaults__ or {}).values()
    return values


@lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Names that a function and those inside of it may look up as globals."""
    return tuple(dict.fromkeys(_global_names(code)))


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _described(values: list[Any]) -> tuple[Any, ...] | None:
    """What a trace depends on; None where something is captured whose parts would have to be known."""
    described: list[Any] = []
    for value in values:
        if isinstance(value, (bool, int, float, str, bytes, NoneType, numbers.Real, np.bool_)):
            described.append((type(value), value))
        elif isinstance(value, torch.Tensor) or is_tensor(value):
            described.append((value.dtype, value.shape, _position(value, values)))
        elif _is_constant(value):
            described.append(id(value))
        else:
            return None
    return tuple(described)


def _position(value: Any, values: list[Any]) -> int:
    """Where a value first is; two places may hold the same tensor, which is captured once."""
    return next(i for i, other in enumerate(values) if other is value)


def _is_constant(value: object) -> bool:
    """Whether a value means the same as long as it lives: a library's own, or a traced value such as ``fg.q_len``."""
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        home = getattr(value, "__module__", None)
    elif isinstance(value, ModuleType):
        home = value.__name__
    else:
        return isinstance(value, Node)
    return isinstance(home, str) and home.split(".")[0] in _LIBRARIES
