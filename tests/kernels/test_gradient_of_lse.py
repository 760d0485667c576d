"""A loss that depends on the log-sum-exp too: on the emulator, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.spec import score

LOGITS = np.array([0.5, -2, 4, -np.inf], np.float32)
SCORES = {"none": None, "sink": score.alibi(np.array([0.5, 0.25, 0.1, 1], np.float32)) >> score.sink(LOGITS)}


@pytest.mark.parametrize(
    ("scored", "deterministic", "arch"),
    [("none", False, "sm_80"), ("none", True, "sm_80"), ("sink", False, "sm_80"), ("none", False, "sm_90a")],
)
def test_it_agrees_with_the_oracle(scored: str, deterministic: bool, arch: str) -> None:
    """More queries than keys: the first rows attend to nothing, where the LSE is minus infinity."""
    options: dict[str, Any] = {"mask": fg.causal(), "score": SCORES[scored], "deterministic": deterministic}
    dim = 64
    spec = fg.AttentionSpec(dim, dtype="fp16", **options)
    random = np.random.default_rng(0)
    q, k, v, do = (
        random.standard_normal(shape).astype(np.float16)
        for shape in ((2, 70, 4, dim), (2, 60, 2, dim), (2, 60, 2, dim), (2, 70, 4, dim))
    )
    dlse = (3 * random.standard_normal((2, 4, 70))).astype(np.float32)
    kernel = fg.build(spec, arch=arch, target="emulator")
    out, lse = kernel(q, k, v)
    *found, captured = kernel.backward(do, q, k, v, out, lse, captured_gradients=True, dlse=dlse)
    exact = oracle.backward(spec, q, k, v, do, dlse=dlse)
    limits = oracle.bounds(spec, q, k, v, do, dlse=dlse)
    for name, result, reference in zip(("dq", "dk", "dv"), found, exact, strict=True):
        assert oracle.check(result, reference, getattr(limits, name)).ok, name
    expected = oracle.captured_gradients(spec, q, k, v, do, dlse=dlse)
    for name, bound in oracle.captured_bounds(spec, q, k, v, do, exact=expected, dlse=dlse).items():
        assert oracle.check(captured[name], expected[name], bound).ok, name
    without = kernel.backward(do, q, k, v, out, lse)
    assert not oracle.check(without[0], exact[0], limits.dq).ok
