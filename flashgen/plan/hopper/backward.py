"""Planning the backward kernels for Hopper: prepare, and main, which makes dK, dV and dQ."""

from __future__ import annotations

from flashgen.arch import Arch
from flashgen.plan.hopper.backward_frame import BackwardSm90
from flashgen.plan.hopper.backward_scores import loads_ahead
from flashgen.plan.hopper.backward_tiles import DS_STAGES, SUM_LINE, TILE_KV, one_kernel
from flashgen.plan.hopper.backward_wide import plan_wide_sm90
from flashgen.plan.hopper.units import PANEL, STORED_ROWS, why_not_hopper
from flashgen.plan.model import params
from flashgen.plan.model.budget import Choice
from flashgen.plan.model.failed_tiles import FailedTiles
from flashgen.plan.model.plans import Box, Constant, KernelPlan
from flashgen.plan.model.sum_ring import SumRing
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule


def why_not_backward(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> str | None:
    """Why a backward pass cannot use these kernels, as a clause; None if it can."""
    if (reason := why_not_hopper(spec, schedule, arch, access_bytes)) is not None:
        return reason
    if schedule.backward != BackwardSchedule():
        return "a schedule for the backward pass applies to the portable kernels"
    return None


def plan_backward_sm90(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> tuple[KernelPlan, ...]:
    """The backward kernels of a spec on Hopper, in the order in which they run."""
    frame = BackwardSm90.of(spec, schedule if schedule != Schedule() else None, arch)
    choice = one_kernel(frame.padded, arch)
    kernels = _fused(frame, choice) if isinstance(choice, Choice) else plan_wide_sm90(frame)
    return kernels if spec.mask.is_full else (*kernels, frame.repair(kernels))


def _fused(frame: BackwardSm90, choice: Choice) -> tuple[KernelPlan, ...]:
    """prepare, and main."""
    ordered, tile_q = frame.spec.deterministic, choice.tiles.rows
    # dQ is summed in a ring of a few heads, unless deterministic.
    sums = None if ordered else SumRing(TILE_KV, frame.section_heads())
    failures = frame.failures(tile_q, TILE_KV)
    prepare = frame.prepare(
        tile_q,
        "ordered" if ordered else "ring",
        workspace=tile_q * frame.padded.head_dim,
        sums=sums,
        failures=failures,
    )
    return prepare, _main(frame, choice, sums, failures)


def _main(frame: BackwardSm90, choice: Choice, sums: SumRing | None, failures: FailedTiles | None) -> KernelPlan:
    """dK and dV of each tile of keys, and its addition to dQ."""
    tiles, ordered = choice.tiles, frame.spec.deterministic
    sum_lines = Box("dq_accum", 2, SUM_LINE, swizzle=0, element="fp32")
    return frame.products(
        "main",
        "hopper/backward_main.cu.j2",
        choice,
        tile_q=tiles.rows,
        tile_kv=TILE_KV,
        over="kv",
        config_type="BackwardSm90Config",
        config=frame.constants(
            choice,
            Constant("tile_q", tiles.rows, "B_r: query rows per step"),
            Constant("tile_kv", TILE_KV, "B_c: keys per tile that a block works on"),
            Constant("q_stages", tiles.count("Q")),
            Constant("do_stages", tiles.count("dO")),
            Constant("ds_stages", DS_STAGES),
            Constant("sum_stages", tiles.count("sums of dQ"), "slots for sums of dQ to be scaled and rounded"),
            Constant("rounded_stages", tiles.count("them rounded"), "slots for rounded dQ"),
            share=", 64 keys each",
            in_order=ordered,
            own=(
                Constant("presets_ahead", "presets_ahead" in tiles.switches, "the next S starts during dK"),
                Constant("dq_last", "dq_last" in tiles.switches, "dQ is multiplied after dK, not before"),
            ),
        ),
        table=params.MAIN_SM90[ordered, failures is not None],
        boxes=(
            Box("row_stats", 1, tiles.rows, swizzle=0, element="fp32"),
            Box("dk", STORED_ROWS, PANEL),
            Box("dv", STORED_ROWS, PANEL),
            *(() if ordered else (sum_lines,)),
            Box("dq", STORED_ROWS, PANEL),
        ),
        switches=("loads_ahead",) if loads_ahead(frame.spec) else (),
        sums=sums,
        failures=failures,
    )
