"""A mask and a score as one text that an operator can carry, beside the tensors that they captured.

The text is the spec's own written form: mask, score, sink and captured values, tensors by element type and rank. It
says everything, so a program that was exported in one process runs in another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.expr import is_tensor
from flashgen.spec import AttentionSpec, Mask, Score, full
from flashgen.spec.text.files import spec_to_dict
from flashgen.spec.text.reading import TEXT_FIELDS, mask_and_score
from flashgen.torch.tracing.slots import traced

#: How many pairs of a mask and a score, with numbers of their own each, are remembered.
_PROGRAMS_KEPT = 1024


#: Limits of the mask's two bands: left and right from the last key, left and right from the first key.
Limits = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Program:
    """The text, and the names under which kernels take the tensors, in the order in which operators carry them."""

    text: str
    names: tuple[str, ...]


_programs: dict[Any, tuple[Program, tuple[int, ...]]] = {}
_specs: dict[str, AttentionSpec] = {}


def limits_of(mask: Mask) -> Limits:
    """A mask of bands alone as four numbers that an operator schema can carry."""
    bottom_right, top_left = mask.bottom_right, mask.top_left
    return bottom_right.left, bottom_right.right, top_left.left, top_left.right


def mask_of(mask: Any) -> Mask:
    """A mask as it is; a function of ``(b, h, q, k)`` as a mask."""
    if mask is None:
        return full()
    if isinstance(mask, Mask):
        return mask
    if is_tensor(mask):
        raise ArgumentError(f"mask is a {_kind(mask)}; make it a torch tensor of bools beside q, once")
    if not callable(mask) or isinstance(mask, (type, Score)):
        raise ArgumentError(
            f"mask={show(mask)} is not a mask; use flashgen.causal(), flashgen.window(left, right), another mask, "
            "a function (b, h, q, k) -> condition, or None"
        )
    return Mask(rest=traced(mask, "mask"))


def score_of(score: Any) -> Score | None:
    """A score as it is; a function of ``(s, b, h, q, k)`` as a score."""
    if score is None or isinstance(score, Score):
        return score
    if is_tensor(score):
        raise ArgumentError(f"score is a {_kind(score)}; pass flashgen.bias(tensor) to add it to the scores")
    if not callable(score) or isinstance(score, (type, Mask)):
        raise ArgumentError(
            f"score={show(score)} is not a score; use flashgen.softcap(cap), flashgen.alibi(slopes), another score, "
            "a function (s, b, h, q, k) -> number, or None"
        )
    return Score(traced(score, "score"))


def program_of(mask: Mask, score: Score | None) -> tuple[Program, tuple[Any, ...]]:
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


def spec_of(text: str) -> AttentionSpec:
    """A spec with a program's mask and score, its tensors declared."""
    spec = _specs.get(text)
    if spec is None:
        if len(_specs) >= _PROGRAMS_KEPT:
            _specs.clear()
        spec = _specs[text] = AttentionSpec(1, **mask_and_score(json.loads(text)))
    return spec


def check_tensors(names: tuple[str, ...], tensors: tuple[Any, ...], device: torch.device) -> None:
    """Captured tensors are torch's, on the device of q: a copy made here would miss later changes."""
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"the captured tensor {name} is a {_kind(tensor)}; make it a torch tensor beside q, once: "
                f"torch.as_tensor({name}, device={str(device)!r})"
            )
        if tensor.device != device:
            raise ArgumentError(
                f"the captured tensor {name} is on {tensor.device}, and q is on {device}; move it there, once: "
                f"{name}.to({str(device)!r})"
            )


def _kind(tensor: Any) -> str:
    return f"{type(tensor).__module__.split('.')[0]}.{type(tensor).__name__}"
