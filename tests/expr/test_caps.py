"""Softcaps are found however they are spelt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.expr.analysis.softcaps import cap_of
from flashgen.expr.readings.numpy import evaluate
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.text import text

SCALE = 0.125


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
def test_a_cap_is_its_two_factors(captured: dict[str, Any], source: str) -> None:
    score = parse(source, captured, score=True)
    cap = cap_of(score)
    assert cap is not None
    s = np.linspace(-9.0, 9.0, 37)
    env = {"s": s, "b": 1, "h": 2, "x": 2.5, "slopes": np.array([0.5, 1.0, 3.0]), "logits.of_product": SCALE}
    amplitude, slope = (evaluate(node, env) for node in (cap.amplitude, cap.slope))
    np.testing.assert_allclose(amplitude * np.tanh(slope * s / SCALE), evaluate(score, env), rtol=1e-12, err_msg=source)


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
def test_what_does_more_than_cap_is_no_cap(captured: dict[str, Any], source: str) -> None:
    score = parse(source, captured, score=True)
    assert cap_of(score) is None, text(score)
