"""A trial: a case, and how the emulator runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeAlias, get_args

from flashgen.verify.cases.case import Case

Order: TypeAlias = Literal["sequential", "reverse", "random", "priority"]
ORDERS: tuple[Order, ...] = get_args(Order)
Side: TypeAlias = Literal["end", "begin"]
SIDES: tuple[Side, ...] = get_args(Side)
#: What ``modes`` takes in turn; the first two most often, since each seed is another order.
_FURTHER: tuple[Order, ...] = ("random", "priority", "random", "priority", "reverse")


@dataclass(frozen=True, slots=True)
class Mode:
    """How the emulator runs: the thread order, race mode, and the side of arrays with guard pages."""

    schedule: Order = "sequential"
    seed: int = 0
    race: bool = False
    guard: Side = "end"

    @property
    def options(self) -> dict[str, Any]:
        """The emulator's options."""
        return {"schedule": self.schedule, "seed": self.seed, "race": self.race, "guard": self.guard}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one case."""

    case: Case
    mode: Mode = field(default_factory=Mode)


def modes(seed: int, index: int, *, schedules: int = 0, race: bool = False) -> tuple[Mode, ...]:
    """How case number ``index`` of a seed is run: in sequence, and in so many further orders."""
    random = Random(f"{seed} {index} modes")
    guard = random.choice(SIDES)
    found = [Mode(race=race, guard=guard)]
    for number in range(schedules):
        order = _FURTHER[number % len(_FURTHER)]
        found.append(Mode(order, random.randrange(2**16) if order in ("random", "priority") else 0, race, guard))
    return tuple(found)
