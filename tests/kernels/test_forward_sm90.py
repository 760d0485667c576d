"""The forward kernel for Hopper on the emulator: as near to the oracle as every kernel must be, whatever it is given,
and in whichever order its warps run.

Cases are drawn from a seed, the same in every run; DRAWN_CASES says how many, as for test_properties.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.plan.hopper.forward_table import TABLE
from flashgen.verify import Case, CaseResult, Expectation, Mode, Tally, expect, run_case
from flashgen.verify.trial import ORDERS
from tests.drawn import LEVEL, diagonal, some

pytestmark = pytest.mark.in_turns(12)

Array = np.ndarray[Any, Any]

#: Head dims that the schedule table has rows for.
HEAD_DIMS = list(TABLE)
#: Cases of each spec.
CASES = {"sample": 1, "ci": 12, "nightly": 400}[LEVEL]
#: Four tiles of keys of most plans.
LONGEST = 460
DTYPES = ("bf16", "fp16")
NAME, OTHER = "FlashAttention-3", "FlashAttention-2"
IDS = np.sort(np.random.default_rng(0).integers(0, 4, (2, LONGEST))).astype(np.int32)
FAR, EARLY = 2**31 - 1, 40
PATTERN = np.random.default_rng(1).integers(0, 2, (2, 15, 15)).astype(bool)
LOGITS = np.array([0.5, -np.inf, 4.0, -2.0], np.float32)

SPECS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": fg.causal()},
    "window": {"mask": fg.window(70, 20)},
    "documents": {"mask": fg.document(IDS) & fg.causal()},
    "chunks": {"mask": fg.chunked(130)},
    "pattern": {"mask": fg.window(200, 50) & fg.block_sparse(PATTERN, 32)},
    "softcap": {"score": fg.softcap(3.0)},
    "sink": {"mask": fg.causal("top-left"), "score": fg.sink(LOGITS)},
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


def factors(results: Iterable[CaseResult]) -> list[str]:
    """By which results of one case are off as a whole, in words."""
    tally = Tally()
    tally.add(results)
    return [report.describe_slope() for report in tally.systematic()]


def check(
    spec: fg.AttentionSpec,
    expected: Expectation,
    mode: Mode = Mode(),  # noqa: B008
    schedule: fg.Schedule | None = None,
    by: str = NAME,
) -> None:
    """One call, by that algorithm, within its bounds and off by no factor."""
    kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
    assert kernel.plan.kernel("forward").algorithm == NAME

    def run(q: Any, k: Any, v: Any, do: Any, scale: float, **more: Any) -> Any:
        return kernel(q, k, v, scale=scale, **more)

    with launches(kernel, mode) as done:
        results = run_case(run, spec, expected)
    case = expected.case
    assert done == {by} or not case.len_q
    wrong = [result.describe() for result in results if not result.check.ok] or factors(results)
    assert not wrong, (spec.describe(), mode, wrong)


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
        non_finite="nothing" if spec.mask.is_full else random.choice(("nothing", "nothing", "keys", "queries")),
        seed=random.randrange(2**16),
    )


def drawn_mode(random: Random) -> Mode:
    return Mode(random.choice(ORDERS), random.randrange(2**16), random.random() < 0.3, random.choice(("end", "begin")))


#: A developer's run takes each for one width, and every width; DRAWN_CASES=ci all.
DRAWN = [(*dims, name) for dims, name in diagonal(HEAD_DIMS, list(SPECS), step=len(HEAD_DIMS))]


@pytest.mark.parametrize(("dim", "dim_v", "name"), DRAWN)
def test_results_are_within_their_bounds_and_nothing_is_found(dim: int, dim_v: int, name: str) -> None:
    random = Random(f"{dim} {dim_v} {name}")
    for number in range(CASES):
        # A compiler run takes as long as many cases: one kind of number for each, but for a nightly run.
        other = number if LEVEL == "nightly" else 0
        dtype = DTYPES[(HEAD_DIMS.index((dim, dim_v)) + list(SPECS).index(name) // 2 + other) % 2]
        spec = forward_spec(dim, dim_v, dtype=dtype, **SPECS[name])
        schedule = random.choice((None, None, fg.Schedule(softmax="running-max")))
        tiles = fg.build(spec, schedule, arch="sm_90a", target="emulator").plan.kernel("forward")
        case = drawn_case(random, spec, int(tiles.constant("tile_q")), int(tiles.constant("tile_kv")))
        by = NAME if case.len_kv else OTHER
        check(spec, expect(spec, case, any_values=True), drawn_mode(random), schedule, by)


#: A developer's run watches accesses where tiles are listed and nowhere else, and has each order once.
WATCHED = some(
    product(("causal", "documents"), (False, True), ORDERS),
    *(("causal", False, order) for order in ORDERS[::2]),
    *(("documents", True, order) for order in ORDERS[1::2]),
)


@pytest.mark.parametrize(("name", "race", "order"), WATCHED)
def test_every_order_of_warps_gives_the_same_bits(name: str, race: bool, order: Any) -> None:
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


BY_WORDS = [(64, name) for name in MASKS] + [(128, "either order"), (192, "prefix")]


@pytest.mark.parametrize(
    ("dim", "name"),
    some(BY_WORDS, (64, "far away"), (64, "much of every pair"), (128, "either order"), (192, "prefix")),
)
def test_masks_are_obeyed_by_words_and_by_pairs(dim: int, name: str) -> None:
    spec = forward_spec(dim, mask=MASKS[name])
    case = Case("words", 203, 333, batch=2, heads=2, non_finite="keys")
    check(spec, expect(spec, case, any_values=True))


@pytest.mark.parametrize("layout", ["heads-first", "wide-rows", "unaligned", "reversed", "one-batch", "one-head"])
@pytest.mark.parametrize(("dim", "name"), [(64, "causal"), (64, "documents"), (256, "documents")])
def test_arrays_lie_as_they_please(dim: int, name: str, layout: Any) -> None:
    """By this kernel, or by the one for all GPUs where TMA does not take the strides."""
    spec = forward_spec(dim, **SPECS[name])
    by = OTHER if layout in ("unaligned", "reversed") else NAME
    case = Case("strides", 150, 200, batch=2, heads=4, heads_kv=2, layouts=(layout,) * 4)
    check(spec, expect(spec, case, any_values=True), by=by)


@pytest.mark.parametrize(("cap", "dim"), diagonal([1e-6, 0.0099, 0.01, 2.0], [64, 128]))
def test_what_is_forbidden_counts_for_nothing_under_the_lowest_of_caps(dim: int, cap: float) -> None:
    """It has a logit that is so many times below the cap."""
    spec = forward_spec(dim, mask=fg.window(60, 10), score=fg.softcap(cap))
    check(spec, expect(spec, Case("low", 150, 300, heads=2, heads_kv=2), any_values=True))


def test_no_keys_are_one_case_for_the_other_kernel() -> None:
    spec = forward_spec(128, score=fg.sink(LOGITS))
    check(spec, expect(spec, Case("no keys", 70, 0, heads=4, heads_kv=2)), by=OTHER)
