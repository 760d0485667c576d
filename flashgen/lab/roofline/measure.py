"""``measure_roofline``: the ceilings of a GPU, and where flashgen's algorithms lie under them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flashgen.arch import arch_for_capability
from flashgen.lab.bench.candidate import RefusedError
from flashgen.lab.bench.case import Case
from flashgen.lab.bench.grid import check_cases
from flashgen.lab.bench.on_gpu import first_gpu
from flashgen.lab.bench.ours import algorithms, kernel_for
from flashgen.lab.bench.run import Effort, Progress, no_progress, time_attention
from flashgen.lab.roofline.ceilings import measure_ceilings
from flashgen.lab.roofline.kernels import GpuLauncher
from flashgen.lab.roofline.points import Measured, points_of
from flashgen.lab.timing.device import GpuDevice
from flashgen.plan.model.plans import AttentionPlan
from flashgen.spec.schedule import ALGORITHMS, Algorithm

if TYPE_CHECKING:
    from flashgen.arch import Arch


def measure_roofline(
    cases: Sequence[Case],
    names: Sequence[Algorithm] = ALGORITHMS,
    *,
    effort: Effort = Effort(),  # noqa: B008 (frozen)
    progress: Progress = no_progress,
) -> Measured:
    """The ceilings of this machine's first GPU, and then each algorithm for each case. A NoGpuError without a GPU."""
    from flashgen.launch.driver.cuda import get_driver

    check_cases(cases)
    gpu = first_gpu()
    arch, device = arch_for_capability(gpu.capability), GpuDevice(gpu)
    progress(0, "ceilings")
    multiprocessors = get_driver().multiprocessors(gpu.ordinal)
    ceilings = measure_ceilings(device, GpuLauncher(gpu.ordinal, arch, device.stream), arch, multiprocessors)
    timings = time_attention(cases, algorithms(names, arch), device, effort=effort, progress=progress)
    return Measured(gpu.name, ceilings, points_of(timings, plans_of(names, cases, arch), ceilings))


def plans_of(
    names: Iterable[Algorithm], cases: Sequence[Case], arch: Arch | None
) -> dict[tuple[str, Case], AttentionPlan]:
    """The plans of algorithms that cover a case; their kernels are built already."""
    found: dict[tuple[str, Case], AttentionPlan] = {}
    for name in names:
        for case in cases:
            try:
                found[name, case] = kernel_for(name, case, arch).plan
            except RefusedError:
                continue
    return found
