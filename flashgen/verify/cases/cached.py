"""Cases with a cache: keys and values of a batch in a cache that is NaN elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.dtypes import CACHE_DTYPES
from flashgen.oracle import quantized, values_of
from flashgen.spec import AttentionSpec, KVCache
from flashgen.spec.attention import CacheKind
from flashgen.verify.cases.layouts import Layout, laid_out

_NAN = 0x7F
#: Scales of keys and of values, in turns.
_SCALES = np.array([[0.5, 1.0, 0.125], [0.25, 0.5, 1.0]], np.float32)
#: What a table of pages says where it says nothing.
_NO_PAGE = 2**31 - 1


def _places(rows: int, heads: int) -> NDArray[np.int64]:
    """Which of the scales each head of a sequence, or of a page, has."""
    return (np.arange(rows)[:, None] + np.arange(heads)) % 3


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
    #: Whether keys are split at fixed places; then ``splits`` is 0.
    batch_invariant: bool = False
    #: Of an 8-bit cache; None: the queries' dtype.
    dtype: str | None = None
    page_scales: bool = False

    @classmethod
    def of_spec(cls, spec: AttentionSpec, seed: int, batch: int, len_q: int, len_kv: int) -> Filling | None:
        """For a spec with a cache; None for others."""
        if spec.cache is None:
            return None
        drawn = cls.drawn(spec.cache, seed, batch, len_q, len_kv)
        return replace(drawn, dtype=spec.cache_dtype, page_scales=spec.page_scales)

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
        # By a generator of its own: cases keep all else that they had.
        fixed = Random(f"fixed {kind} {seed} {batch} {len_q} {len_kv}").random() < 0.25
        how = (0 if fixed else splits, fixed)
        if kind == "contiguous":
            return cls(used, tuple(leftpad), tuple(rows), None, longest, *how)
        size = random.choice((1, 3, 16, 64, 100))
        each = -(-longest // size)
        pages = random.sample(range((batch + 2) * each + 1), (batch + 2) * each)
        table = tuple(tuple(pages[row * each : (row + 1) * each]) for row in range(batch + 2))
        return cls(used, tuple(leftpad), tuple(rows), table, size, *how)

    def cache(self, heads_kv: int = 1) -> KVCache:
        """The arguments of a call."""
        ends = [length + pad for (_, length), pad in zip(self.used, self.leftpad, strict=True)]
        seqlens, leftpad, rows = (np.array(x, np.int32) for x in (ends, self.leftpad, self.rows))
        scales: dict[str, Any] = {}
        if self.dtype is not None:
            count = self._pages if self.page_scales else len(self.used)
            scales = {name: _SCALES[i][_places(count, heads_kv)] for i, name in enumerate(("k_scale", "v_scale"))}
        table, fixed = self._table(ends), self.batch_invariant
        return KVCache(seqlens, rows, leftpad, table, num_splits=self.splits, batch_invariant=fixed, **scales)

    def rounded(self, x: NDArray[Any], which: int) -> NDArray[Any]:
        """The keys (``which`` is 0) or values ``(B, S, H, D)`` that the cache holds of these."""
        if self.dtype is None:
            return x
        scales = self._scales(x, which)
        held = values_of(self.dtype)[quantized(self.dtype, x, scales)] * scales
        # Scales are powers of two, and any 8-bit number times one is a 16-bit number.
        return held.astype(np.float16 if x.dtype.itemsize == 1 else x.dtype)

    def fill(self, x: NDArray[Any], layout: Layout = "contiguous", which: int = 0) -> NDArray[Any]:
        """The keys or values ``(B, S, H, D)`` in the cache; its rows cannot all be the same one."""
        layout = "contiguous" if layout == "one-batch" else layout
        if self.dtype is None:
            return laid_out(self._placed(x), layout, x.dtype)
        codes = self._placed(quantized(self.dtype, x, self._scales(x, which)))
        element = CACHE_DTYPES[self.dtype].numpy()
        return laid_out(codes.view(element), layout, element)

    def _placed(self, x: NDArray[Any]) -> NDArray[Any]:
        count = len(self.rows) + 2 if self.pages is None else self._pages
        cache = np.full((count, self.size, *x.shape[2:]), _NAN if x.dtype == np.uint8 else np.nan, x.dtype)
        for b, ((_, length), pad, row) in enumerate(zip(self.used, self.leftpad, self.rows, strict=True)):
            for j in range(length):
                page, at = (row, pad + j) if self.pages is None else divmod(pad + j, self.size)
                cache[page if self.pages is None else self.pages[row][page], at] = x[b, j]
        return cache

    @property
    def _pages(self) -> int:
        return 1 + sum(map(len, self.pages or ()))

    def _scales(self, x: NDArray[Any], which: int) -> NDArray[np.float32]:
        """The scale of each key and head, (B, S, H, 1)."""
        batch, length, heads, _ = x.shape
        numbers = np.broadcast_to(np.arange(batch)[:, None], (batch, length)).copy()
        if self.page_scales and self.pages is not None:
            for b, ((_, used), pad, row) in enumerate(zip(self.used, self.leftpad, self.rows, strict=True)):
                numbers[b, :used] = [self.pages[row][(pad + j) // self.size] for j in range(used)]
        table = _SCALES[which][_places(int(numbers.max(initial=0)) + 1, heads)]
        scales: NDArray[np.float32] = table[numbers][..., None]
        return scales

    def _table(self, ends: list[int]) -> NDArray[np.int32] | None:
        if self.pages is None:
            return None
        width = len(self.pages[0])
        table = np.full((len(self.pages), width), _NO_PAGE, np.int32)
        for end, row in zip(ends, self.rows, strict=True):
            there = -(-end // self.size)
            table[row, :there] = self.pages[row][:there]
        return table
