"""Registers and shared memory of candidate tiles, and the choice of the first candidate that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.model.parts import SmemMap

#: What a thread keeps in registers: names and counts.
Held = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """A candidate: the length of a step, and the slots for each tensor."""

    #: Rows of a step, and whether they are queries or keys.
    rows: int
    of: str
    #: Slots, by the name of what they hold.
    slots: tuple[tuple[str, int], ...]
    #: Registers per thread of producers and consumers.
    registers: tuple[int, int]
    reason: str
    #: Members of the config that are true, and sentences that justify them.
    switches: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> str:
        """The length of a step, as text."""
        return f"{self.rows} {self.of} a step"

    @property
    def described(self) -> str:
        """The step and the slots, as text."""
        return ", ".join((self.step, *(f"{count} of {name}" for name, count in self.slots)))

    def count(self, name: str) -> int:
        """The number of slots of that name."""
        return dict(self.slots)[name]


@dataclass(frozen=True, slots=True)
class Budget:
    """Registers and shared memory of a candidate."""

    #: Of a consumer thread.
    registers: Held
    smem: SmemMap

    @property
    def all_registers(self) -> int:
        """Registers per thread."""
        return registers_of(self.registers)


@dataclass(frozen=True, slots=True)
class Choice:
    """The tiles of a kernel, and why."""

    tiles: Tiles
    budget: Budget
    max_smem: int
    #: The candidates before it, and why they do not fit.
    passed_over: tuple[str, ...]
    #: A sentence on where operands are.
    operands: str

    def lines(self) -> tuple[str, ...]:
        """Lines for ``flashgen explain``."""
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
        """The same as plain values."""
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
    """The sum of the counts."""
    return sum(count for _, count in held)


def first_that_fits(
    candidates: Iterable[Tiles],
    budget_of: Callable[[Tiles], Budget],
    arch: Arch,
    operands: str,
    before: tuple[str, ...] = (),
) -> Choice | tuple[str, ...]:
    """The first candidate that fits; if none does, what each lacks. ``before`` precedes these faults."""
    passed_over = list(before)
    for tiles in candidates:
        budget = budget_of(tiles)
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
    """The choice; a PlanError if no candidate fits."""
    if isinstance(found, Choice):
        return found
    raise PlanError(f"The {kernel} kernel cannot be planned: not {'; not '.join(found)}.")
