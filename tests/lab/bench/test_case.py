from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import ArgumentError
from flashgen.lab.bench.case import Case, distance, expected, expected_all
from flashgen.lab.bench.grid import cases, parse_lengths
from flashgen.lab.bench.on_gpu import time_algorithms
from flashgen.lab.roofline.measure import measure_roofline
from flashgen.oracle import backward, forward

CASE = Case("forward", "bf16", 64, False, 1024, 2, 4)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_the_oracle_also_across_chunks(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.lab.bench.case._CHUNK", 7)
    case = Case("backward", "fp32", 8, causal, 17, 2, 3)
    x = case.inputs()
    exact = (forward(case.spec, x.q, x.k, x.v)[0], *backward(case.spec, x.q, x.k, x.v, x.do))
    of_forward = expected(Case("forward", "fp32", 8, causal, 17, 2, 3), x)
    for got, wanted in zip((*of_forward, *expected(case, x)), exact, strict=True):
        np.testing.assert_allclose(got, wanted[-1, :, -1], rtol=2e-5, atol=2e-5)
    for got, wanted in zip(expected_all(case, x), exact[1:], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_flops_are_those_of_the_papers() -> None:
    assert Case("forward", "bf16", 64, False, 1024, 2, 4).flops == 4 * 1024**2 * 64 * 8
    assert Case("backward", "bf16", 64, True, 1024, 2, 4).flops == 2.5 * 4 * 1024**2 * 64 * 8 / 2


def test_without_sizes_all_cases_have_as_many_tokens_and_columns() -> None:
    found = cases(parse_lengths("512, 8k"), (64, 128), masks=("causal",))
    assert {(c.len * c.batch, c.heads * c.head_dim) for c in found} == {(16384, 2048)}
    assert [(c.head_dim, c.len) for c in found] == [(64, 512), (64, 8192), (128, 512), (128, 8192)]
    assert [(c.batch, c.heads) for c in cases((100,), (64,), masks=("full",), batch=3, heads=5)] == [(3, 5)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lengths": (0,)}, "lengths"),
        ({"lengths": ()}, "lengths"),
        ({"head_dims": (300,)}, "head_dims"),
        ({"dtype": "int8"}, "dtype"),
        ({"masks": ("diagonal",)}, "masks"),
        ({"batch": -1}, "batch"),
        ({"tokens": "many"}, "tokens"),
    ],
)
def test_a_wrong_size_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{named}="):
        cases(**{"lengths": (64,), "head_dims": (64,), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, "1k", 1024, (1024,), CASE])
@pytest.mark.parametrize("measure", [time_algorithms, measure_roofline])
def test_what_is_no_list_of_cases_is_refused(measure: Any, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^cases=.* is not a list of cases; write flashgen.lab.cases"):
        measure(wrong)


def test_a_wrong_length_is_shown_with_an_example() -> None:
    with pytest.raises(ArgumentError, match=r"lengths='512,x'.*such as 512,1k,8k"):
        parse_lengths("512,x")


def test_a_result_that_is_not_finite_is_infinitely_far_off() -> None:
    right = np.ones((2, 2), np.float32)
    assert distance(right, right) == 0
    assert distance(np.full((2, 2), np.nan, np.float32), right) == np.inf
    assert distance(np.ones((2, 3), np.float32), right) == np.inf
