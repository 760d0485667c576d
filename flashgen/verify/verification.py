"""Run a kernel on the cases, compare with the oracle, and report the worst error beside its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from flashgen.oracle import Check
from flashgen.spec import AttentionSpec
from flashgen.verify.cases import Case, cases_for
from flashgen.verify.expectation import CaseResult, Expectation, expect
from flashgen.verify.packed import packed_results

#: ``run(q, k, v, do, scale) -> (o, lse, dq, dk, dv)`` on NumPy arrays; without ``do`` the gradients are None.
#: Where the spec captures tensors, ``captured=`` gives them by name; where it drops pairs, ``dropout=`` says which;
#: where its sequences are packed, all arrays are, and ``sequences=`` says how; where there is a cache, k and v are the
#: cache, and ``cache=`` says what is in it.
Run: TypeAlias = Callable[..., Sequence[Any]]
#: ``progress(number of cases done, number of all, the case that comes next or None)``.
Progress: TypeAlias = Callable[[int, int, "Case | None"], None]


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
    target: str = "kernel",
    progress: Progress | None = None,
) -> Verification:
    """Check ``run`` on every case (those of ``cases_for`` when none are named)."""
    cases = cases_for(spec) if cases is None else tuple(cases)
    details: list[CaseResult] = []
    for done, case in enumerate(cases):
        if progress is not None:
            progress(done, len(cases), case)
        details += run_case(run, spec, expect(spec, case))
    if progress is not None:
        progress(len(cases), len(cases), None)
    worst = max((result.check for result in details), key=lambda c: c.ratio, default=Check(0.0, 0.0, True))
    ok = all(result.check.ok for result in details)
    return Verification(target, len(cases), worst.max_error, worst.bound, ok, tuple(details))


def run_case(run: Run, spec: AttentionSpec, expected: Expectation) -> list[CaseResult]:
    """Run one case once, and judge each of its results."""
    x = expected.inputs
    more: dict[str, Any] = {"captured": expected.captured} if expected.captured else {}
    more |= {"dropout": expected.dropout} if expected.dropout else {}
    packing = expected.packing
    if packing is not None:
        len_q, len_kv = x.q.shape[1], x.k.shape[1]
        more["sequences"] = packing.sequences(len_q, len_kv)
        do = packing.pack(x.do, 0) if spec.needs_backward else None
        packed = (packing.pack(x.q, 0), packing.pack(x.k, 1), packing.pack(x.v, 1), do)
        return expected.judge(packed_results(run(*packed, expected.scale, **more), packing, len_q, len_kv))
    if expected.filling is not None:
        more["cache"] = expected.filling.cache()
        layouts = expected.case.layouts[1:3]
        caches = [expected.filling.fill(a, layout) for a, layout in zip((x.k, x.v), layouts, strict=True)]
        return expected.judge(run(x.q, *caches, None, expected.scale, **more))
    return expected.judge(run(x.q, x.k, x.v, x.do if spec.needs_backward else None, expected.scale, **more))
