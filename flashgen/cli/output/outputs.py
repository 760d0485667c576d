"""Errors and slopes of each output on each architecture, for a person and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.oracle import Check, Slope
    from flashgen.verify import OutputReport

COLUMNS = ("output", "arch", "largest error", "bound", "ratio", "worst ratio", "slope", "case of the largest error")


@dataclass(frozen=True, slots=True)
class OutputOnArch:
    """One output of the kernels for one architecture; the cases are words for a person."""

    arch: str
    report: OutputReport
    largest_case: str
    worst_case: str


def describe_worst(outputs: Sequence[OutputOnArch]) -> str | None:
    """The worst ratio of all, and where it is; None if nothing was compared."""
    worst = _worst(outputs)
    if worst is None:
        return None
    check = worst.report.worst.check
    error, bound = _nearest(check)
    return (
        f"worst ratio {check.ratio:.2f}: {worst.report.output} of {worst.worst_case} on {worst.arch}, "
        f"error {error:.2e} of at most {bound:.2e}"
    )


def rows(outputs: Sequence[OutputOnArch]) -> list[tuple[str, ...]]:
    """A table with a line for each output on each architecture."""
    return [COLUMNS, *(_row(output) for output in outputs)] if outputs else []


def worst_json(outputs: Sequence[OutputOnArch]) -> dict[str, Any] | None:
    """The result with the worst ratio; None if nothing was compared."""
    worst = _worst(outputs)
    if worst is None:
        return None
    error, bound = _nearest(worst.report.worst.check)
    return {
        "output": worst.report.output,
        "arch": worst.arch,
        "error": _finite(error),
        "bound": _finite(bound),
        "ratio": _finite(worst.report.worst.check.ratio),
        "case": worst.worst_case,
    }


def as_json(outputs: Sequence[OutputOnArch]) -> list[dict[str, Any]]:
    """An object for each output on each architecture; a number that is not finite is null."""
    return [_output_json(output) for output in outputs]


def _output_json(output: OutputOnArch) -> dict[str, Any]:
    check, slope = output.report.largest.check, output.report.slope
    return {
        "output": output.report.output,
        "arch": output.arch,
        "max_error": _finite(check.max_error),
        "bound": _finite(check.bound),
        "ratio": _finite(_ratio_of_largest(check)),
        "case": output.largest_case,
        "worst_ratio": _finite(output.report.worst.check.ratio),
        "slope": None if slope is None else slope.value,
        "slope_noise": None if slope is None else slope.noise,
    }


def _row(output: OutputOnArch) -> tuple[str, ...]:
    check = output.report.largest.check
    return (
        output.report.output,
        output.arch,
        f"{check.max_error:.2e}",
        f"{check.bound:.2e}",
        f"{_ratio_of_largest(check):.2f}",
        f"{output.report.worst.check.ratio:.2f}",
        _slope(output.report.slope),
        output.largest_case,
    )


def _slope(slope: Slope | None) -> str:
    return "-" if slope is None else f"{slope.value:.5f}, noise {slope.noise:.0e}"


def _worst(outputs: Sequence[OutputOnArch]) -> OutputOnArch | None:
    return max(outputs, key=lambda output: output.report.worst.check.ratio, default=None)


def _nearest(check: Check) -> tuple[float, float]:
    return check.worst or (check.max_error, check.bound)


def _ratio_of_largest(check: Check) -> float:
    if not math.isfinite(check.max_error):
        return math.inf
    return check.max_error / check.bound if check.bound else math.inf if check.max_error else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
