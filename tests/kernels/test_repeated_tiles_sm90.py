"""Tiles of queries that Hopper's forward kernel repeats, because their first results cannot be trusted
(sm90/tile_checks.cuh): which ones, how many, and that their second results are those that stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.emulator import LaunchTraffic
from flashgen.verify import Case, Mode, expect
from tests.drawn import diagonal
from tests.emulator.kernels.conftest import STAYING_BLOCKS, Run
from tests.emulator.kernels.conftest import Case as KernelCase
from tests.kernels.test_forward_sm90 import DTYPES, Array, check, forward_spec, launches
from tests.kernels.test_reference_max_softmax_sm90 import expected_of

pytestmark = pytest.mark.in_turns(6)

#: Four tiles of keys and a rest, and several tiles of queries.
LEN_Q, LEN_KV = 300, 430
MODES = [Mode("random", 1), Mode(race=True), Mode("priority", 3, race=True)]


def growing(dim: int, rows: Any = slice(None)) -> tuple[Array, Array, Array]:
    """Logits of these rows grow by 1000 along the keys, in the order in which blocks come: from the last key on."""
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((1, n, 2, dim)) for n in (LEN_Q, LEN_KV, LEN_KV))
    q[..., 0] = 0
    q[:, rows, :, 0] = 16
    k[..., 0] = np.linspace(1000, 0, LEN_KV)[:, None] * dim**0.5 / 16
    return q, k, v


@pytest.mark.parametrize(("dtype", "dims"), diagonal(DTYPES, [(64, 64), (128, 128), (256, 256), (80, 80)], step=2))
def test_rows_that_outgrow_their_reference_maximum_are_right(dtype: str, dims: tuple[int, int]) -> None:
    """And so are all others, of the same tile and of tiles that a block computes before and after it."""
    for rows in (slice(None), slice(150, 160), [LEN_Q - 1]):
        for mask in (fg.full(), fg.causal()):
            spec = forward_spec(*dims, dtype=dtype, mask=mask)
            check(spec, expected_of(spec, *growing(dims[0], rows)), Mode("random", dims[0]))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_other_tiles_keep_their_bits(mode: Mode) -> None:
    spec = forward_spec(64)
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    plain, wild = ([x.astype(spec.element.numpy()) for x in growing(64, rows)] for rows in (slice(0), slice(100, 101)))
    with launches(kernel, mode):
        expected, found = (kernel(*arrays) for arrays in (plain, wild))
    others = np.arange(LEN_Q) != 100
    assert found[0][:, others].tobytes() == expected[0][:, others].tobytes()
    assert found[1][:, :, others].tobytes() == expected[1][:, :, others].tobytes()


def tiles_of_queries(case: KernelCase, values: tuple[Array, Array, Array], mode: Mode) -> float:
    """How many tiles of queries a launch of two blocks loads. Results must be right."""
    run = Run(case)
    for name, array in zip("qkv", values, strict=True):
        run.arrays[name][...] = array.astype(run.arrays[name].dtype)
    q, k, v = (run.arrays[name] for name in "qkv")
    traffic: list[LaunchTraffic] = []
    options = {"schedule": mode.schedule, "seed": mode.seed, "traffic": traffic}
    run.launch("forward", None, **options)
    exact, bounds = oracle.forward(case.spec, q, k, v), oracle.bounds(case.spec, q, k, v)
    for name, expected, bound in zip(("o", "lse"), exact, (bounds.o, bounds.lse), strict=True):
        assert oracle.check(run.arrays[name].astype(np.float64), expected, bound, exact_infinity=name == "lse").ok
    tile = int(run.plan.kernel("forward").constant("tile_q")) * case.spec.head_dim * q.itemsize
    return traffic[0].read["q"] / tile


@pytest.mark.parametrize("mode", [Mode(), Mode("random", 2), Mode("priority", 5)], ids=str)
def test_a_block_repeats_at_most_the_four_tiles_under_way(mode: Mode) -> None:
    """All later tiles are careful from the outset, however many rows outgrow their reference maxima."""
    heads, tiles = 2, 8
    case = KernelCase(forward_spec(128), 128 * tiles, LEN_KV, heads, heads, arch="sm_90a")
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((1, n, heads, 128)) for n in (128 * tiles, LEN_KV, LEN_KV))
    assert tiles_of_queries(case, (q, k, v), mode) == heads * tiles
    q[..., 0], k[..., 0] = 16, np.linspace(1000, 0, LEN_KV)[:, None]
    loaded = tiles_of_queries(case, (q, k, v), mode)
    assert heads * tiles < loaded <= heads * tiles + 4 * STAYING_BLOCKS


def test_a_tile_without_any_allowed_pair_gives_zeros() -> None:
    """The first of three tiles of queries: with a band, and with a mask that leaves out blocks."""
    masks = fg.Mask.of(lambda b, h, q, k: k < q - 200), fg.causal() & fg.Mask.of(lambda b, h, q, k: q > 140)
    for mask in (fg.causal(), *masks):
        spec = forward_spec(64, mask=mask)
        check(spec, expect(spec, Case("no pair", 560, 300, heads=2, heads_kv=2), any_values=True), Mode("random", 1))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dim", [64, 256])
def test_results_of_the_repetition_replace_the_first_ones(dim: int, mode: Mode) -> None:
    """Of O as TMA stores it, and from registers: first results are NaN wherever V is, in every column."""
    spec = forward_spec(dim, mask=fg.causal())
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    dtype, random = spec.element.numpy(), np.random.default_rng(6)
    q, k, v = (random.standard_normal((1, 460, 1, dim)).astype(dtype) for _ in "qkv")
    v[:, 450] = np.nan
    with launches(kernel, mode):
        out, lse = kernel(q, k, v)
    assert np.isfinite(out[:, :450].astype(np.float32)).all()
    assert np.isnan(out[:, 450:].astype(np.float32)).all()
    assert np.isfinite(lse).all()


def growing_by(nats: float, scale_of_values: float = 1.0) -> tuple[Array, Array, Array]:
    """Logits of all rows grow by this much along the keys, in the order in which blocks come."""
    q, k, v = growing(64)
    q[..., 1:] *= 0.1
    k[..., 1:] *= 0.1
    k[..., 0] *= nats / 1000
    return q, k, v * scale_of_values


def test_a_sink_above_a_row_does_not_hide_that_the_row_has_outgrown_its_reference_maximum() -> None:
    spec = forward_spec(64, dtype="fp16", score=fg.sink(np.array([24.0, 30.0], np.float32)))
    check(spec, expected_of(spec, *growing_by(20.0)))


@pytest.mark.parametrize("mask", [fg.full(), fg.causal()], ids=["full", "causal"])
def test_large_values_of_rows_that_have_grown_are_right(mask: fg.Mask) -> None:
    spec = forward_spec(64, mask=mask)
    check(spec, expected_of(spec, *growing_by(30.0, 1e31)))
    check(spec, expected_of(spec, *growing_by(55.0, 1e31)))
