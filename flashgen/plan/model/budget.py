"""What tiles take of a block's registers and shared memory, and the first of several ways that there is room for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.model.parts import SmemMap

#: What registers of a thread are for, and how many.
Held = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """One way to cut a kernel's work: what goes by in a step, and how many of each there is room for at once."""

    #: Rows of a step, and what they are.
    rows: int
    of: str
    #: By name, as for people.
    slots: tuple[tuple[str, int], ...]
    #: Registers per thread of producers and consumers.
    registers: tuple[int, int]
    reason: str
    #: How a step is done besides, as switches of the template, and why, in sentences.
    switches: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> str:
        """How long a step is, for people."""
        return f"{self.rows} {self.of} a step"

    @property
    def described(self) -> str:
        """All of it, for people."""
        return ", ".join((self.step, *(f"{count} of {name}" for name, count in self.slots)))

    def count(self, name: str) -> int:
        """How many of something are under way."""
        return dict(self.slots)[name]


@dataclass(frozen=True, slots=True)
class Budget:
    """What tiles take of a block, and what for."""

    #: Of a thread that computes.
    registers: Held
    smem: SmemMap

    @property
    def all_registers(self) -> int:
        """Those that a thread needs."""
        return registers_of(self.registers)


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a kernel has the tiles that it has."""

    tiles: Tiles
    budget: Budget
    max_smem: int
    #: What would have come before, and why it cannot be.
    passed_over: tuple[str, ...]
    #: Which operands lie where, in a sentence.
    operands: str

    def lines(self) -> tuple[str, ...]:
        """For people, one thing each."""
        held = ", ".join(f"{name} {count}" for name, count in self.budget.registers)
        return (
            self.tiles.described,
            self.operands,
            f"registers: {self.budget.all_registers} of {self.tiles.registers[1]}: {held}",
            f"shared memory: {self.budget.smem.bytes} of {self.max_smem} bytes: {self.budget.smem.sizes}",
            f"because: {self.tiles.reason}",
            *self.tiles.notes,
            *(f"not {fault}" for fault in self.passed_over),
        )

    def as_dict(self) -> dict[str, Any]:
        """What a plan does not tell otherwise, as plain values."""
        return {
            "slots": dict(self.tiles.slots),
            "operands": self.operands,
            "registers": dict(self.budget.registers),
            "max_registers": self.tiles.registers[1],
            "switches": sorted(self.tiles.switches),
            "notes": list(self.tiles.notes),
            "passed_over": list(self.passed_over),
        }


def registers_of(held: Iterable[tuple[str, int]]) -> int:
    """How many registers several things take together."""
    return sum(count for _, count in held)


def first_that_fits(
    ways: Iterable[Tiles], weigh: Callable[[Tiles], Budget], arch: Arch, operands: str, before: tuple[str, ...] = ()
) -> Choice | tuple[str, ...]:
    """The first of several ways, best first, that a block has room for; if there is none, what each lacks.

    ``before`` is what was passed over before any of these.
    """
    passed_over = list(before)
    for tiles in ways:
        budget = weigh(tiles)
        fault = _fault(tiles, budget, arch)
        if fault is None:
            return Choice(tiles, budget, arch.max_smem_per_block, tuple(passed_over), operands)
        if fault not in passed_over:
            passed_over.append(fault)
    return tuple(passed_over)


def _fault(tiles: Tiles, budget: Budget, arch: Arch) -> str | None:
    if budget.all_registers > tiles.registers[1]:
        return f"{tiles.step}: {budget.all_registers} registers, and there are {tiles.registers[1]}"
    if budget.smem.bytes > arch.max_smem_per_block:
        return f"{tiles.described}: {budget.smem.bytes} bytes of shared memory"
    return None


def chosen(found: Choice | tuple[str, ...], kernel: str) -> Choice:
    """What was found; a PlanError where there is no room for any way."""
    if isinstance(found, Choice):
        return found
    raise PlanError(f"The {kernel} kernel cannot be planned: not {'; not '.join(found)}.")
