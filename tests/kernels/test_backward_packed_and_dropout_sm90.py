"""Packed sequences and dropout by Hopper's backward kernels on the emulator: gradients as near to the oracle's as
without, in whichever order warps and blocks run.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.plan import Problem, plan, workspaces
from flashgen.plan.hopper.backward_tiles import HEAD_DIMS
from flashgen.verify import Case, Mode, expect
from flashgen.verify.cases.packed import Packing
from tests.drawn import LEVEL, diagonal
from tests.kernels.test_backward_sm90 import NAME, OTHER, PADDED, SPECS, built, check
from tests.kernels.test_forward_sm90 import drawn_case, drawn_mode, launches
from tests.kernels.test_packed_and_dropout_sm90 import with_more_sequences

pytestmark = pytest.mark.in_turns(24)

#: Cases of each spec.
CASES = {"sample": 2, "ci": 12, "nightly": 100}[LEVEL]
NAMES = ("full", "causal", "window", "documents", "holes", "softcap", "slopes", "sink")
FEATURES: dict[str, dict[str, Any]] = {
    "packed": {"varlen": True},
    "dropout": {"dropout": True},
    "packed, ordered": {"varlen": True, "deterministic": True},
    "packed, dropout": {"varlen": True, "dropout": True},
    "dropout, ordered": {"dropout": True, "deterministic": True},
}
EVERY = [
    (dims, name, feature)
    for (dims, name), feature in zip(
        diagonal(HEAD_DIMS, NAMES, step=3), list(FEATURES) * len(HEAD_DIMS) * len(NAMES), strict=False
    )
]
EVERY += [
    (dims, NAMES[number % len(NAMES)], list(FEATURES)[number % len(FEATURES)]) for number, dims in enumerate(PADDED)
]
DROPOUT = fg.Dropout(0.3, 2**63 + 11, 2**35 + 4)


@pytest.mark.parametrize(("dims", "name", "feature"), EVERY)
def test_gradients_are_within_their_bounds_and_nothing_is_found(dims: tuple[int, int], name: str, feature: str) -> None:
    """Lengths about tiles, sequences of any length, heads shared or not. Rows that are not used hold NaN."""
    random = Random(f"{dims} {name} {feature}")
    dtype = random.choice(("bf16", "fp16"))
    spec = fg.AttentionSpec(dims[0], head_dim_v=dims[1], dtype=dtype, **SPECS[name], **FEATURES[feature])
    main = built(spec).plan.kernel("main")
    for _ in range(CASES):
        case = drawn_case(random, spec, int(main.constant("tile_q")), int(main.constant("tile_kv")))
        if spec.varlen and not spec.tensors:
            case = with_more_sequences(case, random)
        if not case.len_q or not case.len_kv:
            continue  # Other kernels write results of calls without queries or keys.
        check(spec, expect(spec, case, any_values=True), drawn_mode(random))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_dv_shows_which_pairs_are_dropped(dim: int) -> None:
    """With equal scores and a unit matrix for dO, also in tiles beyond the first ones."""
    queries, keys = dim, 300
    spec = fg.AttentionSpec(dim, dropout=True)
    kernel = built(spec)
    dtype = spec.element.numpy()
    q, k = np.zeros((2, queries, 2, dim), dtype), np.zeros((2, keys, 2, dim), dtype)
    unit = np.ascontiguousarray(np.broadcast_to(np.eye(queries)[None, :, None, :], (2, queries, 2, dim))).astype(dtype)
    o, lse = kernel(q, k, k, dropout=DROPOUT)
    with launches(kernel, Mode(), "main") as done:
        _, _, dv = kernel.backward(unit, q, k, k, o, lse, dropout=DROPOUT)
    assert done == {NAME}
    kept = oracle.dropout_mask(DROPOUT, 2, 2, queries, keys)
    shown = dv.astype(np.float32)
    assert np.array_equal(np.moveaxis(shown != 0, (1, 2, 3), (3, 1, 2)), kept)
    np.testing.assert_allclose(shown[shown != 0], 1 / keys / 0.7, rtol=2.0**-7)


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)])
def test_non_finite_inputs_reach_no_other_gradients_with_dropout(dims: tuple[int, int]) -> None:
    """Tiles that are computed again drop the same pairs."""
    spec = fg.AttentionSpec(dims[0], mask=fg.causal(), dropout=True)
    for seed, fill in enumerate(("keys", "queries")):
        case = Case("repaired", 100, 150, heads=2, heads_kv=1, non_finite=fill, seed=seed)
        check(spec, expect(spec, case, any_values=True))


# ---- Packed sequences

#: Of more tiles than one, of one row, of no queries, of no keys and of neither.
ROWS = ((200, 333), (0, 7), (7, 0), (1, 1), (130, 64), (0, 0), (64, 200))
PACKING = Packing(ROWS, ROWS, False, before=(3, 5), after=(70, 1))
LONGEST = (max(q for q, _ in ROWS), max(k for _, k in ROWS))


def packed_arrays(spec: fg.AttentionSpec, heads: int = 4, heads_kv: int = 2) -> tuple[list[Any], list[Any]]:
    """do, q, k and v as a batch, and packed."""
    random, dtype = np.random.default_rng(2), spec.element.numpy()
    sides = ((0, heads, spec.head_dim_v), (0, heads, spec.head_dim), (1, heads_kv, spec.head_dim))
    batch = [
        random.standard_normal((len(ROWS), LONGEST[side], h, d)).astype(dtype)
        for side, h, d in (*sides, (1, heads_kv, spec.head_dim_v))
    ]
    return batch, [PACKING.pack(x, side) for x, side in zip(batch, (0, 0, 1, 1), strict=True)]


def gradients(kernel: fg.Kernel, arrays: list[Any], options: dict[str, Any]) -> list[Any]:
    """Of packed sequences, by the kernels for Hopper."""
    do, q, k, v = arrays
    sequences = PACKING.sequences(*LONGEST)
    kernel.target.options = {}  # type: ignore[attr-defined]
    o, lse = kernel(q, k, v, sequences=sequences)
    kernel.target.options = options  # type: ignore[attr-defined]
    try:
        return list(kernel.backward(do, q, k, v, o, lse, sequences=sequences))
    finally:
        kernel.target.options = {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("dims", "name"), [((128, 128), "causal"), ((64, 64), "full"), ((256, 256), "window")])
def test_each_packed_sequence_gives_the_bits_that_it_gives_alone(dims: tuple[int, int], name: str) -> None:
    specs = [fg.AttentionSpec(dims[0], deterministic=True, varlen=varlen, **SPECS[name]) for varlen in (True, False)]
    packed, alone = (built(spec) for spec in specs)
    batch, arrays = packed_arrays(specs[0])
    found = gradients(packed, arrays, {"schedule": "random", "seed": 1})
    rows = [3, 5]
    for b, (rows_q, rows_kv) in enumerate(ROWS):
        own = [x[rows[side] : rows[side] + ROWS[b][side]] for x, side in zip(found, (0, 1, 1), strict=True)]
        rows = [rows[0] + rows_q, rows[1] + rows_kv]
        if not rows_q or not rows_kv:
            assert not any(x.any() for x in own)
            continue
        do, q, k, v = (x[b : b + 1, :n] for x, n in zip(batch, (rows_q, rows_q, rows_kv, rows_kv), strict=True))
        o, lse = alone(q, k, v)
        for x, expected in zip(own, alone.backward(do, q, k, v, o, lse), strict=True):
            assert x.tobytes() == expected[0].tobytes()


#: Many blocks at once, and only one; who comes first, and who comes last.
MODES: list[dict[str, Any]] = [
    {"schedule": "reverse", "resident": 3},
    {"schedule": "random", "seed": 2},
    {"schedule": "priority", "seed": 4, "resident": 1},
    {"race": True, "schedule": "random", "seed": 5, "resident": 3},
]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_any_number_of_blocks_in_any_order_gives_the_same_bits(name: str, ordered: bool) -> None:
    """dQ may differ where tiles of keys add in any order."""
    fields = SPECS[name] if name == "causal" else {"mask": fg.chunked(70)}
    spec = fg.AttentionSpec(64, varlen=True, deterministic=ordered, **fields)
    kernel = built(spec)
    _, arrays = packed_arrays(spec)
    first = gradients(kernel, arrays, {})
    compared = slice(None) if ordered else slice(1, None)
    for options in MODES:
        again = gradients(kernel, arrays, options)
        assert [x.tobytes() for x in again[compared]] == [x.tobytes() for x in first[compared]], options
        np.testing.assert_allclose(again[0].astype(np.float32), first[0].astype(np.float32), rtol=2.0**-6, atol=1e-3)


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)])
@pytest.mark.parametrize("fill", ["nothing", "keys"])
def test_rows_that_are_not_used_have_no_gradient(dims: tuple[int, int], fill: Any) -> None:
    """Nor do they reach those of others, although they hold NaN."""
    spec = fg.AttentionSpec(dims[0], mask=fg.causal(), varlen=True)
    for seed in range(4):
        case = Case("unused", 150, 200, batch=4, heads=2, heads_kv=1, non_finite=fill, seed=seed)
        check(spec, expect(spec, case, any_values=True), Mode("random", seed))


def test_nan_between_sequences_needs_no_repair() -> None:
    """Boxes end with their sequence, so what lies behind it is not read. Without a mask there is no repair kernel."""
    spec = fg.AttentionSpec(64, varlen=True)
    assert not built(spec).plan.has("repair")
    for seed in range(4):
        case = Case("unused", 150, 200, batch=4, heads=2, heads_kv=1, seed=seed)
        check(spec, expect(spec, case, any_values=True))


def test_the_longest_sequence_may_be_longer_than_any() -> None:
    """max_seqlen is a bound. Windows and grids go by it, and results do not."""
    spec = fg.AttentionSpec(64, mask=fg.causal(), varlen=True, deterministic=True)
    kernel = built(spec)
    _, (do, q, k, v) = packed_arrays(spec)
    found = []
    for longest in (LONGEST, (LONGEST[0] + 61, LONGEST[1] + 300)):
        sequences = PACKING.sequences(*longest)
        o, lse = kernel(q, k, v, sequences=sequences)
        with launches(kernel, Mode(), "main") as done:
            found.append(kernel.backward(do, q, k, v, o, lse, sequences=sequences))
        assert done == {NAME}
    assert [x.tobytes() for x in found[0]] == [x.tobytes() for x in found[1]]


def test_without_queries_or_keys_other_kernels_clear_the_gradients() -> None:
    spec = fg.AttentionSpec(64, varlen=True)
    for lengths, by in (((0, 9), OTHER), ((9, 0), OTHER)):
        case = Case("empty", *lengths, batch=2, heads=2, heads_kv=1)
        check(spec, expect(spec, case, any_values=True), by=by)


def test_workspaces_of_packed_sequences_grow_with_rows_and_not_with_the_longest() -> None:
    """One long sequence among many short ones needs no room for many long ones."""
    made = plan(fg.AttentionSpec(128, mask=fg.causal(), varlen=True), None, "sm_90a")
    rows, sequences, heads = 10_000, 500, 4
    problem = Problem(sequences, heads, heads, 8000, 8000, packed_rows=(rows, rows))
    floats = workspaces(made, problem)["dq_accum"]
    tile_q = made.kernel("prepare").grid_tile
    assert floats <= (rows + sequences * tile_q) * heads * 128


@pytest.mark.parametrize("layout", ["heads-first", "wide-rows", "unaligned", "reversed"])
def test_packed_arrays_lie_as_they_please(layout: Any) -> None:
    """By these kernels, or by those for all GPUs where TMA does not take the strides."""
    spec = fg.AttentionSpec(64, mask=fg.causal(), varlen=True)
    by = OTHER if layout in ("unaligned", "reversed") else NAME
    case = Case("strides", 100, 150, batch=3, heads=2, heads_kv=2, layouts=(layout,) * 4)
    check(spec, expect(spec, case, any_values=True), by=by)


def test_gradients_of_captured_tensors_come_with_those_of_packed_sequences() -> None:
    used = ((30, 50), (20, 6), (0, 5), (12, 0))
    packing = Packing(((33, 50), (20, 7), (0, 5), (12, 0)), used, True)
    random = np.random.default_rng(0)
    slopes = random.standard_normal(2).astype(np.float32)
    spec = fg.AttentionSpec(64, mask=fg.causal(), score=fg.alibi(slopes), varlen=True, dropout=True)
    q, k, v, do = (random.standard_normal((4, n, 2, 64)).astype(spec.element.numpy()) for n in (33, 50, 50, 33))
    packed = [packing.pack(x, side) for x, side in ((q, 0), (k, 1), (v, 1), (do, 0))]
    kernel, call = built(spec), {"sequences": packing.sequences(33, 50), "dropout": DROPOUT}
    o, lse = kernel(*packed[:3], **call)
    *_, found = kernel.backward(packed[3], *packed[:3], o, lse, captured_gradients=True, **call)
    more: dict[str, Any] = {"dropout": DROPOUT, "lengths": used}
    exact = oracle.captured_gradients(spec, q, k, v, do, **more)
    bounds = oracle.captured_bounds(spec, q, k, v, do, exact=exact, **more)
    assert set(found) == set(exact) == {"slopes"}
    assert oracle.check(found["slopes"], exact["slopes"], bounds["slopes"]).ok
