"""Caches of latent vectors on a GPU: against attention in float64, in CUDA graphs, and in any batch."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")

from flashgen.compat import flash_attn_interface as fa3  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

SCALE = 192**-0.5
SEQLENS = (9000, 3, 700, 0, 4096)
LONGEST, BATCH = max(SEQLENS), len(SEQLENS)
#: Rounding of P and of O, beside values of about 1.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Problem:
    """Pages of latent vectors in random order. What no sequence has is NaN."""

    def __init__(
        self, heads: int, tokens: int = 1, page: int = 64, dtype: Any = torch.bfloat16, dims: Any = (64, 512)
    ) -> None:
        torch.manual_seed(0)
        self.dim, self.dim_v = dims
        each = -(-LONGEST // page)
        self.table = torch.randperm(BATCH * each, device="cuda").view(BATCH, each).int()
        self.pages = torch.randn(BATCH * each, page, 1, sum(dims), device="cuda").to(dtype)
        for b, length in enumerate(SEQLENS):
            rows = self.pages[self.table[b].long()]
            rows.view(-1, sum(dims))[length:] = torch.nan
            self.pages[self.table[b].long()] = rows
        self.k, self.v = self.pages[..., self.dim_v :], self.pages[..., : self.dim_v]
        self.q = torch.randn(BATCH, tokens, heads, self.dim, device="cuda").to(dtype)
        self.qv = torch.randn(BATCH, tokens, heads, self.dim_v, device="cuda").to(dtype)
        self.lengths = torch.tensor(SEQLENS, dtype=torch.int32, device="cuda")

    def attend(self, rows: slice = slice(None), **options: Any) -> Any:
        """The function under test, for some sequences."""
        where = {"cache_seqlens": self.lengths[rows], "page_table": self.table[rows], "softmax_scale": SCALE}
        return fa3.flash_attn_with_kvcache(
            self.q[rows], self.k, self.v, qv=self.qv[rows], **where, causal=True, return_softmax_lse=True, **options
        )

    def expected(self) -> tuple[Any, Any]:
        """O and L in float64."""
        outs, lses = [], []
        for b, length in enumerate(self.lengths.tolist()):
            keys = self.pages[self.table[b].long()].flatten(0, 2)[:length].double()
            q = torch.cat([self.qv[b], self.q[b]], -1).double()
            scores = torch.einsum("qhd,kd->hqk", q, keys) * SCALE
            tokens = q.shape[0]
            last = length - tokens + torch.arange(tokens, device="cuda")
            scores.masked_fill_(torch.arange(length, device="cuda") > last[:, None], -torch.inf)
            p = scores.softmax(-1).nan_to_num(0.0)
            outs.append(torch.einsum("hqk,kd->qhd", p, keys[:, : self.dim_v]))
            lses.append(scores.logsumexp(-1))
        return torch.stack(outs), torch.stack(lses)


CASES = [
    (128, 1, 64, torch.bfloat16, (64, 512)),
    (16, 1, 64, torch.bfloat16, (64, 512)),
    (128, 2, 16, torch.float16, (64, 512)),
    (64, 5, 1, torch.bfloat16, (64, 512)),
    (32, 100, 64, torch.bfloat16, (64, 512)),
    (20, 3, 48, torch.float16, (32, 320)),
]


@pytest.mark.parametrize(("heads", "tokens", "page", "dtype", "dims"), CASES)
def test_attention_to_latent_vectors_is_that_of_float64(
    heads: int, tokens: int, page: int, dtype: Any, dims: tuple[int, int]
) -> None:
    at = Problem(heads, tokens, page, dtype, dims)
    exact, exact_lse = at.expected()
    for splits in (0, 1, 7):
        out, lse = at.attend(num_splits=splits)
        torch.testing.assert_close(out.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_replays_with_other_lengths_and_pages(heads: int) -> None:
    at = Problem(heads)
    at.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = at.attend()
    # Sequences change places.
    for x in (at.lengths, at.table, at.q, at.qv):
        x.copy_(x.flip(0).clone())
    graph.replay()
    exact, exact_lse = at.expected()
    torch.testing.assert_close(captured[0].double(), exact, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(captured[1].double(), exact_lse, atol=1e-3, rtol=1e-5)


def test_a_call_has_the_same_bits_again_and_a_batch_invariant_one_in_any_batch() -> None:
    at = Problem(128)
    first = at.attend()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, at.attend(), strict=True))
    together = at.attend(batch_invariant=True)
    for b in range(BATCH):
        alone = at.attend(slice(b, b + 1), batch_invariant=True)
        assert all(torch.equal(both[b], own[0]) for both, own in zip(together, alone, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_non_finite_value_reaches_only_tokens_that_attend_to_it(value: float) -> None:
    at = Problem(128, tokens=2)
    before, _ = at.attend()
    page, place = divmod(SEQLENS[0] - 1, 64)
    at.v[at.table[0, page], place, 0, 7] = value
    after, _ = at.attend()
    # The last token alone attends to the last key.
    assert torch.equal(after[1:], before[1:])
    assert torch.equal(after[0, 0], before[0, 0])
    assert not after[0, 1].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 3, 100])
def test_keys_that_lie_behind_one_another(tokens: int) -> None:
    at = Problem(16, tokens)
    exact, exact_lse = at.expected()
    rows = [at.pages[at.table[b].long()].flatten(0, 1)[:length] for b, length in enumerate(SEQLENS)]
    packed = torch.cat(rows)
    starts_q = torch.arange(BATCH + 1, dtype=torch.int32, device="cuda") * tokens
    starts_k = torch.tensor([0, *accumulate(SEQLENS)], dtype=torch.int32, device="cuda")
    given = at.q.flatten(0, 1), packed[..., at.dim_v :], packed[..., : at.dim_v]
    options: dict[str, Any] = {"softmax_scale": SCALE, "causal": True, "return_attn_probs": True}
    out, lse = fa3.flash_attn_varlen_func(
        *given, starts_q, starts_k, tokens, LONGEST, qv=at.qv.flatten(0, 1), **options
    )
    torch.testing.assert_close(out.double().unflatten(0, (BATCH, -1)), exact, atol=2e-2, rtol=2e-2)
    found = lse.double().unflatten(1, (BATCH, -1)).transpose(0, 1)
    torch.testing.assert_close(found, exact_lse, atol=1e-3, rtol=1e-5)
    # The longest sequence alone, as a batch of one.
    own = at.q[:1], *(x[None, : SEQLENS[0]] for x in given[1:])
    out, lse = fa3.flash_attn_func(*own, qv=at.qv[:1], **options)
    torch.testing.assert_close(out.double(), exact[:1], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), exact_lse[:1], atol=1e-3, rtol=1e-5)


def test_contiguous_caches_of_narrower_vectors() -> None:
    at = Problem(128, dims=(64, 448))
    exact, _ = at.expected()
    rows = at.pages[at.table.long()].flatten(1, 2)
    cache = fg.KVCache(at.lengths)
    k, v = rows[..., at.dim_v :], rows[..., : at.dim_v]
    out = fg.attention(at.q, k, v, qv=at.qv, mask=fg.causal(), cache=cache, scale=SCALE)
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
