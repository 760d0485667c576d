"""``time_algorithms``: a bench on this machine's first GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from flashgen.arch import arch_for_capability
from flashgen.errors import NoGpuError
from flashgen.lab.bench.candidate import Candidate
from flashgen.lab.bench.case import Case
from flashgen.lab.bench.grid import check_cases
from flashgen.lab.bench.ours import algorithms, decoders
from flashgen.lab.bench.peers import peers
from flashgen.lab.bench.run import Effort, Progress, no_progress, time_attention
from flashgen.lab.bench.timings import Timings
from flashgen.lab.timing.device import Device, GpuDevice
from flashgen.launch.driver.devices import Gpu, find_gpus
from flashgen.spec.schedule import ALGORITHMS, Algorithm


def time_algorithms(
    cases: Sequence[Case],
    names: Sequence[Algorithm] = ALGORITHMS,
    peer_names: Iterable[str] = (),
    *,
    effort: Effort = Effort(),  # noqa: B008 (frozen)
    progress: Progress = no_progress,
    finished: Callable[[Timings], None] = lambda timings: None,
) -> Timings:
    """Times flashgen's algorithms, and other libraries by name, on this machine's first GPU.

    Every result is checked first, and all that are right are timed in turn. ``finished`` gets what is known after each
    case. A NoGpuError without a GPU.
    """
    check_cases(cases)
    gpu = first_gpu()
    device, others = with_peers(gpu, peers(peer_names))
    arch = arch_for_capability(gpu.capability)
    # Cases are of one kind or the other, and have pages of one size.
    steps = [case for case in cases if case.is_decode]
    ours = decoders(arch, steps[0].page_size) if steps else algorithms(names, arch)
    return time_attention(cases, (*ours, *others), device, effort=effort, progress=progress, finished=finished)


def first_gpu() -> Gpu:
    """The first GPU; a NoGpuError that says what can be done without one."""
    gpus = find_gpus()
    if not gpus:
        raise NoGpuError(
            "there is no GPU here to time on; the emulator counts bytes instead: "
            "flashgen io --head-dim 64 --len 256 --count"
        )
    return gpus[0]


def with_peers(gpu: Gpu, others: tuple[Candidate, ...]) -> tuple[Device, tuple[Candidate, ...]]:
    """The GPU, with torch's tensors if torch runs there; and the peers that can use them."""
    on_gpu = [candidate.name for candidate in others if candidate.device is None]
    if on_gpu:
        from flashgen.lab.timing.torch_device import TorchDevice, sees_gpus

        if sees_gpus():
            return TorchDevice(gpu), others
        names = ", ".join(on_gpu)
        logging.getLogger("flashgen").warning("the installed torch runs on no GPU, so %s are left out", names)
    return GpuDevice(gpu), tuple(candidate for candidate in others if candidate.device is not None)
