"""What ``flashgen check`` found, for a person and as JSON."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashgen.cli.checking import Failure, Outcome, Wish
from flashgen.verify import trial_text

if TYPE_CHECKING:
    from flashgen.plan.model import AttentionPlan
    from flashgen.spec import AttentionSpec

SCHEMA = 1


def command(failure: Failure) -> str:
    """The command that runs exactly the failing case."""
    from flashgen.spec.command import rebuild_command

    plan = failure.subject.plan
    build = rebuild_command(plan.spec, failure.subject.asked, plan.arch.name)
    options = build.removeprefix("flashgen build ")
    target = " --target gpu" if failure.subject.gpu else ""
    return f"flashgen check {options}{target} --case {shlex.quote(trial_text(failure.trial))}"


def describe(plans: Sequence[AttentionPlan], wish: Wish, outcome: Outcome) -> str:
    """One line for people."""
    verdict = "interrupted" if outcome.interrupted else "FAILED" if outcome.failure else "ok"
    archs = ", ".join(plan.arch.name for plan in plans)
    parts = [f"{verdict}: {archs}: {outcome.cases} cases, {_runs(wish, outcome)}"]
    if outcome.worst is not None:
        parts.append(f"largest error {outcome.worst.max_error:.2e} beside its bound {outcome.worst.bound:.2e}")
    return ", ".join(parts)


def describe_failure(failure: Failure) -> str:
    """What went wrong, and the command that shows it again."""
    return "\n".join(
        [
            f"{failure.verdict.kind} on {failure.subject.where}",
            failure.verdict.text,
            "To see it again:",
            f"  {command(failure)}",
        ]
    )


def as_json(spec: AttentionSpec, plans: Sequence[AttentionPlan], wish: Wish, outcome: Outcome) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    from flashgen.spec.files import spec_to_dict

    worst = outcome.worst
    return {
        "schema": SCHEMA,
        "spec": spec_to_dict(spec),
        "archs": [plan.arch.name for plan in plans],
        "seed": wish.seed,
        "race": _race(wish),
        "cases": outcome.cases,
        "runs": dict(outcome.runs),
        "max_error": _finite(worst.max_error) if worst else None,
        "bound": _finite(worst.bound) if worst else None,
        "ok": outcome.failure is None and not outcome.interrupted,
        "interrupted": outcome.interrupted,
        "failure": _failure_json(outcome.failure) if outcome.failure else None,
    }


def _failure_json(failure: Failure) -> dict[str, str]:
    return {
        "arch": failure.subject.plan.arch.name,
        "kind": failure.verdict.kind,
        "text": failure.verdict.text,
        "case": trial_text(failure.trial),
        "command": command(failure),
    }


def _runs(wish: Wish, outcome: Outcome) -> str:
    orders = ", ".join(f"{count} {order}" for order, count in outcome.runs.items())
    watched = "; every access watched" if _race(wish) else ""
    return f"{outcome.runs.total()} runs ({orders}{watched})"


def _race(wish: Wish) -> bool:
    return wish.trial.mode.race if wish.trial else wish.race


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
