"""``Program``: what a kernel computes, as an operator can carry it beside the tensors that it captured.

The limits of a mask of bands are four numbers. Everything else is a text, the spec's own written form: mask, score,
sink and captured values, tensors by element type and rank. It says everything, so a program that was exported in one
process runs in another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashgen.errors import ArgumentError
from flashgen.spec import AttentionSpec, Mask, Score
from flashgen.spec.masks.band import Band
from flashgen.spec.text.files import spec_to_dict
from flashgen.spec.text.reading import TEXT_FIELDS, mask_and_score

#: How many pairs of a mask and a score, with numbers of their own each, are remembered.
_PROGRAMS_KEPT = 1024

#: Limits of the mask's two bands: left and right from the last key, left and right from the first key.
Limits = tuple[int | None, int | None, int | None, int | None]


class Program(NamedTuple):
    """A mask and a score."""

    #: The limits of a mask of bands alone; otherwise the text.
    rule: Limits | str
    #: The names under which kernels take the captured tensors, in the order in which operators carry them.
    names: tuple[str, ...] = ()


#: Every query attends to every key.
FULL = Program((None, None, None, None))

_programs: dict[Any, tuple[Program, tuple[int, ...]]] = {}
_specs: dict[str, AttentionSpec] = {}


def limits_of(mask: Mask) -> Limits:
    """A mask of bands alone as four numbers that an operator schema can carry."""
    bottom_right, top_left = mask.bottom_right, mask.top_left
    return bottom_right.left, bottom_right.right, top_left.left, top_left.right


def written_program(mask: Mask, score: Score | None) -> tuple[Program, tuple[Any, ...]]:
    """The program of a mask and a score, and the tensors that they hold now, in the program's order."""
    tensors = tensors_of(mask, score)
    # Names depend on which tensors are the same, since those are captured once.
    same = tuple([next(i for i, t in enumerate(tensors) if t is tensor) for tensor in tensors]) if tensors else ()
    # Forms say all that texts say, keep no tensor alive, and are one object each, which is quick to look up.
    key = (mask.form or limits_of(mask), None if score is None else score.form, same)
    found = _programs.get(key)
    if found is None:
        if len(_programs) >= _PROGRAMS_KEPT:
            _programs.clear()
        spec = AttentionSpec(1, mask=mask, score=score)
        program = program_named(_text_of(spec))
        given = spec.tensors
        order = tuple(next(i for i, t in enumerate(tensors) if t is given[name]) for name in program.names)
        found = _programs[key] = program, order
    program, order = found
    return program, tuple([tensors[i] for i in order]) if order else ()


def tensors_of(mask: Mask | None, score: Score | None) -> list[Any]:
    """The captured tensors of both, one after the other."""
    found: list[Any] = []
    if mask is not None and mask.rest is not None:
        found += mask.rest.tensors.values()
    if score is not None:
        found += score.traced.tensors.values()
        if score.sink is not None:
            found += score.sink.tensors.values()
    return found


def _text_of(spec: AttentionSpec) -> str:
    text = json.dumps({name: value for name, value in spec_to_dict(spec).items() if name in TEXT_FIELDS})
    assert spec_of(text) == spec, f"the written form of {spec.describe()} reads as something else"
    return text


@lru_cache(maxsize=_PROGRAMS_KEPT)
def program_named(text: str) -> Program:
    """The program of a text."""
    return Program(text, tuple(sorted(spec_of(text).tensors)))


def spec_of(rule: Limits | str) -> AttentionSpec:
    """A spec with a program's mask and score, its tensors declared."""
    if not isinstance(rule, str):
        return AttentionSpec(1, mask=Mask(Band(*rule[:2]), Band(*rule[2:])))
    spec = _specs.get(rule)
    if spec is None:
        if len(_specs) >= _PROGRAMS_KEPT:
            _specs.clear()
        spec = _specs[rule] = AttentionSpec(1, **mask_and_score(json.loads(rule)))
    return spec


def check_tensors(names: tuple[str, ...], tensors: Sequence[Any], device: torch.device) -> None:
    """Captured tensors are torch's, on the device of q: a copy made here would miss later changes."""
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"the captured tensor {name} is a {kind_of(tensor)}; make it a torch tensor beside q, once: "
                f"torch.as_tensor({name}, device={str(device)!r})"
            )
        if tensor.device != device:
            raise ArgumentError(
                f"the captured tensor {name} is on {tensor.device}, and q is on {device}; move it there, once: "
                f"{name}.to({str(device)!r})"
            )


def kind_of(tensor: Any) -> str:
    """The library and the type of an array, as messages name it."""
    return f"{type(tensor).__module__.split('.')[0]}.{type(tensor).__name__}"
