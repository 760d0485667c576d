"""Planning the kernels of one block for each tile of queries (grid1d) and for each tile of scores (grid2d).

Both compute with floats in shared memory, without tensor cores.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.arch import Arch
from flashgen.plan.model.limits import Tiling, choose, smem_fault
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import FORWARD_GRID2D, FORWARD_GRID2D_COOPERATIVE, FORWARD_SCALED
from flashgen.plan.model.plans import Constant, KernelPlan, SmemMap, Workspace
from flashgen.plan.model.smem import SmemLayout
from flashgen.spec import AttentionSpec, Schedule

_WARPS = 8
#: The rows and the columns of the square that the threads of a block stand in.
_SIDE = 16
_FITS = "the largest tile that shared memory holds"
_TILINGS = (
    Tiling(64, 64, _WARPS, 1, "each thread computes 4 x 4 scores, and reads 8 numbers for 16 products"),
    *(Tiling(tile_q, tile_kv, _WARPS, 1, _FITS) for tile_q, tile_kv in ((64, 32), (32, 32), (16, 16))),
)
_PARTS = (
    Workspace("tile_maxima", "fp32", ("batch", "heads_q", "kv_tiles", "len_q")),
    Workspace("tile_sums", "fp32", ("batch", "heads_q", "kv_tiles", "len_q")),
    Workspace("tile_outputs", "fp32", ("batch", "heads_q", "kv_tiles", "len_q", "head_dim_v")),
)


def plan_grid1d(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> tuple[KernelPlan, ...]:
    """One kernel: a block for each tile of queries, which all keys and values pass through."""
    return (_plan("grid1d", "1-D grid", spec, schedule, arch, access_bytes),)


def plan_grid2d(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> tuple[KernelPlan, ...]:
    """One cooperative kernel whose blocks wait for each other, and the same in three launches for larger grids."""
    base = replace(_plan("grid2d", "2-D grid", spec, schedule, arch, access_bytes), grid_over="scores")
    cooperative = replace(
        base,
        params=FORWARD_GRID2D_COOPERATIVE,
        is_cooperative=True,
        min_blocks=max(1, min(2, arch.smem_per_multiprocessor // (base.smem.bytes + arch.reserved_smem_per_block))),
        workspaces=_PARTS,
    )

    def phase(role: str, smem: SmemMap) -> KernelPlan:
        return replace(
            base, role=role, name=kernel_name(spec, role, arch), params=FORWARD_GRID2D, smem=smem, reasons=()
        )

    maxima = SmemMap(tuple(region for region in base.smem.regions if region.name in "qk"))
    return phase("grid_maxima", maxima), phase("grid_products", base.smem), phase("grid_merge", SmemMap()), cooperative


def _plan(
    word: str, algorithm: str, spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int
) -> KernelPlan:
    given = {name: value for name in ("tile_q", "tile_kv") if (value := getattr(schedule, name)) is not None}

    def check(tiling: Tiling) -> str | None:
        return smem_fault(arch, tiling, _smem(spec, tiling).bytes)

    tiling = choose("forward", _TILINGS, given, arch, check, lambda tiling: _smem(spec, tiling).bytes)
    return KernelPlan(
        name=kernel_name(spec, "forward", arch, word),
        pass_="forward",
        role="forward",
        algorithm=algorithm,
        template=f"lineage/{word}.cu.j2",
        spec=spec,
        arch=arch,
        threads=_SIDE * _SIDE,
        config_type="GridConfig",
        config=(
            Constant("head_dim", spec.head_dim),
            Constant("head_dim_v", spec.head_dim_v),
            Constant("tile_q", tiling.tile_q, "B_r: query rows per block"),
            Constant("tile_kv", tiling.tile_kv, "B_c: keys per tile"),
            Constant("has_lower", spec.mask.has_lower, "the mask ends on the left"),
            Constant("has_upper", spec.mask.has_upper, "the mask ends on the right"),
        ),
        params=FORWARD_SCALED,
        smem=_smem(spec, tiling),
        grid_tile=tiling.tile_q,
        grid_over="q",
        grid_heads="q",
        access_bytes=access_bytes,
        reasons=(tiling.reason,) if tiling.reason else (),
        schedule=schedule,
    )


def _smem(spec: AttentionSpec, tiling: Tiling) -> SmemMap:
    """Tiles of floats whose rows have one column of padding."""
    layout = SmemLayout()
    layout.then("q", 4 * tiling.tile_q * (spec.head_dim + 1), "Q_i")
    layout.then("k", 4 * tiling.tile_kv * (spec.head_dim + 1), "K_j")
    layout.then("v", 4 * tiling.tile_kv * (spec.head_dim_v + 1), "V_j")
    layout.then("p", 4 * tiling.tile_q * (tiling.tile_kv + 1), "P_ij")
    return layout.map()
