"""An explanation for people: what there is to tell in lines of one width, and the map of tiles."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from flashgen.explanation.kinds import EMPTY, FULL, PARTIAL
from flashgen.plan.model.choices import choice_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flashgen.explanation.model import Explanation

#: By kind of tile.
SYMBOLS = ".+#"
_LABEL = 8
_ROWS = 32


def drawn(explanation: Explanation) -> Iterator[str]:
    """The lines of an explanation: what is told of it, and the map."""
    yield _labelled("mask", explanation.mask)
    if explanation.score:
        yield _labelled("score", explanation.score)
    rows, columns = explanation.kinds.shape
    yield _labelled("tiles", f"{rows} x {columns} of {explanation.tile_q} queries by {explanation.tile_kv} keys")
    where = f"batch {explanation.batch}, head {explanation.head}"
    yield _labelled("", f"{where}, {explanation.len_q} queries, {explanation.len_kv} keys")
    kinds = ((explanation.empty, "skipped"), (explanation.partial, "partial"), (explanation.full, "full"))
    yield _labelled("", ", ".join(f"{n} {name} ({_percent(n, explanation.tiles)})" for n, name in kinds))
    share = _percent(explanation.flops, explanation.dense_flops)
    yield _labelled(
        "work", f"{_flop(explanation.flops)} of {_flop(explanation.dense_flops)} dense ({share}), forward, one head"
    )
    yield _labelled("keys", f"from {explanation.key_begin}")
    yield _labelled("", f"to before {explanation.key_end}")
    yield _labelled("queries", f"from {explanation.query_begin}")
    yield _labelled("", f"to before {explanation.query_end}")
    how = "by these bounds alone" if explanation.closed else "by these bounds, and a test of each tile between them"
    yield _labelled("found", how)
    if explanation.algorithm:
        yield _labelled("kernel", explanation.algorithm)
    if explanation.why_not_fa3 is not None:
        yield _labelled("", f"not FlashAttention-3: {explanation.why_not_fa3}")
    if explanation.backward_algorithm:
        yield _labelled("", f"backward: {explanation.backward_algorithm}")
    if explanation.backward_why_not_fa3 is not None:
        yield _labelled("", f"not FlashAttention-3: {explanation.backward_why_not_fa3}")
    forward = () if explanation.forward_kernel is None else (explanation.forward_kernel,)
    for kernel in (*forward, *explanation.backward_kernels):
        yield from _wrapped(kernel.role, choice_lines(kernel), explanation.width)
    if explanation.tiles:
        yield ""
        yield from _map(explanation)


def _map(explanation: Explanation) -> Iterator[str]:
    """The tile map, one character a tile, or for several tiles where there are too many."""
    rows, columns = explanation.kinds.shape
    down = -(-rows // _ROWS)
    across = -(-columns // max(1, explanation.width - _LABEL))
    scale = f"one character is {down} x {across} tiles, " if (down, across) != (1, 1) else ""
    legend = f"{SYMBOLS[EMPTY]} skipped  {SYMBOLS[PARTIAL]} partial  {SYMBOLS[FULL]} full"
    yield f"queries down, keys across; {scale}{legend}"
    yield " " * _LABEL + _ruler(-(-columns // across), across * explanation.tile_kv)
    for row in range(0, rows, down):
        cells = (explanation.kinds[row : row + down, column : column + across] for column in range(0, columns, across))
        symbols = "".join(SYMBOLS[_merged(cell)] for cell in cells)
        yield f"{row * explanation.tile_q:>{_LABEL - 1}} {symbols}"


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


def _labelled(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _wrapped(label: str, texts: Iterable[str], width: int) -> Iterator[str]:
    for text in texts:
        for line in textwrap.wrap(text, width - _LABEL, subsequent_indent="  ") or [""]:
            yield _labelled(label, line)
            label = ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


def _flop(count: int) -> str:
    for unit, name in ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} FLOP"
