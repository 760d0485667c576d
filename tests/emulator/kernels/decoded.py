"""``check_decoded``: few new queries attend to pages, by the decode kernel with or without bugs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
PAGE_SIZE = 7
#: Maxima of different parts of the keys then differ by much.
QUERIES = 4.0
TOLERANCE = 1e-2


def check_decoded(case: Any, edits: Edits, *, data_seed: int = 0, at: str = "end", **options: Any) -> list[str]:
    """What is wrong after the decode kernel of a case, as it is edited."""
    kernel = edited(case, edits)
    kernel.target.options = {**options, "guard": at}  # type: ignore[attr-defined]
    x, cache = problem(case, data_seed)
    found = dict(zip(("o", "lse"), kernel(x["q"], x["k"], x["v"], cache=cache), strict=True))
    exact = dict(zip(("o", "lse"), oracle.forward_cached(case.spec, x["q"], x["k"], x["v"], cache), strict=True))
    return [
        name
        for name, value in found.items()
        if not np.allclose(value.astype(np.float32), exact[name], atol=TOLERANCE, equal_nan=True)
    ]


def problem(case: Any, seed: int) -> tuple[dict[str, Array], KVCache]:
    """Arrays of a call. What no sequence has is NaN, and beyond its length the table names pages that do not exist."""
    random, dtype, batch = np.random.default_rng(seed), case.spec.element.numpy(), len(SEQLENS)
    pages = -(-max(SEQLENS) // PAGE_SIZE)
    table = random.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    q = random.standard_normal((batch, case.len_q, case.heads, case.spec.head_dim))
    x = {"q": (QUERIES * q).astype(dtype)}
    for name in ("k", "v"):
        x[name] = np.full((batch * pages, PAGE_SIZE, case.heads_kv, case.spec.head_dim), np.nan, dtype)
        for b, length in enumerate(SEQLENS):
            place = np.arange(LEFTPAD[b], length)
            values = random.standard_normal((len(place), case.heads_kv, case.spec.head_dim)).astype(dtype)
            if name == "v" and case.infinite_value_from_end and len(values):
                values[-case.infinite_value_from_end, :, 3] = np.nan
            x[name][table[b, place // PAGE_SIZE], place % PAGE_SIZE] = values
    for b, length in enumerate(SEQLENS):
        table[b, -(-length // PAGE_SIZE) :] = 2**31 - 1
    seqlens, leftpad = (np.array(n, np.int32) for n in (SEQLENS, LEFTPAD))
    return x, KVCache(seqlens, None, leftpad, table, num_splits=case.splits)
