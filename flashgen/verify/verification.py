"""Run a kernel on the cases, compare with the oracle, and report errors and slopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from flashgen.spec import AttentionSpec
from flashgen.verify.cases.case import Case, cases_for
from flashgen.verify.cases.packed import packed_results
from flashgen.verify.expectation import CaseResult, Expectation, expect
from flashgen.verify.tally import OutputReport, Tally

#: ``run(q, k, v, do, scale) -> (o, lse, dq, dk, dv)`` on NumPy arrays; without ``do`` the gradients are None.
#: Some specs need keyword arguments: ``captured`` (tensors by name), ``dropout``, ``sequences`` (where packed arrays
#: are cut), ``cache`` (lengths and pages, where k and v are a cache), ``qv`` (the second query), ``dlse`` (the gradient
#: of LSE), and ``q_scale``, ``k_scale`` and ``v_scale`` of 8-bit arrays.
Run: TypeAlias = Callable[..., Sequence[Any]]
#: ``progress(number of cases done, number of all, the case that comes next or None)``.
Progress: TypeAlias = Callable[[int, int, "Case | None"], None]


@dataclass(frozen=True, slots=True)
class Verification:
    """The verdict: every result within its bound, and no output off by a factor."""

    target: str
    cases: int
    outputs: tuple[OutputReport, ...] = ()
    details: tuple[CaseResult, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures and not self.systematic

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """What is not within its bound."""
        return tuple(result for result in self.details if not result.check.ok)

    @property
    def systematic(self) -> tuple[OutputReport, ...]:
        """The outputs whose slope on the oracle is not 1."""
        return tuple(report for report in self.outputs if report.is_systematic)

    @property
    def worst(self) -> CaseResult | None:
        """The result nearest to, or furthest beyond, its bound."""
        return max((report.worst for report in self.outputs), key=lambda result: result.check.ratio, default=None)


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
    tally = Tally()
    details: list[CaseResult] = []
    for done, case in enumerate(cases):
        if progress is not None:
            progress(done, len(cases), case)
        results = run_case(run, spec, expect(spec, case))
        tally.add(results)
        details += results
    if progress is not None:
        progress(len(cases), len(cases), None)
    return Verification(target, len(cases), tally.reports(), tuple(details))


def run_case(run: Run, spec: AttentionSpec, expected: Expectation) -> list[CaseResult]:
    """Run one case once, and judge each of its results."""
    x = expected.inputs
    more: dict[str, Any] = {"captured": expected.captured} if expected.captured else {}
    more |= {"dropout": expected.dropout} if expected.dropout else {}
    packing, layouts = expected.packing, expected.case.layouts
    scales = expected.scales
    if packing is not None:
        block = spec.scale_block
        more |= {name: packing.pack_scales(x, "qkv".index(name[0]) > 0, block) for name, x in scales.items()}
        len_q, len_kv = x.q.shape[1], x.k.shape[1]
        more["sequences"] = packing.sequences(len_q, len_kv)
        more |= {"dlse": packing.pack_lse(x.dlse)} if x.dlse is not None else {}
        sides = zip((x.q, x.k, x.v, x.do), (0, 1, 1, 0), layouts, strict=True)
        q, k, v, do = (packing.pack(*side) for side in sides)
        packed = (q, k, v, do if spec.needs_backward else None)
        return expected.judge(packed_results(run(*packed, expected.scale, **more), packing, len_q, len_kv))
    if expected.filling is not None:
        more["cache"] = expected.filling.cache(x.k.shape[2])
        more |= {} if x.qv is None else {"qv": x.qv}
        more |= scales
        filled = enumerate(zip((x.k, x.v), layouts[1:3], strict=True))
        caches = [expected.filling.fill(a, layout, which) for which, (a, layout) in filled]
        return expected.judge(run(x.q, *caches, None, expected.scale, **more))
    more |= {"dlse": x.dlse} if x.dlse is not None else {}
    more |= scales
    return expected.judge(run(x.q, x.k, x.v, x.do if spec.needs_backward else None, expected.scale, **more))
