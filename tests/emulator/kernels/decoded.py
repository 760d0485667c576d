"""``check_decoded``: few new queries attend to pages, by the decode kernel with or without bugs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flashgen import oracle
from flashgen.plan.model.plans import Role
from flashgen.spec import KVCache
from tests.emulator.kernels.cached import edited

Array = np.ndarray[Any, Any]
Edits = Mapping[Role, Callable[[str], str]]
#: Blocks share the first sequence's keys, and the second has none.
SEQLENS, LEFTPAD = (700, 0, 90, 330), (9, 0, 20, 0)
#: Maxima of different parts of the keys then differ by much.
QUERIES = 4.0
TOLERANCE = 1e-2
#: Where the kernel rounds P to e4m3, and values reach 16.
TOLERANCE_OF_E4M3 = 0.5


def check_decoded(case: Any, edits: Edits, *, data_seed: int = 0, at: str = "end", **options: Any) -> list[str]:
    """What is wrong after the decode kernel of a case, as it is edited."""
    kernel = edited(case, edits)
    kernel.target.options = {**options, "guard": at}  # type: ignore[attr-defined]
    kernel.target.multiprocessors = lambda _: case.multiprocessors  # type: ignore[attr-defined]
    x, cache = problem(case, data_seed)
    if case.spec.cache_dtype is not None and (wrong := appended_wrongly(kernel, case, x, cache)):
        return wrong
    more = {"qv": x.get("qv"), "q_scale": x.get("q_scale")}
    found = dict(zip(("o", "lse"), kernel(x["q"], x["k"], x["v"], cache=cache, **more), strict=True))
    made = oracle.forward_cached(case.spec, x["q"], x["k"], x["v"], cache, **more)
    exact = dict(zip(("o", "lse"), made, strict=True))
    return [
        name
        for name, value in found.items()
        if not np.allclose(
            value.astype(np.float32),
            exact[name],
            atol=TOLERANCE if case.len_q < 64 or name == "lse" else TOLERANCE_OF_E4M3,
            equal_nan=True,
        )
    ]


def appended_wrongly(kernel: Any, case: Any, x: dict[str, Array], cache: KVCache) -> list[str]:
    """Which of the caches is wrong after new keys and values took the place of the last one of each sequence."""
    random, element = np.random.default_rng(1), case.spec.element.numpy()
    # A sequence without keys counts as full, so that its new key is left out.
    places = replace(
        cache, seqlens=np.where(cache.seqlens > 0, cache.seqlens - 1, max(SEQLENS) + case.page_size).astype(np.int32)
    )
    shape = (len(SEQLENS), 1, case.heads_kv, case.spec.head_dim)
    new = [random.standard_normal(shape) * np.exp2(random.uniform(-9, 9, shape)) for _ in "kv"]
    k, v = (np.where(np.abs(values) > 1e-3, values, np.nan).astype(element) for values in new)
    exact = {}
    for name, values, scale in (("k", k, cache.k_scale), ("v", v, cache.v_scale)):
        exact[name] = oracle.appended(x[name], values, places, scale=scale, page_scales=case.spec.page_scales)
    before = {name: x[name].copy() for name in exact}
    kernel.append(x["k"], x["v"], k, v, cache=replace(places, leftpad=None))
    wrong = [name for name in exact if not np.array_equal(x[name].view(np.uint8), exact[name].view(np.uint8))]
    for name in exact:
        x[name][...] = before[name]
    return wrong


def problem(case: Any, seed: int) -> tuple[dict[str, Array], KVCache]:
    """Arrays of a call. What no sequence has is NaN, and beyond its length the table names pages that do not exist."""
    random, dtype, batch = np.random.default_rng(seed), case.spec.element.numpy(), len(SEQLENS)
    # With left pads in pages another kernel runs in place of Hopper's.
    pads = (0,) * batch if case.arch == "sm_90a" else LEFTPAD
    size = case.page_size
    pages = -(-max(SEQLENS) // size)
    table = random.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    q = random.standard_normal((batch, case.len_q, case.heads, case.spec.head_dim))
    x = {"q": (QUERIES * q).astype(dtype)}
    if case.spec.qv:
        qv = random.standard_normal((batch, case.len_q, case.heads, case.spec.head_dim_v))
        x["qv"] = (QUERIES * qv).astype(dtype)
    for name, dim in (("k", case.spec.head_dim), ("v", case.spec.head_dim_v)):
        x[name] = np.full((batch * pages, size, case.heads_kv, dim), np.nan, dtype)
        for b, length in enumerate(SEQLENS):
            place = np.arange(pads[b], length)
            values = random.standard_normal((len(place), case.heads_kv, dim)).astype(dtype)
            if name == "v" and case.infinite_value_from_end and len(values):
                # In the columns of all warpgroups.
                values[-case.infinite_value_from_end, :, 3::64] = np.nan
            x[name][table[b, place // size], place % size] = values
    for b, length in enumerate(SEQLENS):
        table[b, -(-length // size) :] = 2**31 - 1
    leftpad = np.array(pads, np.int32) if any(pads) else None
    cache = KVCache(np.array(SEQLENS, np.int32), None, leftpad, table, num_splits=case.splits)
    if case.spec.cache_dtype is None:
        return x, cache
    element, scales = case.spec.cache_element.numpy(), scales_of(case, batch * pages, random)
    for name, scale in scales.items():
        by_row = scale[:, None, :, None] if case.spec.page_scales else np.float32(1.0)
        values = x[name[0]].astype(np.float32)
        x[name[0]] = oracle.quantized(case.spec.cache_dtype, values, by_row).view(element)
    if case.spec.dtype == "e4m3":
        x["q_scale"] = np.exp2(random.uniform(-2, 2, (batch, case.heads))).astype(np.float32)
    else:
        # Heads have very different sizes.
        x["q"] = (x["q"] * np.exp2(np.arange(case.heads) % 5 * -9.0)[:, None]).astype(dtype)
    return x, replace(cache, **scales)


def scales_of(case: Any, pages: int, random: np.random.Generator) -> dict[str, Array]:
    """Scales of each page, or of each sequence, and head; those of even heads are powers of two, for ties."""
    shape = (pages if case.spec.page_scales else len(SEQLENS), case.heads_kv)
    exponents = {name: random.uniform(-2, 2, shape) for name in ("k_scale", "v_scale")}
    whole = np.arange(case.heads_kv) % 2 == 0
    return {name: np.exp2(np.where(whole, np.round(x), x)).astype(np.float32) for name, x in exponents.items()}
