"""Plots of timings: time, rate and memory over length, and time and rate over head dim."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flashgen.lab.bench.timings import Row, Timings
from flashgen.lab.plotting import figure, save

Value = Callable[[Row], float]


def draw(timings: Timings, directory: Path) -> tuple[Path, ...]:
    """The files written: for each pass, dtype and mask one for each head dim over lengths, and one over head dims."""
    written = []
    for group, rows in _groups(timings.rows):
        for head_dim in dict.fromkeys(row.case.head_dim for row in rows):
            of_dim = [row for row in rows if row.case.head_dim == head_dim]
            title = f"{timings.device}: {of_dim[0].case.title}"
            written.append(save(_over_lengths(of_dim, title), directory / f"{group}-d{head_dim}.svg"))
        longest = max(row.case.len for row in rows)
        of_length = [row for row in rows if row.case.len == longest]
        title = f"{timings.device}: {group.replace('-', ', ')}, N={longest}"
        written.append(save(_over_head_dims(of_length, title), directory / f"{group}-head-dims.svg"))
    return tuple(written)


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.case.pass_}-{row.case.dtype}-{row.case.mask}", []).append(row)
    yield from found.items()


def _over_lengths(rows: Sequence[Row], title: str) -> Any:
    made = figure(11, 8)
    made.suptitle(title)
    axes = made.subplots(2, 2)

    def length(row: Row) -> float:
        return row.case.len

    _lines(axes[0][0], rows, length, lambda row: row.timing.ms, "length", "ms", log=True)
    _lines(axes[0][1], rows, length, lambda row: row.timing.ms, "length", "ms")
    _lines(axes[1][0], rows, length, lambda row: row.tflops, "length", "TFLOP/s")
    measured = [row for row in rows if row.bytes]
    _lines(axes[1][1], measured, length, lambda row: row.bytes / 2**20, "length", "peak memory, MiB", log=True)
    axes[0][0].legend(fontsize="small")
    return made


def _over_head_dims(rows: Sequence[Row], title: str) -> Any:
    made = figure(11, 4)
    made.suptitle(title)
    left, right = made.subplots(1, 2)

    def head_dim(row: Row) -> float:
        return row.case.head_dim

    _lines(left, rows, head_dim, lambda row: row.timing.ms, "head dim", "ms", log=True)
    _lines(right, rows, head_dim, lambda row: row.tflops, "head dim", "TFLOP/s")
    left.legend(fontsize="small")
    return made


def _lines(axes: Any, rows: Iterable[Row], x: Value, y: Value, x_name: str, y_name: str, *, log: bool = False) -> None:
    """A line for each algorithm: ours solid, others dashed."""
    listed = sorted(rows, key=x)
    for name in dict.fromkeys(row.algorithm for row in sorted(listed, key=lambda row: (row.peer, row.algorithm))):
        own = [row for row in listed if row.algorithm == name]
        style = "--" if own[0].peer else "-"
        axes.plot([x(row) for row in own], [y(row) for row in own], style, marker="o", markersize=3, label=name)
    if log and listed:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    axes.grid(alpha=0.3)
