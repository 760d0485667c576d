"""FlashAttention-2 and its like: a tile of queries stays on the chip while keys and values stream past."""

from __future__ import annotations

from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes
from flashgen.lab.io.traffic import AlgorithmIO, KernelIO

_FORWARD = "Q, O and LSE move once; K and V once per tile of queries, without the tiles that the mask skips"
_BACKWARD = "K, V, dK and dV move once; Q, dO, LSE and D once per tile of keys that is not skipped; dQ is added there"


def tiled(name: str, sizes: Sizes, tile_q: int, tile_kv: int) -> AlgorithmIO:
    """The textbook algorithm for a pair of tile sizes."""
    if sizes.pass_ == "forward":
        stored = {"LSE": sizes.row_floats}
        return AlgorithmIO(name, (forward(sizes, tile_q, tile_kv),), stored, _FORWARD, (tile_q, tile_kv))
    dq = sizes.row_floats * sizes.spec.head_dim
    kernels = (
        KernelIO("prepare", {"O": sizes.o, "dO": sizes.o}, {"D": sizes.row_floats, "dQ in float32": dq}),
        backward(sizes, tile_q, tile_kv),
        KernelIO("finish", {"dQ in float32": dq}, {"dQ": sizes.q}),
    )
    stored = {"D": sizes.row_floats, "dQ in float32": dq}
    return AlgorithmIO(name, kernels, stored, _BACKWARD, (tile_q, tile_kv))


def forward(sizes: Sizes, tile_q: int, tile_kv: int, *, at_least_one: bool = False) -> KernelIO:
    """One forward kernel; ``at_least_one``: a tile of queries that attends to nothing still reads a tile of keys."""
    found = sizes.key_walk(tile_q, tile_kv)
    keys = int(found.rows.sum())
    if at_least_one:
        keys += int(found.idle.sum()) * min(tile_kv, sizes.len_kv)
    spec = sizes.spec
    reads = {"Q": sizes.q, "K": keys * spec.head_dim * sizes.item, "V": keys * spec.head_dim_v * sizes.item}
    return KernelIO("forward", reads, {"O": sizes.o, "LSE": sizes.row_floats})


def backward(sizes: Sizes, tile_q: int, tile_kv: int) -> KernelIO:
    """The kernel that walks over queries for each tile of keys."""
    queries = int(sizes.query_walk(tile_q, tile_kv).rows.sum())
    spec = sizes.spec
    reads = {
        "K": sizes.k,
        "V": sizes.v,
        "Q": queries * spec.head_dim * sizes.item,
        "dO": queries * spec.head_dim_v * sizes.item,
        "LSE": queries * FLOAT_BYTES,
        "D": queries * FLOAT_BYTES,
    }
    added = queries * spec.head_dim * FLOAT_BYTES
    return KernelIO("main", reads, {"dK": sizes.k, "dV": sizes.v, "dQ in float32": added})
