"""Keys and values in a cache: what is put there, and what queries make of it, on the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen import oracle
from flashgen.verify import Mode, Tiles, draw, expect, modes, run_case

DIM = 10
PAGED = fg.AttentionSpec(DIM, dtype="fp32", mask=fg.causal(), direction="forward", cache="paged")
ROWS = fg.AttentionSpec(DIM, dtype="fp32", mask=fg.window(20, 3), direction="forward", cache="contiguous")
PLACES = ("seqlens", "batch_idx", "leftpad", "block_table")
TINY = fg.Schedule(tile_q=16, tile_kv=16, warps=fg.WarpPartition("split_q", 1))


def kernel_of(spec: fg.AttentionSpec) -> fg.Kernel:
    return fg.build(spec, TINY, arch="sm_80", target="emulator")


@dataclass(frozen=True)
class Call:
    """A cache, what comes into it, and who attends to it."""

    seqlens: tuple[int, ...]
    leftpad: tuple[int, ...]
    page_size: int
    room: int
    new: int
    queries: int
    heads: tuple[int, int]
    splits: int
    rotary_dim: int
    interleaved: bool
    one_position: bool
    seed: int
    mode: Mode


@st.composite
def calls(draw: st.DrawFn) -> Call:
    room, new = draw(st.integers(4, 70)), draw(st.integers(0, 20))
    seqlens = tuple(draw(st.lists(st.integers(0, room), min_size=1, max_size=3)))
    heads_kv = draw(st.integers(1, 2))
    return Call(
        seqlens,
        tuple(draw(st.integers(0, length)) for length in seqlens),
        draw(st.integers(1, 24)),
        room,
        new,
        draw(st.integers(1, 20)),
        (heads_kv * draw(st.integers(1, 2)), heads_kv),
        draw(st.integers(0, 5)),
        2 * draw(st.integers(0, DIM // 2)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
        Mode(
            draw(st.sampled_from(["sequential", "reverse", "random"])),
            draw(st.integers(0, 99)),
            draw(st.booleans()),
            draw(st.sampled_from(["end", "begin"])),
        ),
    )


def arrays_of(call: Call, *, paged: bool) -> tuple[fg.KVCache, dict[str, Any]]:
    """Places of all sequences, the rest of which hold NaN, and numbers of pages that are none."""
    random, batch = np.random.default_rng(call.seed), len(call.seqlens)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, dtype=np.float32)

    heads, heads_kv = call.heads
    x = {"q": normal(batch, call.queries, heads, DIM)}
    x |= {name: normal(batch, call.new, heads_kv, DIM) for name in ("k", "v")}
    seqlens, leftpad = (np.array(n, np.int32) for n in (call.seqlens, call.leftpad))
    each = -(-call.room // call.page_size) if paged else 1
    size = call.page_size if paged else call.room
    where = random.permutation(batch * each + 2)[: batch * each].reshape(batch, each).astype(np.int32)
    for name in ("k_cache", "v_cache"):
        x[name] = np.full((batch * each + 2, size, heads_kv, DIM), np.nan, np.float32)
        for b, length in enumerate(call.seqlens):
            for place in range(call.leftpad[b], length):
                x[name][where[b, place // size], place % size] = normal(heads_kv, DIM)
    if not paged:
        return fg.KVCache(seqlens, where[:, 0], leftpad, num_splits=call.splits), x
    for b, length in enumerate(call.seqlens):
        where[b, -(-(length + call.new) // size) :] = 2**31 - 1
    return fg.KVCache(seqlens, None, leftpad, where, num_splits=call.splits), x


def check(spec: fg.AttentionSpec, call: Call) -> None:
    cache, x = arrays_of(call, paged=spec.cache == "paged")
    kernel, before = kernel_of(spec), {name: x[name].copy() for name in ("k_cache", "v_cache")}
    rotary = None
    if call.rotary_dim:
        angles = np.random.default_rng(1).uniform(0, 7, (call.room + call.page_size, call.rotary_dim // 2))
        tables = (table.astype(np.float32) for table in (np.cos(angles), np.sin(angles)))
        rotary = fg.Rotary(*tables, call.interleaved, one_position=call.one_position)
    kernel.target.options = call.mode.options  # type: ignore[attr-defined]
    q = kernel.append(x["k_cache"], x["v_cache"], x["k"], x["v"], cache=cache, q=x["q"], rotary=rotary)
    attended = replace(cache, appended=call.new)
    o, lse = kernel(q, x["k_cache"], x["v_cache"], cache=attended)

    expected_q, expected_k = x["q"], x["k"]
    if rotary is not None:
        expected_q = oracle.turned(x["q"], cache, rotary, one_position=call.one_position)
        expected_k = oracle.turned(x["k"], cache, rotary)
    np.testing.assert_allclose(q, expected_q, atol=1e-6)
    for name, new in (("k_cache", expected_k), ("v_cache", x["v"])):
        np.testing.assert_allclose(x[name], oracle.appended(before[name], new, cache), atol=1e-6)
    exact, exact_lse = oracle.forward_cached(spec, q, x["k_cache"], x["v_cache"], attended)
    np.testing.assert_allclose(o, exact, atol=2e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=2e-5)


@pytest.mark.parametrize("spec", [PAGED, ROWS], ids=["paged", "contiguous"])
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(call=calls())
def test_any_cache_gives_what_the_oracle_gives_and_keeps_what_it_had(spec: fg.AttentionSpec, call: Call) -> None:
    check(spec, call)


SPECS = {
    "wide rows of a paged cache": (fg.AttentionSpec(40, dtype="fp16", direction="forward", cache="paged"), "sm_75"),
    "a score, a sink and holes": (
        fg.AttentionSpec(
            16,
            dtype="fp16",
            mask=fg.causal() & fg.chunked(24),
            score=fg.softcap(5.0) >> fg.sink(np.array([0.5, -0.5], np.float32)),
            direction="forward",
            cache="contiguous",
        ),
        "sm_80",
    ),
    "8-bit pages with scales of their own": (
        fg.AttentionSpec(
            24, mask=fg.causal(), direction="forward", cache="paged", cache_dtype="e4m3", page_scales=True
        ),
        "sm_80",
    ),
    "an 8-bit cache": (
        fg.AttentionSpec(
            32, dtype="fp16", mask=fg.window(40, 0), direction="forward", cache="contiguous", cache_dtype="e5m2"
        ),
        "sm_90a",
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_drawn_cases_are_within_their_bounds(name: str) -> None:
    spec, arch = SPECS[name]
    kernel = fg.build(spec, arch=arch, target="emulator")

    def run(q: Any, k: Any, v: Any, do: None, scale: float, **more: Any) -> Any:
        return kernel(q, k, v, scale=scale, **more)

    # A dozen have a long one, and one with a stride that 32 bits cannot hold.
    for index in range(12):
        case = draw(spec, Tiles(), 5, index)
        if spec.score is not None:
            case = replace(case, heads=2, heads_kv=1, batch=2, len_q=min(case.len_q, 40))
        expected = expect(spec, case, any_values=True)
        for mode in modes(5, index, schedules=1, race=index == 0):
            kernel.target.options = mode.options  # type: ignore[attr-defined]
            assert [str(r.describe()) for r in run_case(run, spec, expected) if not r.check.ok] == []


def test_splits_differ_by_rounding_alone_and_contain_non_finite_values() -> None:
    kernel, random = kernel_of(PAGED), np.random.default_rng(3)
    pages = [random.standard_normal((9, 7, 1, DIM), dtype=np.float32) for _ in range(2)]
    pages[1][4, 6] = np.nan  # key 13: the queries from the second on see it
    q, table = random.standard_normal((1, 20, 2, DIM), dtype=np.float32), np.arange(9, dtype=np.int32)[::-1][None]
    table = table[:, [8, 4, *range(2, 7)]]
    cache = fg.KVCache(np.array([32], np.int32), block_table=table)
    results = [kernel(q, *pages, cache=replace(cache, num_splits=n))[0] for n in (1, 2, 3, 100)]
    for found in results:
        assert not np.isnan(found[:, :1]).any()
        assert np.isnan(found[:, 1:]).all()
        np.testing.assert_allclose(found[:, :1], results[0][:, :1], atol=1e-6)


def test_a_length_beyond_the_cache_is_cut_there() -> None:
    kernel, random = kernel_of(ROWS), np.random.default_rng(4)
    caches = [random.standard_normal((2, 20, 1, DIM), dtype=np.float32) for _ in range(2)]
    q = random.standard_normal((2, 4, 1, DIM), dtype=np.float32)
    whole = kernel(q, *caches, cache=fg.KVCache())
    asked = fg.KVCache(np.array([10**6, 2**31 - 1], np.int32), appended=50)
    assert all(np.array_equal(a, b) for a, b in zip(kernel(q, *caches, cache=asked), whole, strict=True))
    empty = fg.KVCache(np.array([-5, 3], np.int32), leftpad=np.array([0, 9], np.int32))
    o, lse = kernel(q, *caches, cache=empty)
    assert not o.any()
    assert (lse == -np.inf).all()


def test_nothing_at_all_is_fine() -> None:
    kernel = kernel_of(ROWS)
    caches = [np.zeros((0, 20, 1, DIM), np.float32) for _ in range(2)]
    none = np.zeros((0, 3, 1, DIM), np.float32)
    cache = fg.KVCache(np.zeros(0, np.int32))
    assert kernel.append(*caches, none, none, cache=cache, q=none) is none
    assert [x.shape for x in kernel(none, *caches, cache=cache)] == [(0, 3, 1, DIM), (0, 1, 3)]


def complaint(name: str) -> tuple[Any, str]:
    """A call with one thing wrong, and what is said of it."""
    ints, floats = np.zeros(2, np.int32), np.zeros((2, 8, 1, DIM), np.float32)
    table = np.zeros((30, 3), np.float32)
    rows, paged = kernel_of(ROWS), kernel_of(PAGED)
    plain = fg.build(fg.AttentionSpec(DIM, dtype="fp32", direction="forward"), target="emulator")

    def attend(kernel: fg.Kernel, cache: Any, k: Any = floats) -> Any:
        return lambda: kernel(floats, k, k, cache=cache)

    def append(cache: fg.KVCache, new: Any = floats, **more: Any) -> Any:
        return lambda: rows.append(floats, floats, new, new, cache=cache, **more)

    here = fg.KVCache(ints)
    return {
        "no cache": (attend(rows, None), "pass cache=flashgen.KVCache"),
        "no table": (attend(paged, here), "block_table=None"),
        "a table": (attend(rows, fg.KVCache(ints, block_table=ints[None])), "is for kernels built with cache='paged'"),
        "a flat table": (
            attend(paged, fg.KVCache(ints, block_table=ints)),
            "pass a contiguous row of int32 page numbers",
        ),
        "long lengths": (
            attend(rows, fg.KVCache(np.zeros(2, np.int64))),
            "seqlens is int64 .* pass 2 contiguous int32",
        ),
        "lengths of three": (
            attend(rows, fg.KVCache(np.zeros(3, np.int32))),
            "of shape \\(3,\\); pass 2 contiguous int32",
        ),
        "too few rows": (attend(rows, here, floats[:1]), "k has 1 rows and q has batch 2"),
        "a kernel without": (attend(plain, here), "build one with cache='contiguous' or 'paged'"),
        "backward": (lambda: rows.backward(floats, floats, floats, floats, floats, floats), "has no backward pass"),
        "append to none": (lambda: plain.append(floats, floats, floats, floats, cache=here), "built without a cache"),
        "append nowhere": (append(fg.KVCache()), "pass how many keys it has"),
        "heads": (append(here, np.zeros((2, 8, 2, DIM), np.float32)), "k has 2 heads and k_cache has 1"),
        "three dimensions": (append(here, floats[0]), "k has shape .* must have 4 dimensions"),
        "half an angle": (append(here, rotary=fg.Rotary(table, table[:, :2])), "rotary.sin is fp32 of shape"),
        "many angles": (
            append(here, rotary=fg.Rotary(*[np.zeros((30, 6), np.float32)] * 2)),
            "which rotates 12 elements",
        ),
        "few positions": (append(here, rotary=fg.Rotary(table[:7], table[:7])), "has 7 positions"),
        "positions": (
            append(here, rotary=fg.Rotary(table, table, positions=table)),
            "rotary.positions is fp32",
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("no cache", "no table", "a table", "a flat table", "long lengths", "lengths of three", "too few rows"),
        *(
            "a kernel without",
            "backward",
            "append to none",
            "append nowhere",
            "heads",
            "three dimensions",
            "half an angle",
        ),
        *("many angles", "few positions", "positions"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(name: str) -> None:
    call, words = complaint(name)
    with pytest.raises(fg.FlashgenError, match=words):
        call()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_splits": 257}, "num_splits=257 is out of range"),
        ({"appended": -1}, "appended=-1 is out of range"),
        ({"appended": 3}, "say in seqlens"),
        ({"seqlens": np.ones(2, np.int32), "cu_seqlens_k": np.ones(3, np.int32)}, "pass one of them"),
    ],
)
def test_what_no_cache_can_be_is_refused(fields: Any, words: str) -> None:
    with pytest.raises(fg.ArgumentError, match=words):
        fg.KVCache(**fields)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("spec", [PAGED, ROWS], ids=["paged", "contiguous"])
def test_packed_queries_give_what_each_sequence_gives_alone(spec: fg.AttentionSpec, splits: int) -> None:
    call = Call((40, 0, 55), (3, 0, 0), 7, 60, 5, 20, (4, 2), splits, 0, False, False, 6, Mode(race=True))
    cache, x = arrays_of(call, paged=spec.cache == "paged")
    kernel = kernel_of(spec)
    kernel.target.options = call.mode.options  # type: ignore[attr-defined]
    kernel.append(x["k_cache"], x["v_cache"], x["k"], x["v"], cache=cache)
    cache = replace(cache, appended=call.new)
    starts = np.array([0, 17, 17, 37], np.int32)
    q = np.concatenate([x["q"][0, :17], x["q"][2]])
    packed = replace(cache, cu_seqlens_q=starts, max_seqlen_q=20)
    o, lse = kernel(q, x["k_cache"], x["v_cache"], cache=packed)
    assert (o.shape, lse.shape) == ((37, 4, DIM), (4, 37))
    for b, rows in ((0, slice(0, 17)), (2, slice(17, 37))):
        own = replace(cache, **{n: a[b : b + 1] for n in PLACES if (a := getattr(cache, n)) is not None})
        own_o, own_lse = kernel(q[None, rows], x["k_cache"], x["v_cache"], cache=own)
        assert np.array_equal(o[rows], own_o[0])
        assert np.array_equal(lse[:, rows], own_lse[0])
    with pytest.raises(fg.ArgumentError, match=r"the call has cache\.cu_seqlens_q and takes"):
        kernel(q[None], x["k_cache"], x["v_cache"], cache=packed)
    with pytest.raises(fg.ArgumentError, match="pass both, or neither"):
        fg.KVCache(cu_seqlens_q=starts)


@pytest.mark.parametrize("spec", [PAGED, ROWS], ids=["paged", "contiguous"])
def test_keys_may_be_counted_from_the_first_sequence_on(spec: fg.AttentionSpec) -> None:
    call = Call((40, 0, 55), (3, 0, 0), 7, 60, 5, 20, (4, 2), 1, 0, False, False, 6, Mode(race=True))
    cache, x = arrays_of(call, paged=spec.cache == "paged")
    kernel = kernel_of(spec)
    kernel.target.options = call.mode.options  # type: ignore[attr-defined]
    counted = np.concatenate([[0], np.cumsum(cache.seqlens)]).astype(np.int32)
    results = [
        kernel(x["q"], x["k_cache"], x["v_cache"], cache=replace(cache, **how))
        for how in ({}, {"seqlens": None, "cu_seqlens_k": counted})
    ]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
    wrong = replace(cache, seqlens=None, cu_seqlens_k=counted[1:])
    with pytest.raises(fg.ArgumentError, match=r"cache\.cu_seqlens_k is .* pass 4 contiguous int32"):
        kernel(x["q"], x["k_cache"], x["v_cache"], cache=wrong)
