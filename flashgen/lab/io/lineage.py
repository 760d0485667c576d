"""FlashAttention-1's forward kernel, that of one thread per element, and grids of one and of two dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.lab.io.flash import streamed
from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes, tile_of
from flashgen.lab.io.traffic import KernelIO
from flashgen.lab.io.visits import Side
from flashgen.plan.model.plans import AttentionPlan, KernelPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Threads that share a row of a tile.
_THREADS_OF_A_ROW = 16


def naive(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """One thread for each element of O: with each allowed key it reads its query again, and one element of V."""
    spec = sizes.spec
    visits = sizes.allowed_pairs * spec.head_dim_v * sizes.item
    reads = {"Q": visits * spec.head_dim, "K": visits * spec.head_dim, "V": visits}
    return KernelIO(kernel.role, reads, {"O": sizes.o, "LSE": sizes.row_floats})


def grid1d(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """One block for each tile of queries, past which keys and values stream."""
    return streamed(sizes, kernel)


def grid2d(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """One block for each pair of tiles, in one launch or in one of three."""
    steps = {
        "forward": (_maxima, _values, _merge),
        "grid_maxima": (_maxima,),
        "grid_products": (_scores, _values),
        "grid_merge": (_merge,),
    }
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    for step in steps[kernel.role]:
        read, written = step(sizes, kernel)
        for total, part in ((reads, read), (writes, written)):
            total |= {name: total.get(name, 0) + size for name, size in part.items()}
    return KernelIO(kernel.role, reads, writes)


_Moved = tuple[dict[str, int], dict[str, int]]


def _scores(sizes: Sizes, kernel: KernelPlan) -> _Moved:
    """Each visited pair of tiles reads its queries and its keys."""
    dim = sizes.spec.head_dim * sizes.item
    return {"Q": _row_visits(sizes, kernel) * dim, "K": int(sizes.key_walk(*tile_of(kernel)).rows.sum()) * dim}, {}


def _maxima(sizes: Sizes, kernel: KernelPlan) -> _Moved:
    """S_ij, and its row maxima for the other blocks of the row."""
    return _scores(sizes, kernel)[0], {"maxima": _row_visits(sizes, kernel) * FLOAT_BYTES}


def _values(sizes: Sizes, kernel: KernelPlan) -> _Moved:
    """Each visited pair of tiles reads the maxima of its rows over all tiles, and writes its part of l and O."""
    spec = sizes.spec
    steps, rows = _steps_and_rows(sizes, kernel)
    maxima = int((steps**2 * rows).sum()) * sizes.all_heads * FLOAT_BYTES
    values = int(sizes.key_walk(*tile_of(kernel)).rows.sum()) * spec.head_dim_v * sizes.item
    floats = _row_visits(sizes, kernel) * FLOAT_BYTES
    return {"V": values, "maxima": maxima}, {"sums": floats, "O partials": floats * spec.head_dim_v}


def _merge(sizes: Sizes, kernel: KernelPlan) -> _Moved:
    """The threads of a row share its maxima and its columns of O; each of them adds up all sums."""
    floats = _row_visits(sizes, kernel) * FLOAT_BYTES
    reads = {"maxima": floats, "sums": floats * _THREADS_OF_A_ROW, "O partials": floats * sizes.spec.head_dim_v}
    return reads, {"O": sizes.o, "LSE": sizes.row_floats}


def _steps_and_rows(sizes: Sizes, kernel: KernelPlan) -> tuple[NDArray[Any], NDArray[Any]]:
    """Of each tile of queries of one head: the tiles of keys that it visits, and its rows; numbers without a limit."""
    # The mask is a band, the same for all heads.
    steps = sizes.key_walk(*tile_of(kernel)).steps // sizes.all_heads
    return steps.astype(object), Side("q", sizes.len_q, tile_of(kernel)[0]).rows.astype(object)


def _row_visits(sizes: Sizes, kernel: KernelPlan) -> int:
    """Rows of queries of all visited pairs of tiles."""
    steps, rows = _steps_and_rows(sizes, kernel)
    return int((steps * rows).sum()) * sizes.all_heads


def fa1(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """FlashAttention-1: the outer loop is over keys, so O, l and m come and go with each inner step.

    There is one block per head. A step is a tile of queries that attends to the tile of keys in shared memory.
    """
    spec, group = sizes.spec, sizes.heads // sizes.heads_kv
    walk = sizes.query_walk(*tile_of(kernel))
    rows = int(walk.rows.sum())
    fetched = rows + _fetched_in_vain(sizes, kernel)
    # O is summed in float32, in whole blocks of 16 columns.
    padded = -(-spec.head_dim_v // 16) * 16
    state = {"O in float32": rows * padded * FLOAT_BYTES, "l": rows * FLOAT_BYTES, "m": rows * FLOAT_BYTES}
    # Line 2 clears the state, and line 16 reads it for the results.
    first = {"O in float32": sizes.row_floats * padded, "l": sizes.row_floats, "m": sizes.row_floats}
    last = first | {"O in float32": sizes.row_floats * spec.head_dim_v}
    reads = {"K": sizes.k * group, "V": sizes.v * group, "Q": fetched * spec.head_dim * sizes.item}
    reads |= {name: moved + last[name] for name, moved in state.items()}
    writes = {name: moved + first[name] for name, moved in state.items()}
    return KernelIO(kernel.role, reads, writes | {"O": sizes.o, "LSE": sizes.row_floats})


def _fetched_in_vain(sizes: Sizes, kernel: KernelPlan) -> int:
    """Rows of Q that come with a tile of keys that no query attends to: the first step's tile comes before it is known.

    This happens with windows alone.
    """
    import numpy as np

    tile_q, tile_kv = tile_of(kernel)
    _, upper = sizes.spec.mask.diagonals(sizes.len_q, sizes.len_kv)
    first_key = np.arange(0, sizes.len_kv, tile_kv, dtype=np.int64)
    first = np.maximum(first_key - upper, 0) // tile_q * tile_q
    rows = np.clip(sizes.len_q - first, 0, tile_q)
    return int((rows * sizes.query_walk(tile_q, tile_kv).idle).sum())
