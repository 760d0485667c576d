"""The tiles of the forward kernel for Hopper: the row of the schedule table for a spec, and the resources it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.arch import Arch
from flashgen.plan.hopper.forward_table import (
    EIGHT_BITS,
    EIGHT_BITS_THREE_CONSUMERS,
    FALLBACK_TILE_KV,
    FEW_MASK_OPS,
    MASK_LOADS,
    MASK_OPS_TILE_KV,
    TABLE,
    TWO_CONSUMERS,
    Row,
)
from flashgen.plan.hopper.forward_traits import (
    all_prefetched,
    changes_scores,
    compares_documents,
    compares_few_keys,
    is_16bit_bias,
    mask_loads_per_pair,
    mask_ops_per_pair,
    score_is_light,
    score_loads_per_pair,
)
from flashgen.plan.hopper.units import (
    ROWS,
    STEP,
    STEP_BYTES,
    TILE_STAGES,
    WARPGROUP,
    is_block_sparse,
    panel_bytes,
    registers_at_launch,
    row_bytes,
)
from flashgen.plan.model.plans import SmemMap
from flashgen.plan.model.smem import SmemLayout
from flashgen.spec import AttentionSpec, Schedule

#: Products of more columns of 8-bit values are computed in two parts.
_PARTED_VALUES = 128
#: Up to this many columns of 8-bit values, every mask and score leaves registers to overlap steps.
_NARROW_VALUES = 64
#: Registers that a thread needs besides accumulators, for 16 and for 8 bits.
_OTHER_REGISTERS, _OTHER_REGISTERS_EIGHT_BITS = 30, 24
#: The same for a cache: where its rows lie, and their scales.
_OTHER_REGISTERS_CACHED = 40
_CONSUMERS = (2, 3)
#: Barriers and the slots that announce tiles are aligned to this.
_WORD = 16
#: Four lanes share a row. Each has a 32-bit word with a bit for each of its keys.
_MAX_TILE_KV = 4 * 32


def table_dims(spec: AttentionSpec) -> tuple[int, int]:
    """The head dims of the table by which a spec is planned: the next ones that are large enough."""
    return next(dims for dims in sorted(TABLE) if dims[0] >= spec.head_dim and dims[1] >= spec.head_dim_v)


def _row_by_mask(spec: AttentionSpec) -> Row:
    """The row for the head dims and the kind of mask."""
    dims = table_dims(spec)
    if spec.element.is_eight_bit:
        return EIGHT_BITS_THREE_CONSUMERS[dims] if _has_three_eight_bit_consumers(spec) else EIGHT_BITS[dims]
    if dims in TWO_CONSUMERS and (compares_documents(spec) or spec.dropout or spec.has_own_lengths):
        return TWO_CONSUMERS[dims]
    return TABLE[dims]


def _has_three_eight_bit_consumers(spec: AttentionSpec) -> bool:
    takes_registers = is_block_sparse(spec) or spec.score is not None or spec.has_own_lengths or spec.scale_block
    return table_dims(spec) in EIGHT_BITS_THREE_CONSUMERS and not takes_registers


def fallback_tile_kv(spec: AttentionSpec) -> int:
    """``tile_kv`` if the assembler runs out of registers."""
    return _in_whole_steps(spec, FALLBACK_TILE_KV[table_dims(spec)])


def row_of(spec: AttentionSpec) -> Row:
    """The row for a spec, adapted to the registers that its mask and its score take, and to its scales."""
    row = _row_by_registers(spec)
    is_bounded = not spec.mask.is_full or spec.varlen or spec.score is not None
    if eight_bits_overlap(spec, row.consumers) and is_bounded and row.tile_kv_bounded is not None:
        row = replace(row, tile_kv=min(row.tile_kv, row.tile_kv_bounded))
    while spec.element.is_eight_bit and row.tile_kv > STEP_BYTES and not _fits_registers(spec, row):
        row = replace(row, tile_kv=row.tile_kv - STEP_BYTES)
    return replace(row, tile_kv=_in_whole_steps(spec, row.tile_kv))


def _in_whole_steps(spec: AttentionSpec, tile_kv: int) -> int:
    """At most so many keys: whole steps of P V whose keys have one scale."""
    if not spec.element.is_eight_bit:
        return tile_kv
    steps = range(tile_kv // STEP_BYTES * STEP_BYTES, 0, -STEP_BYTES)
    return next(keys for keys in steps if (spec.scale_block or keys) % keys == 0)


def _row_by_registers(spec: AttentionSpec) -> Row:
    dims = table_dims(spec)
    if dims in MASK_LOADS and mask_loads_per_pair(spec):
        row = MASK_LOADS[dims]
        return replace(row, tile_kv=row.tile_kv_pair_loads[1]) if score_loads_per_pair(spec) else row
    row = _row_by_mask(spec)
    narrow = row.consumers == 3
    if is_block_sparse(spec):
        # Producers evaluate the mask for each tile of keys, which takes registers. So do the pages they look up.
        registers = (56, 152) if narrow else (88, 208) if spec.cache == "paged" else (56, 224)
        tile_kv = row.tile_kv
        asked = mask_ops_per_pair(spec)
        if asked and dims in MASK_OPS_TILE_KV:
            tile_kv = MASK_OPS_TILE_KV[dims][asked > FEW_MASK_OPS]
        elif narrow:
            tile_kv = 112 if compares_few_keys(spec) else 96
        row = replace(row, registers=registers, tile_kv=tile_kv)
    elif spec.cache:
        # The first warpgroup counts tiles and looks pages up, which takes registers.
        row = replace(row, registers=(56, 224))
    elif narrow and not score_is_light(spec):
        row = replace(row, tile_kv=112)
    if spec.score is not None and spec.score.traced.tensors and not score_is_light(spec):
        row = replace(row, tile_kv=min(row.tile_kv, 112))
    if loads := score_loads_per_pair(spec):
        if narrow and spec.mask.has_lower and not is_block_sparse(spec):
            # The producer computes which tiles the two bounds of a band cut.
            row = replace(row, registers=(40, 152), tile_kv=64)
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
    yield replace(row, q_stages=1)
    yield replace(row, q_stages=1, stores_by_tma=False)


def fault_of(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> str | None:
    """Why the schedule's tiles cannot be planned, in a sentence; None if they can."""
    row = chosen_row(spec, schedule, arch)
    if row.consumers not in _CONSUMERS or schedule.tile_q not in (None, row.tile_q):
        return f"tile_q={schedule.tile_q or row.tile_q} is not 64 rows for each of 2 or 3 consumers; use 128 or 192."
    if row.tile_kv > _MAX_TILE_KV:
        return f"tile_kv={row.tile_kv} is more keys than a row's four lanes have bits for; use {_MAX_TILE_KV} or fewer."
    described = f"tile_q={row.tile_q}, tile_kv={row.tile_kv}, stages={row.stages}"
    if row.tile_kv != _in_whole_steps(spec, row.tile_kv):
        scales = f" and divide scale_block={spec.scale_block}" if spec.scale_block else ""
        return f"tile_kv={row.tile_kv} must be a multiple of {STEP_BYTES}{scales}; use {row_of(spec).tile_kv}."
    producer, consumer = row.register_split()
    accumulators = _accumulators(spec, row)
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
    if not _fits_registers(spec, row):
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


def _fits_registers(spec: AttentionSpec, row: Row) -> bool:
    others = _OTHER_REGISTERS_EIGHT_BITS if spec.element.is_eight_bit else _OTHER_REGISTERS
    if spec.cache_dtype and eight_bits_overlap(spec, row.consumers):
        others = _OTHER_REGISTERS_CACHED
    return _accumulators(spec, row) + others <= row.register_split()[1]


def value_parts(spec: AttentionSpec) -> int:
    """In how many parts, each of some columns, the product with V is computed."""
    return 2 if spec.element.is_eight_bit and spec.head_dim_v > _PARTED_VALUES else 1


def eight_bits_overlap(spec: AttentionSpec, consumers: int) -> bool:
    """Whether S of the next step has registers beside an 8-bit product and O.

    Scores, and masks other than a band, take them, unless heads are narrow. Without a mask, three consumers overlap
    each other's steps instead.
    """
    if spec.mask.is_full and consumers > 2:
        return False
    narrow, wide = spec.head_dim_v <= _NARROW_VALUES, value_parts(spec) > 1
    takes_registers = wide or (not narrow and (is_block_sparse(spec) or changes_scores(spec)))
    return spec.element.is_eight_bit and not takes_registers


def _accumulators(spec: AttentionSpec, row: Row) -> int:
    """Registers per thread of S, P and O, and for 8 bits of the product that is added to O."""
    scores, probabilities, out = row.tile_kv // 2, row.tile_kv * spec.element.bytes // 8, spec.head_dim_v // 2
    if not spec.element.is_eight_bit:
        return scores + probabilities + out
    if eight_bits_overlap(spec, row.consumers):
        return probabilities + out + scores + out
    # S and the product share registers (eight_bit_values.cuh).
    return probabilities + out + max(scores, out // value_parts(spec))


def smem_of(spec: AttentionSpec, row: Row) -> SmemMap:
    """The layout of a block's shared memory."""
    dim, dim_v = row_bytes(spec)
    eight_bits = spec.element.is_eight_bit
    layout = SmemLayout()
    layout.then("q", row.q_stages * row.tile_q * dim, f"Q_i, {row.q_stages} stages")
    layout.then("k", row.stages * row.tile_kv * dim, f"K_j, {row.stages} stages")
    layout.then("v", row.stages * row.tile_kv * dim_v, f"V_j, {row.stages} stages")
    if eight_bits:
        values = -(-spec.head_dim_v // STEP) * STEP
        layout.then("transposed_v", row.stages * values * panel_bytes(row.tile_kv, 1), "V_j^T, as products read it")
    if row.stores_by_tma:
        layout.then("o", row.tile_q * panel_bytes(spec.head_dim_v, spec.out_element.bytes), "O_i, to be stored")

    def word(name: str, size: int, note: str = "") -> None:
        layout.then(name, size, note, alignment=_WORD)

    word("q_barriers", 16 * row.q_stages, "full and empty barriers of each stage")
    word("k_barriers", 16 * row.stages)
    word("v_barriers", 16 * row.stages)
    if eight_bits:
        word("transposed_v_barriers", 16 * row.stages)
        word("ends_of_v", 4 * row.stages, "which stage of V ends the work of the transposers")
    word("tile_barriers", 16 * TILE_STAGES)
    word("tiles", (48 if spec.has_own_lengths else 32) * TILE_STAGES, "the next tiles of queries")
    if is_block_sparse(spec):
        word("messages", 8 * row.stages, "the block of keys in each stage of K")
    word("checks", _checks_bytes(row), "which tiles are to be repeated (tile_checks.cuh)")
    return layout.map()


def _checks_bytes(row: Row) -> int:
    """sizeof(TileChecks)."""
    tiles = TILE_STAGES
    return -(-(8 + tiles * (4 + 4 * row.consumers + 4) + 8) // 8) * 8
