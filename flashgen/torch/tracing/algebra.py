"""Masks and scores that a compiled function combines: ``&``, ``|``, ``~`` and ``>>``.

torch.compile cannot run the operators of ``Mask`` and ``Score``, which build trees. It follows the functions below
instead. They keep the operands, and ``flashgen.torch.tracing.compiled`` combines these when the program is written.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from flashgen.spec import Mask, Score, causal, chunked, dilated, full, global_tokens, softcap, window
from flashgen.spec.masks.band import Band
from flashgen.torch.program import limits_of
from flashgen.torch.tracing.dynamo import follow_operators, once_compiler_is_loaded
from flashgen.torch.tracing.recorder import refuse


class CombinedMask:
    """An operator and the masks that it combines."""

    def __init__(self, operator: str, *parts: Any) -> None:
        self.operator, self.parts = operator, parts

    def __and__(self, other: Any) -> Any:
        return _and(self, other)

    def __or__(self, other: Any) -> Any:
        return _or(self, other)

    def __invert__(self) -> Any:
        return _invert(self)


class CombinedScore:
    """Scores, each of which is applied to the result of the one before."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __rshift__(self, other: Any) -> Any:
        return _then(self, other)


def resolved(value: Any) -> Any:
    """A mask or a score that a compiled function combined and left to Python, at a graph break, as a real one."""
    if isinstance(value, CombinedMask):
        first, *others = [resolved(part) for part in value.parts]
        if value.operator == "~":
            return ~first
        return first & others[0] if value.operator == "&" else first | others[0]
    if isinstance(value, CombinedScore):
        first, second = [resolved(part) for part in value.parts]
        return first >> second
    return value


def _and(mask: Any, other: Any) -> Any:
    _check_is_mask(other, "&")
    if isinstance(mask, Mask) and isinstance(other, Mask) and mask.rest is None and other.rest is None:
        return _both_bands(*limits_of(mask), *limits_of(other))
    return CombinedMask("&", mask, other)


def _or(mask: Any, other: Any) -> Any:
    _check_is_mask(other, "|")
    return CombinedMask("|", mask, other)


def _invert(mask: Any) -> Any:
    return CombinedMask("~", mask)


def _then(score: Any, other: Any) -> Any:
    if not isinstance(other, (Score, CombinedScore)):
        refuse(
            f"`>>` applies one score after another, and a {type(other).__name__} is none; "
            "make a Score.of(function) outside of the compiled function"
        )
    return CombinedScore(score, other)


def _check_is_mask(value: Any, operator: str) -> None:
    if not isinstance(value, (Mask, CombinedMask)):
        refuse(
            f"`{operator}` combines masks, and a {type(value).__name__} is none; "
            "make a Mask.of(function) outside of the compiled function, or use a named mask"
        )


def _both_bands(*limits: int | None) -> Mask:
    """The mask of bands that two of them make: one of their own kind, which needs no expression."""
    return band_mask(*limits[:4]) & band_mask(*limits[4:])


def band_mask(left: int | None, right: int | None, left_from_start: int | None, right_from_start: int | None) -> Mask:
    """A mask of bands alone by its ``Limits``."""
    return Mask(Band(left, right), Band(left_from_start, right_from_start))


def _unshared(maker: Any) -> Any:
    """The maker of a mask or a score of numbers; the compiler cannot guard parts that other objects share."""

    def make(*arguments: Any, **options: Any) -> Mask | Score:
        made = maker(*arguments, **options)
        if isinstance(made, Score):
            return Score(made.traced, made.sink)
        return replace(band_mask(*limits_of(made)), rest=made.rest)

    make._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return make


_maker: Any
for _maker in (causal, full, window, chunked, dilated, global_tokens, softcap):
    # A compiled function that makes one of these does so while it is traced.
    _maker._torchdynamo_inline = _unshared(_maker)
    _maker._dynamo_marked_constant = True

# What torch.compiler.assume_constant_result sets, without loading the compiler.
_both_bands._dynamo_marked_constant = True  # type: ignore[attr-defined]

_original: Any
_followed: Any
for _original, _followed in (
    (Mask.__and__, _and),
    (Mask.__or__, _or),
    (Mask.__invert__, _invert),
    (Score.__rshift__, _then),
):
    # What torch.compile follows instead of the method.
    _original._torchdynamo_inline = _followed


@lru_cache(maxsize=1)
def _follow_masks() -> bool:
    return follow_operators(Mask, CombinedMask)


once_compiler_is_loaded(_follow_masks)
