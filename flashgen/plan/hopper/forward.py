"""Planning the forward kernel for Hopper: warp-specialized and persistent, by wgmma and TMA."""

from __future__ import annotations

from dataclasses import replace

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.cache import PREFILL, with_cache_scales
from flashgen.plan.hopper.forward_tiles import chosen_row, eight_bits_overlap, fault_of, row_of, smem_of, value_parts
from flashgen.plan.hopper.forward_traits import (
    changes_scores,
    is_in_products,
    mask_loads_per_pair,
)
from flashgen.plan.hopper.units import (
    PANEL,
    PANEL_BYTES,
    STEP,
    STEP_BYTES,
    STORED_ROWS,
    WARPGROUP,
    is_block_sparse,
    why_not_hopper,
)
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import FORWARD_SM90, FORWARD_SM90_SCORE, with_input_scales
from flashgen.plan.model.plans import Box, Constant, KernelPlan, ParamTable
from flashgen.spec import AttentionSpec, Schedule, WarpPartition

#: Head dims times heads of a section, if tiles differ in length. More heads balance the blocks better, as long as K and
#: V stay in the L2 cache. Of 16, 32 and 64 heads, at S = 512, the fastest were 64 at D=64, 32 at 128 and 16 at 256.
_SECTION_COLUMNS = 4096
#: From these sizes on, scores and output leave few registers to the addresses of what a mask loads.
_WIDE_TILE_KV, _WIDE_VALUES = 64, 96


def why_not(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> str | None:
    """Why a spec cannot use this kernel, and the portable one takes it, as a clause; None if it can."""
    if (reason := why_not_hopper(spec, schedule, arch, access_bytes)) is not None:
        return reason
    if schedule.algorithm is None and schedule.warps is not None and schedule.warps.kind != "specialized":
        return f"warps={schedule.warps.kind!r} is a partition of the other kernels"
    if not _is_asked(schedule) and (fault := fault_of(spec, schedule, arch)) is not None:
        return f"it cannot be planned: {fault}".removesuffix(".")
    return None


def _is_asked(schedule: Schedule) -> bool:
    """Whether the schedule asks for this kernel, not only for sizes that the portable kernel has too."""
    by_warps = schedule.warps is not None and schedule.warps.kind == "specialized"
    return by_warps or schedule.algorithm == "fa3" or schedule.softmax is not None or schedule.registers is not None


def is_planned(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> bool:
    """Whether to plan this kernel. Raises PlanError if the schedule asks for it and it cannot be planned."""
    reason = why_not(spec, schedule, arch, access_bytes)
    if reason is not None and _is_asked(schedule) and schedule.algorithm != "fa2":
        raise PlanError(f"algorithm='fa3' cannot be planned for {spec.describe()}: {reason}; leave algorithm out.")
    return reason is None


def plan_forward_sm90(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> KernelPlan:
    """The forward kernel of a spec on Hopper."""
    fault = fault_of(spec, schedule, arch)
    if fault is not None:
        fits = row_of(spec)
        remedy = f"What would fit: tile_q={fits.tile_q}, tile_kv={fits.tile_kv}, stages={fits.stages}."
        raise PlanError(f"The forward kernel cannot be planned: {fault} {remedy}")
    row = chosen_row(spec, schedule, arch)
    smem = smem_of(spec, row)
    producer, consumer = row.register_split()
    params = FORWARD_SM90 if spec.score is None else FORWARD_SM90_SCORE
    has_end = spec.mask.has_upper or is_block_sparse(spec)
    anchored = schedule.softmax != "running-max"
    in_products = is_in_products(spec)
    element = "u8" if spec.element.is_eight_bit else None
    step, panel = STEP_BYTES // spec.element.bytes, PANEL_BYTES // spec.element.bytes
    columns_v = -(-spec.head_dim_v // STEP) * STEP
    lacks_registers = row.tile_kv >= _WIDE_TILE_KV and spec.head_dim_v > _WIDE_VALUES
    return KernelPlan(
        name=kernel_name(spec, "forward", arch, "" if anchored else "runningmax"),
        pass_="forward",
        role="forward",
        algorithm="FlashAttention-3",
        template="hopper/forward.cu.j2",
        spec=spec,
        arch=arch,
        threads=WARPGROUP * (row.consumers + 1),
        config_type="ForwardSm90Config",
        config=(
            Constant("head_dim", -(-spec.head_dim // step) * step),
            Constant("head_dim_v", columns_v),
            Constant("stored_columns", spec.head_dim_v),
            Constant("tile_q", row.tile_q, "B_r: query rows per block"),
            Constant("tile_kv", row.tile_kv, "B_c: keys per step"),
            Constant("q_stages", row.q_stages),
            Constant("stages", row.stages, "of K and of V"),
            Constant("consumers", row.consumers, "warpgroups that compute, 64 query rows each"),
            Constant("producer_registers", producer),
            Constant("consumer_registers", consumer),
            Constant(
                "section_heads",
                _SECTION_COLUMNS // spec.head_dim if has_end else 1,
                "heads whose tiles are scheduled together",
            ),
            Constant("anchored", anchored, "exponentials relative to a reference maximum that is set once"),
            Constant("has_lower", spec.mask.has_lower, "the band has a lower bound on k - q"),
            Constant("has_upper", spec.mask.has_upper, "the band has an upper bound on k - q"),
        ),
        params=_with_scales(params, spec),
        smem=smem,
        grid_tile=row.tile_q,
        grid_over="q",
        grid_heads="q",
        access_bytes=16,
        is_persistent=True,
        overlaps_predecessor=True,
        divides_by_scale=in_products,
        refuses_spills=True,
        boxes=(
            Box("q", row.tile_q, panel, element=element),
            Box("k", row.tile_kv, panel, element=element),
            Box("v", row.tile_kv, panel, element=element),
            Box("o", STORED_ROWS, PANEL, element=spec.out_dtype),
        ),
        product_columns=(row.tile_kv, columns_v // value_parts(spec)),
        reasons=(row.reason,),
        schedule=schedule if schedule != Schedule() else None,
        switches=frozenset(
            name
            for name, on in (
                ("block_sparse", is_block_sparse(spec)),
                ("overlaps_steps", eight_bits_overlap(spec, row.consumers)),
                # A mask that loads an element for each pair needs its address: groups of pairs take fewer registers.
                ("in_groups", mask_loads_per_pair(spec) and (changes_scores(spec) or lacks_registers)),
            )
            if on
        ),
    )


def _with_scales(params: ParamTable, spec: AttentionSpec) -> ParamTable:
    if not spec.element.is_eight_bit:
        return params
    return with_cache_scales(params, spec) if spec.cache else with_input_scales(params)


def why_not_prefill(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> str | None:
    """Why calls with a cache and many new queries cannot use this kernel, as a clause; None if they can."""
    if (reason := why_not_hopper(spec, schedule, arch, access_bytes, takes_cache=True)) is not None:
        return reason
    if schedule != Schedule():
        return "its kernel for a cache has one schedule, and the schedule is given"
    if spec.qv:
        return "it takes no qv"
    if spec.cache_dtype is None:
        return why_not(replace(spec, cache=None), schedule, arch, access_bytes)
    if spec.page_scales:
        return "it takes no scales of pages"
    if spec.cache_dtype != spec.dtype:
        return f"it multiplies queries and keys of one dtype, and these are {spec.dtype} and {spec.cache_dtype}"
    if (fault := fault_of(spec, schedule, arch)) is not None:
        return f"it cannot be planned: {fault}".removesuffix(".")
    return why_not(replace(spec, cache=None, cache_dtype=None), schedule, arch, access_bytes)


def plan_prefill(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> KernelPlan:
    """The kernel for calls with a cache and many new queries."""
    kernel = plan_forward_sm90(spec, schedule, arch)
    boxes = tuple(replace(box, within_pages=spec.cache == "paged" and box.tensor in "kv") for box in kernel.boxes)
    return replace(kernel, name=kernel_name(spec, PREFILL, arch), role=PREFILL, boxes=boxes)


def chosen_schedule_sm90(kernel: KernelPlan) -> Schedule:
    """The schedule that would give this plan."""
    return Schedule(
        tile_q=int(kernel.constant("tile_q")),
        tile_kv=int(kernel.constant("tile_kv")),
        stages=int(kernel.constant("stages")),
        warps=WarpPartition("specialized", consumers=int(kernel.constant("consumers"))),
        algorithm="fa3",
        softmax="reference-max" if kernel.constant("anchored") else "running-max",
        registers=(int(kernel.constant("producer_registers")), int(kernel.constant("consumer_registers"))),
    )
