"""The backward kernels for Hopper on the emulator: gradients as near to the oracle's as every kernel's must be,
whatever they are given, and in whichever order their warps run.

Cases are drawn from a seed, the same in every run; DRAWN_CASES says how many, as for test_forward_sm90.py.
"""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.expr import log
from flashgen.launch.variants import SMALLEST_DIVISOR
from flashgen.plan.backward_sm90 import HEAD_DIMS
from flashgen.spec import Score
from flashgen.verify import Case, Expectation, Mode, expect, run_case
from flashgen.verify.trial import ORDERS
from tests.kernels.test_forward_sm90 import (
    CASES,
    IDS,
    LEVEL,
    LOGITS,
    LONGEST,
    NAME,
    OTHER,
    drawn_case,
    drawn_mode,
    launches,
)
from tests.kernels.test_forward_sm90 import SPECS as FORWARD_SPECS

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
#: A developer's run takes each of these for one width, which is another one for each.
DRAWN = [
    (dims, name)
    for number, name in enumerate(SPECS)
    for dims in (HEAD_DIMS if LEVEL != "sample" else [HEAD_DIMS[number % len(HEAD_DIMS)]])
]


def built(spec: fg.AttentionSpec, schedule: fg.Schedule | None = None) -> fg.Kernel:
    kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
    assert kernel.plan.kernel("main").algorithm == NAME
    return kernel


def check(spec: fg.AttentionSpec, expected: Expectation, mode: Mode = Mode(), by: str = NAME) -> None:  # noqa: B008
    """Both passes of one call, the backward one by that algorithm, within their bounds."""
    kernel = built(spec)

    def run(q: Any, k: Any, v: Any, do: Any, scale: float, captured: Any = None) -> Any:
        o, lse = kernel(q, k, v, scale=scale, captured=captured)
        return o, lse, *kernel.backward(do, q, k, v, o, lse, scale=scale, captured=captured)

    with launches(kernel, mode, "main") as done:
        results = run_case(run, spec, expected)
    assert done == {by} or not expected.case.len_kv
    wrong = [result.describe() for result in results if not result.check.ok]
    assert not wrong, (spec.describe(), mode, wrong)


# ---- Shapes, masks and orders


@pytest.mark.parametrize(("dims", "name"), DRAWN)
def test_gradients_are_within_their_bounds_and_nothing_is_found(dims: tuple[int, int], name: str) -> None:
    random = Random(f"{dims} {name}")
    for number in range(CASES):
        dtype = ("bf16", "fp16")[(HEAD_DIMS.index(dims) + list(SPECS).index(name) + number) % 2]
        spec = fg.AttentionSpec(dims[0], head_dim_v=dims[1], dtype=dtype, **SPECS[name])
        main = built(spec).plan.kernel("main")
        case = drawn_case(random, spec, int(main.constant("tile_q")), int(main.constant("tile_kv")))
        by = NAME if case.len_q else OTHER
        check(spec, expect(spec, case, any_values=True), drawn_mode(random), by)


#: A developer's run watches accesses where tiles are listed, and nowhere else.
WATCHED = [("causal", False), ("documents", True)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("name", "race"), WATCHED if LEVEL == "sample" else list(product(("causal", "documents"), (False, True)))
)
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("dims", "name"), [((256, 256), "causal"), ((192, 128), "documents")][: 1 if LEVEL == "sample" else 2]
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


@pytest.mark.parametrize(
    ("len_q", "len_kv"), [(1, 1), (1, 300), (300, 1), (0, 5), (5, 0), (193, 257), (257, 193), (64, 128), (129, 64)]
)
@pytest.mark.parametrize("name", ["causal", "top-left", "documents"])
def test_lengths_that_differ(name: str, len_q: int, len_kv: int) -> None:
    """With rows that attend to nothing, and tiles of keys that nobody attends to."""
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
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_heads_of_a_group_add_up_in_one_pass(name: str, group: int) -> None:
    spec = fg.AttentionSpec(64, dtype="fp16", **SPECS[name])
    case = Case("groups", 150, 130, heads=2 * group, heads_kv=2)
    check(spec, expect(spec, case, any_values=True), Mode("priority", group))


@pytest.mark.parametrize("layout", ["heads-first", "wide-rows", "unaligned", "reversed", "one-batch", "one-head"])
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_arrays_lie_as_they_please(name: str, layout: Any) -> None:
    """By these kernels, or by those for all GPUs where the copy engine does not take the strides."""
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


@pytest.mark.parametrize("fill", ["spread", "huge", "large_logits", "flat", "sparse"])
@pytest.mark.parametrize("dim", DIMS)
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


@pytest.mark.parametrize("name", SCORES)
def test_scores_may_be_hostile(name: str) -> None:
    """Of queries that do not exist, and of pairs that are forbidden, nothing is to be seen."""
    spec = fg.AttentionSpec(64, **SCORES[name])
    check(spec, expect(spec, Case("hostile", 70, 90, heads=2)))


# ---- Bad values


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_a_bad_value_stays_where_it_is_attended_to(dim: int, name: str) -> None:
    """NaN and infinities in V reach dQ of queries that may attend to their keys, and what these reach; no other bit."""
    spec = fg.AttentionSpec(dim, **SPECS[name])
    stays_where_it_is_attended_to(spec, "v", Mode("random", seed=dim), 200)


@pytest.mark.parametrize(
    ("dim", "name"), [(64, "causal"), (96, "window"), (128, "documents"), (192, "documents"), (256, "causal")]
)
def test_a_bad_key_stays_where_it_is_attended_to(dim: int, name: str) -> None:
    stays_where_it_is_attended_to(fg.AttentionSpec(dim, **SPECS[name]), "k", Mode("random", seed=dim), 130)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("name", ["top-left", "softcap, top-left", "holes"])
def test_a_bad_value_that_nobody_attends_to_is_not_seen(name: str, which: str) -> None:
    """Neither where a mask would allow queries beyond the last to attend to it."""
    fields = {"top-left": {"mask": fg.causal("top-left")}, "holes": {"mask": fg.causal("top-left") & fg.document(IDS)}}
    spec = fg.AttentionSpec(64, **fields.get(name, {"mask": fg.causal("top-left"), "score": fg.softcap(3.0)}))
    random = np.random.default_rng(5)
    x = {
        n: random.standard_normal((1, length, 1, 64)).astype(spec.element.numpy())
        for n, length in (("do", 70), ("q", 70), ("k", 120), ("v", 120))
    }
    captured = {n: np.zeros((1, 120), np.int32) for n in spec.tensors} or None
    x[which][:, 100, 0, 3] = np.nan
    kernel = built(spec)
    exact = oracle.backward(spec, x["q"], x["k"], x["v"], x["do"], captured=captured)
    for gradient, expected in zip(backward(kernel, x, captured), exact, strict=True):
        assert np.isfinite(expected).all()
        assert within_rounding(gradient, expected)


def test_nothing_of_a_bad_value_is_lost_where_probabilities_vanish() -> None:
    """Most are 0 in float32; times what is no number they are none either."""
    spec = fg.AttentionSpec(64, **SPECS["causal"])
    x = Case("vanishing", 100, 100, fill="huge").inputs(spec)
    x.v[:, 95, :, 3] = np.nan
    kernel = built(spec)
    arrays = (x.q, x.k, x.v)
    found = kernel.backward(x.do, *arrays, *kernel(*arrays))
    for gradient, expected in zip(found, oracle.backward(spec, *arrays, x.do), strict=True):
        assert (np.isfinite(gradient.astype(np.float64)) == np.isfinite(expected)).all()


@pytest.mark.parametrize(("dim", "role"), [(128, "main"), (256, "query")])
def test_a_bad_key_is_worked_on_without_a_race(dim: int, role: str) -> None:
    stays_where_it_is_attended_to(fg.AttentionSpec(dim, **SPECS["causal"]), "k", Mode(race=True), 60, role)


def stays_where_it_is_attended_to(
    spec: fg.AttentionSpec, which: str, mode: Mode, length: int, role: str = "main"
) -> None:
    kernel = built(spec)
    dtype, random = spec.element.numpy(), np.random.default_rng(5)
    x = {n: random.standard_normal((1, length, 2, spec.head_dim)).astype(dtype) for n in ("do", "q", "k", "v")}
    captured = {n: ids[:1, :length] for n, ids in spec.tensors.items()} or None
    clean = backward(kernel, x, captured)
    bad = {length // 3: np.nan, length // 2: np.inf}
    for key, value in bad.items():
        x[which][:, key, 0, 3] = value
    with launches(kernel, mode, role) as done:
        found = backward(kernel, x, captured)
    assert done == {NAME}
    allowed = oracle.Rules(spec, oracle.problem.read_problem(spec, x["q"], x["k"], x["v"])).allowed(0, 0)
    queries = allowed[:, list(bad)].any(axis=1)
    keys = allowed[queries].any(axis=0)
    assert queries.any()
    assert not queries.all()
    exact = oracle.backward(spec, x["q"], x["k"], x["v"], x["do"], captured=captured)
    for gradient, before, expected, reached in zip(found, clean, exact, (queries, keys, keys), strict=True):
        # The other head has nothing of it.
        assert within_rounding(gradient[:, :, 1], before[:, :, 1])
        assert within_rounding(gradient[:, ~reached, 0], before[:, ~reached, 0])
        assert (np.isfinite(gradient.astype(np.float64)) == np.isfinite(expected)).all()
    assert not np.isfinite(exact[0]).all()
    assert not np.isfinite(exact[1]).all()


def within_rounding(a: Any, b: Any) -> bool:
    """Tiles with bad keys are computed otherwise, and dQ is summed in any order."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(np.abs(a - b).max(initial=0.0) <= 0.02 * np.abs(b).max(initial=1.0))


def backward(kernel: fg.Kernel, x: dict[str, Any], captured: Any) -> Any:
    o, lse = kernel(x["q"], x["k"], x["v"], captured=captured)
    return kernel.backward(x["do"], x["q"], x["k"], x["v"], o, lse, captured=captured)


# ---- Gradients of captured tensors


@pytest.mark.parametrize(("dim", "name"), [(64, "slopes"), (64, "bias"), (64, "sink"), (256, "slopes")])
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
    assert sorted(captured) == sorted(exact)
    for tensor, bound in oracle.captured_bounds(spec, x.q, x.k, x.v, x.do, exact=exact).items():
        assert oracle.check(captured[tensor], exact[tensor], bound).ok
    without = kernel.backward(x.do, x.q, x.k, x.v, o, lse)
    assert [a.tobytes() for a in plain[1:]] == [b.tobytes() for b in without[1:]]
