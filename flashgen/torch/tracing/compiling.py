"""A mask and a score inside of torch.compile: constants of the graph, and captured tensors as its inputs."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.spec import Mask, Score
from flashgen.torch.program import Program, limits_of
from flashgen.torch.tracing import compiled
from flashgen.torch.tracing.algebra import CombinedMask, CombinedScore
from flashgen.torch.tracing.recorder import Operation, Recorder, can_follow_functions


def recorded_program(mask: Any, score: Any) -> tuple[Program, tuple[Any, ...]]:
    """The program of a mask and a score that torch.compile follows, and the tensors that they capture."""
    recorder = Recorder()
    of_mask = None if mask is None else _mask(recorder, mask)
    of_score = None if score is None else _score(recorder, score)
    recorded = of_mask, of_score, tuple(recorder.steps), recorder.declared()
    captured = [recorder.tensors[i] for i in compiled.order(*recorded)]
    return Program(compiled.text(*recorded)), tuple(captured)


def _mask(recorder: Recorder, mask: Any) -> Operation:
    if isinstance(mask, CombinedMask):
        return mask.operator, *[_mask(recorder, part) for part in mask.parts]
    if not isinstance(mask, Mask):
        return _function(recorder, "mask", mask, "bhqk")
    if mask.rest is None:
        return "bands", *[compiled.constant(limit) for limit in limits_of(mask)]
    # Names, since the compiler cannot guard a form, which an object of its own may share.
    tensors = [mask.rest.tensors[name] for name in compiled.mask_names(mask.form_name)]
    return "form", mask.form_name, *[recorder.number_of(tensor) for tensor in tensors]


def _score(recorder: Recorder, score: Any) -> Operation:
    if isinstance(score, CombinedScore):
        return ">>", *[_score(recorder, part) for part in score.parts]
    if not isinstance(score, Score):
        return _function(recorder, "score", score, "sbhqk")
    name = score.form_name
    tensors = [score.traced.tensors[each] for each in compiled.score_names(name)]
    if score.sink is not None:
        tensors += [score.sink.tensors[each] for each in compiled.sink_names(name)]
    return "form", name, *[recorder.number_of(tensor) for tensor in tensors]


def _function(recorder: Recorder, name: str, function: Any, arguments: str) -> Operation:
    """What a function does, which the compiler follows."""
    if not callable(function) or isinstance(function, (type, Mask, Score)):
        raise ArgumentError(f"{name} is a {type(function).__qualname__}; pass a flashgen {name.title()} or a function")
    if not can_follow_functions():
        raise ArgumentError(
            f"torch.compile of torch {torch.__version__} cannot look into a {name} function; make a flashgen."
            f"{name.title()}.of(function) outside of the compiled function, and pass that"
        )
    return "function", recorder.call(function, *arguments)
