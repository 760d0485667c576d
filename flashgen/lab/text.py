"""How quantities are written, and tables drawn."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from flashgen.common.show import show
from flashgen.errors import ArgumentError

_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))
_FACTORS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "KIB": 2**10, "MIB": 2**20}
_SIZE = re.compile(r"\s*(\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def bytes_text(count: int) -> str:
    """A number of bytes with three digits or more, such as ``33.6 MB``; units are powers of 1000."""
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"


def parse_bytes(text: str) -> int:
    """A size such as ``192KiB``, ``100KB`` or ``65536``."""
    match = _SIZE.fullmatch(text)
    factor = None if match is None else _FACTORS.get(match[2].upper())
    if match is None or factor is None:
        raise ArgumentError(f"{show(text)} is not a size; write a number of bytes such as 192KiB, 100KB or 65536")
    return int(match[1]) * factor


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows in columns: the first column to the left, the others to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in rows)


def html_table(rows: Iterable[Sequence[str]], caption: str) -> str:
    """Rows as an HTML table, the first one as its head."""
    head, *body = ([html.escape(cell) for cell in row] for row in rows)
    lines = ["<table>", f"<caption>{html.escape(caption)}</caption>"]
    lines.append("<thead><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr></thead>")
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
    return "\n".join([*lines, "</table>"])
