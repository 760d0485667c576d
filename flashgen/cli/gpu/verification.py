"""Checking what was built against the oracle: on the GPU where it runs there, else on the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.cli.output import talk
from flashgen.cli.output.outputs import OutputOnArch, as_json, describe_worst, worst_json
from flashgen.errors import CompileError, EmulationError, LaunchError
from flashgen.plan.model.plans import AttentionPlan
from flashgen.spec.text.command import rebuild_command

if TYPE_CHECKING:
    from flashgen.cli.gpu.arrays import Gpu
    from flashgen.pipeline import TargetName
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


def run_cases(plan: AttentionPlan, target: TargetName, gpu: Gpu | None, *, decode: bool = False) -> Checked:
    """Run the standard cases of a plan's spec on a target, or those for its decode kernel."""
    from flashgen.kernel import Kernel
    from flashgen.launch.copies.run import runner
    from flashgen.pipeline import variant
    from flashgen.verify import cases_for, decode_cases_for, verify

    where = f"on {gpu.name}" if gpu else "on the emulator"
    kernel = Kernel(variant(plan, target), target)
    run = runner(kernel, gpu.ordinal if gpu else None)
    tiles = {"tile_q": plan.schedule.tile_q or 64, "tile_kv": plan.schedule.tile_kv or 64}
    with talk.working(f"verifying {plan.arch.name} {where}") as update:
        return verify(
            run,
            plan.spec,
            cases=decode_cases_for(plan.spec) if decode else cases_for(plan.spec, **tiles),
            target=target,
            progress=lambda done, total, case: update(
                f"verifying {plan.arch.name} {where}: {done}/{total}{f', {case.name}' if case else ''}"
            ),
        )
