"""What the benchmark of hostile data takes for an error is what the oracle would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
#: As many rows as are sampled, so that every one is.
LENGTH, HEADS, HEAD_DIM = 48, 2, 16


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import hostile

    monkeypatch.setattr(hostile, "DEVICE", "cpu")
    return hostile


def cancel(q: Any, k: Any, v: Any) -> None:
    """Logits are the small rest of sums of large products, and float32 keeps less of them than of their logarithms."""
    half = HEAD_DIM // 2
    q *= 400
    k[..., half:] = -k[..., :half]
    q[..., half:] = q[..., :half]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["N(0,1)", "400 times", "far below", "cancelling"])
def test_errors_are_held_to_the_oracle_s_bounds(
    hostile: Any, monkeypatch: pytest.MonkeyPatch, name: str, causal: bool, softcap: float
) -> None:
    cell = hostile.Cell(HEAD_DIM, causal, LENGTH, 1, HEADS, softcap)
    monkeypatch.setitem(hostile.DATA, "cancelling", cancel)
    inputs = hostile.values(name, cell, torch.float16)
    given = [x.numpy() for x in inputs]
    mask = fg.causal() if causal else fg.full()
    spec = fg.AttentionSpec(
        HEAD_DIM, dtype="fp16", mask=mask, score=fg.softcap(softcap) if softcap else None, direction="forward"
    )
    exact_o, exact_lse = oracle.forward(spec, *given)
    bounds = oracle.bounds(spec, *given)
    o, lse = torch.from_numpy(exact_o), torch.from_numpy(exact_lse)
    assert hostile.error_ratio(cell, inputs, o, lse) < 1e-6
    # Nothing but the logarithm of one row's sum is wrong, by what is allowed and by a little more or less.
    for row in (0, LENGTH // 2, LENGTH - 1):
        for factor in (0.99, 1.01):
            wrong = lse.clone()
            wrong[0, 1, row] += factor * bounds.lse[0, 1, row]
            assert hostile.error_ratio(cell, inputs, o, wrong) == pytest.approx(factor, rel=1e-4)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bad_values_have_to_be_seen_by_all_who_attend_to_them_and_nobody_else(
    hostile: Any, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    cell = hostile.Cell(HEAD_DIM, causal, LENGTH, 1, HEADS)
    monkeypatch.setitem(hostile.DATA, "bad", hostile.bad(slice(20, 21)))
    inputs = hostile.values("bad", cell, torch.float16)
    mask = fg.causal() if causal else fg.full()
    spec = fg.AttentionSpec(HEAD_DIM, dtype="fp16", mask=mask, direction="forward")
    o, lse = (torch.from_numpy(x) for x in oracle.forward(spec, *(x.numpy() for x in inputs)))
    assert o[0, 20:].isnan().all()
    assert hostile.error_ratio(cell, inputs, o, lse) < 1e-6
    for row, value in ((20, 0.0), (19, float("nan")))[: 2 if causal else 1]:
        wrong = o.clone()
        wrong[0, row, 1, 3] = value
        assert hostile.error_ratio(cell, inputs, wrong, lse) == float("inf")
    monkeypatch.setitem(hostile.DATA, "bad", hostile.bad(slice(None)))
    inputs = hostile.values("bad", cell, torch.float16)
    assert hostile.error_ratio(cell, inputs, torch.full_like(o, float("nan")), lse) < 1e-6


@pytest.mark.parametrize("part", ["o", "lse"])
def test_what_is_not_a_number_is_wrong(hostile: Any, part: str) -> None:
    cell = hostile.Cell(HEAD_DIM, True, LENGTH, 1, HEADS)
    inputs = hostile.values("N(0,1)", cell, torch.bfloat16)
    exact = oracle.forward(
        fg.AttentionSpec(HEAD_DIM, dtype="fp32", mask=fg.causal(), direction="forward"),
        *(x.float().numpy() for x in inputs),
    )
    found = {name: torch.from_numpy(np.array(x)) for name, x in zip(("o", "lse"), exact, strict=True)}
    assert hostile.error_ratio(cell, inputs, found["o"], found["lse"]) < 1
    found[part].view(-1)[5] = float("nan")
    assert hostile.error_ratio(cell, inputs, found["o"], found["lse"]) == float("inf")
