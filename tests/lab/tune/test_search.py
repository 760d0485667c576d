"""The search, on a workbench whose clock passes only when something takes time."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.lab.tune.search import RefusedError, Search
from flashgen.plan.model.tuning import Trial
from flashgen.spec import Schedule

LENGTHS = (512, 4096)
DEFAULT, *OTHERS = [Schedule(), *(Schedule(tile_q=16 * n) for n in range(1, 9))]


class Bench:
    """Schedules by their milliseconds; building takes a second, and each call its time."""

    def __init__(
        self,
        ms: dict[Schedule, float],
        *,
        refused: Any = (),
        wrong: Any = (),
        wrong_in_the_end: Any = (),
        too_large: Any = (),
    ) -> None:
        self.ms, self.refused, self.wrong, self.wrong_in_the_end = ms, refused, wrong, wrong_in_the_end
        self.too_large = too_large
        self.now = 0.0
        self.log: list[tuple[Any, ...]] = []

    def clock(self) -> float:
        return self.now

    def build(self, schedule: Schedule) -> Schedule:
        self.now += 1.0
        if schedule in self.refused:
            raise RefusedError("too few registers")
        return schedule

    def fault(self, built: Schedule, *, thorough: bool) -> str | None:
        self.log.append(("verify", built, thorough))
        return "o is off" if built in (self.wrong_in_the_end if thorough else self.wrong) else None

    def times(self, built: Schedule, length: int, calls: int) -> list[float]:
        if built in self.too_large and length == max(LENGTHS):
            raise RefusedError("a call needs more memory than there is")
        self.log.append(("time", built, length, calls))
        # The longer, the slower, for all alike.
        ms = self.ms[built] * length / 512
        self.now += 1e-3 * ms * calls
        return [ms] * calls


def run(bench: Bench, schedules: list[Schedule], budget: float = 1000.0) -> tuple[Schedule, dict[Schedule, Trial]]:
    winner, trials = Search(bench, "forward", LENGTHS, budget, lambda text: None).run(schedules)
    assert [trial.schedule for trial in trials] == schedules
    return winner, {trial.schedule: trial for trial in trials}


def times_of(bench: Bench) -> list[tuple[Any, ...]]:
    return [entry[1:] for entry in bench.log if entry[0] == "time"]


def test_the_fastest_wins_and_slower_halves_drop_out() -> None:
    ms = {DEFAULT: 2.0, **{schedule: 1.0 + n for n, schedule in enumerate(OTHERS)}}
    bench = Bench(ms)
    winner, trials = run(bench, [DEFAULT, *OTHERS])
    assert winner == OTHERS[0]
    timed = times_of(bench)
    calls = [sum(1 for schedule, _, n in timed if n == each) for each in (1, 2, 4)]
    # Nine at both lengths, then the better five and the default among them, then three.
    assert calls[0] == 2 * 9
    assert calls == sorted(calls, reverse=True)
    assert trials[OTHERS[-1]].note == "slower after 1 rounds"
    assert trials[OTHERS[0]].note == ""
    assert trials[OTHERS[0]].ms == (1.0, 8.0)


def test_all_are_timed_in_turn_at_each_length() -> None:
    bench = Bench(dict.fromkeys((DEFAULT, *OTHERS[:2]), 1.0))
    run(bench, [DEFAULT, *OTHERS[:2]])
    first = [(schedule, length) for schedule, length, _ in times_of(bench)[:6]]
    assert {schedule for schedule, _ in first[:3]} == {schedule for schedule, _ in first[3:]} == set(bench.ms)
    assert [length for _, length in first] == [512] * 3 + [4096] * 3


def test_one_that_fails_verification_is_never_timed_nor_picked() -> None:
    fast, right = OTHERS[:2]
    bench = Bench({DEFAULT: 2.0, fast: 0.1, right: 1.0}, wrong=(fast,))
    winner, trials = run(bench, [DEFAULT, fast, right])
    assert winner == right
    assert trials[fast] == Trial("forward", fast, (), "wrong: o is off")
    assert fast not in {schedule for schedule, *_ in times_of(bench)}


def test_the_winner_must_pass_all_cases() -> None:
    fast, right = OTHERS[:2]
    bench = Bench({DEFAULT: 2.0, fast: 0.1, right: 1.0}, wrong_in_the_end=(fast, right))
    winner, trials = run(bench, [DEFAULT, fast, right])
    assert winner == DEFAULT
    assert trials[fast].note == "wrong: o is off"
    assert ("verify", fast, True) in bench.log


def test_a_refusal_is_noted() -> None:
    bench = Bench({DEFAULT: 2.0, OTHERS[0]: 1.0}, refused=(OTHERS[0],))
    winner, trials = run(bench, [DEFAULT, OTHERS[0]])
    assert (winner, trials[OTHERS[0]].note) == (DEFAULT, "refused: too few registers")


@pytest.mark.parametrize("too_large", [(DEFAULT,), (OTHERS[0],), (DEFAULT, OTHERS[0])])
def test_a_schedule_that_runs_out_of_memory_has_no_time(too_large: tuple[Schedule, ...]) -> None:
    bench = Bench({DEFAULT: 2.0, OTHERS[0]: 1.0}, too_large=too_large)
    winner, trials = run(bench, [DEFAULT, OTHERS[0]])
    assert winner == (DEFAULT if OTHERS[0] in too_large else OTHERS[0])
    for schedule in too_large:
        assert trials[schedule] == Trial("forward", schedule, (), "refused: a call needs more memory than there is")


def test_a_default_that_is_wrong_gives_way() -> None:
    bench = Bench({DEFAULT: 1.0, OTHERS[0]: 2.0}, wrong=(DEFAULT,))
    assert run(bench, [DEFAULT, OTHERS[0]])[0] == OTHERS[0]


def test_what_is_hardly_faster_is_not_worth_it() -> None:
    assert run(Bench({DEFAULT: 1.0, OTHERS[0]: 0.995}), [DEFAULT, OTHERS[0]])[0] == DEFAULT
    assert run(Bench({DEFAULT: 1.0, OTHERS[0]: 0.98}), [DEFAULT, OTHERS[0]])[0] == OTHERS[0]


def test_the_budget_ends_building_and_timing() -> None:
    bench = Bench({DEFAULT: 1.0, **dict.fromkeys(OTHERS, 50.0)})
    _, trials = run(bench, [DEFAULT, *OTHERS], budget=5.0)
    assert sum(trial.note == "not tried: the time was over" for trial in trials.values()) == len(OTHERS) - 2
    assert bench.now < 10
    # The default and what was built are timed once in any case.
    assert trials[DEFAULT].ms
    assert run(Bench({DEFAULT: 1.0, OTHERS[0]: 0.5}), [DEFAULT, OTHERS[0]], budget=1e-6)[0] == DEFAULT


@pytest.mark.parametrize("count", range(1, 9))
def test_the_search_ends_for_any_number_of_schedules(count: int) -> None:
    schedules = [DEFAULT, *OTHERS][:count]
    assert run(Bench(dict.fromkeys(schedules, 1.0)), schedules)[0] == DEFAULT
