"""Scores of products, which are logits not yet multiplied by the scale, are the scores of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.expr.analysis.unscaled_logits import in_products
from flashgen.expr.readings.numpy import evaluate
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.text import text

LENGTH = 20
SCALE = 0.125


@pytest.mark.parametrize("seed", range(60))
def test_random_scores_are_the_same_counted_in_products(draw: Any, seed: int) -> None:
    random = draw(seed)
    total = random.pick(1.0, -2.5) * random.int_(2) - random.float_(0) if seed % 2 else random.float_(3)
    logit = parse("s", {}, score=True)
    score = random.pick(total + logit, logit - total, logit + (random.float_(0) - total), total)
    env = {**random.values(LENGTH, LENGTH), "b": 1, "h": 2, "s": random.rng.normal(size=(LENGTH, LENGTH))}
    env |= {"q": np.arange(LENGTH)[:, None], "k": np.arange(LENGTH)[None, :]}
    found = in_products(score)
    if found is not None:
        result = evaluate(found, {**env, "s": env["s"] / SCALE, "products.of_logit": 1 / SCALE}) * SCALE
        expected = np.broadcast_to(evaluate(score, env), (LENGTH, LENGTH))
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12, err_msg=text(score))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("s + slopes[h] * (k - q)", "s + products.of_logit * slopes[h] * (k - q)"),
        ("s - x * abs(q - k)", "s - products.of_logit * x * abs(q - k)"),
        ("abs(q - k) * x + (s - 2.5)", "s + products.of_logit * x * abs(q - k) - products.of_logit * 2.5"),
        ("s + slopes[h]", "s + products.of_logit * slopes[h]"),
        ("s - (q - k) * 0.5 * (q - k)", "s - products.of_logit * 0.5 * (q - k) * (q - k)"),
        ("s", "s"),
        # Here each pair would be multiplied once more.
        ("s + bias[q, k]", None),
        ("s + (k - q)", None),
        ("s + x * (k - q) + bias[q, k]", None),
        # And these do not add to a logit.
        ("tanh(s / x) * x", None),
        ("x - s", None),
        ("s * x", None),
        ("s + s", None),
        ("s + x * s", None),
        ("x", None),
    ],
)
def test_what_is_added_is_scaled_where_that_is_done_once(
    captured: dict[str, Any], source: str, expected: str | None
) -> None:
    found = in_products(parse(source, captured, score=True))
    assert (None if found is None else text(found)) == expected
