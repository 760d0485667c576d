"""The forward kernel for Hopper on the emulator: as near to the oracle as every kernel must be, whatever it is given,
and in whichever order its warps run.

Cases are drawn from a seed, the same in every run; DRAWN_CASES says how many, as for test_properties.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.plan import plan
from flashgen.plan.forward_sm90 import HEAD_DIMS
from flashgen.spec import Score
from flashgen.verify import Case, Expectation, Inputs, Mode, expect, run_case
from flashgen.verify.rounding import rounding_errors
from flashgen.verify.trial import ORDERS

Array = np.ndarray[Any, Any]

LEVEL = os.environ.get("DRAWN_CASES", "sample")
#: Cases of each spec.
CASES = {"sample": 1, "ci": 12, "nightly": 400}[LEVEL]
#: Four tiles of keys of most plans.
LONGEST = 460
DTYPES = ("bf16", "fp16")
NAME, OTHER = "FlashAttention-3", "FlashAttention-2"
IDS = np.sort(np.random.default_rng(0).integers(0, 4, (2, LONGEST))).astype(np.int32)
FAR, EARLY = 2**31 - 1, 40
LOGITS = np.array([0.5, -np.inf, 4.0, -2.0], np.float32)

SPECS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": fg.causal()},
    "window": {"mask": fg.window(70, 20)},
    "documents": {"mask": fg.document(IDS) & fg.causal()},
    "softcap": {"score": fg.softcap(3.0)},
    "sink": {"mask": fg.causal("top-left"), "score": fg.sink(LOGITS)},
}
#: One plan of each way to keep exponentials: in registers of their own, or in the place of scores.
WAYS = {
    "scores kept": (128, fg.Schedule()),
    "scores replaced": (64, fg.Schedule()),
    "running maximum": (64, fg.Schedule(softmax="running-max")),
    "running maximum, wide": (128, fg.Schedule(softmax="running-max")),
}


def forward_spec(dim: int, dim_v: int = 0, **fields: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(dim, head_dim_v=dim_v or dim, direction="forward", **fields)


@contextmanager
def launches(kernel: Any, mode: Mode, role: str = "forward") -> Iterator[set[str]]:
    """Runs a kernel's launches in that mode, and notes by which algorithms those of a role went."""
    target, done = kernel.target, set()
    launch = target.launch

    def noted(steps: Any, *rest: Any) -> None:
        done.update(step.kernel.plan.algorithm for step in steps if step.kernel.plan.role == role)
        launch(steps, *rest)

    target.options, target.launch = mode.options, noted
    try:
        yield done
    finally:
        target.options = {}
        del target.launch


def check(
    spec: fg.AttentionSpec,
    expected: Expectation,
    mode: Mode = Mode(),  # noqa: B008
    schedule: fg.Schedule | None = None,
    by: str = NAME,
) -> None:
    """One call, by that algorithm, within its bounds."""
    kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
    assert kernel.plan.kernel("forward").algorithm == NAME

    def run(q: Any, k: Any, v: Any, do: Any, scale: float, captured: Any = None) -> Any:
        return kernel(q, k, v, scale=scale, captured=captured)

    with launches(kernel, mode) as done:
        results = run_case(run, spec, expected)
    case = expected.case
    assert done == {by} or not case.len_q
    wrong = [result.describe() for result in results if not result.check.ok]
    assert not wrong, (spec.describe(), mode, wrong)


def expected_of(spec: fg.AttentionSpec, q: Array, k: Array, v: Array, scale: float | None = None) -> Expectation:
    """What given values must come to; they are rounded to the spec's dtype here."""
    dtype = spec.element.numpy()
    inputs = Inputs(q.astype(dtype), k.astype(dtype), v.astype(dtype), np.zeros((*q.shape[:3], v.shape[3])))
    scale = spec.default_scale if scale is None else scale
    arrays = (inputs.q, inputs.k, inputs.v)
    exact = oracle.forward(spec, *arrays, scale=scale)
    strict = oracle.bounds(spec, *arrays, None, scale, exact=exact)
    reach = rounding_errors(spec, inputs, scale, exact)
    limits = tuple(np.maximum(getattr(strict, name), reach[name]) for name in ("o", "lse"))
    case = Case("given", q.shape[1], k.shape[1], batch=q.shape[0], heads=q.shape[2], heads_kv=k.shape[2], scale=scale)
    return Expectation(case, inputs, scale, exact, limits, spec.tensors)


# ---- Shapes, masks and orders


def drawn_case(random: Random, spec: fg.AttentionSpec, tile_q: int, tile_kv: int) -> Case:
    """Lengths about tiles and a few of them; heads shared or not."""

    def length(tile: int) -> int:
        edges = (0, 1, tile - 1, tile, tile + 1, 2 * tile + 1, 3 * tile + 5)
        return min(random.choice((*edges, random.randint(1, LONGEST))), LONGEST)

    heads_kv = random.choice((1, 2))
    # Where large or equal terms cancel, rounding is all that is left, for which the bounds of scores have no room.
    fills = ("normal", "sparse") if spec.score else ("normal", "normal", "spread", "huge", "large_logits", "flat")
    return Case(
        "drawn",
        length(tile_q),
        length(tile_kv),
        batch=2 if spec.tensors else random.choice((1, 1, 2)),
        heads=heads_kv * random.choice((1, 2)),
        heads_kv=heads_kv,
        fill=random.choice(fills),
        scale=None if spec.score else random.choice((None, None, 1.0, 0.01)),
        spoil="nothing" if spec.mask.is_full else random.choice(("nothing", "nothing", "keys", "queries")),
        seed=random.randrange(2**16),
    )


def drawn_mode(random: Random) -> Mode:
    return Mode(random.choice(ORDERS), random.randrange(2**16), random.random() < 0.3, random.choice(("end", "begin")))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("dim", "dim_v"), HEAD_DIMS)
def test_results_are_within_their_bounds_and_nothing_is_found(dim: int, dim_v: int, name: str) -> None:
    random = Random(f"{dim} {dim_v} {name}")
    for number in range(CASES):
        dtype = DTYPES[(HEAD_DIMS.index((dim, dim_v)) + list(SPECS).index(name) + number) % 2]
        spec = forward_spec(dim, dim_v, dtype=dtype, **SPECS[name])
        schedule = random.choice((None, None, fg.Schedule(softmax="running-max")))
        tiles = fg.build(spec, schedule, arch="sm_90a", target="emulator").plan.kernel("forward")
        case = drawn_case(random, spec, int(tiles.constant("tile_q")), int(tiles.constant("tile_kv")))
        by = NAME if case.len_kv else OTHER
        check(spec, expect(spec, case, any_values=True), drawn_mode(random), schedule, by)


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_every_order_of_warps_gives_the_same_bits(name: str, order: Any, race: bool) -> None:
    """More tiles than blocks, so that every block draws some, and each ring goes round several times."""
    spec = forward_spec(64, **SPECS[name])
    case = Case("several tiles", 400, LONGEST, heads=2)
    expected = expect(spec, case)
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    x, captured = expected.inputs, expected.captured or None
    first = kernel(x.q, x.k, x.v, captured=captured)
    for seed in range(CASES if order in ("random", "priority") else 1):
        with launches(kernel, Mode(order, seed, race)) as done:
            again = kernel(x.q, x.k, x.v, captured=captured)
        assert done == {NAME}
        assert [a.tobytes() for a in again] == [b.tobytes() for b in first]
    assert all(result.check.ok for result in expected.judge(first))


@pytest.mark.parametrize(
    ("len_q", "len_kv"), [(1, 1), (1, 300), (300, 1), (0, 5), (5, 0), (193, 257), (257, 193), (64, 128), (129, 64)]
)
@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_lengths_that_differ(name: str, len_q: int, len_kv: int) -> None:
    spec = forward_spec(64, **SPECS[name])
    by = NAME if len_kv else OTHER
    expected = expect(spec, Case("lengths", len_q, len_kv, batch=2, heads=4, heads_kv=2), any_values=True)
    check(spec, expected, Mode("random", 3), by=by)


MASKS: dict[str, Any] = {
    "prefix": fg.prefix_lm(100),
    "either order": fg.Mask.of(lambda b, h, q, k: ~((k > q + 20) & (k < 300)) & (h != 1) | (q - 150 >= k)),
    "order and documents": fg.window(90, 30) & fg.document(IDS),
    "far away": fg.Mask.of(lambda b, h, q, k: (k <= q * 0 + FAR) & (k > -FAR - 1) & (k >= EARLY - q)),
    "much of every pair": fg.Mask.of(
        lambda b, h, q, k: (
            (k <= q + 40)
            & ((q + k) % 3 != 1)
            & ((q + 2 * k) % 5 != 2)
            & ((q * k) % 7 != 3)
            & ((q - k) % 11 != 4)
            & ((q + 5 * k) % 13 != 6)
        )
    ),
}


@pytest.mark.parametrize(("dim", "name"), [(64, name) for name in MASKS] + [(128, "either order"), (192, "prefix")])
def test_masks_are_obeyed_by_words_and_by_pairs(dim: int, name: str) -> None:
    spec = forward_spec(dim, mask=MASKS[name])
    case = Case("words", 203, 333, batch=2, heads=2, spoil="keys")
    check(spec, expect(spec, case, any_values=True))


@pytest.mark.parametrize("layout", ["heads-first", "wide-rows", "unaligned", "reversed", "one-batch", "one-head"])
@pytest.mark.parametrize(("dim", "name"), [(64, "causal"), (64, "documents"), (256, "documents")])
def test_arrays_lie_as_they_please(dim: int, name: str, layout: Any) -> None:
    """By this kernel, or by the one for all GPUs where the copy engine does not take the strides."""
    spec = forward_spec(dim, **SPECS[name])
    by = OTHER if layout in ("unaligned", "reversed") else NAME
    case = Case("strides", 150, 200, batch=2, heads=4, heads_kv=2, layouts=(layout,) * 4)
    check(spec, expect(spec, case, any_values=True), by=by)


# ---- Values that a softmax without maxima could go wrong on

HOSTILE = (
    "4 times",
    "30 times",
    "400 times",
    "one huge key",
    "growing",
    "falling",
    "heavy tails",
    "far below zero",
    "every key far below the first",
)
LEN_Q, LEN_KV = 140, 430


def hostile(name: str, dim: int, random: np.random.Generator) -> tuple[Array, Array, Array]:
    """Queries, keys and values of two heads."""
    q, k, v = (random.standard_normal((1, n, 2, dim)) for n in (LEN_Q, LEN_KV, LEN_KV))
    along = np.linspace(0, 1, LEN_KV)[:, None]
    root = dim**0.5
    if name.endswith(" times"):
        q *= float(name.split()[0])
    elif name == "one huge key":
        k[:, 200] *= 50
    elif name in ("growing", "falling"):
        # Logits go from -60 to 240 along the keys, for rows at different rates.
        q[..., 0] = 16
        q[:, 1::3, :, 0] = 4
        k[..., 0] = (along if name == "growing" else 1 - along) * root * 300 / 16 - root * 60 / 16
    elif name == "heavy tails":
        q, k = (np.clip(random.standard_cauchy(x.shape), -200, 200) for x in (q, k))
    elif name == "far below zero":
        q[..., 0], k[..., 0] = 16, -(2 + along) * root * 10
    elif name == "every key far below the first":
        # In the order in which tiles come: these begin with the last keys.
        q[..., 0], k[..., 0] = 16, -30 * root
        k[:, -40:, :, 0] = 30 * root
    return q, k, v


def sampled(number: int, *choices: Any) -> list[Any]:
    """What a hostile case is combined with: in a developer's run one combination, another one for each case."""
    every = list(product(*choices))
    return every if LEVEL != "sample" else [every[number % len(every)]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HOSTILE)
def test_logits_may_be_hostile(name: str, way: str) -> None:
    dim, schedule = WAYS[way]
    number = HOSTILE.index(name) + list(WAYS).index(way)
    for dtype, mask in sampled(number, DTYPES, (fg.full(), fg.causal(), fg.window(100, 10))):
        spec = forward_spec(dim, dtype=dtype, mask=mask)
        values = hostile(name, dim, np.random.default_rng(number))
        check(spec, expected_of(spec, *values), schedule=schedule)


HOSTILE_SCORES: dict[str, dict[str, Any]] = {
    "500 below": {"score": Score.of(lambda s, b, h, q, k: s - 500.0)},
    "500 above": {"score": Score.of(lambda s, b, h, q, k: s + 500.0)},
    "far apart from tile to tile": {"score": Score.of(lambda s, b, h, q, k: fg.where(k < 200, s + 300.0, s - 300.0))},
    "growing towards zero": {"score": Score.of(lambda s, b, h, q, k: s - k * 1.5)},
    "a huge sink": {"mask": fg.causal(), "score": fg.sink(np.array([1e4, 60.0], np.float32))},
    "a sink far below": {"mask": fg.causal(), "score": fg.sink(np.array([-1e4, -300.0], np.float32))},
    "no key in the first tiles": {"mask": fg.window(300, 0)},
    "forbidden by the score": {
        "score": Score.of(lambda s, b, h, q, k: fg.where(k > 3 * q, float("-inf"), s + 40.0)),
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HOSTILE_SCORES)
def test_scores_may_be_hostile(name: str, way: str) -> None:
    dim, schedule = WAYS[way]
    number = list(HOSTILE_SCORES).index(name) + list(WAYS).index(way)
    for (dtype,) in sampled(number, DTYPES):
        spec = forward_spec(dim, dtype=dtype, **HOSTILE_SCORES[name])
        values = hostile("4 times", dim, np.random.default_rng(7))
        check(spec, expected_of(spec, *values), schedule=schedule)


SLOPES = np.array([0.25, -3.0], np.float32)
#: What goes with q and k is added to products where nothing else is done to them, else to what a score makes of logits.
SLANTED: dict[str, dict[str, Any]] = {
    "products": {"mask": fg.causal(), "score": Score.of(lambda s, b, h, q, k: s + SLOPES[h] * (k - q))},
    "logits": {
        "mask": fg.Mask.of(lambda b, h, q, k: (q % 3 != 1) & (k >= q)),
        "score": fg.softcap(3.0) >> Score.of(lambda s, b, h, q, k: s - SLOPES[h] * (k - q)),
    },
    "distances": {"mask": fg.window(300, 40), "score": fg.alibi(np.abs(SLOPES))},
    "squares": {"score": Score.of(lambda s, b, h, q, k: s - 0.01 * (k - 2 * q) * (k - 2 * q) + 0.5 * k)},
}


@pytest.mark.parametrize(("way", "name"), list(zip(WAYS, SLANTED, strict=True)))
def test_scores_may_go_with_the_position(name: str, way: str) -> None:
    dim, schedule = WAYS[way]
    spec = forward_spec(dim, dtype="fp16", **SLANTED[name])
    assert ("in_products" in plan(spec, schedule, "sm_90a").kernel("forward").switches) == (name != "logits")
    values = hostile("4 times", dim, np.random.default_rng(11))
    check(spec, expected_of(spec, *values), schedule=schedule)


def test_a_scale_of_almost_nothing_is_no_divisor() -> None:
    spec = forward_spec(64, **SLANTED["products"])
    values = hostile("4 times", 64, np.random.default_rng(12))
    for scale, by in ((1e-29, NAME), (1e-31, OTHER)):
        check(spec, expected_of(spec, *values, scale=scale), by=by)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["full", "masked", "capped"])
def test_a_row_does_not_depend_on_others_of_its_warp(way: str, kind: str) -> None:
    """Bit for bit: another row's anchor may move, and have its warp take a tile again, or compute its scores in a way
    that is right for all of them; this row's stays."""
    dim, schedule = WAYS[way]
    mask = fg.window(150, 30) if kind == "masked" else fg.full()
    spec = forward_spec(dim, mask=mask, score=fg.softcap(100.0) if kind == "capped" else None)
    kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
    dtype = spec.element.numpy()
    q, k, v = hostile("heavy tails", dim, np.random.default_rng(3))
    q = np.clip(q, -2, 2)
    arrays = [x.astype(dtype) for x in (q, k, v)]
    plain = kernel(*arrays)
    # Of every second warp's sixteen rows one is changed, and of each of these another one.
    changed = np.arange(LEN_Q) % 37 == 5
    for wild in (300.0, -300.0, 0.0, np.nan):
        other = arrays[0].copy()
        other[:, changed] = (arrays[0][:, changed].astype(np.float32) * wild).astype(dtype)
        out, lse = kernel(other, *arrays[1:])
        assert out[:, ~changed].tobytes() == plain[0][:, ~changed].tobytes()
        assert lse[:, :, ~changed].tobytes() == plain[1][:, :, ~changed].tobytes()
        assert out[:, changed].tobytes() != plain[0][:, changed].tobytes()


# ---- Bad values


@pytest.mark.parametrize(("dim", "dim_v"), HEAD_DIMS)
@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_a_bad_key_stays_where_it_is_attended_to(name: str, dim: int, dim_v: int) -> None:
    """NaN and infinity in a key reach the queries that may attend to it, and no other, whose bits stay as they were."""
    spec = forward_spec(dim, dim_v, **SPECS[name])
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    dtype, random = spec.element.numpy(), np.random.default_rng(5)
    q, k, v = (random.standard_normal((2, 200, h, d)).astype(dtype) for h, d in ((4, dim), (2, dim), (2, dim_v)))
    captured = {n: x[:, :200] for n, x in spec.tensors.items()} or None
    clean, _ = kernel(q, k, v, captured=captured)
    bad = {30: (7, np.nan), 130: (dim_v - 1, np.inf), 199: (0, -np.inf)}
    for key, (column, value) in bad.items():
        v[:, key, :, column] = value
    k[:, 77, :, 3] = np.nan
    with launches(kernel, Mode("random", seed=dim)) as done:
        out, _ = kernel(q, k, v, captured=captured)
    assert done == {NAME}
    rules = oracle.Rules(spec, oracle.problem.read_problem(spec, q, k, v))
    for b, h in np.ndindex(2, 4):
        allowed = rules.allowed(b, h)
        # A bad value reaches its own column; a bad score reaches every one.
        reached = np.repeat(allowed[:, 77:78], dim_v, axis=1)
        for key, (column, _) in bad.items():
            reached[:, column] |= allowed[:, key]
        assert reached.any()
        assert not reached.all()
        found, before = out[b, :, h], clean[b, :, h]
        assert not np.isfinite(found[reached].astype(np.float32)).any()
        assert found[~reached].tobytes() == before[~reached].tobytes()


def test_no_keys_are_one_case_for_the_other_kernel() -> None:
    spec = forward_spec(128, score=fg.sink(LOGITS))
    check(spec, expect(spec, Case("no keys", 70, 0, heads=4, heads_kv=2)), by=OTHER)
