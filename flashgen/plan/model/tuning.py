"""What a search for the fastest schedule tried on a GPU, and what it chose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from flashgen.common.columns import columns
from flashgen.spec import BackwardSchedule, Schedule


@dataclass(frozen=True, slots=True)
class Trial:
    """One schedule of one pass."""

    pass_: str
    schedule: Schedule
    #: Milliseconds for each length; empty if it was not timed.
    ms: tuple[float, ...] = ()
    #: Why it was not timed, or not timed to the end.
    note: str = ""

    @property
    def mean_ms(self) -> float:
        """The geometric mean over lengths; infinite if it was not timed."""
        if not self.ms:
            return math.inf
        return math.exp(sum(math.log(max(each, 1e-9)) for each in self.ms) / len(self.ms))

    def describe(self) -> str:
        """The fields of the schedule that are set, for people."""
        return describe_schedule(self.schedule)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The schedule that was fastest for a spec on a GPU, and all that were tried; ``str()`` draws a table."""

    gpu: str
    lengths: tuple[int, ...]
    schedule: Schedule
    trials: tuple[Trial, ...]

    @property
    def headline(self) -> str:
        """Where it was tuned, and to what."""
        lengths = ", ".join(map(str, self.lengths))
        return f"tuned on {self.gpu} for lengths {lengths}: {describe_schedule(self.schedule)}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        trials = [
            {
                "pass": trial.pass_,
                "schedule": trial.describe(),
                "ms": list(trial.ms),
                "note": trial.note,
            }
            for trial in self.trials
        ]
        chosen = describe_schedule(self.schedule)
        return {"schema": 1, "device": self.gpu, "lengths": list(self.lengths), "schedule": chosen, "trials": trials}

    def __str__(self) -> str:
        return "\n".join([self.headline, *columns(self._rows())])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        yield ("pass", "schedule", *(f"ms at {length}" for length in self.lengths), "of the default", "")
        for pass_ in dict.fromkeys(trial.pass_ for trial in self.trials):
            own = [trial for trial in self.trials if trial.pass_ == pass_]
            default = own[0].mean_ms
            for trial in sorted(own, key=lambda trial: trial.mean_ms):
                times = [f"{ms:.4g}" for ms in trial.ms] or ["-"] * len(self.lengths)
                ratio = f"{default / trial.mean_ms:.2f}x" if trial.ms and math.isfinite(default) else "-"
                yield (pass_, trial.describe(), *times, ratio, trial.note)


def describe_schedule(schedule: Schedule) -> str:
    """``fa3, tile_kv=112, stages=2``: what a schedule sets."""
    words: list[str] = [schedule.algorithm] if schedule.algorithm else []
    words += [
        f"{name}={getattr(schedule, name)}"
        for name in ("tile_q", "tile_kv", "stages", "softmax", "registers")
        if getattr(schedule, name) is not None
    ]
    if schedule.warps is not None:
        w = schedule.warps
        words.append(f"consumers={w.consumers}" if w.kind == "specialized" else f"{w.kind} {w.warps} warps")
    backward = [
        f"{field.name}={value}"
        for field in fields(BackwardSchedule)
        if (value := getattr(schedule.backward, field.name)) is not None
    ]
    words += ["backward " + ", ".join(backward)] if backward else []
    return ", ".join(words) or "default"
