"""Values have torch's methods, and captured tensors are indexed one bracket after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import TraceError
from flashgen.expr.trace.tracer import trace_mask, trace_score
from flashgen.expr.tree.operators import METHODS
from flashgen.expr.tree.text import text

BIAS = np.zeros((2, 3, 8, 8), np.float32)
IDS = np.zeros((2, 8), np.int32)


@pytest.mark.parametrize(
    ("method", "function"),
    [
        (lambda s, b, h, q, k: (q - k).abs(), lambda s, b, h, q, k: abs(q - k)),
        (lambda s, b, h, q, k: s.exp().log(), lambda s, b, h, q, k: fg.log(fg.exp(s))),
        (lambda s, b, h, q, k: s.sqrt() + s.sigmoid(), lambda s, b, h, q, k: fg.sqrt(s) + fg.sigmoid(s)),
        (lambda s, b, h, q, k: s.sin() * s.cos(), lambda s, b, h, q, k: fg.sin(s) * fg.cos(s)),
        (lambda s, b, h, q, k: s.tan() - s.tanh(), lambda s, b, h, q, k: fg.tan(s) - fg.tanh(s)),
        (lambda s, b, h, q, k: s.minimum(q).maximum(k), lambda s, b, h, q, k: fg.maximum(fg.minimum(s, q), k)),
        (lambda s, b, h, q, k: s.min(q).max(k), lambda s, b, h, q, k: fg.maximum(fg.minimum(s, q), k)),
        (lambda s, b, h, q, k: s.clamp(-5, 5.0), lambda s, b, h, q, k: fg.minimum(fg.maximum(s, -5), 5.0)),
        (lambda s, b, h, q, k: s.clip(min=0), lambda s, b, h, q, k: fg.maximum(s, 0)),
        (lambda s, b, h, q, k: s.clamp(max=q), lambda s, b, h, q, k: fg.minimum(s, q)),
        (lambda s, b, h, q, k: s.pow(3), lambda s, b, h, q, k: s * s * s),
        (lambda s, b, h, q, k: s**0.5, lambda s, b, h, q, k: fg.sqrt(s)),
        (lambda s, b, h, q, k: q.float() / 2, lambda s, b, h, q, k: q / 2),
        (lambda s, b, h, q, k: s + (q < k).int() * 2, lambda s, b, h, q, k: s + fg.where(q < k, 1, 0) * 2),
        (lambda s, b, h, q, k: s + BIAS[b][h][q][k], lambda s, b, h, q, k: s + BIAS[b, h, q, k]),
        (lambda s, b, h, q, k: s + BIAS[b, h][q, k], lambda s, b, h, q, k: s + BIAS[b, h, q, k]),
    ],
)
def test_a_method_is_its_function(method: Callable[..., Any], function: Callable[..., Any]) -> None:
    assert trace_score(method).root is trace_score(function).root


def test_every_function_of_the_language_is_a_method_or_has_none() -> None:
    from flashgen.expr.tree.nodes import FUNCTIONS

    assert set(FUNCTIONS) - set(METHODS) == {"where"}


def test_what_is_left_of_a_tensor_has_its_shape() -> None:
    shapes = []

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = IDS[b]
        shapes.append((row.shape, row.ndim, len(row)))
        return row[q] == row[k]

    assert text(trace_mask(mask).root) == "ids[b, q] == ids[b, k]".replace("ids", "IDS")
    assert shapes == [((8,), 1, 8)]


def test_a_row_of_a_tensor_is_no_mask() -> None:
    with pytest.raises(TraceError, match=r"IDS\[b\] is a tensor of 1 dimensions and has to be indexed: IDS\[b\]\[k\]"):
        trace_mask(lambda b, h, q, k: IDS[b])
