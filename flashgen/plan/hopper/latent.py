"""Planning the latent kernel for Hopper: values that are part of the keys, by wgmma and TMA."""

from __future__ import annotations

from flashgen.arch import Arch
from flashgen.plan.cache import DECODE
from flashgen.plan.decode.config import COUNTERS, decode_config
from flashgen.plan.hopper.units import PANEL, ROWS, row_bytes, why_not_hopper
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import LATENT_SM90
from flashgen.plan.model.plans import Box, Constant, KernelPlan, SmemMap
from flashgen.plan.model.smem import SmemLayout
from flashgen.spec import AttentionSpec, Schedule

#: Two warpgroups compute. The warps of a third copy.
_WARPS, _PRODUCERS = 8, 4
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
#: Keys of a tile. A product of fewer would wait for Q, which it reads from shared memory.
_KEYS = 64
_STAGES = 2
#: A warpgroup has half of the columns of O: whole panels.
_COLUMN_STEP = 2 * PANEL
#: Floating-point operations that an H200's multiprocessor does in a nanosecond by wgmma, measured. A multiply-add
#: counts as two.
_PRODUCT_RATE = 4500
#: Fixed cost of an item, as bytes that arrive meanwhile: 8 tiles. With 2, a ragged batch took 1.7 times as long: blocks
#: with short sequences had too many of them.
_ITEM_BYTES = 512 * 1024
#: Rings of K, of the halves of V, and of P.
_RINGS = 4
#: The scheduler's state, and per row a total and, of each warpgroup, a reference maximum and a sum.
_SCHEDULER_BYTES = 1024
_ROW_BYTES = 8 + 2 * 4 + 2 * 4


def why_not_latent_by_tma(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> str | None:
    """Why this kernel does not take a spec, as a clause; None if it does."""
    if (reason := why_not_hopper(spec, schedule, arch, access_bytes, takes_cache=True)) is not None:
        return reason
    if spec.head_dim_v % _COLUMN_STEP:
        return (
            f"two warpgroups split V in whole panels of {PANEL} columns, so head_dim_v must be a multiple of "
            f"{_COLUMN_STEP}, and it is {spec.head_dim_v}"
        )
    return None


def plan_latent_sm90(spec: AttentionSpec, arch: Arch) -> KernelPlan:
    """The kernel for any number of new queries, which bring a second query for the values."""
    smem = _smem_of(spec)
    products = 2 * ROWS * _KEYS * (spec.head_dim + 2 * spec.head_dim_v)
    within_pages = spec.cache == "paged"
    return KernelPlan(
        name=kernel_name(spec, DECODE, arch),
        pass_="forward",
        role=DECODE,
        algorithm="Flash-Decoding of latent attention",
        template="hopper/latent.cu.j2",
        spec=spec,
        arch=arch,
        threads=32 * (_WARPS + _PRODUCERS),
        config_type="DecodeConfig",
        config=decode_config(
            spec,
            rows=ROWS,
            keys=_KEYS,
            stages=_STAGES,
            warps=Constant("warps", _WARPS, "two warpgroups that split the columns of O and take turns at S"),
            access_bytes=16,
            tile_bytes=(smem["k"].bytes + smem["v"].bytes) // _STAGES,
            item_bytes=_ITEM_BYTES,
            product_time=products / _PRODUCT_RATE,
            producers=_PRODUCERS,
            registers=(_PRODUCER_REGISTERS, _CONSUMER_REGISTERS),
        ),
        params=LATENT_SM90,
        smem=smem,
        grid_tile=_KEYS,
        grid_over="kv",
        grid_heads="kv",
        access_bytes=16,
        is_persistent=True,
        overlaps_predecessor=True,
        counters=COUNTERS,
        # No L2 promotion: boxes are whole rows of panels, so nothing beside them is left to read.
        boxes=tuple(Box(tensor, _KEYS, PANEL, within_pages=within_pages, l2_promotion=0) for tensor in "kv"),
        product_columns=(_KEYS, spec.head_dim_v // 2),
        reasons=(
            f"O of {ROWS} rows takes {ROWS * spec.head_dim_v // 256} registers of each thread where two warpgroups "
            "split its columns; they take turns at S and exchange P through shared memory",
            f"each key is read once for {ROWS} rows, and {_STAGES} stages hold {_KEYS} keys each",
            "this kernel alone takes qv, also for long prompts",
        ),
    )


def _smem_of(spec: AttentionSpec) -> SmemMap:
    dim, dim_v = row_bytes(spec)
    layout = SmemLayout()
    # Swizzled tiles begin at multiples of 1,024 bytes.
    layout.then("q", ROWS * dim, "Q, all rows of an item")
    layout.then("qv", ROWS * dim_v, "Qv")
    layout.then("k", _STAGES * _KEYS * dim, f"K_j, {_STAGES} stages")
    layout.then("v", _STAGES * _KEYS * dim_v, f"V_j, {_STAGES} stages of two halves of the columns")
    layout.then("p", ROWS * _KEYS * spec.element.bytes, "P of the tile")
    layout.then("barriers", _RINGS * 16 * _STAGES, "of the rings of K_j, of the halves of V_j, and of P")
    layout.then("shared", _SCHEDULER_BYTES + ROWS * _ROW_BYTES, "what the threads exchange")
    return layout.map()
