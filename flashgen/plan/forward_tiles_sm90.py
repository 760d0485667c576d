"""The tiles of the forward kernel for Hopper: the schedule table, what a spec makes of a row, and what that takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashgen.arch import Arch
from flashgen.plan.forward_traits_sm90 import (
    adds_two_bytes,
    all_ahead,
    asked_of_pairs,
    compares_documents,
    compares_little,
    has_fine_cap,
    is_capped,
    is_lean,
    looks_up_pairs,
    pair_loads,
)
from flashgen.plan.model import SmemMap
from flashgen.plan.sm90 import ROWS, TILE_SLOTS, WARPGROUP, is_listed, registers_at_launch, row_bytes
from flashgen.plan.smem import SmemLayout
from flashgen.spec import AttentionSpec, Schedule

#: What a thread needs beside accumulators.
_OTHER_REGISTERS = 30
_CONSUMERS = (2, 3)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the schedule table."""

    consumers: int
    tile_kv: int
    stages: int
    #: Slots for queries beyond those of one tile.
    q_ahead: int
    #: Whether O has shared memory of its own and leaves by the copy engine.
    o_tile: bool
    #: Whether exponentials have registers of their own, so that the scores can be used again. They are those of the
    #: exponentials before where values come first.
    keeps_scores: bool
    #: Tiles of keys where the score reads an element for every pair, whose addresses and values take registers: of
    #: masks that are bands, and of others; and where all such elements are fetched before the products.
    tile_kv_reading: tuple[int, int]
    tile_kv_ahead: tuple[int, int]
    reason: str
    #: The last of these, where there is no mask, and one load of two bytes for each pair is all that is added.
    tile_kv_few: int | None = None
    registers: tuple[int, int] | None = None
    #: Whether each consumer's queries have a slot of their own.
    q_by_consumer: bool = False
    #: Whether the last values of a tile of queries have a turn of their own, before the next tile's first scores.
    ends_alone: bool = False
    #: Slots for keys beyond those of the stages.
    k_ahead: int = 0

    @property
    def values_first(self) -> bool:
        """Whether a step's values are multiplied before the next exponentials are taken, and not beside them."""
        # Two other warpgroups have products meanwhile, and exponentials are rounded as they come.
        return self.consumers == 3

    @property
    def q_rows(self) -> int:
        """Queries of a slot."""
        return ROWS if self.q_by_consumer else self.tile_q

    @property
    def q_slots(self) -> int:
        """Slots for queries."""
        return (self.consumers if self.q_by_consumer else 1) + self.q_ahead

    @property
    def k_slots(self) -> int:
        """Slots for keys."""
        return self.stages + self.k_ahead

    @property
    def tile_q(self) -> int:
        """Queries of a block."""
        return ROWS * self.consumers

    @property
    def keys_lead(self) -> bool:
        """Whether the next tile's first keys come before the last values: with more stages both come early as it is."""
        # Values that have a turn of their own are needed first.
        return self.stages == 2 and not self.ends_alone

    def split(self) -> tuple[int, int]:
        """Registers per thread of producers and consumers."""
        return self.registers or ((40, 232) if self.consumers == 2 else (32, 160))


_TABLE = {
    (64, 64): Row(
        3,
        128,
        4,
        1,
        True,
        True,
        (64, 48),
        (80, 48),
        "three warpgroups, as exponentials and not products set the pace at this width",
        tile_kv_few=96,
    ),
    (96, 96): Row(2, 128, 2, 1, True, True, (80, 80), (112, 112), "rows of 96 columns take the room of 128"),
    (128, 128): Row(
        2,
        128,
        2,
        1,
        True,
        True,
        (80, 80),
        (112, 80),
        "the widest tile of keys that leaves room for two tiles of Q and one of O",
    ),
    (192, 128): Row(2, 112, 2, 0, True, True, (80, 80), (80, 80), "the widest tile of keys that leaves room for O"),
    (192, 192): Row(2, 112, 2, 0, False, False, (64, 48), (64, 48), "the widest tile of keys; O leaves from registers"),
    # The third slot for keys takes the room that is left. Exponentials hold K_j until no score of it is needed again,
    # and with two slots K_(j+2) came together with V_(j+1). With a causal mask, S = 512, 1k, 2k, 4k, 8k, 16k, in two
    # runs on an H200: 344, 454, 553, 618, 648, 708 TFLOP/s beside 332, 452, 543, 617, 645, 692 with two slots, and 338,
    # 457, 564, 625, 675, 697 beside 336, 449, 550, 612, 643, 694. Without a mask it makes no difference.
    (256, 256): Row(
        2,
        64,
        2,
        0,
        False,
        False,
        (48, 48),
        (48, 48),
        "two tiles of values and three of keys under way; O leaves from registers",
        k_ahead=1,
    ),
}

#: Rows where no mask cuts tiles. At S = 512, 1k, 4k, 16k this one reaches 525, 607, 699, 721 TFLOP/s on an H200 where
#: the other has 488, 579, 687, 720. With a causal mask it is the other way round: 318, 428, 589, 663 and 321, 429, 605,
#: 675.
_UNCUT = {
    (256, 256): replace(
        _TABLE[256, 256],
        q_by_consumer=True,
        ends_alone=True,
        reason="two tiles of values and three of keys; last values are multiplied while the next queries come",
    ),
}

#: Rows for masks that compare captured whole numbers along the sequence, as documents do.
_DOCUMENTS = {
    (64, 64): Row(
        2,
        128,
        3,
        1,
        True,
        True,
        (80, 64),
        (112, 96),
        "smaller tiles of queries, as documents cut most tiles, and scores kept, which they leave room for",
    ),
}

#: Keys of a tile with a softcap. At head_dim 256 they are more than without one, where exponentials hold them longer:
#: without a mask 700 to 713 TFLOP/s at 8k on an H200 where 64 have 654.
_CAPPED_KV = {(256, 256): 80}
#: And where the cap may be any, as many as leave registers for a second way in which tangents are computed beside the
#: polynomial. At head_dim 192 without a mask 96 had 600 TFLOP/s at 8k where 112 have 628, at 64 393 where 128 have 416.
_ANY_CAP_KV = {**_CAPPED_KV, (64, 64): 96, (192, 128): 96, (192, 192): 80}

#: Keys of a tile where the mask asks something of one pair after another: few operations, and more.
_ASKED_KV = {(64, 64): (96, 64), (96, 96): (96, 96), (128, 128): (96, 80), (192, 128): (96, 80)}
_FEW_ASKED = 6
#: And where all else has turned out to need more registers than there are.
_LEAST_KV = {(256, 256): 48}
_LEAST_KV_OF_OTHERS = 64

_REASON_LOOKED_UP = "smaller tiles of keys, as what a mask looks up for each pair takes registers"
_REGISTERS_LOOKED_UP = (88, 208)
#: Rows for masks that look something up for each pair, as patterns of blocks do: also for whole tiles, which takes
#: a producer registers. At head_dim 64 those spill with 96 keys that have a pattern for each head or a window besides;
#: at 8k, with 3 of 10 blocks of 64 allowed, 80 have 267 TFLOP/s on an H200 where 96 have 277. Wider heads than here
#: leave a pattern no registers at all.
_LOOKED_UP = {
    (64, 64): Row(
        2,
        80,
        3,
        1,
        True,
        True,
        (48, 48),
        (48, 48),
        "smaller tiles of queries and keys, as what a mask looks up for each pair takes registers",
        registers=_REGISTERS_LOOKED_UP,
    ),
    **{
        dims: replace(
            _TABLE[dims],
            tile_kv=tile_kv,
            tile_kv_reading=(tile_kv - 16, tile_kv - 16),
            registers=_REGISTERS_LOOKED_UP,
            reason=_REASON_LOOKED_UP,
        )
        for dims, tile_kv in (((96, 96), 80), ((128, 128), 80), ((192, 128), 64))
    },
}


def least_tile_kv(spec: AttentionSpec) -> int:
    """As few keys for a tile as are worth planning; with fewer the kernel for all GPUs is as good."""
    return _LEAST_KV.get((spec.head_dim, spec.head_dim_v), _LEAST_KV_OF_OTHERS)


def _row_by_mask(spec: AttentionSpec) -> Row:
    """The row of the table that is for masks of this kind."""
    dims = spec.head_dim, spec.head_dim_v
    if dims in _DOCUMENTS and compares_documents(spec):
        return _DOCUMENTS[dims]
    if dims in _UNCUT and not looks_through(spec):
        return _UNCUT[dims]
    return _TABLE[dims]


def row_of(spec: AttentionSpec) -> Row:
    """The row of the table, with what the mask and the score take of its registers."""
    dims = spec.head_dim, spec.head_dim_v
    if dims in _LOOKED_UP and looks_up_pairs(spec):
        row = _LOOKED_UP[dims]
        return replace(row, tile_kv=row.tile_kv_reading[1]) if pair_loads(spec) else row
    row = _row_by_mask(spec)
    narrow = row.consumers == 3
    if is_listed(spec):
        # The producer looks at tiles of keys for everyone, and needs registers for it.
        registers = (56, 152) if narrow else (56, 224)
        tile_kv = row.tile_kv
        asked = asked_of_pairs(spec)
        if asked and dims in _ASKED_KV:
            tile_kv = _ASKED_KV[dims][asked > _FEW_ASKED]
        elif narrow:
            tile_kv = 112 if compares_little(spec) else 96
        row = replace(row, registers=registers, tile_kv=tile_kv)
    elif narrow and not is_lean(spec):
        row = replace(row, tile_kv=112)
    if is_capped(spec):
        # How far rows can have grown is known before exponentials are taken, so that no scores are computed twice.
        usual = row.tile_kv == _TABLE[dims].tile_kv and not is_listed(spec)
        is_fine = has_fine_cap(spec)
        tile_kv = (_CAPPED_KV if is_fine else _ANY_CAP_KV).get(dims, row.tile_kv)
        # Kept, they are looked at while exponentials are taken of them: on an H200 at head_dim 128 without a mask 4 to
        # 6 % more (555 to 580 TFLOP/s at 8k beside 534 to 537), causal at 16k 2 % (529 and 519).
        # Three warpgroups have no registers for both.
        keeps = row.keeps_scores and is_fine and not is_listed(spec) and not narrow
        row = replace(row, keeps_scores=keeps, tile_kv=tile_kv if usual else min(row.tile_kv, tile_kv))
    elif row.keeps_scores and spec.score is not None and spec.score.traced.tensors and not is_lean(spec):
        row = replace(row, tile_kv=min(row.tile_kv, 112))
    if loads := pair_loads(spec):
        comes_ahead = all_ahead(spec, loads)
        tiles = row.tile_kv_ahead if comes_ahead else row.tile_kv_reading
        row = replace(row, tile_kv=min(row.tile_kv, tiles[is_listed(spec)]))
        if comes_ahead and spec.mask.is_full and adds_two_bytes(spec, loads):
            row = replace(row, tile_kv=row.tile_kv_few or row.tile_kv)
    return row


def chosen_row(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> Row:
    """The row as a schedule would have it."""
    row = row_of(spec)
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
    return next((r for r in _roomier(row) if smem_of(spec, r).bytes <= arch.max_smem_per_block), row)


def _roomier(row: Row) -> Iterator[Row]:
    yield row
    row = replace(row, k_ahead=0)
    yield row
    yield replace(row, q_ahead=0)
    yield replace(row, q_ahead=0, o_tile=False)


def fault_of(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> str | None:
    """What is wrong with the tiles, in a sentence."""
    row = chosen_row(spec, schedule, arch)
    if row.consumers not in _CONSUMERS or schedule.tile_q not in (None, row.tile_q):
        return f"tile_q={schedule.tile_q or row.tile_q} is not 64 rows for each of 2 or 3 consumers; use 128 or 192."
    described = f"tile_q={row.tile_q}, tile_kv={row.tile_kv}, stages={row.stages}"
    producer, consumer = row.split()
    accumulators = row.tile_kv // 2 + row.tile_kv // 4 + spec.head_dim_v // 2
    needed = smem_of(spec, row).bytes
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


def smem_of(spec: AttentionSpec, row: Row) -> SmemMap:
    """What lies where in a block's shared memory."""
    dim, dim_v = row_bytes(spec)
    layout = SmemLayout()
    layout.then("q", row.q_slots * row.q_rows * dim, f"Q_i, {row.q_slots} slots of {row.q_rows} rows")
    layout.then("k", row.k_slots * row.tile_kv * dim, f"K_j, {row.k_slots} slots")
    layout.then("v", row.stages * row.tile_kv * dim_v, f"V_j, {row.stages} slots")
    if row.o_tile:
        layout.then("o", row.tile_q * dim_v, "O_i, on its way out")
    layout.then("q_barriers", 16 * row.q_slots, "for each slot: it is full, it is empty")
    layout.then("k_barriers", 16 * row.k_slots)
    layout.then("v_barriers", 16 * row.stages)
    layout.then("tile_barriers", 16 * TILE_SLOTS)
    layout.then("tiles", 16 * TILE_SLOTS, "which tiles of queries come next")
    if looks_through(spec) and not is_listed(spec):
        layout.then("reaches", 32 * row.consumers * TILE_SLOTS, "and where each consumer's keys lie")
    if is_listed(spec):
        layout.then("listed_keys", 8 * row.k_slots, "which tiles of keys the slots hold")
    if looks_through(spec):
        layout.then("looked_through", 8 * row.stages, "V_j has no bad values any more")
        layout.then("found_bad", 16 * row.stages, "and when it had some")
    return layout.map()


def looks_through(spec: AttentionSpec) -> bool:
    """Whether tiles can be cut, so that V is looked through for values that must not spread."""
    return not spec.mask.is_full
