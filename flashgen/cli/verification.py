"""Checking what was built against the oracle: on the GPU where it runs there, else on the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flashgen.cli import talk
from flashgen.errors import CompileError, EmulationError, LaunchError
from flashgen.plan.model import AttentionPlan
from flashgen.plan.varlen import COUNTS, STARTS

#: Arrays of a cache.
_OF_CACHE = ("seqlens", "batch_idx", "leftpad", "block_table")

if TYPE_CHECKING:
    from flashgen.cli.gpus import Gpu
    from flashgen.making import TargetName
    from flashgen.verify import Run
    from flashgen.verify import Verification as Checked


@dataclass(frozen=True, slots=True)
class Verification:
    """The verdict on all plans; the error and its bound are those of the tensor nearest to its bound."""

    target: str
    cases: int
    max_error: float
    bound: float
    ok: bool
    failures: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The ``verify`` member of the JSON object; what is not a number there is null."""
        return {
            "target": self.target,
            "cases": self.cases,
            "max_error": self.max_error if math.isfinite(self.max_error) else None,
            "bound": self.bound if math.isfinite(self.bound) else None,
            "ok": self.ok,
        }

    def describe(self) -> str:
        """One line for people."""
        verdict = "ok" if self.ok else "FAILED"
        return (
            f"{verdict} on the {self.target}: {self.cases} cases, "
            f"largest error {self.max_error:.2e} beside its bound {self.bound:.2e}"
        )


#: ``check(plan, target, gpu) -> what flashgen.verify says``.
Check = Callable[[AttentionPlan, "TargetName", "Gpu | None"], "Checked"]


def verify_all(plans: Sequence[AttentionPlan], gpus: Iterable[Gpu], check: Check | None = None) -> Verification | None:
    """Verify every plan; None, and the reason on stderr, when there is nothing to verify one of them on."""
    gpus = tuple(gpus)
    parts = []
    for plan in plans:
        gpu = next((g for g in gpus if plan.arch.runs_on(g.capability)), None)
        reason = None if gpu else missing_emulator()
        if reason:
            talk.warn(f"NOT VERIFIED: no GPU here runs {plan.arch.name}, and {reason}")
            return None
        parts.append(_verify(plan, gpu, check or run_cases))
    return _combined(parts) if parts else None


def missing_emulator() -> str | None:
    """Why nothing can be emulated here; None when it can."""
    try:
        from flashgen.emulator.toolchain import find_toolchain
    except ImportError as error:
        return f"the emulator cannot be imported ({error})"
    try:
        find_toolchain()
    except CompileError as error:
        return str(error)
    return None


def _verify(plan: AttentionPlan, gpu: Gpu | None, check: Check) -> Verification:
    target: TargetName = "gpu" if gpu else "emulator"
    try:
        checked = check(plan, target, gpu)
    except (EmulationError, LaunchError) as error:
        return Verification(target, 0, math.inf, 0.0, False, (f"{plan.arch.name}: {error}",))
    failures = tuple(f"{plan.arch.name}: {result.describe()}" for result in checked.failures)
    return Verification(target, checked.cases, checked.max_error, checked.bound, checked.ok, failures)


def _combined(parts: Sequence[Verification]) -> Verification:
    worst = max(parts, key=_ratio)
    return Verification(
        target=" and ".join(dict.fromkeys(part.target for part in parts)),
        cases=sum(part.cases for part in parts),
        max_error=worst.max_error,
        bound=worst.bound,
        ok=all(part.ok for part in parts),
        failures=tuple(line for part in parts for line in part.failures),
    )


def _ratio(part: Verification) -> float:
    if not math.isfinite(part.max_error):
        return math.inf
    return part.max_error / part.bound if part.bound else math.copysign(math.inf, part.max_error - 1e-300)


def run_cases(plan: AttentionPlan, target: TargetName, gpu: Gpu | None) -> Checked:
    """Run the standard cases of a plan's spec on a target."""
    from flashgen.api import build
    from flashgen.verify import cases_for, verify

    where = f"on {gpu.name}" if gpu else "on the emulator"
    kernel = build(plan.spec, plan.schedule, arch=plan.arch, target=target)
    run = runner(kernel, gpu)
    tiles = {"tile_q": plan.schedule.tile_q or 64, "tile_kv": plan.schedule.tile_kv or 64}
    with talk.working(f"verifying {plan.arch.name} {where}") as update:
        return verify(
            run,
            plan.spec,
            cases=cases_for(plan.spec, **tiles),
            target=target,
            progress=lambda done, total, case: update(
                f"verifying {plan.arch.name} {where}: {done}/{total}{f', {case.name}' if case else ''}"
            ),
        )


def runner(kernel: Any, gpu: Gpu | None) -> Run:
    """Both passes of a kernel on NumPy arrays, on a GPU or the emulator."""
    return partial(_run_on_gpu, kernel, gpu.ordinal) if gpu else partial(_run_on_host, kernel)


Captured = Mapping[str, Any] | None


def _run_on_host(
    kernel: Any,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    scale: float,
    captured: Captured = None,
    **more: Any,
) -> Sequence[Any]:
    out, lse = kernel(q, k, v, scale=scale, captured=captured, **more)
    if do is None:
        return out, lse
    return out, lse, *kernel.backward(do, q, k, v, out, lse, scale=scale, captured=captured, **more)


def _run_on_gpu(
    kernel: Any,
    ordinal: int,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    scale: float,
    captured: Captured = None,
    **more: Any,
) -> Sequence[Any]:
    from flashgen.cli.captured_copy import CapturedCopy
    from flashgen.cli.gpus import to_device, to_host

    q, k, v, do = (x if x is None else to_device(x, ordinal) for x in (q, k, v, do))
    captured = {name: CapturedCopy(x, ordinal) for name, x in (captured or {}).items()}
    for option, names in (("sequences", (*STARTS, *COUNTS)), ("cache", _OF_CACHE)):
        if option in more:
            arrays = {name: getattr(more[option], name) for name in names}
            copies = {name: CapturedCopy(x, ordinal) for name, x in arrays.items() if x is not None}
            more[option] = replace(more[option], **copies)
    return [to_host(x) for x in _run_on_host(kernel, q, k, v, do, scale, captured, **more)]
