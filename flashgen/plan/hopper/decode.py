"""Planning the decode kernel for Hopper: few new queries and a cache, by wgmma and TMA."""

from __future__ import annotations

from flashgen.arch import Arch
from flashgen.plan.cache import DECODE
from flashgen.plan.decode.config import COUNTERS, decode_config
from flashgen.plan.hopper.units import PANEL, ROWS, STEP, row_bytes, why_not_hopper
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import DECODE_SM90
from flashgen.plan.model.plans import Box, Constant, KernelPlan, SmemMap
from flashgen.plan.model.smem import SmemLayout
from flashgen.spec import AttentionSpec, Schedule

#: Two warpgroups compute. The warps of a third copy.
_WARPS, _PRODUCERS = 8, 4
#: By the largest head_dim + head_dim_v: keys of a tile, and registers of producers and consumers. Small heads get more
#: keys, because a step's latency does not depend on its tile. Larger tiles would leave short sequences too few of them.
#: Tiles of 128 keys need more producer registers for the loop over boxes.
_TILES = {128: (128, (56, 224)), 256: (64, (40, 232)), 512: (32, (40, 232))}
#: An even number, so that a stage belongs to one warpgroup.
_MAX_STAGES = 8
_RESULT_BYTES = 4
#: The scheduler's state, and per row a reference maximum and a sum: of each warp, and of the tile.
_SCHEDULER_BYTES = 1024
_TOTALS_BYTES = 8 * (16 * _WARPS + ROWS)


def why_not_decode_by_tma(spec: AttentionSpec, arch: Arch, access_bytes: int) -> str | None:
    """Why this kernel does not read the cache of a spec, as a clause; None if it does."""
    if (reason := why_not_hopper(spec, Schedule(), arch, access_bytes, takes_cache=True)) is not None:
        return reason
    if spec.cache_dtype is not None:
        # The products of 8-bit keys are exact in fp16, for which wgmma would need a converted copy in shared memory.
        return (
            f"wgmma would read {spec.cache_dtype} keys and values from shared memory, as TMA leaves them there; this "
            "kernel converts them to fp16 in registers"
        )
    return None


def plan_decode_sm90(spec: AttentionSpec, arch: Arch) -> KernelPlan:
    """The kernel for calls with a cache and few new queries."""
    columns = spec.head_dim + spec.head_dim_v
    keys, registers = next(tile for limit, tile in _TILES.items() if columns <= limit)
    stages = next(n for n in range(_MAX_STAGES, 0, -2) if _smem_of(spec, keys, n).bytes <= arch.max_smem_per_block)
    smem = _smem_of(spec, keys, stages)
    tile_bytes = (smem["k"].bytes + smem["v"].bytes) // stages
    under_way = stages * tile_bytes // 1024
    within_pages = spec.cache == "paged"
    return KernelPlan(
        name=kernel_name(spec, DECODE, arch),
        pass_="forward",
        role=DECODE,
        algorithm="Flash-Decoding",
        template="hopper/decode.cu.j2",
        spec=spec,
        arch=arch,
        threads=32 * (_WARPS + _PRODUCERS),
        config_type="DecodeConfig",
        config=decode_config(
            spec,
            rows=ROWS,
            keys=keys,
            stages=stages,
            warps=Constant("warps", _WARPS, "two warpgroups that take turns at the tiles"),
            access_bytes=16,
            tile_bytes=tile_bytes,
            producers=_PRODUCERS,
            registers=registers,
        ),
        params=DECODE_SM90,
        smem=smem,
        grid_tile=keys,
        grid_over="kv",
        grid_heads="kv",
        access_bytes=16,
        is_persistent=True,
        overlaps_predecessor=True,
        counters=COUNTERS,
        # No L2 promotion: a box's neighbors belong to other heads, which are read much later.
        boxes=tuple(Box(tensor, keys, PANEL, within_pages=within_pages, l2_promotion=0) for tensor in "kv"),
        product_columns=(keys, -(-spec.head_dim_v // STEP) * STEP),
        reasons=(f"four warps keep up to {under_way} KiB of keys and values under way, and two warpgroups take turns",),
    )


def _smem_of(spec: AttentionSpec, keys: int, stages: int) -> SmemMap:
    """The shared-memory map."""
    dim, dim_v = row_bytes(spec)
    padded_v = -(-spec.head_dim_v // 16) * 16
    layout = SmemLayout()
    # Swizzled tiles begin at multiples of 1,024 bytes.
    layout.then("q", ROWS * dim, "Q, all rows of an item")
    layout.then("k", stages * keys * dim, f"K_j, {stages} stages")
    layout.then("v", stages * keys * dim_v, f"V_j, {stages} stages")
    layout.then("barriers", 16 * stages, "of the ring of K_j and V_j")
    layout.then("shared", _SCHEDULER_BYTES + _TOTALS_BYTES, "what the threads exchange")
    layout.then("merge", ROWS * padded_v * _RESULT_BYTES, "O of all rows, once the loop is over")
    return layout.map()
