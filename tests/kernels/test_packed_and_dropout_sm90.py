"""Packed sequences, dropout and head dims between those of the schedule table, by Hopper's forward kernel on the
emulator: as near to the oracle as everything else, in whichever order warps run."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.verify import Case, Mode, expect
from flashgen.verify.cases.packed import Packing
from tests.drawn import LEVEL, diagonal, some
from tests.kernels.test_forward_sm90 import DTYPES, LOGITS, SPECS, check, drawn_case, drawn_mode, forward_spec, launches

pytestmark = pytest.mark.in_turns(12)

#: Cases of each spec.
CASES = {"sample": 2, "ci": 12, "nightly": 100}[LEVEL]
SLOPES = np.array([0.3, -0.1, 0.02, 1.0], np.float32)
MASKS_AND_SCORES: dict[str, dict[str, Any]] = {
    **{name: SPECS[name] for name in ("full", "causal", "window", "documents", "softcap", "sink")},
    "slopes": {"mask": fg.causal(), "score": fg.alibi(SLOPES)},
}
#: Of multiples of 8: the narrowest, such that are no multiple of 16, of 32 or of 64, and values narrower than keys.
DIMS = [(8, 8), (40, 40), (64, 64), (72, 72), (80, 80), (112, 112), (128, 128), (192, 128), (200, 200), (256, 256)]
FEATURES: dict[str, dict[str, Any]] = {
    "packed": {"varlen": True},
    "dropout": {"dropout": True},
    "packed, dropout": {"varlen": True, "dropout": True},
    "neither": {},
}
EVERY = [
    (dims, name, feature)
    for (dims, name), feature in zip(
        diagonal(DIMS, list(MASKS_AND_SCORES), step=4), list(FEATURES) * len(DIMS) * len(MASKS_AND_SCORES), strict=False
    )
]


@pytest.mark.parametrize(("dims", "name", "feature"), EVERY)
def test_results_are_within_their_bounds_and_nothing_is_found(dims: tuple[int, int], name: str, feature: str) -> None:
    """Lengths about tiles, sequences of any length, heads shared or not. Rows that are not used hold NaN."""
    random = Random(f"{dims} {name} {feature}")
    dtype = DTYPES[random.randrange(2)]
    spec = forward_spec(*dims, dtype=dtype, **MASKS_AND_SCORES[name], **FEATURES[feature])
    schedule = random.choice((None, None, fg.Schedule(softmax="running-max")))
    tiles = fg.build(spec, schedule, arch="sm_90a", target="emulator").plan.kernel("forward")
    for _ in range(CASES):
        case = drawn_case(random, spec, int(tiles.constant("tile_q")), int(tiles.constant("tile_kv")))
        if spec.varlen and not spec.tensors:
            case = with_more_sequences(case, random)
        if not case.len_q or not case.len_kv:
            continue  # Another kernel writes results of calls without keys.
        check(spec, expect(spec, case, any_values=True), drawn_mode(random), schedule)


def with_more_sequences(case: Case, random: Random) -> Case:
    """Now and then more than the lanes of a warp: the scheduler counts the tiles of 32 sequences at a time."""
    batch = random.choice((1, 2, 3, 5, 40))
    if batch == 40:
        case = replace(case, len_q=min(case.len_q, 70), len_kv=min(case.len_kv, 90))
    return replace(case, batch=batch)


ROWS = ((200, 333), (0, 7), (7, 0), (1, 1), (130, 64), (0, 0), (64, 200))


@pytest.mark.parametrize(("name", "mode"), diagonal(["causal", "full"], [Mode("random", 1), Mode(race=True)], step=1))
def test_each_packed_sequence_gives_the_bits_that_it_gives_alone(name: str, mode: Mode) -> None:
    packed_spec, alone_spec = (forward_spec(64, **SPECS[name], varlen=varlen) for varlen in (True, False))
    packed, alone = (fg.build(spec, arch="sm_90a", target="emulator") for spec in (packed_spec, alone_spec))
    random, dtype = np.random.default_rng(2), packed_spec.element.numpy()
    len_q, len_kv = (max(rows[side] for rows in ROWS) for side in (0, 1))
    packing = Packing(ROWS, ROWS, False, before=(3, 5), after=(70, 1))
    shapes = ((len_q, 4), (len_kv, 2), (len_kv, 2))
    q, k, v = (random.standard_normal((len(ROWS), *shape, 64)).astype(dtype) for shape in shapes)
    arrays = [packing.pack(x, side) for x, side in ((q, 0), (k, 1), (v, 1))]
    with launches(packed, mode) as done:
        out, lse = packed(*arrays, sequences=packing.sequences(len_q, len_kv))
    assert done == {"FlashAttention-3"}
    row = 3
    for b, (rows_q, rows_kv) in enumerate(ROWS):
        own = slice(row, row + rows_q)
        row += rows_q
        if not rows_q or not rows_kv:
            assert (out[own] == 0).all()
            assert (lse[:, own] == -np.inf).all()
            continue
        expected_out, expected_lse = alone(q[b : b + 1, :rows_q], k[b : b + 1, :rows_kv], v[b : b + 1, :rows_kv])
        assert out[own].tobytes() == expected_out[0].tobytes()
        assert lse[:, own].tobytes() == np.ascontiguousarray(expected_lse[0]).tobytes()


def test_a_probability_that_is_dropped_is_gone_and_others_count_more() -> None:
    """With equal scores and a unit matrix for V, O shows each pair: also of rows and keys beyond the first tiles."""
    dropout, keys = fg.Dropout(0.3, 2**63 + 11, 2**35 + 4), 256
    spec = forward_spec(16, keys, dropout=True)
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    dtype = spec.element.numpy()
    q, k = np.zeros((2, 150, 2, 16), dtype), np.zeros((2, keys, 2, 16), dtype)
    unit = np.ascontiguousarray(np.broadcast_to(np.eye(keys)[None, :, None, :], (2, keys, 2, keys))).astype(dtype)
    with launches(kernel, Mode()) as done:
        out, _ = kernel(q, k, unit, dropout=dropout)
    assert done == {"FlashAttention-3"}
    kept = oracle.dropout_mask(dropout, 2, 2, 150, keys)
    shown = out.astype(np.float32)
    assert np.array_equal(np.moveaxis(shown != 0, 2, 1), kept)
    np.testing.assert_allclose(shown[shown != 0], 1 / keys / 0.7, rtol=2.0**-7)


def test_dropout_leaves_the_normalizer_and_the_sink_alone() -> None:
    """LSE is that of all probabilities."""
    score = fg.sink(LOGITS)
    random = np.random.default_rng(3)
    arrays = [random.standard_normal((1, n, 4, 64)) for n in (70, 150, 150)]
    found = []
    for dropout in (None, fg.Dropout(0.5, 7)):
        spec = forward_spec(64, mask=fg.causal(), score=score, dropout=dropout is not None)
        kernel = fg.build(spec, arch="sm_90a", target="emulator")
        q, k, v = (x.astype(spec.element.numpy()) for x in arrays)
        found.append(kernel(q, k, v, **({} if dropout is None else {"dropout": dropout}))[1])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


@pytest.mark.parametrize("fill", some(["nothing", "queries", "keys"], "nothing"))
def test_rows_of_packed_sequences_that_are_not_used_are_zero(fill: Any) -> None:
    """Among rows of the same tile that are used, whatever the others hold: in unused rows, NaN."""
    spec = forward_spec(64, mask=fg.causal(), varlen=True)
    for seed in range(4):
        case = Case("unused", 150, 200, batch=4, heads=2, heads_kv=1, non_finite=fill, seed=seed)
        check(spec, expect(spec, case, any_values=True), Mode("random", seed))
