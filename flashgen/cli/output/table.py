"""Plain tables: columns of text, one line per row however narrow the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

GAP = "  "


def columns(rows: Sequence[Sequence[str]], indent: int = 0) -> list[str]:
    """Lines in which the cells of each column start at the same place; a cell may hold several lines."""
    broken = [line for row in rows for line in _lines(row)]
    widths = [max(len(cell) for cell in column) for column in zip_longest(*broken, fillvalue="")]
    return [
        (" " * indent + GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))).rstrip()
        for row in broken
    ]


def _lines(row: Sequence[str]) -> list[tuple[str, ...]]:
    return list(zip_longest(*(cell.split("\n") for cell in row), fillvalue=""))
