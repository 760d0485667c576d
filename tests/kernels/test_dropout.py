"""Which pairs kernels drop: what the oracle says, for every schedule, dtype and architecture, and in both passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.launch.host import HostTarget

DROPOUT = fg.Dropout(0.3, 2**63 + 11, 2**35 + 4)
KEYS = 64


def spec(**fields: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(16, head_dim_v=KEYS, dropout=True, **fields)


#: The last one's warps own eight columns of the backward pass's scores: an odd number of blocks.
BUILDS: dict[str, tuple[fg.AttentionSpec, fg.Schedule | None, str]] = {
    "default": (spec(), None, "sm_80"),
    "keys split": (spec(), fg.Schedule(tile_q=32, tile_kv=32, warps=fg.WarpPartition("split_k", 2)), "sm_90"),
    "half-depth steps": (spec(dtype="fp16"), fg.Schedule(tile_q=16, tile_kv=16), "sm_75"),
    "fp32, narrow tiles": (
        spec(dtype="fp32", deterministic=True),
        fg.Schedule(backward=fg.BackwardSchedule(tile_q=16, tile_kv=16, warps=2)),
        "sm_80",
    ),
}


@pytest.fixture(params=BUILDS)
def kernel(request: pytest.FixtureRequest) -> Iterator[fg.Kernel]:
    asked, schedule, arch = BUILDS[request.param]
    return fg.build(asked, schedule, arch=arch, target="emulator")


def test_a_probability_that_is_dropped_is_gone_and_others_count_more(kernel: fg.Kernel) -> None:
    """With equal scores and a unit matrix for V, O shows each pair; with one for dO, so does dV."""
    dtype = kernel.spec.element.numpy()
    q, k = np.zeros((2, KEYS, 2, 16), dtype), np.zeros((2, KEYS, 2, 16), dtype)
    unit = np.ascontiguousarray(np.broadcast_to(np.eye(KEYS)[None, :, None, :], (2, KEYS, 2, KEYS))).astype(dtype)
    o, lse = kernel(q, k, unit, dropout=DROPOUT)
    _, _, dv = kernel.backward(unit, q, k, unit, o, lse, dropout=DROPOUT)
    kept = oracle.dropout_mask(DROPOUT, 2, 2, KEYS, KEYS)
    assert np.array_equal(np.moveaxis(o.astype(np.float32) != 0, 2, 1), kept)
    assert np.array_equal(np.moveaxis(dv.astype(np.float32) != 0, (1, 2, 3), (3, 1, 2)), kept)
    shown = o.astype(np.float32)
    np.testing.assert_allclose(shown[shown != 0], 1 / KEYS / 0.7, rtol=2.0**-7)


def test_seed_and_offset_are_read_from_memory_where_they_are_there() -> None:
    kernel = fg.build(*BUILDS["default"][:2], arch="sm_80", target="emulator")
    random = np.random.default_rng(0)
    q, k, v, do = (random.standard_normal((1, 40, 1, d)).astype(kernel.spec.element.numpy()) for d in (16, 16, 64, 64))
    in_memory = fg.Dropout(DROPOUT.p, state=np.array([DROPOUT.seed, DROPOUT.offset], np.uint64))
    results = []
    target = kernel.target
    assert isinstance(target, HostTarget)
    target.options = {"race": True}
    for dropout in (DROPOUT, in_memory):
        o, lse = kernel(q, k, v, dropout=dropout)
        results.append((o, lse, *kernel.backward(do, q, k, v, o, lse, dropout=dropout)[1:]))
    target.options = {}
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_call_prepared_for_one_seed_serves_others() -> None:
    kernel = fg.build(*BUILDS["default"][:2], arch="sm_80", target="emulator")
    q = np.zeros((1, 20, 1, 16), kernel.spec.element.numpy())
    v = np.ones((1, 20, 1, KEYS), kernel.spec.element.numpy())
    for seed, p in ((1, 0.5), (2, 0.5), (1, 0.1), (1, 0.0)):
        dropout = fg.Dropout(p, seed)
        o, _ = kernel(q, q, v, dropout=dropout)
        kept = oracle.dropout_mask(dropout, 1, 1, 20, 20)[0, 0].sum(axis=1)
        np.testing.assert_allclose(o[0, :, 0, 0].astype(np.float32), kept / 20 / (1 - p), rtol=2.0**-6)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_captured_tensors_know_what_is_dropped(deterministic: bool) -> None:
    random = np.random.default_rng(2)
    bias = random.standard_normal((1, 2, 33, 50)).astype(np.float32)
    slopes, sink = random.standard_normal(2).astype(np.float32), random.standard_normal(2).astype(np.float32)
    score = fg.bias(bias) >> fg.alibi(slopes) >> fg.sink(sink)
    asked = fg.AttentionSpec(16, dtype="fp32", score=score, dropout=True, deterministic=deterministic)
    q, k, v, do = (random.standard_normal((2, n, 2, 16)).astype(np.float32) for n in (33, 50, 50, 33))
    kernel = fg.build(asked, arch="sm_80", target="emulator")
    o, lse = kernel(q, k, v, dropout=DROPOUT)
    *_, found = kernel.backward(do, q, k, v, o, lse, captured_gradients=True, dropout=DROPOUT)
    exact = oracle.captured_gradients(asked, q, k, v, do, dropout=DROPOUT)
    limits = oracle.captured_bounds(asked, q, k, v, do, exact=exact, dropout=DROPOUT)
    assert set(found) == set(exact)
    assert len(found) == 3
    for name, value in found.items():
        assert np.abs(value - exact[name]).max() <= limits[name], name


def test_a_call_says_which_pairs_are_dropped_if_and_only_if_the_spec_drops_some() -> None:
    q = np.zeros((1, 4, 1, 16), np.float32)
    with_dropout = fg.build(fg.AttentionSpec(16, dtype="fp32", dropout=True), arch="sm_80", target="emulator")
    without = fg.build(fg.AttentionSpec(16, dtype="fp32"), arch="sm_80", target="emulator")
    with pytest.raises(fg.ArgumentError, match=r"pass dropout=flashgen\.Dropout"):
        with_dropout(q, q, q)
    with pytest.raises(fg.ArgumentError, match="build one with dropout=True"):
        without(q, q, q, dropout=DROPOUT)
    for state in (np.zeros(3, np.int64), np.zeros(2, np.int32), np.zeros(4, np.int64)[::2]):
        with pytest.raises(fg.ArgumentError, match="2 contiguous int64"):
            with_dropout(q, q, q, dropout=fg.Dropout(0.5, state=state))


def test_on_hopper_both_passes_are_flash_attention_3() -> None:
    from flashgen.plan import plan

    made = plan(fg.AttentionSpec(128, mask=fg.causal(), dropout=True), None, "sm_90a")
    roles = ("forward", "prepare", "main", "repair")
    assert {made.kernel(role).algorithm for role in roles} == {"FlashAttention-3"}
