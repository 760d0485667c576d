"""Few new queries and a cache of latent vectors, whose first columns are values and keys at once, on the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen import oracle
from flashgen.verify import Mode
from tests.drawn import LEVEL, some
from tests.kernels.test_decode import MODES, REACH, of_one
from tests.kernels.test_forward_sm90 import launches

pytestmark = pytest.mark.in_turns(12)

PLAIN = Mode()
NAME = "Flash-Decoding of latent attention"
EXAMPLES = {"sample": 4, "ci": 12, "nightly": 100}[LEVEL]
SINKS = np.linspace(-2, 2, 16).astype(np.float32)
MASKS = {
    "full": fg.full(),
    "causal": fg.causal(),
    "window": fg.window(150, 0),
    "chunks": fg.causal() & fg.chunked(130),
    "by head": fg.Mask.of(lambda b, h, q, k: k >= fg.k_len - REACH[h]),
}
SCORES = {"none": None, "cap and sink": fg.softcap(3.0) >> fg.sink(SINKS)}


@dataclass(frozen=True)
class Call:
    """A cache, and who attends to it."""

    seqlens: tuple[int, ...]
    page_size: int = 16
    queries: tuple[int, ...] = (1, 1, 1)
    heads: int = 16
    heads_kv: int = 1
    leftpad: int = 0
    is_packed: bool = False
    splits: int = 0
    batch_invariant: bool = False
    seed: int = 3
    mode: Mode = PLAIN


@st.composite
def calls(draw: st.DrawFn) -> Call:
    count = draw(st.integers(1, 4))
    longest = draw(st.sampled_from([1, 1, 2, 5, 16]))
    batch_invariant = draw(st.booleans())
    return Call(
        tuple(draw(st.lists(st.integers(0, 500), min_size=count, max_size=count))),
        draw(st.sampled_from([1, 7, 16, 48, 64, 256])),
        (longest, *draw(st.lists(st.integers(0, longest), min_size=count - 1, max_size=count - 1))),
        16,
        draw(st.sampled_from([1, 1, 2, 4])),
        draw(st.sampled_from([0, 0, 1, 37])),
        draw(st.booleans()),
        0 if batch_invariant else draw(st.sampled_from([0, 0, 1, 3])),
        batch_invariant,
        draw(st.integers(0, 2**16)),
        draw(st.sampled_from(MODES)),
    )


def latent_spec(dim: int = 64, dim_v: int = 512, **fields: Any) -> fg.AttentionSpec:
    given: dict[str, Any] = {"dtype": "fp16", "mask": fg.causal(), "cache": "paged", **fields}
    return fg.AttentionSpec(dim, head_dim_v=dim_v, qv=True, direction="forward", **given)


def arrays_of(spec: fg.AttentionSpec, call: Call) -> tuple[dict[str, Any], fg.KVCache]:
    """Keys and values are views of one buffer. What no sequence has is NaN, and no page of the table."""
    random, dtype, batch = np.random.default_rng(call.seed), spec.element.numpy(), len(call.seqlens)
    dim, dim_v = spec.head_dim, spec.head_dim_v
    size = call.page_size if spec.cache == "paged" else max((*call.seqlens, 1)) + 5
    each = -(-max((*call.seqlens, 1)) // size)
    where = random.permutation(batch * each + 2)[: batch * each].reshape(batch, each).astype(np.int32)
    latent = np.full((batch * each + 2, size, call.heads_kv, dim_v + dim), np.nan, dtype)
    for b, length in enumerate(call.seqlens):
        place = np.arange(min(call.leftpad, length), length)
        latent[where[b, place // size], place % size] = random.standard_normal((len(place), *latent.shape[2:]))
    shape = (sum(call.queries),) if call.is_packed else (batch, call.queries[0])
    x = {n: random.standard_normal((*shape, call.heads, d)).astype(dtype) for n, d in (("q", dim), ("qv", dim_v))}
    x |= {"k": latent[..., dim_v:], "v": latent[..., :dim_v]}
    seqlens = np.array(call.seqlens, np.int32)
    leftpad = np.minimum(seqlens, call.leftpad).astype(np.int32) if call.leftpad else None
    more: dict[str, Any] = {"num_splits": call.splits, "batch_invariant": call.batch_invariant}
    if call.is_packed:
        starts = np.concatenate([[0], np.cumsum(call.queries)]).astype(np.int32)
        more |= {"cu_seqlens_q": starts, "max_seqlen_q": call.queries[0]}
    if spec.cache != "paged":
        return x, fg.KVCache(seqlens, where[:, 0], leftpad, **more)
    for b, length in enumerate(call.seqlens):
        where[b, -(-length // size) :] = 2**31 - 1
    return x, fg.KVCache(seqlens, None, leftpad, where, **more)


def expected(spec: fg.AttentionSpec, call: Call, x: dict[str, Any], cache: fg.KVCache, b: int, **more: Any) -> Any:
    """O and L of a sequence, and which rows of the results are its own."""
    first = sum(call.queries[:b])
    rows = slice(first, first + call.queries[b]) if call.is_packed else b
    own = {name: x[name][rows][None] for name in ("q", "qv")}
    exact = oracle.forward_cached(spec, own["q"], x["k"], x["v"], of_one(cache, b), qv=own["qv"], **more)
    return exact[0][0], exact[1][0], rows


def run(kernel: fg.Kernel, spec: fg.AttentionSpec, call: Call, **more: Any) -> None:
    x, cache = arrays_of(spec, call)
    with launches(kernel, call.mode, "decode") as done:
        o, lse = kernel(x["q"], x["k"], x["v"], qv=x["qv"], cache=cache, **more)
    assert done <= {NAME}
    for b in range(len(call.seqlens)):
        exact, exact_lse, rows = expected(spec, call, x, cache, b, **more)
        np.testing.assert_allclose(o[rows].astype(np.float32), exact, atol=3e-3)
        np.testing.assert_allclose(lse[:, rows] if call.is_packed else lse[b], exact_lse, rtol=1e-5, atol=2e-3)


DRAWN = [
    ("paged", "causal", "none", 64, 512, "sm_90a"),
    ("contiguous", "window", "cap and sink", 64, 512, "sm_80"),
    ("paged", "by head", "none", 32, 256, "sm_120"),
]
ALL = [
    ("paged", "chunks", "none", 64, 512, "sm_120"),
    ("contiguous", "full", "none", 64, 64, "sm_90a"),
    ("paged", "window", "cap and sink", 16, 192, "sm_80"),
    ("paged", "full", "none", 48, 384, "sm_90a"),
    ("contiguous", "causal", "none", 64, 448, "sm_80"),
]


@pytest.mark.parametrize(("cache", "mask", "score", "dim", "dim_v", "arch"), some([*DRAWN, *ALL], *DRAWN))
def test_any_cache_gives_what_the_oracle_gives(
    cache: str, mask: str, score: str, dim: int, dim_v: int, arch: str
) -> None:
    spec = latent_spec(dim, dim_v, mask=MASKS[mask], score=SCORES[score], cache=cache)
    kernel = fg.build(spec, arch=arch, target="emulator")

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(call=calls())
    def agrees(call: Call) -> None:
        run(kernel, spec, call)

    agrees()


@pytest.fixture(scope="module", params=["sm_80", "sm_90a"])
def small(request: pytest.FixtureRequest) -> tuple[fg.AttentionSpec, fg.Kernel]:
    spec = latent_spec(32, 128)
    kernel = fg.build(spec, arch=request.param, target="emulator")
    assert bool(kernel.plan.forward.boxes) == (request.param == "sm_90a")
    # Several teams of blocks share the keys of a sequence.
    kernel.target.multiprocessors = lambda _: 9  # type: ignore[method-assign]
    return spec, kernel


#: Tiles of rows of a sequence: one, a team of two, of three, two rounds of a team with an idle block, and many.
TEAMS = {"64 heads": (1, 64), "128 heads": (1, 128), "two tokens": (2, 96), "five tiles": (5, 64), "long": (40, 64)}


@pytest.mark.parametrize("name", TEAMS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_blocks_of_a_team_share_the_keys(small: Any, name: str, batch_invariant: bool) -> None:
    tokens, heads = TEAMS[name]
    queries = (tokens, max(tokens - 3, 0), tokens)
    call = Call((700, 300, 65), queries=queries, heads=heads, is_packed=True, batch_invariant=batch_invariant)
    run(small[1], small[0], replace(call, mode=Mode("priority", 2, race=True)))


@pytest.mark.parametrize("splits", [0, 4])
def test_huge_logits_are_merged_exactly(small: Any, splits: int) -> None:
    run(small[1], small[0], Call((300, 0, 700), queries=(2, 2, 2), splits=splits), scale=3e4)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("mode", [Mode(), Mode(race=True)])
def test_a_non_finite_element_reaches_only_rows_that_attend_to_it(
    small: Any, name: str, value: float, mode: Mode
) -> None:
    spec, kernel = small
    call = Call((300, 0, 700), queries=(3, 3, 3), heads=32)
    x, cache = arrays_of(spec, call)
    expected_o, expected_lse = kernel(x["q"], x["k"], x["v"], qv=x["qv"], cache=cache)
    # The last key of the last sequence, which its last token alone attends to.
    page, place = divmod(call.seqlens[2] - 1, call.page_size)
    x[name][cache.block_table[2, page], place, 0, 5] = value
    with launches(kernel, mode, "decode"):
        o, lse = kernel(x["q"], x["k"], x["v"], qv=x["qv"], cache=cache)
    reached = np.zeros(o.shape[:2], bool)
    reached[2, 2] = True
    assert np.array_equal(o[~reached], expected_o[~reached])
    # A logit of minus infinity is one of a key that does not count.
    exact, _ = oracle.forward_cached(spec, x["q"], x["k"], x["v"], cache, qv=x["qv"])
    assert np.array_equal(np.isfinite(o.astype(np.float32)), np.isfinite(exact))
    assert not np.isfinite(exact[reached]).all()
    assert np.array_equal(lse[:, :, :2], expected_lse[:, :, :2])


def test_a_batch_invariant_result_has_the_same_bits_in_any_batch(small: Any) -> None:
    spec, kernel = small
    call = Call((4100, 60, 0, 1300), queries=(1,) * 4, heads=128, batch_invariant=True)
    x, cache = arrays_of(spec, call)
    together = kernel(x["q"], x["k"], x["v"], qv=x["qv"], cache=cache)
    for b in (0, 3):
        alone = kernel(x["q"][b : b + 1], x["k"], x["v"], qv=x["qv"][b : b + 1], cache=of_one(cache, b))
        assert all(np.array_equal(both[b], own[0]) for both, own in zip(together, alone, strict=True))


def test_equal_calls_give_equal_bits_in_any_order_of_threads(small: Any) -> None:
    spec, kernel = small
    x, cache = arrays_of(spec, Call((700, 65, 300), heads=128))
    results = []
    for mode in (Mode(), Mode("reverse"), Mode("random", 7)):
        with launches(kernel, mode, "decode"):
            results.append(kernel(x["q"], x["k"], x["v"], qv=x["qv"], cache=cache))
    assert all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_keys_and_values_that_are_no_views_of_one_buffer(small: Any) -> None:
    spec, kernel = small
    x, cache = arrays_of(spec, Call((90, 0, 33)))
    views = kernel(x["q"], x["k"], x["v"], qv=x["qv"], cache=cache)
    copies = kernel(x["q"], x["k"].copy(), x["v"].copy(), qv=x["qv"].copy(), cache=cache)
    assert all(np.array_equal(a, b) for a, b in zip(views, copies, strict=True))


def test_the_default_scale_counts_the_columns_of_both_products(small: Any) -> None:
    spec, kernel = small
    x, cache = arrays_of(spec, Call((90, 0, 33)))
    found = [kernel(x["q"], x["k"], x["v"], qv=x["qv"], cache=cache, scale=s) for s in (None, (32 + 128) ** -0.5)]
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def test_new_latent_vectors_are_put_behind_the_others_and_attended_to(small: Any) -> None:
    spec, kernel = small
    call = Call((90, 5, 33), queries=(2, 2, 2))
    x, cache = arrays_of(spec, call)
    cache = replace(cache, seqlens=cache.seqlens - 2)
    new = np.random.default_rng(1).standard_normal((3, 2, 1, 160)).astype(np.float16)
    kernel.append(x["k"], x["v"], new[..., 128:], new[..., :128], cache=cache)
    cache = replace(cache, appended=2)
    o, _ = kernel(x["q"], x["k"], x["v"], qv=x["qv"], cache=cache)
    exact, _ = oracle.forward_cached(spec, x["q"], x["k"], x["v"], cache, qv=x["qv"])
    np.testing.assert_allclose(o.astype(np.float32), exact, atol=3e-3)
    last = [divmod(n - 1, call.page_size) for n in call.seqlens]
    assert all(
        np.array_equal(x["v"][cache.block_table[b, page], at], new[b, 1, :, :128]) for b, (page, at) in enumerate(last)
    )


@pytest.mark.parametrize("access", [4, 8])
def test_less_aligned_queries_have_kernels_of_their_own(small: Any, access: int) -> None:
    spec, kernel = small
    x, cache = arrays_of(spec, Call((90, 0, 33)))
    wide = np.zeros((*x["q"].shape[:3], 32 + access // 2), np.float16)
    wide[..., access // 2 :] = x["q"]
    expected_o, _ = kernel(x["q"], x["k"], x["v"], qv=x["qv"], cache=cache)
    o, _ = kernel(wide[..., access // 2 :], x["k"], x["v"], qv=x["qv"], cache=cache)
    # Hopper's own kernel needs 16 bytes, and rounds P in other places.
    np.testing.assert_allclose(o.astype(np.float32), expected_o.astype(np.float32), atol=2e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qv": None}, r"qv=None, but this kernel was built with qv=True; pass .* \(batch, len_q, heads_q, 128\)"),
        ({"qv": np.zeros((3, 1, 16, 64), np.float16)}, r"qv has shape \(3, 1, 16, 64\); with this q it must be"),
        ({"qv": np.zeros((3, 1, 16, 128), np.float32)}, "qv is fp32, but this kernel was built for fp16"),
        ({"k": np.zeros((3, 16, 1, 31), np.float16)[..., 1:]}, "this kernel was built for head_dim=32"),
    ],
)
def test_what_does_not_fit_the_kernel_is_refused(small: Any, change: Any, words: str) -> None:
    spec, kernel = small
    x, cache = arrays_of(spec, Call((20, 0, 7)))
    x |= change
    with pytest.raises(fg.ArgumentError, match=words):
        kernel(x["q"], x["k"], x["v"], qv=x["qv"], cache=cache)


def test_other_kernels_take_no_qv() -> None:
    kernel = fg.build(fg.AttentionSpec(32, direction="forward", dtype="fp16"), target="emulator")
    x = np.zeros((1, 2, 1, 32), np.float16)
    with pytest.raises(fg.ArgumentError, match="qv was given, but this kernel was built without; build"):
        kernel(x, x, x, qv=x)
