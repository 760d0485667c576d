"""What becomes of each tile of a head's score matrix, by the rule that kernels follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashgen.errors import ArgumentError
from flashgen.spec import Mask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EMPTY, PARTIAL, FULL = 0, 1, 2
#: A map of more tiles than this would fill the memory, and say no more than a coarser one.
MOST_TILES = 2**26
#: How many tiles are evaluated at a time.
_CHUNK = 2**20


def kinds_of_tiles(
    mask: Mask, len_q: int, len_kv: int, tile_q: int, tile_kv: int, env: Mapping[str, Any]
) -> NDArray[np.uint8]:
    """What becomes of each tile, worked out for many tiles at a time from their bounds."""
    import numpy as np

    rows, columns = -(-len_q // tile_q), -(-len_kv // tile_kv)
    if rows * columns > MOST_TILES:
        raise ArgumentError(
            f"{len_q} queries by {len_kv} keys are {rows} x {columns} tiles; "
            f"draw at most {MOST_TILES}: give a larger tile=({4 * tile_q}, {4 * tile_kv}), or shorter lengths"
        )
    kinds = np.zeros((rows, columns), np.uint8)
    if not kinds.size:
        return kinds
    k_lo = np.arange(columns)[None, :] * tile_kv
    bounds = dict(env) | {"k_lo": k_lo, "k_hi": np.minimum(k_lo + tile_kv, len_kv) - 1}
    step = max(1, _CHUNK // columns)
    for first in range(0, rows, step):
        q_lo = np.arange(first, min(first + step, rows))[:, None] * tile_q
        part = bounds | {"q_lo": q_lo, "q_hi": np.minimum(q_lo + tile_q, len_q) - 1}
        kinds[first : first + step] = _kinds_of(mask, part)
    return kinds


def _kinds_of(mask: Mask, env: Mapping[str, Any]) -> NDArray[np.uint8]:
    import numpy as np

    from flashgen.expr import evaluate_all

    rule = mask.rule
    begin, end, may, full = evaluate_all([rule.key_begin, rule.key_end, rule.may, rule.full], env)
    visited = (env["k_hi"] >= begin) & (env["k_lo"] < end)
    if not rule.keys_exact:
        visited = visited & may
    return np.where(visited, np.where(full, FULL, PARTIAL), EMPTY).astype(np.uint8)
