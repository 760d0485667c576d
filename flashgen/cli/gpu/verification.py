"""Checking what was built against the oracle: on the GPU where it runs there, else on the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flashgen.cli.output import talk
from flashgen.cli.output.outputs import OutputOnArch, as_json, describe_worst, worst_json
from flashgen.errors import CompileError, EmulationError, LaunchError
from flashgen.plan.model.plans import AttentionPlan
from flashgen.plan.varlen import COUNTS, STARTS
from flashgen.spec.text.command import rebuild_command

#: Arrays of a cache.
_OF_CACHE = ("seqlens", "batch_idx", "leftpad", "block_table")

if TYPE_CHECKING:
    from flashgen.cli.gpu.arrays import Gpu
    from flashgen.pipeline import TargetName
    from flashgen.verify import Run
    from flashgen.verify import Verification as Checked


@dataclass(frozen=True, slots=True)
class Verification:
    """The verdict on all plans."""

    target: str
    cases: int
    ok: bool
    outputs: tuple[OutputOnArch, ...] = ()
    failures: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The ``verify`` member of the JSON object; what is not a number there is null."""
        return {
            "target": self.target,
            "cases": self.cases,
            "ok": self.ok,
            "worst": worst_json(self.outputs),
            "outputs": as_json(self.outputs),
        }

    def describe(self) -> str:
        """One line for people."""
        verdict = f"{'ok' if self.ok else 'FAILED'} on the {self.target}: {self.cases} cases"
        worst = describe_worst(self.outputs)
        return f"{verdict}, {worst}" if worst else verdict


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
        return Verification(target, 0, False, failures=(f"{plan.arch.name}: {error}",))
    lines = [result.describe() for result in checked.failures]
    lines += [report.describe_slope() for report in checked.systematic]
    failures = [f"{plan.arch.name}: {line}" for line in lines]
    if failures:
        failures += ["To see it again:", f"  {rebuild_command(plan.spec, plan.schedule, plan.arch.name)}"]
    return Verification(target, checked.cases, checked.ok, _outputs(plan, checked), tuple(failures))


def _outputs(plan: AttentionPlan, checked: Checked) -> tuple[OutputOnArch, ...]:
    return tuple(
        OutputOnArch(plan.arch.name, report, report.largest.case.describe(), report.worst.case.describe())
        for report in checked.outputs
    )


def _combined(parts: Sequence[Verification]) -> Verification:
    return Verification(
        target=" and ".join(dict.fromkeys(part.target for part in parts)),
        cases=sum(part.cases for part in parts),
        ok=all(part.ok for part in parts),
        outputs=tuple(output for part in parts for output in part.outputs),
        failures=tuple(line for part in parts for line in part.failures),
    )


def run_cases(plan: AttentionPlan, target: TargetName, gpu: Gpu | None) -> Checked:
    """Run the standard cases of a plan's spec on a target."""
    from flashgen.kernel import Kernel
    from flashgen.pipeline import variant
    from flashgen.verify import cases_for, verify

    where = f"on {gpu.name}" if gpu else "on the emulator"
    kernel = Kernel(variant(plan, target), target)
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
    dlse: Any = None,
    **more: Any,
) -> Sequence[Any]:
    out, lse = kernel(q, k, v, scale=scale, captured=captured, **more)
    if do is None:
        return out, lse
    return out, lse, *kernel.backward(do, q, k, v, out, lse, scale=scale, captured=captured, dlse=dlse, **more)


def _run_on_gpu(
    kernel: Any,
    ordinal: int,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    scale: float,
    captured: Captured = None,
    dlse: Any = None,
    **more: Any,
) -> Sequence[Any]:
    from flashgen.cli.gpu.arrays import to_device, to_host
    from flashgen.cli.gpu.captured_copy import CapturedCopy

    q, k, v, do, dlse = (x if x is None else to_device(x, ordinal) for x in (q, k, v, do, dlse))
    captured = {name: CapturedCopy(x, ordinal) for name, x in (captured or {}).items()}
    for option, names in (("sequences", (*STARTS, *COUNTS)), ("cache", _OF_CACHE)):
        if option in more:
            arrays = {name: getattr(more[option], name) for name in names}
            copies = {name: CapturedCopy(x, ordinal) for name, x in arrays.items() if x is not None}
            more[option] = replace(more[option], **copies)
    return [to_host(x) for x in _run_on_host(kernel, q, k, v, do, scale, captured, dlse, **more)]
