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

#: Head dims of the fused kernel for dK, dV and dQ.
NARROW_DIMS = ((64, 64), (96, 96), (128, 128))
#: Head dims with one kernel for dK and dV and one for dQ: the fused one lacks registers.
WIDE_DIMS = ((192, 128), (192, 192), (256, 256))
HEAD_DIMS = (*NARROW_DIMS, *WIDE_DIMS)
#: Keys: whether the mask is full, and whether dQ is summed in a fixed order.
_MAIN_PARAMS = {
    (True, False): params.MAIN_SM90,
    (False, False): params.MAIN_SM90_MASKED,
    (True, True): params.MAIN_SM90_ORDERED,
    (False, True): params.MAIN_SM90_ORDERED_MASKED,
}


def why_not_backward(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> str | None:
    """Why a backward pass cannot use these kernels, as a clause; None if it can."""
    if (reason := why_not_hopper(spec, schedule, arch, access_bytes)) is not None:
        return reason
    if (spec.head_dim, spec.head_dim_v) not in HEAD_DIMS:
        return f"its backward kernels are {made_for(spec, HEAD_DIMS)}"
    if spec.dropout:
        return "its backward kernels have no dropout"
    if spec.varlen:
        return "its backward kernels take no packed sequences"
    if schedule.backward != BackwardSchedule():
        return "a schedule for the backward pass applies to the portable kernels"
    return None


def plan_backward_sm90(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> tuple[KernelPlan, ...]:
    """The backward kernels of a spec on Hopper, in the order in which they run."""
    frame = BackwardSm90.of(spec, schedule if schedule != Schedule() else None, arch)
    choice = one_kernel(spec, arch)
    if not isinstance(choice, Choice):
        return plan_wide_sm90(frame)
    return _prepare(frame, choice), _main(frame, choice)


def _sums(frame: BackwardSm90, choice: Choice) -> SumRing | None:
    """Where dQ is summed: in a ring of a few heads, unless deterministic."""
    if frame.spec.deterministic:
        return None
    # The last tiles of keys are cut into parts if all tiles take equally long. A score leaves no registers for that.
    spec, cuts = frame.spec, None
    if spec.mask.is_full and frame.scales:
        tile_q, columns = choice.tiles.rows, spec.head_dim + spec.head_dim_v
        cuts = KeyParts(TILE_KV, tile_q, TILE_KV * columns, tile_q * spec.head_dim)
    return SumRing(TILE_KV, frame.section_heads(), cuts=cuts)


def _prepare(frame: BackwardSm90, choice: Choice) -> KernelPlan:
    """Statistics of the query rows, and a cleared workspace, unless the first tile that adds to dQ stores."""
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
    """dK and dV of each tile of keys, and its addition to dQ."""
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
            Constant("q_slots", tiles.count("Q"), "slots for Q"),
            Constant("do_slots", tiles.count("dO"), "slots for dO"),
            Constant("ds_slots", DS_SLOTS, "slots for dS"),
            Constant("sum_slots", tiles.count("sums of dQ"), "slots for sums of dQ to be scaled and rounded"),
            Constant("rounded_slots", tiles.count("them rounded"), "slots for rounded dQ"),
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
