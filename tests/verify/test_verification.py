from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashgen import oracle
from flashgen.spec import AttentionSpec, causal, window
from flashgen.verify import Case, cases_for, verify

SPEC = AttentionSpec(16, dtype="fp16", mask=causal())
CASES = (Case("one over a tile", 17, 17, heads=2), Case("more queries than keys", 20, 9))


def exact_kernel(spec):
    def run(q, k, v, do, scale, dlse=None):
        gradients = (None,) * 3 if do is None else oracle.backward(spec, q, k, v, do, scale=scale, dlse=dlse)
        return (*oracle.forward(spec, q, k, v, scale=scale), *gradients)

    return run


def kernel_with_a_bad_result(tensor, value):
    """The exact kernel with one element of one tensor replaced."""

    def run(q, k, v, do, scale):
        results = list(exact_kernel(SPEC)(q, k, v, do, scale))
        results[tensor] = results[tensor].copy()
        results[tensor].flat[-1] = value
        return results

    return run


def test_the_oracle_itself_passes_with_no_error():
    result = verify(exact_kernel(SPEC), SPEC, target="oracle")
    assert (result.ok, result.target, result.cases) == (True, "oracle", 15)
    assert {report.largest.check.max_error for report in result.outputs} == {0.0}
    assert [report.slope.value for report in result.outputs] == [1.0] * 5
    assert len(result.details) == 5 * 15


@pytest.mark.parametrize("tensor", range(5))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 100.0])
def test_one_wrong_element_fails(tensor, value):
    result = verify(kernel_with_a_bad_result(tensor, value), SPEC, cases=CASES)
    assert not result.ok
    assert {f.tensor for f in result.failures} == {("o", "lse", "dq", "dk", "dv")[tensor]}
    assert all("FAILED" in f.describe() for f in result.failures)
    assert result.worst.tensor == ("o", "lse", "dq", "dk", "dv")[tensor]
    assert result.worst.check.ratio > 1


def test_an_empty_row_must_have_minus_infinity_and_nothing_else():
    def run(q, k, v, do, scale):
        results = list(exact_kernel(SPEC)(q, k, v, do, scale))
        results[1] = np.where(np.isinf(results[1]), np.inf, results[1])
        return results

    assert verify(run, SPEC, cases=CASES[:1]).ok
    assert [f.tensor for f in verify(run, SPEC, cases=CASES[1:]).failures] == ["lse"]


def test_missing_gradients_and_wrong_shapes_fail():
    def forward_only(q, k, v, do, scale):
        return oracle.forward(SPEC, q, k, v, scale=scale)

    def transposed(q, k, v, do, scale):
        o, *rest = exact_kernel(SPEC)(q, k, v, do, scale)
        return (o.transpose(0, 2, 1, 3), *rest)

    assert {f.tensor for f in verify(forward_only, SPEC, cases=CASES).failures} == {"dq", "dk", "dv"}
    failure = verify(transposed, SPEC, cases=CASES[:1]).failures[0]
    assert failure.tensor == "o"
    assert "shape" in failure.check.note


def test_a_forward_only_spec_asks_for_no_gradients():
    spec = AttentionSpec(16, dtype="fp16", direction="forward")
    seen = []

    def run(q, k, v, do, scale):
        seen.append(do)
        return exact_kernel(spec)(q, k, v, do, scale)

    result = verify(run, spec, cases=CASES)
    assert result.ok
    assert seen == [None, None]
    assert {d.tensor for d in result.details} == {"o", "lse"}


def test_progress_names_each_case_and_the_end():
    calls = []
    verify(exact_kernel(SPEC), SPEC, cases=CASES, progress=lambda *call: calls.append(call))
    assert calls == [(0, 2, CASES[0]), (1, 2, CASES[1]), (2, 2, None)]


def test_inputs_depend_on_the_case_alone():
    case = CASES[0]
    one, again, other = case.inputs(SPEC), case.inputs(SPEC), replace(case, seed=2).inputs(SPEC)
    assert one.q.dtype == np.float16
    assert np.array_equal(one.q, again.q)
    assert np.array_equal(one.do, again.do)
    assert not np.array_equal(one.q, other.q)


@pytest.mark.parametrize("mask", [causal(), window(3, 4), window(None, 5, align="top-left"), window(2, None)])
def test_the_cases_reach_the_corners(mask):
    spec = AttentionSpec(32, mask=mask, dtype="fp32")
    cases = cases_for(spec, tile_q=32, tile_kv=16)
    sizes = {(case.len_q, case.len_kv) for case in cases}
    assert {(1, 1), (31, 15), (33, 17)} < sizes
    assert any(case.len_kv == 0 for case in cases)
    assert any(case.len_q == 0 for case in cases)
    assert any(case.heads > case.heads_kv > 1 for case in cases)
    hidden = next(case for case in cases if case.fill == "hidden_nan").inputs(spec)
    o, lse = oracle.forward(spec, hidden.q, hidden.k, hidden.v)
    assert 0 < np.isfinite(lse).sum() < lse.size
    assert np.array_equal(np.isfinite(o).all(axis=-1), np.isfinite(lse.transpose(0, 2, 1)))


@pytest.mark.parametrize("head_dim", [1, 16, 64, 128, 256])
def test_large_logits_are_large_close_together_and_exact_in_float32(head_dim):
    spec = AttentionSpec(head_dim, dtype="bf16")
    case = next(case for case in cases_for(spec) if case.fill == "large_logits")
    x = case.inputs(spec)
    q, k = x.q[0, :, 0].astype(np.float64), x.k[0, :, 0].astype(np.float64)
    products = q @ k.T
    assert np.array_equal(products, q.astype(np.float32) @ k.astype(np.float32).T)
    logits = products * spec.default_scale
    assert 2e5 < np.abs(logits).min() <= np.abs(logits).max() < 1.1e6
    assert logits[0].max() - logits[0].min() < 100
