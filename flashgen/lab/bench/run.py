"""``time_attention``: check every candidate, then time all that are right in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.dtypes import DTYPES
from flashgen.errors import ArgumentError
from flashgen.lab.bench.candidate import Call, Candidate, RefusedError
from flashgen.lab.bench.case import Case, Inputs, distance, expected, last_head, sampled
from flashgen.lab.bench.timings import Row, Skipped, Timings
from flashgen.lab.timing.device import Device, is_out_of_memory
from flashgen.lab.timing.rounds import Timing, interleaved

#: Relative error (Frobenius norm) above which a result is wrong rather than rounded, in units of the dtype's rounding.
_ROUNDINGS = 4.0
#: Of float32 results: some libraries multiply in tf32.
_TOLERANCE_FP32 = 2e-3
_LONGEST_REASON = 200

#: ``progress(number of cases done, what is done now)``.
Progress = Callable[[int, str], None]


def no_progress(done: int, text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a bench measures."""

    rounds: int = 5
    #: Milliseconds for each candidate in each round.
    ms: float = 25.0
    #: A call that takes longer is timed once, and not in rounds.
    slow_ms: float = 500.0


def time_attention(
    cases: Sequence[Case],
    candidates: Sequence[Candidate],
    device: Device,
    *,
    effort: Effort = Effort(),
    progress: Progress = no_progress,
    finished: Callable[[Timings], None] = lambda timings: None,
) -> Timings:
    """Times of all candidates for all cases, interleaved; ``finished`` gets what is known after each case."""
    rows: tuple[Row, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    shared = _SharedInputs(device)
    for done, case in enumerate(cases):
        found = _OneCase(case, device, effort, lambda text, n=done: progress(n, text))  # type: ignore[misc]
        found.measure(candidates, *shared.of(case))
        rows, skipped = (*rows, *found.rows), (*skipped, *found.skipped)
        finished(Timings(device.name, rows, skipped))
    return Timings(device.name, rows, skipped)


class _SharedInputs:
    """The arrays of the last case: those of the other mask and the other pass are the same."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: tuple[tuple[object, ...], Inputs, Inputs] | None = None

    def of(self, case: Case) -> tuple[Inputs, Inputs]:
        """On the host, and on the device."""
        sizes: tuple[object, ...] = (case.dtype, case.head_dim, case.len, case.batch, case.heads)
        sizes = (*sizes, case.queries, case.kv_heads, case.cache_dtype)
        if self._made is None or self._made[0] != sizes:
            # Not two sets at a time.
            self._made = None
            host = case.inputs()
            self._made = sizes, host, Inputs(*map(self._device.put, (host.q, host.k, host.v, host.do)))
        return self._made[1:]


@dataclass(slots=True)
class _OneCase:
    """The candidates of one case."""

    case: Case
    device: Device
    effort: Effort
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    #: Rows of all heads by the first candidate whose last head is right.
    first: tuple[NDArray[np.float32], ...] | None = None

    def measure(self, candidates: Iterable[Candidate], host: Inputs, on_device: Inputs) -> None:
        self.say(f"{self.case}: reference")
        exact = expected(self.case, host)
        calls: dict[str, tuple[Candidate, Call]] = {}
        for candidate in candidates:
            self.say(f"{self.case}: checking {candidate.name}")
            inputs = host if candidate.device else on_device
            call = self._attempt(candidate, lambda c=candidate, i=inputs: self._checked(c, i, exact))  # type: ignore[misc]
            if call is not None:
                calls[candidate.name] = candidate, call
        self._time(calls)

    def _checked(self, candidate: Candidate, inputs: Inputs, exact: Sequence[NDArray[np.float32]]) -> Call:
        where = candidate.device or self.device
        call = candidate.prepare(self.case, inputs, where)
        made = [where.get(result) for result in call()]
        error = max(distance(last_head(x), y) for x, y in zip(made, exact, strict=True))
        rows = tuple(map(sampled, made))
        tolerance = _tolerance(self.case.dtype)
        if self.first is not None and error <= tolerance:
            error = max(distance(x, y) for x, y in zip(rows, self.first, strict=True))
        if not error <= tolerance:
            raise _WrongError(f"its result is wrong: relative error {error:.2g}, at most {tolerance:.2g} is rounding")
        self.first = self.first or rows
        return call

    def _time(self, calls: dict[str, tuple[Candidate, Call]]) -> None:
        estimates: dict[str, float] = {}
        for name, (candidate, call) in calls.items():
            self.say(f"{self.case}: {name}")
            device = candidate.device or self.device
            found = self._attempt(candidate, lambda c=call, d=device: d.times(c, 1)[0])  # type: ignore[misc]
            if found is not None:
                estimates[name] = found
        quick = {name: ms for name, ms in estimates.items() if ms <= self.effort.slow_ms}
        self.say(f"{self.case}: {self.effort.rounds} rounds of {len(quick)} candidates")
        times = {name: _times(calls[name], self.device) for name in quick}
        timings = interleaved(times, quick, self.effort.rounds, self.effort.ms)
        for name, estimate in estimates.items():
            candidate, call = calls[name]
            timing = timings.get(name) or Timing(estimate, 0.0, 1)
            self.rows.append(Row(name, self.case, timing, self._bytes(candidate, call), candidate.peer))

    def _bytes(self, candidate: Candidate, call: Call) -> int:
        if candidate.device is not None:
            return 0
        peak = self.device.peak_bytes(call)
        return peak + self.case.argument_bytes if peak else 0

    def _attempt(self, candidate: Candidate, work: Callable[[], Any]) -> Any:
        """What the work returns; None, and the reason noted, where a candidate cannot do it."""
        try:
            return work()
        except (RefusedError, ArgumentError) as error:
            # A kernel refuses sizes that are too large for it by an ArgumentError.
            reason, wrong = str(error), False
        except _WrongError as error:
            reason, wrong = str(error), True
        except Exception as error:
            if is_out_of_memory(error):
                self.device.release()
                reason, wrong = "it needs more memory than there is", False
            elif candidate.peer:
                reason, wrong = f"{type(error).__name__}: {error}", False
            else:
                raise
        line = " ".join(reason.split())[:_LONGEST_REASON]
        self.skipped.append(Skipped(candidate.name, self.case, line, wrong))
        return None


class _WrongError(Exception):
    """A candidate computed something else."""


def _times(prepared: tuple[Candidate, Call], device: Device) -> Callable[[int], list[float]]:
    candidate, call = prepared
    where = candidate.device or device
    return lambda calls: where.times(call, calls)


def _tolerance(dtype: str) -> float:
    return max(_TOLERANCE_FP32, _ROUNDINGS * DTYPES[dtype].epsilon)
