"""How much of a parametrized test a run takes: DRAWN_CASES=sample, which is the default, or ci and nightly."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

T = TypeVar("T")

LEVEL = os.environ.get("DRAWN_CASES", "sample")
IS_SAMPLE = LEVEL == "sample"


def some(values: Iterable[T], *kept: T) -> list[T]:
    """All values; in a developer's run the ones that stand for the others."""
    every = list(values)
    assert all(value in every for value in kept)
    return list(kept) if IS_SAMPLE else every


def diagonal(*axes: Sequence[Any], step: int = 0) -> list[tuple[Any, ...]]:
    """All combinations; in a developer's run so few that each value of the longest axis appears once.

    ``step`` takes one combination in so many instead.
    """
    step = step or min(len(axis) for axis in axes)
    places = product(*(range(len(axis)) for axis in axes))
    return [
        tuple(axis[at] for axis, at in zip(axes, place, strict=True))
        for place in places
        if not IS_SAMPLE or sum(place) % step == 0
    ]
