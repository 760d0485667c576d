"""``tune``: search the fastest schedule of a spec on a GPU, and keep it in the table of tuned schedules."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashgen import api, tuned
from flashgen.arch import Arch, arch_for_capability
from flashgen.common.checks import as_float
from flashgen.common.show import show
from flashgen.errors import ArgumentError, SpecError
from flashgen.lab.timing.device import Device, GpuDevice
from flashgen.lab.tune.search import Progress, Search
from flashgen.lab.tune.workbench import Arrays, KernelWorkbench, call_options
from flashgen.plan.candidates import schedules
from flashgen.plan.model.plans import Pass
from flashgen.plan.model.tuning import Trial, Tuning
from flashgen.spec import AttentionSpec, Schedule

if TYPE_CHECKING:
    from flashgen.launch.driver.devices import Gpu

DEFAULT_BUDGET = 60.0


def _silent(text: str) -> None:
    pass


def tune(spec: AttentionSpec, q: Any, k: Any, v: Any, *, budget: float = DEFAULT_BUDGET) -> Tuning:
    """Finds the fastest schedule for calls like this one, and keeps it for later builds on this GPU.

    q, k and v are GPU arrays as for a call of the built kernel. The search takes about ``budget`` seconds.
    Every schedule is verified against the oracle first, and the winner on all cases that ``flashgen build`` runs.
    ``build`` then uses it for this spec on this GPU, until flashgen or the compiler changes. FLASHGEN_TUNED=0 turns
    that off. Kernels that were built before stay as they are.
    """
    check_spec(spec)
    seconds = check_budget(budget)
    gpu, device = _gpu_of(q, k, v)
    # Arguments that a call refuses are refused here, and not after a minute of building.
    api.build_on(gpu.ordinal, spec)(q, k, v, **call_options(spec))
    return tune_on(gpu, device, spec, {int(q.shape[1]): Arrays(q, k, v)}, seconds)


def tune_on(
    gpu: Gpu,
    device: GpuDevice,
    spec: AttentionSpec,
    problems: Mapping[int, Arrays],
    budget: float,
    say: Progress = _silent,
) -> Tuning:
    """The same for several lengths at once, with arrays of the device."""
    arch = arch_for_capability(gpu.capability)
    found = searched(spec, gpu.name, arch, device, problems, budget, say, ordinal=gpu.ordinal)
    if not tuned.remember(_bare(spec), found):
        message = "the tuned schedule is not kept: no cache directory can be written; set FLASHGEN_CACHE_DIR"
        logging.getLogger("flashgen").warning(message)
    for each in (spec, replace(spec, direction="forward")):
        api.forget(_bare(each))
    return found


def searched(
    spec: AttentionSpec,
    name: str,
    arch: Arch,
    device: Device,
    problems: Mapping[int, Arrays],
    budget: float,
    say: Progress = _silent,
    *,
    ordinal: int | None,
) -> Tuning:
    """What the searches for both passes find; nothing is kept."""
    lengths = tuple(problems)
    chosen, trials = Schedule(), list[Trial]()
    passes: tuple[Pass, ...] = ("forward", "backward") if spec.needs_backward else ("forward",)
    tables = {pass_: schedules(_bare(spec), arch, pass_) for pass_ in passes}
    searches = sum(len(candidates) > 1 for candidates in tables.values())
    for pass_, candidates in tables.items():
        if len(candidates) == 1:
            trials.append(Trial(pass_, candidates[0], note="the only schedule"))
            continue
        bench = KernelWorkbench(spec, pass_, arch, device, problems, ordinal=ordinal, base=chosen)
        winner, tried = Search(bench, pass_, lengths, budget / searches, say).run(candidates)
        chosen = winner if pass_ == "forward" else replace(chosen, backward=winner.backward)
        trials += tried
    return Tuning(name, lengths, chosen, tuple(trials))


def check_spec(spec: object) -> None:
    """A FlashgenError for what cannot be tuned."""
    if not isinstance(spec, AttentionSpec):
        raise SpecError(f"spec={show(spec)} is not an AttentionSpec; write AttentionSpec(head_dim=128, dtype='bf16')")
    if spec.has_own_lengths:
        raise ArgumentError(f"{spec.describe()} has lengths of its own for each sequence; tune a spec without them")


def check_budget(budget: object) -> float:
    """Seconds; an ArgumentError for what is no such number."""
    seconds = as_float(budget)
    if seconds is None or not 0 < seconds <= 86400:
        raise ArgumentError(f"budget={show(budget)} is out of range; use a number of seconds up to 86400")
    return seconds


def problems_of(
    spec: AttentionSpec, lengths: Sequence[int], device: Device, *, tokens: int, batch: int | None, heads: int | None
) -> dict[int, Arrays]:
    """Random arguments for each length."""
    import numpy as np

    random = np.random.default_rng(0)
    dtype = spec.element.numpy()
    found = {}
    for length in dict.fromkeys(lengths):
        sizes = (batch or max(1, tokens // length), length, heads or max(1, 2048 // spec.head_dim))
        dims = (spec.head_dim, spec.head_dim, spec.head_dim_v)
        arrays = (random.standard_normal((*sizes, dim), dtype=np.float32).astype(dtype) for dim in dims)
        found[length] = Arrays(*map(device.put, arrays))
    return found


def _bare(spec: AttentionSpec) -> AttentionSpec:
    return spec.declared() if spec.tensors else spec


def _gpu_of(q: Any, k: Any, v: Any) -> tuple[Gpu, GpuDevice]:
    """The GPU that the arrays lie on, and a device that holds arrays of the same library."""
    from flashgen.launch.arrays.array import HOST
    from flashgen.launch.arrays.frameworks import UNREADABLE, common_framework, unreadable
    from flashgen.launch.driver.devices import find_gpus

    names, arrays = ("q", "k", "v"), (q, k, v)
    framework = common_framework(names, arrays)
    try:
        found = framework.describe(names, framework.signature(arrays, None)[0])[0]
    except UNREADABLE as error:
        raise unreadable(names, arrays, framework, error) from None
    if found.device == HOST:
        raise ArgumentError(f"q is a {framework.name} array in host memory; pass arrays on the GPU to tune for")
    gpu = next(gpu for gpu in find_gpus() if gpu.ordinal == found.device)
    if framework.name != "torch":
        return gpu, GpuDevice(gpu)
    from flashgen.lab.timing.torch_device import TorchDevice

    return gpu, TorchDevice(gpu)
