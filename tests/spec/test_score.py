"""The named scores mean what they say, and combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashgen.errors import SpecError, TraceError
from flashgen.oracle import Rules
from flashgen.oracle.problem import Problem
from flashgen.spec import AttentionSpec, Score, score
from flashgen.spec.masks import named as masks

BATCH, HEADS, LEN_Q, LEN_KV = 2, 3, 4, 6
RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.standard_normal((LEN_Q, LEN_KV))
SLOPES = RANDOM.standard_normal(HEADS).astype(np.float32)
PER_SEQUENCE = RANDOM.standard_normal((BATCH, HEADS)).astype(np.float32)
BIAS = RANDOM.standard_normal((BATCH, 1, LEN_Q, LEN_KV)).astype(np.float32)
TABLE = RANDOM.standard_normal((HEADS, 5)).astype(np.float32)
Q, K = np.arange(LEN_Q)[:, None], np.arange(LEN_KV)[None, :]
AT = Q + LEN_KV - LEN_Q
DISTANCE = np.clip(K - AT, -2, 2) + 2


def rules(made: Any, **more: Any) -> Rules:
    q, k = np.zeros((BATCH, LEN_Q, HEADS, 8)), np.zeros((BATCH, LEN_KV, HEADS, 8))
    return Rules(AttentionSpec(8, score=made, **more), Problem(q, k, k, None, 1.0))


NAMED: dict[str, tuple[Any, Callable[[int, int], Any]]] = {
    "softcap": (score.softcap(0.5), lambda b, h: np.tanh(LOGITS / 0.5) * 0.5),
    "alibi": (score.alibi(SLOPES), lambda b, h: LOGITS - SLOPES[h] * np.abs(AT - K)),
    "alibi per sequence": (score.alibi(PER_SEQUENCE), lambda b, h: LOGITS - PER_SEQUENCE[b, h] * np.abs(AT - K)),
    "bias": (score.bias(BIAS), lambda b, h: LOGITS + BIAS[b, 0]),
    "bias of pairs": (score.bias(BIAS[0, 0]), lambda b, h: LOGITS + BIAS[0, 0]),
    "bias of keys": (score.bias(BIAS[0, 0, 0]), lambda b, h: LOGITS + BIAS[0, 0, :1]),
    "relative": (score.relative_bias(TABLE), lambda b, h: LOGITS + TABLE[h][DISTANCE]),
    "relative for all": (score.relative_bias(TABLE[1]), lambda b, h: LOGITS + TABLE[1][DISTANCE]),
    "one then another": (
        score.softcap(0.5) >> score.alibi(SLOPES),
        lambda b, h: np.tanh(LOGITS / 0.5) * 0.5 - SLOPES[h] * np.abs(AT - K),
    ),
    "a function": (lambda s, b, h, q, k: s * 2 + h, lambda b, h: LOGITS * 2 + h),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_score_is_what_its_definition_says(name: str) -> None:
    made, definition = NAMED[name]
    found = rules(made)
    for b, h in np.ndindex(BATCH, HEADS):
        np.testing.assert_allclose(found.scores(LOGITS, b, h), definition(b, h), rtol=1e-12)


@pytest.mark.parametrize("name", NAMED)
def test_slopes_are_derivatives(name: str) -> None:
    found, step = rules(NAMED[name][0]), 1e-6
    for b, h in np.ndindex(BATCH, HEADS):
        difference = (found.scores(LOGITS + step, b, h) - found.scores(LOGITS - step, b, h)) / (2 * step)
        np.testing.assert_allclose(found.slopes(LOGITS, b, h), difference, rtol=1e-5, atol=1e-8)


def test_a_sink_is_a_logit_beside_the_keys() -> None:
    found = rules(score.sink(SLOPES) >> score.softcap(2.0))
    assert [found.sink(1, h) for h in range(HEADS)] == [float(x) for x in SLOPES]
    assert not rules(score.sink(SLOPES)).changes_logits
    with pytest.raises(SpecError, match="both scores have a sink"):
        score.sink(SLOPES) >> score.sink(SLOPES)


def test_what_mask_score_and_sink_captured_keeps_apart() -> None:
    lengths, slopes, logits = np.array([3, 4], np.int32), SLOPES, SLOPES + 1

    def with_slopes(values: Any) -> Score:
        slopes = values
        return Score.of(lambda s, b, h, q, k: s + slopes[h])

    spec = AttentionSpec(8, mask=masks.key_padding(lengths), score=with_slopes(slopes) >> with_slopes(logits))
    assert sorted(spec.tensors) == ["lengths", "slopes", "slopes_2"]
    np.testing.assert_array_equal(rules(spec.score).scores(LOGITS, 0, 1), LOGITS + slopes[1] + logits[1])
    same = AttentionSpec(8, score=score.alibi(slopes) >> score.sink(slopes))
    assert len({id(value) for value in same.tensors.values()}) == 1


def test_equal_scores_are_equal_whatever_tensors_they_captured() -> None:
    assert score.alibi(SLOPES) == score.alibi(SLOPES + 1)
    assert hash(score.alibi(SLOPES)) == hash(score.alibi(SLOPES + 1))
    assert score.softcap(30.0) is score.softcap(30), "a limit is traced once"
    assert score.softcap(30.0) != score.softcap(31.0)
    assert score.sink(SLOPES) != score.identity()
    assert score.identity() != 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: score.softcap(0), "cap=0 is not a limit for logits"),
        (lambda: score.softcap(float("nan")), "cap=nan is not a limit"),
        (lambda: score.alibi(0.5), "slopes=0.5 is not a tensor of 1 or 2 dimensions"),
        (lambda: score.relative_bias(TABLE[:, :4]), "table has 4 entries per head; it needs an odd number"),
        (lambda: AttentionSpec(8, score=3), "score=3 is not a score"),
        (lambda: score.softcap(1.0)(1, 2, 3, 4, 5), "combine scores with >>"),
    ],
)
def test_what_is_no_score_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_a_score_function_must_give_a_number() -> None:
    with pytest.raises(TraceError, match="the score function returned a condition"):
        AttentionSpec(8, score=lambda s, b, h, q, k: q > k)
