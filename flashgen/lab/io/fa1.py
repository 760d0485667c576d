"""FlashAttention-1's forward kernel: the outer loop is over keys, so O, l and m come and go with each inner step."""

from __future__ import annotations

from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes, tile_of
from flashgen.lab.io.traffic import KernelIO
from flashgen.plan.model.plans import AttentionPlan, KernelPlan


def forward(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """One block per head. A step is a tile of queries that attends to the tile of keys in shared memory."""
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
