"""flashgen's algorithms as candidates."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from flashgen.api import Kernel, build
from flashgen.arch import Arch
from flashgen.errors import CompileError, PlanError
from flashgen.lab.bench.candidate import Call, Candidate, RefusedError
from flashgen.lab.bench.case import Case, Inputs
from flashgen.lab.timing.device import Device
from flashgen.pipeline import TargetName
from flashgen.plan.lineage import LINEAGE
from flashgen.spec import Schedule
from flashgen.spec.schedule import ALGORITHMS, Algorithm


def algorithms(names: Iterable[Algorithm] = ALGORITHMS, arch: Arch | None = None) -> tuple[Candidate, ...]:
    """A candidate for each algorithm, by kernels for a GPU's architecture; None means the emulator."""
    return tuple(Candidate(name, partial(_prepare, name, arch)) for name in names)


def _prepare(name: Algorithm, arch: Arch | None, case: Case, inputs: Inputs, device: Device) -> Call:
    kernel = kernel_for(name, case, arch)
    x = inputs
    if case.pass_ == "forward":
        return lambda: kernel(x.q, x.k, x.v)[:1]
    out, lse = kernel(x.q, x.k, x.v)
    return lambda: kernel.backward(x.do, x.q, x.k, x.v, out, lse)


def kernel_for(name: Algorithm, case: Case, arch: Arch | None) -> Kernel:
    """The kernels of a case by an algorithm; a RefusedError where it has none."""
    target: TargetName = "emulator" if arch is None else "gpu"
    try:
        kernel = build(case.spec, Schedule(algorithm=name), arch=arch, target=target)
    except (PlanError, CompileError) as error:
        raise RefusedError(str(error)) from error
    forward, others = kernel.plan.forward, [k for k in kernel.plan.kernels if k.pass_ == "backward"]
    if name in LINEAGE and others and all(k.algorithm != forward.algorithm for k in others):
        raise RefusedError(f"it has no backward pass; gradients come from {others[0].algorithm}")
    return kernel
