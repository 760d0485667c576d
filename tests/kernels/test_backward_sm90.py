"""The backward kernels for Hopper on the emulator: gradients as near to the oracle's as every kernel's must be,
whatever they are given, and in whichever order their warps run.

Cases are drawn from a seed, the same in every run; DRAWN_CASES says how many, as for test_forward_sm90.py.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.expr import log
from flashgen.plan.calls import SMALLEST_DIVISOR
from flashgen.plan.hopper.backward_tiles import HEAD_DIMS
from flashgen.spec import Score
from flashgen.verify import Case, Expectation, Mode, expect, run_case
from flashgen.verify.trial import ORDERS
from tests.drawn import diagonal, some
from tests.kernels.test_forward_sm90 import (
    CASES,
    LOGITS,
    LONGEST,
    NAME,
    OTHER,
    WATCHED,
    drawn_case,
    drawn_mode,
    factors,
    launches,
)
from tests.kernels.test_forward_sm90 import SPECS as FORWARD_SPECS

pytestmark = pytest.mark.in_turns(36)

DIMS = sorted({dim for dim, _ in HEAD_DIMS})
SLOPES = np.array([0.5, 0.25, 0.1, 1], np.float32)
BIAS = np.random.default_rng(1).standard_normal((2, 1, LONGEST, LONGEST)).astype(np.float32)

SPECS: dict[str, dict[str, Any]] = {
    **FORWARD_SPECS,
    "top-left": {"mask": fg.causal("top-left")},
    "holes": {"mask": fg.window(40, 0) | fg.global_tokens(3)},
    "slopes": {"mask": fg.causal(), "score": fg.alibi(SLOPES)},
    "bias": {"score": fg.bias(BIAS)},
}
ALONE = ("window", "holes", "softcap")
#: Head dims that are padded in shared memory.
PADDED = ((8, 8), (80, 80), (40, 24), (112, 112), (136, 136), (160, 40), (200, 248))
#: A developer's run takes some for one width, which is another one for each; tests below take most of the others.
DRAWN = some(
    [
        *((dims, name) for name in SPECS for dims in HEAD_DIMS),
        *((dims, name) for at, dims in enumerate(PADDED) for name in list(SPECS)[at % 3 :: 3]),
    ],
    *((HEAD_DIMS[at], name) for at, name in enumerate(ALONE)),
    ((80, 80), "causal"),
    ((160, 40), "window"),
)


def built(spec: fg.AttentionSpec, schedule: fg.Schedule | None = None) -> fg.Kernel:
    kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
    assert kernel.plan.kernel("main").algorithm == NAME
    return kernel


def check(spec: fg.AttentionSpec, expected: Expectation, mode: Mode = Mode(), by: str = NAME) -> None:  # noqa: B008
    """Both passes of one call, the backward one by that algorithm, within their bounds and off by no factor."""
    kernel = built(spec)

    def run(q: Any, k: Any, v: Any, do: Any, scale: float, **more: Any) -> Any:
        o, lse = kernel(q, k, v, scale=scale, **more)
        return o, lse, *kernel.backward(do, q, k, v, o, lse, scale=scale, **more)

    with launches(kernel, mode, "main") as done:
        results = run_case(run, spec, expected)
    assert done == {by} or not expected.case.len_kv
    wrong = [result.describe() for result in results if not result.check.ok] or factors(results)
    assert not wrong, (spec.describe(), mode, wrong)


# ---- Shapes, masks and orders


@pytest.mark.parametrize(("dims", "name"), DRAWN, ids=lambda x: x if isinstance(x, str) else f"{x[0]}x{x[1]}")
def test_gradients_are_within_their_bounds_and_nothing_is_found(dims: tuple[int, int], name: str) -> None:
    random = Random(f"{dims} {name}")
    for number in range(CASES):
        dtype = ("bf16", "fp16")[((*HEAD_DIMS, *PADDED).index(dims) + list(SPECS).index(name) + number) % 2]
        spec = fg.AttentionSpec(dims[0], head_dim_v=dims[1], dtype=dtype, **SPECS[name])
        main = built(spec).plan.kernel("main")
        case = drawn_case(random, spec, int(main.constant("tile_q")), int(main.constant("tile_kv")))
        by = NAME if case.len_q else OTHER
        check(spec, expect(spec, case, any_values=True), drawn_mode(random), by)


@pytest.mark.parametrize(("name", "race", "order"), WATCHED)
def test_every_order_of_warps_gives_the_same_bits_of_dk_and_dv(name: str, race: bool, order: Any) -> None:
    """More tiles than blocks and several heads of a group, so that each ring goes round; dQ is summed as they come."""
    spec = fg.AttentionSpec(64, **SPECS[name])
    expected = expect(spec, Case("several tiles", 150, LONGEST, heads=2))
    kernel = built(spec)
    x, captured = expected.inputs, expected.captured or None
    o, lse = kernel(x.q, x.k, x.v, captured=captured)
    arrays = (x.do, x.q, x.k, x.v, o, lse)
    first = kernel.backward(*arrays, captured=captured)
    for seed in range(CASES if order in ("random", "priority") else 1):
        with launches(kernel, Mode(order, seed, race), "main") as done:
            again = kernel.backward(*arrays, captured=captured)
        assert done == {NAME}
        assert [a.tobytes() for a in again[1:]] == [b.tobytes() for b in first[1:]]
        assert all(result.check.ok for result in expected.judge((o, lse, *again)))


@pytest.mark.parametrize("order", some(ORDERS, "reverse", "random"))
@pytest.mark.parametrize(
    ("dims", "name"), some([((256, 256), "causal"), ((192, 128), "documents")], ((256, 256), "causal"))
)
def test_every_order_of_warps_gives_the_same_bits_where_each_sum_is_one_warps(
    dims: tuple[int, int], name: str, order: Any
) -> None:
    spec = fg.AttentionSpec(dims[0], head_dim_v=dims[1], deterministic=True, **SPECS[name])
    expected = expect(spec, Case("several tiles", 150, 200, heads=2))
    kernel = built(spec)
    x, captured = expected.inputs, expected.captured or None
    o, lse = kernel(x.q, x.k, x.v, captured=captured)
    arrays = (x.do, x.q, x.k, x.v, o, lse)
    first = kernel.backward(*arrays, captured=captured)
    for role in ("main", "query"):
        with launches(kernel, Mode(order, 7, race=True), role) as done:
            again = kernel.backward(*arrays, captured=captured)
        assert done == {NAME}
        assert [a.tobytes() for a in again] == [b.tobytes() for b in first]
    assert all(result.check.ok for result in expected.judge((o, lse, *first)))


LENGTHS = [(1, 1), (1, 300), (300, 1), (0, 5), (5, 0), (193, 257), (257, 193), (64, 128), (129, 64)]


@pytest.mark.parametrize(("lengths", "name"), diagonal(LENGTHS, ["causal", "top-left", "documents"]))
def test_lengths_that_differ(name: str, lengths: tuple[int, int]) -> None:
    """With rows that attend to nothing, and tiles of keys that nobody attends to."""
    len_q, len_kv = lengths
    spec = fg.AttentionSpec(64, **SPECS[name])
    case = Case("lengths", len_q, len_kv, batch=2)
    check(spec, expect(spec, case, any_values=True), Mode("random", 3), NAME if len_q else OTHER)


@pytest.mark.parametrize(
    ("name", "len_q", "len_kv"), [("causal", 300, 40), ("top-left", 40, 300), ("window", 300, 40), ("window", 40, 300)]
)
def test_who_attends_to_nothing_or_is_not_attended_to_has_no_gradient(name: str, len_q: int, len_kv: int) -> None:
    spec = fg.AttentionSpec(64, **SPECS[name])
    x = Case("zeros", len_q, len_kv, heads=2, heads_kv=2).inputs(spec)
    allowed = oracle.Rules(spec, oracle.problem.read_problem(spec, x.q, x.k, x.v)).allowed(0, 0)
    queries, keys = ~allowed.any(axis=1), ~allowed.any(axis=0)
    assert queries.any() or keys.any()
    kernel = built(spec)
    o, lse = kernel(x.q, x.k, x.v)
    dq, dk, dv = kernel.backward(x.do, x.q, x.k, x.v, o, lse)
    assert not dq[:, queries].any()
    assert not dk[:, keys].any()
    assert not dv[:, keys].any()


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("name", some(["causal", "documents"], "documents"))
def test_heads_of_a_group_add_up_in_one_pass(name: str, group: int) -> None:
    spec = fg.AttentionSpec(64, dtype="fp16", **SPECS[name])
    case = Case("groups", 150, 130, heads=2 * group, heads_kv=2)
    check(spec, expect(spec, case, any_values=True), Mode("priority", group))


@pytest.mark.parametrize("layout", ["heads-first", "wide-rows", "unaligned", "reversed", "one-batch", "one-head"])
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_arrays_lie_as_they_please(name: str, layout: Any) -> None:
    """By these kernels, or by those for all GPUs where TMA does not take the strides."""
    spec = fg.AttentionSpec(64, **SPECS[name])
    by = OTHER if layout in ("unaligned", "reversed") else NAME
    case = Case("strides", 100, 150, batch=2, heads=2, heads_kv=2, layouts=(layout,) * 4)
    check(spec, expect(spec, case, any_values=True), by=by)


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_one_array_that_the_copy_engine_does_not_take_is_enough(which: int) -> None:
    layouts: list[Any] = ["contiguous"] * 4
    layouts[which] = "reversed"
    spec = fg.AttentionSpec(64, **SPECS["causal"])
    expected = expect(spec, Case("strides", 70, 90, layouts=tuple(layouts)), any_values=True)
    check(spec, expected, by=OTHER)


def test_a_scale_of_almost_nothing_runs_by_the_other_kernels() -> None:
    """Products are compared with L / scale, which is to be a number; it may be as large as numbers are."""
    spec = fg.AttentionSpec(64, **SPECS["causal"])
    for scale, by in ((SMALLEST_DIVISOR, NAME), (SMALLEST_DIVISOR / 2, OTHER), (1e-3, NAME)):
        check(spec, expect(spec, Case("scale", 70, 90, scale=scale), any_values=True), by=by)


def test_with_a_score_the_scale_may_be_almost_nothing() -> None:
    spec = fg.AttentionSpec(64, **SPECS["softcap"])
    check(spec, expect(spec, Case("scale", 70, 90, scale=SMALLEST_DIVISOR / 2), any_values=True))


# ---- Values


FILLS = ("spread", "huge", "large_logits", "flat", "sparse")


@pytest.mark.parametrize(("dim", "fill"), diagonal(DIMS, FILLS))
def test_logits_may_be_hostile(dim: int, fill: Any) -> None:
    spec = fg.AttentionSpec(dim, dtype="fp16" if dim == 96 else "bf16", **SPECS["causal" if dim == 64 else "full"])
    check(spec, expect(spec, Case("hostile", 140, 200, heads=2, fill=fill), any_values=True))


def test_keys_beyond_the_last_have_no_probability() -> None:
    """Their products are 0, which is far more than any other here: nothing must overflow on the way to be left out."""
    for name in ("full", "causal"):
        spec = fg.AttentionSpec(64, **SPECS[name])
        x = Case("far below zero", 70, 90).inputs(spec)
        x.q[..., 0], x.k[..., 0] = 16, -100
        arrays = (x.q, x.k, x.v)
        kernel = built(spec)
        o, lse = kernel(*arrays)
        assert lse.max() < -100
        exact = oracle.backward(spec, *arrays, x.do)
        bounds = oracle.bounds(spec, *arrays, x.do)
        for result, reference, bound in zip(
            kernel.backward(x.do, *arrays, o, lse), exact, (bounds.dq, bounds.dk, bounds.dv), strict=True
        ):
            assert bound is not None
            verdict = oracle.check(result, reference, bound)
            assert verdict.ok, verdict


SCORES: dict[str, dict[str, Any]] = {
    "not a number behind the last query": {"score": Score.of(lambda s, b, h, q, k: s + log(70.5 - q))},
    "infinite behind the last query": {"score": Score.of(lambda s, b, h, q, k: s / (70 - q)), "mask": fg.causal()},
    "not a number where the mask forbids": {
        "score": Score.of(lambda s, b, h, q, k: s * log(q - k + 21.5)),
        "mask": fg.causal(),
    },
    "no key for most queries": {
        "score": Score.of(lambda s, b, h, q, k: fg.where(k > 3 * q, float("-inf"), s)),
        "mask": fg.window(-1, 30),
    },
    "far below": {"score": Score.of(lambda s, b, h, q, k: s - 500.0)},
}


@pytest.mark.parametrize("name", some(SCORES, *list(SCORES)[::2]))
def test_scores_may_be_hostile(name: str) -> None:
    """Of queries that do not exist, and of pairs that are forbidden, nothing is to be seen."""
    spec = fg.AttentionSpec(64, **SCORES[name])
    check(spec, expect(spec, Case("hostile", 70, 90, heads=2)))


# ---- Gradients of captured tensors


CAPTURED = [(64, "slopes"), (64, "bias"), (64, "sink"), (256, "slopes")]


@pytest.mark.parametrize(("dim", "name"), some(CAPTURED, (64, "bias"), (64, "sink"), (256, "slopes")))
def test_gradients_of_captured_tensors_come_with_the_others(dim: int, name: str) -> None:
    score = {"slopes": fg.alibi(SLOPES), "bias": fg.bias(BIAS[:, :, :70, :150]), "sink": fg.sink(LOGITS)}[name]
    spec = fg.AttentionSpec(dim, mask=fg.causal(), score=score)
    x = Case("captured", 70, 150, batch=2, heads=4, heads_kv=2).inputs(spec)
    kernel = built(spec)
    with launches(kernel, Mode(), "main") as done:
        o, lse = kernel(x.q, x.k, x.v)
        *plain, captured = kernel.backward(x.do, x.q, x.k, x.v, o, lse, captured_gradients=True)
    assert done == {NAME}
    exact = oracle.captured_gradients(spec, x.q, x.k, x.v, x.do)
    rounded = oracle.rounded_captured_gradients(spec, x.q, x.k, x.v, x.do)
    assert sorted(captured) == sorted(exact)
    for tensor, bound in oracle.captured_bounds(spec, x.q, x.k, x.v, x.do, exact=exact).items():
        assert oracle.check(captured[tensor], exact[tensor], bound).ok
        slope = oracle.pooled_slope([oracle.case_slope(captured[tensor], exact[tensor], bound, rounded[tensor])])
        assert slope is None or slope.ok, (tensor, slope)
    without = kernel.backward(x.do, x.q, x.k, x.v, o, lse)
    assert [a.tobytes() for a in plain[1:]] == [b.tobytes() for b in without[1:]]
