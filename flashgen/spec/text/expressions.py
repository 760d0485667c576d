"""Masks and scores as texts, and what they captured as plain values: how spec files and command lines write them.

A captured number is its value, whose type counts: ``30``, ``30.0`` and ``true`` differ. A captured tensor is its
element type and rank, such as ``int32[2]``, since its elements come with a call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flashgen.common.show import show
from flashgen.errors import SpecError, TraceError
from flashgen.spec.masks.mask import Mask
from flashgen.spec.text.declared import Declared

if TYPE_CHECKING:
    from flashgen.expr import Node, Traced
    from flashgen.spec.score import Score

Value = int | float | Declared
MAX_RANK = 8
VALUE_REMEDY = "write a number, true, false, or a tensor's element type and rank such as 'int32[2]'"
_TENSOR = re.compile(r"([a-z]+[0-9]*)\[([0-9]{1,4})\]")
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
#: Floats that JSON has no numbers for.
_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_REMEDY = "write an expression of b, h, q, k, q_len, k_len and the captured names"


def value_to_plain(value: Any) -> int | float | str:
    """A captured value as files hold it: a number, or a word for what JSON has no number for."""
    if not isinstance(value, (bool, int, float)):
        from flashgen.expr import element_type

        return f"{element_type(value)}[{len(value.shape)}]"
    return value if math.isfinite(value) else str(value)


def plain_to_text(plain: int | float | str) -> str:
    """A captured value, as files hold it, in one word of a command line."""
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


def value_from_plain(value: object, name: str) -> Value:
    """What ``value_to_plain`` wrote, or a person; ``name`` is what complaints call it."""
    if isinstance(value, str):
        return _WORDS[value] if value in _WORDS else _declared(value, name)
    if not isinstance(value, (bool, int, float)):
        raise SpecError(f"{name}={show(value)} is not a captured value; {VALUE_REMEDY}")
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise SpecError(f"{name}={show(value)} does not fit 32 bits; write it as a float, or use a smaller number")
    return value


def plain_from_text(text: str) -> int | float | str:
    """What ``plain_to_text`` wrote; text is matched, never evaluated."""
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _declared(text: str, name: str) -> Declared:
    from flashgen.expr.trace.capture import TYPES

    match = _TENSOR.fullmatch(text)
    if match is None:
        raise SpecError(f"{name}={show(text)} is neither a number nor a tensor; {VALUE_REMEDY}")
    dtype, rank = match[1], int(match[2])
    if dtype not in TYPES:
        raise SpecError(f"{name}={show(text)} has elements of type {show(dtype)}; use one of {', '.join(TYPES)}")
    if rank > MAX_RANK:
        raise SpecError(f"{name}={show(text)} has {rank} dimensions; use at most {MAX_RANK}")
    return Declared(dtype, rank)


def check_name(name: str) -> str:
    """The name itself, if expressions and kernels can call a captured value by it."""
    from flashgen.expr.trace.capture import clean_name

    possible = clean_name(name[:60], set())
    if possible != name:
        raise SpecError(f"captured.{name[:60]} is not a name that a kernel can use; write {possible} instead")
    return name


class Reader:
    """Reads the texts of one spec, all of which may use the same captured values."""

    def __init__(self, captured: Mapping[str, Value]) -> None:
        from flashgen.expr import Scalar, Tensor
        from flashgen.expr.trace.capture import TYPES

        self._values = captured
        self._names: dict[str, Scalar | Tensor] = {
            name: Tensor(name, TYPES[value.dtype], value.rank)
            if isinstance(value, Declared)
            else Scalar(name, "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float")
            for name, value in captured.items()
        }
        self._numbers = {name: x for name, x in captured.items() if not isinstance(x, Declared)}
        self._used: set[str] = set()

    def mask(self, text: object, name: str = "mask") -> Mask:
        """The mask of a condition's text."""
        return Mask(rest=self._traced(self._parsed(text, name, "mask")))

    def score(self, score: object, sink: object) -> Score | None:
        """The score of the two texts; None when there is neither."""
        from flashgen.expr import Score as Logit
        from flashgen.spec.score import Score

        if score is None and sink is None:
            return None
        problems: list[str] = []
        parts: list[Traced | None] = [None, None]
        for i, (text, name) in enumerate(((score, "score"), (sink, "sink"))):
            try:
                parts[i] = None if text is None else self._traced(self._parsed(text, name, name))
            except SpecError as error:
                problems += error.violations
        if problems:
            raise SpecError(*problems)
        return Score(parts[0] or self._traced(Logit()), parts[1])

    def unused(self) -> Iterable[str]:
        """Captured names that no text has mentioned."""
        return (name for name in self._values if name not in self._used)

    def _parsed(self, text: object, name: str, what: str) -> Node:
        """The checked tree of a text; ``what`` it is decides what it may hold."""
        from flashgen.expr import parse
        from flashgen.expr.trace.traced import check_counts, check_size
        from flashgen.expr.tree.build import to_float

        if not isinstance(text, str):
            raise SpecError(f"{name}={show(text)} is not a text; {_REMEDY}")
        try:
            root = parse(text, self._names, score=what == "score", remedy=_written_out)
            check_size(root, f"the {what}")
            check_counts(root, self._numbers)
        except TraceError as error:
            raise SpecError(*(f"{name}: {_with_remedy(violation)}" for violation in error.violations)) from None
        if (root.type == "bool") != (what == "mask"):
            wrong = "a number; write a condition, such as q >= k" if what == "mask" else "a condition; write a number"
            raise SpecError(f"{name}={show(text)} is {wrong}")
        if what == "sink":
            _check_sink(root, text)
        return root if what == "mask" else to_float(root)

    def _traced(self, root: Node) -> Traced:
        from flashgen.expr import Load, Scalar, Traced, postorder

        scalars: dict[str, int | float] = {}
        tensors: dict[str, Any] = {}
        for node in postorder(root):
            if isinstance(node, Scalar):
                value = self._values[node.name]
                assert not isinstance(value, Declared), "scalars stand for numbers"
                scalars[node.name] = value
            elif isinstance(node, Load):
                tensors[node.tensor.name] = self._values[node.tensor.name]
        self._used.update(scalars, tensors)
        return Traced(root, scalars, tensors)


def _check_sink(root: Node, text: str) -> None:
    from flashgen.expr.tree.nodes import USES

    wrong = [name for name in ("q", "k") if root.uses & USES[name]]
    if wrong:
        raise SpecError(f"sink={show(text)} depends on {' and '.join(wrong)}; a row has one sink, so use b and h alone")


def _written_out(name: str) -> str | None:
    """What a text or a file says in place of a named mask or score, which are functions of Python."""
    from flashgen.spec.formulas import BANDS, formula

    found = formula(name)
    if found is None:
        return BANDS.get(name)
    values = {name: value_to_plain(value) for name, value in found.captured.items()}
    captured = "".join(f" and captured.{name}={value!r}" for name, value in values.items())
    return f"write {found.field}={found.text!r}{captured}"


def _with_remedy(violation: str) -> str:
    short = violation if len(violation) < 600 else violation[:600] + "..."
    return short if "; " in short else f"{short}; {_REMEDY}"
