"""Run a kernel on the cases, compare with the oracle, and report the worst error beside its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from flashgen.oracle import Check, backward, bounds, check, forward
from flashgen.spec import AttentionSpec
from flashgen.verify.cases import Case, cases_for

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: ``run(q, k, v, do, scale) -> (o, lse, dq, dk, dv)`` on NumPy arrays; without ``do`` the gradients are None.
Run: TypeAlias = Callable[[Any, Any, Any, Any, float], Sequence[Any]]
#: ``progress(number of cases done, number of all, the case that comes next or None)``.
Progress: TypeAlias = Callable[[int, int, "Case | None"], None]
TENSORS = ("o", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One tensor of one case."""

    case: Case
    tensor: str
    check: Check

    def describe(self) -> str:
        """One line for people."""
        verdict = "ok" if self.check.ok else "FAILED"
        note = f" ({self.check.note})" if self.check.note else ""
        error = f"{self.check.max_error:.2e} of at most {self.check.bound:.2e}"
        return f"{verdict}: {self.tensor} of {self.case.describe()}: error {error}{note}"


@dataclass(frozen=True, slots=True)
class Verification:
    """The verdict; ``max_error`` and ``bound`` are of the tensor nearest to its bound."""

    target: str
    cases: int
    max_error: float
    bound: float
    ok: bool
    details: tuple[CaseResult, ...] = ()

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """What is not within its bound."""
        return tuple(result for result in self.details if not result.check.ok)


def verify(
    run: Run,
    spec: AttentionSpec,
    *,
    cases: Sequence[Case] | None = None,
    seed: int = 0,
    target: str = "kernel",
    progress: Progress | None = None,
) -> Verification:
    """Check ``run`` on every case (those of ``cases_for`` when none are named)."""
    cases = cases_for(spec) if cases is None else tuple(cases)
    details: list[CaseResult] = []
    for done, case in enumerate(cases):
        if progress is not None:
            progress(done, len(cases), case)
        details += _run_case(run, spec, case, seed)
    if progress is not None:
        progress(len(cases), len(cases), None)
    worst = max((result.check for result in details), key=lambda c: c.ratio, default=Check(0.0, 0.0, True))
    ok = all(result.check.ok for result in details)
    return Verification(target, len(cases), worst.max_error, worst.bound, ok, tuple(details))


def _run_case(run: Run, spec: AttentionSpec, case: Case, seed: int) -> list[CaseResult]:
    inputs = case.inputs(spec, seed)
    q, k, v = inputs.q, inputs.k, inputs.v
    do = inputs.do if spec.needs_backward else None
    scale = spec.default_scale if case.scale is None else case.scale
    actual = (*run(q, k, v, do, scale), None, None, None)  # gradients that do not come fail the check
    exact: tuple[NDArray[np.float64], ...] = forward(spec, q, k, v, scale=scale)
    if do is not None:
        exact += backward(spec, q, k, v, do, scale=scale)
    limits = bounds(spec, q, k, v, do, scale, exact=exact)
    return [
        CaseResult(case, name, check(result, reference, getattr(limits, name), exact_infinity=name == "lse"))
        for name, result, reference in zip(TENSORS, actual, exact, strict=False)
    ]
