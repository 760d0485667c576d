"""The work of ``flashgen check``: run drawn cases on kernels until one fails, and make that one small; in the end see
whether the outputs of all of them are off by a factor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast

from flashgen.cli.exits import UsageError
from flashgen.cli.output import talk
from flashgen.errors import EmulationError, LaunchError
from flashgen.launch.copies.run import runner
from flashgen.verify import (
    Case,
    CaseResult,
    Expectation,
    Mode,
    Tally,
    Tiles,
    Trial,
    draw,
    draw_decode,
    expect,
    modes,
    run_case,
    shrunk,
)

if TYPE_CHECKING:
    from flashgen.cli.gpu.arrays import Gpu
    from flashgen.kernel import Kernel
    from flashgen.launch.host import HostTarget
    from flashgen.pipeline import TargetName
    from flashgen.plan.model.plans import AttentionPlan
    from flashgen.spec import Schedule

#: The kind of a failure that is no finding of the emulator.
INACCURATE = "inaccurate"
SYSTEMATIC = "systematic"
LAUNCH = "launch"


@dataclass(frozen=True, slots=True)
class Wish:
    """What to run; with a ``trial``, nothing else."""

    cases: int
    schedules: int = 0
    race: bool = False
    seed: int = 0
    trial: Trial | None = None
    #: Whether cases are for the decode kernel.
    decode: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run came to: what is wrong, if anything, and the results of its case."""

    kind: str = ""
    text: str = ""
    results: tuple[CaseResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """The smallest trial that fails as the first one did."""

    subject: Subject
    #: None where it takes all cases of the run to see a systematic error.
    trial: Trial | None
    verdict: Verdict
    #: The run whose cases show a systematic error together.
    run: Wish | None = None


@dataclass(slots=True)
class Outcome:
    """What was run, and what came of it."""

    cases: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    #: The results on each architecture.
    tallies: dict[str, Tally] = field(default_factory=dict)
    failure: Failure | None = None
    interrupted: bool = False


class Subject:
    """The kernels of one plan, and where they run: a GPU, or without one the emulator."""

    def __init__(self, plan: AttentionPlan, asked: Schedule | None, gpu: Gpu | None) -> None:
        self.plan, self.asked, self.gpu = plan, asked, gpu

    @property
    def where(self) -> str:
        """Where it runs, in words."""
        return f"{self.plan.arch.name} on {self.gpu.name if self.gpu else 'the emulator'}"

    @cached_property
    def _kernel(self) -> Kernel:
        from flashgen.kernel import Kernel
        from flashgen.pipeline import variant

        target: TargetName = "emulator" if self.gpu is None else "gpu"
        return Kernel(variant(self.plan, target), target)

    def run(self, expected: Expectation, mode: Mode) -> Verdict:
        """Run a case once and judge it."""
        kernel = self._kernel
        if self.gpu is None:
            cast("HostTarget", kernel.target).options = mode.options
        try:
            results = run_case(runner(kernel, self.gpu.ordinal if self.gpu else None), self.plan.spec, expected)
        except EmulationError as error:
            return Verdict(error.kind or "emulator", str(error))
        except LaunchError as error:
            return Verdict(LAUNCH, str(error))
        wrong = [result.describe() for result in results if not result.check.ok]
        return Verdict(INACCURATE if wrong else "", "\n".join(wrong), tuple(results))

    def smallest(self, trial: Trial, verdict: Verdict) -> Failure:
        """The failure, with as small a trial as fails in the same way."""
        found = Failure(self, trial, verdict)
        if verdict.kind == LAUNCH:  # nothing runs on a GPU after that
            return found

        def fails(smaller: Trial) -> bool:
            nonlocal found
            outcome = self.run(self.expect(smaller.case), smaller.mode)
            if outcome.kind == verdict.kind:
                found = Failure(self, smaller, outcome)
            return outcome.kind == verdict.kind

        try:
            with talk.working(f"{verdict.kind} found on {self.where}: looking for the smallest case"):
                shrunk(trial, fails)
        except KeyboardInterrupt:
            talk.warn("interrupted: the case may not be the smallest")
        return found

    def expect(self, case: Case) -> Expectation:
        """What a case must give."""
        try:
            return expect(self.plan.spec, case, any_values=True)
        except MemoryError:
            raise UsageError("the case needs more memory than there is; make its lengths or heads smaller") from None


def check_all(subjects: Sequence[Subject], wish: Wish) -> Outcome:
    """Run what is wished on every subject, up to the first failure or Ctrl-C."""
    outcome = Outcome()
    try:
        for subject in subjects:
            _check(subject, wish, outcome)
            if outcome.failure is not None:
                break
    except KeyboardInterrupt:
        outcome.interrupted = True
    return outcome


def _check(subject: Subject, wish: Wish, outcome: Outcome) -> None:
    total = 1 if wish.trial else wish.cases
    failed: tuple[Trial, Verdict] | None = None
    tally = outcome.tallies.setdefault(subject.plan.arch.name, Tally())
    with talk.progress(f"checking {subject.where}", total) as update:
        for done, (case, ways) in enumerate(_cases(subject, wish)):
            update(done, f"checking {subject.where}")
            failed = _try_case(subject, case, ways, outcome, tally)
            outcome.cases += 1
            if failed is not None:
                break
    if failed is None:
        outcome.failure = systematic_failure(subject, tally, wish)
    else:
        # Who names a case wants to see that one.
        outcome.failure = Failure(subject, *failed) if wish.trial else subject.smallest(*failed)


def systematic_failure(subject: Subject, tally: Tally, wish: Wish) -> Failure | None:
    """What the slopes of a run's results say, when no result of it fails by itself."""
    wrong = tally.systematic()
    if not wrong:
        return None
    verdict = Verdict(SYSTEMATIC, "\n".join(report.describe_slope() for report in wrong))
    if wish.trial is not None:
        return Failure(subject, wish.trial, verdict)
    alone = next(filter(None, (tally.shown_alone_by(report.output) for report in wrong)), None)
    return Failure(subject, Trial(alone) if alone else None, verdict, wish)


def _try_case(
    subject: Subject, case: Case, ways: Sequence[Mode], outcome: Outcome, tally: Tally
) -> tuple[Trial, Verdict] | None:
    """Run a case in each way; the first that fails."""
    expected = subject.expect(case)
    for number, mode in enumerate(ways):
        verdict = subject.run(expected, mode)
        outcome.runs[mode.schedule] += 1
        if number == 0:  # other orders of threads give the same rounding errors once more
            tally.add(verdict.results)
        if verdict.kind:
            return Trial(case, mode), verdict
    return None


def _cases(subject: Subject, wish: Wish) -> Iterator[tuple[Case, Sequence[Mode]]]:
    if wish.trial is not None:
        yield wish.trial.case, (wish.trial.mode,)
        return
    plan = subject.plan
    tiles = Tiles.of(plan.schedule)
    for index in range(wish.cases):
        case = (draw_decode if wish.decode else draw)(plan.spec, tiles, wish.seed, index)
        yield case, modes(wish.seed, index, schedules=wish.schedules, race=wish.race)
