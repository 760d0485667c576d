"""Planning the latent kernel: a cache whose values are part of the keys, and too wide for the registers of a warp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.cache import DECODE
from flashgen.plan.decode.config import COUNTERS, decode_config
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import LATENT_FORWARD
from flashgen.plan.model.plans import Constant, KernelPlan, SmemMap
from flashgen.plan.model.smem import SmemLayout
from flashgen.plan.portable.forward import copies_asynchronously
from flashgen.spec import AttentionSpec, Schedule

#: Rows of one product by tensor cores, and columns that a warp has of O at least.
_ROW_BLOCK = _COLUMN_STEP = 16
#: Rows and keys of a tile, and warps that share it, the best first. Every key is read once for all rows of a tile.
_CANDIDATES = ((64, 64, 8), (64, 32, 8), (32, 32, 4), (32, 16, 4))
#: Registers of a thread for O: more leave too few for scores and addresses.
_MAX_OUTPUT_REGISTERS = 128
_MAX_STAGES = 4
#: Floating-point operations that an H200's multiprocessor does in a nanosecond by mma.sync, measured. A multiply-add
#: counts as two.
_PRODUCT_RATE = 1800
#: The scheduler's state. `_shared_bytes` adds what is kept for each row and warp.
_SCHEDULER_BYTES = 256
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """Rows and keys of a tile, warps and stages."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def key_warps(self) -> int:
        """Warps that have the scores of the same rows, each for keys of its own."""
        return self.warps * _ROW_BLOCK // self.rows


def check_latent(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> None:
    """Raises PlanError if no kernel takes such a spec."""
    if schedule != Schedule():
        raise PlanError("qv=True has one schedule; leave the schedule out.")
    if not arch.has_cp_async:
        raise PlanError(
            f"qv=True needs asynchronous copies of sm_80 or later, and arch={arch.name!r} has none; "
            "use arch='sm_80' or later."
        )
    if not copies_asynchronously(arch, access_bytes):
        raise PlanError(
            f"qv=True needs rows aligned to 4 bytes, and access_bytes={access_bytes}; pass contiguous arrays, or views "
            "that begin at an even column."
        )


def plan_latent(spec: AttentionSpec, arch: Arch, access_bytes: int, why_not_hopper: str) -> KernelPlan:
    """The kernel for any number of new queries, which bring a second query for the values.

    ``why_not_hopper``: why Hopper's kernel does not take the spec, as a clause.
    """
    tiles = latent_tiles(spec, arch)
    products = 2 * tiles.rows * tiles.keys * (spec.head_dim + 2 * spec.head_dim_v)
    return KernelPlan(
        name=kernel_name(spec, DECODE, arch),
        pass_="forward",
        role=DECODE,
        algorithm="Flash-Decoding of latent attention",
        template="decode/latent.cu.j2",
        spec=spec,
        arch=arch,
        threads=32 * tiles.warps,
        config_type="DecodeConfig",
        config=decode_config(
            spec,
            rows=tiles.rows,
            keys=tiles.keys,
            stages=tiles.stages,
            warps=Constant("warps", tiles.warps, "which split the columns of O between them"),
            access_bytes=access_bytes,
            tile_bytes=tiles.keys * (spec.head_dim + spec.head_dim_v) * spec.element.bytes,
            product_time=products / _PRODUCT_RATE,
        ),
        params=LATENT_FORWARD,
        smem=_smem_of(spec, tiles),
        grid_tile=tiles.keys,
        grid_over="kv",
        grid_heads="kv",
        access_bytes=access_bytes,
        is_persistent=True,
        counters=COUNTERS,
        reasons=(
            f"O of {tiles.rows} rows takes {_output_registers(spec, tiles.rows, tiles.warps)} registers of each thread "
            f"where {tiles.warps} warps split its columns; they exchange P through shared memory",
            f"each key is read once for {tiles.rows} rows, and {tiles.stages} stages hold {tiles.keys} keys each",
            "this kernel alone takes qv, also for long prompts",
            *((f"not by wgmma and TMA: {why_not_hopper}",) if arch.has_wgmma else ()),
        ),
    )


def latent_tiles(spec: AttentionSpec, arch: Arch) -> LatentTiles:
    """The first candidate that fits with two stages or more."""
    return next(_fitting(spec, arch))


def _fitting(spec: AttentionSpec, arch: Arch) -> Iterator[LatentTiles]:
    for rows, keys, warps in _CANDIDATES:
        if spec.head_dim_v % (_COLUMN_STEP * warps) or _output_registers(spec, rows, warps) > _MAX_OUTPUT_REGISTERS:
            continue
        one, two = (_smem_of(spec, LatentTiles(rows, keys, warps, stages)).bytes for stages in (1, 2))
        stages = min(_MAX_STAGES, 1 + (arch.max_smem_per_block - one) // (two - one))
        if stages >= 2:
            yield LatentTiles(rows, keys, warps, stages)


def _output_registers(spec: AttentionSpec, rows: int, warps: int) -> int:
    return rows * spec.head_dim_v // (32 * warps)


def _smem_of(spec: AttentionSpec, tiles: LatentTiles) -> SmemMap:
    size, ring = spec.element.bytes, f", {tiles.stages} stages"
    keys = tiles.stages * tiles.keys
    layout = SmemLayout()
    layout.then("q", tiles.rows * spec.head_dim * size, "Q")
    layout.then("qv", tiles.rows * spec.head_dim_v * size, "Qv")
    layout.then("k", keys * spec.head_dim * size, f"K_j{ring}")
    layout.then("v", keys * spec.head_dim_v * size, f"V_j{ring}")
    layout.then("p", tiles.rows * tiles.keys * size, "P of the tile")
    layout.then("shared", _shared_bytes(tiles), "what the threads exchange")
    return layout.map()


def _shared_bytes(tiles: LatentTiles) -> int:
    """The scheduler, with a count of each warp; of each row a total of two numbers, a factor and what each warp found;
    of each warp whether the mask cuts its keys."""
    return _SCHEDULER_BYTES + _FLOAT_BYTES * (tiles.rows * (3 + tiles.key_warps) + 2 * tiles.warps)
