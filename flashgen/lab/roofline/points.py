"""Where kernels lie under the ceilings, and which one binds each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flashgen.common.columns import columns
from flashgen.dtypes import DTYPES, RESULTS
from flashgen.lab.bench.case import Case
from flashgen.lab.bench.timings import Timings
from flashgen.lab.roofline.ceilings import BOUNDS, NAMES, Bound, Ceilings
from flashgen.launch.call.prepared import workspace_outputs
from flashgen.launch.call.probabilities import computing_workspaces
from flashgen.plan import workspaces
from flashgen.plan.model.plans import AttentionPlan, Problem

SCHEMA = 1
#: A ceiling that accounts for less of a kernel's time does not bind it.
_BINDING = 0.4


@dataclass(frozen=True, slots=True)
class Work:
    """What a call must do at least."""

    bytes: float
    flops: float
    exponentials: float

    @classmethod
    def of(cls, case: Case, plan: AttentionPlan) -> Work:
        """Arguments read once, results written once, and what the plan leaves in device memory written and read."""
        problem = Problem(case.batch, case.heads, case.heads, case.len, case.len)
        array = case.batch * case.len * case.heads * case.head_dim * DTYPES[case.dtype].bytes
        rows = 4 * case.batch * case.len * case.heads
        moved = case.argument_bytes + (array + rows if case.pass_ == "forward" else 3 * array)
        between = _between_kernels(plan, problem, case)
        # Each pair's exponential is taken once in a pass.
        return cls(moved + 2.0 * between, case.flops, case.pairs)

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte."""
        return self.flops / self.bytes


def _between_kernels(plan: AttentionPlan, problem: Problem, case: Case) -> float:
    """Bytes that kernels of the pass leave for later ones; a backward call gets no P, and computes it again."""
    left = workspace_outputs(plan, case.pass_, problem)
    if case.pass_ == "backward" and plan.stores_probabilities:
        left += computing_workspaces(plan, problem)
    kept = sum(math.prod(output.shape) * RESULTS[output.dtype].bytes for output in left)
    floats = sum(workspaces(plan, problem).values()) if case.pass_ == "backward" else 0
    return float(kept + 4 * floats)


@dataclass(frozen=True, slots=True)
class Point:
    """A kernel's intensity and rate, and the ceiling nearest to it."""

    name: str
    intensity: float
    tflops: float
    bound: Bound
    #: The time at that ceiling, of the time measured.
    share: float

    @property
    def sentence(self) -> str:
        """Which ceiling binds it."""
        name = NAMES[self.bound]
        if self.share < _BINDING:
            return f"{self.name}: no ceiling binds it; the nearest, {name}, accounts for {self.share:.0%} of its time."
        return f"{self.name}: {name} bind it; at that ceiling alone it would take {self.share:.0%} of its time."

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return {"name": self.name, "intensity": self.intensity, "tflops": self.tflops, "bound": self.bound}


def point(name: str, work: Work, ms: float, ceilings: Ceilings) -> Point:
    """Where work that took some milliseconds lies."""
    amounts = {"bytes": work.bytes, "flops": work.flops, "exponentials": work.exponentials}
    times = {bound: ceilings.ms(bound, **amounts) for bound in BOUNDS}
    bound = max(BOUNDS, key=lambda each: times[each])
    return Point(name, work.intensity, work.flops / ms / 1e9, bound, times[bound] / ms)


@dataclass(frozen=True, slots=True)
class Measured:
    """Ceilings and kernels of a device; ``str()`` draws a table and says what binds each."""

    device: str
    ceilings: Ceilings
    points: tuple[Point, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        kernels = [each.as_dict() for each in self.points]
        return {"schema": SCHEMA, "device": self.device, "ceilings": self.ceilings.as_dict(), "kernels": kernels}

    def __str__(self) -> str:
        rows: Iterable[tuple[str, ...]] = (
            ("kernel", "FLOP/byte", "TFLOP/s", "nearest ceiling"),
            *((p.name, f"{p.intensity:.4g}", f"{p.tflops:.4g}", f"{p.bound} ({p.share:.0%})") for p in self.points),
        )
        sentences = [each.sentence for each in self.points]
        return "\n".join([f"{self.device}: {self.ceilings}", "", *columns(rows), "", *sentences])


def points_of(timings: Timings, plans: dict[tuple[str, Case], AttentionPlan], ceilings: Ceilings) -> tuple[Point, ...]:
    """The points of a bench's own rows."""
    return tuple(
        point(f"{row.algorithm} {row.case.title}, N={row.case.len}", Work.of(row.case, plan), row.timing.ms, ceilings)
        for row in timings.rows
        if (plan := plans.get((row.algorithm, row.case))) is not None
    )
