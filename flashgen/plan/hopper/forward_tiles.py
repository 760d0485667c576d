"""The tiles of the forward kernel for Hopper: the row of the schedule table for a spec, and the resources it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.arch import Arch
from flashgen.plan.hopper.forward_table import (
    ANY_SOFTCAP_TILE_KV,
    DOCUMENTS,
    FEW_MASK_OPS,
    MASK_LOADS,
    MASK_OPS_TILE_KV,
    NO_MASK,
    SOFTCAP_TILE_KV,
    TABLE,
    Row,
)
from flashgen.plan.hopper.forward_traits import (
    all_prefetched,
    compares_documents,
    compares_few_keys,
    has_fine_cap,
    is_16bit_bias,
    is_capped,
    mask_loads_per_pair,
    mask_ops_per_pair,
    score_is_light,
    score_loads_per_pair,
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
#: Four lanes share a row. Each has a 32-bit word with a bit for each of its keys.
_MAX_TILE_KV = 4 * 32


def _row_by_mask(spec: AttentionSpec) -> Row:
    """The row for the head dims and the kind of mask."""
    dims = spec.head_dim, spec.head_dim_v
    if dims in DOCUMENTS and compares_documents(spec):
        return DOCUMENTS[dims]
    if dims in NO_MASK and not has_mask(spec):
        return NO_MASK[dims]
    return TABLE[dims]


def row_of(spec: AttentionSpec) -> Row:
    """The row for a spec, adapted to the registers that its mask and its score take."""
    dims = spec.head_dim, spec.head_dim_v
    if dims in MASK_LOADS and mask_loads_per_pair(spec):
        row = MASK_LOADS[dims]
        return replace(row, tile_kv=row.tile_kv_pair_loads[1]) if score_loads_per_pair(spec) else row
    row = _row_by_mask(spec)
    narrow = row.consumers == 3
    if is_block_sparse(spec):
        # The producer evaluates the mask for each tile of keys, which takes registers.
        registers = (56, 152) if narrow else (56, 224)
        tile_kv = row.tile_kv
        asked = mask_ops_per_pair(spec)
        if asked and dims in MASK_OPS_TILE_KV:
            tile_kv = MASK_OPS_TILE_KV[dims][asked > FEW_MASK_OPS]
        elif narrow:
            tile_kv = 112 if compares_few_keys(spec) else 96
        row = replace(row, registers=registers, tile_kv=tile_kv)
    elif narrow and not score_is_light(spec):
        row = replace(row, tile_kv=112)
    if is_capped(spec):
        # The cap bounds how far row maxima can grow, so no scores are recomputed.
        has_table_width = row.tile_kv == TABLE[dims].tile_kv and not is_block_sparse(spec)
        is_fine = has_fine_cap(spec)
        tile_kv = (SOFTCAP_TILE_KV if is_fine else ANY_SOFTCAP_TILE_KV).get(dims, row.tile_kv)
        # Kept scores can be inspected while exponentials are taken of them. On an H200 at head_dim 128 this gains
        # 4 to 6 % without a mask (8k), and 2 % causal (16k). Three consumers have no registers for it.
        keeps = row.keeps_scores and is_fine and not is_block_sparse(spec) and not narrow
        row = replace(row, keeps_scores=keeps, tile_kv=tile_kv if has_table_width else min(row.tile_kv, tile_kv))
    elif row.keeps_scores and spec.score is not None and spec.score.traced.tensors and not score_is_light(spec):
        row = replace(row, tile_kv=min(row.tile_kv, 112))
    if loads := score_loads_per_pair(spec):
        if narrow and spec.mask.has_lower and not is_block_sparse(spec):
            # The producer computes which tiles the two bounds of a band cut.
            row = replace(row, registers=(40, 152))
        is_prefetched = all_prefetched(spec, loads)
        tiles = row.tile_kv_prefetched if is_prefetched else row.tile_kv_pair_loads
        row = replace(row, tile_kv=min(row.tile_kv, tiles[is_block_sparse(spec)]))
        if is_prefetched and spec.mask.is_full and is_16bit_bias(spec, loads):
            row = replace(row, tile_kv=row.tile_kv_16bit_bias or row.tile_kv)
    return row


def chosen_row(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> Row:
    """The row of a spec, overridden by what the schedule sets."""
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
    # Drop optional buffers, one after another, until the schedule's tiles fit.
    return next((r for r in _smaller_buffers(row) if smem_of(spec, r).bytes <= arch.max_smem_per_block), row)


def _smaller_buffers(row: Row) -> Iterator[Row]:
    yield row
    row = replace(row, records_per_slot=False)
    yield row
    row = replace(row, extra_k_slots=0)
    yield row
    yield replace(row, extra_q_slots=0)
    yield replace(row, extra_q_slots=0, o_tile=False)


def fault_of(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> str | None:
    """Why the schedule's tiles cannot be planned, in a sentence; None if they can."""
    row = chosen_row(spec, schedule, arch)
    if row.consumers not in _CONSUMERS or schedule.tile_q not in (None, row.tile_q):
        return f"tile_q={schedule.tile_q or row.tile_q} is not 64 rows for each of 2 or 3 consumers; use 128 or 192."
    if row.tile_kv > _MAX_TILE_KV:
        return f"tile_kv={row.tile_kv} is more keys than a row's four lanes have bits for; use {_MAX_TILE_KV} or fewer."
    described = f"tile_q={row.tile_q}, tile_kv={row.tile_kv}, stages={row.stages}"
    producer, consumer = row.register_split()
    accumulators = row.tile_kv // 2 + row.tile_kv // 4 + spec.head_dim_v // 2
    needed = smem_of(spec, row).bytes
    if row.stages < 2:
        return f"{described} leaves no tile to copy into while another is used; use stages=2 or more."
    at_launch = registers_at_launch(row.consumers + 1)
    available = WARPGROUP * (row.consumers + 1) * at_launch
    if WARPGROUP * (producer + row.consumers * consumer) > available:
        return (
            f"registers={(producer, consumer)} for 1 producer and {row.consumers} consumers are more than the "
            f"{available} that a block begins with; use {replace(row, registers=None).register_split()}."
        )
    if not producer <= at_launch <= consumer:
        return (
            f"registers={(producer, consumer)} cannot be made of the {at_launch} that all warps begin with; "
            f"use {replace(row, registers=None).register_split()}."
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
        layout.then("o", row.tile_q * dim_v, "O_i, to be stored")
    if has_mask(spec):
        layout.then("scrubber", _scrubber_bytes(spec, row), "non-finite values of V_j, as bits")

    def word(name: str, size: int, note: str = "") -> None:
        layout.then(name, size, note, alignment=_WORD)

    word("q_barriers", 16 * row.q_slots, "full and empty barriers of each slot")
    word("k_barriers", 16 * row.k_slots)
    word("v_barriers", 16 * row.stages)
    word("tile_barriers", 16 * TILE_SLOTS)
    word("tiles", 16 * TILE_SLOTS, "the next tiles of queries")
    if has_mask(spec) and not is_block_sparse(spec):
        word("key_block_ranges", 32 * row.consumers * TILE_SLOTS, "the range of key tiles of each consumer")
    if is_block_sparse(spec):
        word("sparse_key_tiles", 8 * row.k_slots, "the tile of keys in each slot")
    if has_mask(spec):
        warps = 4 * row.consumers
        recomputes = 8 * (warps + 2) + 4 * warps + 4 * 4 * TILE_SLOTS + 8
        word("recomputes", recomputes, "tiles of queries to recompute if V is not finite")
    return layout.map()


def _scrubber_bytes(spec: AttentionSpec, row: Row) -> int:
    """sizeof(Scrubber): a bit for each value of V_j, and barriers (scrubber.cuh)."""
    # Per lane and column of eight: 2 or 4 bytes of key bits, rounded to 16-byte chunks. 80 keys take 4 bits more.
    eights = spec.head_dim_v // 8
    lane = -(-eights * (4 if row.tile_kv > 80 else 2) // 16) * 16
    more = -(-eights // 8) * 4 if 64 < row.tile_kv <= 80 else 0
    non_finite_records = record_count(row)
    needed = non_finite_records * (32 * (lane + more) + 16 + 4) + 8 * 2 * row.stages + 4 + row.stages
    return -(-needed // 16) * 16


def record_count(row: Row) -> int:
    """How many records of non-finite values a block has: one per slot of V, or one for all."""
    return row.stages if row.records_per_slot else 1


def has_mask(spec: AttentionSpec) -> bool:
    """Whether a mask can cut tiles. NaN or infinity in V must then not reach rows that may not attend to it."""
    return not spec.mask.is_full
