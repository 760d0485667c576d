"""Planning FlashAttention-1: the outer loop goes over tiles of keys, the inner one over tiles of queries.

One block computes a whole head. Its warps split the keys of a tile, and O, l and m go to device memory and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.arch import Arch
from flashgen.plan.model import params
from flashgen.plan.model.limits import Tiling, choose, smem_fault
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.plans import Constant, KernelPlan, SmemMap, Workspace
from flashgen.plan.model.smem import SmemLayout
from flashgen.plan.portable.backward import plan_backward
from flashgen.plan.portable.forward import WARP, copies_asynchronously, padded
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule

_NAME = "FlashAttention-1"
#: Registers a thread may spend on accumulators before the compiler has to spill.
_MAX_ACCUMULATORS = 160
#: The largest tile that a schedule may ask for.
MOST_KEYS = 256
_WORKSPACES = (
    Workspace("o_accum", "fp32", ("batch", "heads_q", "len_q", "padded_dim_v")),
    Workspace("row_sums", "fp32", ("batch", "heads_q", "len_q")),
    Workspace("row_maxima", "fp32", ("batch", "heads_q", "len_q")),
)


def plan_fa1(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> tuple[KernelPlan, ...]:
    """Algorithm 1 of the paper: one kernel, one block for each head."""
    asynchronous = copies_asynchronously(arch, access_bytes)
    given = {n: value for n in ("tile_q", "tile_kv") if (value := getattr(schedule, n)) is not None}
    if schedule.warps is not None:
        given["warps"] = schedule.warps.warps

    def check(tiling: Tiling) -> str | None:
        return _fault(spec, arch, tiling)

    rows = tuple(_rows(spec, arch, asynchronous))
    tiling = choose("forward", rows, given, arch, check, lambda tiling: _smem(spec, tiling).bytes)
    kernel = KernelPlan(
        name=kernel_name(spec, "forward", arch, "fa1"),
        pass_="forward",
        role="forward",
        algorithm=_NAME,
        template="lineage/fa1.cu.j2",
        spec=spec,
        arch=arch,
        threads=tiling.warps * WARP,
        config_type="Fa1Config",
        config=(
            Constant("head_dim", spec.head_dim),
            Constant("head_dim_v", spec.head_dim_v),
            Constant("tile_q", tiling.tile_q, "B_r: query rows per step"),
            Constant("tile_kv", tiling.tile_kv, "B_c: keys per tile"),
            Constant("strip", _strip(spec, tiling), "query rows that warps compute at once"),
            Constant("stages", tiling.stages, "tiles of queries in flight"),
            Constant("warps", tiling.warps),
            Constant("has_lower", spec.mask.has_lower, "the mask ends on the left"),
            Constant("has_upper", spec.mask.has_upper, "the mask ends on the right"),
            Constant("access_bytes", access_bytes, "alignment of rows in global memory"),
            Constant("async_copy", asynchronous),
            Constant("turing", not arch.has_cp_async, "half-depth tensor-core steps"),
        ),
        params=params.FORWARD_FA1,
        smem=_smem(spec, tiling),
        grid_tile=tiling.tile_q,
        grid_over="heads",
        grid_heads="q",
        access_bytes=access_bytes,
        workspaces=_WORKSPACES,
        reasons=(tiling.reason,) if tiling.reason else (),
        schedule=schedule,
    )
    return (kernel,)


def plan_fa1_backward(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> tuple[KernelPlan, ...]:
    """Algorithm 4 of the paper: P is computed again. One block for each head of keys, so sums have a fixed order."""
    if not spec.element.is_half and not arch.has_cp_async and max(padded(spec.head_dim), padded(spec.head_dim_v)) > 112:
        # One block for each head has no registers left here.
        return plan_backward(spec, schedule, arch, access_bytes)
    backward = replace(schedule.backward, stages=1)
    if spec.element.is_half and schedule.backward == BackwardSchedule():
        # Four warps spill: the loops around those of FlashAttention-2 need registers, too.
        backward = replace(backward, warps=8)
    base = plan_backward(replace(spec, deterministic=False), replace(schedule, backward=backward), arch, access_bytes)

    def of_fa1(kernel: KernelPlan) -> KernelPlan:
        own = replace(kernel, name=kernel_name(kernel.spec, kernel.role, arch, "fa1"), algorithm=_NAME)
        if kernel.role != "main":
            return own
        return replace(own, template="lineage/fa1_backward.cu.j2", grid_over="heads")

    return tuple(map(of_fa1, base))


def block_sizes(spec: AttentionSpec, arch: Arch) -> tuple[int, int]:
    """The paper's B_r = min(B_c, d) and B_c = ceil(M / 4d), where M is how many elements shared memory holds."""
    dim = max(spec.head_dim, spec.head_dim_v)
    elements = arch.max_smem_per_block // spec.element.bytes
    columns = -(-elements // (4 * dim))
    return min(columns, dim), columns


def _rows(spec: AttentionSpec, arch: Arch, asynchronous: bool) -> Iterator[Tiling]:
    """The paper's sizes in whole blocks of 16 x 16 for each warp, and smaller ones where room is short."""
    rows, columns = block_sizes(spec, arch)
    why = f"B_c = ceil(M / 4d) = {columns} and B_r = min(B_c, d) = {rows}, but at most {MOST_KEYS} and multiples of 16"
    # One block has a multiprocessor to itself: eight warps wait less than four.
    for warps in (8, 4, 2, 1):
        unit = 16 * warps
        for tile_kv in range(min(columns, MOST_KEYS) // unit * unit, 0, -unit):
            # Without asynchronous copies the next Q_i waits in registers, which wide heads leave few of.
            most = rows if asynchronous or padded(spec.head_dim) <= 64 else 16
            for tile_q in range(max(16, most // 16 * 16), 0, -16):
                # Floats leave no registers to address a second slot with.
                for stages in (2, 1) if asynchronous and spec.element.is_half else (1,):
                    yield Tiling(tile_q, tile_kv, warps, stages, why)


def _strip(spec: AttentionSpec, tiling: Tiling) -> int:
    """Rows whose scores and output fit in registers."""
    columns = tiling.tile_kv // tiling.warps + _output_columns(spec)
    wide = spec.element.is_half and tiling.tile_q % 32 == 0 and 32 * columns / WARP <= _MAX_ACCUMULATORS
    return 32 if wide else 16


def _output_columns(spec: AttentionSpec) -> int:
    """Columns of O that a warp computes at once: wide outputs come in two halves."""
    dim_v = padded(spec.head_dim_v)
    return dim_v if dim_v <= 64 else dim_v // 2


def _fault(spec: AttentionSpec, arch: Arch, tiling: Tiling) -> str | None:
    keys = tiling.tile_kv / tiling.warps
    if keys % 16 or keys < 16:
        return (
            f"{tiling.describe()} gives each warp {keys:g} keys, which must be a multiple of 16; "
            f"use tile_kv={16 * tiling.warps} or a multiple of it."
        )
    accumulators = _strip(spec, tiling) * (keys + _output_columns(spec)) / WARP
    if accumulators > _MAX_ACCUMULATORS:
        return (
            f"{tiling.describe()} needs {accumulators:g} registers per thread for scores and output alone "
            f"(at most {_MAX_ACCUMULATORS}); use a smaller tile_kv or more warps."
        )
    return smem_fault(arch, tiling, _smem(spec, tiling).bytes)


def _smem(spec: AttentionSpec, tiling: Tiling) -> SmemMap:
    size, dim, dim_v = spec.element.bytes, padded(spec.head_dim), padded(spec.head_dim_v)
    slots = f", {tiling.stages} slots" if tiling.stages > 1 else ""
    strip = _strip(spec, tiling)
    return (
        SmemLayout()
        .then("q", tiling.stages * tiling.tile_q * dim * size, "Q_i" + slots)
        .then("k", tiling.tile_kv * dim * size, "K_j")
        .then("v", tiling.tile_kv * dim_v * size, "V_j")
        .then("exchange", 4 * strip * (tiling.warps * (2 + dim_v) + 2), "row maxima, row sums and P V of each warp")
        .map()
    )
