"""What torch.compile takes as constants of a graph: functions of forms, which it compares by identity.

It runs these functions while it records, instead of following them.
"""

from __future__ import annotations

from typing import Any

from flashgen.expr import Load, Traced, postorder
from flashgen.spec import Mask, Score
from flashgen.spec.declared import Declared
from flashgen.spec.form import Form
from flashgen.spec.mask import Band
from flashgen.torch.programs import Program, program_of, tensors_of


def constant(number: int | None) -> int | None:
    """A number that a program's text says: as it is while recording, even where torch.compile leaves sizes open.

    It has no constant for a number that may change, but a range is of one size.
    """
    return None if number is None else range(number).stop


def mask_names(form: Form) -> tuple[str, ...]:
    """The names of the tensors of a mask's expression."""
    return _names(form.key[2])


def score_names(form: Form) -> tuple[str, ...]:
    """The names of the tensors of a score's expression."""
    return _names(form.key[0])


def sink_names(form: Form) -> tuple[str, ...]:
    """The names of the tensors of a score's sink."""
    return _names(form.key[1])


def text(mask: Form | None, score: Form | None, *limits: int | None) -> str:
    """The text of the program; ``limits`` are the mask's where it is bands alone."""
    return _program(mask, score, limits)[0].text


def order(mask: Form | None, score: Form | None, *limits: int | None) -> tuple[int, ...]:
    """Where the program's tensors are among those of the mask, the score and the sink, each in the order of names."""
    return _program(mask, score, limits)[1]


_function: Any
for _function in (mask_names, score_names, sink_names, text, order):
    # What torch.compiler.assume_constant_result sets, without loading the compiler.
    _function._dynamo_marked_constant = True


def _program(mask: Form | None, score: Form | None, limits: tuple[int | None, ...]) -> tuple[Program, tuple[int, ...]]:
    left, right, left_from_start, right_from_start = limits
    whole = Mask(Band(left, right), Band(left_from_start, right_from_start)) if mask is None else _mask(mask)
    scored = None if score is None else _score(score)
    program, ordered = program_of(whole, scored)
    tensors = tensors_of(whole, scored)
    return program, tuple(next(i for i, t in enumerate(tensors) if t is tensor) for tensor in ordered)


def _mask(form: Form) -> Mask:
    bottom_right, top_left, rest = form.key
    return Mask(bottom_right, top_left, _traced(rest))


def _score(form: Form) -> Score:
    traced, sink = form.key
    return Score(_traced(traced), None if sink is None else _traced(sink))


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
