"""Results that are off by a factor, each element well within its bound: the verdict on a run sees them."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from flashgen import oracle
from flashgen.spec import AttentionSpec, causal, full, window
from flashgen.verify import Case, Tally, Tiles, draw, expect, run_case, verify
from tests.drawn import diagonal, some
from tests.verify.tiled import tiled_kernel

SPEC = AttentionSpec(64, dtype="bf16", mask=causal())
OUTPUTS = ("o", "lse", "dq", "dk", "dv")
#: As many as ``flashgen check`` draws.
CASES = 100


def scaled(spec, output, factor):
    """A kernel one of whose outputs is off by a factor."""
    return functools.partial(tiled_kernel, spec, output=output, factor=factor)


@functools.cache
def expectations(spec):
    # The kernel in NumPy handles infinite values only in V.
    cases = (replace(draw(spec, Tiles(), 0, index), non_finite="nothing") for index in range(CASES))
    return [expect(spec, case, any_values=True) for case in cases]


def drawn_run(run, spec):
    tally = Tally()
    for expected in expectations(spec):
        results = run_case(run, spec, expected)
        assert all(result.check.ok for result in results), [result.describe() for result in results]
        tally.add(results)
    return tally


def test_a_correct_kernel_has_slopes_of_1():
    reports = drawn_run(functools.partial(tiled_kernel, SPEC), SPEC).reports()
    assert [report.output for report in reports] == list(OUTPUTS)
    for report in reports:
        assert report.slope.ok
        assert report.slope.value == pytest.approx(1, abs=5e-4 if report.output != "lse" else 1e-7)
        assert report.slope.noise < 1e-3


FACTORS = [("o", 1.002), ("o", 0.998), ("dq", 1.002), ("dk", 1.03), ("dk", 0.97), ("dv", 1.003)]


@pytest.mark.parametrize(("output", "factor"), some(FACTORS, ("o", 0.998), ("dk", 1.03)))
def test_a_factor_that_every_bound_allows_is_found_in_drawn_cases(output, factor):
    tally = drawn_run(scaled(SPEC, output, factor), SPEC)
    (report,) = tally.systematic()
    assert report.output == output
    # Rows with one key have values that a small factor and rounding leave as they are.
    assert report.slope.value == pytest.approx(factor, abs=7e-4)
    assert f"FAILED: {output} has a systematic error" in report.describe_slope()
    assert f"{report.slope.value:.6g} over {report.slope.cases} cases" in report.describe_slope()


def test_a_factor_in_some_cases_is_found():
    def run(q, *rest, **more):
        return tiled_kernel(SPEC, q, *rest, **more, output="dk" if q.shape[2] == 2 else None, factor=1.03)

    (report,) = drawn_run(run, SPEC).systematic()
    assert report.output == "dk"


def test_a_factor_of_lse_is_found_though_every_element_is_within_its_bound():
    spec = AttentionSpec(8, dtype="fp16", mask=full())
    # LSE is near log(2): below 1 the bound of an element is absolute.
    cases = [Case(f"two keys, {i}", 40, 2, scale=0.01, heads=4, heads_kv=4) for i in range(12)]
    assert verify(scaled(spec, "lse", 1 + 5e-6), spec, cases=cases).ok
    found = verify(scaled(spec, "lse", 1 + 1.25e-5), spec, cases=cases)
    assert found.failures == ()
    assert [report.output for report in found.systematic] == ["lse"]


@pytest.mark.parametrize(("output", "factor"), [("o", 1.002), ("o", 0.998), ("dk", 1.03), ("dq", 0.97), ("dv", 1.01)])
def test_the_standard_cases_find_it_too(output, factor):
    found = verify(scaled(SPEC, output, factor), SPEC)
    assert not found.ok
    assert [report.output for report in found.systematic] == [output]
    assert {result.tensor for result in found.failures} <= {output}


MASKS = {mask.describe(): mask for mask in (full(), causal(), window(9, 4))}


@pytest.mark.parametrize(("name", "dtype"), diagonal(list(MASKS), ["fp16", "bf16", "fp32"]))
def test_a_correct_kernel_passes_with_few_cases(name, dtype):
    for head_dim in (1, 24):
        spec = AttentionSpec(head_dim, dtype=dtype, mask=MASKS[name])
        run = functools.partial(tiled_kernel, spec)
        for seed in range(6):
            tally = Tally()
            for index in range(1 + seed):
                case = replace(draw(spec, Tiles(32, 32, 32, 32), seed, index), non_finite="nothing")
                tally.add(run_case(run, spec, expect(spec, case, any_values=True)))
            assert tally.systematic() == (), [report.describe_slope() for report in tally.systematic()]


def test_without_gradients_their_slopes_are_not_asked_for():
    spec = AttentionSpec(16, direction="forward")
    found = verify(lambda q, k, v, do, scale: oracle.forward(spec, q, k, v, scale=scale), spec)
    assert [report.output for report in found.outputs] == ["o", "lse"]
    assert found.ok


def test_a_report_has_the_largest_error_and_the_worst_ratio_wherever_they_are():
    def run(q, k, v, do, scale):
        o, *rest = oracle.forward(SPEC, q, k, v, scale=scale)
        if q.shape[1] == 20:
            o = o + 0.003
        else:
            o[0, 0, 0, 0] += 0.0035
        return o, *rest, *oracle.backward(SPEC, q, k, v, do, scale=scale)

    # The second case averages many values, which have smaller errors and so a smaller bound.
    cases = (Case("few keys", 17, 17), Case("many keys", 20, 900))
    found = verify(run, SPEC, cases=cases)
    (report,) = (report for report in found.outputs if report.output == "o")
    assert report.largest.case == cases[0]
    assert report.largest.check.max_error == pytest.approx(0.0035)
    assert report.worst.case == cases[1]
    assert report.worst.check.ratio > report.largest.check.max_error / report.largest.check.bound
    assert found.worst is report.worst


def test_the_smallest_case_that_shows_it_alone_is_named_where_there_is_one():
    tally = drawn_run(scaled(SPEC, "dv", 1.02), SPEC)
    case = tally.shown_alone_by("dv")
    alone = Tally()
    alone.add(run_case(scaled(SPEC, "dv", 1.02), SPEC, expect(SPEC, case, any_values=True)))
    assert [report.output for report in alone.systematic()] == ["dv"]
    assert drawn_run(scaled(SPEC, "dv", 1.0015), SPEC).shown_alone_by("dv") is None
