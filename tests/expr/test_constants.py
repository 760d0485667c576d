"""Scores say the same with what no pair differs in apart, and little of that is left in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.expr.analysis.tile_constants import with_constants
from flashgen.expr.analysis.unscaled_logits import of_product
from flashgen.expr.readings.numpy import evaluate, evaluate_all
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.text import text

LENGTH = 20
SCALE = 0.125


@pytest.mark.parametrize("seed", range(60))
def test_random_scores_say_the_same(draw: Any, seed: int) -> None:
    random = draw(seed)
    roots = {"one": random.float_(5), "other": random.float_(4)}
    env = {**random.values(LENGTH, LENGTH), "b": 1, "h": 2, "s": random.rng.normal(size=(LENGTH, LENGTH))}
    env |= {"q": np.arange(LENGTH)[:, None], "k": np.arange(LENGTH)[None, :]}
    found = with_constants(roots)
    constants = {name: evaluate(node, env) for name, node in found.constants.items()}
    for name, root in roots.items():
        result, expected = evaluate(found.roots[name], {**env, **constants}), evaluate(root, env)
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12, err_msg=text(root))


@pytest.mark.parametrize("seed", range(20))
def test_a_score_of_a_product_is_that_of_its_logit(draw: Any, seed: int) -> None:
    random = draw(seed)
    score = random.float_(4)
    env = {**random.values(LENGTH, LENGTH), "b": 1, "h": 2, "q": 3, "k": 5, "s": random.rng.normal(size=50)}
    found = evaluate_all([of_product(score)], {**env, "s": env["s"] / SCALE, "logits.of_product": SCALE})[0]
    np.testing.assert_allclose(found, evaluate(score, env), rtol=1e-9, atol=1e-12, err_msg=text(score))


@pytest.mark.parametrize(
    ("source", "expected", "constants"),
    [
        ("tanh(s * x / slopes[h]) * x", "tanh(s * first.constant) * x", ["x * (1.0 / slopes[h])"]),
        ("s + slopes[h] * (k - q)", "s + (k - q) * first.constant", ["slopes[h]"]),
        ("x * (s * slopes[h]) + exp(x)", "s * first.constant + first.constant2", ["slopes[h] * x", "exp(x)"]),
        ("s / 4.0 + x", "s / 4.0 + x", []),
        ("s * (k - q) / s", "s * (k - q) / s", []),
    ],
)
def test_constants_are_taken_together(
    captured: dict[str, Any], source: str, expected: str, constants: list[str]
) -> None:
    found = with_constants({"score": parse(source, captured, score=True)})
    assert text(found.roots["score"]) == expected
    assert [text(node) for node in found.constants.values()] == constants
