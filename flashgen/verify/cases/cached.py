"""Cases with a cache: keys and values of a batch in a cache that is NaN elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.spec import KVCache
from flashgen.spec.attention import CacheKind
from flashgen.verify.cases.layouts import Layout, laid_out

#: What a table of pages says where it says nothing.
_NO_PAGE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Filling:
    """The keys of each sequence, and their places in the cache."""

    #: Queries and keys of each sequence.
    used: tuple[tuple[int, int], ...]
    #: Keys before them that are not there.
    leftpad: tuple[int, ...]
    #: Rows of the cache, or of the table of pages.
    rows: tuple[int, ...]
    #: Pages of each row in their order; none for a contiguous cache.
    pages: tuple[tuple[int, ...], ...] | None
    #: Keys of a page, or that a row has room for.
    size: int
    splits: int

    @classmethod
    def drawn(cls, kind: CacheKind, seed: int, batch: int, len_q: int, len_kv: int) -> Filling:
        """The first sequence has all keys, others any number."""
        random = Random(f"cached {kind} {seed} {batch} {len_q} {len_kv}")
        lengths = [len_kv if b == 0 else random.choice((len_kv, 0, random.randint(0, len_kv))) for b in range(batch)]
        leftpad = [random.choice((0, 0, random.randint(0, 20))) for _ in lengths]
        rows = random.sample(range(batch + 2), batch)
        splits = random.choice((0, 1, 2, 3, 7))
        longest = max((x + y for x, y in zip(lengths, leftpad, strict=True)), default=0) + random.randint(0, 9)
        used = tuple((len_q, length) for length in lengths)
        if kind == "contiguous":
            return cls(used, tuple(leftpad), tuple(rows), None, longest, splits)
        size = random.choice((1, 3, 16, 64, 100))
        each = -(-longest // size)
        pages = random.sample(range((batch + 2) * each + 1), (batch + 2) * each)
        table = tuple(tuple(pages[row * each : (row + 1) * each]) for row in range(batch + 2))
        return cls(used, tuple(leftpad), tuple(rows), table, size, splits)

    def cache(self) -> KVCache:
        """The arguments of a call."""
        ends = [length + pad for (_, length), pad in zip(self.used, self.leftpad, strict=True)]
        seqlens, leftpad, rows = (np.array(x, np.int32) for x in (ends, self.leftpad, self.rows))
        return KVCache(seqlens, rows, leftpad, self._table(ends), num_splits=self.splits)

    def fill(self, x: NDArray[Any], layout: Layout = "contiguous") -> NDArray[Any]:
        """The keys or values ``(B, S, H, D)`` in the cache; its rows cannot all be the same one."""
        count = len(self.rows) + 2 if self.pages is None else 1 + sum(map(len, self.pages))
        cache = np.full((count, self.size, *x.shape[2:]), np.nan, x.dtype)
        for b, ((_, length), pad, row) in enumerate(zip(self.used, self.leftpad, self.rows, strict=True)):
            for j in range(length):
                page, at = (row, pad + j) if self.pages is None else divmod(pad + j, self.size)
                cache[page if self.pages is None else self.pages[row][page], at] = x[b, j]
        return laid_out(cache, "contiguous" if layout == "one-batch" else layout, x.dtype)

    def _table(self, ends: list[int]) -> NDArray[np.int32] | None:
        if self.pages is None:
            return None
        width = len(self.pages[0])
        table = np.full((len(self.pages), width), _NO_PAGE, np.int32)
        for end, row in zip(ends, self.rows, strict=True):
            there = -(-end // self.size)
            table[row, :there] = self.pages[row][:there]
        return table
