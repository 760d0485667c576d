"""Few new queries and a cache, by the decode kernel on the emulator."""

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
from tests.kernels.test_forward_sm90 import launches

pytestmark = pytest.mark.in_turns(12)

NAME = "Flash-Decoding"
EXAMPLES = {"sample": 4, "ci": 12, "nightly": 100}[LEVEL]
HEADS = 16
#: Which of the new tokens each new token attends to, as branches of a tree of guesses do.
BRANCHES = np.tril(np.random.default_rng(2).integers(0, 2, (64, 64)).astype(bool)) | np.eye(64, dtype=bool)
REACH = np.array([3, 50, 17, 400] * (HEADS // 4), np.int32)
PATTERN = np.random.default_rng(1).integers(0, 2, (1, 20)).astype(bool)
SLOPES, SINKS = np.linspace(0.01, 0.5, HEADS).astype(np.float32), np.linspace(-2, 2, HEADS).astype(np.float32)


def tree(b: Any, h: Any, q: Any, k: Any) -> Any:
    before = fg.k_len - fg.q_len
    return (k < before) | BRANCHES[q, fg.maximum(k - before, 0)]


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k >= fg.k_len - REACH[h]


def holes(b: Any, h: Any, q: Any, k: Any) -> Any:
    return PATTERN[0, k // 40 % 20]


MASKS = {
    "full": fg.full(),
    "causal": fg.causal(),
    "window": fg.window(150, 0),
    "chunks": fg.causal() & fg.chunked(130),
    "tree": fg.Mask.of(tree),
    "by head": fg.Mask.of(by_head),
    "holes": fg.Mask.of(holes),
}
SCORES = {
    "none": None,
    "cap": fg.softcap(5.0),
    "alibi": fg.alibi(SLOPES),
    "sink": fg.sink(SINKS),
    "cap and sink": fg.softcap(3.0) >> fg.sink(SINKS),
}


@dataclass(frozen=True)
class Call:
    """A cache, and who attends to it."""

    seqlens: tuple[int, ...]
    leftpad: int
    page_size: int
    queries: tuple[int, ...]
    heads_kv: int
    is_packed: bool
    splits: int
    batch_invariant: bool
    seed: int
    mode: Mode


MODES = [Mode(), Mode("random", 5), Mode(race=True), Mode("priority", 3, race=True)]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    count = draw(st.integers(1, 5))
    longest = draw(st.sampled_from([1, 1, 2, 5, 16]))
    queries = (longest, *draw(st.lists(st.integers(0, longest), min_size=count - 1, max_size=count - 1)))
    batch_invariant = draw(st.booleans())
    return Call(
        tuple(draw(st.lists(st.integers(0, 700), min_size=count, max_size=count))),
        draw(st.sampled_from([0, 0, 1, 37])),
        draw(st.sampled_from([1, 7, 16, 48, 64, 256])),
        queries,
        draw(st.sampled_from([1, 2, 4, 16])),
        draw(st.booleans()),
        0 if batch_invariant else draw(st.sampled_from([0, 0, 1, 3])),
        batch_invariant,
        draw(st.integers(0, 2**16)),
        draw(st.sampled_from(MODES)),
    )


def arrays_of(spec: fg.AttentionSpec, call: Call) -> tuple[Any, fg.KVCache, dict[str, Any]]:
    """Places that no sequence uses hold NaN, and the rest of the table numbers of pages that do not exist."""
    random = np.random.default_rng(call.seed)
    of_cache, batch = spec.cache_element.numpy(), len(call.seqlens)
    size = call.page_size if spec.cache == "paged" else max((*call.seqlens, 1)) + 5
    each = -(-max((*call.seqlens, 1)) // size)
    where = random.permutation(batch * each + 2)[: batch * each].reshape(batch, each).astype(np.int32)
    x: dict[str, Any] = {}
    for name, dim in (("k", spec.head_dim), ("v", spec.head_dim_v)):
        x[name] = np.full((batch * each + 2, size, call.heads_kv, dim), np.nan, of_cache)
        for b, length in enumerate(call.seqlens):
            values = random.standard_normal((length, call.heads_kv, dim)).astype(of_cache)
            place = np.arange(min(call.leftpad, length), length)
            x[name][where[b, place // size], place % size] = values[place]
    seqlens = np.array(call.seqlens, np.int32)
    leftpad = np.minimum(seqlens, call.leftpad).astype(np.int32) if call.leftpad else None
    shape = (sum(call.queries),) if call.is_packed else (batch, call.queries[0])
    q = random.standard_normal((*shape, HEADS, spec.head_dim)).astype(spec.element.numpy())
    more: dict[str, Any] = {"num_splits": call.splits, "batch_invariant": call.batch_invariant}
    if call.is_packed:
        starts = np.concatenate([[0], np.cumsum(call.queries)]).astype(np.int32)
        more |= {"cu_seqlens_q": starts, "max_seqlen_q": call.queries[0]}
    if spec.cache != "paged":
        return q, fg.KVCache(seqlens, where[:, 0], leftpad, **more), x
    for b, length in enumerate(call.seqlens):
        where[b, -(-length // size) :] = 2**31 - 1
    return q, fg.KVCache(seqlens, None, leftpad, where, **more), x


def of_one(cache: fg.KVCache, b: int) -> fg.KVCache:
    """The cache of one sequence alone, for queries that are not packed."""
    names = ("seqlens", "batch_idx", "leftpad", "block_table")
    own = {n: a[b : b + 1] for n in names if (a := getattr(cache, n)) is not None}
    return replace(cache, **own, cu_seqlens_q=None, max_seqlen_q=0)


def rows_of(call: Call, b: int) -> Any:
    """Which rows of packed queries, or of a batch, are those of a sequence."""
    first = sum(call.queries[:b])
    return slice(first, first + call.queries[b]) if call.is_packed else b


def run(kernel: fg.Kernel, spec: fg.AttentionSpec, call: Call) -> None:
    q, cache, x = arrays_of(spec, call)
    with launches(kernel, call.mode, "decode") as done:
        o, lse = kernel(q, x["k"], x["v"], cache=cache)
    assert done == {NAME}
    for b in range(len(call.seqlens)):
        rows = rows_of(call, b)
        exact, exact_lse = oracle.forward_cached(spec, q[rows][None], x["k"], x["v"], of_one(cache, b))
        np.testing.assert_allclose(o[rows].astype(np.float32), exact[0], atol=3e-3)
        np.testing.assert_allclose(lse[:, rows] if call.is_packed else lse[b], exact_lse[0], atol=2e-3)


DRAWN = [
    ("paged", "causal", "none", 128, 128, "sm_80"),
    ("contiguous", "window", "cap", 64, 64, "sm_90a"),
    ("paged", "tree", "sink", 80, 80, "sm_90a"),
    ("paged", "full", "none", 32, 32, "sm_90a"),
]
ALL = [
    ("paged", "full", "alibi", 96, 96, "sm_80"),
    ("paged", "window", "none", 256, 256, "sm_90a"),
    ("paged", "chunks", "cap and sink", 192, 128, "sm_80"),
    ("contiguous", "by head", "none", 64, 64, "sm_80"),
    ("paged", "holes", "sink", 64, 64, "sm_120"),
    ("contiguous", "causal", "none", 256, 256, "sm_120"),
    ("paged", "by head", "cap", 72, 40, "sm_80"),
    ("contiguous", "tree", "none", 20, 36, "sm_80"),
    ("contiguous", "full", "sink", 128, 128, "sm_90a"),
]


@pytest.mark.parametrize(("cache", "mask", "score", "dim", "dim_v", "arch"), some([*DRAWN, *ALL], *DRAWN))
def test_any_cache_gives_what_the_oracle_gives(
    cache: str, mask: str, score: str, dim: int, dim_v: int, arch: str
) -> None:
    spec = fg.AttentionSpec(
        dim,
        head_dim_v=dim_v,
        dtype="fp16",
        mask=MASKS[mask],
        score=SCORES[score],
        direction="forward",
        cache=cache,
    )
    kernel = fg.build(spec, arch=arch, target="emulator")

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(call=calls())
    def agrees(call: Call) -> None:
        run(kernel, spec, call)

    agrees()


def small_kernel(arch: str = "sm_80", **fields: Any) -> tuple[fg.AttentionSpec, fg.Kernel]:
    given: dict[str, Any] = {"dtype": "fp16", "mask": fg.causal(), "direction": "forward", "cache": "paged", **fields}
    spec = fg.AttentionSpec(32, **given)
    return spec, fg.build(spec, arch=arch, target="emulator")


def a_call(**fields: Any) -> Call:
    given: dict[str, Any] = {
        "seqlens": (300, 0, 700),
        "leftpad": 0,
        "page_size": 16,
        "queries": (2, 2, 2),
        "heads_kv": 2,
        "is_packed": False,
        "splits": 0,
        "batch_invariant": False,
        "seed": 3,
        "mode": Mode(),
    }
    return Call(**{**given, **fields})


def test_documents_of_captured_ids_are_told_apart() -> None:
    ids = np.repeat(np.sort(np.random.default_rng(0).integers(0, 9, (1, 704))).astype(np.int32), 3, 0)
    spec, kernel = small_kernel(mask=fg.Mask.of(lambda b, h, q, k: ids[b, k] == ids[b, q + 200]))
    run(kernel, spec, a_call(mode=Mode(race=True)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("splits", [0, 4])
def test_huge_logits_are_merged_exactly(splits: int, arch: str) -> None:
    spec, kernel = small_kernel(arch=arch)
    call = a_call(splits=splits)
    q, cache, x = arrays_of(spec, call)
    o, lse = kernel(q, x["k"], x["v"], cache=cache, scale=3e4)
    exact, exact_lse = oracle.forward_cached(spec, q, x["k"], x["v"], cache, scale=3e4)
    np.testing.assert_allclose(o.astype(np.float32), exact, atol=3e-3)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_element_reaches_only_rows_that_attend_to_it(name: str, value: float, arch: str) -> None:
    spec, kernel = small_kernel(arch=arch)
    call = a_call(queries=(3, 3, 3))
    q, cache, x = arrays_of(spec, call)
    expected, expected_lse = kernel(q, x["k"], x["v"], cache=cache)
    # The last key of the last sequence, which its last token alone attends to.
    page, place = divmod(call.seqlens[2] - 1, call.page_size)
    x[name][cache.block_table[2, page], place] = value
    o, lse = kernel(q, x["k"], x["v"], cache=cache)
    reached = np.zeros(o.shape[:2], bool)
    reached[2, 2] = True
    assert np.array_equal(o[~reached], expected[~reached])
    assert not np.isfinite(o[reached].astype(np.float32)).all(-1).any()
    assert np.array_equal(lse[:, :, :2], expected_lse[:, :, :2])


@pytest.mark.parametrize(("queries", "arch"), [(1, "sm_80"), (100, "sm_80"), (1, "sm_90a")])
def test_a_batch_invariant_result_has_the_same_bits_in_any_batch(queries: int, arch: str) -> None:
    spec, kernel = small_kernel(arch=arch)
    lengths = (9000, 60, 0, 4100) if queries == 1 else (700, 60, 0)
    call = a_call(seqlens=lengths, queries=(queries,) * len(lengths), heads_kv=16, batch_invariant=True)
    q, cache, x = arrays_of(spec, call)
    with launches(kernel, Mode(), "decode") as done:
        together = kernel(q, x["k"], x["v"], cache=cache)
    assert done == {NAME}
    for b in (0, len(lengths) - 1):
        alone = kernel(q[b : b + 1], x["k"], x["v"], cache=of_one(cache, b))
        assert all(np.array_equal(both[b], own[0]) for both, own in zip(together, alone, strict=True))
    # A wider table, other queries before it, and packed queries.
    wide = np.pad(cache.block_table[:1], ((0, 0), (0, 300)), constant_values=2**31 - 1)
    others = replace(of_one(cache, 0), block_table=wide)
    packed = replace(others, cu_seqlens_q=np.array([0, queries], np.int32), max_seqlen_q=queries)
    for found in (kernel(q[:1], x["k"], x["v"], cache=others), kernel(q[0], x["k"], x["v"], cache=packed)):
        assert np.array_equal(found[0].reshape(q[0].shape), together[0][0])


@pytest.mark.parametrize("cache_dtype", [None, "e4m3"])
def test_no_queries_launch_nothing(cache_dtype: str | None) -> None:
    spec, kernel = small_kernel(cache_dtype=cache_dtype)
    q, cache, x = arrays_of(spec, a_call(queries=(0, 0, 0)))
    o, lse = kernel(q, x["k"], x["v"], cache=cache)
    assert (o.size, lse.size) == (0, 0)


E4M3 = {"dtype": "e4m3", "cache_dtype": "e4m3"}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "one token": ({}, {}, "sm_80", "decode"),
    "one token, Hopper": ({}, {}, "sm_90a", "decode"),
    "63 tokens": ({}, {"queries": (63,) * 3}, "sm_80", "decode"),
    "64 tokens": ({}, {"queries": (64,) * 3}, "sm_80", "forward"),
    "64 tokens, Hopper": ({"head": 64}, {"queries": (64,) * 3}, "sm_90a", "prefill"),
    "64 e4m3 tokens, Hopper": ({"head": 64, **E4M3}, {"queries": (64,) * 3}, "sm_90a", "prefill"),
    "16 e4m3 tokens, Hopper": ({"head": 64, **E4M3}, {"queries": (16,) * 3}, "sm_90a", "decode"),
    "64 tokens and an 8-bit cache, Hopper": ({"cache_dtype": "e4m3"}, {"queries": (64,) * 3}, "sm_90a", "decode"),
    "a left pad, Hopper": ({}, {"leftpad": 5}, "sm_90a", "decode"),
    "a left pad and 64 tokens, Hopper": ({"head": 64}, {"leftpad": 5, "queries": (64,) * 3}, "sm_90a", "forward"),
    "pages of 12 keys, Hopper": ({"head": 64}, {"page_size": 12, "queries": (64,) * 3}, "sm_90a", "forward"),
    "batch-invariant": ({}, {"queries": (64,) * 3, "batch_invariant": True}, "sm_80", "decode"),
    "splits": ({}, {"splits": 3}, "sm_80", "decode"),
    "float32": ({"dtype": "fp32"}, {}, "sm_80", "forward"),
    "Turing": ({"mask": fg.full()}, {}, "sm_75", "forward"),
    "an odd head": ({"head": 33}, {}, "sm_80", "forward"),
    "a head of ten": ({"head": 10}, {}, "sm_80", "decode"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_number_of_new_tokens_decides_which_kernel_runs(name: str) -> None:
    fields, of_call, arch, role = CALLS[name]
    fields = {"dtype": "fp16", "mask": fg.causal(), "direction": "forward", "cache": "paged", **fields}
    spec = fg.AttentionSpec(fields.pop("head", 32), **fields)
    kernel = fg.build(spec, arch=arch, target="emulator")
    q, cache, x = arrays_of(spec, a_call(**of_call))
    target, steps = kernel.target, []
    launch = target.launch
    target.launch = lambda made, *rest: (steps.extend(made), launch(made, *rest))  # type: ignore[method-assign]
    kernel(q, x["k"], x["v"], cache=cache)
    # One launch is all, whatever number of blocks share the keys.
    (ran,) = (step.kernel.plan for step in steps if step.kernel.plan.role != "combine")
    assert ran.role == role
    assert role != "decode" or len(steps) == 1
    if of_call.keys() <= {"queries"}:
        explained = fg.explain(spec, q.shape[1], cache.block_table.shape[1] * 16, arch=arch).forward_kernel
        assert explained is not None
        assert explained.name == ran.name


@pytest.mark.parametrize(
    ("fields", "queries", "arch", "role"),
    [
        ({}, 3, "sm_80", "decode"),
        ({}, 3, "sm_90a", "decode"),
        ({"cache_dtype": "e4m3"}, 3, "sm_90a", "decode"),
        ({}, 70, "sm_90a", "prefill"),
        ({"dtype": "e4m3"}, 70, "sm_90a", "prefill"),
    ],
)
def test_pages_before_a_window_need_not_exist(fields: dict[str, Any], queries: int, arch: str, role: str) -> None:
    """The forward kernel reads them, where its first tile of keys begins before the window."""
    spec, kernel = small_kernel(mask=fg.window(100, 0), arch=arch, **fields)
    call = a_call(seqlens=(300, 90, 700), queries=(queries,) * 3)
    q, cache, x = arrays_of(spec, call)
    explained = fg.explain(spec, queries, 700, arch=arch).forward_kernel
    assert explained is not None
    assert explained.role == role
    expected = kernel(q, x["k"], x["v"], cache=cache)
    for b, length in enumerate(call.seqlens):
        first = max(length - queries - 100, 0)
        cache.block_table[b, : first // call.page_size] = 2**31 - 1
    assert (cache.block_table[:, 0] == 2**31 - 1).sum() == 2
    found = kernel(q, x["k"], x["v"], cache=cache)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_one_prepared_call_serves_other_lengths_and_pages() -> None:
    spec, kernel = small_kernel()
    first, second = a_call(), a_call(seqlens=(20, 700, 5), seed=4)
    results = []
    for call in (first, second, first):
        q, cache, x = arrays_of(spec, call)
        results.append(kernel(q, x["k"], x["v"], cache=cache))
        exact, _ = oracle.forward_cached(spec, q, x["k"], x["v"], cache)
        np.testing.assert_allclose(results[-1][0].astype(np.float32), exact, atol=3e-3)
    assert all(np.array_equal(a, b) for a, b in zip(results[0], results[2], strict=True))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch_invariant": 1}, "batch_invariant=1 is not a bool"),
        ({"batch_invariant": True, "num_splits": 2}, "num_splits=2 depends on the batch"),
    ],
)
def test_what_cannot_be_batch_invariant_is_refused(fields: Any, words: str) -> None:
    with pytest.raises(fg.ArgumentError, match=words):
        fg.KVCache(**fields)
