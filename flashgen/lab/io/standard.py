"""The kernels of standard attention: S, P and dS go through device memory, whatever the mask says.

A block computes a tile of a product. All blocks of a row of tiles read the left operand's rows again, and all blocks of
a column the right operand's columns.
"""

from __future__ import annotations

from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes, tile_of
from flashgen.lab.io.traffic import KernelIO
from flashgen.plan.model.plans import AttentionPlan, KernelPlan

WARP = 32
#: Two warps lie side by side on a tile of S, and four lanes of each share a row.
_THREADS_OF_A_ROW = 2 * 4


def scores(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """S = scale * Q K^T, in float32."""
    q_tiles, kv_tiles = _tiles(sizes, kernel)
    reads = {"Q": sizes.q * kv_tiles, "K": sizes.k * _group(sizes) * q_tiles}
    return KernelIO(kernel.role, reads, {"S": _pairs(sizes) * FLOAT_BYTES})


def softmax(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """P = softmax(S): what a block cannot hold of a row it reads twice."""
    held = 4 * int(kernel.constant("held")) * int(kernel.constant("warps")) * WARP
    twice = sizes.rows * max(0, sizes.problem.score_pitch - held)
    writes = {"P": _pairs(sizes) * sizes.item}
    if sizes.pass_ == "forward":
        writes["LSE"] = sizes.row_floats
    return KernelIO(kernel.role, {"S": (_pairs(sizes) + twice) * FLOAT_BYTES}, writes)


def rows(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """O = P V or dQ = dS K: a block for each tile of queries."""
    left, right, out = ("P", "V", "O") if kernel.role == "forward" else ("dS", "K", "dQ")
    q_tiles = -(-sizes.len_q // kernel.grid_tile)
    size = sizes.v if right == "V" else sizes.k
    reads = {left: _pairs(sizes) * sizes.item, right: size * _group(sizes) * q_tiles}
    return KernelIO(kernel.role, reads, {out: sizes.o if out == "O" else sizes.q})


def columns(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """dV = P^T dO or dK = dS^T Q: a block for each tile of keys."""
    left, right, out = ("P", "dO", "dV") if kernel.role == "dv" else ("dS", "Q", "dK")
    kv_tiles = -(-sizes.len_kv // kernel.grid_tile)
    size = sizes.o if right == "dO" else sizes.q
    reads = {left: _pairs(sizes) * sizes.item, right: size * kv_tiles}
    return KernelIO(kernel.role, reads, {out: sizes.v if out == "dV" else sizes.k})


def score_gradients(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """dS = P * (dO V^T - D): each thread reads D once for each row that it has elements of."""
    q_tiles, kv_tiles = _tiles(sizes, kernel)
    reads = {
        "dO": sizes.o * kv_tiles,
        "V": sizes.v * _group(sizes) * q_tiles,
        "P": _pairs(sizes) * sizes.item,
        "D": sizes.row_floats * kv_tiles * _THREADS_OF_A_ROW,
    }
    return KernelIO(kernel.role, reads, {"dS": _pairs(sizes) * sizes.item})


def _pairs(sizes: Sizes) -> int:
    """Elements of S, P or dS, with the padding of their rows."""
    return sizes.rows * sizes.problem.score_pitch


def _group(sizes: Sizes) -> int:
    return sizes.heads // sizes.heads_kv


def _tiles(sizes: Sizes, kernel: KernelPlan) -> tuple[int, int]:
    tile_q, tile_kv = tile_of(kernel)
    return -(-sizes.len_q // tile_q), -(-sizes.len_kv // tile_kv)
