"""Times several calls in turn, round after round, so that the same clocks and temperatures meet all of them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Name = TypeVar("Name")
#: ``times(n)`` gives the milliseconds of each of n calls.
Times = Callable[[int], list[float]]
#: More calls in one round do not make the median more precise.
_MOST_CALLS = 200


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of the rounds' medians, and how far the rounds lie apart, relative to it."""

    ms: float
    spread: float
    rounds: int

    @classmethod
    def of(cls, rounds: Iterable[float]) -> Timing:
        """The timing of rounds, each given by one number."""
        found = list(rounds)
        middle = statistics.median(found)
        return cls(middle, (max(found) - min(found)) / middle if middle else 0.0, len(found))

    def __str__(self) -> str:
        return f"{self.ms:.4g} ms ±{50 * self.spread:.1f}%"


def calls_for(estimate: float, ms: float) -> int:
    """How many calls of an estimated length fill some milliseconds; at least one."""
    return max(1, min(_MOST_CALLS, int(ms / max(estimate, 1e-3))))


def interleaved(
    timed: Mapping[Name, Times], estimates: Mapping[Name, float], rounds: int, ms: float
) -> dict[Name, Timing]:
    """Times all in each round, in an order drawn anew; each gets about ``ms`` milliseconds a round."""
    medians: dict[Name, list[float]] = {name: [] for name in timed}
    for number in range(rounds):
        order = list(timed)
        # A call that comes after one that lets the GPU cool down gains by it.
        random.Random(number).shuffle(order)
        for name in order:
            medians[name].append(statistics.median(timed[name](calls_for(estimates[name], ms))))
    return {name: Timing.of(found) for name, found in medians.items()}
