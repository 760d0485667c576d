"""Gradients of captured tensors are what finite differences of the loss say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.expr import exp, sigmoid, where
from flashgen.oracle.rounded import evaluate
from flashgen.spec import Score, score
from flashgen.spec.masks import named as masks

Arrays = dict[str, Any]
LEN_Q, LEN_KV, HEADS = 5, 7, 4
RNG = np.random.default_rng(0)
SLOPES = RNG.random(HEADS)
BIAS = RNG.standard_normal((1, HEADS, LEN_Q, LEN_KV))
TABLE = RNG.standard_normal((HEADS, 5))
LOGITS = np.array([0.5, -2.0, 4.0, -np.inf])
PER_KEY = RNG.standard_normal(LEN_KV)
PER_QUERY = RNG.standard_normal((LEN_Q, 2))

CASES: dict[str, tuple[Any, Any]] = {
    "alibi": (fg.causal(), score.alibi(SLOPES)),
    "bias": (fg.full(), score.bias(BIAS)),
    "relative bias": (fg.window(3, 2), score.relative_bias(TABLE)),
    "sink": (fg.causal(), score.sink(LOGITS)),
    "sink with rows that attend to nothing": (fg.causal() & masks.key_padding(np.array([3, 0])), score.sink(LOGITS)),
    "softcap and all": (
        fg.causal(),
        score.softcap(2.0) >> score.alibi(SLOPES) >> score.bias(BIAS) >> score.sink(LOGITS),
    ),
    "per key": (fg.full(), Score.of(lambda s, b, h, q, k: s * sigmoid(PER_KEY[k]))),
    "twice": (fg.full(), Score.of(lambda s, b, h, q, k: s * exp(PER_QUERY[q, b]) + PER_KEY[k] * PER_KEY[k // 2])),
    "a branch": (fg.full(), Score.of(lambda s, b, h, q, k: where(q > k, s * SLOPES[h], s - SLOPES[0]))),
    "score and sink": (fg.full(), score.alibi(SLOPES) >> score.sink(SLOPES)),
}


def problem(heads_kv: int = 2) -> list[Any]:
    rng = np.random.default_rng(1)
    shapes = (2, LEN_Q, HEADS, 8), (2, LEN_KV, heads_kv, 8), (2, LEN_KV, heads_kv, 8), (2, LEN_Q, HEADS, 8)
    return [rng.standard_normal(shape) for shape in shapes]


def loss(spec: fg.AttentionSpec, arrays: list[Any], captured: Arrays) -> float:
    *qkv, do = arrays
    return float((do * oracle.forward(spec, *qkv, captured=captured)[0]).sum())


def differences(spec: fg.AttentionSpec, arrays: list[Any], name: str) -> Any:
    """The slope of the loss with respect to each element, by central differences."""
    tensor = np.asarray(spec.tensors[name], np.float64)
    found = np.zeros(tensor.shape)
    for at in np.ndindex(tensor.shape):
        ends = []
        for step in (1e-6, -1e-6):
            moved = tensor.copy()
            moved[at] += step
            ends.append(loss(spec, arrays, {name: moved}))
        found[at] = (ends[0] - ends[1]) / 2e-6
    return found


@pytest.mark.parametrize("case", CASES)
def test_they_are_the_slopes_of_the_loss(case: str) -> None:
    mask, function = CASES[case]
    spec = fg.AttentionSpec(8, dtype="fp32", mask=mask, score=function)
    arrays = problem()
    gradients = oracle.captured_gradients(spec, *arrays)
    floats = [name for name, value in spec.tensors.items() if value.dtype.kind == "f"]
    assert sorted(gradients) == sorted(floats)
    for name, gradient in gradients.items():
        assert gradient.shape == spec.tensors[name].shape
        np.testing.assert_allclose(gradient, differences(spec, arrays, name), rtol=1e-6, atol=1e-8)
        assert np.abs(gradient).max() > 1e-3


def test_given_tensors_replace_those_of_the_spec() -> None:
    spec = fg.AttentionSpec(8, dtype="fp32", score=score.alibi(SLOPES))
    other = {"slopes": SLOPES[::-1] * 3}
    arrays = problem()
    direct = oracle.captured_gradients(fg.AttentionSpec(8, dtype="fp32", score=score.alibi(other["slopes"])), *arrays)
    np.testing.assert_array_equal(oracle.captured_gradients(spec, *arrays, captured=other)["slopes"], direct["slopes"])


def test_what_only_a_mask_or_a_condition_reads_has_none() -> None:
    limits = RNG.standard_normal(LEN_KV)
    spec = fg.AttentionSpec(8, mask=lambda b, h, q, k: (limits[k] < 0.5) | (k < 2))
    np.testing.assert_array_equal(oracle.captured_gradients(spec, *problem())["limits"], np.zeros(LEN_KV))


def test_nan_in_a_key_that_nobody_attends_to_reaches_nothing() -> None:
    spec = fg.AttentionSpec(8, mask=masks.key_padding(np.array([4, 4])), score=score.alibi(SLOPES))
    arrays = problem()
    expected = oracle.captured_gradients(spec, *arrays)["slopes"]
    for array in arrays[1:3]:
        array[:, 4:] = np.nan
    np.testing.assert_array_equal(oracle.captured_gradients(spec, *arrays)["slopes"], expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", ["alibi", "bias", "relative bias", "sink", "softcap and all"])
def test_bounds_allow_roundings_and_no_mistake(case: str, dtype: str) -> None:
    mask, function = CASES[case]
    spec = fg.AttentionSpec(8, dtype=dtype, mask=mask, score=function)
    arrays = [x.astype(spec.element.numpy()) for x in problem()]
    exact = oracle.captured_gradients(spec, *arrays)
    run = evaluate(spec, *arrays).captured
    for name, bound in oracle.captured_bounds(spec, *arrays, exact=exact).items():
        assert oracle.check(run[name], exact[name], bound).ok
        # An element that is left out, and all of them with the wrong sign.
        largest = np.unravel_index(np.argmax(np.abs(exact[name])), exact[name].shape)
        wrong = exact[name].copy()
        wrong[largest] = 0
        assert not oracle.check(wrong, exact[name], bound).ok
        assert not oracle.check(-exact[name], exact[name], bound).ok


def test_the_slope_of_a_gradient_tells_a_factor_from_roundings() -> None:
    mask, function = CASES["bias"]
    spec = fg.AttentionSpec(8, dtype="bf16", mask=mask, score=function)
    arrays = [x.astype(spec.element.numpy()) for x in problem()]
    exact = oracle.captured_gradients(spec, *arrays)
    rounded = oracle.rounded_captured_gradients(spec, *arrays)
    for name, bound in oracle.captured_bounds(spec, *arrays, exact=exact).items():

        def slope(factor: float, name: str = name, bound: float = bound) -> Any:
            return oracle.pooled_slope([oracle.case_slope(factor * rounded[name], exact[name], bound, rounded[name])])

        assert slope(1.0).ok
        assert not slope(1.05).ok


def test_the_gradient_of_the_lse_reaches_scores_and_sinks() -> None:
    mask, scored = CASES["softcap and all"]
    spec = fg.AttentionSpec(8, mask=mask, score=scored)
    q, k, v, do = problem()
    dlse = np.random.default_rng(2).standard_normal((2, HEADS, LEN_Q))
    for name, gradient in oracle.captured_gradients(spec, q, k, v, do, dlse=dlse).items():
        tensor = np.asarray(spec.tensors[name], np.float64)
        for at in np.ndindex(tensor.shape):
            losses = []
            for step in (1e-6, -1e-6):
                moved = tensor.copy()
                moved[at] += step
                o, lse = oracle.forward(spec, q, k, v, captured={name: moved})
                losses.append((do * o).sum() + (dlse * lse)[lse > -np.inf].sum())
            difference = (losses[0] - losses[1]) / 2e-6 if np.isfinite(tensor[at]) else 0.0
            assert gradient[at] == pytest.approx(difference, rel=1e-5, abs=1e-7), (name, at)
