from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.expr.readings.derivative import captured_gradients, derivative
from flashgen.expr.readings.numpy import evaluate
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.nodes import Const, Load, Node, Scalar, Score
from flashgen.expr.tree.rebuild import substitute
from flashgen.expr.tree.text import text
from flashgen.expr.tree.visit import postorder

POINTS = 200
STEP = 1e-6


def read(source: str, captured: Any) -> Node:
    return parse(source, captured, score=True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("s", "1.0"),
        ("s * 3.0 + slopes[h] * (k - q)", "3.0"),
        ("q + 1.0", "0.0"),
        ("tanh(s / 30.0) * 30.0", "0.03333333333333333 * (1.0 - tanh(s / 30.0) * tanh(s / 30.0)) * 30.0"),
        ("where(q < k, s, x)", "where(q < k, 1.0, 0.0)"),
        ("s - s * x", "1.0 - x"),
        ("exp(s)", "exp(s)"),
        ("-s", "-1.0"),
        ("where(s > 0, 1.0, 2.0)", "0.0"),
    ],
)
def test_derivatives_by_the_score_read_well(captured: Any, source: str, expected: str) -> None:
    assert text(derivative(read(source, captured), Score())) == expected


def test_every_captured_float_gets_its_gradient_once(captured: Any) -> None:
    root = read("s * x + bias[h, q] * bias[h, k] + bias[h, q] + slopes[h] * w + lengths[b]", captured)
    found = {text(node): text(tree) for node, tree in captured_gradients(root)}
    assert found == {
        "x": "s",
        "bias[h, q]": "bias[h, k] + 1.0",
        "bias[h, k]": "bias[h, q]",
        "slopes[h]": "float(w)",
    }


@pytest.mark.parametrize(
    ("source", "at", "expected"),
    [
        ("abs(s)", 0.0, 0.0),
        ("abs(s)", -2.0, -1.0),
        ("minimum(s, 1.0)", 1.0, 1.0),
        ("minimum(1.0, s)", 1.0, 0.0),
        ("maximum(s, 1.0)", 1.0, 1.0),
        ("maximum(1.0, s)", 1.0, 0.0),
        ("where(s > 0, s * 3.0, s)", 0.0, 1.0),
    ],
)
def test_at_a_corner_one_side_counts(source: str, at: float, expected: float) -> None:
    assert float(evaluate(derivative(read(source, {}), Score()), {"s": at})) == expected


def has_corner_nearby(root: Node, wrt: Node, env: dict[str, Any]) -> Any:
    """Where some abs, minimum, maximum or comparison of floats changes sides within a step."""
    near = np.zeros(POINTS, bool)
    for node in postorder(root):
        sides = [c for c in node.children if c.type == "float"]
        op = getattr(node, "op", "")
        if not sides or op not in ("abs", "min", "max", "<", "<=", ">", ">=", "==", "!="):
            continue
        gap = sides[0] if op == "abs" else sides[0] - sides[1]
        near |= abs(np.broadcast_to(evaluate(gap, env), POINTS)) < 100 * STEP
    return near


@pytest.mark.parametrize("seed", range(4))
def test_derivatives_agree_with_finite_differences(draw: Any, seed: int) -> None:
    compared = 0
    for number in range(60):
        random = draw(1000 * seed + number)
        root = random.float_(4)
        env = random.values(20, 20)
        env.update({n: random.rng.integers(0, size, POINTS) for n, size in zip("bhqk", (2, 3, 20, 20), strict=True)})
        env["s"] = random.rng.normal(size=POINTS)
        wanted = [(Score(), derivative(root, Score())), *captured_gradients(root)]
        for node, tree in wanted:
            # A load is moved at every place where it is the very same load.
            moved = Scalar("moved", "float")
            replaced = substitute(root, {node: moved})
            at = evaluate(node, env)
            up, down = (evaluate(replaced, {**env, "moved": at + step}) for step in (STEP, -STEP))
            slope, expected = evaluate(tree, env), (up - down) / (2 * STEP)
            fine = ~has_corner_nearby(replaced, moved, {**env, "moved": at}) & np.isfinite(expected)
            scale = 1 + abs(expected) + abs(np.broadcast_to(evaluate(root, env), POINTS))
            wrong = fine & (abs(slope - expected) > 1e-4 * scale)
            assert not wrong.any(), f"d({text(root)}) / d({text(node)}) = {text(tree)}"
            compared += int(fine.sum())
    assert compared > 15_000


def test_ints_and_conditions_have_no_derivative(captured: Any) -> None:
    root = read("where(on, w * 1.0, q)", captured)
    assert captured_gradients(root) == ()
    assert derivative(root, Score()) is Const(0.0)
    assert all(isinstance(node, (Load, Scalar)) for node, _ in captured_gradients(read("s * x + slopes[h]", captured)))
