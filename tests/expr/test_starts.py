"""Scores of pairs near one another: what is found out at the first pair and added to says the same as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.expr.analysis.float_starts import Started, with_starts
from flashgen.expr.readings.numpy import evaluate, evaluate_all
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.nodes import Index, Node, Unary
from flashgen.expr.tree.text import text
from flashgen.expr.tree.visit import postorder

ROWS, COLUMNS = 9, 11


def evaluated(found: Started, env: dict[str, Any], first_q: int, first_key: int) -> list[Any]:
    """The roots at pairs from the first one on."""
    first = {**env, "q": first_q, "k": first_key}
    starts = {name: evaluate(node, first) for name, node in found.starts.items()}
    steps = {"step.q": np.arange(ROWS)[:, None], "step.k": np.arange(COLUMNS)[None, :]}
    pairs = {"q": first_q + steps["step.q"], "k": first_key + steps["step.k"]}
    return evaluate_all(list(found.roots.values()), {**env, **starts, **steps, **pairs})


@pytest.mark.parametrize("seed", range(60))
def test_scores_say_the_same_from_any_first_pair(draw: Any, seed: int) -> None:
    random = draw(seed)
    score = random.float_(5)
    env = {**random.values(24, 24), "b": 1, "h": 2, "s": random.rng.normal(size=(ROWS, COLUMNS))}
    first_q, first_key = (int(x) for x in random.rng.integers(0, (24 - ROWS, 24 - COLUMNS)))
    pairs = {"q": first_q + np.arange(ROWS)[:, None], "k": first_key + np.arange(COLUMNS)[None, :]}
    expected = np.broadcast_to(evaluate(score, {**env, **pairs}), (ROWS, COLUMNS))
    found = evaluated(with_starts({"score": score}), env, first_q, first_key)[0]
    np.testing.assert_allclose(np.broadcast_to(found, (ROWS, COLUMNS)), expected, rtol=1e-9, err_msg=text(score))


@pytest.mark.parametrize(
    ("source", "expected", "starts"),
    [
        ("s + x * (k - q)", "s + x * (first.start + (step.k - step.q))", {"first.start": "float(k - q)"}),
        (
            "s - x * abs(q + (k_len - q_len) - 2 * k)",
            "s - x * abs(first.start + (step.q - step.k * 2))",
            {"first.start": "float(q + (k_len - q_len) - 2 * k)"},
        ),
        (
            "s + k * x - (q - k) * (q - k)",
            "s + (first.start + step.k) * x - (first.start2 + (step.q - step.k)) * (first.start2 + (step.q - step.k))",
            {"first.start": "float(k)", "first.start2": "float(q - k)"},
        ),
        ("s + (abs(q - k) - 3)", "s + (abs(first.start + (step.q - step.k)) - 3.0)", {"first.start": "float(q - k)"}),
        # What is no multiple of q and k is turned into a float where it is, and so is what may all but cancel.
        ("s + (q - k) // 4", "s + (q - k) // 4", {}),
        ("s + ids[b, k]", "s + ids[b, k]", {}),
        ("s + (abs(q - k) - 16777216)", "s + (abs(q - k) - 16777216)", {}),
        ("s + 65536 * k", "s + 65536.0 * (first.start + step.k)", {"first.start": "float(k)"}),
        ("s + w", "s + w", {}),
    ],
)
def test_numbers_are_turned_into_floats_at_the_first_pair(
    captured: dict[str, Any], source: str, expected: str, starts: dict[str, str]
) -> None:
    found = with_starts({"score": parse(source, captured, score=True)})
    assert text(found.roots["score"]) == expected
    assert {name: f"float({text(_inside(node))})" for name, node in found.starts.items()} == starts


def _inside(node: Node) -> Node:
    assert isinstance(node, Unary)
    assert node.op == "float"
    return node.operand


def test_trees_share_their_starts(captured: dict[str, Any]) -> None:
    sources = {"value": "s + x * (k - q)", "slope": "1.0 + (k - q)"}
    found = with_starts({name: parse(source, captured, score=True) for name, source in sources.items()})
    assert list(found.starts) == ["first.start"]
    assert not any(isinstance(node, Index) for node in postorder(*found.roots.values()))


@pytest.mark.parametrize(("reach", "roundings"), [(2**24, 0), (2**30, 2)])
def test_sums_with_a_start_are_exact_as_far_as_floats_count(reach: int, roundings: int) -> None:
    """Above, the start and the sum are rounded; the number itself would be rounded once, by half a step."""
    random = np.random.default_rng(0)
    number = random.integers(-reach, reach, 200_000)
    number[:2] = -reach, reach - 300
    step = random.integers(-256, 257, number.size)
    step = np.where(abs(number + step) <= reach, step, 0)
    found = number.astype(np.float32) + step.astype(np.float32)
    error = abs(found.astype(np.float64) - (number + step))
    assert (error <= roundings * np.spacing(np.maximum(abs(number), abs(number + step)).astype(np.float32)) / 2).all()
    assert error.any() == (roundings > 0)
