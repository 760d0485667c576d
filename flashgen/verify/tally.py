"""The results of a run's cases, summed up for each output: the largest error, the worst ratio, and the slope."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flashgen.oracle import LSE_SLOPE_TOLERANCE, SLOPE_TOLERANCE, Slope, pooled_slope
from flashgen.verify.cases.case import TENSORS, Case
from flashgen.verify.expectation import CaseResult


@dataclass(frozen=True, slots=True)
class OutputReport:
    """One output over the cases of a run."""

    output: str
    #: The result with the largest absolute error.
    largest: CaseResult
    #: The result nearest to, or furthest beyond, its bound.
    worst: CaseResult
    #: None where the results cannot tell.
    slope: Slope | None

    @property
    def is_systematic(self) -> bool:
        """Whether the slope says that all results are off by a factor."""
        return self.slope is not None and not self.slope.ok

    def describe_slope(self) -> str:
        """One line about a slope that is not 1."""
        slope = self.slope
        assert slope is not None
        return (
            f"FAILED: {self.output} has a systematic error: the slope of the results on the oracle is "
            f"{slope.value:.6g} over {slope.cases} cases and {slope.values:,} values; "
            f"it must be 1 within {slope.tolerance:g} and its noise of {slope.noise:.1e}"
        )


@dataclass(slots=True)
class Tally:
    """Collects results for ``reports``. Add a case once, even if it runs several times."""

    _results: dict[str, list[CaseResult]] = field(default_factory=dict)

    def add(self, results: Iterable[CaseResult]) -> None:
        """Take in the results of one run of one case."""
        for result in results:
            self._results.setdefault(result.tensor, []).append(result)

    def reports(self) -> tuple[OutputReport, ...]:
        """A report on each output that any case compared."""
        return tuple(_report(name, self._results[name]) for name in TENSORS if name in self._results)

    def systematic(self) -> tuple[OutputReport, ...]:
        """The reports on outputs that are off by a factor."""
        return tuple(report for report in self.reports() if report.is_systematic)

    def shown_alone_by(self, output: str) -> Case | None:
        """The smallest case whose own slope fails; None where it takes several cases."""
        alone = [result for result in self._results[output] if _report(output, [result]).is_systematic]
        return min(alone, key=lambda result: result.slope.values if result.slope else 0).case if alone else None


def _report(name: str, results: list[CaseResult]) -> OutputReport:
    largest = max(results, key=lambda result: result.check.max_error)
    worst = max(results, key=lambda result: result.check.ratio)
    tolerance = LSE_SLOPE_TOLERANCE if name == "lse" else SLOPE_TOLERANCE
    return OutputReport(name, largest, worst, pooled_slope([result.slope for result in results], tolerance))
