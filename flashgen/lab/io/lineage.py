"""The algorithms on the way to FlashAttention: one thread per element, and grids of one and of two dimensions."""

from __future__ import annotations

from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes
from flashgen.lab.io.tiled import tiled
from flashgen.lab.io.traffic import AlgorithmIO, KernelIO

#: The tile sizes that a grid's kernels may have.
_SIDES = (128, 64, 32, 16)


def naive(sizes: Sizes) -> AlgorithmIO | None:
    """One thread for each element of O, which reads its query, all keys, and a column of V."""
    if sizes.pass_ == "backward":
        return None
    spec = sizes.spec
    threads = sizes.rows * spec.head_dim_v
    reads = {
        "Q": threads * spec.head_dim * sizes.item,
        "K": threads * sizes.len_kv * spec.head_dim * sizes.item,
        "V": threads * sizes.len_kv * sizes.item,
    }
    kernel = KernelIO("naive", reads, {"O": sizes.o, "LSE": sizes.row_floats})
    stored = {"LSE": sizes.row_floats}
    return AlgorithmIO("naive", (kernel,), stored, "each thread reads by itself, and no cache helps; no key is skipped")


def square_tile(sizes: Sizes) -> int:
    """The largest B whose B x B tile fits by ``M = 4 (2 B_r d + 2 B_c d + 4 B_r + 2 B_r B_c + 2 B_r)`` bytes."""
    dim = max(sizes.spec.head_dim, sizes.spec.head_dim_v)
    fits = (side for side in _SIDES if FLOAT_BYTES * (4 * side * dim + 6 * side + 2 * side * side) <= sizes.sram)
    return next(fits, _SIDES[-1])


def grid1d(sizes: Sizes) -> AlgorithmIO | None:
    """One block for each tile of queries, with keys and values through shared memory."""
    if sizes.pass_ == "backward":
        return None
    side = square_tile(sizes)
    return tiled("grid1d", sizes, side, side)


def grid2d(sizes: Sizes) -> AlgorithmIO | None:
    """One block for each pair of tiles. S stays in registers across the synchronisation of the grid."""
    if sizes.pass_ == "backward":
        return None
    return _grid2d(sizes, phased=False)


def grid2d_phased(sizes: Sizes) -> AlgorithmIO | None:
    """As ``grid2d``, in separate launches: Q and K are read for the row maxima, and again for the output."""
    if sizes.pass_ == "backward":
        return None
    return _grid2d(sizes, phased=True)


def _grid2d(sizes: Sizes, *, phased: bool) -> AlgorithmIO:
    side, group = square_tile(sizes), sizes.heads // sizes.heads_kv
    q_tiles, kv_tiles = -(-sizes.len_q // side), -(-sizes.len_kv // side)
    products = {"Q": sizes.q * kv_tiles, "K": sizes.k * group * q_tiles}
    values = {"V": sizes.v * group * q_tiles}
    # One float per row for each tile of keys.
    floats = sizes.row_floats * kv_tiles
    output = floats * sizes.spec.head_dim_v
    results = {"O": sizes.o, "LSE": sizes.row_floats}
    combine = KernelIO("combine", {"maxima": floats, "sums": floats, "O partials": output}, results)
    if phased:
        kernels: tuple[KernelIO, ...] = (
            KernelIO("maxima", products, {"maxima": floats}),
            # Each block reads the maxima of its rows over all tiles of keys.
            KernelIO(
                "partials", {**products, **values, "maxima": floats * kv_tiles}, {"sums": floats, "O partials": output}
            ),
            combine,
        )
        name = "grid2d_phased"
    else:
        written = {"maxima": floats, "sums": floats, "O partials": output}
        kernels = (KernelIO("partials", {**products, **values}, written), combine)
        name = "grid2d"
    stored = {"maxima": floats, "sums": floats, "O partials": output, "LSE": sizes.row_floats}
    return AlgorithmIO(name, kernels, stored, "partial results in float32; no tile is skipped", (side, side))
