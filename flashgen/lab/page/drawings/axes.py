"""The axes of a plot: where values lie, and which of them have numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """From the least to the greatest value along some pixels; ``base`` is that of a logarithmic axis."""

    low: float
    high: float
    begin: float
    end: float
    base: int | None = None

    @classmethod
    def around(cls, values: list[float], begin: float, end: float, base: int | None = None) -> Axis:
        """An axis that holds all values: whole powers of a base, or from 0 to a round number."""
        if base is None:
            high = max(values, default=1.0) or 1.0
            step = _round_step(high)
            return cls(0.0, math.ceil(high / step) * step, begin, end)
        low, high = _log(min(values, default=1.0), base), _log(max(values, default=1.0), base)
        least, most = math.floor(low + 1e-9), math.ceil(high - 1e-9)
        return cls(float(base) ** least, float(base) ** max(most, least + 1), begin, end, base)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        if self.base is None:
            share = (value - self.low) / (self.high - self.low)
        else:
            share = (_log(value, self.base) - _log(self.low, self.base)) / (
                _log(self.high, self.base) - _log(self.low, self.base)
            )
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Values that have numbers, at most about eight."""
        if self.base is None:
            step = _round_step(self.high)
            return [step * number for number in range(round(self.high / step) + 1)]
        least, most = round(_log(self.low, self.base)), round(_log(self.high, self.base))
        stride = -(-(most - least) // 8) or 1
        return [float(self.base) ** power for power in range(least, most + 1, stride)]


def number(value: float) -> str:
    """A tick's number: ``16k``, ``0.1``, ``1M``."""
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if value >= unit and value % unit == 0:
            return f"{value / unit:.0f}{name}"
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def _log(value: float, base: int) -> float:
    return math.log2(value) if base == 2 else math.log(value, base)


def _round_step(high: float) -> float:
    """1, 2 or 5 times a power of ten: four to eight steps."""
    power = 10.0 ** math.floor(math.log10(high / 4))
    return next(factor * power for factor in (1, 2, 5, 10) if high / (factor * power) <= 8)
