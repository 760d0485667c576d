"""Mask and score functions inside torch.compile: the compiler runs them on placeholders, which record each operation.

The compiler itself follows what a function captures, so it guards captured numbers, and captured tensors become inputs
of the graph. It cannot build nodes of ``flashgen.expr``, so operations are recorded as tuples of constants, and
``flashgen.torch.tracing.compiled`` builds the nodes from these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from flashgen.errors import TraceError
from flashgen.expr import Length
from flashgen.expr.tree import blame, build
from flashgen.expr.tree.advice import advice_for_call
from flashgen.expr.tree.operators import Operators
from flashgen.torch.tracing.dynamo import follow_operators, once_compiler_is_loaded

#: An operation: what it is, then its operands. ``("step", n)`` stands for the result of step n.
Operation = tuple[Any, ...]
_INDEXING = (torch.Tensor.__getitem__, operator.getitem)
#: Operators of a tensor and a placeholder; a captured tensor without dimensions is a number.
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "eq": "==", "ne": "!="}
_REVERSED = {"radd": "+", "rsub": "-", "rmul": "*", "rdiv": "/", "rtruediv": "/"}
#: torch.compile does not say which of the two stands on the left of these.
_ORDERS = ("lt", "le", "gt", "ge")


class Recorder(TorchFunctionMode):  # type: ignore[misc]
    """The operations of a mask and a score, and the tensors that they index."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Operation] = []
        self.tensors: list[Any] = []

    def call(self, function: Callable[..., Any], *names: str) -> Operation:
        """The result of a function of so many placeholders."""
        placeholders = [Placeholder(self, (name,)) for name in names]
        with self:
            return operand(function(*placeholders))

    def declared(self) -> tuple[tuple[torch.dtype, int], ...]:
        """Element types and ranks of the tensors."""
        return tuple([(tensor.dtype, tensor.dim()) for tensor in self.tensors])

    def load(self, tensor: Any, indices: tuple[Any, ...]) -> Placeholder:
        """An element of a tensor."""
        return self.step("load", self.number_of(tensor), *[operand(index) for index in indices])

    def number_of(self, tensor: Any) -> int:
        """A tensor's place among all, each of which is there once."""
        for i in range(len(self.tensors)):
            if self.tensors[i] is tensor:
                return i
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def step(self, *operation: Any) -> Placeholder:
        """A placeholder for the result of one more operation."""
        self.steps.append(operation)
        return Placeholder(self, ("step", len(self.steps) - 1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Indexing a tensor with placeholders is a step; what takes no placeholder is torch's own."""
        if func in _INDEXING:
            tensor, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if any([isinstance(i, Operators) for i in indices]):  # noqa: C419 (what the compiler can follow)
                return _elements(self, tensor, indices)
        name = name_of(func)
        if len(args) == 2 and isinstance(args[0], torch.Tensor) and isinstance(args[1], Operators):
            if args[0].dim() == 0 and name in _SIGNS:
                return _binary(_SIGNS[name], self.load(args[0], ()), args[1])
            if args[0].dim() == 0 and name in _REVERSED:
                return _binary(_REVERSED[name], args[1], self.load(args[0], ()))
            if name in _ORDERS:
                refuse("a captured tensor is compared with a traced value; subtract first: s - t < 0 for s < t")
        return func(*args, **(kwargs or {}))


class Placeholder(Operators):
    """A traced value; operators and functions of the language record what they do to it."""

    def __init__(self, recorder: Recorder | None, operation: Operation) -> None:
        self.recorder, self.operation = recorder, operation

    def __pow__(self, exponent: object) -> Any:
        return _recorded("power", (), self, exponent)

    def pow(self, exponent: object) -> Any:
        """A power with a small whole exponent."""
        return self**exponent

    def int(self) -> Any:
        """A condition as 1 or 0; a whole number as it is."""
        return _recorded("int", (), self)

    def __bool__(self) -> bool:
        refuse(
            "a traced value is not true or false yet; write fg.where(condition, a, b) for `if`, `&` for `and`, "
            "`|` for `or`, `~` for `not`, and (a < b) & (b < c) for a < b < c"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        refuse(advice_for_call(f"torch.{name_of(function)}"))


class _Constant:
    """``_Constant() == n`` is n: as a constant, even where the compiler leaves n open."""

    def __eq__(self, number: object) -> Any:
        return number

    __hash__ = None  # type: ignore[assignment]


class _Rows:
    """A tensor with some of its indices: ``table[h]``, to be indexed on."""

    def __init__(self, recorder: Recorder, tensor: Any, indices: tuple[Any, ...]) -> None:
        self._recorder, self._tensor, self._indices = recorder, tensor, indices

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return _elements(self._recorder, self._tensor, (*self._indices, *more))


def _elements(recorder: Recorder, tensor: Any, indices: tuple[Any, ...]) -> Any:
    if len(indices) < tensor.dim():
        return _Rows(recorder, tensor, indices)
    return recorder.load(tensor, indices)


def operand(value: Any) -> Operation:
    """A placeholder, a length or a number as constants."""
    if isinstance(value, Placeholder):
        return value.operation
    if isinstance(value, Length):
        return "length", value.name
    if isinstance(value, (bool, int, float)):
        return "number", _Constant() == value
    if isinstance(value, torch.Tensor):
        refuse("a captured tensor stands where a number is expected; index it: table[h, q, k]")
    if value is None:
        refuse("a mask or score function returned None; does it lack a return?")
    refuse(f"a {type(value).__name__} has no meaning in a mask or a score; use numbers, b, h, q and k")


def refuse(message: str) -> NoReturn:
    """TraceError; a constant to the compiler, which runs it while it records, and shows the message."""
    raise TraceError(message)


def _recorded(operation: str, constants: tuple[Any, ...], *values: Any) -> Placeholder:
    recorder = None
    for value in values:
        if isinstance(value, Placeholder) and value.recorder is not None:
            recorder = value.recorder
    if recorder is None:
        return Placeholder(None, (operation, *constants, *[operand(value) for value in values]))
    operands = []
    for value in values:
        is_number = isinstance(value, torch.Tensor) and value.dim() == 0
        operands.append(operand(recorder.load(value, ()) if is_number else value))
    return recorder.step(operation, *constants, *operands)


def _binary(op: str, left: Any, right: Any) -> Any:
    return _recorded("binary", (op,), left, right)


def _unary(op: str, value: Any) -> Any:
    return _recorded("unary", (op,), value)


def _select(condition: Any, then: Any, other: Any) -> Any:
    return _recorded("select", (), condition, then, other)


def _is_tracing() -> bool:
    return True


def name_of(function: Any) -> str:
    """``add`` of ``torch.Tensor.__add__``; a constant to the compiler."""
    return str(function.__name__).strip("_")


def can_follow_functions() -> bool:
    """Whether this torch has the hooks by which its compiler records a function; a constant to the compiler."""
    return _follow_placeholders()


@lru_cache(maxsize=1)
def _follow_placeholders() -> bool:
    return follow_operators(Placeholder, Length, _Constant)


once_compiler_is_loaded(_follow_placeholders)

_original: Any
_recording: Any
for _original, _recording in (
    (build.binary, _binary),
    (build.unary, _unary),
    (build.select, _select),
    (blame.is_tracing, _is_tracing),
):
    # What torch.compile follows instead of the function: it records, and builds no nodes.
    _original._torchdynamo_inline = _recording

_function: Any
for _function in (refuse, name_of, can_follow_functions):
    # What torch.compiler.assume_constant_result sets, without loading the compiler.
    _function._dynamo_marked_constant = True
