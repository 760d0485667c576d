"""What the kernels of a plan move, from their real tiles and workspaces."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes
from flashgen.lab.io.tiled import forward as tiled_forward
from flashgen.lab.io.traffic import AlgorithmIO, KernelIO
from flashgen.lab.io.visits import Side
from flashgen.plan import workspaces
from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Role

#: Name of the workspace of float sums of dQ.
_SUM = "dQ in float32"
_EXACT = "each array as the kernels of this plan move it; a reduction counts once; tile counters and flags are left out"
_INEXACT = "loads of captured tensors and of their tables are left out"


def planned(sizes: Sizes, attention: AttentionPlan) -> AlgorithmIO:
    """All kernels of the pass, in the order in which they run."""
    kernels = [k for k in attention.kernels if k.pass_ == sizes.pass_ and k.role in _MODELS]
    exact = not sizes.spec.tensors
    stored = _stored(sizes, attention)
    tiles = next(k for k in kernels if k.role in ("forward", "main"))
    return AlgorithmIO(
        "plan",
        tuple(_MODELS[kernel.role](sizes, attention, kernel) for kernel in kernels),
        stored,
        _EXACT if exact else f"{_EXACT}; {_INEXACT}",
        (int(tiles.constant("tile_q")), int(tiles.constant("tile_kv"))),
        exact,
    )


def _stored(sizes: Sizes, attention: AttentionPlan) -> dict[str, int]:
    if sizes.pass_ == "forward":
        return {"LSE": sizes.row_floats}
    floats = workspaces(attention, sizes.problem)
    return {"D": sizes.row_floats, **{_shown(name): 4 * count for name, count in floats.items()}}


def _shown(workspace: str) -> str:
    return _SUM if workspace == "dq_accum" else workspace.replace("_", " ")


def _is_hopper(kernel: KernelPlan) -> bool:
    return bool(kernel.boxes)


def _tile(kernel: KernelPlan) -> tuple[int, int]:
    return int(kernel.constant("tile_q")), int(kernel.constant("tile_kv"))


def _query_tiles(sizes: Sizes, kernel: KernelPlan) -> int:
    """Tiles of queries of all heads."""
    return sizes.all_heads * -(-sizes.len_q // int(kernel.constant("tile_q")))


def _forward(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    return tiled_forward(sizes, *_tile(kernel), at_least_one=_is_hopper(kernel))


def _prepare(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """D, what rows subtract, and a workspace of zeros: as far as the kernel clears it."""
    reads, writes = {"O": sizes.o, "dO": sizes.o}, {"D": sizes.row_floats}
    floats = workspaces(attention, sizes.problem)
    if "row_stats" in kernel.switches:
        reads["LSE"] = sizes.row_floats
        writes["row stats"] = FLOAT_BYTES * floats["row_stats"]
    if "workspace" in kernel.switches:
        writes[_SUM] = FLOAT_BYTES * floats["dq_accum"]
    return KernelIO("prepare", reads, writes)


def _main(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """dK and dV, and what each step adds to dQ, whole tiles whatever rows exist."""
    tile_q, tile_kv = _tile(kernel)
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
        return KernelIO("main", reads, writes)
    sums = _sum_bytes(attention)
    writes[_SUM] = steps * sums
    if hopper:
        # The same kernel finishes dQ: it reads each sum, and clears those whose place another head takes.
        tiles = _query_tiles(sizes, kernel)
        reads[_SUM] = tiles * sums
        writes["dQ"] = sizes.q
        writes[_SUM] += _cleared(sizes, kernel) * -(-sizes.len_q // tile_q) * sums
    return KernelIO("main", reads, writes)


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


def _query(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """dQ alone: a tile of queries stays, and keys and values stream past."""
    keys = tiled_forward(sizes, *_tile(kernel)).reads
    reads = {"Q": sizes.q, "dO": sizes.o, "K": keys["K"], "V": keys["V"]}
    if _is_hopper(kernel):
        reads["row stats"] = 2 * _query_tiles(sizes, kernel) * int(kernel.constant("tile_q")) * FLOAT_BYTES
    else:
        reads |= {"LSE": sizes.row_floats, "D": sizes.row_floats}
    return KernelIO("query", reads, {"dQ": sizes.q})


def _finish(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    tiles = _query_tiles(sizes, kernel)
    return KernelIO("finish", {_SUM: tiles * _sum_bytes(attention)}, {"dQ": sizes.q})


def _repair(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """Finite data need no repair, and flags are left out."""
    return KernelIO("repair", {}, {})


_MODELS: dict[Role, Callable[[Sizes, AttentionPlan, KernelPlan], KernelIO]] = {
    "forward": _forward,
    "prepare": _prepare,
    "main": _main,
    "query": _query,
    "repair": _repair,
    "finish": _finish,
}
