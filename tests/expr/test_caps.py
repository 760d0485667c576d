"""Softcaps are found however they are spelt."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.expr.analysis.softcaps import is_softcap
from flashgen.expr.trace.parse import parse


@pytest.mark.parametrize(
    "source",
    [
        "tanh(s / x) * x",
        "x * tanh(s * (1.0 / x))",
        "-(tanh(s / x / 2.0) * 30.0)",
        "tanh(-s * 0.25) / x",
        "x * (tanh(s / slopes[h]) * slopes[h])",
        "tanh(s)",
        "tanh(tanh(x) * s) * exp(x)",
    ],
)
def test_a_tangent_of_the_logit_is_a_softcap(captured: dict[str, Any], source: str) -> None:
    assert is_softcap(parse(source, captured, score=True))


@pytest.mark.parametrize(
    "source",
    [
        "s",
        "s * x",
        "tanh(x) * s",
        "tanh(s / x) * x + 1.0",
        "tanh(s / x) * x - slopes[h] * (k - q)",
        "tanh(s + 1.0)",
        "tanh(s * s)",
        "tanh(s / (q + 1))",
        "tanh(s) * k",
        "tanh(tanh(s) * x)",
        "x / tanh(s)",
        "tanh(x / s)",
    ],
)
def test_what_does_more_is_no_softcap(captured: dict[str, Any], source: str) -> None:
    assert not is_softcap(parse(source, captured, score=True))
