"""``flashgen check``: drawn cases, awkward and hostile, until one fails."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated

from typer import Exit as Leave
from typer import Option

from flashgen.cli.commands.builder import check_decode, plan_all
from flashgen.cli.exits import Exit, UsageError
from flashgen.cli.gpu.arrays import Gpu, archs_to_build, find_gpus, gpu_to_build_for
from flashgen.cli.options import with_kernel_options
from flashgen.cli.output import talk
from flashgen.cli.request import Request
from flashgen.errors import NoGpuError

if TYPE_CHECKING:
    from flashgen.cli.commands.checking import Wish
    from flashgen.plan.model.plans import AttentionPlan

CHECK = "Check"
DEFAULT_CASES = 100
LARGEST_SEED = 2**64 - 1


class TargetOption(str, Enum):
    """Where cases run."""

    EMULATOR = "emulator"
    GPU = "gpu"


@with_kernel_options
def check(
    request: Request,
    cases: Annotated[
        int | None,
        Option("--cases", help=f"Cases for each architecture; default {DEFAULT_CASES}.", rich_help_panel=CHECK),
    ] = None,
    race: Annotated[
        bool, Option("--race", help="Watch every load and store for races.", rich_help_panel=CHECK)
    ] = False,
    schedules: Annotated[
        int,
        Option("--schedules", help="Further orders of threads to run each case in.", rich_help_panel=CHECK),
    ] = 0,
    seed: Annotated[int | None, Option("--seed", help="Draw other cases; default 0.", rich_help_panel=CHECK)] = None,
    case: Annotated[
        str | None,
        Option("--case", metavar="TEXT", help="Run this one case, as a failure printed it.", rich_help_panel=CHECK),
    ] = None,
    target: Annotated[
        TargetOption, Option("--target", help="Where to run them; default emulator.", rich_help_panel=CHECK)
    ] = TargetOption.EMULATOR,
    json: Annotated[bool, Option("--json", help="Print one JSON object on stdout.", rich_help_panel=CHECK)] = False,
) -> None:
    """Draw cases, run them forward and backward, and compare with the oracle."""
    from flashgen.cli.commands.checking import Subject, check_all
    from flashgen.cli.output.check_report import as_json, describe, describe_failure, outputs_of
    from flashgen.cli.output.outputs import rows

    wish = replace(_wish(cases, race, schedules, seed, case, target), decode=request.decode)
    gpus = find_gpus() if target is TargetOption.GPU or not request.archs else ()
    archs, chosen_by = archs_to_build(request.archs, gpus, request.spec), gpu_to_build_for(request.archs, gpus)
    plans = plan_all(request.spec, request.schedule, archs, chosen_by)
    check_decode(request, plans)
    if target is TargetOption.EMULATOR:
        from flashgen.emulator.toolchain import find_toolchain

        find_toolchain()  # the error says what to install
    subjects = [Subject(plan, request.schedule, _gpu(plan, gpus, target)) for plan in plans]
    outcome = check_all(subjects, wish)
    if json:
        talk.print_json(as_json(request.spec, plans, wish, outcome))
    else:
        talk.print_text(describe(plans, wish, outcome))
        talk.print_rows(rows(outputs_of(outcome)))
    if outcome.failure is not None:
        talk.fail(describe_failure(outcome.failure))
        raise Leave(Exit.CHECK_FAILED)
    if outcome.interrupted:
        raise Leave(Exit.INTERRUPTED)


def _wish(
    cases: int | None, race: bool, schedules: int, seed: int | None, case: str | None, target: TargetOption
) -> Wish:
    """What to run; a UsageError names what cannot be."""
    from flashgen.cli.commands.checking import Wish
    from flashgen.verify import parse_trial

    given = {"--cases": cases is not None, "--race": race, "--schedules": schedules != 0, "--seed": seed is not None}
    if case is not None and any(given.values()):
        names = ", ".join(name for name, there in given.items() if there)
        raise UsageError(f"{names} cannot go with --case, which says all of that itself; leave one of them out")
    if target is TargetOption.GPU and (race or schedules):
        raise UsageError("--race and --schedules are for the emulator; leave them out, or leave --target gpu out")
    for name, value, least in (("--cases", cases, 1), ("--schedules", schedules, 0), ("--seed", seed, 0)):
        if value is not None and not least <= value <= LARGEST_SEED:
            raise UsageError(f"{name}={value} is out of range; use a whole number from {least}")
    trial = None if case is None else parse_trial(case)
    return Wish(DEFAULT_CASES if cases is None else cases, schedules, race, seed or 0, trial)


def _gpu(plan: AttentionPlan, gpus: tuple[Gpu, ...], target: TargetOption) -> Gpu | None:
    """The GPU for a plan; None for the emulator."""
    if target is TargetOption.EMULATOR:
        return None
    gpu = next((g for g in gpus if plan.arch.runs_on(g.capability)), None)
    if gpu is None:
        raise NoGpuError(f"--target gpu: no GPU here runs {plan.arch.name}; leave it out to check on the emulator")
    return gpu
