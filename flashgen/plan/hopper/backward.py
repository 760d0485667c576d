"""Planning the backward kernels for Hopper: prepare, and main, which makes dK, dV and dQ."""

from __future__ import annotations

from flashgen.arch import Arch
from flashgen.plan.hopper.adding_order import order_constants
from flashgen.plan.hopper.backward_frame import BackwardSm90
from flashgen.plan.hopper.backward_tiles import DS_SLOTS, SUM_LINE, TILE_KV, one_kernel
from flashgen.plan.hopper.backward_wide import plan_wide_sm90
from flashgen.plan.hopper.units import PANEL, STORED_ROWS, made_for, why_not_hopper
from flashgen.plan.model import params
from flashgen.plan.model.budget import Choice
from flashgen.plan.model.key_parts import KeyParts
from flashgen.plan.model.plans import Box, Constant, KernelPlan
from flashgen.plan.model.sum_ring import SumRing
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule

#: Those of one kernel that keeps dK and dV of its keys and adds to a sum of dQ, ...
NARROW_DIMS = ((64, 64), (96, 96), (128, 128))
#: ... and those for which that has too few registers.
WIDE_DIMS = ((192, 128), (192, 192), (256, 256))
HEAD_DIMS = (*NARROW_DIMS, *WIDE_DIMS)
#: By whether the mask is full, and whether dQ is summed in a fixed order.
_MAIN_PARAMS = {
    (True, False): params.MAIN_SM90,
    (False, False): params.MAIN_SM90_MASKED,
    (True, True): params.MAIN_SM90_ORDERED,
    (False, True): params.MAIN_SM90_ORDERED_MASKED,
}


def why_not_backward(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> str | None:
    """Why a backward pass runs by the kernels for all GPUs instead, in a clause; None where it need not."""
    if (reason := why_not_hopper(spec, schedule, arch, access_bytes)) is not None:
        return reason
    if (spec.head_dim, spec.head_dim_v) not in HEAD_DIMS:
        return f"its backward kernels are {made_for(spec, HEAD_DIMS)}"
    if schedule.backward != BackwardSchedule():
        return "a schedule for the backward pass is one of the other kernels"
    return None


def plan_backward_sm90(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> tuple[KernelPlan, ...]:
    """The backward kernels of a spec on Hopper, in the order in which they run."""
    frame = BackwardSm90.of(spec, schedule if schedule != Schedule() else None, arch)
    choice = one_kernel(spec, arch)
    if not isinstance(choice, Choice):
        return plan_wide_sm90(frame)
    return _prepare(frame, choice), _main(frame, choice)


def _sums(frame: BackwardSm90, choice: Choice) -> SumRing | None:
    """Where dQ is summed, unless all heads have a sum."""
    if frame.spec.deterministic:
        return None
    # Where tiles of keys have as much to do as one another, the last ones are cut; a score takes the registers for it.
    spec, cuts = frame.spec, None
    if spec.mask.is_full and frame.scales:
        tile_q, columns = choice.tiles.rows, spec.head_dim + spec.head_dim_v
        cuts = KeyParts(TILE_KV, tile_q, TILE_KV * columns, tile_q * spec.head_dim)
    return SumRing(TILE_KV, frame.section_heads(), cuts=cuts)


def _prepare(frame: BackwardSm90, choice: Choice) -> KernelPlan:
    """What the rows of queries subtract, and a cleared workspace, unless the first that adds to it stores."""
    ordered, sums = frame.spec.deterministic, _sums(frame, choice)
    cleared = params.PREPARE_SM90_PARTS if sums is not None and sums.cuts is not None else params.PREPARE_SM90
    return frame.prepare(
        choice.tiles.rows,
        params.PREPARE_SM90_ORDERED if ordered else cleared,
        workspace=choice.tiles.rows * frame.spec.head_dim,
        switches=("ordered",) if ordered else ("workspace",),
        sums=sums,
    )


def _main(frame: BackwardSm90, choice: Choice) -> KernelPlan:
    """dK and dV, and what each tile of keys adds to dQ."""
    tiles, ordered, sums = choice.tiles, frame.spec.deterministic, _sums(frame, choice)
    cuts = sums is not None and sums.cuts is not None
    sum_lines = Box("dq_accum", 2, SUM_LINE, swizzle=0, element="fp32")
    return frame.products(
        "main",
        "backward_main_sm90.cu.j2",
        choice,
        tile_q=tiles.rows,
        tile_kv=TILE_KV,
        over="kv",
        config_type="BackwardSm90Config",
        config=frame.constants(
            choice,
            Constant("tile_q", tiles.rows, "B_r: query rows per step"),
            Constant("tile_kv", TILE_KV, "B_c: keys per tile that a block works on"),
            Constant("q_slots", tiles.count("Q"), "tiles of Q under way at once"),
            Constant("do_slots", tiles.count("dO"), "tiles of dO under way at once"),
            Constant("ds_slots", DS_SLOTS, "tiles of dS that wait for dQ"),
            Constant("sum_slots", tiles.count("sums of dQ"), "parts of dQ under way to be finished"),
            Constant("rounded_slots", tiles.count("them rounded"), "of them that are rounded"),
            share=", 64 keys each",
            in_order=ordered,
            own=order_constants(frame.spec),
        ),
        params=params.MAIN_SM90_PARTS if cuts else _MAIN_PARAMS[frame.spec.mask.is_full, ordered],
        boxes=(
            Box("row_stats", 1, tiles.rows, swizzle=0, element="fp32"),
            Box("dk", STORED_ROWS, PANEL),
            Box("dv", STORED_ROWS, PANEL),
            *(() if ordered else (sum_lines,)),
            Box("dq", STORED_ROWS, PANEL),
        ),
        switches=tiles.switches | ({"ordered"} if ordered else set()),
        sums=sums,
    )
