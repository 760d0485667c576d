"""How an explanation is drawn: labeled lines of one width, and the map of tiles."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from flashgen.explanation.kinds import EMPTY, FULL, PARTIAL

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: By kind of tile.
SYMBOLS = ".+#"
_LABEL = 8
_ROWS = 32


def text_map(kinds: NDArray[np.uint8], tile_q: int, tile_kv: int, width: int) -> Iterator[str]:
    """The tile map, one character a tile, or for several tiles where there are too many."""
    rows, columns = kinds.shape
    down = -(-rows // _ROWS)
    across = -(-columns // max(1, width - _LABEL))
    scale = f"one character is {down} x {across} tiles, " if (down, across) != (1, 1) else ""
    legend = f"{SYMBOLS[EMPTY]} skipped  {SYMBOLS[PARTIAL]} partial  {SYMBOLS[FULL]} full"
    yield f"queries down, keys across; {scale}{legend}"
    yield " " * _LABEL + _ruler(-(-columns // across), across * tile_kv)
    for row in range(0, rows, down):
        cells = (kinds[row : row + down, column : column + across] for column in range(0, columns, across))
        symbols = "".join(SYMBOLS[_merged(cell)] for cell in cells)
        yield f"{row * tile_q:>{_LABEL - 1}} {symbols}"


def _merged(cell: NDArray[np.uint8]) -> int:
    """What several tiles are together: partial unless all are alike."""
    first = int(cell.flat[0])
    return first if (cell == first).all() else PARTIAL


def _ruler(characters: int, keys: int) -> str:
    """Key numbers above the columns where they fit."""
    line = "0"
    for column in range(16, characters, 16):
        number = str(column * keys)
        if len(line) < column and column + len(number) <= characters:
            line = line.ljust(column) + number
    return line


def labeled(label: str, text: str) -> str:
    """A line of text behind its label."""
    return f"{label:<{_LABEL}}{text}"


def wrapped(label: str, texts: Iterable[str], width: int) -> Iterator[str]:
    """Texts behind one label, in lines of at most this width."""
    for text in texts:
        for line in textwrap.wrap(text, width - _LABEL, subsequent_indent="  ") or [""]:
            yield labeled(label, line)
            label = ""


def percent(part: int, whole: int) -> str:
    """A share, such as ``12.5%``."""
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


def flop(count: int) -> str:
    """A number of operations in the largest unit that it fills, such as ``1.07 GFLOP``."""
    for unit, name in ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} FLOP"
