"""``check_cached``: new keys put into a cache and attended to in splits, by kernels with or without bugs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flashgen import oracle, pipeline
from flashgen.kernel import Kernel
from flashgen.plan import plan
from flashgen.plan.model.plans import Role
from flashgen.render import KernelSource
from flashgen.spec import KVCache, Rotary
from flashgen.verify.cases.layouts import laid_out

Array = np.ndarray[Any, Any]
Edits = Mapping[Role, Callable[[str], str]]
#: The second sequence has fewer keys than queries even then, and the third no room for all that come.
SEQLENS, LEFTPAD, NEW, SPLITS = (40, 0, 52), (9, 0, 20), 5, 3
PAGE_SIZE, PAGES = 7, 8
#: For logits so large that exp(L) of a split is infinity, where it is taken without its maximum.
QUERIES, TOLERANCE = 40.0, 2e-4


def check_cached(case: Any, edits: Edits, *, data_seed: int = 0, at: str = "end", **options: Any) -> list[str]:
    """What is wrong after all kernels of a case, as they are edited."""
    kernel = edited(case, edits)
    kernel.target.options = {**options, "guard": at}  # type: ignore[attr-defined]
    x, cache, rotary = problem(case, data_seed)
    before = {name: x[name].copy() for name in ("k_cache", "v_cache")}
    q = kernel.append(x["k_cache"], x["v_cache"], x["k"], x["v"], cache=cache, q=x["q"], rotary=rotary)
    attended = replace(cache, appended=NEW)
    if case.huge_stride:
        x |= {name: laid_out(x[name], case.huge_stride, x[name].dtype) for name in before}
    o, lse = kernel(q, x["k_cache"], x["v_cache"], cache=attended)
    k = oracle.turned(x["k"], cache, rotary)
    exact = dict(
        zip(("o", "lse"), oracle.forward_cached(case.spec, q, x["k_cache"], x["v_cache"], attended), strict=True)
    )
    exact |= {name: oracle.appended(before[name], new, cache) for name, new in (("k_cache", k), ("v_cache", x["v"]))}
    exact["q"] = oracle.turned(x["q"], cache, rotary)
    found = {"o": o, "lse": lse, "q": q, **{name: x[name] for name in before}}
    return [
        name for name, value in found.items() if not np.allclose(value, exact[name], atol=TOLERANCE, equal_nan=True)
    ]


def edited(case: Any, edits: Edits) -> Kernel:
    """The kernels with their sources edited."""
    variant = pipeline.variant(plan(case.spec, case.schedule, case.arch), "emulator")

    def edit(role: Role, loadable: Any) -> Any:
        source = loadable.source
        return loadable._replace(
            source=KernelSource(source.plan, edits[role](source.text)) if role in edits else source
        )

    kernels = {role: edit(role, loadable) for role, loadable in variant.kernels.items()}
    return Kernel(variant._replace(kernels=kernels), "emulator")


def problem(case: Any, seed: int) -> tuple[dict[str, Array], KVCache, Rotary]:
    """Arrays of a call. What no sequence has is NaN, and beyond its length the table names pages that are not there."""
    random, dim, batch = np.random.default_rng(seed), case.spec.head_dim, len(SEQLENS)

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, dtype=np.float32)

    table = random.permutation(batch * PAGES).reshape(batch, PAGES).astype(np.int32)
    x = {"q": QUERIES * normal(batch, case.len_q, case.heads, dim)}
    x |= {name: normal(batch, NEW, case.heads_kv, dim) for name in ("k", "v")}
    for name in ("k_cache", "v_cache"):
        x[name] = np.full((batch * PAGES, PAGE_SIZE, case.heads_kv, dim), np.nan, np.float32)
        for b, length in enumerate(SEQLENS):
            for place in range(LEFTPAD[b], length):
                x[name][table[b, place // PAGE_SIZE], place % PAGE_SIZE] = normal(case.heads_kv, dim)
    for b, length in enumerate(SEQLENS):
        table[b, -(-(length + NEW) // PAGE_SIZE) :] = 2**31 - 1
    angles = random.uniform(0, 7, (PAGES * PAGE_SIZE, dim // 4))
    tables = (angle.astype(np.float32) for angle in (np.cos(angles), np.sin(angles)))
    seqlens, leftpad = (np.array(n, np.int32) for n in (SEQLENS, LEFTPAD))
    return x, KVCache(seqlens, None, leftpad, table, num_splits=SPLITS), Rotary(*tables, interleaved=False)
