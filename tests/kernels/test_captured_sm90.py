"""What Hopper's kernels read of captured tensors, on the emulator: biases that lie anyhow, ids in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.plan.captured.prefetch import prefetched_loads_of
from tests.drawn import diagonal, some

Array = np.ndarray[Any, Any]
BATCH, HEADS, HEADS_KV, LENGTH = 2, 2, 1, 210
#: Wider than tiles of keys, so that some lie within it and one does not.
WIDE = np.random.default_rng(0).standard_normal((BATCH, HEADS, LENGTH, 232))


def check(spec: fg.AttentionSpec, captured: dict[str, Array], passes: int, **options: Any) -> None:
    """One call, forward or both ways, against the oracle."""
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    assert all(k.algorithm == "FlashAttention-3" for k in kernel.plan.kernels if k.role in ("forward", "main"))
    random, dtype = np.random.default_rng(3), spec.element.numpy()
    q, do = (random.standard_normal((BATCH, LENGTH, HEADS, spec.head_dim)).astype(dtype) for _ in range(2))
    k, v = (random.standard_normal((BATCH, LENGTH, HEADS_KV, spec.head_dim)).astype(dtype) for _ in range(2))
    kernel.target.options = options
    try:
        found: tuple[Any, ...] = kernel(q, k, v, captured=captured)
        if passes > 1:
            found += kernel.backward(do, q, k, v, *found, captured=captured)
    finally:
        kernel.target.options = {}
    exact = oracle.forward(spec, q, k, v, captured=captured)
    if passes > 1:
        exact += oracle.backward(spec, q, k, v, do, captured=captured)
    limits = oracle.bounds(spec, q, k, v, do if passes > 1 else None, exact=exact, captured=captured)
    for name, result, reference in zip(("o", "lse", "dq", "dk", "dv"), found, exact, strict=False):
        verdict = oracle.check(result, reference, getattr(limits, name), exact_infinity=name == "lse")
        assert verdict.ok, (name, verdict)


def placed(how: str, dtype: Any) -> Array:
    """A bias (batch, heads, LENGTH, LENGTH)."""
    x = WIDE.astype(dtype)
    return {
        "rows of an even length": x[..., :LENGTH],
        "rows of an odd length": np.ascontiguousarray(x[..., : LENGTH + 3])[..., :LENGTH],
        "rows that end with the keys": np.ascontiguousarray(x[..., :LENGTH]),
        "from the second element on": x[..., 1 : LENGTH + 1],
        "from the fifth element on": x[..., 4 : LENGTH + 4],
        "columns side by side": np.ascontiguousarray(x[..., :LENGTH].transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2),
        "every second element": np.repeat(x[..., :LENGTH], 2, axis=-1)[..., ::2],
        "the same for all heads": np.broadcast_to(x[:, :1, :, :LENGTH], (BATCH, HEADS, LENGTH, LENGTH)),
        "the same for all queries": np.broadcast_to(x[:, :, :1, :LENGTH], (BATCH, HEADS, LENGTH, LENGTH)),
    }[how]


PLACES = (
    "rows of an even length",
    "rows of an odd length",
    "rows that end with the keys",
    "from the second element on",
    "from the fifth element on",
    "columns side by side",
    "every second element",
    "the same for all heads",
    "the same for all queries",
)


@pytest.mark.parametrize(("kind", "how"), diagonal([(64, np.float16), (128, np.float32)], PLACES))
def test_a_bias_may_lie_as_it_likes(kind: tuple[int, Any], how: str) -> None:
    dim, dtype = kind
    spec = fg.AttentionSpec(dim, score=fg.bias(np.zeros((2, 2, 2, 2), dtype)), direction="forward")
    order = {"race": True} if PLACES.index(how) % 3 == 0 else {"schedule": "random", "seed": PLACES.index(how)}
    (name,) = spec.tensors
    check(spec, {name: placed(how, dtype)}, 1, **order)


@pytest.mark.parametrize("how", some(PLACES[:4], *PLACES[1:3]))
def test_gradients_are_those_of_a_bias_of_two_bytes_that_lies_as_it_likes(how: str) -> None:
    number = PLACES.index(how)
    dtype = fg.AttentionSpec(64).element.numpy() if number % 3 else np.float16
    spec = fg.AttentionSpec(128 if number % 3 == 2 else 64, mask=fg.causal(), score=fg.bias(np.zeros((2,) * 4, dtype)))
    assert "loads_ahead" in fg.build(spec, arch="sm_90a", target="emulator").plan.kernel("main").switches
    order = {"race": True} if number % 4 == 0 else {"schedule": "random", "seed": number}
    (name,) = spec.tensors
    check(spec, {name: placed(how, dtype)}, 2, **order)


def test_biases_come_ahead_as_far_as_there_is_room() -> None:
    """Two of 16 bits and one more; under a mask that cuts, and inside of a function."""
    a, b, c = (WIDE[0, 0, :, :LENGTH].astype(dtype) for dtype in (np.float16, np.float16, np.float32))

    def score(s: Any, b_: Any, h: Any, q: Any, k: Any) -> Any:
        return fg.tanh(s + a[q, k]) * 2.0 + b[q // 2, k] * c[q, k]

    spec = fg.AttentionSpec(64, mask=fg.causal(), score=fg.Score.of(score), direction="forward")
    forward = fg.build(spec, arch="sm_90a", target="emulator").plan.kernel("forward")
    assert forward.expressions is not None
    assert len(prefetched_loads_of(forward.expressions)) == 2
    check(spec, dict(spec.tensors), 1, schedule="random", seed=1)


ORDERS: dict[str, Array] = {
    "in order": np.repeat([-70, -1, 0, 9, 10], [3, 61, 64, 70, 12]),
    "nearly in order": np.where(np.arange(LENGTH) == 40, 9, np.repeat([-70, -1, 9], [64, 64, 82])),
    "backwards": np.repeat([5, 3, -2], [70, 58, 82]),
    "in any order": np.random.default_rng(4).integers(-2, 3, LENGTH),
}


@pytest.mark.parametrize("order", ORDERS)
def test_documents_may_come_in_any_order(order: str) -> None:
    ids = np.stack([ORDERS[order], np.roll(ORDERS[order], 1)]).astype(np.int32)
    spec = fg.AttentionSpec(64, mask=fg.causal() & fg.document(np.zeros((1, 1), np.int32)))
    check(spec, {"ids": ids}, 2, schedule="random", seed=list(ORDERS).index(order))
    check(spec, {"ids": ids}, 2, race=True)
