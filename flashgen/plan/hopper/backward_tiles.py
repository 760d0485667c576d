"""Candidate tiles of the backward kernels for Hopper, fastest first, and the registers and shared memory of each.

A warpgroup's 64 x n accumulator takes n / 2 registers per thread, and n / 4 once it is rounded to 16 bits. The order
of the candidates is measured; research/ has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.arch import Arch
from flashgen.plan.hopper.backward_scores import has_slope, loads_ahead
from flashgen.plan.hopper.forward_traits import changes_scores
from flashgen.plan.hopper.units import PANEL, ROWS, STORED_ROWS, TILE_SLOTS, is_block_sparse, row_bytes
from flashgen.plan.model.budget import Budget, Choice, Held, Tiles, first_that_fits, registers_of
from flashgen.plan.model.smem import SmemLayout
from flashgen.spec import AttentionSpec

#: Head dims of the fused kernel for dK, dV and dQ.
NARROW_DIMS = ((64, 64), (96, 96), (128, 128))
#: Head dims with one kernel for dK and dV and one for dQ: the fused one lacks registers.
WIDE_DIMS = ((192, 128), (192, 192), (256, 256))
HEAD_DIMS = (*NARROW_DIMS, *WIDE_DIMS)
CONSUMERS = 2
#: Rows of K_j where one kernel computes dK, dV and dQ.
TILE_KV = ROWS * CONSUMERS
#: Rows of Q_i where a kernel computes only dQ.
TILE_Q = ROWS * CONSUMERS
#: Stages of dS.
DS_STAGES = 2
#: Bytes of dQ that a warp stores by TMA at a time: 16 rows of 64 floats.
DQ_BYTES = STORED_ROWS * PANEL * 4
#: Floats of a line of the dQ workspace. A TMA box is two lines.
SUM_LINE = 256
#: Registers per thread of producers and consumers.
_SPLITS = ((56, 224), (40, 232), (24, 240))
_ONE_KERNEL = (
    "S and dP are transposed, so that P and dS are left operands of dV and dK from registers; "
    "dS also goes to shared memory, for dQ"
)
_KEYS = (
    "S and dP are transposed; one consumer computes P and dV, the other one dS and dK, for the same keys; "
    "P passes through shared memory"
)
_QUERY = "rows of S and dP are queries, so that dS is the left operand of dQ in registers; Q and dO stay"


def padded(spec: AttentionSpec) -> AttentionSpec:
    """The spec with the least head dims that tiles, registers and products are laid out for.

    TMA fills columns beyond those of the tensors with zeros, and stores none of them.
    """
    dims = next(dims for dims in HEAD_DIMS if dims[0] >= spec.head_dim and dims[1] >= spec.head_dim_v)
    return replace(spec, head_dim=dims[0], head_dim_v=dims[1])


def one_kernel(spec: AttentionSpec, arch: Arch) -> Choice | tuple[str, ...]:
    """Tiles of the fused kernel for dK, dV and dQ; if none fits, what each candidate lacks."""
    return first_that_fits(_one_kernel_ways(spec), lambda tiles: _one_kernel_budget(spec, tiles), arch, _ONE_KERNEL)


def keys_kernel(spec: AttentionSpec, arch: Arch) -> Choice | tuple[str, ...]:
    """Tiles of the kernel for dK and dV alone, 64 keys at a time."""
    together = tuple(f"dQ in the same kernel, {fault}" for fault in _faults(one_kernel(spec, arch)))
    return first_that_fits(_keys_ways(spec), lambda tiles: _keys_budget(spec, tiles), arch, _KEYS, together)


def query_kernel(spec: AttentionSpec, arch: Arch) -> Choice | tuple[str, ...]:
    """Tiles of the kernel for dQ alone, 128 queries at a time."""
    return first_that_fits(_query_ways(spec), lambda tiles: _query_budget(spec, tiles), arch, _QUERY)


def _faults(found: Choice | tuple[str, ...]) -> tuple[str, ...]:
    return found.passed_over if isinstance(found, Choice) else found


def _tile_bytes(spec: AttentionSpec) -> int:
    """Bytes of an announced tile. With lengths of its own it says where its rows lie."""
    return 48 if spec.varlen else 16


def _split(of: Held) -> tuple[int, int]:
    """Registers of producer and consumers: 40 for the producer, if the consumers can spare them."""
    return _SPLITS[1] if registers_of(of) <= _SPLITS[1][1] else _SPLITS[2]


# ---- The fused kernel: keeps dK and dV of its keys in registers, and adds to a float32 sum of dQ


def _one_kernel_ways(spec: AttentionSpec) -> Iterator[Tiles]:
    """Long steps first, since each step has the same overhead; then more slots for Q; then more for finishing dQ."""
    for tile_q, q_stages, reason in (
        (128, (2,), "the longest tile of queries whose scores and gradients fit in registers"),
        (64, (3, 2), "dK and dV take half of the registers, which leaves them for 64 queries"),
    ):
        split, (switches, notes) = _one_kernel_split(spec), _order_of_products(spec, tile_q)
        for q in q_stages:
            for sums, rounded in ((0, 0),) if spec.deterministic else ((4, 2), (4, 1), (3, 2), (3, 1), (2, 1)):
                slots = (("Q", q), ("dO", 2), ("dS", DS_STAGES), ("sums of dQ", sums), ("them rounded", rounded))
                yield Tiles(tile_q, "queries", slots, split, reason, switches, notes)


def _one_kernel_split(spec: AttentionSpec) -> tuple[int, int]:
    """Registers of producers and consumers."""
    # Evaluating a block-sparse mask takes registers: of the producer, and of the warps that add dQ in order.
    if is_block_sparse(spec):
        return _SPLITS[0] if spec.deterministic and not changes_scores(spec) else _SPLITS[1]
    # At head_dim 96 consumers need no more.
    return _SPLITS[1] if spec.head_dim == 96 else _SPLITS[2]


#: Rates are TFLOP/s on an H200, bf16, at 4,096 / 8,192 / 16,384.
_AHEAD = (
    "the next step's scores start at -L while dK is multiplied: 522 / 532 / 544, full, beside 493 / 501 / 505; at 128 "
    "columns it loses 1 to 3 %"
)
_BETWEEN = (
    "dQ of the step before is multiplied between dV and dK, while dS is computed: at 128 columns 602 / 626 / 639, "
    "full, beside 562 / 575 / 584 before dP"
)
_LAST = "dQ of the step before is multiplied after dK, and takes the registers of dP: between dV and dK it would spill"


def _order_of_products(spec: AttentionSpec, tile_q: int) -> tuple[frozenset[str], tuple[str, ...]]:
    """Switches that say when products of a step are issued, and notes that justify them."""
    # With a score the accumulators start at zero, which takes no loads.
    ahead, last = tile_q == 128 and not changes_scores(spec), _dq_last(spec, tile_q)
    named = (("presets_ahead", ahead), ("dq_last", last))
    return frozenset(name for name, on in named if on), ((_LAST if last else _BETWEEN), *((_AHEAD,) if ahead else ()))


def _dq_last(spec: AttentionSpec, tile_q: int) -> bool:
    """Whether registers are short: a block-sparse mask leaves 8 fewer.

    Of 128 queries a second P, for slopes or dropout, or biases take 32.
    """
    return is_block_sparse(spec) or (tile_q == 128 and (has_slope(spec) or loads_ahead(spec) or spec.dropout))


def held(spec: AttentionSpec, tile_q: int) -> Held:
    """What the registers of a consumer thread hold."""
    # S is rounded to P in chunks. dQ has as many columns as a panel.
    rounding, last = tile_q // 2 + 8, _dq_last(spec, tile_q)
    pairs = rounding if last else max(rounding, tile_q // 4 + PANEL // 2)
    return (
        ("dK", spec.head_dim // 2),
        ("dV", spec.head_dim_v // 2),
        ("S and P" if last else "S and P, or P and dQ", pairs),
        ("dP or dQ" if last else "dP", tile_q // 2),
        *((("P that dS is made of", 8 if last else tile_q // 4),) if has_slope(spec) or spec.dropout else ()),
        ("addresses", 16),
    )


def _one_kernel_budget(spec: AttentionSpec, tiles: Tiles) -> Budget:
    size, tile_q = spec.element.bytes, tiles.rows
    dim, dim_v = row_bytes(spec)
    q, do = tiles.count("Q"), tiles.count("dO")
    q_slots, do_slots = f"{q} slots", f"{do} slots"
    layout = (
        SmemLayout()
        .then("k", TILE_KV * dim, "K_j")
        .then("v", TILE_KV * dim_v, "V_j")
        .then("q", q * tile_q * dim, f"Q_i, {q_slots}")
        .then("do", do * tile_q * dim_v, f"dO_i, {do_slots}")
        .then("ds", DS_STAGES * TILE_KV * tile_q * size, f"dS_ij, {DS_STAGES} slots")
        .then("dq", 4 * CONSUMERS * DQ_BYTES, "dQ_i, and at the end dK_j and dV_j, to be stored")
    )
    sums = tiles.count("sums of dQ")
    if spec.deterministic:
        layout.then(
            "sum", tile_q * dim // size * 4 // CONSUMERS, "a consumer's share of dQ_i, to be scaled and rounded"
        )
    if sums:
        rounded = tiles.count("them rounded")
        layout.then("sums", sums * DQ_BYTES, f"rows of dQ_i to be scaled and rounded, {sums} slots")
        layout.then("dq_rows", rounded * STORED_ROWS * PANEL * size, "rounded rows of dQ_i")
        layout.then("zeros", 2 * SUM_LINE * 4, "zeros that clear the sum of dQ")
    (
        layout.then("lse", q * tile_q * 4, f"-L_i in units of S, {q_slots}")
        .then("dsum", do * tile_q * 4, f"-D_i, {do_slots}")
        .then("k_barriers", 16, "full and empty barriers of each slot")
        .then("v_barriers", 16)
        .then("q_barriers", 16 * q)
        .then("do_barriers", 16 * do)
        .then("ds_barriers", 16 * DS_STAGES)
    )
    if sums:
        layout.then("sum_barriers", 16 * sums)
        layout.then("turn_barriers", 16)
        layout.then("sum_parts", 32 * sums, "the part of dQ in each slot")
    else:
        layout.then("dq_barriers", 32 * CONSUMERS).then("sum_barriers", 16)
        layout.then("sum_parts", 32, "the destination of the share")
    layout.then("tile_barriers", 16 * TILE_SLOTS).then(
        "tiles", _tile_bytes(spec) * TILE_SLOTS, "the next tiles of keys"
    )
    if is_block_sparse(spec):
        layout.then("messages", 8 * q, "the block of queries in each slot of Q")
    return Budget(held(spec, tile_q), layout.map())


# ---- Two kernels for wide heads: dK and dV


def _keys_ways(spec: AttentionSpec) -> Iterator[Tiles]:
    """As many slots for Q and dO as fit. The order of a consumer's products depends on it."""
    for slots, reason in (
        (3, "three slots for Q and dO, so that each consumer issues a product early"),
        (2, "shared memory holds two slots for Q and dO; dV and dK are issued first to free them"),
    ):
        split = _split(_keys_held(spec, ROWS))
        yield Tiles(ROWS, "queries", (("Q", slots), ("dO", slots), ("P", 2)), split, reason)


def _keys_held(spec: AttentionSpec, tile_q: int) -> Held:
    widest = max(spec.head_dim, spec.head_dim_v)
    return (
        ("dV or dK", widest // 2),
        ("S or dP", tile_q // 2),
        ("P or dS rounded", tile_q // 4),
        ("addresses", 26),
    )


def _keys_budget(spec: AttentionSpec, tiles: Tiles) -> Budget:
    dim, dim_v = row_bytes(spec)
    q, do, p = (tiles.count(name) for name in ("Q", "dO", "P"))
    q_slots, do_slots = f"{q} slots", f"{do} slots"
    layout = (
        SmemLayout()
        .then("k", ROWS * dim, "K_j")
        .then("v", ROWS * dim_v, "V_j")
        .then("q", q * tiles.rows * dim, f"Q_i, {q_slots}")
        .then("do", do * tiles.rows * dim_v, f"dO_i, {do_slots}")
        .then("p", p * ROWS * tiles.rows * spec.element.bytes, f"P_ij for the other consumer, {p} slots")
        .then("lse", q * tiles.rows * 4, f"-L_i in units of S, {q_slots}")
        .then("dsum", do * tiles.rows * 4, f"-D_i, {do_slots}")
        .then("k_barriers", 16, "full and empty barriers of each slot")
        .then("v_barriers", 16)
        .then("q_barriers", 16 * q)
        .then("do_barriers", 16 * do)
        .then("p_barriers", 16 * p)
    )
    layout.then("tile_barriers", 16 * TILE_SLOTS)
    layout.then("tiles", _tile_bytes(spec) * TILE_SLOTS, "the next tiles of keys")
    if is_block_sparse(spec):
        layout.then("messages", 8 * q, "the block of queries in each slot of Q")
    return Budget(_keys_held(spec, tiles.rows), layout.map())


# ---- Two kernels for wide heads: dQ


def _query_ways(spec: AttentionSpec) -> Iterator[Tiles]:
    """Steps of at least 64 keys first, then a second slot for V, then longer steps."""
    ways = [(keys, v) for keys in range(16, 129, 16) for v in (1, 2)]
    for keys, v in sorted(ways, key=lambda way: (min(way[0], 64), way[1], way[0]), reverse=True):
        reason = "two slots for K and V" if v == 2 else "the widest tile of keys with two slots"
        if keys < 64:
            reason = "fewer keys, as a block-sparse mask takes registers"
        yield Tiles(keys, "keys", (("K", 2), ("V", v)), _split(_query_held(spec, keys)), reason)


def _query_held(spec: AttentionSpec, tile_kv: int) -> Held:
    return (
        ("dQ", spec.head_dim // 2),
        ("S", tile_kv // 2),
        ("dP", tile_kv // 2),
        ("dS rounded", tile_kv // 4),
        # The kernel also evaluates the block-sparse mask.
        ("addresses", 26 if spec.mask.is_band else 36),
    )


def _query_budget(spec: AttentionSpec, tiles: Tiles) -> Budget:
    dim, dim_v = row_bytes(spec)
    k, v = tiles.count("K"), tiles.count("V")
    layout = (
        SmemLayout()
        .then("q", TILE_Q * dim, "Q_i")
        .then("do", TILE_Q * dim_v, "dO_i")
        .then("k", k * tiles.rows * dim, f"K_j, {k} slots")
        .then("v", v * tiles.rows * dim_v, f"V_j, {v} slots")
        .then("stats", 2 * TILE_Q * 4, "of each consumer -L_i in units of S, and -D_i")
        .then("q_barriers", 16, "full and empty barriers of each slot")
        .then("do_barriers", 16)
        .then("k_barriers", 16 * k)
        .then("v_barriers", 16 * v)
    )
    layout.then("tile_barriers", 16 * TILE_SLOTS)
    layout.then("tiles", (48 if spec.varlen else 32) * TILE_SLOTS, "the next tiles of queries")
    if is_block_sparse(spec):
        layout.then("messages", 8 * k, "the block of keys in each slot of K")
    return Budget(_query_held(spec, tiles.rows), layout.map())
