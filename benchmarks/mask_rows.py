"""What the benchmark of masks and scores measured: kept as JSON while it runs, merged, and shown as tables.

It needs neither torch nor a GPU, so that figures of several runs are put together anywhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

DIRECTIONS = ("forward", "backward")
LIBRARIES = ("flex", "flashgen")
#: Every mask and score, in the order of the table.
NAMES = ("causal", "window 1024", "16 documents", "prefix-LM", "ALiBi", "softcap", "bias")
#: The table's own limits: at least so many times as fast in the geometric mean, and nowhere slower.
WANTED_MEAN = 1.5


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    name: str
    head_dim: int
    length: int
    batch: int
    heads: int

    def __str__(self) -> str:
        return f"{self.name}, D={self.head_dim}, S={self.length}"


@dataclass
class Row:
    """A cell's milliseconds by pass and library, and what was not measured."""

    cell: Cell
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Why a pass has no times, or what is wrong with them, by pass.
    notes: dict[str, str] = field(default_factory=dict)
    #: Graphs that FlexAttention was compiled to while it was timed: found in a cache, and not.
    found: int = 0
    missed: int = 0

    def ratio(self, direction: str) -> float:
        """How many times as fast as FlexAttention."""
        return self.times[direction]["flex"] / self.times[direction]["flashgen"]

    def is_sound(self) -> bool:
        """Whether flashgen has all figures, and FlexAttention nothing against them."""
        return all(
            "flashgen" in self.times.get(d, {}) and not (self.has_both(d) and d in self.notes) for d in DIRECTIONS
        )

    def has_both(self, direction: str) -> bool:
        """Whether there is such a ratio."""
        return len(self.times.get(direction, {})) == len(LIBRARIES)


@dataclass
class First:
    """Seconds from a Python function to its first result, nothing being compiled before."""

    name: str
    head_dim: int
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Results:
    """All that was measured on one machine, in one run or several."""

    machine: str
    rows: list[Row] = field(default_factory=list)
    first: list[First] = field(default_factory=list)

    def put(self, row: Row) -> None:
        """Adds a row, in the place of an earlier one of the same cell."""
        self.rows = [known for known in self.rows if known.cell != row.cell] + [row]

    def put_first(self, first: First) -> None:
        """The same for the time of a first result."""
        same = (first.name, first.head_dim)
        self.first = [known for known in self.first if (known.name, known.head_dim) != same] + [first]

    def save(self, path: Path) -> None:
        """Writes everything; whoever is interrupted keeps what was there before."""
        partial = path.with_suffix(path.suffix + ".part")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(partial, path)


def load(path: Path) -> Results:
    """What ``Results.save`` wrote."""
    data = json.loads(path.read_text())
    rows = [Row(**{**row, "cell": Cell(**row["cell"])}) for row in data["rows"]]
    return Results(data["machine"], rows, [First(**first) for first in data["first"]])


def merged(parts: Iterable[Results]) -> Results:
    """One table of several; what comes later replaces what came before."""
    whole: Results | None = None
    for part in parts:
        whole = whole or Results(part.machine)
        if part.machine != whole.machine:
            raise SystemExit(f"one run is of {whole.machine}, another of {part.machine}: make two tables")
        for row in part.rows:
            whole.put(row)
        for first in part.first:
            whole.put_first(first)
    if whole is None:
        raise SystemExit("there is nothing to merge")
    return whole


def line(row: Row) -> str:
    """One row of the table."""
    figures: list[str] = []
    for direction in DIRECTIONS:
        times = row.times.get(direction, {})
        figures += [f"{times[name]:.3f}" if name in times else "-" for name in LIBRARIES]
        figures.append(f"{row.ratio(direction):.2f}" if row.has_both(direction) else "-")
    return f"| {row.cell.name} | {row.cell.head_dim} | {row.cell.length} | {' | '.join(figures)} |"


def table(results: Results) -> str:
    """Everything as Markdown: rows, geometric means, what could not be measured, first results."""
    rows = sorted(results.rows, key=lambda r: (r.cell.head_dim, r.cell.length, NAMES.index(r.cell.name)))
    lines = [
        f"{results.machine}, milliseconds:",
        "",
        "| mask or score | D | S | flex fwd | flashgen fwd | ratio | flex bwd | flashgen bwd | ratio |",
        "|" + " --- |" * 9,
        *map(line, rows),
        *_summary(rows),
    ]
    notes = [f"- {row.cell}, {direction}: {note}" for row in rows for direction, note in row.notes.items()]
    if notes:
        lines += ["", *notes]
    if results.first:
        lines += ["", *_first_table(results.first)]
    return "\n".join(lines)


def _summary(rows: list[Row]) -> Iterator[str]:
    """The mean and the worst of each pass."""
    for direction in DIRECTIONS:
        measured = [row for row in rows if row.has_both(direction)]
        if not measured:
            continue
        ratio: Callable[[Row], float] = lambda row, direction=direction: row.ratio(direction)  # noqa: E731
        mean = math.exp(sum(math.log(ratio(row)) for row in measured) / len(measured))
        worst = min(measured, key=ratio)
        slower = sum(ratio(row) < 1 for row in measured)
        yield (
            f"\nGeometric mean, {direction}: {mean:.3f} (wanted: {WANTED_MEAN}); {slower} of {len(measured)} cells are "
            f"slower; lowest: {ratio(worst):.2f} ({worst.cell})"
        )


def _first_table(first: list[First]) -> Iterator[str]:
    """Seconds to the first result."""
    yield "Seconds from a Python function to its first result, forward, nothing compiled before:"
    yield ""
    yield "| mask or score | D | flex | flashgen |"
    yield "|" + " --- |" * 4
    for one in sorted(first, key=lambda f: (f.head_dim, NAMES.index(f.name))):
        seconds = [f"{one.seconds[name]:.2f}" if name in one.seconds else "-" for name in LIBRARIES]
        yield f"| {one.name} | {one.head_dim} | {' | '.join(seconds)} |"
