"""The smallest trial that fails in the same way: simple steps, taken while they still fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from flashgen.verify.cases.case import PLAIN, Case
from flashgen.verify.trial import Mode, Trial

#: Trials that a search may take; what it has by then is small enough.
MOST_TRIALS = 150


def shrunk(trial: Trial, fails: Callable[[Trial], bool], most_trials: int = MOST_TRIALS) -> Trial:
    """The smallest trial found for which ``fails`` still holds; deterministic where ``fails`` is."""
    left = most_trials
    tried = {trial}
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(trial):
            if smaller in tried:
                continue
            if left == 0:
                return trial
            left -= 1
            tried.add(smaller)
            if fails(smaller):
                trial, progress = smaller, True
                break
    return trial


def _smaller(trial: Trial) -> Iterator[Trial]:
    """Trials one step simpler, the largest steps first. Race mode stays, because a race shows only there."""
    case, mode = trial.case, trial.mode
    for simpler in (Mode(race=mode.race), replace(mode, schedule="sequential", seed=0), replace(mode, guard="end")):
        if simpler != mode:
            yield replace(trial, mode=simpler)
    for smaller in _smaller_cases(case):
        if smaller != case:
            yield replace(trial, case=smaller)


def _smaller_cases(case: Case) -> Iterator[Case]:
    yield replace(case, batch=min(case.batch, 1), heads=min(case.heads, 1), heads_kv=min(case.heads_kv, 1))
    yield replace(case, batch=min(case.batch, 1))
    yield replace(case, batch=min(case.batch, max(case.batch - 1, 1)))
    if case.heads_kv:
        group = case.heads // case.heads_kv
        yield replace(case, heads=group, heads_kv=1)
        yield replace(case, heads=case.heads_kv)
    yield replace(case, layouts=PLAIN)
    for i in range(len(PLAIN)):
        layouts = list(case.layouts)
        layouts[i] = "contiguous"
        q, k, v, do = layouts
        yield replace(case, layouts=(q, k, v, do))
    yield replace(case, fill="normal")
    yield replace(case, non_finite="nothing")
    yield replace(case, scale=None)
    yield replace(case, seed=0)
    yield replace(case, p=0.25)
    yield replace(case, dlse=False)
    yield from (replace(case, len_q=length) for length in _shorter(case.len_q))
    yield from (replace(case, len_kv=length) for length in _shorter(case.len_kv))


def _shorter(length: int) -> Iterator[int]:
    """One, then ever smaller steps down: a half, a quarter ... and one less."""
    if length > 1:
        yield 1
    step = length // 2
    while step:
        yield length - step
        step //= 2
