"""The same numbers, bit for bit, in whatever order threads, warps and blocks run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flashgen as fg

SPLIT_K = fg.Schedule(warps=fg.WarpPartition("split_k", 4))
RING = fg.Schedule(tile_q=32, tile_kv=32, stages=3, backward=fg.BackwardSchedule(32, 32, 2, 4))
BUILDS: dict[str, tuple[fg.AttentionSpec, fg.Schedule | None, str]] = {
    "causal, default schedule": (fg.AttentionSpec(64, mask=fg.causal(), deterministic=True), None, "sm_80"),
    "full, narrow heads": (fg.AttentionSpec(20, dtype="fp16", deterministic=True), None, "sm_75"),
    "fp32, window": (
        fg.AttentionSpec(24, head_dim_v=40, dtype="fp32", mask=fg.window(20, 9), deterministic=True),
        None,
        "sm_80",
    ),
    "split_k": (fg.AttentionSpec(32, mask=fg.causal(), deterministic=True), SPLIT_K, "sm_90"),
    "three stages": (fg.AttentionSpec(32, dtype="fp16", deterministic=True), RING, "sm_80"),
}
ORDERS: list[dict[str, Any]] = [
    {"schedule": "reverse"},
    {"schedule": "random", "seed": 1},
    {"schedule": "random", "seed": 2},
    {"schedule": "priority", "seed": 3},
    {"schedule": "random", "seed": 4, "resident": 4},
]


def inputs(spec: fg.AttentionSpec, len_q: int, len_kv: int) -> list[Any]:
    random = np.random.default_rng(0)
    shapes = (
        (2, len_q, 4, spec.head_dim),
        (2, len_kv, 2, spec.head_dim),
        (2, len_kv, 2, spec.head_dim_v),
        (2, len_q, 4, spec.head_dim_v),
    )
    return [random.standard_normal(shape).astype(spec.element.numpy()) for shape in shapes]


@pytest.fixture(params=BUILDS)
def kernel(request: pytest.FixtureRequest) -> Iterator[fg.Kernel]:
    spec, schedule, arch = BUILDS[request.param]
    built = fg.build(spec, schedule, arch=arch, target="emulator")
    yield built
    built.target.options = {}


def results(kernel: fg.Kernel, arrays: list[Any], options: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of all results, under the emulator's given order."""
    kernel.target.options = options
    q, k, v, do = arrays
    o, lse = kernel(q, k, v)
    gradients = kernel.backward(do, q, k, v, o, lse)
    return {
        name: np.ascontiguousarray(x).tobytes()
        for name, x in zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients), strict=True)
    }


def test_both_passes_give_the_same_bits_in_any_order(kernel: fg.Kernel) -> None:
    arrays = inputs(kernel.spec, 75, 90)
    expected = results(kernel, arrays, {"schedule": "sequential"})
    for options in ORDERS:
        found = results(kernel, arrays, options)
        assert [name for name in expected if found[name] != expected[name]] == [], options


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(kernel: fg.Kernel) -> None:
    arrays = inputs(kernel.spec, 40, 33)
    whole = results(kernel, arrays, {})
    alone = [results(kernel, [x[b : b + 1] for x in arrays], {}) for b in range(2)]
    for name, expected in whole.items():
        assert alone[0][name] + alone[1][name] == expected, name


def test_without_the_promise_only_dq_depends_on_the_order() -> None:
    kernel = fg.build(fg.AttentionSpec(32, dtype="fp32"), target="emulator")
    arrays = inputs(kernel.spec, 150, 150)
    expected = results(kernel, arrays, {})
    differing = set()
    try:
        for seed in range(4):
            found = results(kernel, arrays, {"schedule": "random", "seed": seed, "resident": 4})
            differing |= {name for name in expected if found[name] != expected[name]}
    finally:
        kernel.target.options = {}
    # If nothing differed, the emulator's orders would not be worth testing with.
    assert differing == {"dq"}
