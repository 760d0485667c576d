"""Planning the forward kernel for Hopper: specialised warpgroups, wgmma, the copy engine, blocks that stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.ahead import loads_ahead
from flashgen.plan.expressions import element_of
from flashgen.plan.model import Box, Constant, KernelPlan, SmemMap
from flashgen.plan.naming import kernel_name
from flashgen.plan.params import FORWARD_SM90, FORWARD_SM90_SCORE
from flashgen.plan.smem import SmemLayout
from flashgen.spec import AttentionSpec, Schedule, WarpPartition

if TYPE_CHECKING:
    from flashgen.expr import Load

ROWS = 64
WARPGROUP = 128
_TILE_SLOTS = 2
PANEL = 64
#: Rows that one warp hands to the copy engine.
STORED_ROWS = 16
#: What the register file has for one block, and what a thread needs beside accumulators.
_REGISTERS = 65536
_OTHER_REGISTERS = 30
_CONSUMERS = (2, 3)

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the schedule table."""

    consumers: int
    tile_kv: int
    stages: int
    q_slots: int
    #: Whether O has shared memory of its own and leaves by the copy engine.
    o_tile: bool
    #: Whether exponentials have registers of their own, so that the scores can be used again.
    keeps_scores: bool
    #: Tiles of keys where the score reads an element for every pair, whose addresses and values take registers: of
    #: masks that are bands, and of others; and where all such elements are fetched before the products.
    tile_kv_reading: tuple[int, int]
    tile_kv_ahead: tuple[int, int]
    reason: str
    registers: tuple[int, int] | None = None

    @property
    def tile_q(self) -> int:
        return ROWS * self.consumers

    def split(self) -> tuple[int, int]:
        """Registers per thread of producers and consumers."""
        return self.registers or ((40, 232) if self.consumers == 2 else (32, 160))


_TABLE = {
    (64, 64): _Row(
        3,
        128,
        4,
        2,
        True,
        False,
        (64, 48),
        (64, 48),
        "three warpgroups, as exponentials and not products set the pace at this width",
    ),
    (96, 96): _Row(2, 128, 2, 2, True, True, (80, 80), (112, 112), "rows of 96 columns take the room of 128"),
    (128, 128): _Row(
        2,
        128,
        2,
        2,
        True,
        True,
        (80, 80),
        (112, 80),
        "the widest tile of keys that leaves room for two tiles of Q and one of O",
    ),
    (192, 128): _Row(2, 112, 2, 1, True, False, (80, 80), (80, 80), "the widest tile of keys that leaves room for O"),
    (192, 192): _Row(
        2, 112, 2, 1, False, False, (64, 48), (64, 48), "the widest tile of keys; O leaves from registers"
    ),
    (256, 256): _Row(
        2, 64, 2, 1, False, False, (48, 48), (48, 48), "two tiles of keys and values under way; O leaves from registers"
    ),
}

#: The same for masks that compare captured whole numbers along the sequence, as documents do.
_DOCUMENTS = {
    (64, 64): _Row(
        2,
        128,
        3,
        2,
        True,
        True,
        (80, 64),
        (112, 96),
        "smaller tiles of queries, as documents cut most tiles, and scores kept, which they leave room for",
    ),
}


def why_not_hopper(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> str | None:
    """What keeps either pass from Hopper's kernels, in a clause; None where nothing does."""
    if schedule.algorithm == "fa2":
        return "its schedule says algorithm='fa2'"
    if not arch.has_wgmma:
        return f"it needs sm_90a, and this is {arch.name}"
    if not spec.element.is_half:
        return f"its tensor-core instructions take fp16 and bf16, and dtype is {spec.dtype!r}"
    if spec.dropout:
        return "it has no dropout"
    if spec.varlen:
        return "it takes no packed sequences"
    if spec.cache:
        return "it takes no cache of keys and values"
    # Rows of other head dims may be why the alignment is less, and then it is these that matter.
    if access_bytes != 16 and (spec.head_dim, spec.head_dim_v) in HEAD_DIMS:
        return "the copy engine needs tensors aligned to 16 bytes"
    return None


def why_not(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> str | None:
    """Why a spec runs by the kernels for all GPUs instead, in a clause; None where it need not."""
    if (reason := why_not_hopper(spec, schedule, arch, access_bytes)) is not None:
        return reason
    if (spec.head_dim, spec.head_dim_v) not in HEAD_DIMS:
        dims = ", ".join(str(d) if d == v else f"{d} with head_dim_v={v}" for d, v in HEAD_DIMS)
        return f"it is made for head_dim {dims}"
    if schedule.algorithm is None and schedule.warps is not None and schedule.warps.kind != "specialized":
        return f"warps={schedule.warps.kind!r} is a partition of the other kernels"
    if not _is_asked(schedule) and (fault := _fault(spec, schedule, arch)) is not None:
        return f"it cannot be laid out so: {fault}".removesuffix(".")
    return None


def _is_asked(schedule: Schedule) -> bool:
    """Whether the schedule names this kernel, and not only sizes that others have too."""
    by_warps = schedule.warps is not None and schedule.warps.kind == "specialized"
    return by_warps or schedule.algorithm == "fa3" or schedule.softmax is not None or schedule.registers is not None


def is_planned(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> bool:
    """Whether the forward kernel is this one; a PlanError where it was asked for and cannot be."""
    reason = why_not(spec, schedule, arch, access_bytes)
    if reason is not None and _is_asked(schedule) and schedule.algorithm != "fa2":
        raise PlanError(f"algorithm='fa3' cannot be planned for {spec.describe()}: {reason}; leave algorithm out.")
    return reason is None


def plan_forward_sm90(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> KernelPlan:
    """The forward kernel of a spec on Hopper."""
    fault = _fault(spec, schedule, arch)
    if fault is not None:
        fits = _row(spec)
        remedy = f"What would fit: tile_q={fits.tile_q}, tile_kv={fits.tile_kv}, stages={fits.stages}."
        raise PlanError(f"The forward kernel cannot be planned: {fault} {remedy}")
    row = _chosen(spec, schedule, arch)
    smem = _smem(spec, row)
    producer, consumer = row.split()
    has_end = spec.mask.has_upper or not spec.mask.is_band
    running = schedule.softmax == "running-max"
    keeps = row.keeps_scores and not running
    in_products = _is_in_products(spec)
    return KernelPlan(
        name=kernel_name(spec, "forward", arch, *(["runningmax"] if running else [])),
        pass_="forward",
        role="forward",
        algorithm="FlashAttention-3",
        template="forward_sm90.cu.j2",
        spec=spec,
        arch=arch,
        threads=WARPGROUP * (row.consumers + 1),
        config_type="ForwardSm90Config",
        config=(
            Constant("head_dim", spec.head_dim),
            Constant("head_dim_v", spec.head_dim_v),
            Constant("tile_q", row.tile_q, "B_r: query rows per block"),
            Constant("tile_kv", row.tile_kv, "B_c: keys per step"),
            Constant("stages", row.stages, "tiles of keys, and of values, under way at once"),
            Constant("q_slots", row.q_slots, "tiles of queries under way at once"),
            Constant("tile_slots", _TILE_SLOTS, "tiles of queries known ahead"),
            Constant("consumers", row.consumers, "warpgroups that compute, 64 query rows each"),
            Constant("producer_registers", producer),
            Constant("consumer_registers", consumer),
            Constant("section_heads", 16 if has_end else 1, "heads that are worked on at the same time"),
            Constant("longest_first", has_end, "the last queries of a head go first"),
            Constant("running_maximum", running, "exponentials relative to the maximum so far"),
            Constant("keeps_scores", keeps, "exponentials do not take the place of scores"),
            Constant("holds_waits", row.consumers < 3, "exponentials overlap the products, as registers allow"),
            Constant("has_lower", spec.mask.has_lower, "the mask ends on the left"),
            Constant("has_upper", spec.mask.has_upper, "the mask ends on the right"),
        ),
        params=FORWARD_SM90 if spec.score is None else FORWARD_SM90_SCORE,
        smem=smem,
        grid_tile=row.tile_q,
        grid_over="q",
        grid_heads="q",
        access_bytes=16,
        is_persistent=True,
        divides_by_scale=in_products,
        boxes=(
            Box("q", row.tile_q, PANEL),
            Box("k", row.tile_kv, PANEL),
            Box("v", row.tile_kv, PANEL),
            Box("o", STORED_ROWS, PANEL),
        ),
        reasons=(row.reason,),
        schedule=schedule if schedule != Schedule() else None,
        switches=frozenset(
            name
            for name, on in (
                ("o_tile", row.o_tile),
                ("keeps_scores", keeps),
                ("retakes", not keeps and not running),
                ("skips", row.tile_q > row.tile_kv),
                ("inspector", _looks(spec)),
                ("listed", _is_listed(spec)),
                ("spans", _is_listed(spec)),
                ("in_products", in_products),
            )
            if on
        ),
    )


def registers_at_launch(warpgroups: int) -> int:
    """Registers per thread that all warps of a block begin with; what roles have later is made of these."""
    return _REGISTERS // (WARPGROUP * warpgroups) // 8 * 8


def chosen_schedule_sm90(kernel: KernelPlan) -> Schedule:
    """The forward plan as the schedule it amounts to."""
    return Schedule(
        tile_q=int(kernel.constant("tile_q")),
        tile_kv=int(kernel.constant("tile_kv")),
        stages=int(kernel.constant("stages")),
        warps=WarpPartition("specialized", consumers=int(kernel.constant("consumers"))),
        algorithm="fa3",
        softmax="running-max" if kernel.constant("running_maximum") else "anchored",
        registers=(int(kernel.constant("producer_registers")), int(kernel.constant("consumer_registers"))),
    )


def _looks(spec: AttentionSpec) -> bool:
    """Whether tiles can be cut, so that V is looked through for values that must not spread."""
    return not spec.mask.is_full


def _is_listed(spec: AttentionSpec) -> bool:
    """Whether the mask is more than a band, so that the producer tells which tiles of keys come and what they are."""
    return not spec.mask.is_band


def _row(spec: AttentionSpec) -> _Row:
    """The row of the table, with what the mask and the score take of its registers."""
    dims = spec.head_dim, spec.head_dim_v
    row = _DOCUMENTS[dims] if dims in _DOCUMENTS and _has_documents(spec) else _TABLE[dims]
    narrow = row.consumers == 3
    if not spec.mask.is_band:
        # The producer looks at tiles of keys for everyone, and needs registers for it.
        registers = (56, 152) if narrow else (56, 224)
        row = replace(row, registers=registers, tile_kv=96 if narrow else row.tile_kv)
    elif narrow and (spec.mask.has_lower or spec.score is not None):
        row = replace(row, tile_kv=112)
    if row.keeps_scores and spec.score is not None and spec.score.traced.tensors and not _is_in_products(spec):
        row = replace(row, tile_kv=112)
    if loads := _pair_loads(spec):
        tiles = row.tile_kv_ahead if _all_ahead(spec, loads) else row.tile_kv_reading
        row = replace(row, tile_kv=tiles[_is_listed(spec)])
    return row


def _is_in_products(spec: AttentionSpec) -> bool:
    """Whether the score adds to products what it would to logits."""
    if spec.score is None or not spec.score.changes_logits:
        return False
    from flashgen.expr import in_products

    return in_products(spec.score.traced.root) is not None


def _has_documents(spec: AttentionSpec) -> bool:
    """Whether the mask compares captured whole numbers along the sequence, by which its loops are bounded."""
    if not _is_listed(spec) or not spec.mask.traced.tensors:
        return False
    from flashgen.expr import Search, postorder

    rule = spec.mask.rule
    return any(isinstance(node, Search) for node in postorder(rule.key_begin, rule.key_end))


def _pair_loads(spec: AttentionSpec) -> tuple[Load, ...]:
    """What the score reads of captured tensors that depends on both the query and the key."""
    if spec.score is None or not spec.score.traced.tensors:
        return ()
    from flashgen.expr import Load, postorder
    from flashgen.plan.over import over_of

    loads = (node for node in postorder(spec.score.traced.root) if isinstance(node, Load))
    return tuple(load for load in loads if over_of(load.indices) in ("diagonals", "pairs"))


def _all_ahead(spec: AttentionSpec, loads: tuple[Load, ...]) -> bool:
    """Whether all of these loads come before the products."""
    from flashgen.expr import element_type

    assert spec.score is not None, "only a score loads"
    tensors = spec.score.traced.tensors
    elements = {name: element_of(name, element_type(value)) for name, value in tensors.items()}
    return set(loads) <= set(loads_ahead(spec.score.traced.root, elements))


def _chosen(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> _Row:
    row = _row(spec)
    consumers = row.consumers
    if schedule.warps is not None and schedule.warps.consumers is not None:
        consumers = schedule.warps.consumers
    elif schedule.tile_q is not None:
        consumers = schedule.tile_q // ROWS
    row = replace(
        row,
        consumers=consumers,
        tile_kv=schedule.tile_kv or row.tile_kv,
        stages=schedule.stages or row.stages,
        registers=schedule.registers or (row.registers if consumers == row.consumers else None),
    )
    # What was asked for may leave no room for what is only good to have.
    return next((r for r in _roomier(row) if _smem(spec, r).bytes <= arch.max_smem_per_block), row)


def _roomier(row: _Row) -> Iterator[_Row]:
    yield row
    yield replace(row, q_slots=1)
    yield replace(row, q_slots=1, o_tile=False)


def _fault(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> str | None:
    """What is wrong with the tiles, in a sentence."""
    row = _chosen(spec, schedule, arch)
    if row.consumers not in _CONSUMERS or schedule.tile_q not in (None, row.tile_q):
        return f"tile_q={schedule.tile_q or row.tile_q} is not 64 rows for each of 2 or 3 consumers; use 128 or 192."
    described = f"tile_q={row.tile_q}, tile_kv={row.tile_kv}, stages={row.stages}"
    producer, consumer = row.split()
    accumulators = row.tile_kv // 2 + row.tile_kv // 4 + spec.head_dim_v // 2
    needed = _smem(spec, row).bytes
    if row.stages < 2:
        return f"{described} leaves no tile to copy into while another is used; use stages=2 or more."
    at_launch = registers_at_launch(row.consumers + 1)
    there_are = WARPGROUP * (row.consumers + 1) * at_launch
    if WARPGROUP * (producer + row.consumers * consumer) > there_are:
        return (
            f"registers={(producer, consumer)} for 1 producer and {row.consumers} consumers are more than the "
            f"{there_are} that a block begins with; use {replace(row, registers=None).split()}."
        )
    if not producer <= at_launch <= consumer:
        return (
            f"registers={(producer, consumer)} cannot be made of the {at_launch} that all warps begin with; "
            f"use {replace(row, registers=None).split()}."
        )
    if accumulators + _OTHER_REGISTERS > consumer:
        return (
            f"{described} needs {accumulators} registers per thread for scores, probabilities and output, and "
            f"consumers have {consumer}; use a smaller tile_kv or fewer consumers."
        )
    if needed > arch.max_smem_per_block:
        return (
            f"{described} needs {needed} bytes of shared memory per block, but {arch.name} has "
            f"{arch.max_smem_per_block}; use smaller tiles or fewer stages."
        )
    return None


def _smem(spec: AttentionSpec, row: _Row) -> SmemMap:
    def panels(dim: int) -> int:
        return -(-dim // PANEL) * PANEL * spec.element.bytes

    layout = SmemLayout()
    slots = f"{row.stages} slots"
    layout.then("q", row.q_slots * row.tile_q * panels(spec.head_dim), f"Q_i, {row.q_slots} slots")
    layout.then("k", row.stages * row.tile_kv * panels(spec.head_dim), f"K_j, {slots}")
    layout.then("v", row.stages * row.tile_kv * panels(spec.head_dim_v), f"V_j, {slots}")
    if row.o_tile:
        layout.then("o", row.tile_q * panels(spec.head_dim_v), "O_i, on its way out")
    layout.then("q_barriers", 16 * row.q_slots, "for each slot: it is full, it is empty")
    layout.then("k_barriers", 16 * row.stages)
    layout.then("v_barriers", 16 * row.stages)
    layout.then("tile_barriers", 16 * _TILE_SLOTS)
    layout.then("tiles", 16 * _TILE_SLOTS, "which tiles of queries come next")
    if _looks(spec) and not _is_listed(spec):
        layout.then("reaches", 32 * row.consumers * _TILE_SLOTS, "and where each consumer's keys lie")
    if _is_listed(spec):
        layout.then("listed_keys", 16 * row.stages, "which tiles of keys the slots hold")
    if _looks(spec):
        layout.then("looked_through", 8 * row.stages, "V_j has no bad values any more")
        layout.then("found_bad", 16 * row.stages, "and when it had some")
    return layout.map()
