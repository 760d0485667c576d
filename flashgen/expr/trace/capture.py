"""What a user's function takes from around itself becomes part of the call: numbers by name, tensors by name.

The function is copied with its closure, globals and defaults replaced by traced stand-ins, so a captured
number is an argument of the kernel, while a number written in the function is part of its code.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import numbers
import re
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from flashgen.expr.tree.blame import fail
from flashgen.expr.tree.build import MAX_INT, MIN_INT
from flashgen.expr.tree.captured import Captured, load
from flashgen.expr.tree.nodes import RESERVED, Node, Scalar, Tensor, Type

#: Element types of captured tensors.
TYPES: dict[str, Type] = {
    "bool": "bool",
    **dict.fromkeys(("uint8", "int8", "int16", "int32", "int64"), "int"),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), "float"),
}
_PROTOCOLS = ("__array_interface__", "__dlpack__", "__cuda_array_interface__")
_LIBRARIES = ("flashgen", "numpy", "torch", "cupy", "jax", "builtins", "math", "functools", "operator")


def element_type(array: Any) -> str:
    """The name of a tensor's element type, whatever library it is of: float32, bfloat16, int64, bool."""
    return str(array.dtype).rsplit(".", 1)[-1]


def is_tensor(value: object) -> bool:
    """Whether a value is a tensor of some library."""
    return (
        not isinstance(value, type)
        and hasattr(value, "shape")
        and hasattr(value, "dtype")
        and any(hasattr(value, protocol) for protocol in _PROTOCOLS)
    )


def is_masked(value: object) -> bool:
    """Whether a value is a NumPy array with a mask, which no kernel reads."""
    return isinstance(value, np.ma.MaskedArray)


class Captures:
    """The values that one trace has captured, by their names, and the stand-ins for them."""

    def __init__(self) -> None:
        self.scalars: dict[str, int | float] = {}
        self.tensors: dict[str, Any] = {}
        self._names: set[str] = set()
        self._done: dict[object, Any] = {}
        # Stand-ins are found by the address of what they stand for, which must not be reused meanwhile.
        self._kept: list[object] = []

    def callable(self, function: Callable[..., Any], name: str = "function") -> Callable[..., Any]:
        """The same function over stand-ins."""
        if isinstance(function, functools.partial):
            code = getattr(function.func, "__code__", None)
            names = (*(code.co_varnames if code else ()), *(f"{name}_{i}" for i in range(len(function.args))))
            arguments = [self.value(n, v) for n, v in zip(names, function.args, strict=False)]
            keywords = {word: self.value(word, v) for word, v in function.keywords.items()}
            return functools.partial(self.callable(function.func, name), *arguments, **keywords)
        if isinstance(function, MethodType):
            return MethodType(self.callable(function.__func__, name), self.value("self", function.__self__))
        if isinstance(function, FunctionType):
            return self._copied(function)
        call = inspect.getattr_static(type(function), "__call__", None)
        if isinstance(call, FunctionType):
            return MethodType(self._copied(call), self.value(name, function))
        return function

    def value(self, name: str, value: Any, key: object = None) -> Any:
        """The stand-in for a captured value. A value that needs none, such as a module, is returned unchanged."""
        if isinstance(value, (Node, Captured, type, ModuleType, BuiltinFunctionType, str, bytes, type(None))):
            return value
        if isinstance(value, (numbers.Real, np.bool_)):
            return self._once(key, value, lambda: self._scalar(name, value))
        if is_tensor(value):
            return self._once(("tensor", id(value)), value, lambda: self._tensor(name, value))
        if isinstance(value, (FunctionType, MethodType, functools.partial)):
            return self.callable(value, name) if not _is_of_library(value) else value
        if _is_of_library(value) and type(value) not in (tuple, list, dict):
            return value
        return self._once(("view", id(value)), value, lambda: _View(self, name, value))

    def _once(self, key: object, value: object, make: Callable[[], Any]) -> Any:
        if key is None:
            return make()
        if key not in self._done:
            self._kept.append(value)
            self._done[key] = make()
        return self._done[key]

    def _scalar(self, name: str, value: Any) -> Any:
        kind: Type
        plain: bool | int | float
        if isinstance(value, (bool, np.bool_)):
            kind, plain = "bool", bool(value)
        elif isinstance(value, numbers.Integral):
            kind, plain = "int", int(value)
            if not MIN_INT <= plain <= MAX_INT:
                return plain  # refused where it is used, if it is
        else:
            kind, plain = "float", float(value)
        name = self._new_name(name)
        self.scalars[name] = plain
        return Scalar(name, kind)

    def _tensor(self, name: str, value: Any) -> Any:
        type_ = TYPES.get(element_type(value))
        if type_ is None:
            return _Refused(
                f"{name} has elements of type {element_type(value)}; captured tensors are {', '.join(TYPES)}"
            )
        if is_masked(value):
            return _Refused(f"{name} is a masked array, whose mask kernels do not see; capture {name}.filled(0)")
        name = self._new_name(name)
        self.tensors[name] = value
        shape = tuple(int(n) for n in value.shape)
        tensor = Tensor(name, type_, len(shape))
        return Captured(tensor, shape) if shape else load(tensor, ())

    def _new_name(self, name: str) -> str:
        name = clean_name(name, self._names)
        self._names.add(name)
        return name

    def _copied(self, function: FunctionType) -> FunctionType:
        if function in self._done:
            return self._done[function]  # type: ignore[no-any-return]
        code = function.__code__
        cells = tuple(CellType() for _ in function.__closure__ or ())
        scope = dict(function.__globals__)
        copy = FunctionType(code, scope, function.__name__, None, cells)
        # Known before what it refers to is looked at: functions may refer to each other.
        self._done[function] = copy
        for name in _global_names(code):
            if name in scope:
                scope[name] = self.value(name, scope[name], ("global", id(function.__globals__), name))
        for name, old, new in zip(code.co_freevars, function.__closure__ or (), cells, strict=True):
            try:
                new.cell_contents = self.value(name, old.cell_contents, ("cell", id(old)))
            except ValueError:  # not assigned yet
                continue
        self._copy_defaults(function, copy)
        return copy

    def _copy_defaults(self, function: FunctionType, copy: FunctionType) -> None:
        code, defaults = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
        copy.__defaults__ = tuple(self.value(n, v) for n, v in zip(names, defaults, strict=True)) or None
        copy.__kwdefaults__ = {n: self.value(n, v) for n, v in (function.__kwdefaults__ or {}).items()}


def clean_name(name: str, taken: set[str]) -> str:
    """An unused name for a captured value in expression text. C++ identifiers are made separately."""
    name = re.sub(r"[^0-9A-Za-z_]|__+", "_", name).strip("_") or "value"
    if name in RESERVED or keyword.iskeyword(name) or name[0].isdigit():
        name = f"captured_{name}"
    number, unique = 2, name
    while unique in taken:
        number, unique = number + 1, f"{name}_{number}"
    return unique


def _is_of_library(value: object) -> bool:
    module = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(module, str) and module.split(".")[0] in _LIBRARIES


def _global_names(code: CodeType) -> Iterator[str]:
    """Names that a function and the functions inside of it may look up as globals, each once."""
    seen: dict[str, None] = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            seen.update(dict.fromkeys(_global_names(constant)))
    return iter(seen)


class _Refused:
    """A captured tensor that kernels cannot read; an error only when it is used."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __getitem__(self, indices: object) -> Any:
        fail(self._message)


class _View:
    """A captured object whose attributes are captured in turn: ``self.slopes`` becomes the tensor slopes."""

    def __init__(self, captures: Captures, name: str, viewed: object) -> None:
        vars(self).update(_captures=captures, _name=name, _viewed=viewed)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(vars(self)["_viewed"])

    def __getattr__(self, name: str) -> Any:
        viewed = vars(self)["_viewed"]
        return vars(self)["_captures"].value(name, getattr(viewed, name), ("attribute", id(viewed), name))

    def __getitem__(self, key: Any) -> Any:
        viewed = vars(self)["_viewed"]
        value, name = viewed[key], f"{vars(self)['_name']}_{key}"
        try:
            return vars(self)["_captures"].value(name, value, ("item", id(viewed), key))
        except TypeError:  # a key that cannot be hashed, such as a slice
            return vars(self)["_captures"].value(name, value)

    def __iter__(self) -> Iterator[Any]:
        viewed = vars(self)["_viewed"]
        return iter(viewed) if isinstance(viewed, dict) else (self[i] for i in range(len(viewed)))

    def __len__(self) -> int:
        return len(vars(self)["_viewed"])

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return vars(self)["_captures"].callable(vars(self)["_viewed"], vars(self)["_name"])(*arguments, **keywords)
