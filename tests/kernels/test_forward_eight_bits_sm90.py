"""The forward kernel for Hopper with 8-bit inputs, on the emulator: near the oracle for every mask, score, shape of
scales and order of warps, and for logits that outgrow what 8 bits hold."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.plan.hopper.forward_table import EIGHT_BITS
from flashgen.verify import Case, Mode, expect
from flashgen.verify.trial import ORDERS
from tests.drawn import LEVEL, diagonal, some
from tests.kernels.test_forward_sm90 import (
    LOGITS,
    LONGEST,
    NAME,
    OTHER,
    SPECS,
    check,
    drawn_case,
    drawn_mode,
    forward_spec,
    launches,
)
from tests.kernels.test_reference_max_softmax_sm90 import expected_of, hostile

pytestmark = pytest.mark.in_turns(12)

#: Head dims of the table's rows, and others, whose last panel of V is not full.
DIMS = [*EIGHT_BITS, (16, 16), (80, 80), (112, 48), (208, 208)]
CASES = {"sample": 2, "ci": 8, "nightly": 200}[LEVEL]
SCALE_BLOCKS = (None, 64, 128)
FIELDS: dict[str, dict[str, Any]] = {
    **SPECS,
    "packed": {"mask": fg.causal(), "varlen": True},
    "packed, full": {"varlen": True},
    "capped, sink": {"mask": fg.causal(), "score": fg.softcap(3.0) >> fg.sink(LOGITS)},
}
#: What has too few registers for this kernel.
OTHERS = {(256, 256, "pattern")}
DRAWN = [(*dims, name) for dims, name in diagonal(DIMS, list(FIELDS), step=len(DIMS)) if (*dims, name) not in OTHERS]


@pytest.mark.parametrize(("dim", "dim_v", "name"), DRAWN)
def test_results_are_within_their_bounds_and_nothing_is_found(dim: int, dim_v: int, name: str) -> None:
    random = Random(f"{dim} {dim_v} {name}")
    for number in range(CASES):
        # Shapes of scales and dtypes of O change the kernel: one of each for a build.
        other = DIMS.index((dim, dim_v)) + list(FIELDS).index(name) + (number if LEVEL == "nightly" else 0)
        spec = forward_spec(
            dim,
            dim_v,
            dtype="e4m3",
            scale_block=SCALE_BLOCKS[other % 3],
            out_dtype=("bf16", "fp16")[other % 2],
            **FIELDS[name],
        )
        tiles = fg.build(spec, arch="sm_90a", target="emulator").plan.kernel("forward")
        case = drawn_case(random, spec, int(tiles.constant("tile_q")), int(tiles.constant("tile_kv")))
        expected = expect(spec, case, any_values=True)
        # Packed keys may have rows that no sequence uses. TMA needs some row.
        key_rows = case.len_kv if expected.packing is None else expected.packing.total_rows[1]
        check(spec, expected, drawn_mode(random), by=NAME if key_rows else OTHER)


SCHEDULES = {
    # Steps overlap; P has registers twice, or once.
    "P twice": (96, fg.full(), fg.Schedule()),
    "P once": (128, fg.full(), fg.Schedule()),
    "P twice, 96 keys": (128, fg.full(), fg.Schedule(tile_kv=96)),
    "three consumers, overlapping steps": (64, fg.causal(), fg.Schedule()),
    # S and the products share registers.
    "three consumers": (64, fg.full(), fg.Schedule()),
    "two parts": (256, fg.full(), fg.Schedule()),
    "running maximum": (128, fg.full(), fg.Schedule(softmax="running-max")),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("order", some(ORDERS, "random"))
def test_every_order_of_warps_gives_the_same_bits(name: str, order: Any) -> None:
    """More tiles than blocks, and more blocks of keys than stages."""
    dim, mask, schedule = SCHEDULES[name]
    spec = forward_spec(dim, dtype="e4m3", mask=mask)
    expected = expect(spec, Case("several tiles", 400, 2 * LONGEST, heads=2))
    kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
    x, scales = expected.inputs, expected.case.scales_for(spec)
    first = kernel(x.q, x.k, x.v, **scales)
    for race in (False, True):
        with launches(kernel, Mode(order, 3, race)) as done:
            again = kernel(x.q, x.k, x.v, **scales)
        assert done == {NAME}
        assert [a.tobytes() for a in again] == [b.tobytes() for b in first]
    assert all(result.check.ok for result in expected.judge(first))


@pytest.mark.parametrize("name", ["growing", "falling", "in steps", "4 times", "one huge key", "heavy tails"])
@pytest.mark.parametrize("way", some(SCHEDULES, "P twice", "P once", "two parts"))
def test_logits_may_outgrow_the_first_block(name: str, way: str) -> None:
    """Exponentials beyond 448 raise the reference maximum, also while a product waits to be added to O."""
    dim, _, schedule = SCHEDULES[way]
    for mask in (fg.full(), fg.causal()):
        spec = forward_spec(dim, dtype="e4m3", mask=mask)
        values = hostile(name, dim, np.random.default_rng(len(name)))
        q, k, v = (np.clip(x, -448, 448) for x in values)
        check(spec, expected_of(spec, q, k, v), schedule=schedule)


@pytest.mark.parametrize(("dim", "way"), [(64, "hidden_nan"), (128, "hidden_nan"), (256, "hidden_nan")])
def test_a_value_that_is_nan_reaches_no_row_that_must_not_see_it(dim: int, way: Any) -> None:
    for mask in (fg.causal(), fg.window(40, 10), fg.chunked(70)):
        spec = forward_spec(dim, dtype="e4m3", mask=mask)
        check(spec, expect(spec, Case("NaN", 150, 300, heads=2, fill=way), any_values=True))


@pytest.mark.parametrize("way", some(SCHEDULES, "P twice", "P once"))
@pytest.mark.parametrize(("above", "at"), [(10, -5), (11, -5), (10, 5), (10, 2000)])
def test_many_small_probabilities_count_beside_a_large_one(way: str, above: float, at: int) -> None:
    """As in rows with an attention sink: thousands of keys that are 2^-14 of the largest have a third of the sum."""
    dim, _, schedule = SCHEDULES[way]
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, n, 1, dim)) for n in (64, 4000, 4000))
    q[..., 0], k[..., 1:], k[..., 0] = 16, 0.3 * k[..., 1:], 0
    k[:, at, :, 0] = above * dim**0.5 / 16
    spec = forward_spec(dim, dtype="e4m3")
    check(spec, expected_of(spec, q, k, v + 1), schedule=schedule)


def run(q: Any, k: Any, v: Any, mask: Any, **scales: Any) -> Any:
    """O of one head, by the kernel for Hopper on the emulator."""
    spec = fg.AttentionSpec(64, dtype="e4m3", mask=mask, direction="forward")
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    eight_bits = spec.element.numpy()
    return np.float32(kernel(*(x[None, :, None].astype(eight_bits) for x in (q, k, v)), **scales)[0][0, :, 0])


def rows(seed: int, count: int, size: float = 1.0) -> Any:
    return size * np.random.default_rng(seed).standard_normal((count, 64))


def test_a_row_does_not_depend_on_the_other_rows_of_its_warp() -> None:
    q, k, v = rows(0, 200, 2.0), rows(1, 700, 2.0), rows(2, 700)
    others = q.copy()
    others[1::2] = rows(3, 100, 6.0)
    others[1] = np.nan
    found, changed = run(q, k, v, fg.full()), run(others, k, v, fg.full())
    assert (found[1::2] != changed[1::2]).any()
    np.testing.assert_array_equal(found[::2], changed[::2])


def test_a_forbidden_nan_changes_no_bit_of_other_rows() -> None:
    q, k, v = rows(0, 900, 2.0), rows(1, 900, 2.0), rows(2, 900)
    found = run(q, k, v, fg.causal())
    v[-1] = np.nan
    changed = run(q, k, v, fg.causal())
    assert np.isnan(changed[-1]).all()
    # The block with the value itself is multiplied another way.
    np.testing.assert_array_equal(found[:640], changed[:640])
    np.testing.assert_allclose(found[:-1], changed[:-1], atol=0.02)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize("mask", [fg.full(), fg.causal()])
def test_blocks_of_zeros_attend_to_all_keys_alike(arch: str, mask: Any) -> None:
    v = np.random.default_rng(0).standard_normal((1, 100, 1, 64)).astype(np.float16)
    zeros = np.zeros_like(v)
    spec = fg.AttentionSpec(64, dtype="e4m3", out_dtype="fp16", mask=mask, direction="forward", scale_block=64)
    kernel = fg.build(spec, arch=arch, target="emulator")
    codes = kernel.quantize(zeros, zeros, v)
    found = kernel(*codes[:3], q_scale=codes[3], k_scale=codes[4], v_scale=codes[5])[0]
    sums = v.cumsum(1) / np.arange(1, 101)[:, None, None] if mask == fg.causal() else v.mean(1, keepdims=True)
    assert np.abs(found - sums).max() < 0.1
