"""The tile map as SVG, to scale: queries down, keys across."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from flashgen.common.html import element
from flashgen.explanation.kinds import EMPTY, FULL, PARTIAL

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: By kind of tile.
NAMES = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
#: What the colors below mean, where there is no legend.
COLORS = "Blue is full, orange partial, and gray empty, which kernels skip."
#: Pages set the properties; these colors are legible on light and on dark.
STYLE = """
.fg-empty { fill: var(--empty, #8888882e) }
.fg-partial { fill: var(--partial, #d9902f) }
.fg-full { fill: var(--full, #3f78b0) }
.fg-cells path { pointer-events: none }
.fg-cells rect, .fg-cells path { stroke: var(--paper, #80808055); stroke-width: var(--gap, 0.5) }
.fg-map text { fill: currentColor; font: 11px system-ui, sans-serif; font-variant-numeric: tabular-nums }
.fg-tick { stroke: currentColor; stroke-opacity: 0.35 }
"""
_LONGEST = 520.0
#: A side is at least so long, however few rows or columns there are beside the others.
_SHORTEST = 36.0
_LEFT, _TOP, _RIGHT = 62.0, 34.0, 34.0
_TICKS = 4


@dataclass(frozen=True, slots=True)
class Bins:
    """A tile map in at most ``most`` rows and columns: a bin of several tiles is partial unless all are alike."""

    #: One character a bin: the number of its kind.
    rows: tuple[str, ...]
    #: Tiles of a bin.
    down: int
    across: int
    tile_q: int
    tile_kv: int
    len_q: int
    len_kv: int

    @classmethod
    def of(cls, kinds: NDArray[np.uint8], tile: tuple[int, int], lengths: tuple[int, int], most: int = 64) -> Bins:
        """The bins of a map that has some tile."""
        import numpy as np

        down, across = (-(-count // most) for count in kinds.shape)
        starts = np.arange(0, kinds.shape[0], down), np.arange(0, kinds.shape[1], across)
        low, high = (
            reduced.reduceat(reduced.reduceat(kinds, starts[0], axis=0), starts[1], axis=1)
            for reduced in (np.minimum, np.maximum)
        )
        merged = np.where(low == high, low, PARTIAL)
        return cls(tuple("".join(map(str, row)) for row in merged.tolist()), down, across, *tile, *lengths)

    @property
    def step(self) -> tuple[int, int]:
        """Queries and keys of a bin."""
        return self.down * self.tile_q, self.across * self.tile_kv

    def scale(self) -> str:
        """How much a cell of the map shows."""
        if (self.down, self.across) == (1, 1):
            return f"A cell is a tile of {self.tile_q:,} queries by {self.tile_kv:,} keys."
        return (
            f"A cell is {self.down:,} x {self.across:,} tiles of {self.tile_q:,} queries by {self.tile_kv:,} keys; "
            "it is partial unless all of them are alike."
        )


def tile_map(bins: Bins, *, titles: bool) -> Element:
    """The map; ``titles`` gives each run of equal cells a text that browsers show while the pointer rests on it."""
    height, width = _sides(bins.len_q, bins.len_kv)
    cells = element("g", class_="fg-cells", transform=f"translate({_LEFT} {_TOP})")
    cells.extend(_cells(bins, height / bins.len_q, width / bins.len_kv, titles))
    cells.append(_columns(bins, height, width / bins.len_kv))
    label = f"Tile map of {bins.len_q} queries, downwards, by {bins.len_kv} keys. {bins.scale()}"
    return element(
        "svg",
        element("style", STYLE),
        element("text", "keys", x=_LEFT, y=11.0),
        *_ticks(bins, height, width),
        cells,
        class_="fg-map",
        viewBox=f"0 0 {_LEFT + width + _RIGHT:.0f} {_TOP + height + 8:.0f}",
        width=f"{_LEFT + width + _RIGHT:.0f}",
        role="img",
        aria_label=label,
    )


def _sides(len_q: int, len_kv: int) -> tuple[float, float]:
    longest = max(len_q, len_kv)
    height, width = (max(_SHORTEST, _LONGEST * length / longest) for length in (len_q, len_kv))
    return height, width


def _cells(bins: Bins, down: float, across: float, titles: bool) -> Iterator[Element]:
    step_q, step_kv = bins.step
    for number, row in enumerate(bins.rows):
        q, q_end = number * step_q, min((number + 1) * step_q, bins.len_q)
        for kind, columns in groupby(range(len(row)), key=row.__getitem__):
            first, *rest = columns
            k, k_end = first * step_kv, min((first + 1 + len(rest)) * step_kv, bins.len_kv)
            name = NAMES[int(kind)]
            cell = element(
                "rect", class_=f"fg-{name}", x=k * across, y=q * down, width=(k_end - k) * across,
                height=(q_end - q) * down,
            )  # fmt: skip
            if titles:
                cell.append(element("title", f"queries {q} to {q_end - 1}, keys {k} to {k_end - 1}: {name}"))
            yield cell


def _columns(bins: Bins, height: float, across: float) -> Element:
    """The lines between columns; rows are apart by the outlines of their cells."""
    starts = range(bins.step[1], bins.len_kv, bins.step[1])
    return element("path", class_="fg-columns", d="".join(f"M{k * across:.1f} 0v{height:.0f}" for k in starts))


def _ticks(bins: Bins, height: float, width: float) -> Iterator[Element]:
    """Numbers at the begin of some rows and columns, and at the ends."""
    for position, share in _marks(bins.len_q, bins.step[0]):
        y = _TOP + share * height
        yield element("line", class_="fg-tick", x1=_LEFT - 5, x2=_LEFT - 1, y1=y, y2=y)
        yield element("text", f"{position:,}", x=_LEFT - 8, y=y + 4, text_anchor="end")
    for position, share in _marks(bins.len_kv, bins.step[1]):
        x = _LEFT + share * width
        yield element("line", class_="fg-tick", x1=x, x2=x, y1=_TOP - 5, y2=_TOP - 1)
        yield element("text", f"{position:,}", x=x, y=_TOP - 8, text_anchor="middle")
    yield element("text", "queries", x=_LEFT - 8, y=11.0, text_anchor="end")


def _marks(length: int, step: int) -> list[tuple[int, float]]:
    """Positions and how far along they are: multiples of a bin about a quarter of the length apart, and the end."""
    stride = max(1, round(length / _TICKS / step)) * step
    inside = [position for position in range(0, length, stride) if position <= length - stride / 2]
    return [(position, position / length) for position in (*inside, length)]
