"""What an argument is, found out without trusting it: its ``==`` may give an array, and its size may be any."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from flashgen.common.show import show
from flashgen.errors import ArgumentError


def is_one_of(value: object, words: Iterable[str]) -> bool:
    """Whether a value is one of some words."""
    return isinstance(value, str) and any(str.__eq__(value, word) is True for word in words)


def is_whole(value: object, least: int, most: int) -> TypeGuard[int]:
    """Whether a value is a whole number, and no bool, from ``least`` to ``most``."""
    if type(value) is int:
        return least <= value <= most
    # A subclass may compare as it likes.
    return isinstance(value, int) and not isinstance(value, bool) and least <= int.__index__(value) <= most


def as_float(value: object) -> float | None:
    """A real number, which a bool is not, as a float; None for what is none, or larger than floats are."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def checked_mapping(captured: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The captured tensors that a call brings, by name; none where None is given."""
    if captured is None:
        return {}
    if not isinstance(captured, Mapping):
        raise ArgumentError(f"captured={show(captured)} is not a dictionary; pass captured={{'name': tensor}}")
    return captured
