"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines in which the cells of each column start at the same place."""
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    return ("  ".join(map(str.ljust, row, widths)).rstrip() for row in listed)
