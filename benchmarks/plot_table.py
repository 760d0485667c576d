"""Tables of pages, as the plots read them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

Row = dict[str, str]


@dataclass(frozen=True)
class Table:
    """The table that follows a plot in a page, by column names."""

    columns: list[str]
    rows: list[Row]

    @property
    def checksum(self) -> str:
        """The same for equal tables."""
        return hashlib.sha256(repr((self.columns, self.rows)).encode()).hexdigest()[:16]

    def values(self, column: str) -> list[str]:
        """The different values of a column, in order."""
        return list(dict.fromkeys(row[column] for row in self.rows))


def number(text: str) -> float:
    """A cell's figure, or the first of several; "-" is a point that is not drawn."""
    return float("nan") if text == "-" else float(text.split()[0])
