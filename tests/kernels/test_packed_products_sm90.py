"""dS of P as it was rounded: as near to the oracle's as every gradient must be, whatever P and dP are like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.verify import Case, Inputs
from tests.kernels.test_backward_sm90 import SLOPES, built
from tests.kernels.test_forward_sm90 import LOGITS

SPECS: dict[str, dict[str, Any]] = {
    "causal": {"mask": fg.causal()},
    "head_dim 128": {"head_dim": 128},
    "slopes and sink": {"score": fg.alibi(SLOPES) >> fg.sink(LOGITS)},
    "in order": {"mask": fg.window(40, 0) | fg.global_tokens(3), "deterministic": True},
    "slope": {"score": fg.softcap(30.0)},
    "fp16": {"dtype": "fp16"},
    "fp16, slope": {"dtype": "fp16", "mask": fg.causal(), "score": fg.softcap(30.0)},
}


def times(name: str, factor: float, rows: Any = ...) -> Callable[[Inputs], None]:
    def change(x: Inputs) -> None:
        array = getattr(x, name)
        array[:, rows] = (array[:, rows].astype(np.float32) * factor).astype(array.dtype)

    return change


def small_probabilities(x: Inputs) -> None:
    """Nearly all of a row for its first key, and values of the others that are as large as their P is small."""
    x.k[:, 0] = 8
    x.q[...] = np.abs(x.q.astype(np.float32))
    times("v", 1e4, slice(1, None))(x)


HOSTILE: dict[str, Callable[[Inputs], None]] = {
    "large queries": times("q", 30),
    "one huge key": times("k", 100, 17),
    "one huge gradient": times("do", 1e30, 60),
    "tiny gradients": times("do", 1e-30),
    "small probabilities of large values": small_probabilities,
}


#: fp16 holds no such gradients.
CASES = [
    (name, hostile) for name in SPECS for hostile in HOSTILE if "gradient" not in hostile or not name.startswith("fp16")
]


@pytest.mark.parametrize(("name", "hostile"), CASES)
def test_gradients_are_within_their_bounds(name: str, hostile: str) -> None:
    spec = fg.AttentionSpec(**{"head_dim": 64, **SPECS[name]})
    kernel = built(spec)
    x = Case("hostile", 70, 140, heads=2, heads_kv=2).inputs(spec)
    HOSTILE[hostile](x)
    arrays = (x.q, x.k, x.v)
    o, lse = kernel(*arrays)
    exact, bounds = oracle.backward(spec, *arrays, x.do), oracle.bounds(spec, *arrays, x.do)
    found = kernel.backward(x.do, *arrays, o, lse)
    for result, reference, bound in zip(found, exact, (bounds.dq, bounds.dk, bounds.dv), strict=True):
        assert bound is not None
        verdict = oracle.check(result, reference, bound)
        assert verdict.ok, verdict
