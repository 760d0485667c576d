"""Which tiles kernels visit: from the mask's tile rule, summed over heads and sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flashgen.errors import ArgumentError
from flashgen.spec import Mask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: The most tiles of masks whose tiles are tested one by one.
MOST_TILES = 2**28
#: How many of them are tested at a time.
_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the score matrix: its length, and the rows of a tile."""

    axis: Literal["q", "k"]
    length: int
    tile: int

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return -(-self.length // self.tile)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of each tile that exist."""
        import numpy as np

        first = np.arange(0, self.length, self.tile, dtype=np.int64)
        return np.minimum(first + self.tile, self.length) - first

    def bounds(self) -> dict[str, NDArray[np.int64]]:
        """The first and the last row of each tile, as a rule names them."""
        import numpy as np

        first = np.arange(0, self.length, self.tile, dtype=np.int64)
        return {f"{self.axis}_lo": first, f"{self.axis}_hi": first + self.rows - 1}


@dataclass(frozen=True, slots=True)
class Walk:
    """For each tile that a block keeps, how it walks over the other side: summed over all heads of a call."""

    #: Tiles visited, rows of them that exist, and heads that visit none.
    steps: NDArray[np.int64]
    rows: NDArray[np.int64]
    idle: NDArray[np.int64]


def walk(mask: Mask, batch: int, heads: int, kept: Side, other: Side) -> Walk:
    """The walk over ``other`` of each tile of ``kept``."""
    import numpy as np

    env = _captured(mask) | {f"{side.axis}_len": side.length for side in (kept, other)}
    exact = mask.rule.keys_exact if kept.axis == "q" else mask.rule.queries_exact
    steps, rows, idle = (np.zeros(kept.tiles, np.int64) for _ in range(3))
    if not kept.tiles or not other.tiles:
        return Walk(steps, rows, idle + batch * heads)
    for b, h, times in _heads(mask, batch, heads):
        head = env | {"b": b, "h": h}
        found = _intervals(mask, head, kept, other) if exact else _tested(mask, head, kept, other)
        steps += times * found[0]
        rows += times * found[1]
        idle += times * (found[0] == 0)
    return Walk(steps, rows, idle)


def _intervals(mask: Mask, env: dict[str, Any], kept: Side, other: Side) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Steps and rows of each tile where an interval says which tiles are visited."""
    import numpy as np

    begin, end = _hull(mask, env | kept.bounds(), kept)
    shape = (kept.tiles,)
    first = np.broadcast_to(np.maximum(begin, 0) // other.tile, shape)
    after = np.broadcast_to(-(-np.minimum(end, other.length) // other.tile), shape)
    steps = np.maximum(after - first, 0)
    rows = np.where(steps > 0, np.minimum(after * other.tile, other.length) - first * other.tile, 0)
    return steps, rows


def _tested(mask: Mask, env: dict[str, Any], kept: Side, other: Side) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Steps and rows of each tile where every tile in the interval is tested."""
    import numpy as np

    from flashgen.expr import evaluate_all

    if kept.tiles * other.tiles > MOST_TILES:
        raise ArgumentError(
            f"{kept.length} by {other.length} pairs are {kept.tiles} x {other.tiles} tiles, more than the {MOST_TILES}"
            f" that are tested for {mask.describe()}; use shorter lengths or larger tiles"
        )
    steps, rows = np.zeros(kept.tiles, np.int64), np.zeros(kept.tiles, np.int64)
    across = {name: values[None, :] for name, values in other.bounds().items()}
    low, high = across[f"{other.axis}_lo"], across[f"{other.axis}_hi"]
    count = max(1, _CHUNK // other.tiles)
    for start in range(0, kept.tiles, count):
        part = slice(start, start + count)
        bounds = env | across | {name: values[part, None] for name, values in kept.bounds().items()}
        begin, end = _hull(mask, bounds, kept)
        (may,) = evaluate_all([mask.rule.may], bounds)
        visited = (high >= begin) & (low < end) & may
        steps[part] = visited.sum(axis=1)
        rows[part] = visited @ other.rows
    return steps, rows


def _hull(mask: Mask, env: dict[str, Any], kept: Side) -> tuple[Any, Any]:
    """The begin and end of what each kept tile may meet."""
    from flashgen.expr import evaluate_all

    rule = mask.rule
    ends = [rule.key_begin, rule.key_end] if kept.axis == "q" else [rule.query_begin, rule.query_end]
    begin, end = evaluate_all(ends, env)
    return begin, end


def _captured(mask: Mask) -> dict[str, Any]:
    from flashgen.spec.text.declared import Declared

    values = {**mask.traced.scalars, **mask.traced.tensors}
    for name, value in values.items():
        if isinstance(value, Declared):
            raise ArgumentError(
                f"the mask captures the tensor {name}, which has no value here; model the mask with a tensor, or"
                " without"
            )
    return values


def _heads(mask: Mask, batch: int, heads: int) -> Iterator[tuple[int, int, int]]:
    """A sequence, a head, and for how many heads the two stand: for all where the mask is the same for all."""
    from flashgen.expr.tree.nodes import USES

    uses = mask.traced.root.uses
    by_sequence, by_head = bool(uses & USES["b"]), bool(uses & USES["h"])
    times = (1 if by_sequence else batch) * (1 if by_head else heads)
    return ((b, h, times) for b in range(batch if by_sequence else 1) for h in range(heads if by_head else 1))
