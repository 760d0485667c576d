"""What torch.compile takes as constants of a graph: functions of texts, numbers and tuples of these.

It runs these functions while it records, instead of following them. Masks and scores come by the names of their forms;
functions come as the operations that ``flashgen.torch.tracing.recorder`` wrote down.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashgen.errors import TraceError
from flashgen.expr import Index, Length, Node, Tensor, Traced
from flashgen.expr import Score as Logit
from flashgen.expr.trace.capture import TYPES
from flashgen.expr.trace.traced import with_used
from flashgen.expr.trace.tracer import checked
from flashgen.expr.tree import build
from flashgen.expr.tree.captured import load
from flashgen.expr.tree.functions import to_int
from flashgen.expr.tree.nodes import Type
from flashgen.spec import Mask, Score, full
from flashgen.spec.form import form_named
from flashgen.spec.text.declared import Declared
from flashgen.torch.program import Program, written_program
from flashgen.torch.tracing.algebra import band_mask
from flashgen.torch.tracing.recorder import Operation


class Recorded(NamedTuple):
    """What torch.compile knows of a mask and a score: forms, functions, and the operators that combine them."""

    mask: Operation | None
    score: Operation | None
    steps: tuple[Operation, ...] = ()
    #: Element types and ranks of the captured tensors.
    declared: tuple[tuple[torch.dtype, int], ...] = ()


def constant(number: int | None) -> int | None:
    """A number that a program's text says: as it is while recording, even where torch.compile leaves sizes open.

    It has no constant for a number that may change, but a range is of one size.
    """
    return None if number is None else range(number).stop


def text_of(program: Program) -> str:
    """A program's text, which operators carry; of limits alone it is made here."""
    rule = program.rule
    return rule if isinstance(rule, str) else text_of_limits(*[constant(number) for number in rule])


def mask_names(form: str) -> tuple[str, ...]:
    """The names of the tensors of a mask's expression."""
    return _names(form_named(form).key[2])


def score_names(form: str) -> tuple[str, ...]:
    """The names of the tensors of a score's expression."""
    return _names(form_named(form).key[0])


def sink_names(form: str) -> tuple[str, ...]:
    """The names of the tensors of a score's sink."""
    return _names(form_named(form).key[1])


def text_of_limits(*limits: int | None) -> str:
    """The text of a mask of bands alone."""
    return text(("bands", *limits), None)


def text(*recorded: Any) -> str:
    """The text of the program of a ``Recorded``."""
    return _written(Recorded(*recorded))[0]


def order(*recorded: Any) -> tuple[int, ...]:
    """Where the program's tensors are among the captured ones."""
    return _written(Recorded(*recorded))[1]


_function: Any
for _function in (mask_names, score_names, sink_names, text_of_limits, text, order):
    # What torch.compiler.assume_constant_result sets, without loading the compiler.
    _function._dynamo_marked_constant = True


def _written(recorded: Recorded) -> tuple[str, tuple[int, ...]]:
    nodes = _Nodes(recorded)
    mask = full() if recorded.mask is None else _mask(nodes, recorded.mask)
    score = None if recorded.score is None else _score(nodes, recorded.score)
    program, ordered = written_program(mask, score)
    tensors = list(nodes.declared.values())
    return str(program.rule), tuple(next(i for i, t in enumerate(tensors) if t is tensor) for tensor in ordered)


def _mask(nodes: _Nodes, operation: Operation) -> Mask:
    match operation:
        case "bands", *limits:
            return band_mask(*limits)
        case "form", name, *numbers:
            bottom_right, top_left, rest = form_named(name).key
            return Mask(bottom_right, top_left, nodes.of_key(rest, numbers))
        case "function", result:
            return Mask(rest=nodes.traced(result, "mask"))
        case "&", a, b:
            return _mask(nodes, a) & _mask(nodes, b)
        case "|", a, b:
            return _mask(nodes, a) | _mask(nodes, b)
        case "~", a:
            return ~_mask(nodes, a)
    raise AssertionError(f"{operation} is no mask of the recorder")


def _score(nodes: _Nodes, operation: Operation) -> Score:
    match operation:
        case "form", name, *numbers:
            traced, sink = form_named(name).key
            count = len(_names(traced))
            of_sink = None if sink is None else nodes.of_key(sink, numbers[count:])
            return Score(nodes.of_key(traced, numbers[:count]), of_sink)
        case "function", result:
            return Score(nodes.traced(result, "score"))
        case ">>", first, second:
            return _score(nodes, first) >> _score(nodes, second)
    raise AssertionError(f"{operation} is no score of the recorder")


class _Nodes:
    """The nodes of recorded operations, and the captured tensors by the names that functions have for them."""

    def __init__(self, recorded: Recorded) -> None:
        self.declared = {
            f"tensor_{i}": Declared(str(dtype).removeprefix("torch."), rank)
            for i, (dtype, rank) in enumerate(recorded.declared)
        }
        self._tensors = [Tensor(name, _type_of(name, d.dtype), d.rank) for name, d in self.declared.items()]
        self._made: list[Node] = []
        for step in recorded.steps:
            self._made.append(self._node(step))

    def traced(self, result: Operation, what: str) -> Traced:
        """The expression of a mask or a score."""
        return with_used(checked(self._node(result), what), {}, self.declared)

    def of_key(self, key: tuple[Any, ...], numbers: list[int]) -> Traced:
        """The expression of a ``Traced.key``, whose tensors have these numbers among the captured ones."""
        root, scalars, _ = key
        declared = list(self.declared.values())
        tensors = {name: declared[i] for name, i in zip(_names(key), numbers, strict=True)}
        return Traced(root, {name: value for name, _, value in scalars}, tensors)

    def _node(self, operation: Operation) -> Node:
        match operation:
            case "step", number:
                return self._made[number]
            case "number", value:
                return build.as_node(value)
            case "length", name:
                return Length(name)
            case "load", number, *indices:
                return load(self._tensors[number], tuple(map(self._node, indices)))
            case "unary", op, x:
                return build.unary(op, self._node(x))
            case "binary", op, a, b:
                return build.binary(op, self._node(a), self._node(b))
            case "select", *parts:
                return build.select(*map(self._node, parts))
            case "power", base, (_, exponent):
                raised: Node = self._node(base) ** exponent
                return raised
            case "int", x:
                return to_int(self._node(x))
            case (name,):
                return Logit() if name == "s" else Index(name)
        raise AssertionError(f"{operation} is not an operation of the recorder")


def _type_of(name: str, dtype: str) -> Type:
    if dtype not in TYPES:
        raise TraceError(f"{name} has elements of type {dtype}; captured tensors are {', '.join(TYPES)}")
    return TYPES[dtype]


def _names(key: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(name for name, _ in key[2])
