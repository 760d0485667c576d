"""What rounding on the way does to results is what happens when it is done at random, many times."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen import oracle
from flashgen.oracle.problem import gradient_of_lse, read_problem
from flashgen.oracle.reach import reach
from flashgen.oracle.rules import Rules
from flashgen.spec import AttentionSpec, causal, score

SMALL = 1e-6
TRIALS = 300
SLOPE = 3.0


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def found(spec, *arrays):
    given = read_problem(spec, *arrays)
    return reach(given, Rules(spec, given, None, None, None), gradient_of_lse(given, None))


def gradients(q, k, v, do, scores, lse, o):
    """Of one head, with P made of an LSE that need not be that of the scores."""
    p = np.exp(scores - lse)
    ds = p * (do @ v.T - (do * o).sum(axis=1, keepdims=True)) / np.sqrt(q.shape[1])
    return ds @ k, ds.T @ q, p.T @ do


def outcome(scores, v):
    lse = np.log(np.exp(scores - scores.max()).sum(axis=1, keepdims=True)) + scores.max()
    return np.exp(scores - lse) @ v, lse


def test_roundings_of_scores_and_of_lse_do_what_they_do_when_they_are_drawn():
    spec = AttentionSpec(16, dtype="bf16", score=score.alibi(np.full(1, SLOPE, np.float32)))
    q, k, v, do = (normal(n, 16, seed=seed) for seed, n in enumerate((24, 30, 30, 24)))
    logits = q @ k.T / 4.0
    # As there are more keys, a distance is that of the last query's diagonal.
    scores = logits - SLOPE * np.abs(np.arange(30) - np.arange(24)[:, None] - 6)
    o, lse = outcome(scores, v)
    wanted = o, *gradients(q, k, v, do, scores, lse, o)
    sizes = np.abs(scores - lse) + np.abs(logits) + 2.0 * np.abs(scores)
    random = np.random.default_rng(7)
    squares = [np.zeros_like(x) for x in wanted]
    for _ in range(TRIALS):
        moved = scores + SMALL * sizes * random.standard_normal(sizes.shape)
        o, own = outcome(moved, v)
        own += SMALL * lse * random.standard_normal(lse.shape)
        for total, x, y in zip(squares, (o, *gradients(q, k, v, do, moved, own, o)), wanted, strict=True):
            total += np.square((x - y) / SMALL) / TRIALS
    result = found(spec, *(x[None, :, None] for x in (q, k, v, do)))
    for name, total in zip(("o", "dq", "dk", "dv"), squares, strict=True):
        # Of dK, what rows' scores do to D as well is counted by itself.
        assert 0.8 < result.of_float32[name] / np.sqrt(total.max()) < (2.0 if name == "dk" else 1.25), name


def test_roundings_of_o_do_what_they_do_when_they_are_drawn():
    spec = AttentionSpec(16, dtype="bf16", mask=causal())
    q, k, v, do = (normal(1, 40, 1, 16, seed=n) for n in range(4))
    o, lse = oracle.forward(spec, q, k, v)
    random, squares = np.random.default_rng(7), [np.zeros((40, 16)), np.zeros((40, 16))]
    rows = [x[0, :, 0] for x in (q, k, v, do, o)]
    allowed = np.tri(40, dtype=bool)
    scores = np.where(allowed, rows[0] @ rows[1].T / 4.0, -np.inf)
    wanted = gradients(*rows[:4], scores, lse[0, 0, :, None], rows[4])
    for _ in range(TRIALS):
        moved = rows[4] * (1.0 + SMALL * random.standard_normal(rows[4].shape))
        for total, x, y in zip(squares, gradients(*rows[:4], scores, lse[0, 0, :, None], moved), wanted, strict=False):
            total += np.square((x - y) / SMALL) / TRIALS
    # dQ is all of one row's; of dK, which many rows add to, what they would do together is counted.
    result = found(spec, q, k, v, do)
    assert result.of_o["dq"] == pytest.approx(np.sqrt(squares[0].max()), rel=0.2)
    assert 0.5 < result.of_o["dk"] / np.sqrt(squares[1].max()) < 4.0


def test_what_is_alike_is_rounded_alike():
    spec = AttentionSpec(64, dtype="bf16")
    same = [np.full((1, 20, 1, 64), 0.5) for _ in range(4)]
    # D is 16, of 64 equal terms, which at random would move an eighth as far.
    assert found(spec, *same).of_o["dq"] == pytest.approx(16.0 * 0.5 / 8.0)
    same[2] = same[2] + normal(1, 20, 1, 64) / 100
    assert found(spec, *same).of_o["dq"] == pytest.approx(16.0 * 0.5 / 8.0 / 8.0, rel=0.05)


@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_says_nothing_of_other_rows_and_columns(where):
    spec = AttentionSpec(16, dtype="bf16", mask=causal())
    arrays = dict(zip(("q", "k", "v", "do"), (normal(1, 40, 1, 16, seed=n) for n in range(4)), strict=True))
    rest = found(spec, *(x[:, :-1] for x in arrays.values()))
    arrays[where][:, -1, :, 3] = np.nan
    # Only the last query attends to the last key.
    corrupted = found(spec, *arrays.values())
    assert corrupted.of_float32["o"] >= rest.of_float32["o"] > 0
    for name in ("dq", "dk"):
        assert corrupted.of_o[name] == pytest.approx(rest.of_o[name])
        assert corrupted.of_float32[name] == pytest.approx(rest.of_float32[name])


def test_lse_hangs_on_terms_that_are_far_larger_than_their_sum():
    spec = AttentionSpec(64, head_dim_v=32, dtype="fp32")
    half, other, v = (normal(1, 1, 1, 32, seed=n) for n in (1, 2, 3))
    q, k = np.concatenate([half, half], axis=3), np.concatenate([other, -other], axis=3)
    few, many = (found(spec, size * q, k, v).lse.item() for size in (1.0, 100.0))
    assert many > 50.0 * few
    assert oracle.bounds(spec, q, k, v).lse.item() == 1e-5
    assert oracle.bounds(spec, 1e5 * q, k, v).lse.item() > 1e-2
