"""The tiles of the forward kernel for Hopper: the row of the schedule table for a spec, and the resources it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.arch import Arch
from flashgen.plan.hopper.forward_table import (
    ANY_CAP_KV,
    ASKED_KV,
    CAPPED_KV,
    DOCUMENTS,
    FEW_ASKED,
    LOOKED_UP,
    TABLE,
    UNCUT,
    Row,
)
from flashgen.plan.hopper.forward_traits import (
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
from flashgen.plan.hopper.units import ROWS, TILE_SLOTS, WARPGROUP, is_block_sparse, registers_at_launch, row_bytes
from flashgen.plan.model.plans import SmemMap
from flashgen.plan.model.smem import SmemLayout
from flashgen.spec import AttentionSpec, Schedule

#: Registers that a thread needs besides accumulators.
_OTHER_REGISTERS = 30
_CONSUMERS = (2, 3)
#: Barriers and the slots that announce tiles are aligned to this.
_WORD = 16
#: Four lanes share a row, and each has a word with a bit for each of its keys.
_MOST_KEYS = 4 * 32


def _row_by_mask(spec: AttentionSpec) -> Row:
    """The table's row for masks of this kind."""
    dims = spec.head_dim, spec.head_dim_v
    if dims in DOCUMENTS and compares_documents(spec):
        return DOCUMENTS[dims]
    if dims in UNCUT and not has_mask(spec):
        return UNCUT[dims]
    return TABLE[dims]


def row_of(spec: AttentionSpec) -> Row:
    """The table's row, adapted to the registers that the mask and the score take."""
    dims = spec.head_dim, spec.head_dim_v
    if dims in LOOKED_UP and looks_up_pairs(spec):
        row = LOOKED_UP[dims]
        return replace(row, tile_kv=row.tile_kv_reading[1]) if pair_loads(spec) else row
    row = _row_by_mask(spec)
    narrow = row.consumers == 3
    if is_block_sparse(spec):
        # The producer evaluates the mask for tiles of keys on behalf of all warps, which takes registers.
        registers = (56, 152) if narrow else (56, 224)
        tile_kv = row.tile_kv
        asked = asked_of_pairs(spec)
        if asked and dims in ASKED_KV:
            tile_kv = ASKED_KV[dims][asked > FEW_ASKED]
        elif narrow:
            tile_kv = 112 if compares_little(spec) else 96
        row = replace(row, registers=registers, tile_kv=tile_kv)
    elif narrow and not is_lean(spec):
        row = replace(row, tile_kv=112)
    if is_capped(spec):
        # How far rows can have grown is known before exponentials are taken, so that no scores are computed twice.
        usual = row.tile_kv == TABLE[dims].tile_kv and not is_block_sparse(spec)
        is_fine = has_fine_cap(spec)
        tile_kv = (CAPPED_KV if is_fine else ANY_CAP_KV).get(dims, row.tile_kv)
        # Kept, they are looked at while exponentials are taken of them: on an H200 at head_dim 128 without a mask 4 to
        # 6 % more (555 to 580 TFLOP/s at 8k beside 534 to 537), causal at 16k 2 % (529 and 519).
        # Three warpgroups have no registers for both.
        keeps = row.keeps_scores and is_fine and not is_block_sparse(spec) and not narrow
        row = replace(row, keeps_scores=keeps, tile_kv=tile_kv if usual else min(row.tile_kv, tile_kv))
    elif row.keeps_scores and spec.score is not None and spec.score.traced.tensors and not is_lean(spec):
        row = replace(row, tile_kv=min(row.tile_kv, 112))
    if loads := pair_loads(spec):
        if narrow and spec.mask.has_lower and not is_block_sparse(spec):
            # The producer computes which tiles the two sides of a band cut.
            row = replace(row, registers=(40, 152))
        comes_ahead = all_ahead(spec, loads)
        tiles = row.tile_kv_ahead if comes_ahead else row.tile_kv_reading
        row = replace(row, tile_kv=min(row.tile_kv, tiles[is_block_sparse(spec)]))
        if comes_ahead and spec.mask.is_full and adds_two_bytes(spec, loads):
            row = replace(row, tile_kv=row.tile_kv_few or row.tile_kv)
    return row


def chosen_row(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> Row:
    """The row with the values that a schedule sets."""
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
    # What the schedule asks for may leave no room for optional buffers.
    return next((r for r in _roomier(row) if smem_of(spec, r).bytes <= arch.max_smem_per_block), row)


def _roomier(row: Row) -> Iterator[Row]:
    yield row
    row = replace(row, notes_each=False)
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
    if row.tile_kv > _MOST_KEYS:
        return f"tile_kv={row.tile_kv} is more keys than a row's four lanes have bits for; use {_MOST_KEYS} or fewer."
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
    """The layout of a block's shared memory."""
    dim, dim_v = row_bytes(spec)
    layout = SmemLayout()
    layout.then("q", row.q_slots * row.q_rows * dim, f"Q_i, {row.q_slots} slots of {row.q_rows} rows")
    layout.then("k", row.k_slots * row.tile_kv * dim, f"K_j, {row.k_slots} slots")
    layout.then("v", row.stages * row.tile_kv * dim_v, f"V_j, {row.stages} slots")
    if row.o_tile:
        layout.then("o", row.tile_q * dim_v, "O_i, on its way out")
    if has_mask(spec):
        layout.then("scrubber", _scrubber_bytes(spec, row), "which values of a tile are not finite")

    def word(name: str, size: int, note: str = "") -> None:
        layout.then(name, size, note, alignment=_WORD)

    word("q_barriers", 16 * row.q_slots, "for each slot: it is full, it is empty")
    word("k_barriers", 16 * row.k_slots)
    word("v_barriers", 16 * row.stages)
    word("tile_barriers", 16 * TILE_SLOTS)
    word("tiles", 16 * TILE_SLOTS, "which tiles of queries come next")
    if has_mask(spec) and not is_block_sparse(spec):
        word("key_block_ranges", 32 * row.consumers * TILE_SLOTS, "and where each consumer's keys lie")
    if is_block_sparse(spec):
        word("sparse_key_tiles", 8 * row.k_slots, "which tiles of keys the slots hold")
    if has_mask(spec):
        warps = 4 * row.consumers
        recomputes = 8 * (warps + 2) + 4 * warps + 4 * 4 * TILE_SLOTS + 8
        word("recomputes", recomputes, "which tiles of queries non-finite values may have reached")
    return layout.map()


def _scrubber_bytes(spec: AttentionSpec, row: Row) -> int:
    """A bit for each value of a tile, and the state that the scrubbing warps share with the others."""
    # A lane has a word or half of one for its keys of every eighth column, rounded to chunks, or half of one and four
    # bits, of which a panel's are a word.
    eights = spec.head_dim_v // 8
    lane = -(-eights * (4 if row.tile_kv > 80 else 2) // 16) * 16
    more = -(-eights // 8) * 4 if 64 < row.tile_kv <= 80 else 0
    non_finite_records = records_of(row)
    needed = non_finite_records * (32 * (lane + more) + 16 + 4) + 8 * 2 * row.stages + 4 + row.stages
    return -(-needed // 16) * 16


def records_of(row: Row) -> int:
    """How many tiles of V have a record of their non-finite values."""
    return row.stages if row.notes_each else 1


def has_mask(spec: AttentionSpec) -> bool:
    """Whether a mask can cut tiles. V must then be searched for values that must not spread."""
    return not spec.mask.is_full
