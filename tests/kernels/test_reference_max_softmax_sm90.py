"""Values that a softmax without running maxima could go wrong on: Hopper's forward kernel on the emulator, for each
shape of its pipeline and both of its softmaxes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.plan import plan
from flashgen.spec import Score
from flashgen.verify import Case, Expectation, Inputs
from flashgen.verify.rounding import rounding_errors
from tests.drawn import LEVEL, diagonal, some
from tests.kernels.test_forward_sm90 import DTYPES, NAME, OTHER, Array, check, forward_spec

pytestmark = pytest.mark.in_turns(12)

#: Exponentials overlap the warpgroup's own products with two consumers, and others' with three.
WAYS = {
    "two consumers": (128, fg.Schedule()),
    "three consumers": (64, fg.Schedule()),
    "wide heads": (256, fg.Schedule()),
    "running maximum, three consumers": (64, fg.Schedule(softmax="running-max")),
    "running maximum, two consumers": (128, fg.Schedule(softmax="running-max")),
}
#: What of them a developer's run takes where a test has a kernel for each: with a reference maximum and without.
SOME_WAYS = some(WAYS, "two consumers", "running maximum, three consumers")
HOSTILE = (
    "4 times",
    "30 times",
    "400 times",
    "one huge key",
    "growing",
    "falling",
    "in steps",
    "heavy tails",
    "far below zero",
    "every key far below the first",
)
LEN_Q, LEN_KV = 140, 430


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
    elif name == "in steps":
        # By about as much as rows may grow without anything being done, so that what came before still counts or just
        # does not; each third row otherwise.
        q[..., 0], k[..., 0] = 16, -np.cumsum(random.uniform(0, 7, k.shape[:3]), axis=1) * root / 16
        q[:, ::3] *= 0.3
    elif name == "heavy tails":
        q, k = (np.clip(random.standard_cauchy(x.shape), -200, 200) for x in (q, k))
    elif name == "far below zero":
        q[..., 0], k[..., 0] = 16, -(2 + along) * root * 10
    elif name == "every key far below the first":
        # In the order in which tiles come: these begin with the last keys.
        q[..., 0], k[..., 0] = 16, -30 * root
        k[:, -40:, :, 0] = 30 * root
    return q, k, v


def sampled(name_at: int, way_at: int, *choices: Any) -> list[Any]:
    """What a hostile case is combined with: all; in a developer's run one of two for each way, which are built once for
    all cases; and in CI that one and another one for each case."""
    every = list(product(*choices))
    alone, another = 2 * way_at + name_at % 2, name_at + way_at
    numbers = {"sample": [alone], "ci": [alone, another]}.get(LEVEL, range(len(every)))
    return [every[n] for n in dict.fromkeys(number % len(every) for number in numbers)]


@pytest.mark.parametrize(("name", "way"), diagonal(HOSTILE, list(WAYS), step=2))
def test_logits_may_be_hostile(name: str, way: str) -> None:
    dim, schedule = WAYS[way]
    name_at, way_at = HOSTILE.index(name), list(WAYS).index(way)
    for dtype, mask in sampled(name_at, way_at, DTYPES, (fg.full(), fg.causal(), fg.window(100, 10))):
        spec = forward_spec(dim, dtype=dtype, mask=mask)
        values = hostile(name, dim, np.random.default_rng(name_at + way_at))
        check(spec, expected_of(spec, *values), schedule=schedule)


CAPS = np.array([30.0, 5.0], np.float32)
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
    # Of 32 columns some are where a tangent is a polynomial and others are not, or all are, from warp to warp.
    "about a third of the cap": {"mask": fg.causal(), "score": fg.softcap(12.0)},
    "infinite before a cap": {
        "score": Score.of(lambda s, b, h, q, k: fg.tanh(fg.where(k % 50 == 7, float("inf"), s) / 40.0) * 40.0),
    },
    "far below the cap but for a few": {"score": fg.softcap(60.0)},
    "beyond the cap from the first tile on": {"score": fg.softcap(0.5) >> fg.sink(np.array([0.5, -3.0], np.float32))},
    "falling to a cap of each head": {
        "mask": fg.window(200, 60),
        "score": Score.of(lambda s, b, h, q, k: -CAPS[h] * fg.tanh(0.05 * s)),
    },
    # Powers of the slope vanish, so that what is forbidden has to be so twice.
    "a cap beyond all logits": {"mask": fg.causal(), "score": fg.softcap(1e12)},
    # All rows settle, and find more in later tiles.
    "near the cap": {"mask": fg.window(400, 30), "score": fg.softcap(6.0)},
    "two caps": {"mask": fg.window(300, 0), "score": fg.softcap(9.0) >> fg.softcap(14.0)},
}


def crossed(name: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Each with each way, which is mostly a kernel of its own: a developer's run takes each value with one way."""
    return pytest.mark.parametrize((name, "way"), diagonal(list(values), list(WAYS), step=len(WAYS)))


@crossed("name", HOSTILE_SCORES)
def test_scores_may_be_hostile(name: str, way: str) -> None:
    dim, schedule = WAYS[way]
    for (dtype,) in sampled(list(HOSTILE_SCORES).index(name) // 2, list(WAYS).index(way), DTYPES):
        spec = forward_spec(dim, dtype=dtype, **HOSTILE_SCORES[name])
        values = hostile("4 times", dim, np.random.default_rng(7))
        check(spec, expected_of(spec, *values), schedule=schedule)


@pytest.mark.parametrize("way", SOME_WAYS)
def test_rows_may_have_no_key_in_the_first_tiles(way: str) -> None:
    dim, schedule = WAYS[way]
    spec = forward_spec(dim, mask=fg.Mask.of(lambda b, h, q, k: (k < 30) | ((q % 3 == 0) & (k < 300)) | (q % 7 == 0)))
    check(spec, expected_of(spec, *hostile("4 times", dim, np.random.default_rng(4))), schedule=schedule)


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


SLANTED_WAYS = list(zip(WAYS, [*SLANTED, "products"], strict=True))


@pytest.mark.parametrize(("way", "name"), some(SLANTED_WAYS, *SLANTED_WAYS[1:4]))
def test_scores_may_go_with_the_position(name: str, way: str) -> None:
    dim, schedule = WAYS[way]
    spec = forward_spec(dim, dtype="fp16", **SLANTED[name])
    form = plan(spec, schedule, "sm_90a").kernel("forward").score
    assert form is not None
    assert form.in_products == (name != "logits")
    values = hostile("4 times", dim, np.random.default_rng(11))
    check(spec, expected_of(spec, *values), schedule=schedule)


def test_a_scale_of_almost_nothing_is_no_divisor() -> None:
    spec = forward_spec(64, **SLANTED["products"])
    values = hostile("4 times", 64, np.random.default_rng(12))
    for scale, by in ((1e-29, NAME), (1e-31, OTHER)):
        check(spec, expected_of(spec, *values, scale=scale), by=by)


@crossed("kind", ["full", "masked", "below a cap", "below a low cap"])
def test_a_row_does_not_depend_on_others_of_its_warp(way: str, kind: str) -> None:
    """Bit for bit: another row may outgrow its reference maximum, and their tile be repeated. Under a cap tangents are
    rounded otherwise where others are far from zero. Here they are not."""
    dim, schedule = WAYS[way]
    cap = {"below a cap": 2e4, "below a low cap": 50.0}.get(kind)
    spec = forward_spec(
        dim, mask=fg.window(150, 30) if kind == "masked" else fg.full(), score=fg.softcap(cap) if cap else None
    )
    kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
    dtype = spec.element.numpy()
    is_low = kind == "below a low cap"
    q, k, v = hostile("1 times" if is_low else "heavy tails", dim, np.random.default_rng(3))
    arrays = [x.astype(dtype) for x in (np.clip(q, -2, 2), k, v)]
    plain = kernel(*arrays)
    # Of every second warp's sixteen rows one is changed, and of each of these another one.
    changed = np.arange(LEN_Q) % 37 == 5
    for wild in (-1.0, 0.0, np.nan) if is_low else (300.0, -300.0, 0.0, np.nan):
        other = arrays[0].copy()
        other[:, changed] = (arrays[0][:, changed].astype(np.float32) * wild).astype(dtype)
        out, lse = kernel(other, *arrays[1:])
        assert out[:, ~changed].tobytes() == plain[0][:, ~changed].tobytes()
        assert lse[:, :, ~changed].tobytes() == plain[1][:, :, ~changed].tobytes()
        assert out[:, changed].tobytes() != plain[0][:, changed].tobytes()


@crossed("cap", [30.0, 100.0, 400.0, 2000.0])
def test_rows_far_from_their_cap_are_exact_beside_others_near_it(cap: float, way: str) -> None:
    dim, schedule = WAYS[way]
    # Where rows have few keys nothing evens out what their logits are off by.
    for dtype, mask in sampled(int(cap) // 100, list(WAYS).index(way), DTYPES, (fg.window(1, 0), fg.causal())):
        spec = forward_spec(dim, dtype=dtype, mask=mask, score=fg.softcap(cap))
        q, k, v = hostile("1 times", dim, np.random.default_rng(int(cap)))
        q[:, 1::2] *= cap
        check(spec, expected_of(spec, q, k, v), schedule=schedule)


@crossed("cap", [50.0, 100.0, 400.0])
def test_rows_may_go_from_one_end_of_their_cap_to_the_other(cap: float, way: str) -> None:
    """Further than an exponential reaches, in either order of tiles and in a whole one as in one that is cut."""
    dim, schedule = WAYS[way]
    random, along = np.random.default_rng(int(cap)), np.arange(LEN_KV)
    for dtype, mask in sampled(int(cap) // 50, list(WAYS).index(way), DTYPES, (fg.full(), fg.causal())):
        spec = forward_spec(dim, dtype=dtype, mask=mask, score=fg.softcap(cap))
        q, k, v = hostile("1 times", dim, random)
        # Every third row stays where it was, and some come back.
        q[..., 0], q[:, ::3, :, 0] = 8, 0
        k[:, :, 0, 0], k[:, :, 1, 0] = (
            np.where(turned, 1, -1) * dim**0.5 * cap / 8 for turned in (along < 190, (along // 150) % 2 == 0)
        )
        check(spec, expected_of(spec, q, k, v), schedule=schedule)


@crossed("cap", [100.0, 400.0])
def test_rows_may_grow_on_towards_their_cap_further_than_an_exponential_reaches(cap: float, way: str) -> None:
    """Some rows go on to near the cap, others fall towards zero."""
    dim, schedule = WAYS[way]
    along = np.arange(LEN_KV)
    # In the order in which tiles come.
    share = np.select([along >= 256, along >= 128], [0.32, 0.36], 0.97)
    for (dtype,) in sampled(int(cap) // 100, list(WAYS).index(way), DTYPES):
        spec = forward_spec(dim, dtype=dtype, score=fg.softcap(cap))
        q, k, v = hostile("1 times", dim, np.random.default_rng(int(cap)))
        q[..., 0], k[..., 0] = 8, np.arctanh(share)[:, None] * dim**0.5 * cap / 8
        q[:, ::3, :, 1], k[..., 1] = 8, np.where(along < 128, -1.5, 0.0)[:, None] * dim**0.5 * cap / 8
        expected = expected_of(spec, q, k, v)
        check(spec, expected, schedule=schedule)
        # A key that is no number is in every row of its head.
        kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
        x = expected.inputs
        plain, _ = kernel(x.q, x.k, x.v)
        no_number = x.k.copy()
        no_number[0, 200, 0] = np.nan
        out, _ = kernel(x.q, no_number, x.v)
        assert np.isnan(out[:, :, 0].astype(np.float32)).all()
        assert out[:, :, 1].tobytes() == plain[:, :, 1].tobytes()


@crossed("cap", [None, 30.0, 50.0, 400.0])
def test_a_row_with_one_key_has_its_value_as_it_is(cap: float | None, way: str) -> None:
    """Its probability is 1: its reference maximum is a whole number of powers of two ahead."""
    dim, schedule = WAYS[way]
    spec = forward_spec(dim, mask=fg.causal(), score=fg.softcap(cap) if cap else None)
    kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
    random, dtype = np.random.default_rng(1), spec.element.numpy()
    for length in (1, 20, 40):
        q, k, v = (random.standard_normal((3, n, 4, dim)) for n in (length, 1, 1))
        out, _ = kernel((q * (cap or 1)).astype(dtype), k.astype(dtype), v.astype(dtype))
        assert out[:, -1].tobytes() == v[:, 0].astype(dtype).tobytes()


@pytest.mark.parametrize("way", SOME_WAYS)
def test_a_forbidden_key_has_no_say_in_how_others_are_capped(way: str) -> None:
    """Its logit may be far from zero, or none at all, and have its group's tangents computed in full."""
    dim, schedule = WAYS[way]
    spec = forward_spec(dim, mask=fg.Mask.of(lambda b, h, q, k: k != 200), score=fg.softcap(30.0))
    kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
    dtype = spec.element.numpy()
    q, k, v = (x.astype(dtype) for x in hostile("1 times", dim, np.random.default_rng(5)))
    plain = kernel(q, k, v)
    for wild in (0.0, 300.0, np.inf, np.nan):
        other = k.copy()
        other[:, 200] = wild
        for found, expected in zip(kernel(q, other, v), plain, strict=True):
            assert found.tobytes() == expected.tobytes()
