"""The search: build and verify schedules, then time them in turn and drop the slower half, again and again."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashgen.plan.model.plans import Pass
from flashgen.plan.model.tuning import Trial
from flashgen.spec import Schedule

#: The least gain over the default. Runs of one schedule differ by about as much.
WORTH = 0.01
#: The share of the time in which schedules are built and verified; the rest is for timing.
_BUILDING = 0.6
_MOST_CALLS = 64


class RefusedError(Exception):
    """A schedule gives no kernels, or none that fit into memory; the text says why."""


class Workbench(Protocol):
    """A machine that builds, verifies and times the kernels of one pass of a spec."""

    def build(self, schedule: Schedule) -> Any:
        """The kernels of a schedule; a RefusedError where they cannot be built."""

    def fault(self, built: Any, *, thorough: bool) -> str | None:
        """What is wrong with their results on small problems; None if all are right."""

    def times(self, built: Any, length: int, calls: int) -> list[float]:
        """Milliseconds of each of some calls; a RefusedError where they need more memory than there is."""

    def clock(self) -> float:
        """Seconds."""


#: ``progress(what is done now)``.
Progress = Callable[[str], None]


@dataclass(slots=True)
class _Entry:
    """A schedule on its way through the search."""

    schedule: Schedule
    built: Any = None
    ms: tuple[float, ...] = ()
    note: str = ""
    is_out: bool = False

    def drop(self, note: str) -> None:
        self.note, self.is_out = note, True

    @property
    def score(self) -> float:
        return math.fsum(math.log(max(each, 1e-9)) for each in self.ms)


@dataclass(slots=True)
class Search:
    """The search for one pass of a spec."""

    bench: Workbench
    pass_: Pass
    lengths: Sequence[int]
    #: Seconds.
    budget: float
    say: Progress
    entries: list[_Entry] = field(default_factory=list)

    def run(self, schedules: Sequence[Schedule]) -> tuple[Schedule, tuple[Trial, ...]]:
        """The fastest schedule, and all trials in the order of ``schedules``; the first one is the default."""
        self.entries = [_Entry(schedule) for schedule in schedules]
        start = self.bench.clock()
        self._build_all(start + _BUILDING * self.budget)
        self._halve(start + self.budget)
        winner = self._winner()
        return winner, tuple(Trial(self.pass_, e.schedule, e.ms, e.note) for e in self.entries)

    @property
    def _left(self) -> list[_Entry]:
        return [entry for entry in self.entries if not entry.is_out]

    def _build_all(self, deadline: float) -> None:
        for number, entry in enumerate(self.entries):
            # The default is built in any case: it is what others are compared with.
            if number > 0 and self.bench.clock() >= deadline:
                entry.drop("not tried: the time was over")
                continue
            self.say(f"{self.pass_}: building and verifying {number + 1} of {len(self.entries)}")
            try:
                entry.built = self.bench.build(entry.schedule)
            except RefusedError as error:
                entry.drop(f"refused: {error}")
                continue
            if fault := self.bench.fault(entry.built, thorough=False):
                entry.drop(f"wrong: {fault}")

    def _halve(self, deadline: float) -> None:
        """Times all that are left in rounds of more and more calls; after each, the slower half drops out."""
        calls = 1
        for number in range(64):
            if len(self._left) < 2 or (number > 0 and self.bench.clock() >= deadline):
                return
            self._time(calls, number)
            calls = min(2 * calls, _MOST_CALLS)
            ranked = sorted(self._left, key=lambda entry: entry.score)
            for entry in ranked[-(-len(ranked) // 2) :]:
                # The default stays, so that the last round tells by how much the winner is faster.
                if entry is not self.entries[0]:
                    entry.drop(f"slower after {number + 1} rounds")
            if len(self._left) <= 2 and calls == _MOST_CALLS:
                return

    def _time(self, calls: int, number: int) -> None:
        left = self._left
        self.say(f"{self.pass_}: timing {len(left)} schedules, {calls} calls each")
        found: dict[int, list[float]] = {id(entry): [] for entry in left}
        for length in self.lengths:
            order = list(left)
            random.Random(number).shuffle(order)
            for entry in order:
                if entry.is_out:
                    continue
                try:
                    found[id(entry)].append(statistics.median(self.bench.times(entry.built, length, calls)))
                except RefusedError as error:
                    entry.drop(f"refused: {error}")
        for entry in self._left:
            entry.ms = tuple(found[id(entry)])

    def _winner(self) -> Schedule:
        """The fastest that also passes all cases of a verification; the default where none is worth its while."""
        default = self.entries[0]
        least = math.log1p(-WORTH) * len(self.lengths)
        for entry in sorted(self._left, key=lambda entry: entry.score):
            if entry is default or (not default.is_out and entry.score > default.score + least):
                break
            self.say(f"{self.pass_}: verifying the fastest")
            fault = self.bench.fault(entry.built, thorough=True)
            if fault is None:
                return entry.schedule
            entry.drop(f"wrong: {fault}")
        return default.schedule
