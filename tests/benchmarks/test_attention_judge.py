"""The judge of the benchmark of attention knows what attention is, a row at a time and with its gradients."""

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


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention_judge

    # Several chunks, the last of them shorter.
    monkeypatch.setattr(attention_judge, "CHUNK", 16)
    return attention_judge


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("fields", "mask", "score"),
    [
        ({}, fg.full(), None),
        ({"causal": True}, fg.causal(), None),
        ({"causal": True, "window": 7}, fg.window(6, 0), None),
        ({"causal": True, "softcap": 2.0}, fg.causal(), fg.softcap(2.0)),
    ],
    ids=["full", "causal", "window", "softcap"],
)
def test_it_is_the_oracle_s_attention(
    judge: Any, direction: str, fields: dict[str, Any], mask: fg.Mask, score: fg.Score | None
) -> None:
    from attention_rows import Problem

    problem = Problem(direction, 8, 42, 50, 2, 6, 2, **fields)
    random = np.random.default_rng(1)
    shapes = (2, 42, 6, 8), (2, 50, 2, 8), (2, 50, 2, 8), (2, 42, 6, 8)
    made = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    spec = fg.AttentionSpec(8, dtype="fp32", mask=mask, score=score)
    exact = oracle.forward(spec, *made[:3])[:1] if direction == "forward" else oracle.backward(spec, *made)
    tensors = [torch.from_numpy(x) for x in made]
    found = judge.expected(problem, tensors)
    wanted = judge.last_group(problem, [torch.from_numpy(x) for x in exact])
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
