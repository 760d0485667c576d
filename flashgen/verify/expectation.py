"""The expected results of a case: the oracle's, with a bound on the error of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.oracle import CaseSlope, Check, backward, bounds, case_slope, check, forward
from flashgen.oracle.rounded import RoundedResult
from flashgen.oracle.rules import Floats
from flashgen.oracle.scales import Scales
from flashgen.spec import AttentionSpec, Dropout
from flashgen.verify.cases.cached import Filling
from flashgen.verify.cases.captured import with_values
from flashgen.verify.cases.case import TENSORS, Case, Inputs
from flashgen.verify.cases.packed import Packing
from flashgen.verify.rounding import rounding_errors


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One tensor of one case."""

    case: Case
    tensor: str
    check: Check
    slope: CaseSlope | None = None

    def describe(self) -> str:
        """One line for people."""
        verdict = "ok" if self.check.ok else "FAILED"
        note = f" ({self.check.note})" if self.check.note else ""
        error, bound = self.check.worst or (self.check.max_error, self.check.bound)
        return f"{verdict}: {self.tensor} of {self.case.describe()}: error {error:.2e} of at most {bound:.2e}{note}"


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """A case's inputs, the oracle's results and their bounds, computed once for any number of runs."""

    case: Case
    inputs: Inputs
    scale: float
    exact: tuple[NDArray[np.float64], ...]
    limits: tuple[float | NDArray[np.float64], ...]
    #: The spec's captured tensors, drawn for the case.
    captured: Mapping[str, Any] = field(default_factory=dict)
    dropout: Dropout | None = None
    packing: Packing | None = None
    filling: Filling | None = None
    #: Of 8-bit q, k and v, for a batch of sequences.
    scales: Scales = field(default_factory=Scales)
    #: The results of one run in the spec's dtype; without it there are no slopes.
    rounded: RoundedResult | None = None

    def judge(self, results: Sequence[Any]) -> list[CaseResult]:
        """Each tensor that the case compares; one that is missing fails."""
        given = (*results, None, None, None)
        outputs = zip(TENSORS, given, self.exact, self.limits, strict=False)
        return [self._judge(*output) for output in outputs if output[0] in self.case.compared]

    def _judge(self, name: str, result: Any, exact: Floats, limit: float | Floats) -> CaseResult:
        slope = None
        if self.rounded is not None:
            slope = case_slope(result, exact, limit, getattr(self.rounded, name), self.rounded.pairs)
        return CaseResult(self.case, name, check(result, exact, limit, exact_infinity=name == "lse"), slope)


def expect(spec: AttentionSpec, case: Case, *, any_values: bool = False) -> Expectation:
    """The expectation of a case; ``any_values`` allows what rounding of every term can add up to, if that is more.

    The standard cases do without: on them, one rounded run is no accident.
    """
    spec = with_values(spec, case)
    inputs, scale, dropout = case.inputs(spec), case.scale_for(spec), case.dropout_for(spec)
    packing, filling = case.packing_for(spec), case.filling_for(spec)
    if filling is not None:
        inputs = replace(inputs, k=filling.rounded(inputs.k, 0), v=filling.rounded(inputs.v, 1))
    cut = packing or filling
    lengths = None if cut is None else cut.used
    q, k, v = inputs.q, inputs.k, inputs.v
    do = inputs.do if spec.needs_backward else None
    scales = case.scales_for(spec)
    exact: tuple[NDArray[np.float64], ...]
    exact = forward(spec, q, k, v, scale=scale, dropout=dropout, lengths=lengths, qv=inputs.qv, **scales)
    if do is not None:
        exact += backward(spec, q, k, v, do, scale=scale, dlse=inputs.dlse, dropout=dropout, lengths=lengths)
    shared: dict[str, Any] = {"dropout": dropout, "lengths": lengths, "scales": scales}
    strict = bounds(spec, q, k, v, do, scale, exact=exact, dlse=inputs.dlse, qv=inputs.qv, **shared)
    limits = tuple(getattr(strict, name) for name in TENSORS[: len(exact)])
    if any_values:
        reach = rounding_errors(spec, inputs, scale, exact, **shared)
        limits = tuple(np.maximum(x, reach[name]) for name, x in zip(TENSORS, limits, strict=False))
    return Expectation(
        case, inputs, scale, exact, limits, spec.tensors, dropout, packing, filling, scales, strict.rounded
    )
