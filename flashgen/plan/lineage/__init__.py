"""The algorithms that led to FlashAttention-2 and 3, to learn from and to compare with.

Each has a planner of its own here, and kernels in ``templates/kernels/lineage``. A spec that also needs gradients gets
FlashAttention-2's backward kernels, unless the algorithm has a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.lineage.fa1 import plan_fa1, plan_fa1_backward
from flashgen.plan.lineage.grid import plan_grid1d, plan_grid2d
from flashgen.plan.lineage.naive import plan_naive
from flashgen.plan.lineage.standard import plan_standard, plan_standard_backward
from flashgen.plan.model.plans import KernelPlan
from flashgen.spec import AttentionSpec, Schedule

MAX_HEAD_DIM = 128
#: Makes the kernels of a pass in launch order; the last one of the forward pass writes O.
Planner = Callable[[AttentionSpec, Schedule, Arch, int], tuple[KernelPlan, ...]]


@dataclass(frozen=True, slots=True)
class Lineage:
    """One algorithm."""

    plan_forward: Planner
    #: The fields of a schedule that it reads.
    fields: tuple[str, ...] = ()
    has_dropout: bool = False
    #: Makes the kernels of the backward pass; FlashAttention-2's serve the others.
    plan_backward: Planner | None = None


LINEAGE: dict[str, Lineage] = {
    "standard": Lineage(plan_standard, has_dropout=True, plan_backward=plan_standard_backward),
    "naive": Lineage(plan_naive),
    "fa1": Lineage(plan_fa1, ("tile_q", "tile_kv", "warps"), has_dropout=True, plan_backward=plan_fa1_backward),
    "grid1d": Lineage(plan_grid1d, ("tile_q", "tile_kv")),
    "grid2d": Lineage(plan_grid2d, ("tile_q", "tile_kv")),
}


def plan_lineage(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> tuple[KernelPlan, ...]:
    """The kernels of the forward pass by the algorithm that the schedule names."""
    assert schedule.algorithm is not None
    algorithm = LINEAGE[schedule.algorithm]
    if reason := _why_not(spec, schedule, algorithm):
        raise PlanError(
            f"algorithm={schedule.algorithm!r} cannot be planned for {spec.describe()}: {reason}; "
            "use algorithm='fa2', or leave algorithm out."
        )
    for name in ("tile_q", "tile_kv", "stages", "warps"):
        if getattr(schedule, name) is not None and name not in algorithm.fields:
            raise PlanError(f"algorithm={schedule.algorithm!r} has no {name} to choose; leave {name} out.")
    if schedule.warps is not None and schedule.warps.kind != "split_k":
        remedy = f"use WarpPartition('split_k', {schedule.warps.count})"
        raise PlanError(f"algorithm={schedule.algorithm!r} splits keys among warps; {remedy}.")
    return algorithm.plan_forward(spec, schedule, arch, access_bytes)


def chosen_lineage_schedule(forward: KernelPlan) -> Schedule:
    """The schedule that a forward kernel amounts to."""
    asked = forward.schedule or Schedule()
    if not forward.has_tiles:
        return asked
    return replace(asked, tile_q=int(forward.constant("tile_q")), tile_kv=int(forward.constant("tile_kv")))


def _why_not(spec: AttentionSpec, schedule: Schedule, algorithm: Lineage) -> str | None:
    """Why the algorithm does not cover a spec, as a clause."""
    if spec.element.is_eight_bit:
        return "its queries, keys and values have 16 or 32 bits"
    if max(spec.head_dim, spec.head_dim_v) > MAX_HEAD_DIM:
        return f"its head dims end at {MAX_HEAD_DIM}"
    if not spec.mask.is_band:
        return "its masks are full, causal and windows"
    if spec.score is not None:
        return "it has no scores"
    if spec.has_own_lengths:
        return "its sequences are equally long, and lie in no cache"
    if spec.dropout and not algorithm.has_dropout:
        return "it has no dropout"
    return None
