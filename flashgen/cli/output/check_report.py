"""What ``flashgen check`` found, for a person and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashgen.cli.commands.checking import Failure, Outcome, Wish
from flashgen.cli.output import outputs
from flashgen.cli.output.outputs import OutputOnArch
from flashgen.verify import Trial, trial_text

if TYPE_CHECKING:
    from flashgen.plan.model.plans import AttentionPlan
    from flashgen.spec import AttentionSpec

SCHEMA = 2


def command(failure: Failure) -> str:
    """The command that shows the failure again: the run, or exactly the failing case."""
    if failure.run is not None:
        return f"{_check_command(failure)} --cases {failure.run.cases} --seed {failure.run.seed}"
    return _case_command(failure)


def _case_command(failure: Failure) -> str:
    assert failure.trial is not None
    return f"{_check_command(failure)} --case {shlex.quote(trial_text(failure.trial))}"


def _check_command(failure: Failure) -> str:
    from flashgen.spec.text.command import rebuild_command

    plan = failure.subject.plan
    build = rebuild_command(plan.spec, failure.subject.asked, plan.arch.name)
    options = build.removeprefix("flashgen build ")
    target = " --target gpu" if failure.subject.gpu else ""
    target += " --decode" if failure.run is not None and failure.run.decode else ""
    return f"flashgen check {options}{target}"


def describe(plans: Sequence[AttentionPlan], wish: Wish, outcome: Outcome) -> str:
    """One line for people: what was run, and the worst ratio."""
    verdict = "interrupted" if outcome.interrupted else "FAILED" if outcome.failure else "ok"
    archs = ", ".join(plan.arch.name for plan in plans)
    parts = [f"{verdict}: {archs}: {outcome.cases} cases, {_runs(wish, outcome)}"]
    worst = outputs.describe_worst(outputs_of(outcome))
    return ", ".join([*parts, worst] if worst else parts)


def outputs_of(outcome: Outcome) -> list[OutputOnArch]:
    """What was compared on each architecture, with the cases as ``--case`` reads them."""
    return [
        OutputOnArch(arch, report, *(trial_text(Trial(one.case)) for one in (report.largest, report.worst)))
        for arch, tally in outcome.tallies.items()
        for report in tally.reports()
    ]


def describe_failure(failure: Failure) -> str:
    """What went wrong, and the command that shows it again."""
    lines = [
        f"{failure.verdict.kind} on {failure.subject.where}",
        failure.verdict.text,
        "To see it again:",
        f"  {command(failure)}",
    ]
    if failure.run is not None and failure.trial is not None:
        lines += ["One case shows it by itself:", f"  {_case_command(failure)}"]
    return "\n".join(lines)


def as_json(spec: AttentionSpec, plans: Sequence[AttentionPlan], wish: Wish, outcome: Outcome) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    from flashgen.spec.text.files import spec_to_dict

    found = outputs_of(outcome)
    return {
        "schema": SCHEMA,
        "spec": spec_to_dict(spec),
        "archs": [plan.arch.name for plan in plans],
        "seed": wish.seed,
        "race": _race(wish),
        "cases": outcome.cases,
        "runs": dict(outcome.runs),
        "worst": outputs.worst_json(found),
        "outputs": outputs.as_json(found),
        "ok": outcome.failure is None and not outcome.interrupted,
        "interrupted": outcome.interrupted,
        "failure": _failure_json(outcome.failure) if outcome.failure else None,
    }


def _failure_json(failure: Failure) -> dict[str, str | None]:
    return {
        "arch": failure.subject.plan.arch.name,
        "kind": failure.verdict.kind,
        "text": failure.verdict.text,
        "case": trial_text(failure.trial) if failure.trial else None,
        "command": command(failure),
    }


def _runs(wish: Wish, outcome: Outcome) -> str:
    orders = ", ".join(f"{count} {order}" for order, count in outcome.runs.items())
    watched = "; every access watched" if _race(wish) else ""
    return f"{outcome.runs.total()} runs ({orders}{watched})"


def _race(wish: Wish) -> bool:
    return wish.trial.mode.race if wish.trial else wish.race
