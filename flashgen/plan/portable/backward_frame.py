"""What all backward kernels share, on every GPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from flashgen.arch import Arch
from flashgen.plan.model.budget import Choice
from flashgen.plan.model.failed_tiles import FailedTiles
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.plans import Box, Constant, KernelPlan, ParamTable, Role, SmemMap
from flashgen.plan.model.sum_ring import SumRing
from flashgen.spec import AttentionSpec, Schedule


@dataclass(frozen=True, slots=True)
class BackwardFrame:
    """The backward pass that a kernel belongs to."""

    spec: AttentionSpec
    arch: Arch
    #: The schedule as the caller gave it; None if it sets nothing.
    schedule: Schedule | None
    algorithm: str
    access_bytes: int

    def kernel(
        self,
        role: Role,
        template: str,
        *,
        threads: int,
        tile: int,
        over: Literal["q", "kv", "flags"] = "q",
        config_type: str,
        config: tuple[Constant, ...],
        params: ParamTable,
        smem: SmemMap | None = None,
        boxes: tuple[Box, ...] = (),
        reasons: tuple[str, ...] = (),
        switches: Collection[str] = (),
        divides_by_scale: bool = False,
        sums: SumRing | None = None,
        failures: FailedTiles | None = None,
        overlaps_predecessor: bool = False,
        choice: Choice | None = None,
    ) -> KernelPlan:
        """One kernel of the pass. A TMA kernel is persistent."""
        return KernelPlan(
            name=kernel_name(self.spec, role, self.arch),
            pass_="backward",
            role=role,
            algorithm=self.algorithm,
            template=template,
            spec=self.spec,
            arch=self.arch,
            threads=threads,
            config_type=config_type,
            config=config,
            params=params,
            smem=smem or SmemMap(),
            grid_tile=tile,
            grid_over=over,
            grid_heads="q" if over == "flags" else over,
            access_bytes=self.access_bytes,
            is_persistent=bool(boxes),
            boxes=boxes,
            divides_by_scale=divides_by_scale,
            reasons=reasons,
            schedule=self.schedule,
            switches=frozenset(switches),
            sums=sums,
            failures=failures,
            overlaps_predecessor=overlaps_predecessor,
            choice=choice,
        )
