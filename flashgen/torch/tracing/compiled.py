"""What torch.compile takes as constants of a graph: functions of texts, numbers and tuples of these.

It runs these functions while it records, instead of following them. Masks and scores come by the names of their forms;
functions come as the operations that ``flashgen.torch.tracing.recorder`` wrote down.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashgen.errors import TraceError
from flashgen.expr import Index, Length, Load, Node, Tensor, Traced, postorder
from flashgen.expr import Score as Logit
from flashgen.expr.trace.capture import TYPES
from flashgen.expr.trace.traced import with_used
from flashgen.expr.trace.tracer import checked
from flashgen.expr.tree import build
from flashgen.expr.tree.captured import load
from flashgen.expr.tree.functions import to_int
from flashgen.expr.tree.nodes import Type
from flashgen.spec import Mask, Score
from flashgen.spec.form import form_named
from flashgen.spec.masks.band import Band
from flashgen.spec.text.declared import Declared
from flashgen.torch.tracing.program import Program, program_of, tensors_of
from flashgen.torch.tracing.recorder import Operation


class Recorded(NamedTuple):
    """What torch.compile knows of a mask and a score: names of forms, or results among the operations."""

    mask: str | Operation | None
    score: str | Operation | None
    #: The mask's where it is bands alone.
    limits: tuple[int | None, ...]
    steps: tuple[Operation, ...] = ()
    #: Element types and ranks of the tensors of these operations.
    declared: tuple[tuple[torch.dtype, int], ...] = ()


def constant(number: int | None) -> int | None:
    """A number that a program's text says: as it is while recording, even where torch.compile leaves sizes open.

    It has no constant for a number that may change, but a range is of one size.
    """
    return None if number is None else range(number).stop


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
    return text(None, None, limits)


def text(*recorded: Any) -> str:
    """The text of the program of a ``Recorded``."""
    return _program(Recorded(*recorded))[0].text


def order(*recorded: Any) -> tuple[int, ...]:
    """Where the program's tensors are: first those of the mask, the score and the sink, each in the order of names;
    then those of the operations.
    """
    return _program(Recorded(*recorded))[1]


_function: Any
for _function in (mask_names, score_names, sink_names, text_of_limits, text, order):
    # What torch.compiler.assume_constant_result sets, without loading the compiler.
    _function._dynamo_marked_constant = True


def _program(recorded: Recorded) -> tuple[Program, tuple[int, ...]]:
    nodes = _Nodes(recorded)
    mask, score = _mask(recorded, nodes), _score(recorded, nodes)
    program, ordered = program_of(mask, score)
    of_objects = tensors_of(
        mask if isinstance(recorded.mask, str) else None, score if isinstance(recorded.score, str) else None
    )
    tensors = [*of_objects, *nodes.declared.values()]
    return program, tuple(next(i for i, t in enumerate(tensors) if t is tensor) for tensor in ordered)


def _mask(recorded: Recorded, nodes: _Nodes) -> Mask:
    if isinstance(recorded.mask, str):
        bottom_right, top_left, rest = form_named(recorded.mask).key
        return Mask(bottom_right, top_left, _traced(rest))
    if recorded.mask is None:
        left, right, left_from_start, right_from_start = recorded.limits
        return Mask(Band(left, right), Band(left_from_start, right_from_start))
    return Mask(rest=nodes.traced(recorded.mask, "mask"))


def _score(recorded: Recorded, nodes: _Nodes) -> Score | None:
    if isinstance(recorded.score, str):
        traced, sink = form_named(recorded.score).key
        return Score(_traced(traced), None if sink is None else _traced(sink))
    return None if recorded.score is None else Score(nodes.traced(recorded.score, "score"))


class _Nodes:
    """The nodes of recorded operations."""

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


def _traced(key: tuple[Any, ...]) -> Traced:
    """The expression of a ``Traced.key``, its tensors declared."""
    root, scalars, tensors = key
    ranks = {node.tensor.name: node.tensor.rank for node in postorder(root) if isinstance(node, Load)}
    return Traced(
        root,
        {name: value for name, _, value in scalars},
        {name: Declared(dtype, ranks[name]) for name, dtype in tensors},
    )


def _names(key: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(name for name, _ in key[2])
