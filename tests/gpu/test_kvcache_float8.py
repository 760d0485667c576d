"""Caches in float8 on a GPU: against the oracle, against 16-bit caches, and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
SEQLENS = (900, 3, 4000, 17)
BATCH, HEADS_KV = len(SEQLENS), 4


class Problem:
    """A cache filled by ``append`` alone, and a 16-bit one that holds the same numbers."""

    def __init__(self, dim: int, dtype: Any, kind: str, page_size: int | None, page_scales: bool) -> None:
        torch.manual_seed(0)
        size = page_size or 4100
        each = -(-4100 // size)
        shape = (BATCH * each, size, HEADS_KV, dim)
        self.caches = [torch.zeros(shape, device="cuda").to(FLOAT8[kind]) for _ in "kv"]
        self.table = None if page_size is None else torch.randperm(BATCH * each, device="cuda").view(BATCH, each).int()
        scales = (shape[0], HEADS_KV) if page_scales else (BATCH, HEADS_KV)
        self.scales = [(torch.rand(scales, device="cuda") + 0.5) * 4 / LARGEST[kind] for _ in "kv"]
        self.options = {"k_descale": self.scales[0], "v_descale": self.scales[1], "page_scales": page_scales}
        self.page_scales = page_scales
        self.new = [torch.randn(BATCH, max(SEQLENS), HEADS_KV, dim, device="cuda", dtype=dtype) for _ in "kv"]
        self.q = torch.randn(BATCH, 5, 16, dim, device="cuda", dtype=dtype)
        nothing = torch.zeros(BATCH, dtype=torch.int32, device="cuda")
        self.before = [cache.clone() for cache in self.caches]
        self.attend(self.q, *self.new, lengths=nothing)
        self.lengths = torch.tensor(SEQLENS, dtype=torch.int32, device="cuda")

    def attend(self, q: Any, k: Any = None, v: Any = None, *, lengths: Any, **options: Any) -> Any:
        where = {"cache_seqlens": lengths, "block_table": self.table}
        return fg.flash_attn_with_kvcache(q, *self.caches, k, v, **where, causal=True, **self.options, **options)

    def wide(self) -> list[Any]:
        """The numbers that the caches hold, in 16 bits."""
        found = []
        for cache, scale in zip(self.caches, self.scales, strict=True):
            of_pages = scale
            if self.table is not None and not self.page_scales:
                of_pages = torch.empty(cache.shape[0], HEADS_KV, device="cuda")
                of_pages[self.table.long()] = scale[:, None]
            found.append((cache.float() * of_pages[:, None, :, None]).to(self.q.dtype))
        return found


CASES = [
    (128, torch.bfloat16, "e4m3", 16, False),
    (128, torch.float16, "e4m3", 64, True),
    (64, torch.bfloat16, "e5m2", None, False),
    (256, torch.bfloat16, "e4m3", 16, True),
    (80, torch.float16, "e5m2", 7, True),
]


@pytest.mark.parametrize(("dim", "dtype", "kind", "page_size", "page_scales"), CASES)
def test_the_cache_holds_what_the_oracle_rounds_and_attention_is_that_to_it(
    dim: int, dtype: Any, kind: str, page_size: int | None, page_scales: bool
) -> None:
    at = Problem(dim, dtype, kind, page_size, page_scales)
    nothing = np.zeros(BATCH, np.int32)
    table = None if at.table is None else at.table.cpu().numpy()
    element = fg.AttentionSpec(dim, direction="forward", cache="paged", cache_dtype=kind).cache_element.numpy()
    for cache, before, new, scale in zip(at.caches, at.before, at.new, at.scales, strict=True):
        exact = oracle.appended(
            before.view(torch.uint8).cpu().numpy().view(element),
            new.float().cpu().numpy(),
            fg.KVCache(nothing, block_table=table),
            scale=scale.cpu().numpy(),
            page_scales=page_scales,
        )
        assert np.array_equal(cache.view(torch.uint8).cpu().numpy(), exact.view(np.uint8))
    out, lse = at.attend(at.q, lengths=at.lengths, return_softmax_lse=True)
    k, v = at.wide()
    where = {"cache_seqlens": at.lengths, "block_table": at.table}
    expected, expected_lse = fg.flash_attn_with_kvcache(at.q, k, v, **where, causal=True, return_softmax_lse=True)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", FLOAT8)
def test_every_code_of_a_value_reaches_the_result_exactly(kind: str) -> None:
    codes = torch.arange(256, device="cuda", dtype=torch.uint8).view(4, 1, 1, 64)
    q, k = torch.ones(4, 1, 1, 64, device="cuda").half(), torch.zeros_like(codes).view(FLOAT8[kind])
    out = fg.flash_attn_with_kvcache(q, k, codes.view(FLOAT8[kind]))
    expected = torch.from_numpy(oracle.values_of(kind)).half().cuda().view(out.shape)
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.equal(out.nan_to_num(nan=0.0, posinf=1e4), expected.nan_to_num(nan=0.0, posinf=1e4))


def test_a_graph_replays_with_other_scales_lengths_and_keys() -> None:
    at = Problem(128, torch.bfloat16, "e4m3", 16, False)
    k, v = (x[:, :1].contiguous() for x in at.new)
    lengths = torch.tensor([100, 3, 900, 17], dtype=torch.int32, device="cuda")
    at.attend(at.q[:, :1], k, v, lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = at.attend(at.q[:, :1], k, v, lengths=lengths)
    for factor in (1.0, 2.0):
        for scale in at.scales:
            scale.mul_(factor)
        lengths.add_(1)
        v.mul_(0.5)
        graph.replay()
        assert torch.equal(captured, at.attend(at.q[:, :1], k, v, lengths=lengths))


def test_the_same_bits_in_250_runs() -> None:
    at = Problem(128, torch.bfloat16, "e4m3", 16, True)
    first = at.attend(at.q, lengths=at.lengths)
    for _ in range(250):
        assert torch.equal(at.attend(at.q, lengths=at.lengths), first)
