"""Planning the naive kernel: each thread computes one element of O, without tiles and without shared memory."""

from __future__ import annotations

from flashgen.arch import Arch
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import FORWARD_SCALED
from flashgen.plan.model.plans import Constant, KernelPlan, SmemMap
from flashgen.spec import AttentionSpec, Schedule

WARP = 32


def plan_naive(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> tuple[KernelPlan, ...]:
    """One kernel: a block for each query of each head, a thread for each column of its O."""
    kernel = KernelPlan(
        name=kernel_name(spec, "forward", arch, "naive"),
        pass_="forward",
        role="forward",
        algorithm="naive attention",
        template="lineage/naive.cu.j2",
        spec=spec,
        arch=arch,
        threads=-(-spec.head_dim_v // WARP) * WARP,
        config_type="NaiveConfig",
        config=(
            Constant("head_dim", spec.head_dim),
            Constant("head_dim_v", spec.head_dim_v),
            Constant("has_lower", spec.mask.has_lower, "the mask ends on the left"),
            Constant("has_upper", spec.mask.has_upper, "the mask ends on the right"),
        ),
        params=FORWARD_SCALED,
        smem=SmemMap(),
        grid_tile=1,
        grid_over="q",
        grid_heads="q",
        access_bytes=access_bytes,
        schedule=schedule,
    )
    return (kernel,)
