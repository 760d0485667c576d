"""Two sequences in a cache of keys and values, and what attention to them is."""

from __future__ import annotations

from typing import Any

import torch


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


class Caches:
    """Two sequences: keys that were there and keys that come, in a cache with rows to spare or in pages."""

    def __init__(self, page_size: int | None = None, new: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=generator).half()

        self.q, self.k, self.v = normal(2, 3, 4, 16), normal(2, new, 2, 16), normal(2, new, 2, 16)
        self.cos, self.sin = normal(40, 4), normal(40, 4)
        self.seqlens, self.rows = ints(10, 25), ints(2, 0)
        shape = (3, 40, 2, 16) if page_size is None else (30, page_size, 2, 16)
        self.k_cache, self.v_cache, self.page_size = normal(*shape), normal(*shape), page_size
        each = 40 // (page_size or 40)
        self.table = torch.randperm(30, generator=generator)[: 2 * each].view(2, each).int()

    @property
    def places(self) -> dict[str, Any]:
        return {"cache_batch_idx": self.rows} if self.page_size is None else {"block_table": self.table}

    def keys(self, cache: Any) -> Any:
        """What a cache has of each sequence, (2, 40, 2, 16)."""
        at = self.rows if self.page_size is None else self.table
        return cache[at.long()].reshape(2, 40, 2, 16)

    def expected(self, k: Any, reference: Any, q: Any, mask: Any = None, lengths: Any = None) -> Any:
        """Attention in float64 to the keys of each sequence, and to k behind them."""
        found = []
        for b, length in enumerate(self.seqlens.tolist() if lengths is None else lengths):
            keys = torch.cat([self.keys(self.k_cache)[b, :length], k[b]])
            values = torch.cat([self.keys(self.v_cache)[b, :length], self.v[b, : len(k[b])]])
            allowed = None if mask is None else mask(q.shape[1], len(keys))
            found.append(reference(q[b : b + 1], keys[None], values[None], allowed))
        return [torch.cat(parts) for parts in zip(*found, strict=True)]


def causal(len_q: int, len_kv: int) -> Any:
    return torch.ones(len_q, len_kv, dtype=torch.bool).tril(len_kv - len_q)


def turned(x: Any, at: Caches, steps: Any, interleaved: bool) -> Any:
    """The first 8 elements turned in pairs, in float64."""
    positions = at.seqlens.long()[:, None] + steps
    cos, sin = at.cos.double()[positions][:, :, None], at.sin.double()[positions][:, :, None]
    x = x.double()
    a, b = (x[..., 0:8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
    pair = a * cos - b * sin, a * sin + b * cos
    first = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([first, x[..., 8:]], -1)
