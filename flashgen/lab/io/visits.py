"""Which tiles kernels visit: from the mask's tile rule, summed over heads and sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flashgen.errors import ArgumentError
from flashgen.spec import Mask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Visited = Callable[[dict[str, Any]], NDArray[np.bool_]]

#: More tiles than this would fill the memory.
MOST_TILES = 2**26


def key_visits(
    mask: Mask, batch: int, heads: int, len_q: int, len_kv: int, tile_q: int, tile_kv: int
) -> NDArray[np.int64]:
    """Heads that visit tile (i, j), where each tile of queries walks over keys."""
    from flashgen.expr import evaluate_all

    rule = mask.rule

    def visited(env: dict[str, Any]) -> NDArray[np.bool_]:
        begin, end, may = evaluate_all([rule.key_begin, rule.key_end, rule.may], env)
        found: NDArray[np.bool_] = (env["k_hi"] >= begin) & (env["k_lo"] < end)
        return found if rule.keys_exact else found & may

    return _summed(mask, batch, heads, len_q, len_kv, tile_q, tile_kv, visited)


def query_visits(
    mask: Mask, batch: int, heads: int, len_q: int, len_kv: int, tile_q: int, tile_kv: int
) -> NDArray[np.int64]:
    """Heads that visit tile (i, j), where each tile of keys walks over queries."""
    from flashgen.expr import evaluate_all

    rule = mask.rule

    def visited(env: dict[str, Any]) -> NDArray[np.bool_]:
        begin, end, may = evaluate_all([rule.query_begin, rule.query_end, rule.may], env)
        found: NDArray[np.bool_] = (env["q_hi"] >= begin) & (env["q_lo"] < end)
        return found if rule.queries_exact else found & may

    return _summed(mask, batch, heads, len_q, len_kv, tile_q, tile_kv, visited)


def valid_rows(length: int, tile: int) -> NDArray[np.int64]:
    """Rows of each tile that exist."""
    import numpy as np

    first = np.arange(0, length, tile, dtype=np.int64)
    return np.minimum(first + tile, length) - first


def _summed(
    mask: Mask, batch: int, heads: int, len_q: int, len_kv: int, tile_q: int, tile_kv: int, visited: Visited
) -> NDArray[np.int64]:
    import numpy as np

    from flashgen.spec.text.declared import Declared

    rows, columns = -(-len_q // tile_q), -(-len_kv // tile_kv)
    if rows * columns > MOST_TILES:
        raise ArgumentError(
            f"{len_q} queries by {len_kv} keys are {rows} x {columns} tiles, more than the {MOST_TILES} that the IO"
            " model counts; use shorter lengths or larger tiles"
        )
    missing = next((name for name, value in mask.traced.tensors.items() if isinstance(value, Declared)), None)
    if missing is not None:
        raise ArgumentError(
            f"the mask captures the tensor {missing}, which has no value here; model the mask with a tensor, or without"
        )
    q_lo, k_lo = np.arange(rows)[:, None] * tile_q, np.arange(columns)[None, :] * tile_kv
    env: dict[str, Any] = {
        **mask.traced.scalars,
        **mask.traced.tensors,
        "q_len": len_q,
        "k_len": len_kv,
        "q_lo": q_lo,
        "q_hi": np.minimum(q_lo + tile_q, len_q) - 1,
        "k_lo": k_lo,
        "k_hi": np.minimum(k_lo + tile_kv, len_kv) - 1,
    }
    total = np.zeros((rows, columns), np.int64)
    if not total.size:
        return total
    for b, h, times in _heads(mask, batch, heads):
        total += times * np.broadcast_to(visited({**env, "b": b, "h": h}), total.shape)
    return total


def _heads(mask: Mask, batch: int, heads: int) -> Iterator[tuple[int, int, int]]:
    """A sequence, a head, and for how many heads the two stand: for all where the mask is the same for all."""
    from flashgen.expr.tree.nodes import USES

    uses = mask.traced.root.uses
    by_sequence, by_head = bool(uses & USES["b"]), bool(uses & USES["h"])
    sequences = range(batch if by_sequence else min(batch, 1))
    members = range(heads if by_head else min(heads, 1))
    times = (1 if by_sequence else batch) * (1 if by_head else heads)
    return ((b, h, times) for b in sequences for h in members)
