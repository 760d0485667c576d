"""The kernels of FlashAttention-2 and 3, of both passes; FlashAttention-1 has the same backward kernels."""

from __future__ import annotations

from flashgen.lab.io.names import DQ_SUM
from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes, tile_of
from flashgen.lab.io.traffic import KernelIO
from flashgen.lab.io.visits import Side
from flashgen.plan import workspaces
from flashgen.plan.model.plans import AttentionPlan, KernelPlan


def _is_hopper(kernel: KernelPlan) -> bool:
    return bool(kernel.boxes)


def _query_tiles(sizes: Sizes, kernel: KernelPlan) -> int:
    """Tiles of queries of all heads."""
    return sizes.all_heads * -(-sizes.len_q // int(kernel.constant("tile_q")))


def forward(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """Q, O and LSE move once, and K and V once per tile of queries."""
    return streamed(sizes, kernel)


def streamed(sizes: Sizes, kernel: KernelPlan) -> KernelIO:
    """A tile of queries stays on the chip while the keys and values that the mask leaves stream past."""
    tile_q, tile_kv = tile_of(kernel)
    walk = sizes.key_walk(tile_q, tile_kv)
    keys = int(walk.rows.sum())
    if _is_hopper(kernel):
        # There a tile of queries that attends to nothing still reads a tile of keys.
        keys += int(walk.idle.sum()) * min(tile_kv, sizes.len_kv)
    spec = sizes.spec
    reads = {"Q": sizes.q, "K": keys * spec.head_dim * sizes.item, "V": keys * spec.head_dim_v * sizes.item}
    return KernelIO(kernel.role, reads, {"O": sizes.o, "LSE": sizes.row_floats})


def prepare(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """D, what rows subtract, and a workspace of zeros: as far as the kernel clears it."""
    reads, writes = {"O": sizes.o, "dO": sizes.o}, {"D": sizes.row_floats}
    floats = workspaces(attention, sizes.problem)
    if "row_stats" in kernel.params.names:
        reads["LSE"] = sizes.row_floats
        writes["row stats"] = FLOAT_BYTES * floats["row_stats"]
    if "dq_accum" in kernel.params.names:
        writes[DQ_SUM] = FLOAT_BYTES * floats["dq_accum"]
    return KernelIO(kernel.role, reads, writes)


def main(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """dK and dV, and what each step adds to dQ, whole tiles whatever rows exist."""
    tile_q, tile_kv = tile_of(kernel)
    spec, walk = sizes.spec, sizes.query_walk(tile_q, tile_kv)
    rows, steps, hopper = int(walk.rows.sum()), int(walk.steps.sum()), _is_hopper(kernel)
    # On Hopper a tile of keys without a step brings no keys.
    valid = Side("k", sizes.len_kv, tile_kv).rows
    keys = sizes.batch * sizes.heads_kv * int(valid[walk.steps > 0].sum() if hopper else valid.sum())
    stats = rows * FLOAT_BYTES
    reads = {
        "K": keys * spec.head_dim * sizes.item,
        "V": keys * spec.head_dim_v * sizes.item,
        "Q": rows * spec.head_dim * sizes.item,
        "dO": rows * spec.head_dim_v * sizes.item,
    }
    reads |= {"row stats": 2 * steps * tile_q * FLOAT_BYTES} if hopper else {"LSE": stats, "D": stats}
    writes = {"dK": sizes.k, "dV": sizes.v}
    if not _adds_to_dq(attention):
        return KernelIO(kernel.role, reads, writes)
    sums = _sum_bytes(attention)
    writes[DQ_SUM] = steps * sums
    if hopper:
        # The same kernel finishes dQ: it reads each sum, and clears those whose place another head takes.
        tiles = _query_tiles(sizes, kernel)
        reads[DQ_SUM] = tiles * sums
        writes["dQ"] = sizes.q
        writes[DQ_SUM] += _cleared(sizes, kernel) * -(-sizes.len_q // tile_q) * sums
    return KernelIO(kernel.role, reads, writes)


def _adds_to_dq(attention: AttentionPlan) -> bool:
    return not attention.has("query")


def _sum_bytes(attention: AttentionPlan) -> int:
    """Of the sum of dQ of a tile of queries."""
    return FLOAT_BYTES * int(attention.kernel("prepare").constant("workspace_floats"))


def _cleared(sizes: Sizes, kernel: KernelPlan) -> int:
    """Heads whose sums are cleared once more, for other heads."""
    if kernel.sums is None:
        return 0
    return max(0, sizes.all_heads - kernel.sums.heads(sizes.problem))


def query(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """dQ alone: a tile of queries stays, and keys and values stream past."""
    keys = streamed(sizes, kernel).reads
    reads = {"Q": sizes.q, "dO": sizes.o, "K": keys["K"], "V": keys["V"]}
    if _is_hopper(kernel):
        reads["row stats"] = 2 * _query_tiles(sizes, kernel) * int(kernel.constant("tile_q")) * FLOAT_BYTES
    else:
        reads |= {"LSE": sizes.row_floats, "D": sizes.row_floats}
    return KernelIO(kernel.role, reads, {"dQ": sizes.q})


def finish(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """dQ from its sum to the dtype."""
    tiles = _query_tiles(sizes, kernel)
    return KernelIO(kernel.role, {DQ_SUM: tiles * _sum_bytes(attention)}, {"dQ": sizes.q})


def repair(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """Tiles that are not finite. Finite data need no repair, and flags are left out."""
    return KernelIO(kernel.role, {}, {})
