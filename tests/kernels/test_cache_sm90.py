"""Many new queries and a cache, by Hopper's kernel on the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen import oracle
from flashgen.verify import Mode
from tests.drawn import some
from tests.kernels.test_forward_sm90 import launches

pytestmark = pytest.mark.in_turns(12)

SCORES = {
    "none": None,
    "cap": fg.softcap(5.0),
    "sink": fg.sink(np.array([0.5, -0.5, 1.0, 0.0], np.float32)),
}
MASKS = {
    "full": fg.full(),
    "causal": fg.causal(),
    "window": fg.window(40, 3),
    "chunks": fg.causal() & fg.chunked(24),
}


@dataclass(frozen=True)
class Call:
    """A cache, and who attends to it. Only the first sequences' queries count if they are packed."""

    seqlens: tuple[int, ...]
    leftpad: int
    page_size: int
    queries: tuple[int, ...]
    heads: tuple[int, int]
    is_packed: bool
    seed: int
    mode: Mode


@st.composite
def calls(draw: st.DrawFn, *, paged: bool) -> Call:
    count = draw(st.integers(1, 3))
    lengths = st.lists(st.integers(0, 300), min_size=count, max_size=count)
    return Call(
        tuple(draw(lengths)),
        0 if paged else draw(st.sampled_from([0, 0, 1, 37])),
        draw(st.sampled_from([8, 16, 24, 64, 128, 256])),
        # The longest sequence decides which kernel runs.
        (draw(st.integers(64, 200)), *draw(st.lists(st.integers(0, 200), min_size=count - 1, max_size=count - 1))),
        (4, draw(st.sampled_from([1, 2, 4]))),
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
        draw(st.sampled_from([Mode(), Mode("random", 5), Mode(race=True), Mode("priority", 3, race=True)])),
    )


def run(kernel: fg.Kernel, spec: fg.AttentionSpec, call: Call) -> None:
    """Places that no sequence uses hold NaN, and the rest of the table numbers of pages that do not exist."""
    random = np.random.default_rng(call.seed)
    dtype, batch, (heads, heads_kv) = spec.element.numpy(), len(call.seqlens), call.heads
    size = call.page_size if spec.cache == "paged" else max((*call.seqlens, 1)) + 5
    each = -(-max((*call.seqlens, 1)) // size)
    where = random.permutation(batch * each + 2)[: batch * each].reshape(batch, each).astype(np.int32)
    x: dict[str, Any] = {}
    for name, dim in (("k", spec.head_dim), ("v", spec.head_dim_v)):
        x[name] = np.full((batch * each + 2, size, heads_kv, dim), np.nan, dtype)
        for b, length in enumerate(call.seqlens):
            for place in range(min(call.leftpad, length), length):
                x[name][where[b, place // size], place % size] = random.standard_normal((heads_kv, dim))
    seqlens = np.array(call.seqlens, np.int32)
    leftpad = np.minimum(seqlens, call.leftpad).astype(np.int32) if call.leftpad else None
    longest = max(call.queries)
    lengths = call.queries if call.is_packed else (longest,) * batch
    shape = (sum(lengths),) if call.is_packed else (batch, longest)
    q = random.standard_normal((*shape, heads, spec.head_dim)).astype(dtype)
    more: dict[str, Any] = {}
    if call.is_packed:
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        more = {"cu_seqlens_q": starts, "max_seqlen_q": longest}
    if spec.cache == "paged":
        for b, length in enumerate(call.seqlens):
            where[b, -(-length // size) :] = 2**31 - 1
        cache = fg.KVCache(seqlens, None, leftpad, where, **more)
    else:
        cache = fg.KVCache(seqlens, where[:, 0], leftpad, **more)
    with launches(kernel, call.mode, "prefill") as done:
        o, lse = kernel(q, x["k"], x["v"], cache=cache)
    assert done == {"FlashAttention-3"}
    for b, queries in enumerate(lengths):
        first = int(sum(lengths[:b]))
        own = q[first : first + queries] if call.is_packed else q[b]
        place = {"block_table": where[b : b + 1]} if spec.cache == "paged" else {"batch_idx": where[b : b + 1, 0]}
        pad = None if leftpad is None else leftpad[b : b + 1]
        of_one = fg.KVCache(seqlens[b : b + 1], leftpad=pad, **place)
        exact, exact_lse = oracle.forward_cached(spec, own[None], x["k"], x["v"], of_one)
        found = o[first : first + queries] if call.is_packed else o[b]
        found_lse = lse[:, first : first + queries] if call.is_packed else lse[b]
        np.testing.assert_allclose(found.astype(np.float32), exact[0], atol=3e-3)
        np.testing.assert_allclose(found_lse, exact_lse[0], atol=2e-3)


DRAWN = [("paged", "causal", "none", 64), ("contiguous", "window", "cap", 128), ("paged", "chunks", "sink", 80)]
ALL = [(c, m, s, d) for c in ("paged", "contiguous") for m in MASKS for s in SCORES for d in (64, 80, 128)]


@pytest.mark.parametrize(
    ("cache", "mask", "score", "dim"), some([*DRAWN, *(case for case in ALL[::5] if case not in DRAWN)], *DRAWN)
)
def test_any_cache_gives_what_the_oracle_gives(cache: str, mask: str, score: str, dim: int) -> None:
    spec = fg.AttentionSpec(dim, dtype="fp16", mask=MASKS[mask], score=SCORES[score], direction="forward", cache=cache)
    kernel = fg.build(spec, arch="sm_90a", target="emulator")

    @settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(call=calls(paged=cache == "paged"))
    def agrees(call: Call) -> None:
        run(kernel, spec, call)

    agrees()
